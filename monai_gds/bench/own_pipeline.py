"""A user's own pipeline: where the time of its epochs goes, and how fast it is compared with MONAI's datasets."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from monai.transforms import Compose
from rich.progress import Progress

from monai_gds.bench.comparison import (
    MONAIS_DATASETS,
    OURS,
    OURS_LOADER,
    SILENT,
    Comparison,
    Competitor,
    Entrant,
    compare,
)
from monai_gds.bench.report import Report, Row, differ
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.doctor import probes
from monai_gds.doctor.isolation import Answer
from monai_gds.loader import GDSDataLoader
from monai_gds.loader.stats import Stats
from monai_gds.programs.program import outer_tensors


def profile(
    dataset: GDSDataset,
    batch_size: int,
    num_workers: int,
    epochs: int,
    programs: Literal["auto", "fast", "check", "off"] = "auto",
) -> tuple[list[Stats], Answer]:
    """Measures epochs through ``GDSDataLoader``, each until all its items are saved, and then the drive.

    The consumer reads every tensor once. Tensors that are mapped would otherwise cost nothing.

    Returns:
        The statistics of each epoch, and the drive's speed (:func:`monai_gds.doctor.probes.speed`).
    """
    loader = GDSDataLoader(dataset, num_workers, batch_size=batch_size, programs=programs, stats=True)
    found = []
    for _ in range(epochs):
        for batch in loader:
            for tensor in outer_tensors(batch):
                tensor.as_subclass(torch.Tensor).sum()
        dataset.flush()
        found.append(loader.stats())
    try:
        if dataset.cache_dir is None:
            raise OSError("there is no cache_dir")
        with tempfile.TemporaryDirectory(prefix="monai-gds-profile-", dir=dataset.cache_dir) as folder:
            return found, Answer(probes.speed(str(dataset.device), folder))
    except OSError as e:
        return found, Answer({}, str(e))


class _Own(Comparison):
    """Tells also what served the bytes of ours, in an epoch of its own."""

    def notes(self, entrant: Entrant) -> dict[str, str]:
        found = super().notes(entrant)
        if isinstance(entrant.dataset, GDSDataset):
            loader = GDSDataLoader(entrant.dataset, batch_size=self.batch_size, stats=True)
            for _ in loader:
                pass
            found["read by"] = loader.stats().read_by
        return found


def beside_others(
    dataset: GDSDataset,
    folder: Path,
    items: int,
    batch_size: int,
    repeats: int,
    cold: bool,
    progress: Progress = SILENT,
) -> Report:
    """Cached epochs over the first items of a dataset, with its settings and its own cache, compared with MONAI's."""
    data = [dataset.data[index] for index in range(min(items, len(dataset)))]

    def make(items: Sequence[Any], transform: Compose, folder: Path | None, device: torch.device) -> GDSDataset:
        view = copy(dataset)
        view.data = items
        view.settings = replace(view.settings, cache_dir=folder, local_dir=None, max_bytes=None)
        return view

    first = make(data, dataset.transform, None, dataset.device)[0]  # not by the transforms: errors name the file
    ours = {OURS: Competitor(make), OURS_LOADER: Competitor(make, GDSDataLoader)}
    comparison = _Own(
        f"the first {len(data)} items of {len(dataset)} to {dataset.device}, batch {batch_size}, "
        f"page cache {'dropped' if cold else 'warm'}",
        data, dataset.transform, _keys(first), dataset.device, folder, {**ours, **MONAIS_DATASETS},
        repeats, batch_size, cold=cold,
    )  # fmt: skip
    report = compare(comparison, progress)
    (reference,) = (row for row in report.rows if row.name == report.reference)
    return replace(report, rows=[row if row is reference else _beside(reference, row) for row in report.rows])


def _beside(reference: Row, row: Row) -> Row:
    """The row, with a column that says so if its ratio may be noise."""
    if not (row.samples and reference.samples) or differ(row, reference):
        return row
    return replace(row, notes={"difference": "not told apart", **row.notes})


def _keys(result: Any) -> list[str]:
    """The keys of the tensors in a pipeline's result."""
    first = result[0] if isinstance(result, list) else result
    if not isinstance(first, Mapping):
        raise ValueError(f"the pipeline returns a {type(first).__name__}: only dicts of tensors can be compared")
    return [key for key, value in first.items() if isinstance(value, (torch.Tensor, np.ndarray))]
