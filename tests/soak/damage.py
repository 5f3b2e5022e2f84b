"""Records with any byte flipped, cut anywhere, spliced from two, or replaced by any kind of file.

Nothing of that may be served: the item is the one that is computed again, and the record is replaced by a sound one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import stat
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from monai_gds.folder.maintenance import check
from tests.machines import NOBODY
from tests.soak.made import TINY, Reader, enter, fresh, warned, write_source, write_sources
from tests.soak.soak import Progress, Soak
from tests.soak.tally import Tally
from tests.soak.ways import Ways

__all__ = ["run"]

WAYS = [("whole", False), ("lz4", False), ("zstd", True), ("lz4", True)]


def run(soak: Soak) -> None:
    """Bytes for most of the time, then kinds of files."""
    ways = WAYS[::3] if soak.quick else WAYS
    for number, (form, crops) in enumerate(ways, 1):
        seed, folder = soak.random.random(), soak.folder / f"{form}-{crops}"
        soak.in_turn(bytes_of_records, folder, form, crops, seed, end=soak.share(0.8 * number / len(ways)))
    for form, crops in WAYS[3:] if soak.quick else WAYS:
        soak.call(kinds_of_files, soak.folder / f"kinds-{form}-{crops}", form, crops, timeout=120)
    with soak.part("another user's records"):
        soak.call(as_nobody, soak.folder / "nobody", timeout=60)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def jobs_of(blobs: list[bytes], rng: random.Random) -> list[tuple[str, int]]:
    """Every flip, every cut, and as many splices, in random order."""
    size = len(blobs[0])
    kinds = ("flip", "cut", "splice", "more")
    jobs = [(kind, at) for kind, count in zip(kinds, (size, size, size, 50), strict=True) for at in range(count)]
    rng.shuffle(jobs)
    return jobs


def damaged(job: tuple[str, int], blobs: list[bytes], rng: random.Random) -> bytes:
    """A record that is not sound any more."""
    (kind, at), blob = job, bytearray(blobs[0])
    if kind == "flip":
        blob[at] ^= rng.choice([1, 0x80, 0xFF, rng.randrange(1, 256)])
    elif kind == "cut":
        del blob[at:]
    elif kind == "more":
        blob += rng.choice([b"\0" * 4096, b"x", bytes(blobs[1])])
    else:
        other = rng.choice(blobs[1:])
        begin, end = at, rng.choice([len(blob), at + 512, at + 4096, at // 4096 * 4096])
        begin, end = min(begin, end), max(begin, end)
        blob[begin:end] = other[begin:end]
    return bytes(blob)


def bytes_of_records(
    folder: Path, form: str, crops: bool, seed: float, first: int, progress: Progress, seconds: float
) -> tuple[int | None, Tally]:
    """Reads one damaged record after another."""
    enter()
    tally, end = Tally(), time.monotonic() + seconds
    items = write_sources(folder, 1)
    blobs = []
    for version in (0, 1, 2):  # the splices come from the same item's other versions, which have the same layout
        shutil.rmtree(folder / "cache", ignore_errors=True)
        write_source(folder, 0, version)
        Reader(items, folder / "cache", form, False, TINY).check_all(tally)
        blobs.append(record_in(folder / "cache").read_bytes())
    jobs = jobs_of(blobs, random.Random(seed))
    reader = Reader(items, folder / "cache", form, crops, TINY)
    path = record_in(folder / "cache")
    blobs = [path.read_bytes(), *blobs[:2]]
    ways = Ways(path, fresh(0, 2, items[0]["source"], False, 0, TINY))
    attack(ways, random.Random(seed), tally)
    if ways.served < 9:
        tally.found("other", f"a sound record was served {ways.served} times")
    with warned():
        for number in range(first, len(jobs)):
            if time.monotonic() > end:
                return number, tally
            rng = random.Random(f"{seed} {number}")
            data = damaged(jobs[number], blobs, rng)
            progress.note(number, f"{jobs[number]} of {form}, crops {crops}", data)
            tally.trials += 1
            before = tally.bad
            put(path, data)
            attack(ways, rng, tally)
            if rng.random() < 0.05:
                put(path, data)
                reader.check_all(tally)
                reader.check_all(tally)
            if rng.random() < 0.1:
                put(path, data)
                check_quietly(path, tally)
            if tally.bad > before:
                tally.notes[-1] += f"\n{jobs[number]} of {form}, crops {crops}: {progress.keep()}"
    return None, tally


def attack(ways: Ways, rng: random.Random, tally: Tally) -> None:
    """Reads a record that is not sound in every way."""
    tally.items += 9
    try:
        for wrong in ways.read(rng):
            tally.found("wrong", wrong)
    except Exception:
        tally.found("lost", traceback.format_exc()[-1500:])


def record_in(cache: Path) -> Path:
    """The only record."""
    (record,) = cache.glob("*.safetensors")
    return record


def put(path: Path, data: bytes) -> None:
    """Replaces a file."""
    half = path.with_suffix(".half")
    half.write_bytes(data)
    half.replace(path)


# ---------------------------------------------------------------------------------------------------------------------
# Other kinds of files


def kinds(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Kinds of files, and what puts one in the place of a record that is not there."""
    other = path.with_name("other")
    yield "folder", path.mkdir
    yield "folder with a file", lambda: (path.mkdir(), (path / "x").touch())
    yield "fifo", lambda: os.mkfifo(path)
    yield "socket", lambda: _socket(path)
    yield "link to itself", lambda: path.symlink_to(path)
    yield "link to nothing", lambda: path.symlink_to("/no/such/file")
    yield "link to a folder", lambda: path.symlink_to(path.parent)
    yield "link to a fifo", lambda: (os.mkfifo(other), path.symlink_to(other))
    for device in ("null", "zero", "random", "full", "tty", "stdin"):
        if Path("/dev", device).exists():
            yield f"link to /dev/{device}", lambda device=device: path.symlink_to(f"/dev/{device}")
    for target in ("/proc/self/mem", "/proc/self/maps", "/proc/kmsg", "/sys/kernel/profiling", "/dev/shm"):
        if Path(target).exists():
            yield f"link to {target}", lambda target=target: path.symlink_to(target)
    yield "empty", path.touch
    yield "sparse", lambda: _sparse(path, b"", 1 << 40)
    yield "sparse with a header's length", lambda: _sparse(path, (99_999_744).to_bytes(8, "little"), 1 << 40)
    if os.geteuid() == 0:
        for name, kind, number in (("character", stat.S_IFCHR, 0x105), ("block", stat.S_IFBLK, 0x7FF)):
            yield f"{name} device", lambda kind=kind, number=number: _device(path, kind, number)


def _socket(path: Path) -> None:
    """A socket, made in a folder whose name is short enough."""
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)
        made.bind(path.name)
        os.chdir(here)


def _sparse(path: Path, data: bytes, size: int) -> None:
    path.write_bytes(data)
    os.truncate(path, size)


def _device(path: Path, kind: int, number: int) -> None:
    with contextlib.suppress(PermissionError):
        os.mknod(path, 0o600 | kind, number)


def kinds_of_files(folder: Path, form: str, crops: bool) -> Tally:
    """Each kind where a record was, for a reader that has read the record and for one that has not."""
    enter()
    tally = Tally()
    items = write_sources(folder, 1)
    reader = Reader(items, folder / "cache", form, crops, TINY)
    reader.check_all(tally)
    path = record_in(folder / "cache")
    for number, (kind, make) in enumerate(kinds(path)):
        for known in (True, False):
            _remove(path)
            _remove(path.with_name("other"))
            make()
            tally.trials += 1
            if not known:
                reader = Reader(items, folder / "cache", form, crops, TINY)
            began, before = time.monotonic(), tally.bad
            with warned():
                reader.check_all(tally)
                check_quietly(path, tally)
            if time.monotonic() - began > 10:
                tally.found("hangs", f"a {kind} took {time.monotonic() - began:.0f} s")
            if tally.bad > before:
                tally.notes[-1] += f"\n{kind} ({number}) in the place of a record, {form}, crops {crops}"
        _remove(path)
    return tally


def check_quietly(path: Path, tally: Tally) -> None:
    """What the command checks."""
    try:
        check(path)
    except Exception:
        tally.found("lost", f"verify: {traceback.format_exc()[-1000:]}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def as_nobody(folder: Path) -> Tally:
    """Somebody else's records that this user may not read, or neither read nor replace."""
    if os.geteuid() != 0:
        return Tally(skipped=["another user's records: becoming another user needs root"])
    enter()
    tally = Tally()
    items = write_sources(folder, 2)
    for form, crops in WAYS[::3]:
        cache = folder / f"cache-{form}"
        Reader(items, cache, form, crops, TINY).check_all(tally)
        for record in cache.glob("*.safetensors"):
            record.chmod(0)
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == 0 and parent != Path("/") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for form, crops in WAYS[::3]:
        with warned():
            reader = Reader(items, folder / f"cache-{form}", form, crops, TINY)
            for _ in range(2):
                tally.trials += 1
                reader.check_all(tally)
    return tally
