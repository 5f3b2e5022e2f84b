"""Random pipelines of MONAI's dictionary transforms: crops that are drawn before anything is read change nothing."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import Dataset, MetaTensor, ThreadDataLoader
from monai.transforms.traits import RandomizableTrait

from monai_gds import GDSDataLoader, GDSDataset, limits
from monai_gds.pipeline.ahead import drawn_ahead
from monai_gds.pipeline.randomness import slots, states_at
from monai_gds.pipeline.split import Split
from tests.recipes import RECIPES, loaded, volumes
from tests.roundtrip import without_ids
from tests.same import assert_same, strides

BOTH = ["image", "label"]
MODES = ("bilinear", "nearest")
COUNT = 3

#: Given random sizes of three axes.
CROPS: dict[str, Callable[[Any], Any]] = {
    "RandSpatialCropd": lambda size: mt.RandSpatialCropd(BOTH, size),
    "RandSpatialCropd of random size": lambda size: mt.RandSpatialCropd(BOTH, size, (30, 30, 30), random_size=True),
    "RandSpatialCropd in the middle": lambda size: mt.RandSpatialCropd(BOTH, size, random_center=False),
    "RandScaleCropd": lambda size: mt.RandScaleCropd(BOTH, 0.5, 0.9, random_size=True),
    "RandSpatialCropSamplesd": lambda size: mt.RandSpatialCropSamplesd(BOTH, size, 2),
    "RandSpatialCropSamplesd of one": lambda size: mt.RandSpatialCropSamplesd("image", size, 1),
    "RandCropByPosNegLabeld": lambda size: mt.RandCropByPosNegLabeld(BOTH, "label", size, num_samples=2),
    "RandCropByPosNegLabeld of an image": lambda size: mt.RandCropByPosNegLabeld(
        BOTH, "label", size, image_key="image"
    ),
    "RandCropByLabelClassesd": lambda size: mt.RandCropByLabelClassesd(BOTH, "label", size, num_classes=5),
    "RandWeightedCropd": lambda size: mt.RandWeightedCropd(BOTH, "label", size, 2),
    "RandCropd": lambda size: mt.RandCropd(BOTH, mt.RandScaleCrop(0.7)),
    "CenterSpatialCropd": lambda size: mt.CenterSpatialCropd(BOTH, size),
    "CenterScaleCropd": lambda size: mt.CenterScaleCropd(BOTH, 0.8),
    "SpatialCropd": lambda size: mt.SpatialCropd(BOTH, roi_center=(15, 15, 15), roi_size=size),
    "CropForegroundd": lambda size: mt.CropForegroundd(BOTH, "label", margin=2),
    "ResizeWithPadOrCropd": lambda size: mt.ResizeWithPadOrCropd(BOTH, size),
    "OneOf": lambda size: mt.OneOf([mt.RandSpatialCropd(BOTH, size), mt.CenterSpatialCropd(BOTH, size)]),
    "Compose": lambda size: mt.Compose([mt.RandSpatialCropd(BOTH, (32, 32, 32)), mt.RandFlipd(BOTH, prob=0.5)]),
}

#: What a pipeline begins with after its cached half, which is contiguous.
RANDOM_CROPS = [name for name in CROPS if name.startswith(("Rand", "OneOf", "Compose"))]

RANDOM: dict[str, Callable[[], Any]] = {
    "AddExtremePointsChanneld": lambda: mt.AddExtremePointsChanneld("image", "label"),
    "Rand3DElasticd": lambda: mt.Rand3DElasticd(BOTH, (2, 3), (1, 5), prob=0.5, mode=MODES),
    "RandAdjustContrastd": lambda: mt.RandAdjustContrastd("image", prob=0.5),
    "RandAffined": lambda: mt.RandAffined(BOTH, prob=0.5, rotate_range=0.3, mode=MODES),
    "RandAxisFlipd": lambda: mt.RandAxisFlipd(BOTH, prob=0.5),
    "RandBiasFieldd": lambda: mt.RandBiasFieldd("image", prob=0.5),
    "RandCoarseDropoutd": lambda: mt.RandCoarseDropoutd("image", 2, 3, prob=0.5),
    "RandCoarseShuffled": lambda: mt.RandCoarseShuffled("image", 2, 3, prob=0.5),
    "RandFlipd": lambda: mt.RandFlipd(BOTH, prob=0.5, spatial_axis=1),
    "RandGaussianNoised": lambda: mt.RandGaussianNoised("image", prob=0.5),
    "RandGaussianSharpend": lambda: mt.RandGaussianSharpend("image", prob=0.5),
    "RandGaussianSmoothd": lambda: mt.RandGaussianSmoothd("image", prob=0.5),
    "RandGibbsNoised": lambda: mt.RandGibbsNoised("image", prob=0.5),
    "RandGridDistortiond": lambda: mt.RandGridDistortiond(BOTH, 2, prob=0.5, mode=MODES),
    "RandGridPatchd": lambda: mt.RandGridPatchd("image", (4, 4, 4), num_patches=3),
    "RandHistogramShiftd": lambda: mt.RandHistogramShiftd("image", prob=0.5),
    "RandImageFilterd": lambda: mt.RandImageFilterd("image", "mean", 3, prob=0.5),
    "RandKSpaceSpikeNoised": lambda: mt.RandKSpaceSpikeNoised("image", prob=0.5),
    "RandLambdad": lambda: mt.RandLambdad("image", _twice, prob=0.5),
    "RandRicianNoised": lambda: mt.RandRicianNoised("image", prob=0.5),
    "RandRotate90d": lambda: mt.RandRotate90d(BOTH, prob=0.5),
    "RandRotated": lambda: mt.RandRotated(BOTH, 0.5, prob=0.5, mode=MODES),
    "RandScaleIntensityFixedMeand": lambda: mt.RandScaleIntensityFixedMeand("image", prob=0.5, factors=0.3),
    "RandScaleIntensityd": lambda: mt.RandScaleIntensityd("image", 0.2, prob=0.5),
    "RandShiftIntensityd": lambda: mt.RandShiftIntensityd("image", 0.2, prob=0.5),
    "RandSimulateLowResolutiond": lambda: mt.RandSimulateLowResolutiond("image", prob=0.5),
    "RandSmoothDeformd": lambda: mt.RandSmoothDeformd("image", (30, 30, 30), (5, 5, 5), prob=0.5),
    "RandSmoothFieldAdjustContrastd": lambda: mt.RandSmoothFieldAdjustContrastd(
        "image", (30, 30, 30), (5, 5, 5), prob=0.5
    ),
    "RandSmoothFieldAdjustIntensityd": lambda: mt.RandSmoothFieldAdjustIntensityd(
        "image", (30, 30, 30), (5, 5, 5), prob=0.5
    ),
    "RandStdShiftIntensityd": lambda: mt.RandStdShiftIntensityd("image", 0.2, prob=0.5),
    "RandZoomd": lambda: mt.RandZoomd(BOTH, prob=0.5, mode=("trilinear", "nearest")),
}

#: The random transforms of MONAI that are in no pipeline, and why.
LEFT_OUT = {
    "CutMixd": "mixes the items of a batch",
    "CutOutd": "takes a batch",
    "MixUpd": "mixes the items of a batch",
    "Rand2DElasticd": "is for flat images",
    "RandCuCIMd": "needs cuCIM",
    "RandTorchIOd": "needs TorchIO",
    "RandTorchVisiond": "is for flat images",
}

#: Those that work on a volume that was loaded, cost no time on purpose and are fast on volumes of this size.
FIXED = sorted(
    name
    for name, recipe in RECIPES.items()
    if recipe.item is volumes and recipe.before is loaded and not recipe.writes and not recipe.missing()
    if name not in ("SimulateDelayd", "DataStatsd", "ProbNMSd", "FillHolesd", "KeepLargestConnectedComponentd")
    # Their results share an array of metadata that later transforms write into; those from a record share none.
    if name not in ("SplitDimd", "ConcatItemsd")
)


def _twice(x: Any) -> Any:
    return x * 2


def _contiguous(x: Any) -> Any:
    """As records hold volumes: sums over another order of strides differ in their last bits."""
    return x.contiguous()


@pytest.fixture(autouse=True)
def _small_volumes_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TILED_BYTES", 1000)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("files")
    generator = np.random.default_rng(0)
    affine = np.array([[1.5, 0.1, 0, -30], [0, 1.5, 0, 20], [0, 0, 2.0, 10], [0, 0, 0, 1]])
    items = []
    for i in range(COUNT):
        label = np.zeros((38, 35, 33), np.uint8)
        label[2 + i : 17, 2:18, 1:16], label[20:33, 4 : 14 + i, 22:30], label[4, 4, 3], label[25:30, 20:24, 5:9] = (
            1,
            2,
            0,
            4,
        )
        image = (40 * label + generator.integers(-20, 100, label.shape)).astype(np.int16)
        item = {"age": 40 + i, "weights": np.array([0.5, 2.0])}
        for name, volume in (("image", image), ("label", label)):
            item[name] = str(folder / f"{name}{i}.nii")
            nib.save(nib.Nifti1Image(volume, affine), item[name])
        items.append(item)
    return items


class Drawn:
    """The pipeline of a number: the first one drawn whose transforms take one another's results."""

    def __init__(self, number: int, files: list[dict[str, Any]]) -> None:
        rng = random.Random(number)
        while True:
            self._front = rng.choices(FIXED, k=rng.randint(0, 2))
            kinds = rng.choices([CROPS, RANDOM, FIXED], [3, 4, 1], k=rng.randint(0, 4))
            first = (CROPS, rng.choice(RANDOM_CROPS)) if rng.random() < 0.9 else (RANDOM, rng.choice(sorted(RANDOM)))
            self._rest = [first, *((kind, rng.choice(sorted(kind))) for kind in kinds)]
            self._sizes = [tuple(rng.randint(5, 25) for _ in range(3)) for _ in self._rest]
            self._lazy = rng.random() < 0.1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for seed in range(2):
                        for i in range(COUNT):
                            _ = Dataset(copy.deepcopy(files), self.pipeline(seed))[i]
                return
            except Exception:  # one cannot take what another gives: not a pipeline that anybody has
                continue

    @property
    def name(self) -> str:
        """What the pipeline is made of."""
        return ", ".join([*self._front, "|", *(name for _, name in self._rest), "lazy" * self._lazy])

    def pipeline(self, seed: int) -> mt.Compose:
        """The pipeline, made again."""
        front = [t for name in self._front for t in RECIPES[name].make()]
        rest: list[Any] = []
        for (kind, name), size in zip(self._rest, self._sizes, strict=True):
            made = CROPS[name](size) if kind is CROPS else RANDOM[name]() if kind is RANDOM else RECIPES[name].make()
            rest += made if isinstance(made, list) else [made]
        fixed = [*loaded(), *front, mt.Lambdad(BOTH, _contiguous), mt.EnsureTyped(BOTH)]
        return mt.Compose([*fixed, *rest], lazy=self._lazy).set_random_state(seed)


def outcome(of: Any, loader: Any) -> list[Any]:
    """Items, batches, and the random states left behind; or the kind of error that was raised."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    order = list(range(COUNT))
    try:
        out = [[of[i] for i in order], of.__getitems__(order) if isinstance(of, GDSDataset) else [of[i] for i in order]]
        kept = [_states(of), random.getstate(), np.random.get_state()[1:], torch.get_rng_state()]
        torch.manual_seed(1)
        out.append(list(loader(of, batch_size=2, shuffle=True, collate_fn=list)))
    except Exception as e:
        return [type(e)]
    mt.utils.reset_ops_id(out)
    return [_without_ids(out), kept, _states(of)]


def _without_ids(value: Any) -> Any:
    """Removes the identity of transforms everywhere, as MONAI does in applied operations, where it also makes lists."""
    without_ids(value)
    if isinstance(value, MetaTensor):
        mt.utils.reset_ops_id(value)
        _without_ids(vars(value))
    elif isinstance(value, dict):
        if isinstance(value.get("orig_size"), tuple):
            value["orig_size"] = list(value["orig_size"])
        for part in value.values():
            _without_ids(part)
    elif isinstance(value, list):
        for part in value:
            _without_ids(part)
    return value


def _states(of: Any) -> Any:
    """Of what runs in every epoch."""
    return [states_at(slots(step)) for step in Split(of.transform).rest]


@pytest.mark.parametrize(
    ("number", "seeds"),
    [*((n, 1) for n in range(12)), *(pytest.param(n, 5, marks=pytest.mark.long) for n in range(200))],
)
def test_drawn_first_is_drawn_late(number: int, seeds: int, files: list[dict[str, Any]], tmp_path: Path) -> None:
    drawn = Drawn(number, files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with GDSDataset(files, drawn.pipeline(0), tmp_path, device="cpu", compression="lz4") as mine:
            mine.populate(0, progress=False)
            print(drawn.name, "|", [type(step).__name__ for step in drawn_ahead(mine.session.split())])
        for seed in range(seeds):
            mine = GDSDataset(files, drawn.pipeline(seed), tmp_path, device="cpu", compression="lz4")
            expected = outcome(Dataset(copy.deepcopy(files), drawn.pipeline(seed)), ThreadDataLoader)
            got = outcome(mine, GDSDataLoader)
            try:
                assert_same(expected, got)
                assert_same(strides(expected), strides(got))
            except AssertionError as e:
                raise AssertionError(f"{drawn.name}, seed {seed}: {e}") from e


def test_every_random_transform_is_in_a_pipeline_or_has_a_reason() -> None:
    kinds = [v for v in vars(mt).values() if isinstance(v, type) and issubclass(v, mt.MapTransform)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, RandomizableTrait)}
    assert names <= RANDOM.keys() | LEFT_OUT.keys() | CROPS.keys()
