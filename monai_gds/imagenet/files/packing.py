"""Writes packed folders (:mod:`~monai_gds.imagenet.files.packed`) over any executor, and continues if interrupted.

While a folder is being packed it holds ``packing.json``, which records what is packed and how, and its packer has a
lease on it (:mod:`monai_gds.shared.leases`). Each file is written in ``.tmp`` and renamed, and the index is written
last. So an unfinished folder does not count as packed, and packing the same images again keeps every file in it that is
whole. Two packers, of which one was frozen while the other took over its lease, write the same files. The index of a
finished folder records the same but for the folder that the images were in, so that packing them once more is seen to
be done.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, as_completed
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.checksum import checksum, checksums
from monai_gds.base.units import bytes_of, in_groups
from monai_gds.errors import BrokenImage, ImageListError, RecordError
from monai_gds.imagenet.files.image_storage import ImageRecord, load_item, read_files, read_layout, save_item
from monai_gds.imagenet.files.listing import UNFINISHED, ImageList, StrPath
from monai_gds.imagenet.files.packed import FORMAT, INDEX, PackedImages, describe, file_name, is_packed, open_packed
from monai_gds.imagenet.files.resizing import pillow, smaller_jpeg
from monai_gds.items.tree import tensor_bytes
from monai_gds.shared.leases import Leases
from monai_gds.shared.temporary import FOLDER, being_written, publish, tidy
from monai_gds.storage import open_storage

#: The lease of a folder that is being packed. Its temporary files have this digest too.
_LEASE = f"{0:032x}"


def pack_folder(
    images: ImageList,
    out: StrPath,
    *,
    file_bytes: float | str = limits.PACKED_FILE_BYTES,
    max_side: int | None = None,
    quality: int = 90,
    executor: Executor | None = None,
    progress: Callable[[int], None] | None = None,
) -> PackedImages:
    """Packs the images of a folder. If packing was interrupted, the same call continues it; if it was not, it returns.

    Args:
        images: what to pack.
        out: an empty folder, created if missing; or one into which the same images were packed, whether to the end or
            not.
        file_bytes: image bytes per file, such as ``"32MiB"``. A larger image gets its own file.
        max_side: images with more pixels than this in height or width are made smaller and become JPEGs, rotated
            according to their EXIF data. All others are packed as they are.
        quality: the quality of these JPEGs, 1 to 100.
        executor: where files are packed, such as a ProcessPoolExecutor, or Dask's ``client.get_executor()``, whose
            workers see ``images.root`` and ``out`` under the same paths. Default: here, one after the other.
        progress: called with the number of images packed so far.

    Raises:
        BackendUnavailable: ``max_side`` is given, and Pillow is not installed.
        ImageListError: ``out`` is a file, holds something else, such as other images or these before they were changed,
            or is being packed already.
        BrokenImage: an image file is empty, or is to be made smaller and cannot be decoded.
        OSError: an image cannot be read, or the disk is full.
        ValueError: ``file_bytes``, ``max_side`` or ``quality`` is out of range.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.imagenet import open_images
        >>> from monai_gds.bench.made_up import write_image_folder
        >>> folder = write_image_folder(Path("images"), 3)  # made up, in ImageNet's layout
        >>> packed = pack_folder(open_images(folder), "packed", max_side=256)
        >>> len(open_images("packed"))
        3
    """
    most = bytes_of(file_bytes, "file_bytes", least=1)
    if max_side is not None and max_side < 1:
        raise ValueError(f"max_side={max_side}: at least one pixel")
    if not 1 <= quality <= 100:
        raise ValueError(f"quality={quality}: it must be from 1 to 100")
    empty = np.flatnonzero(images.sizes == 0)
    if len(empty):
        raise BrokenImage(images.path(int(empty[0])), "it is empty and cannot be packed")
    if max_side is not None:
        pillow()  # an error now, not at the first large image
    top = Path(out).absolute()
    described = describe(images, 0, len(images))
    plan = {
        "of": [checksum(tensor_bytes(described[name])) for name in ("names", "labels", "sizes")],
        "file_bytes": most, "max_side": max_side, "quality": quality if max_side else None,
    }  # fmt: skip
    made = json.dumps(plan)
    if is_packed(top):
        return _packed_before(top, images, made)
    with _packing(top, json.dumps({"root": images.root, **plan})):
        groups = in_groups(range(len(images)), images.sizes.tolist().__getitem__, len(images), most)
        portions = [
            _Portion(str(top / file_name(number)), _part(images, group[0], group[-1] + 1), max_side, quality)
            for number, group in enumerate(groups)
        ]
        written = _write_all(portions, executor, progress)
        packed = replace(images, sizes=np.concatenate([record.sizes for record in written]))
        rows = [[len(record.sizes), int(record.sizes.sum()), record.offset, record.nbytes] for record in written]
        index = {**FORMAT, **describe(packed, 0, len(images)), "files": torch.tensor(rows), "made": made}
        index["checksums"] = torch.from_numpy(np.concatenate([record.checksums for record in written]))
        with closing(open_storage(device="cpu")) as storage, being_written(str(top), _LEASE, str(top / INDEX)) as file:
            save_item(storage, Path(file), index)
    return open_packed(top)


def _packed_before(top: Path, images: ImageList, made: str) -> PackedImages:
    """Opens a finished folder if nothing is left to do there: these images were packed so, and are the same since."""
    remedy = "pack into another folder, or remove that one"
    try:
        packed = open_packed(top)
    except ImageListError as e:
        raise ImageListError(f"{top} is packed already, and damaged: {e}. To pack again, {remedy}") from e
    count = f"{len(packed)} images in {len(packed.files)} files"
    if packed.made != made or list(packed.classes) != list(images.classes):
        raise ImageListError(
            f"{top} is packed already, of other images or in another way ({count}, {packed.made}): {remedy}"
        )
    for file in range(len(packed.files)):
        changed, path = _last_changed(_part(images, *packed.bounds[file : file + 2].tolist()))
        if changed > os.stat(packed.file_path(file)).st_mtime_ns:
            raise ImageListError(f"{top} is packed already ({count}), and {path} was changed since: {remedy}")
    return packed


class _Portion(NamedTuple):
    """The images of one file."""

    path: str
    images: ImageList
    max_side: int | None
    quality: int


def _write_all(
    portions: list[_Portion], executor: Executor | None, progress: Callable[[int], None] | None
) -> list[ImageRecord]:
    """Writes every file, and returns their layouts in order."""
    written: dict[int, ImageRecord] = {}
    done = 0
    with closing(_written(portions, executor)) as arriving:
        for number, record in arriving:
            written[number] = record
            done += len(record.sizes)
            if progress is not None:
                progress(done)
    return [written[number] for number in range(len(portions))]


def _written(portions: list[_Portion], executor: Executor | None) -> Generator[tuple[int, ImageRecord]]:
    if executor is None:
        yield from enumerate(map(_write, portions))
        return
    futures: dict[Future[ImageRecord], int] = {}
    try:
        for number, portion in enumerate(portions):
            futures[executor.submit(_write, portion)] = number
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def _write(portion: _Portion) -> ImageRecord:
    """Writes a file, unless it exists and is intact. Runs in a worker of the executor."""
    path, images = portion.path, portion.images
    if (found := _intact(portion)) is not None:
        return found
    sources = [images.path(i) for i in range(len(images))]
    with closing(open_storage(device="cpu")) as storage:
        data = read_files(storage, sources, images.sizes.tolist())
        if portion.max_side is not None:
            encoded = [bytes(image) for image in np.split(data.numpy(), np.cumsum(images.sizes)[:-1])]
            smaller = []
            for source, image in zip(sources, encoded, strict=True):
                try:
                    smaller.append(smaller_jpeg(image, portion.max_side, portion.quality))
                except Exception as e:  # Pillow raises errors of many types
                    raise BrokenImage(source, f"it cannot be decoded: {e}") from e
            images = replace(images, sizes=np.asarray([len(image) for image in smaller], dtype=np.int64))
            data = torch.frombuffer(bytearray(b"".join(smaller)), dtype=torch.uint8)
        sums = np.array(checksums(torch.split(data, images.sizes.tolist())), np.uint64).view(np.int64)
        item = {**FORMAT, **describe(images, 0, len(images)), "checksums": torch.from_numpy(sums), "images": data}
        with being_written(os.path.dirname(path), _LEASE, path) as file:
            save_item(storage, Path(file), item)
    return read_layout(path)


def _intact(portion: _Portion) -> ImageRecord | None:
    """The layout of a file that an interrupted run left, if it is undamaged and newer than its images; else None."""
    try:
        item = load_item(portion.path)  # compares all checksums
        described = describe(portion.images, 0, len(portion.images))
        if item["version"] != FORMAT["version"] or not all(
            torch.equal(item[name], described[name]) for name in ("names", "labels")
        ):
            return None
        changed, _ = _last_changed(portion.images)
        return read_layout(portion.path) if changed <= os.stat(portion.path).st_mtime_ns else None
    except (OSError, RecordError):
        return None


def _last_changed(images: ImageList) -> tuple[int, str]:
    """When the last of some images was changed, in ns, and its path. Raises OSError."""
    paths = [images.path(i) for i in range(len(images))]
    stats = map(os.stat, paths)  # `cp -p` sets the mtime to an earlier time, but not the ctime
    return max((max(st.st_mtime_ns, st.st_ctime_ns), path) for st, path in zip(stats, paths, strict=True))


def _part(images: ImageList, begin: int, end: int) -> ImageList:
    return replace(
        images, names=images.names[begin:end], labels=images.labels[begin:end], sizes=images.sizes[begin:end]
    )


@contextmanager
def _packing(top: Path, plan: str) -> Iterator[None]:
    """Notes in a folder what is being packed into it, so that the same call can go on; removes that at the end."""
    note = top / UNFINISHED
    if is_packed(top) or not note.exists():
        empty_folder(top)
    lease = Leases(top).take(_LEASE)
    if lease is None:
        raise ImageListError(f"{top} is being packed by another process or thread")
    try:
        with lease:
            # looked at again under the lease: another process may have begun or ended since
            before = note.read_text(errors="replace") if note.exists() else ""
            if is_packed(top) or (not before and {path.name for path in top.iterdir()} - {UNFINISHED, FOLDER}):
                raise _not_empty(top)
            if before not in ("", plan):
                raise ImageListError(
                    f"{top} holds an unfinished folder of other images, or packed in another way ({before}): pack "
                    "these into another folder, or remove that one"
                )
            if not before:
                publish(str(top), str(note), plan.encode())
            yield
            note.unlink(missing_ok=True)
    finally:
        tidy(top)
        with contextlib.suppress(OSError):  # somebody writes in it, or has a file there
            os.rmdir(top / FOLDER)


def empty_folder(out: StrPath) -> Path:
    """Returns the empty folder to pack into, created if missing. Raises ImageListError for another."""
    top = Path(out)
    try:
        top.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        file = next((path for path in (top, *top.parents) if os.path.lexists(path) and not path.is_dir()), top)
        what = "a file" if file.exists() else "a link that leads nowhere"
        raise ImageListError(f"{file} is {what}: name a folder to pack into, a new or an empty one") from e
    if any(path.name != FOLDER for path in top.iterdir()):
        raise _not_empty(top)
    return top


def _not_empty(top: Path) -> ImageListError:
    return ImageListError(f"{top} is not empty: choose another folder to pack into")
