"""``monai-gds demo``, end to end: NIfTI volumes, a MONAI pipeline, epochs of GDSDataset beside PersistentDataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from monai.transforms import Compose, EnsureTyped, LoadImaged, RandRotated, RandZoomd, ResizeWithPadOrCropd, Spacingd

from monai_gds.base.console import progress, say, show, stdout
from monai_gds.bench.comparison import META, MONAIS_DATASETS, OURS, OURS_LOADER, Comparison, Competitor, compare
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.loader import GDSDataLoader
from monai_gds.storage import resolve_device

KEYS = ("image", "label")
SEED = 7

#: Timed epochs of the cached part alone. They are short, and the datasets take turns.
READINGS = 7


def pipeline(size: Sequence[int], *, random: bool = True) -> Compose:
    """The pipeline of MONAI's GDS tutorial; volumes are padded or cropped to ``size`` voxels at the end.

    Without ``random``, it ends before the first random transform.
    """
    deterministic = [
        LoadImaged(KEYS, ensure_channel_first=True),
        EnsureTyped(KEYS),
        Spacingd(KEYS, pixdim=(1.5, 1.5, 1.5), mode=("bilinear", "nearest")),
    ]
    augmentation = [
        RandRotated(KEYS, range_x=0.3, prob=0.5, mode=("bilinear", "nearest")),
        RandZoomd(KEYS, prob=0.5, min_zoom=0.9, max_zoom=1.1, mode=("trilinear", "nearest")),
        ResizeWithPadOrCropd(KEYS, spatial_size=tuple(size)),
    ]
    compose = Compose([*deterministic, *augmentation] if random else deterministic)
    return compose.set_random_state(SEED)


class _Whole(Comparison):
    """Epochs of the whole pipeline."""

    def notes(self, entrant: Any) -> dict[str, str]:
        return {"first epoch": f"{entrant.first:.2f} s"}


@dataclass(frozen=True, kw_only=True)
class _Cached(Comparison):
    """Epochs of its cached part, of so many bytes."""

    nbytes: int
    unit: str = "GB/s"

    @property
    def amount(self) -> float:
        return self.nbytes / 1e9


def run(
    items: list[dict[str, str]], cache: Path, *, size: Sequence[int], epochs: int, device: str | None, backend: str
) -> None:
    """Runs the epochs, prints the tables and compares the volumes.

    On a CPU they are also compared after the random transforms. A GPU rounds interpolations differently, so only the
    cached part can be equal to the last bit there.

    Args:
        items: pairs of NIfTI files.
        cache: an empty folder for all caches.
        size: see :func:`pipeline`.
        epochs: how many epochs of each dataset run, at least 2: the first one fills the cache.
        device, backend: see :class:`GDSDataset`.

    Raises:
        StorageError: the datasets returned different volumes.
    """
    target = resolve_device(device)

    def ours(items: Sequence[Any], transform: Compose, folder: Path, target: torch.device) -> GDSDataset:
        return GDSDataset(items, transform, folder, target, backend=backend)

    competitors = {META: MONAIS_DATASETS[META], OURS: Competitor(ours), OURS_LOADER: Competitor(ours, GDSDataLoader)}
    whole = _Whole(
        f"epochs over {len(items)} items to {target}", items, pipeline(size), KEYS, target, cache, competitors,
        epochs - 1, reference=META, equal=target.type == "cpu",
    )  # fmt: skip
    half = ours(items, pipeline(size, random=False), cache / OURS, target)
    say(f"target {target}, backend {half.backend} ({half.backend_reason})")
    with progress(stdout) as bars:
        reports = [compare(whole, bars)]
        nbytes = sum(half[i][key].nbytes for i in range(len(items)) for key in KEYS)
        cached = _Cached(
            f"the cache alone: {nbytes / 1e6:.0f} MB of volumes to {target}, before the random transforms", items,
            half.transform, KEYS, target, cache, competitors, READINGS, reference=META, nbytes=nbytes,
        )  # fmt: skip
        reports.append(compare(cached, bars))
    for report in reports:
        show(report.table())
    stdout.print("same volumes, value by value, under the same seed", highlight=False)
