"""``monai-gds demo``, end to end: NIfTI volumes, MONAI pipelines, epochs of GDSDataset beside MONAI's datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from monai.transforms import (
    Compose,
    EnsureTyped,
    LoadImaged,
    RandRotated,
    RandSpatialCropSamplesd,
    RandZoomd,
    ResizeWithPadOrCropd,
    Spacingd,
)

from monai_gds.base.console import progress, say, show, stdout
from monai_gds.bench.comparison import META, MONAIS_DATASETS, OURS, OURS_LOADER, Comparison, Competitor, busy, compare
from monai_gds.bench.report import Report, Row, differ
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.loader import GDSDataLoader
from monai_gds.storage import resolve_device

KEYS = ("image", "label")

#: Crops of a volume.
CROPS = 4

#: Timed epochs without rotation and zoom. They are short, and the datasets take turns.
READINGS = 25


def deterministic() -> list[Any]:
    """The cached half of all pipelines, that of MONAI's GDS tutorial."""
    return [
        LoadImaged(KEYS, ensure_channel_first=True),
        EnsureTyped(KEYS),
        Spacingd(KEYS, pixdim=(1.5, 1.5, 1.5), mode=("bilinear", "nearest")),
    ]


def pipelines(size: Sequence[int]) -> dict[str, Compose]:
    """The pipelines, by what their random half does. ``size``: voxels at the end of the last one."""
    sides = tuple(max(1, side // 2) for side in size)
    heavy = [
        RandRotated(KEYS, range_x=0.3, prob=0.5, mode=("bilinear", "nearest")),
        RandZoomd(KEYS, prob=0.5, min_zoom=0.9, max_zoom=1.1, mode=("trilinear", "nearest")),
        ResizeWithPadOrCropd(KEYS, spatial_size=tuple(size)),
    ]
    crops = RandSpatialCropSamplesd(KEYS, sides, num_samples=CROPS, random_size=False)
    return {
        "whole volumes": Compose(deterministic()),
        f"{CROPS} random crops of {'x'.join(map(str, sides))} from each": Compose([*deterministic(), crops]),
        "whole volumes, rotated and zoomed at random": Compose([*deterministic(), *heavy]),
    }


def run(
    items: list[dict[str, str]], cache: Path, *, size: Sequence[int], epochs: int, device: str | None, backend: str
) -> None:
    """Runs the epochs, prints tables of what differed, and compares the volumes.

    On a CPU they are also compared after the random transforms. A GPU rounds interpolations differently, so only the
    cached part can be equal to the last bit there.

    Args:
        items: pairs of NIfTI files.
        cache: an empty folder for all caches.
        size: see :func:`pipelines`.
        epochs: how many epochs each dataset has with rotation and zoom, at least 2: the first one fills its cache.
        device, backend: see :class:`GDSDataset`.

    Raises:
        StorageError: the datasets returned different volumes.
    """
    target = resolve_device(device)

    def ours(items: Sequence[Any], transform: Compose, folder: Path, target: torch.device) -> GDSDataset:
        return GDSDataset(items, transform, folder, target, backend=backend)

    peers = {name: MONAIS_DATASETS[name] for name in (META, "CacheDataset")}
    competitors = {**peers, OURS: Competitor(ours), OURS_LOADER: Competitor(ours, GDSDataLoader)}
    with ours(items, Compose(deterministic()), cache / "0", target) as half:
        say(f"target {target}, backend {half.backend} ({half.backend_reason})")
    if warning := busy():
        say(warning)
    reports = []
    with progress(stdout) as bars:
        for number, (what, transform) in enumerate(pipelines(size).items()):
            heavy = "rotated" in what
            comparison = Comparison(
                f"{what}: {len(items)} volumes to {target}, cached", items, transform, KEYS, target,
                cache / str(number), competitors, epochs - 1 if heavy else READINGS, unit="volumes/s", reference=META,
                equal=not heavy or target.type == "cpu",
            )  # fmt: skip
            reports.append(compare(comparison, bars))
    for report in reports:
        shown = merged(report)
        if len(shown.rows) > 1:
            show(shown.table())
        else:
            say(f"{report.title}: {range_of(shown.rows[0])} {report.unit}, whichever dataset.")
            say("This run does not tell them apart: the transforms take the time, or the machine is busy.")
    stdout.print("same volumes, value by value, under the same seed", highlight=False)


def range_of(row: Row) -> str:
    """From the lowest to the highest sample."""
    digits = 0 if max(row.samples) >= 10 else 1
    return f"{min(row.samples):.{digits}f} to {max(row.samples):.{digits}f}"


def merged(report: Report) -> Report:
    """The report from the slowest to the fastest row. Neighbours that do not differ become one.

    So its order does not change from run to run.
    """
    ran = sorted((row for row in report.rows if row.median is not None), key=lambda row: row.median or 0)
    groups: list[list[Row]] = []
    for before, row in zip([None, *ran], ran, strict=False):
        if before is None or differ(row, before):
            groups.append([])
        groups[-1].append(row)
    groups = [sorted(group, key=list(report.rows).index) for group in groups]
    reference = next(group for group in groups if report.reference in [row.name for row in group])
    rows = {
        "\n".join(row.name for row in group): tuple(sample for row in group for sample in row.samples)
        for group in groups
    }
    notes = {name: {"": "not told apart"} if "\n" in name else {} for name in rows}
    return replace(
        report,
        rows=[Row(name, samples, notes=notes[name]) for name, samples in rows.items()],
        reference="\n".join(row.name for row in reference),
    )
