"""Every random transform of MONAI: what is recorded and replayed, with an eager rest or not, is what MONAI gives."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import monai.transforms as mt
import pytest

from tests.programs.random_recipes import (
    ARRAY,
    BOTH,
    DICTIONARY,
    HOLDING,
    LABELLED,
    LEFT_OUT,
    MODES,
    exported,
    pipeline,
)
from tests.programs.recordings import AS_CUDA, CPU, CUDA, Where, item, run, seeded, steps_of

WHERE = [
    pytest.param(CPU, id="cpu"),
    pytest.param(AS_CUDA, id="cuda on the cpu"),
    pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
]

NAMES = [*DICTIONARY, *ARRAY, *LABELLED, *HOLDING]

#: Tried at each run of the tests.
QUICK = [
    "Compose", "RandAdjustContrastd", "RandAffined", "RandCropByPosNegLabeld", "RandFlipd", "RandGaussianSmoothd",
    "RandRotate90d", "RandScaleIntensityd", "RandSpatialCropSamplesd", "RandZoomd",
]  # fmt: skip

#: What cannot be recorded, and what it asks for.
ENDS: dict[str, str] = {
    "RandAdjustContrast": "a number",
    "RandWeightedCrop": "it ",  # where, depends on what else is known
    **dict.fromkeys(("RandBiasField", "RandCoarseDropout", "RandCoarseShuffle", "RandKSpaceSpikeNoise"), "values"),
    **dict.fromkeys(("AddExtremePointsChannel", "RandCropByLabelClasses", "RandCropByPosNegLabel"), "nonzero"),
    "RandGridPatch": "values",
    "RandIntensityRemap": "unique",
}

#: Recorded all the same, since the dictionary's recipe asks for less.
RECORDED = {"RandGridPatchd"}


def test_every_random_transform_has_a_recipe_or_a_reason() -> None:
    assert exported() == DICTIONARY.keys() | ARRAY.keys() | LABELLED.keys() | HOLDING.keys() | LEFT_OUT.keys()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("name", "seeds"), [*((n, 1) for n in QUICK), *(pytest.param(n, 6, marks=pytest.mark.long) for n in NAMES)]
)
def test_a_transform_of_monais(name: str, seeds: int, where: Where) -> None:
    ends = None if name in RECORDED else ENDS.get(name.removesuffix("d")) or ENDS.get(name)
    if name == "RandIntensityRemap" and where is CUDA:
        with pytest.raises(RuntimeError, match="applying transform"):  # MONAI mixes devices
            run(lambda: pipeline(name), where, 0)
        return
    for seed in range(seeds):
        outcome = run(lambda: pipeline(name), where, seed)
        if ends is None:
            assert outcome.done is None, outcome.why
        else:
            assert outcome.done == 1 and ends in outcome.why
        print(name, where, seed, len(steps_of(outcome.program)), "steps")


@pytest.mark.parametrize("where", WHERE[1:])
@pytest.mark.parametrize("name", ["RandAffined", "Rand3DElasticd", "RandGridDistortiond", "RandAffine"])
def test_with_grids_made_on_the_gpu(name: str, where: Where) -> None:
    eager = (lambda: pipeline(name)) if where is AS_CUDA else None
    outcome = run(lambda: pipeline(name, where.target), where, eager=eager)
    assert outcome.done is None, outcome.why


def flat() -> Any:
    return mt.Compose(
        [mt.RandSpatialCropd(BOTH, (20, 18)), mt.Rand2DElasticd(BOTH, (8, 8), (1, 2), prob=1.0, mode=MODES)]
    )


def test_flat_images() -> None:
    for seed in range(3):
        assert run(flat, seed=seed, of=item(seed, (32, 30))).done is None


# Random pipelines

#: Of these pipelines are made, after a crop.
MADE_OF: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: DICTIONARY[name](None) for name in DICTIONARY if "SmoothField" not in name},
    "CropForegroundd": lambda: mt.CropForegroundd(BOTH, "label", margin=1),
    "CenterSpatialCropd": lambda: mt.CenterSpatialCropd(BOTH, (9, 9, 9)),
    "SpatialPadd": lambda: mt.SpatialPadd(BOTH, (20, 20, 20)),
    "Resized": lambda: mt.Resized(BOTH, (12, 11, 10), mode=("trilinear", "nearest")),
    "NormalizeIntensityd": lambda: mt.NormalizeIntensityd("image", nonzero=True),
    "ScaleIntensityd": lambda: mt.ScaleIntensityd("image"),
    "CastToTyped": lambda: mt.CastToTyped("image", "float64"),
    "AsDiscreted": lambda: mt.AsDiscreted("label", to_onehot=4),
    "CopyItemsd": lambda: mt.CopyItemsd("image", names="again"),
    "ConcatItemsd": lambda: mt.ConcatItemsd(BOTH, "both"),
    "Lambdad": lambda: mt.Lambdad("image", lambda x: x.add_(1)),
}


def drawn(number: int) -> Callable[[], Any]:
    """The pipeline of a number: the first one drawn whose transforms take one another's results."""
    rng = random.Random(number)
    while True:
        names = rng.choices(sorted(MADE_OF), k=rng.randint(1, 6))
        crop = rng.choice([mt.RandSpatialCropSamplesd(BOTH, (18, 17, 16), 2), mt.RandSpatialCropd(BOTH, (18, 17, 16))])

        def make(names: list[str] = names, crop: Any = crop) -> Any:
            return mt.Compose([crop, *(MADE_OF[name]() for name in names)])

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seeded(make, 0).after(item())
            print(", ".join(names))
            return make
        except Exception:  # one cannot take what another gives: not a pipeline that anybody has
            continue


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("number", [n if n < 6 else pytest.param(n, marks=pytest.mark.long) for n in range(300)])
def test_random_pipelines(number: int, where: Where) -> None:
    outcome = run(drawn(number), where)
    print("recorded:", "all" if outcome.done is None else f"{outcome.done}: {outcome.why}")
