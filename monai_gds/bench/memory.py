"""Memory that GDSDataLoader takes, epoch by epoch, in a process of its own, beside what it promises.

Host memory is what the kernel calls anonymous (files that are mapped are not), less what the process held before the
first epoch, and less the pinned staging that the backend reports. It is looked at whenever a batch arrives, and every
few milliseconds in between.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from monai.transforms import Compose

from monai_gds.bench.dataset import KEYS, MakeVolumes, Settings
from monai_gds.bench.report import Report, Row
from monai_gds.dataset import GDSDataset
from monai_gds.errors import MonaiGdsError
from monai_gds.loader import GDSDataLoader
from monai_gds.storage import open_storage

__all__ = ["memory"]

#: What the loader may take beyond its records.
_ALLOWANCE = 64 << 20

_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class _Run:
    """What the other process does."""

    folder: str
    device: str
    items: int
    side: int
    batch_size: int
    epochs: int


def memory(settings: Settings, epochs: int = 20) -> list[Report]:
    """One report of the host's memory, and on CUDA one of the device's.

    Raises:
        MonaiGdsError: the other process failed; what it said is in the message.
    """
    folder = settings.folder / "memory"
    run = _Run(str(folder), str(settings.device), settings.items, settings.side, settings.batch_size, epochs)
    _dataset(run, "cpu").populate(progress=False)
    done = subprocess.run(
        [sys.executable, "-m", "monai_gds.bench.memory", json.dumps(asdict(run))], capture_output=True, text=True
    )
    if done.returncode:
        raise MonaiGdsError(f"the process whose memory was measured ended with {done.returncode}:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    about = (
        f"{epochs} epochs of {settings.items} records of {found['record'] / 1e6:.0f} MB, batch {settings.batch_size}, "
        f"to {settings.device}"
    )
    promise = Row(f"({found['in_flight']} records in flight + 1) + 64 MiB", (found["promise"] / 1e6,))
    staging = f"without {found['staging'] / 1e6:.0f} MB of staging"
    reports = [_report(f"host memory of GDSDataLoader, {staging}: {about}", found["host"], promise)]
    if found["device"]:
        reports.append(_report(f"device memory of GDSDataLoader: {about}", found["device"], promise))
    return reports


def _report(title: str, by_epoch: list[list[int]], promise: Row) -> Report:
    rows = [Row(f"epoch {n}", tuple(v / 1e6 for v in values)) for n, values in enumerate(by_epoch, 1)]
    return Report(title, "MB", rows, ceilings=[promise])


def _dataset(run: _Run, device: str) -> GDSDataset:
    items = [dict.fromkeys(KEYS, n) for n in range(run.items)]
    return GDSDataset(items, Compose([MakeVolumes((1, run.side, run.side, run.side))]), run.folder, device)


# What follows runs in the other process.


def _measure(run: _Run) -> dict[str, Any]:
    dataset = _dataset(run, run.device)
    loader = GDSDataLoader(dataset, batch_size=run.batch_size)
    on_gpu = dataset.device.type == "cuda"
    pinned_counts = on_gpu and _pinned_memory_is_anonymous()
    storage = open_storage(dataset.backend, dataset.device)

    def staging() -> int:
        return int(storage.describe().get("pinned_bytes", 0)) if pinned_counts else 0

    gc.collect()
    before = _anonymous()
    host, device = [], []
    for _ in range(run.epochs):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(dataset.device)
        with _looking() as seen:
            _epoch(loader, run, seen)
        taken = staging()
        host.append([max(0, value - before - taken) for value in seen])
        if on_gpu:
            device.append([torch.cuda.max_memory_allocated(dataset.device)])
    record = max(path.stat().st_size for path in Path(run.folder).glob("*.safetensors"))
    in_flight = min(loader.records_in_flight(), max(1, loader.prefetch_bytes // record), run.items)
    return {
        "host": host, "device": device, "record": record, "in_flight": in_flight,
        "promise": (in_flight + 1) * record + _ALLOWANCE, "staging": staging(),
    }  # fmt: skip


def _epoch(loader: GDSDataLoader, run: _Run, seen: list[int]) -> None:
    batches = 0
    for batch in loader:
        for key in KEYS:
            batch[key].as_subclass(torch.Tensor).sum()
        seen.append(_anonymous())
        batches += 1
        del batch  # the loop's variable would keep it until the next one is there: that is not the loader's
    if batches != -(-run.items // run.batch_size):
        raise RuntimeError(f"there were {batches} batches")


@contextlib.contextmanager
def _looking() -> Iterator[list[int]]:
    """Looks at this process's memory again and again; what it saw is in the list."""
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            seen.append(_anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _anonymous() -> int:
    """Bytes of anonymous memory that this process has in RAM (proc_pid_smaps(5)); unlike RssAnon, they are exact."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this kernel does not tell how much memory is anonymous")


def _pinned_memory_is_anonymous() -> bool:
    """Whether the kernel counts pinned memory among the anonymous: that depends on how the driver takes it."""
    torch.zeros(1, device="cuda")
    before = _anonymous()
    kept = torch.zeros(32 << 20, dtype=torch.uint8, pin_memory=True)
    return _anonymous() - before > kept.numel() // 2


if __name__ == "__main__":
    print(json.dumps(_measure(_Run(**json.loads(sys.argv[1])))))
