"""From a root and a reader's name to batches of encoded images: what DALI pipelines are fed with.

:class:`ImageSource` is for ``fn.external_source`` in a pipeline of one's own. ImageNetDataset uses the same parts.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import torch

from monai_gds.errors import ImageListError
from monai_gds.imagenet.listing import ImageList, StrPath, check_classes, is_image, list_folder
from monai_gds.imagenet.packed import PackedImages, is_packed, open_packed
from monai_gds.imagenet.readers import Batch, FileReader, PackedReader, PlainReader, Reader
from monai_gds.imagenet.sampling import LastBatch, Sampler
from monai_gds.storage import open_storage, resolve_device

__all__ = ["READERS", "ImageSource", "open_images", "open_reader"]

#: Reader to storage backend; ``dali`` and ``python-file`` use none, ``packed`` means any backend over a packed folder.
READERS: Mapping[str, str | None] = {
    "auto": "auto",
    "dali": None,
    "python-file": None,
    "posix": "posix",
    "kvikio": "kvikio",
    "deepnvme": "deepnvme",
    "deepnvme-gds": "deepnvme-gds",
    "xnvme-file": "xnvme",
    "xnvme-block": "xnvme-block",
    "xnvme-gds": "xnvme-block",  # what the comparison of DALI and xNVMe calls it
    "packed": "auto",
}

#: What an ImageSource's images can be.
Images: TypeAlias = "ImageList | PackedImages"


def open_images(root: StrPath) -> ImageList | PackedImages:
    """Lists the images of an image folder, a packed folder or a block map (a JSON file).

    Args:
        root: its path.

    Raises:
        ImageListError: none of these, or one that cannot be used.
        OSError: it cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.imagenet.synthetic import write_image_folder
        >>> folder = write_image_folder(Path("images"), 3)  # made up, in ImageNet's layout
        >>> found = open_images(folder)
        >>> len(found), list(found.classes)
        (3, ['n01440764'])
    """
    if os.path.isfile(root):
        return list_block_map(root)
    return open_packed(root) if is_packed(root) else list_folder(root)


def list_block_map(file: StrPath) -> ImageList:
    """Lists the images that a block map holds, as :func:`list_folder` lists those of the folder it was built from.

    Raises:
        ImageListError: it is no block map, or holds no image below ``<root>/<class>/``.
    """
    try:
        with open(file, "rb") as f:
            entries = json.load(f)
        header = entries.pop("__blockmap__", {})
        sizes = {path: _size(entry, header.get("block_size", 512)) for path, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ImageListError(f"{os.fspath(file)!r} is no block map: {e!r}") from e
    found = {}
    for path, size in sizes.items():
        parts = PurePosixPath(path).parts
        if len(parts) == 3 and is_image(parts[2]):
            found[os.fsencode(parts[1]), os.fsencode(parts[2])] = (parts[0], size)
    if len({root for root, _ in found.values()}) > 1:
        raise ImageListError(f"{os.fspath(file)!r} maps more than one folder: build a map of one")
    folders = header.get("folders", [])
    names = {name for name, _ in found} | {os.fsencode(PurePosixPath(f).name) for f in folders if f.count("/") == 1}
    classes = sorted(names)
    if not found:
        raise ImageListError(f"{os.fspath(file)!r} maps no image <root>/<class>/<file>")
    check_classes(len(classes), os.fspath(file))
    label = {name: i for i, name in enumerate(classes)}
    order = sorted(found)
    root = next(iter(found.values()))[0]
    return ImageList(
        root=f"{header['parent']}/{root}" if "parent" in header else root,
        classes=[os.fsdecode(name) for name in classes],
        names=[f"{os.fsdecode(name)}/{os.fsdecode(image)}" for name, image in order],
        labels=np.asarray([label[name] for name, _ in order], dtype=np.int32),
        sizes=np.asarray([found[key][1] for key in order], dtype=np.int64),
    )


def _size(entry: Mapping[str, Any], block: int) -> int:
    if "size" in entry:
        return int(entry["size"])
    return int(entry["endblock"] - entry["startblock"] + 1) * block  # a plain map: whole blocks


def open_reader(
    name: str, images: ImageList | PackedImages, device: torch.device, *, pinned: bool = False, window: int = 8,
    options: Mapping[str, Any] | None = None,
) -> Reader:  # fmt: skip
    """Opens a reader.

    Args:
        name: one of :data:`READERS` but ``dali``.
        images: what to read.
        device: where encoded images go.
        pinned: see FileReader.
        window: files of a packed folder that are read ahead.
        options: for the storage backend.

    Raises:
        BackendUnavailable: the reader's backend does not work here; the message says why and what to do.
        ValueError: no such reader, or one that cannot read these images.
    """
    check_reader(name, images)
    backend = READERS[name]
    if backend is None:
        return PlainReader(list_of(images), device)
    storage = open_storage(backend, device, **(options or {}))
    if isinstance(images, PackedImages):
        return PackedReader(images, storage, ahead=window, pinned=pinned)
    return FileReader(images, storage, pinned=pinned)


def check_reader(name: str, images: ImageList | PackedImages) -> None:
    """Refuses a reader that does not exist or does not suit the images.

    Raises:
        ValueError: says which would.
    """
    if name not in READERS:
        raise ValueError(f"reader={name!r} is not known; there are: {', '.join(READERS)}")
    if isinstance(images, PackedImages):
        if READERS[name] is not None:
            return
        raise ValueError(f"reader={name!r} reads single files, and {images.images.root} is packed: use reader='packed'")
    if name == "packed":
        root = images.root
        raise ValueError(f"reader='packed', but {root} is not packed: run `monai-gds pack {root} OUT` and name OUT")


def list_of(images: ImageList | PackedImages) -> ImageList:
    """The list of images, packed or not."""
    return images.images if isinstance(images, PackedImages) else images


def make_sampler(
    images: ImageList | PackedImages, batch_size: int, *, shuffle: bool, seed: int, shard_id: int, num_shards: int,
    last_batch: LastBatch, window: int,
) -> Sampler:  # fmt: skip
    """The sampler for these images: with ``shuffle``, a packed folder's stay within windows of files."""
    bounds = images.bounds if isinstance(images, PackedImages) else None
    count = len(list_of(images))
    return Sampler(count, batch_size, shuffle, seed, shard_id, num_shards, last_batch, bounds, window)


class ImageSource:
    """Batches of encoded images and their labels, for ``fn.external_source`` in a DALI pipeline of one's own.

    Each ``iter()`` begins a new epoch; ``cycle="raise"`` makes DALI do that. Every batch has memory of its own, which
    is kept for ``keep`` more batches: with ``no_copy=True`` DALI reads from it until the batch's outputs are there.

    Args:
        root: an image folder, a packed folder or a block map.
        batch_size: images a batch.
        reader: see :data:`READERS`; not ``dali``.
        device: where the encoded images go, which is also what ``fn.external_source(device=…)`` must be told; decoders
            want them on the CPU.
        shuffle, seed, shard_id, num_shards, last_batch, window: see :class:`~monai_gds.imagenet.sampling.Sampler`.
        keep: batches; at least DALI's ``prefetch_queue_depth`` + 1.
        storage_options: for the storage backend.

    Raises:
        BackendUnavailable, ImageListError, ValueError: see :func:`open_reader`, :func:`open_images` and Sampler.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.imagenet.synthetic import write_image_folder
        >>> folder = write_image_folder(Path("images"), 3)  # made up, in ImageNet's layout
        >>> from nvidia.dali import fn, pipeline_def
        >>> @pipeline_def(batch_size=3, num_threads=1, device_id=None)  # device_id=0 and device="mixed" with a GPU
        ... def pipeline(source):
        ...     jpegs, labels = fn.external_source(source, num_outputs=2, cycle="raise")
        ...     return fn.resize(fn.decoders.image(jpegs, device="cpu"), size=(224, 224)), labels
        >>> images, labels = pipeline(ImageSource(folder, 3)).run()
        >>> images.as_array().shape
        (3, 224, 224, 3)
    """

    def __init__(
        self,
        root: StrPath,
        batch_size: int,
        reader: str = "auto",
        device: int | str | torch.device = "cpu",
        *,
        shuffle: bool = False,
        seed: int = 0,
        shard_id: int = 0,
        num_shards: int = 1,
        last_batch: LastBatch = "partial",
        window: int = 8,
        keep: int = 8,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if reader == "dali":
            raise ValueError("reader='dali' is fn.readers.file itself, which needs no source")
        images = open_images(root)
        self.images = list_of(images)
        self._sampler = make_sampler(
            images, batch_size, shuffle=shuffle, seed=seed, shard_id=shard_id, num_shards=num_shards,
            last_batch=last_batch, window=window,
        )  # fmt: skip
        self._target = resolve_device(device)
        self._reader = open_reader(reader, images, self._target, window=window, options=storage_options)
        self._keep = keep
        self._epoch = 0

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[list[Any], Any]]:
        """One epoch.

        Yields:
            ``(images, labels)``: 1-D uint8 arrays, and int32 (batch, 1); NumPy on the CPU, torch on a CUDA device.
        """
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._batches(epoch)

    def _batches(self, epoch: int) -> Iterator[tuple[list[Any], Any]]:
        kept: deque[tuple[Batch, Any]] = deque(maxlen=self._keep)
        for batch in self._reader.read(self._sampler.epoch(epoch)):
            labels: Any = batch.labels[:, None]
            if self._target.type == "cuda":  # DALI takes all outputs of a source from one kind of memory
                labels = torch.from_numpy(labels).to(self._target)
            kept.append((batch, labels))
            yield arrays_of(batch), labels

    def close(self) -> None:
        """Frees threads and memory."""
        self._reader.close()


def arrays_of(batch: Batch) -> list[Any]:
    """A batch's images as DALI takes them: NumPy arrays, or CUDA tensors."""
    if batch.images and batch.images[0].is_cuda:
        return list(batch.images)
    return [image.numpy() for image in batch.images]
