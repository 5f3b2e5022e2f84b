"""Power cuts: a disk is copied in the middle of writing, and the copy is mounted as after a crash.

What was durable when the copy began is there and sound. Everything else is right, or is computed again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from monai_gds.folder.maintenance import check
from tests.loopdisk import loop_device, loop_disk
from tests.loopdisk import run as command
from tests.soak.kills import wait_for_start
from tests.soak.made import TINY, Reader, enter, warned, write_sources
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["run"]

WAYS = [("whole", False), ("lz4", True)]

COUNT = 400


def run(soak: Soak) -> None:
    """Cuts on ext4 and XFS, durable and not."""
    once = True
    while once or soak.more():
        once = False
        for kind in ("ext4", "xfs"):
            with soak.part(kind):
                cut(soak, kind, durable=soak.random.random() < 0.6)


def cut(soak: Soak, kind: str, durable: bool) -> None:
    """One disk and one cut."""
    folder = soak.folder / f"{kind}-{soak.random.random()}"
    write_sources(folder, COUNT)
    form, crops = soak.random.choice(WAYS)
    log = folder / "saved"
    log.touch()
    try:
        with loop_disk(folder, kind) as disk:
            child = soak.child()
            child.process.start(fill, folder, disk.folder / "cache", form, crops, durable)
            wait_for_start(disk.folder)
            end = time.monotonic() + soak.random.uniform(0.1, 3.0)
            while time.monotonic() < end:
                time.sleep(0.005)
            saved = log.read_text().split("\n")[:-1]  # these are durable before the copy begins
            command("cp", "--sparse=always", str(disk.image), str(folder / "copy.img"))
            child.kill()
            soak.end(child)
        after(soak, kind, folder, form, crops, saved if durable else [])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fill(folder: Path, cache: Path, form: str, crops: bool, durable: bool) -> None:
    """Reads one item after another, and notes each that has been returned."""
    enter()
    items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    reader = Reader(items, cache, form, crops, TINY, options={"durable": durable})
    with (folder / "saved").open("a", buffering=1) as log:
        for index in range(COUNT):
            reader.dataset[index]
            log.write(f"{index}\n")
    time.sleep(60)


def after(soak: Soak, kind: str, folder: Path, form: str, crops: bool, saved: list[str]) -> None:
    """What is on the copy."""
    where = folder / "after"
    where.mkdir()
    with loop_device(folder / "copy.img") as device:
        try:
            mounted(kind, device, where)
        except RuntimeError as e:
            soak.tally.skipped.append(f"a copy of {kind} that cannot be mounted: {e}")
            return
        try:
            soak.tally.trials += 1
            soak.call(look, folder, where / "cache", form, crops, [int(index) for index in saved], timeout=200)
        finally:
            command("umount", "-l", str(where))


def mounted(kind: str, device: str, where: Path) -> None:
    """Mounts what a crash left, which replays the journal; a copy that was not made in one instant may need more."""
    options = "nouuid" if kind == "xfs" else "noatime"
    try:
        command("mount", "-t", kind, "-o", options, device, str(where))
    except RuntimeError:
        repair = ["xfs_repair", "-L", device] if kind == "xfs" else ["fsck.ext4", "-y", device]
        subprocess.run(repair, capture_output=True, check=False)
        command("mount", "-t", kind, "-o", options, device, str(where))


def look(folder: Path, cache: Path, form: str, crops: bool, saved: list[int]) -> Tally:
    """Reads every item, after counting the records that should be there."""
    enter()
    tally = Tally()
    items = [{"source": str(folder / f"source_{i}.txt"), "index": i} for i in range(COUNT)]
    there = set(os.listdir(cache)) if cache.exists() else set()
    with warned():
        reader = Reader(items, cache, form, crops, TINY)
        for index in saved:
            record = Path(reader.dataset.session.cache().record_path(reader.dataset.key(index).digest))
            if record.name not in there:
                tally.found("wrong", f"the durable record of item {index} of {len(saved)} is not there")
            elif (found := check(record)) is None or found.problem:
                tally.found("wrong", f"the durable record of item {index}: {found and found.problem}")
        for index in range(min(COUNT, len(there) + 5)):
            reader.check(index, tally)
        reader.dataset.flush()
    return tally
