"""Every random transform that MONAI exports, with arguments that have it do something to two volumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import monai.transforms as mt
from monai.transforms.traits import RandomizableTrait

BOTH = ("image", "label")
MODES = ("bilinear", "nearest")
SIZE = (9, 8, 7)
CROPPED = (18, 17, 16)


class OnImage(mt.RandomizableTransform):  # type: ignore[misc]
    """Runs a transform of arrays on the image of an item, or on image and label; several results become a list."""

    def __init__(self, inner: Any, keys: tuple[str, ...] = ("image",)) -> None:
        super().__init__(1.0)
        self.inner, self.keys = inner, keys

    def set_random_state(self, seed: int | None = None, state: Any = None) -> OnImage:
        """Seeds the transform within, too."""
        super().set_random_state(seed, state)
        if isinstance(self.inner, mt.Randomizable):
            self.inner.set_random_state(seed, state)
        return self

    def __call__(self, data: Any) -> Any:
        return {**data, "image": self.inner(*(data[key] for key in self.keys))}


#: The transforms of dictionaries. They are given the device that grids are to be made on.
DICTIONARY: Mapping[str, Callable[[str | None], Any]] = {
    "AddExtremePointsChanneld": lambda device: mt.AddExtremePointsChanneld("image", "label"),
    "Rand3DElasticd": lambda device: mt.Rand3DElasticd(BOTH, (2, 3), (1, 5), prob=1.0, mode=MODES, device=device),
    "RandAdjustContrastd": lambda device: mt.RandAdjustContrastd("image", prob=1.0),
    "RandAffined": lambda device: mt.RandAffined(
        BOTH, prob=1.0, rotate_range=(0.3,) * 3, scale_range=(0.1,) * 3, shear_range=(0.1,) * 3, mode=MODES,
        padding_mode="border", device=device,
    ),
    "RandAxisFlipd": lambda device: mt.RandAxisFlipd(BOTH, prob=1.0),
    "RandBiasFieldd": lambda device: mt.RandBiasFieldd("image", prob=1.0),
    "RandCoarseDropoutd": lambda device: mt.RandCoarseDropoutd("image", 2, 3, prob=1.0),
    "RandCoarseShuffled": lambda device: mt.RandCoarseShuffled("image", 2, 3, prob=1.0),
    "RandCropByLabelClassesd": lambda device: mt.RandCropByLabelClassesd(BOTH, "label", SIZE, num_classes=4),
    "RandCropByPosNegLabeld": lambda device: mt.RandCropByPosNegLabeld(BOTH, "label", SIZE, num_samples=2),
    "RandCropd": lambda device: mt.RandCropd(BOTH, mt.RandScaleCrop(0.7)),
    "RandFlipd": lambda device: mt.RandFlipd(BOTH, prob=1.0, spatial_axis=1),
    "RandGaussianNoised": lambda device: mt.RandGaussianNoised("image", prob=1.0),
    "RandGaussianSharpend": lambda device: mt.RandGaussianSharpend("image", prob=1.0),
    "RandGaussianSmoothd": lambda device: mt.RandGaussianSmoothd("image", prob=1.0),
    "RandGibbsNoised": lambda device: mt.RandGibbsNoised("image", prob=1.0),
    "RandGridDistortiond": lambda device: mt.RandGridDistortiond(BOTH, 2, prob=1.0, mode=MODES, device=device),
    "RandGridPatchd": lambda device: mt.RandGridPatchd("image", (4, 4, 4), num_patches=3),
    "RandHistogramShiftd": lambda device: mt.RandHistogramShiftd("image", prob=1.0),
    "RandImageFilterd": lambda device: mt.RandImageFilterd("image", "mean", 3, prob=1.0),
    "RandKSpaceSpikeNoised": lambda device: mt.RandKSpaceSpikeNoised("image", prob=1.0),
    "RandLambdad": lambda device: mt.RandLambdad("image", lambda x: x * 2, prob=1.0),
    "RandRicianNoised": lambda device: mt.RandRicianNoised("image", prob=1.0),
    "RandRotate90d": lambda device: mt.RandRotate90d(BOTH, prob=1.0),
    "RandRotated": lambda device: mt.RandRotated(BOTH, 0.5, prob=1.0, mode=MODES),
    "RandScaleCropd": lambda device: mt.RandScaleCropd(BOTH, 0.5, 0.9, random_size=True),
    "RandScaleIntensityFixedMeand": lambda device: mt.RandScaleIntensityFixedMeand("image", prob=1.0, factors=0.3),
    "RandScaleIntensityd": lambda device: mt.RandScaleIntensityd("image", 0.2, prob=1.0),
    "RandShiftIntensityd": lambda device: mt.RandShiftIntensityd("image", 0.2, prob=1.0),
    "RandSimulateLowResolutiond": lambda device: mt.RandSimulateLowResolutiond("image", prob=1.0),
    "RandSmoothDeformd": lambda device: mt.RandSmoothDeformd(
        "image", CROPPED, (5, 5, 5), prob=1.0, device=device or "cpu"
    ),
    "RandSmoothFieldAdjustContrastd": lambda device: mt.RandSmoothFieldAdjustContrastd(
        "image", CROPPED, (5, 5, 5), prob=1.0
    ),
    "RandSmoothFieldAdjustIntensityd": lambda device: mt.RandSmoothFieldAdjustIntensityd(
        "image", CROPPED, (5, 5, 5), prob=1.0
    ),
    "RandSpatialCropSamplesd": lambda device: mt.RandSpatialCropSamplesd(BOTH, SIZE, 2),
    "RandSpatialCropd": lambda device: mt.RandSpatialCropd(BOTH, SIZE),
    "RandStdShiftIntensityd": lambda device: mt.RandStdShiftIntensityd("image", 0.2, prob=1.0),
    "RandWeightedCropd": lambda device: mt.RandWeightedCropd(BOTH, "label", SIZE, 2),
    "RandZoomd": lambda device: mt.RandZoomd(BOTH, prob=1.0, min_zoom=0.7, mode=("trilinear", "nearest")),
}  # fmt: skip

#: Those of arrays, and those that hold others.
ARRAY: Mapping[str, Callable[[str | None], Any]] = {
    "Rand3DElastic": lambda device: mt.Rand3DElastic((2, 3), (1, 5), prob=1.0, device=device),
    "RandAdjustContrast": lambda device: mt.RandAdjustContrast(prob=1.0),
    "RandAffine": lambda device: mt.RandAffine(1.0, (0.3, 0.2, 0.1), translate_range=(2, 2, 2), device=device),
    "RandAxisFlip": lambda device: mt.RandAxisFlip(1.0),
    "RandBiasField": lambda device: mt.RandBiasField(prob=1.0),
    "RandCoarseDropout": lambda device: mt.RandCoarseDropout(2, 3, prob=1.0, fill_value=0.5),
    "RandCoarseShuffle": lambda device: mt.RandCoarseShuffle(2, 3, prob=1.0),
    "RandFlip": lambda device: mt.RandFlip(1.0),
    "RandGaussianNoise": lambda device: mt.RandGaussianNoise(1.0),
    "RandGaussianSharpen": lambda device: mt.RandGaussianSharpen(prob=1.0),
    "RandGaussianSmooth": lambda device: mt.RandGaussianSmooth(prob=1.0),
    "RandGibbsNoise": lambda device: mt.RandGibbsNoise(1.0),
    "RandGridDistortion": lambda device: mt.RandGridDistortion(2, 1.0, device=device),
    "RandGridPatch": lambda device: mt.RandGridPatch((4, 4, 4), num_patches=3, sort_fn="max"),
    "RandHistogramShift": lambda device: mt.RandHistogramShift(prob=1.0),
    "RandIdentity": lambda device: mt.RandIdentity(),
    "RandImageFilter": lambda device: mt.RandImageFilter("mean", 3, prob=1.0),
    "RandIntensityRemap": lambda device: mt.RandIntensityRemap(prob=1.0),
    "RandKSpaceSpikeNoise": lambda device: mt.RandKSpaceSpikeNoise(1.0),
    "RandLambda": lambda device: mt.RandLambda(lambda x: x.abs().sqrt(), 1.0),
    "RandRicianNoise": lambda device: mt.RandRicianNoise(1.0),
    "RandRotate": lambda device: mt.RandRotate(0.3, 0.2, 0.1, 1.0, keep_size=False),
    "RandRotate90": lambda device: mt.RandRotate90(1.0),
    "RandScaleCrop": lambda device: mt.RandScaleCrop(0.5, 0.9, random_size=True),
    "RandScaleIntensity": lambda device: mt.RandScaleIntensity(0.2, 1.0),
    "RandScaleIntensityFixedMean": lambda device: mt.RandScaleIntensityFixedMean(1.0, 0.3),
    "RandShiftIntensity": lambda device: mt.RandShiftIntensity(0.2, prob=1.0),
    "RandSimulateLowResolution": lambda device: mt.RandSimulateLowResolution(1.0),
    "RandSmoothDeform": lambda device: mt.RandSmoothDeform(CROPPED, (5, 5, 5), prob=1.0, device=device or "cpu"),
    "RandSmoothFieldAdjustContrast": lambda device: mt.RandSmoothFieldAdjustContrast(CROPPED, (5, 5, 5), prob=1.0),
    "RandSmoothFieldAdjustIntensity": lambda device: mt.RandSmoothFieldAdjustIntensity(CROPPED, (5, 5, 5), prob=1.0),
    "RandSpatialCrop": lambda device: mt.RandSpatialCrop(SIZE),
    "RandSpatialCropSamples": lambda device: mt.RandSpatialCropSamples(SIZE, 2),
    "RandStdShiftIntensity": lambda device: mt.RandStdShiftIntensity(0.2, 1.0),
    "RandZoom": lambda device: mt.RandZoom(1.0, 0.8, 1.2),
}

#: Those of arrays that take a label, too.
LABELLED: Mapping[str, Callable[[str | None], Any]] = {
    "AddExtremePointsChannel": lambda device: mt.AddExtremePointsChannel(),
    "RandCropByLabelClasses": lambda device: mt.RandCropByLabelClasses(SIZE, num_classes=4),
    "RandCropByPosNegLabel": lambda device: mt.RandCropByPosNegLabel(SIZE, num_samples=2),
    "RandWeightedCrop": lambda device: mt.RandWeightedCrop(SIZE, 2),
}

_INNER = [
    lambda: mt.RandFlipd(BOTH, 1.0, 0),
    lambda: mt.RandScaleIntensityd("image", 0.3, 1.0),
    lambda: mt.RandZoomd(BOTH, 1.0, 0.8, 1.2, mode=("trilinear", "nearest")),
]

HOLDING: Mapping[str, Callable[[str | None], Any]] = {
    "Compose": lambda device: mt.Compose(
        [mt.RandZoomd(BOTH, 1.0, 0.8, 1.2, mode=("trilinear", "nearest")), mt.RandFlipd(BOTH, 1.0, 1)], lazy=True
    ),
    "OneOf": lambda device: mt.OneOf([make() for make in _INNER]),
    "SomeOf": lambda device: mt.SomeOf([make() for make in _INNER], num_transforms=2),
    "RandomOrder": lambda device: mt.RandomOrder([make() for make in _INNER]),
}

#: The random transforms of MONAI without a recipe, and why.
LEFT_OUT = {
    **dict.fromkeys(("CutMix", "CutMixd", "CutOut", "CutOutd", "MixUp", "MixUpd"), "take a batch"),
    **dict.fromkeys(("Rand2DElastic", "Rand2DElasticd"), "are for flat images, and have a test of their own"),
    **dict.fromkeys(("RandCuCIM", "RandCuCIMd", "RandTorchIO", "RandTorchIOd"), "need other libraries"),
    **dict.fromkeys(("RandTorchVision", "RandTorchVisiond"), "need other libraries"),
    **dict.fromkeys(("RandAffineGrid", "RandDeformGrid"), "take what is no volume"),
    **dict.fromkeys(("Randomizable", "RandomizableTrait", "RandomizableTransform", "RandCoarseTransform"), "are bases"),
    **dict.fromkeys(("RandMark", "RandRangePop", "RandRangePush"), "are marks for a profiler of NVIDIA's"),
    **dict.fromkeys(("IntensityRemap", "SmoothField"), "are parts of others"),
}


def exported() -> set[str]:
    """The names of MONAI's random transforms, but for those of signals."""
    kinds = [v for v in vars(mt).values() if isinstance(v, type) and issubclass(v, RandomizableTrait)]
    return {kind.__name__ for kind in kinds if not kind.__name__.startswith("Signal")}


def pipeline(name: str, device: str | None = None) -> Any:
    """A crop, and one of the transforms after it."""
    if name in ARRAY:
        return mt.Compose([mt.RandSpatialCropd(BOTH, CROPPED), OnImage(ARRAY[name](device))])
    if name in LABELLED:
        return mt.Compose([mt.RandSpatialCropd(BOTH, CROPPED), OnImage(LABELLED[name](device), BOTH)])
    made = (DICTIONARY.get(name) or HOLDING[name])(device)
    return mt.Compose([mt.RandSpatialCropd(BOTH, CROPPED), made])
