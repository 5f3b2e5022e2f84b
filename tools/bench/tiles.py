"""``python -m tools.bench dataset --only tiles``: cached epochs of compressed records, over data of several kinds.

Whole volumes show the cost of unpacking and the space saved on the disk. Random crops show the time saved by reading
only the tiles that they touch, and by keeping the runs of a label. :mod:`tools.bench.kinds` makes the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import monai.transforms as mt
from monai.transforms import Compose
from rich.progress import Progress

from monai_gds.bench.comparison import REFERENCE, SILENT
from monai_gds.bench.report import Report, Row
from tools.bench.competitors import (
    MONAIS,
    NNUNET,
    OURS_BITCOMP_LOADER,
    OURS_KEPT_LOADER,
    OURS_LZ4,
    OURS_LZ4_LOADER,
    OURS_PINNED_LOADER,
    OURS_WHOLE,
    OURS_WHOLE_LOADER,
    OURS_ZSTD,
    OURS_ZSTD_LOADER,
    chosen,
    one_by_one,
)
from tools.bench.kinds import KINDS, MakeKind, forget
from tools.bench.measured import Measured, measure
from tools.bench.workloads import KEYS, Workload

__all__ = ["tiles"]

#: Crops of an item, and the most voxels along an edge of them.
_SAMPLES, _MOST_VOXELS = 4, 96


def tiles(work: Workload, progress: Progress = SILENT) -> list[Report]:
    """Epochs over each kind: whole volumes in GB/s of float32, with the size of the caches; crops in items/s.

    The caches of a kind serve all of its reports.
    """
    reports = []
    for kind in KINDS:
        reports.append(_whole(work, kind, progress))
        reports.append(_crops(work, kind, progress))
        reports += [_crops_by_label(work, kind, crop, progress) for crop in _by_label(work, kind)]
        forget()
    return reports


def _whole(work: Workload, kind: str, progress: Progress) -> Report:
    names = [OURS_WHOLE, OURS_LZ4, OURS_ZSTD]
    names += [OURS_WHOLE_LOADER, OURS_LZ4_LOADER, OURS_ZSTD_LOADER] if work.loader else []
    on_gpu = work.device.type == "cuda"
    names += [OURS_BITCOMP_LOADER, OURS_KEPT_LOADER, OURS_PINNED_LOADER] if work.loader and on_gpu else []
    names += [MONAIS, REFERENCE] if on_gpu else [REFERENCE]
    return _measure(work, kind, "whole volumes", [], names, progress, unit="GB/s", sizes=True)


def _crops(work: Workload, kind: str, progress: Progress) -> Report:
    crop = mt.RandSpatialCropSamplesd(KEYS, _size(work), num_samples=_SAMPLES, random_size=False)
    names = [OURS_WHOLE, OURS_LZ4, OURS_ZSTD]
    names += [OURS_WHOLE_LOADER, OURS_LZ4_LOADER, OURS_ZSTD_LOADER] if work.loader else []
    names += [OURS_KEPT_LOADER] if work.loader and work.device.type == "cuda" else []
    return _measure(work, kind, _crops_of(crop, work), [crop], [*names, NNUNET, REFERENCE], progress, sizes=True)


def _crops_by_label(work: Workload, kind: str, crop: Callable[..., Any], progress: Progress) -> Report:
    """Crops for which MONAI searches the label's voxels again in each epoch."""
    names = [OURS_WHOLE, OURS_LZ4]
    names += [OURS_WHOLE_LOADER, OURS_LZ4_LOADER] if work.loader else []
    return _measure(work, kind, _crops_of(crop, work), [crop], names, progress, reference=OURS_WHOLE)


def _by_label(work: Workload, kind: str) -> list[Callable[..., Any]]:
    """The crops by label that suit a kind."""
    size, classes = _size(work), KINDS[kind].classes
    found: list[Callable[..., Any]] = []
    if classes:
        found.append(mt.RandCropByPosNegLabeld(KEYS, KEYS[1], size, num_samples=_SAMPLES))
    if classes > 2:
        found.append(mt.RandCropByLabelClassesd(KEYS, KEYS[1], size, num_classes=classes, num_samples=_SAMPLES))
    return found


def _size(work: Workload) -> tuple[int, ...]:
    """The shape of a crop. It is never a whole volume, since that would show nothing."""
    return (min(_MOST_VOXELS, work.side // 2),) * 3


def _crops_of(crop: Callable[..., Any], work: Workload) -> str:
    return f"{_SAMPLES} crops of {_size(work)[0]}³ ({type(crop).__name__}) from each"


def _measure(
    work: Workload, kind: str, what: str, random: Sequence[Callable[..., Any]], names: Sequence[str],
    progress: Progress, unit: str = "items/s", reference: str = REFERENCE, sizes: bool = False,
) -> Report:  # fmt: skip
    item_bytes = len(KEYS) * 4 * work.side**3
    # A crop is cheaper than collating it, which is the same for all: without it the table shows the difference.
    single = bool(random) and not work.loader
    items = f"{work.items} items of {item_bytes / 1e6:.0f} MB"
    how = "without a loader" if single else f"batch {work.batch_size}"
    title = f"{what}, {kind}: {items} to {work.device}, {how}, {work.page_cache}"
    if why := KINDS[kind].missing():
        return Report(title, unit, [Row(name, reason=why) for name in names], reference)
    comparison = Measured(
        title, [dict.fromkeys(KEYS, n) for n in range(work.items)], Compose([MakeKind(kind, work.side), *random]), KEYS,
        work.device, work.subfolder("".join(c if c.isalnum() else "-" for c in kind)), repeats=work.repeats,
        batch_size=1 if single else work.batch_size, unit=unit, reference=reference, cold=work.cold,
        nbytes=work.items * item_bytes, ceilings=not random, sizes=sizes, costs=bool(random),
        **(one_by_one(names) if single else {"competitors": chosen(names)}),
    )  # fmt: skip
    return measure(comparison, progress)
