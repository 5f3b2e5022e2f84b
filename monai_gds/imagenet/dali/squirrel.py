"""Squirrel (https://github.com/merantix-momentum/squirrel-core): its drivers as sources."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from monai_gds.errors import ImageListError
from monai_gds.imagenet.dali.iterable import Items


def squirrel_source(source: Any, **options: Any) -> Items:
    """A Squirrel driver or stream as the source of :func:`~monai_gds.imagenet.dali.iterable.dali_iterator`.

    Squirrel unpickles arrays of Python objects, so whoever wrote a Messagepack store can run code where it is read. If
    ``source`` is a driver, samples that hold such arrays are refused with ImageListError, and no code is run. Samples
    of a stream that you make yourself with ``driver.get_iter()`` are not checked: do that only for stores you trust.

    Args:
        source: a driver (anything with ``get_iter``, which is called for every epoch), a function that returns a
            Composable, or a Composable. Many Composables can be iterated only once.
        options: arguments of the driver's ``get_iter``, such as ``shuffle_key_buffer=10``.

    Raises:
        TypeError: ``options`` are given, and ``source`` is not a driver.

    Example:
        >>> from squirrel.iterstream import IterableSource
        >>> from monai_gds.imagenet import dali_iterator
        >>> source = squirrel_source(lambda: IterableSource([{"label": i} for i in range(4)]))
        >>> [batch["label"].flatten().tolist() for batch in dali_iterator(source, batch_size=2, device="cpu")]
        [[0, 1], [2, 3]]
    """
    if hasattr(source, "get_iter"):
        return partial(source.get_iter, **_without_objects(source, options))
    if options:
        raise TypeError(f"{', '.join(options)}: only a driver takes options, not a {type(source).__name__}")
    return source  # type: ignore[no-any-return]


def _without_objects(driver: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options; those of a Messagepack driver make it refuse arrays of Python objects."""
    try:
        from squirrel.serialization import MessagepackSerializer
    except ImportError:  # a driver of something else
        return options
    if not isinstance(getattr(driver, "serializer", None), MessagepackSerializer):
        return options
    given = dict(options.get("get_kwargs") or {})
    unpacker = {"object_hook": partial(_decode, getattr(driver, "url", "")), **(given.get("unpacker_kwargs") or {})}
    return {**options, "get_kwargs": {**given, "unpacker_kwargs": unpacker}}


def _decode(store: str, found: dict[Any, Any]) -> Any:
    """Decodes an array or number of a Messagepack store as Squirrel does, but refuses arrays of Python objects."""
    import msgpack_numpy

    decoded = None if found.get(b"kind") == b"O" else msgpack_numpy.decode(found)  # which would be unpickled
    if decoded is None or (isinstance(decoded, np.ndarray) and decoded.dtype.hasobject):
        raise ImageListError(
            f"a sample of the store {store} holds an array of Python objects, and reading it could run code that came "
            "with the store: write the store again with arrays of numbers; or, if you trust it, give "
            "squirrel_source(driver.get_iter) in place of the driver"
        )
    return decoded
