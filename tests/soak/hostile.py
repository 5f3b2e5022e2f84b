"""Records, packed images and block maps that somebody wrote on purpose, with checksums that hold.

Whatever they contain: an item or a recomputation with a warning, or a clear error, in little time and memory. What an
accepted record holds is its writer's business, so values are not compared here.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from monai_gds.base.names import digest_of
from monai_gds.bench.made_up import write_image_folder
from monai_gds.errors import BlockMapError, ImageListError, MonaiGdsError, RecordError
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.maintenance import Unwanted, check, prunable, survey
from monai_gds.imagenet.files.packed import INDEX, PackedImages
from monai_gds.imagenet.files.packing import pack_folder
from monai_gds.imagenet.source import ImageSource, open_images
from monai_gds.records.entries import read_whole
from monai_gds.records.header import SUFFIX, bytes_of, digest_in, parse
from monai_gds.records.heads import Form
from monai_gds.storage import open_storage
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.saved import HEADER
from tests import commands
from tests.soak.damage import put, record_in
from tests.soak.grammar import Parts, dumps, mutated, records
from tests.soak.made import TINY, Reader, enter, packed, warned, write_sources
from tests.soak.soak import Progress, Soak
from tests.soak.tally import Tally

__all__ = ["run"]

#: Memory that a trial may take, beside a multiple of the file's own and what its tiles unpack to.
_SPARE_BYTES = 128 << 20

#: Bytes that sparse files declare.
HUGE = [1 << 29, 1 << 32, 1 << 40]

#: Seconds of processor time that a trial may take.
_SECONDS = 10.0


def run(soak: Soak) -> None:
    """Records for most of the time, then folders as the command sees them, packed images, block maps."""
    forms = ("lz4", "packed") if soak.quick else ("whole", "lz4", "zstd", "packed")
    for number, form in enumerate(forms, 1):
        soak.in_turn(
            hostile_records, soak.folder / form, form, soak.random.random(), end=soak.share(0.6 * number / len(forms))
        )
    if not soak.quick:
        soak.call(sparse_records, soak.folder / "sparse", timeout=120)
    soak.in_turn(hostile_folders, soak.folder / "folder", soak.random.random(), end=soak.share(0.7))
    soak.in_turn(hostile_packed, soak.folder / "packed", soak.random.random(), end=soak.share(0.85))
    soak.in_turn(hostile_maps, soak.folder / "maps", soak.random.random(), end=soak.share(1.0))


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limits the memory of this process to 4 GiB more than it has."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def examples(
    strategy: st.SearchStrategy[Any],
    number: float,
    first: int,
    seconds: float,
    tally: Tally,
    work: Callable[[int, Any], None],
) -> int:
    """Has ``work`` try what a strategy gives, for so long. Returns the number of the next job."""
    end, done = time.monotonic() + seconds, first
    phases, checks = [Phase.generate], list(HealthCheck)
    while time.monotonic() < end:

        @seed(f"{number} {done}")
        @settings(max_examples=40, deadline=None, database=None, phases=phases, suppress_health_check=checks)
        @given(example=strategy)
        def attempt(example: Any) -> None:
            nonlocal done
            if time.monotonic() < end:
                done += 1
                tally.trials += 1
                try:
                    work(done, example)
                except Exception:  # of the campaign's own; hypothesis would try to make it smaller
                    tally.found("other", traceback.format_exc()[-1500:])

        attempt()
    return done


class Meter:
    """What a trial takes of memory and processor time."""

    def __enter__(self) -> Meter:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        self._rss, self._cpu = _status("VmRSS"), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.nbytes = _status("VmHWM") - self._rss
        self.seconds = time.process_time() - self._cpu

    def judge(self, allowed: int, tally: Tally, what: str) -> None:
        """Counts what took too much."""
        if self.nbytes > allowed:
            tally.found("other", f"{self.nbytes >> 20} MiB of memory where {allowed >> 20} may be: {what}")
        if self.seconds > _SECONDS:
            tally.found("hangs", f"{self.seconds:.0f} s of processor time: {what}")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


# ---------------------------------------------------------------------------------------------------------------------
# Records


def hostile_records(
    folder: Path, form: str, number: float, first: int, progress: Progress, seconds: float
) -> tuple[int | None, Tally]:
    """Reads one hostile record after another in every way."""
    enter()
    tally = Tally()
    path, reader = _sound_record(folder, form, tally)
    sound = path.read_bytes()

    def attempt(job: int, blob: bytes) -> None:
        progress.note(job, form, blob)
        before = tally.bad
        with warned(), Meter() as meter:
            put(path, blob)
            for name, way in WAYS.items():
                try:
                    way(path)
                except Exception:
                    tally.found("lost", f"{name}: {traceback.format_exc()[-1200:]}")
            if reader is not None and job % 16 == 0:  # a whole dataset, which is to recompute what it cannot use
                try:
                    reader.dataset[0]
                except RuntimeError as e:  # a transform that the item of an accepted record does not suit
                    if not str(e).startswith("applying transform"):
                        raise
                reader.dataset.flush()
        meter.judge(_SPARE_BYTES + 8 * len(blob) + 4 * unpacked_bytes(blob), tally, form)
        if tally.bad > before:
            tally.notes[-1] += f"\njob {job}: {progress.keep()}"

    with bounded():
        following = examples(records(sound), number, first, seconds, tally, attempt)
    put(path, sound)
    return following, tally


def _sound_record(folder: Path, form: str, tally: Tally) -> tuple[Path, Reader | None]:
    """A record to be changed, and the dataset that it is of; none for the form that has all of palettes and runs."""
    if form == "packed":
        path = folder / "cache" / f"{digest_of([])}{SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, packed())
        found = check(path)
        assert found is not None and not found.problem
        return path, None
    items = write_sources(folder, 1)
    Reader(items, folder / "cache", form, False, TINY).check_all(tally)
    return record_in(folder / "cache"), Reader(items, folder / "cache", form, True, TINY)


def sparse_records(folder: Path) -> Tally:
    """Records of a few kB that declare gigabytes: what is not allocated on the disk may not be in memory."""
    enter()
    tally = Tally()
    items = write_sources(folder, 1)
    Reader(items, folder / "cache", "lz4", False, TINY).check_all(tally)
    path = record_in(folder / "cache")
    sound = path.read_bytes()
    with bounded(), warned():
        for name, nbytes in itertools.product(("noise", "__arrays", "image", "__tiles.image", "other"), HUGE):
            parts = Parts.of(sound)
            entry = parts.entries.pop(name, {"dtype": "U8", "shape": []})
            parts.data.pop(name, None)
            blob = parts.to_bytes(last=(name, {**entry, "dtype": "U8", "shape": [nbytes]}, nbytes))
            put(path, blob)
            with path.open("r+b") as file:
                file.truncate(len(blob) + nbytes)
            tally.trials += 1
            with Meter() as meter:
                for way, read in WAYS.items():
                    try:
                        read(path)
                    except Exception:
                        tally.found("lost", f"{name}, {nbytes}, {way}: {traceback.format_exc()[-1200:]}")
            meter.judge(_SPARE_BYTES + 8 * len(blob), tally, f"a sparse record, {name} of {nbytes} bytes")
    return tally


def unpacked_bytes(blob: bytes) -> int:
    """What the tiles of a record unpack to, counting those that have an entry in a table."""
    try:
        record = parse(blob, len(blob))
        return sum(
            min(bytes_of(record.tensors[name]), tiled.table.nbytes // 8 << 22) for name, tiled in record.tiles.items()
        )
    except (RecordError, KeyError):
        return 0


def _opened(path: Path, verify: Any) -> CacheDirectory:
    return CacheDirectory(path.parent, open_storage("posix", "cpu"), verify=verify, form=Form(numpy=True))


def read_whole_item(path: Path) -> None:
    """As a dataset does, and what its user may do with the item."""
    for verify in ("first", "never"):
        pending = _opened(path, verify).start([str(digest_in(path.name))])[0]
        found = None if pending is None else pending.wait({"source": "/x", "index": 0})
        if found is not None:
            touch(found[0])


def read_together(path: Path) -> None:
    """As a batch."""
    digest = str(digest_in(path.name))
    cache = _opened(path, "first")
    for pending in [*cache.start([digest, digest]), *cache.start([digest, digest])]:
        if pending is not None:
            pending.wait()


def read_boxes(path: Path) -> None:
    """As crops are."""
    (found,) = _opened(path, "first").start([str(digest_in(path.name))], "rest")
    if found is None or not found.later:
        if found is not None:
            found.wait()
        return
    boxes = {}
    for name, form in found.later.items():
        shape = (1, 1, 1, *form.shape)[-3:]
        boxes[name] = [tuple(slice(n // 2, n // 2 + 1) for n in shape)]
    volumes = found.read(boxes).wait()  # type: ignore[arg-type]
    for runs in found.runs.values():
        chosen = np.zeros(len(runs.values), bool)
        chosen[-1:] = True
        try:
            if runs.count(chosen):
                runs.find(chosen, runs.count(chosen) - 1)
        except (RecordError, OSError):
            break
    if volumes is not None:
        found.wait(tensors={name: torch.zeros(1) for name in volumes})


def look_only(path: Path) -> None:
    """As `cache verify`, `cache ls`, conversion and `explain` look at it."""
    check(path)
    survey(path.parent)
    cache = _opened(path, "first")
    cache.holds(str(digest_in(path.name)))
    cache.why_unusable(str(digest_in(path.name)))
    with contextlib.suppress(RecordError, OSError):
        read_whole(str(path), str(digest_in(path.name)))


WAYS: dict[str, Callable[[Path], None]] = {
    "whole": read_whole_item,
    "together": read_together,
    "boxes": read_boxes,
    "looked at": look_only,
}


def touch(item: Any) -> None:
    """What anybody does with an item: print it, send it, use the values of its tensors."""
    try:
        pickle.dumps(item)
        for value in item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else [item]:
            if isinstance(value, torch.Tensor) and value.numel() < 1 << 24:
                value.clone().flatten()[:1].tolist()
            elif isinstance(value, np.ndarray) and value.size < 1 << 24:
                value.copy()
    except Exception:  # an odd item, which is no danger
        return


# ---------------------------------------------------------------------------------------------------------------------
# Folders of records, as the command sees them


def hostile_folders(
    folder: Path, number: float, first: int, progress: Progress, seconds: float
) -> tuple[int | None, Tally]:
    """Lists, verifies and prunes folders with a sound record and a hostile one."""
    enter()
    tally = Tally()
    items = write_sources(folder, 2)
    Reader(items, folder / "cache", "lz4", False, TINY).check_all(tally)
    path, other = sorted((folder / "cache").glob("*.safetensors"))
    sound = path.read_bytes()

    def attempt(job: int, blob: bytes) -> None:
        progress.note(job, "folder", blob)
        before = tally.bad
        put(path, blob)
        for arguments in (["ls"], ["ls", "--json"], ["verify"], ["prune", "--dry-run"], ["ls", "--summary"]):
            try:
                done = commands.run("cache", *arguments, folder / "cache")
                printed = done.stdout + done.stderr
                if done.exit_code not in (0, 1):
                    tally.found("other", f"{arguments} ended with {done.exit_code}: {printed[-300:]}")
                if arguments == ["ls"] and other.name[:8] not in printed:
                    tally.found("lost", f"{arguments} does not list the sound record: {printed[-300:]!r}")
                if strange := {c for c in printed if not c.isprintable() and c not in "\n\t"} - set("\x1b"):
                    tally.found("other", f"{arguments} prints {strange}")
                if "\x1b[2J" in printed or "\x1b]" in printed:
                    tally.found("other", f"{arguments} prints a terminal's escape sequence")
            except Exception:
                tally.found("lost", f"{arguments}: {traceback.format_exc()[-1200:]}")
        try:
            list(prunable(folder / "cache", survey(folder / "cache"), Unwanted(missing_sources=True)))
        except Exception:
            tally.found("lost", f"prunable: {traceback.format_exc()[-1200:]}")
        if tally.bad > before:
            tally.notes[-1] += f"\njob {job}: {progress.keep()}"

    with bounded():
        following = examples(records(sound), number, first, seconds, tally, attempt)
    put(path, sound)
    return following, tally


# ---------------------------------------------------------------------------------------------------------------------
# Packed images and block maps


def hostile_packed(
    folder: Path, number: float, first: int, progress: Progress, seconds: float
) -> tuple[int | None, Tally]:
    """Opens packed folders whose index is hostile, and reads their images."""
    tally = Tally()
    if not (folder / "packed" / INDEX).exists():
        pack_folder(open_images(write_image_folder(folder / "images", 6)), folder / "packed", file_bytes=4096)  # type: ignore[arg-type]
    path = folder / "packed" / INDEX
    kept = folder / "index"
    sound = kept.read_bytes() if kept.exists() else path.read_bytes()
    kept.write_bytes(sound)

    def attempt(job: int, blob: bytes) -> None:
        progress.note(job, "packed", blob)
        before = tally.bad
        put(path, blob)
        with Meter() as meter:
            try:
                use_packed(folder / "packed")
            except (ImageListError, MonaiGdsError, OSError):
                pass
            except Exception:
                tally.found("lost", traceback.format_exc()[-1200:])
        meter.judge(_SPARE_BYTES + 8 * len(blob), tally, "packed images")
        if tally.bad > before:
            tally.notes[-1] += f"\njob {job}: {progress.keep()}"

    with bounded():
        following = examples(records(sound), number, first, seconds, tally, attempt)
    put(path, sound)
    return following, tally


def use_packed(folder: Path) -> None:
    """Opens a packed folder and reads all of it."""
    packed = open_images(folder)
    assert isinstance(packed, PackedImages)
    for index in range(min(len(packed), 20)):
        packed.places[index]
        packed.path(index)
    source = ImageSource(folder, 2)
    try:
        for _, _ in zip(source, range(10), strict=False):
            pass
    finally:
        source.close()


def hostile_maps(
    folder: Path, number: float, first: int, progress: Progress, seconds: float
) -> tuple[int | None, Tally]:
    """Loads block maps, uses what was accepted, and saves it again."""
    tally = Tally()
    folder.mkdir(parents=True, exist_ok=True)
    disk = {"name": "loop0", "number": "7:0", "block_size": 512, "nbytes": 1 << 30, "max_transfer": 1 << 20}
    origin = {
        "version": 1,
        "block_size": 512,
        "parent": str(folder),
        "kind": "ext4",
        "uuid": "x",
        "start": 0,
        "disk": disk,
    }
    one = {"startblock": 2048, "endblock": 2055, "size": 4000, "inode": 12, "mtime_ns": 1, "wsum64": "00ff" * 4}
    unmapped = {"train/a/3.JPEG": {"size": 5, "why": "its blocks are shared"}}
    two = {"extents": [[0, 4096, 4103], [8, 9000, 9003]], "size": 6000, "inode": 14, "mtime_ns": 2}
    whole = {
        HEADER: {**origin, "folders": ["train/b"], "unmapped": unmapped},
        "train/a/1.JPEG": one,
        "train/a/2.JPEG": two,
    }
    plain = {"train/a/1.JPEG": {"startblock": 2048, "endblock": 2055}}
    file = folder / "map.json"

    def attempt(job: int, content: Any) -> None:
        text = dumps(content).encode()
        progress.note(job, "map", text)
        file.write_bytes(text)
        before = tally.bad
        with Meter() as meter:
            try:
                found = BlockMap.load(file)
                [found[path] for path in found]
                found.save(folder / "again.json")
                BlockMap.load(file, parent=folder).verify()
            except BlockMapError:
                pass
            except Exception:
                tally.found("lost", traceback.format_exc()[-1200:])
            try:
                open_images(file)
            except MonaiGdsError:
                pass
            except Exception:
                tally.found("lost", traceback.format_exc()[-1200:])
        meter.judge(_SPARE_BYTES + 64 * len(text), tally, "a block map")
        if tally.bad > before:
            tally.notes[-1] += f"\njob {job}: {progress.keep()}"

    with bounded():
        following = examples(mutated(whole) | mutated(plain), number, first, seconds, tally, attempt)
    return following, tally
