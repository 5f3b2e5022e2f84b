"""``python -m tools.bench memory``: epochs where memory is short, each dataset in a control group of its own.

Bytes are counted, and no time: what a process reads from the drive does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from monai.data import CacheDataset, DataLoader, Dataset, PersistentDataset
from monai.transforms import Compose, RandCropByPosNegLabeld, ScaleIntensityRanged, Transform
from rich.progress import Progress

from monai_gds.bench.comparison import SILENT
from monai_gds.bench.made_up import ct_like
from monai_gds.bench.pagecache import drop
from monai_gds.bench.report import Report, Row
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import BackendUnavailable, MonaiGdsError
from monai_gds.loader import GDSDataLoader

KEYS = ("image", "label")
OURS = "GDSDataset, GDSDataLoader"
WHOLE = "GDSDataset, GDSDataLoader, not compressed"
DATASETS = ("PersistentDataset", "CacheDataset", WHOLE, OURS)

#: Where the files of the kernel are. Tests lay out another machine in a folder.
ROOT = Path("/")

#: A share of the caches that may stay in the page cache, though it was dropped.
_STAYS = 0.05

#: Runs in the group from its first import on: arguments are the group's list of processes, and the task.
_IN_GROUP = """\
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from tools.bench.short_memory import epochs
epochs(sys.argv[2])
"""


class MakeVolume(Transform):  # type: ignore[misc]
    """Makes the CT-like volume of a number, and its labels, as float32 of shape (1, *size)."""

    def __init__(self, size: tuple[int, int, int]) -> None:
        self.size = size

    def __call__(self, number: int) -> dict[str, torch.Tensor]:
        pair = zip(KEYS, ct_like(self.size, number), strict=True)
        return {key: torch.from_numpy(volume).float()[None] for key, volume in pair}


def memory(
    folder: Path, volumes: int, size: tuple[int, int, int], limit: int, turns: int, progress: Progress = SILENT
) -> Report:
    """Runs epochs over random crops with each dataset, in a process that may have so much memory.

    The page cache of the dataset's files counts as that process's, as the kernel does. The caches are filled before,
    without a limit, and dropped from the page cache.

    Args:
        folder: an empty folder on the drive, for the caches.
        volumes: how many there are, of an image and a label each.
        size: voxels of each.
        limit: bytes of memory.
        turns: epochs of each dataset.
        progress: shows how far it is.

    Returns:
        Megabytes that each epoch read from the drive. A dataset that was killed has the reason.

    Raises:
        BackendUnavailable: control groups cannot be made here.
        MonaiGdsError: a process failed otherwise.
    """
    task = progress.add_task("epochs", total=len(DATASETS))
    rows = []
    with group(limit) as processes:
        for number, name in enumerate(DATASETS):
            work: dict[str, Any] = {
                "name": name, "folder": str(folder / str(number)), "volumes": volumes, "size": size, "turns": turns,
            }  # fmt: skip
            progress.update(task, description=name)
            fill(work)
            rows.append(_limited(work, processes, limit))
            progress.advance(task)
    kept = volumes * 2 * 4 * size[0] * size[1] * size[2]
    title = f"{volumes} volumes, {kept / 1e9:.2f} GB, crops of each, in {limit / 1e9:.2f} GB of memory"
    return Report(title, "MB read per epoch", rows)


def _limited(work: dict[str, Any], processes: Path, limit: int) -> Row:
    command = [sys.executable, "-c", _IN_GROUP, str(processes), json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -9:
        return Row(work["name"], reason=f"killed by the kernel: it needs more than {limit / 1e9:.2f} GB of memory")
    if done.returncode:
        raise MonaiGdsError(f"{work['name']}: {done.stderr.strip().splitlines()[-1]}")
    read = tuple(json.loads(done.stdout))
    kept = sum(path.stat().st_size for path in Path(work["folder"]).rglob("*") if path.is_file())
    notes = {"MB in all": f"{sum(read) / 1e6:.0f}", "MB on the drive": f"{kept / 1e6:.0f}"}
    return Row(work["name"], tuple(nbytes / 1e6 for nbytes in read), notes=notes)


def dataset_of(work: dict[str, Any]) -> Dataset:
    """The dataset that a task names, over its folder."""
    size = tuple(work["size"])
    window = ScaleIntensityRanged("image", -200, 400, 0, 1, clip=True)
    crop = RandCropByPosNegLabeld(KEYS, "label", tuple(side // 2 for side in size), num_samples=2)
    transform = Compose([MakeVolume(size), window, crop])
    items = range(work["volumes"])
    if work["name"] == "CacheDataset":
        return CacheDataset(items, transform, num_workers=1, progress=False)
    if work["name"] == "PersistentDataset":
        return PersistentDataset(items, transform, work["folder"])
    return GDSDataset(items, transform, work["folder"], "cpu", compression=None if work["name"] == WHOLE else "auto")


def fill(work: dict[str, Any]) -> None:
    """Fills a task's cache, and drops it from the page cache. There is none of ``CacheDataset``.

    Raises:
        MonaiGdsError: the files stay in memory, so that nothing would be read from a drive.
    """
    if work["name"] == "CacheDataset":
        return
    dataset = dataset_of(work)
    for number in range(work["volumes"]):
        dataset[number]
    if isinstance(dataset, GDSDataset):
        dataset.flush()
    del dataset
    if drop(path for path in Path(work["folder"]).rglob("*") if path.is_file()) > _STAYS:
        raise MonaiGdsError(f"files in {work['folder']} stay in memory: name a folder on a drive with --cache-dir")


def epochs(task: str) -> None:
    """Runs a task's epochs in this process, and prints the bytes that each one read from the drive, as JSON."""
    work = json.loads(task)
    dataset = dataset_of(work)
    loader = (GDSDataLoader if isinstance(dataset, GDSDataset) else DataLoader)(dataset, shuffle=True)
    torch.manual_seed(0)
    found = []
    for _ in range(work["turns"]):
        before = _read()
        for batch in loader:
            for key in KEYS:
                batch[key].sum()
        found.append(_read() - before)
    print(json.dumps(found))


def _read() -> int:
    """Bytes that this process has had the drive read, see proc_pid_io(5)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


@contextmanager
def group(limit: int) -> Iterator[Path]:
    """A control group with so many bytes of memory and no swap, for a ``with`` block that yields its list of processes.

    Raises:
        BackendUnavailable: none can be made, with the reason.
    """
    made = None
    reasons: dict[str, None] = {}
    for parent, limits in _parents():
        try:
            made = Path(tempfile.mkdtemp(prefix="monai-gds-", dir=parent))
            for name, needed in limits.items():
                _set(made / name, limit if needed else 0, needed)
            break
        except OSError as e:
            reasons[_why_not(parent, made, e)] = None
            if made is not None:
                made.rmdir()
                made = None
    if made is None:
        why = "; ".join(reasons) or "the kernel has no memory controller mounted below /sys/fs/cgroup"
        raise BackendUnavailable(f"no control group can be made here: {why}")
    try:
        yield made / "cgroup.procs"
    finally:
        _remove(made)


def _set(file: Path, value: int, needed: bool) -> None:
    try:
        file.write_text(str(value))
    except OSError:
        if needed:
            raise


def _why_not(parent: Path, made: Path | None, error: OSError) -> str:
    """Why a group cannot be made there, or its limit not be set, which version 2 has only where it is passed on."""
    passed_on = parent / "cgroup.subtree_control"
    if made is not None and passed_on.exists() and "memory" not in passed_on.read_text().split():
        return f"{passed_on} does not name memory, which is for the administrator to change"
    return str(error)


def _parents() -> Iterator[tuple[Path, dict[str, bool]]]:
    """Where a group may be made, and the files of its limits: whether each is the memory's, and not that of swap.

    The root of the hierarchy, for root; then the group of this process, which a user may have been given.
    """
    mine = dict(line.split(":", 2)[1:] for line in (ROOT / "proc/self/cgroup").read_text().splitlines())
    first, second = ROOT / "sys/fs/cgroup/memory", ROOT / "sys/fs/cgroup"
    for root, path, limits in (
        (first, mine.get("memory"), {"memory.limit_in_bytes": True, "memory.swappiness": False}),
        (second, mine.get(""), {"memory.max": True, "memory.swap.max": False}),
    ):
        # Beside version 1, the folder of version 2 is another one, with mere folders in it.
        if path is not None and root.is_dir() and (root is first or (root / "cgroup.controllers").exists()):
            yield root, limits
            yield root / path.removeprefix("/"), limits


def _remove(made: Path) -> None:
    """Removes a group. The kernel may count a process that was killed for a moment longer."""
    for _ in range(50):
        with suppress(OSError):
            return made.rmdir()
        time.sleep(0.1)
    return None
