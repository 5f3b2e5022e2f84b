"""Disks that are full, read-only, failing, coarse in time, or gone: they cost the cache, and never an item."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.loopdisk import loop_disk
from tests.loopdisk import run as command
from tests.machines import ROOT, mounted_tmpfs, read_only
from tests.soak.made import TINY, Reader, enter, warned, write_source, write_sources
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["run"]

WAYS = [("whole", False), ("lz4", True), ("zstd", False)]

COUNT = 8


def run(soak: Soak) -> None:
    """Every kind of disk, then failing calls for the rest of the time."""
    ways = soak.random.sample(WAYS, len(WAYS))
    for number, disk in enumerate(DISKS * (1 if soak.quick else len(ways))):
        form, crops = ways[number // len(DISKS)]
        if number < len(DISKS) or soak.more():
            folder = soak.folder / f"{form}-{crops}"
            folder.mkdir(exist_ok=True)
            with soak.part(disk.__name__.replace("_", " ")):
                disk(soak, folder / disk.__name__, form, crops)
    once = True
    while once or soak.more():
        once = False
        form, crops = soak.random.choice(WAYS)
        shutil.rmtree(soak.folder / "calls", ignore_errors=True)
        soak.call(failing_calls, soak.folder / "calls", form, crops, soak.random.random(), 1.0 if soak.quick else 5.0)


# ---------------------------------------------------------------------------------------------------------------------
# What is done on each disk, in a process of its own


def epochs(sources: Path, cache: Path, form: str, crops: bool, count: int = 2, **settings: Any) -> Tally:
    """Some epochs over the items of a folder."""
    enter()
    tally = Tally(trials=count)
    items = [{"source": str(sources / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    with warned():
        reader = Reader(items, cache, form, crops, **settings)
        for _ in range(count):
            reader.check_all(tally)
    return tally


def full(soak: Soak, folder: Path, form: str, crops: bool) -> None:
    """A disk on which a few records fit; later there is room again."""
    write_sources(folder, COUNT)
    with mounted_tmpfs(folder / "disk", 1 << 20) as disk:
        soak.call(epochs, folder, disk / "cache", form, crops)
        for record in (disk / "cache").glob("*.safetensors"):
            record.unlink()
        soak.call(epochs, folder, disk / "cache", form, crops)
        if not list((disk / "cache").glob("*.safetensors")):
            soak.tally.found("other", "nothing was saved once there was room again")


def without_inodes(soak: Soak, folder: Path, form: str, crops: bool) -> None:
    """A disk on which few files fit."""
    write_sources(folder, COUNT)
    with mounted_tmpfs(folder / "disk", 64 << 20, "nr_inodes=7") as disk:
        soak.call(epochs, folder, disk / "cache", form, crops)


def mounted_read_only(soak: Soak, folder: Path, form: str, crops: bool) -> None:
    """A disk that is written to and then is not any more."""
    write_sources(folder, COUNT)
    with mounted_tmpfs(folder / "disk", 64 << 20) as disk:
        soak.call(epochs, folder, disk / "cache", form, crops, 1)
        for record in sorted((disk / "cache").glob("*.safetensors"))[::2]:
            record.unlink()
        read_only(disk)
        soak.call(epochs, folder, disk / "cache", form, crops)


def removed(soak: Soak, folder: Path, form: str, crops: bool) -> None:
    """A cache folder that somebody deletes, moves or replaces while it is used."""
    write_sources(folder, COUNT)
    soak.call(epochs_with_removals, folder, form, crops, soak.random.random())


def epochs_with_removals(folder: Path, form: str, crops: bool, seed: float) -> Tally:
    """Epochs, between the items of which the cache folder goes."""
    enter()
    tally, rng, cache = Tally(), random.Random(seed), folder / "cache"
    items = write_sources(folder, COUNT)
    with warned():
        reader = Reader(items, cache, form, crops)
        for index in [i for _ in range(3) for i in range(COUNT)]:
            what = rng.random()
            if what < 0.2 and cache.is_dir():
                shutil.rmtree(cache, ignore_errors=True)
            elif what < 0.3 and not cache.exists():
                cache.write_bytes(b"")
            elif what < 0.4 and cache.is_dir():
                cache.rename(folder / f"moved-{rng.random()}")
            elif what < 0.6 and cache.is_file():
                cache.unlink()
            tally.trials += 1
            reader.check(index, tally)
            if what > 0.9:
                reader.dataset.flush()
        reader.dataset.flush()
    return tally


def failing(soak: Soak, folder: Path, form: str, crops: bool) -> None:
    """A disk whose second half stopped working, for a process that has read nothing of it yet."""
    if soak.quick:
        return
    write_sources(folder, COUNT)
    with loop_disk(folder, "ext4", size=64 << 20) as disk:
        soak.call(epochs, folder, disk.folder / "cache", form, crops, 1)
        os.sync()
        command("umount", str(disk.folder))
        command("mount", "-o", "noatime", disk.partition, str(disk.folder))
        os.truncate(disk.image, 10 << 20)  # reading past it is an input/output error now
        Path("/proc/sys/vm/drop_caches").write_text("3")
        soak.call(epochs, folder, disk.folder / "cache", form, crops, 1)
        os.truncate(disk.image, 64 << 20)


def coarse_times(soak: Soak, folder: Path, form: str, crops: bool) -> None:
    """A file system that knows seconds only, and gives inodes again at once."""
    folder.mkdir(exist_ok=True)
    with loop_disk(folder, "ext4", make=["-I", "128"], size=64 << 20) as disk:
        soak.call(epochs_with_versions, disk.folder, form, crops, 1.0 if soak.quick else 6.0)


def epochs_with_versions(folder: Path, form: str, crops: bool, seconds: float) -> Tally:
    """Sources change many times within a second, and records are damaged and replaced."""
    enter()
    tally, rng = Tally(), random.Random(seconds)
    items = write_sources(folder, 3, 10)
    reader = Reader(items, folder / "cache", form, crops, TINY)
    end, version = time.monotonic() + seconds, 10
    with warned():
        while time.monotonic() < end:
            tally.trials += 1
            index, what = rng.randrange(3), rng.random()
            if what < 0.5:
                version = 10 + (version + 1) % 80  # texts of one length
                write_source(folder, index, version)
            elif what < 0.6:
                Path(items[index]["source"]).write_text(f"{version}\n")  # in place
            elif what < 0.7:
                for record in (folder / "cache").glob("*.safetensors"):
                    record.unlink()
            reader.check(index, tally)
    reader.dataset.flush()
    return tally


def clock_set_back(soak: Soak, folder: Path, form: str, crops: bool) -> None:
    """A run an hour, and one a day, before the run that filled the cache."""
    if soak.quick:
        return
    if shutil.which("faketime") is None:
        pytest.skip("this machine has no faketime")
    write_sources(folder, COUNT)
    soak.call(epochs, folder, folder / "cache", form, crops, 1)
    code = (
        "import sys; from pathlib import Path; from tests.soak.disks import epochs; folder = Path(sys.argv[1]);"
        "tally = epochs(folder, folder / 'cache', sys.argv[2], sys.argv[3] == 'True'); print(tally.bad, tally.notes)"
    )
    for back in ("-1h", "-1d"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_FAKE_STAT": "1"}
        arguments = ["faketime", "-f", back, sys.executable, "-W", "ignore", "-c", code, str(folder), form, str(crops)]

        try:
            done = subprocess.run(arguments, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            soak.tally.found("hangs", f"a clock of {back}")
            continue
        soak.tally.trials += 1
        if done.returncode or not done.stdout.startswith("0 "):
            soak.tally.found("wrong", f"a clock of {back}: {done.stdout[-500:]}{done.stderr[-500:]}")


DISKS: list[Callable[[Soak, Path, str, bool], None]] = [
    full, without_inodes, mounted_read_only, removed, failing, coarse_times, clock_set_back,
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Calls that fail, simulated at the boundary to the operating system

#: Which calls fail, and whether their first argument is a descriptor.
CALLS = {
    "pread": True, "preadv": True, "writev": True, "write": True, "pwrite": True, "fsync": True, "fstat": True,
    "open": False, "stat": False, "rename": False, "replace": False, "link": False, "unlink": False, "mkdir": False,
    "scandir": False, "listdir": False, "utime": False,
}  # fmt: skip

ERRORS = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.ESTALE, errno.EROFS, errno.EDQUOT, errno.ENOMEM]


@contextmanager
def failures(folder: Path, rng: random.Random, often: float) -> Iterator[list[int]]:
    """Has calls on files of a folder fail or come short. Yields a list whose only member counts them."""
    plain = {name: getattr(os, name) for name in CALLS}
    counted, prefix = [0], str(folder)

    def concerns(name: str, target: Any) -> bool:
        try:
            path = plain_readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        except (OSError, TypeError):
            return False
        return isinstance(path, str) and path.startswith(prefix)

    plain_readlink = os.readlink

    def failing_call(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            target = more.get("dir_fd", more.get("src_dir_fd")) if args and not isinstance(args[0], int) else None
            if args and rng.random() < often and concerns(name, args[0] if target is None else target):
                counted[0] += 1
                if name in ("pread", "preadv", "write", "writev", "pwrite") and rng.random() < 0.6:
                    return short(name, *args, **more)
                raise OSError(rng.choice(ERRORS), "simulated", str(args[0]))
            return plain[name](*args, **more)

        return call

    def short(name: str, fd: int, data: Any, *more: Any, **others: Any) -> Any:
        """As much as half of what was asked for, but not nothing."""
        if name == "pread":
            return plain[name](fd, max(1, data // 2), *more)
        if name in ("preadv", "writev"):
            first = memoryview(data[0]).cast("B")
            return plain[name](fd, [first[: max(1, len(first) // 2)]], *more, **others)
        return plain[name](fd, memoryview(data)[: max(1, len(data) // 2)], *more)

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, failing_call(name))
        yield counted


def failing_calls(folder: Path, form: str, crops: bool, seed: float, seconds: float) -> Tally:
    """Epochs in which calls on the cache folder, and on one with copies, fail now and then."""
    enter()
    tally, rng, end = Tally(), random.Random(seed), time.monotonic() + seconds
    items = write_sources(folder, 4)
    folders = folder / "cache", folder / "cache-near"  # failures() goes by how paths begin

    def opened() -> Reader:
        settings: dict[str, Any] = {"max_bytes": rng.choice([None, "3 MB", "400 kB"])}
        if rng.random() < 0.5:
            settings.update(local_dir=folders[1], options={"local_bytes": rng.choice([None, "500 kB"])})
        return Reader(items, folders[0], form, crops, TINY, **settings)

    reader = opened()
    with warned():
        while time.monotonic() < end:
            if rng.random() < 0.3:
                reader = opened()
            if rng.random() < 0.3:
                for record in rng.choice(folders).glob("*.safetensors"):
                    record.unlink()
            with failures(folder / "cache", rng, rng.choice([0.02, 0.2, 0.7])) as counted:
                reader.check(rng.randrange(4), tally)
                reader.dataset.flush()
            tally.trials += counted[0]
        for _ in range(2):  # the disk is well again
            Reader(items, folder / "cache", form, crops, TINY).check_all(tally)
    return tally
