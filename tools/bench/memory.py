"""Memory of GDSDataLoader, epoch by epoch, in a separate process, compared with its documented bound.

Host memory is what the kernel counts as anonymous, which excludes mapped files, minus what the process held before the
first epoch, and minus the pinned staging that the backend reports. It is sampled whenever a batch arrives and every few
milliseconds in between.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from monai.transforms import Compose

from monai_gds.bench.report import Report, Row
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.errors import MonaiGdsError
from monai_gds.loader import GDSDataLoader
from monai_gds.storage import open_storage
from tools.bench.workloads import KEYS, MakeVolumes, Workload

__all__ = ["memory"]

#: What the loader may take beyond its records.
_ALLOWANCE = 64 << 20


def memory(work: Workload, epochs: int = 20) -> list[Report]:
    """One report of host memory and, on CUDA, one of device memory."""
    _dataset(work, torch.device("cpu")).populate(progress=False)
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = pool.submit(_measure, work, epochs).result()
    except BrokenProcessPool as e:
        raise MonaiGdsError(f"the process whose memory was measured died: {e}") from e
    about = (
        f"{epochs} epochs of {work.items} records of {found['record'] / 1e6:.0f} MB, batch {work.batch_size}, "
        f"to {work.device}"
    )
    bound = Row(f"({found['in_flight']} records in flight + 1) + 64 MiB", (found["bound"] / 1e6,))

    def report(title: str, by_epoch: list[list[int]]) -> Report:
        rows = [Row(f"epoch {n}", tuple(v / 1e6 for v in values)) for n, values in enumerate(by_epoch, 1)]
        return Report(f"{title}: {about}", "MB", rows, ceilings=[bound])

    staging = f"without {found['staging'] / 1e6:.0f} MB of staging"
    reports = [report(f"host memory of GDSDataLoader, {staging}", found["host"])]
    if found["device"]:
        reports.append(report("device memory of GDSDataLoader", found["device"]))
    return reports


def _dataset(work: Workload, device: torch.device) -> GDSDataset:
    items = [dict.fromkeys(KEYS, n) for n in range(work.items)]
    transform = Compose([MakeVolumes((1, work.side, work.side, work.side))])
    return GDSDataset(items, transform, work.folder / "memory", device)


# What follows runs in the other process.


def _measure(work: Workload, epochs: int) -> dict[str, Any]:
    dataset = _dataset(work, work.device)
    loader = GDSDataLoader(dataset, batch_size=work.batch_size)
    on_gpu = dataset.device.type == "cuda"
    pinned_counts = on_gpu and _pinned_memory_is_anonymous()
    storage = open_storage(dataset.backend, dataset.device)

    def staging() -> int:
        return int(storage.describe().get("pinned_bytes", 0)) if pinned_counts else 0

    gc.collect()
    before = _anonymous()
    host, device = [], []
    for _ in range(epochs):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(dataset.device)
        with _sampling() as seen:
            _epoch(loader, work, seen)
        taken = staging()
        host.append([max(0, value - before - taken) for value in seen])
        if on_gpu:
            device.append([torch.cuda.max_memory_allocated(dataset.device)])
    record = max(path.stat().st_size for path in (work.folder / "memory").glob("*.safetensors"))
    fit = max(1, loader.bytes_in_flight(dataset.device) // record)
    in_flight = min(loader.records_in_flight(), fit, work.items)
    return {
        "host": host, "device": device, "record": record, "in_flight": in_flight,
        "bound": (in_flight + 1) * record + _ALLOWANCE, "staging": staging(),
    }  # fmt: skip


def _epoch(loader: GDSDataLoader, work: Workload, seen: list[int]) -> None:
    batches = 0
    for batch in loader:
        for key in KEYS:
            batch[key].as_subclass(torch.Tensor).sum()
        seen.append(_anonymous())
        batches += 1
        del batch  # the loop variable would keep it until the next batch arrives, which is not the loader's fault
    if batches != -(-work.items // work.batch_size):
        raise RuntimeError(f"there were {batches} batches")


@contextmanager
def _sampling() -> Iterator[list[int]]:
    """Samples this process's anonymous memory every 5 ms in a thread, into the list that it yields."""
    seen: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            seen.append(_anonymous())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(sample)
        try:
            yield seen
        finally:
            stop.set()


def _anonymous() -> int:
    """Bytes of this process's anonymous memory in RAM, see proc_pid_smaps(5); exact, unlike RssAnon."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this kernel does not report anonymous memory")


def _pinned_memory_is_anonymous() -> bool:
    """Whether the kernel counts pinned memory as anonymous, which depends on the driver."""
    torch.zeros(1, device="cuda")
    before = _anonymous()
    kept = torch.zeros(32 << 20, dtype=torch.uint8, pin_memory=True)
    return _anonymous() - before > kept.numel() // 2
