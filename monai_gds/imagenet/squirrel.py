"""Squirrel (https://github.com/merantix-momentum/squirrel-core): its drivers as sources, and stores made of images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from monai_gds.errors import BackendUnavailable, BrokenImage
from monai_gds.imagenet.listing import ImageList, StrPath
from monai_gds.imagenet.packed import empty_folder

__all__ = ["squirrel_source", "write_store"]

#: A driver (anything with ``get_iter``), a Composable, or a function that makes one.
Squirrel: TypeAlias = "Iterable[Any] | Callable[[], Iterable[Any]] | Any"


def squirrel_source(source: Squirrel, **options: Any) -> Iterable[Any]:
    """A Squirrel driver or stream as the source of :func:`~monai_gds.imagenet.iterable.dali_iterator`.

    Args:
        source: a driver, whose ``get_iter`` is called anew for every epoch; or a function that gives a Composable; or a
            Composable. Many Composables can be iterated only once: a second epoch then says so.
        options: for the driver's ``get_iter``, such as ``shuffle_key_buffer=10``.

    Raises:
        TypeError: options for something that is no driver.

    Example:
        >>> from squirrel.iterstream import IterableSource
        >>> from monai_gds.imagenet import dali_iterator
        >>> source = squirrel_source(lambda: IterableSource([{"label": i} for i in range(4)]))
        >>> [batch["label"].flatten().tolist() for batch in dali_iterator(source, batch_size=2, device="cpu")]
        [[0, 1], [2, 3]]
    """
    return _Source(source, options)


class _Source:
    def __init__(self, source: Squirrel, options: dict[str, Any]) -> None:
        if options and not hasattr(source, "get_iter"):
            raise TypeError(f"{', '.join(options)}: only a driver takes options, not a {type(source).__name__}")
        self._source = source
        self._options = options
        self._had_items = False

    def __iter__(self) -> Iterator[Any]:
        empty = True
        for item in self._open():
            empty = False
            yield item
        if empty and self._had_items:
            raise RuntimeError(
                "this Composable has nothing left for another epoch: give the driver, or a function that makes the "
                "Composable, such as lambda: driver.get_iter().map(…)"
            )
        self._had_items = not empty

    def _open(self) -> Iterable[Any]:
        if hasattr(self._source, "get_iter"):
            return self._source.get_iter(**self._options)  # type: ignore[no-any-return]
        return self._source() if callable(self._source) else self._source


def write_store(
    images: ImageList,
    out: StrPath,
    *,
    size: int = 300,
    shard_size: int = 1000,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a Messagepack store: samples ``{"image": uint8 (3, size, size), "label": int}``.

    Args:
        images: what to store; each is decoded, its shorter side brought to ``size``, and the middle cut out.
        out: a folder, made when it is missing; must be empty.
        size: in pixels.
        shard_size: samples a file.
        progress: called with the number of images stored so far.

    Raises:
        BackendUnavailable: squirrel-core or Pillow is not installed.
        BrokenImage: an image cannot be decoded.
        ImageListError: ``out`` is not empty, or a file.
    """
    try:
        from PIL import Image  # noqa: F401
        from squirrel.serialization import MessagepackSerializer
        from squirrel.store import SquirrelStore
    except ImportError as e:
        raise BackendUnavailable(
            f"a Squirrel store needs squirrel-core and Pillow ({e}): pip install 'monai_gds[squirrel]'"
        ) from e
    if size < 1 or shard_size < 1:
        raise ValueError(f"size={size} and shard_size={shard_size} must be positive")
    top = empty_folder(out)
    store = SquirrelStore(os.fspath(top), serializer=MessagepackSerializer())
    for start in range(0, len(images), shard_size):
        stop = min(start + shard_size, len(images))
        shard = [{"image": _pixels(images.path(i), size), "label": int(images.labels[i])} for i in range(start, stop)]
        store.set(shard, key=f"{start // shard_size:05d}")
        if progress is not None:
            progress(stop)


def _pixels(path: str, size: int) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except OSError as e:
        if isinstance(e, FileNotFoundError):
            raise
        raise BrokenImage(path, f"it cannot be decoded: {e}") from e
    return np.ascontiguousarray(np.asarray(fitted).transpose(2, 0, 1))
