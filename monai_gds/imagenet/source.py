"""Opens images and a reader by name, and feeds DALI pipelines with batches of encoded images."""

from __future__ import annotations

import os
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from monai_gds.errors import ImageListError
from monai_gds.imagenet.files.image_storage import ImageStorage
from monai_gds.imagenet.files.listing import ImageList, StrPath, list_block_map, list_folder
from monai_gds.imagenet.files.named_files import labels_array, list_files, read_file_list
from monai_gds.imagenet.files.packed import PackedImages, is_packed, open_packed
from monai_gds.imagenet.files.sampling import LastBatch, Sampler
from monai_gds.imagenet.readers import Batch, FileReader, PackedReader, RangeReader
from monai_gds.storage import resolve_device
from monai_gds.storage.registry import backend_names, backend_options

if TYPE_CHECKING:
    from monai_gds.storage.blockmap.block_map import BlockMap

_PACKED = "packed"

#: Names of readers: ``auto``, the storage backends, and the one that ``auto`` chooses over a packed folder.
READERS = ("auto", *backend_names(), _PACKED)


def open_images(
    root: StrPath | BlockMap | None = None,
    *,
    file_list: StrPath | None = None,
    files: Sequence[StrPath] | None = None,
    labels: Sequence[int] | None = None,
) -> ImageList:
    """Lists the images of an image folder, a packed folder or a block map, or images by their paths.

    ``file_list``, ``files`` and ``labels`` are those of ``fn.readers.file``, and ``root`` is its ``file_root``.

    Args:
        root: a folder ``<root>/<class>/<file>``, whose labels are 0, 1, 2… in the order of the classes' names; a flat
            folder ``<root>/<file>``, whose labels are 0, 1, 2… in the order of the files' names, or ``labels``; a
            folder written by ``monai-gds pack``; or a block map of an image folder (a :class:`monai_gds.BlockMap`, or
            the JSON file of one). With ``file_list`` or ``files``, the folder that their paths are relative to. By
            default, that is the folder of the file list, or the current one.
        file_list: a text file with a line ``file label`` for each image.
        files: the path of each image.
        labels: the label of each of ``files``, or of the images of a flat folder in the order of their names. By
            default 0, 1, 2…

    Raises:
        ImageListError: ``root``, or the list, is none of these or cannot be used.
        OSError: it cannot be read.
        ValueError: these arguments do not go together.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.bench.made_up import write_image_folder
        >>> folder = write_image_folder(Path("images"), 3)  # made up, in ImageNet's layout
        >>> found = open_images(folder)
        >>> len(found), list(found.classes)
        (3, ['n01440764'])
        >>> found = open_images(folder / "n01440764", labels=[7, 7, 9])  # a flat folder
        >>> found.names[2], found.labels.tolist()
        ('n01440764_2.JPEG', [7, 7, 9])
    """
    if not (root is None or isinstance(root, (str, os.PathLike))):
        if file_list is not None or files is not None or labels is not None:
            raise ValueError("a block map has its own labels: leave file_list, files and labels out")
        return list_block_map(root)
    if file_list is not None and (files is not None or labels is not None):
        raise ValueError("file_list names files with their labels: leave files and labels out")
    if file_list is not None:
        return read_file_list(file_list, root)
    if files is not None:
        return list_files(files, labels, root or "")
    if root is None:
        raise ValueError("name the images: by root, file_list or files")
    if os.path.isfile(root):
        images = list_block_map(root)
    else:
        images = open_packed(root) if is_packed(root) else list_folder(root)
    if labels is None:
        return images
    if isinstance(images, PackedImages) or images.classes:
        raise ValueError(f"{os.fspath(root)} has its own labels: labels= is for files, or for a flat folder")
    return replace(images, labels=labels_array(labels, len(images)))


def open_reader(
    name: str, images: ImageList, device: torch.device, *, pinned: bool = False, window: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> FileReader:  # fmt: skip
    """Opens one of :data:`READERS`.

    Args:
        name, images, device: the reader, what it reads, and where encoded images go.
        pinned: host buffers are pinned, for a decoder on a GPU.
        window: a packed folder is read in whole files, and so many of them ahead. None: each batch by itself.
        options: keyword arguments of the storage backend.

    Raises:
        BackendUnavailable: the reader's backend does not work here. The message says why and what to do.
        ValueError: there is no such reader, or it cannot read these images.
    """
    if name not in READERS:
        raise ValueError(f"reader={name!r} is not known; there are: {', '.join(READERS)}")
    root, packed = images.root, isinstance(images, PackedImages)
    if name == _PACKED and not packed:
        command = f"monai-gds pack {shlex.quote(root)} OUT"
        raise ValueError(f"reader={name!r}, but {root} is not packed: run `{command}` and name OUT")
    name = "auto" if name == _PACKED else name
    options = _with_map(images, backend_options(name, device), options or {})
    storage = ImageStorage(name, device, pinned=pinned, options=options)
    if isinstance(images, PackedImages):
        return RangeReader(images, storage) if window is None else PackedReader(images, storage, ahead=window)
    return FileReader(images, storage)


def _with_map(images: ImageList, takes: frozenset[str], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """A backend's options, with the block map that lists the images if the backend reads by one.

    Raises:
        ImageListError: the files are not where the map's paths lead, and no device is named to read them from.
    """
    if images.blocks is None:
        return options
    if "blockmap" in takes and ("uri" in options or os.path.isdir(images.root)):
        return {"blockmap": images.blocks, **options}
    if not os.path.isdir(images.root):
        raise ImageListError(
            f"the block map's files are not in {images.root}; BlockMap.load(map, parent=…) names the folder that its "
            "paths are relative to"
        )
    return options


class ImageSource:
    """Batches of encoded images and their labels, for ``fn.external_source`` in your own DALI pipeline.

    Each ``iter()`` is a new epoch, which begins with its first batch. DALI calls it with ``cycle="raise"``. The memory
    of a batch is kept for ``keep`` more batches, because with ``no_copy=True`` DALI reads from it until the batch's
    outputs are there.

    Args:
        root: an image folder, a packed folder or a block map, see :func:`open_images`.
        batch_size: images per batch.
        reader: one of :data:`READERS`.
        device: where the encoded images go. ``fn.external_source(device=…)`` must be given the same. Decoders want the
            CPU.
        file_list, files, labels: name the images, see :func:`open_images`.
        shuffle, seed, shard_id, num_shards, last_batch, window: see
        :class:`~monai_gds.imagenet.files.sampling.Sampler`.
        keep: batches; at least DALI's ``prefetch_queue_depth`` + 1.
        storage_options: keyword arguments of the storage backend.

    Raises:
        BackendUnavailable: the reader's backend does not work here.
        ImageListError: see :func:`open_images`.
        ValueError: an argument is wrong.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.bench.made_up import write_image_folder
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
        root: StrPath | BlockMap | None = None,
        batch_size: int = 1,
        reader: str = "auto",
        device: int | str | torch.device = "cpu",
        *,
        file_list: StrPath | None = None,
        files: Sequence[StrPath] | None = None,
        labels: Sequence[int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shard_id: int = 0,
        num_shards: int = 1,
        last_batch: LastBatch = "partial",
        window: int | None = None,
        keep: int = 8,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.images = images = open_images(root, file_list=file_list, files=files, labels=labels)
        self._sampler = Sampler(
            len(images), batch_size, shuffle, seed, shard_id, num_shards, last_batch, images.bounds, window
        )
        self._reader = open_reader(reader, images, resolve_device(device), window=window, options=storage_options)
        self._keep = keep
        self._epoch = 0

    def __len__(self) -> int:
        """Batches per epoch, without an empty one, which DALI does not accept."""
        return len(self._sampler) - self._sampler.ends_empty

    def __iter__(self) -> Iterator[tuple[list[Any], Any]]:
        """One epoch of ``(images, labels)``: 1-D uint8 arrays, and int32 (batch, 1); NumPy, or torch on CUDA."""
        epoch, self._epoch = self._epoch, self._epoch + 1  # here, since iter() may be called and not used
        kept: deque[tuple[Batch, Any]] = deque(maxlen=self._keep)
        for batch in self._reader.read(self._sampler.epoch(epoch)[: len(self)]):
            labels: Any = batch.labels[:, None]
            if self._reader.device.type == "cuda":  # DALI takes all outputs of a source from one kind of memory
                labels = torch.from_numpy(labels).to(self._reader.device)
            kept.append((batch, labels))
            yield arrays_of(batch), labels

    def close(self) -> None:
        """Frees threads and memory."""
        self._reader.close()


def arrays_of(batch: Batch) -> list[Any]:
    """Returns a batch's images as DALI takes them: NumPy arrays, or CUDA tensors."""
    if batch.images and batch.images[0].is_cuda:
        return list(batch.images)
    return [image.numpy() for image in batch.images]
