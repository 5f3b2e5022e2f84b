"""``python -m tools.bench tune``: DeepNVMe's best settings for a drive."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from monai_gds.bench.report import Report, Row
from monai_gds.bench.tensor import TUNABLE, Tensors, load, store, title
from monai_gds.errors import StorageError

__all__ = ["GRID", "tune"]

#: The settings that are tried, in every combination. DeepSpeed's ds_nvme_tune tries the same, but transfers of 1 and
#: 8 MiB only.
GRID: dict[str, Sequence[Any]] = {
    "block_size": (256 << 10, 1 << 20, 8 << 20),
    "queue_depth": (8, 32, 128),
    "single_submit": (False, True),
    "intra_op_parallelism": (1, 2, 4, 8),
}


def tune(
    folder: Path, nbytes: int, device: torch.device, loop: int, progress: Callable[[int, int], None]
) -> tuple[list[Report], dict[str, Any]]:
    """Loads and stores a tensor with every combination of :data:`GRID`.

    Each is timed ``loop`` times; all are tried once before any is tried again. ``progress`` is called with the number
    done and the total.

    Returns:
        The tables of loads and stores, best combination first, and the best settings: those with the greatest sum of
        both medians.

    Raises:
        StorageError: no combination works.
    """
    combinations = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    rates: dict[str, list[list[float]]] = {verb: [[] for _ in combinations] for verb in ("load", "store")}
    reasons = [""] * len(combinations)
    with tempfile.TemporaryDirectory(prefix="monai-gds-tensor-", dir=folder) as private:
        path = Path(private) / "tensor.bin"
        path.write_bytes(os.urandom(nbytes))
        for turn, (number, options) in itertools.product(range(loop), enumerate(combinations)):
            progress(turn * len(combinations) + number, loop * len(combinations))
            if not reasons[number]:
                settings = Tensors(TUNABLE[:1], 1, options=options)
                found = {"load": load(path, device, settings), "store": store(folder, nbytes, device, settings)}
                for verb, report in found.items():
                    rates[verb][number] += report.rows[0].samples
                    reasons[number] = reasons[number] or report.rows[0].reason

    def both(number: int) -> float:
        return 0 if reasons[number] else sum(statistics.median(of[number]) for of in rates.values())

    order = sorted(range(len(combinations)), key=both, reverse=True)
    if reasons[order[0]]:
        raise StorageError(reasons[order[0]])
    names = [", ".join(f"{name} {value}" for name, value in settings.items()) for settings in combinations]
    reports = []
    for verb, of in rates.items():
        rows = [Row(names[n], tuple(of[n]) if not reasons[n] else (), reasons[n]) for n in order]
        reports.append(Report(title(verb, device, nbytes), "GB/s", rows))
    return reports, combinations[order[0]]
