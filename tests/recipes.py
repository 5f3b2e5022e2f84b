"""Every deterministic dictionary transform that MONAI exports, each with arguments and an item that it works on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import torch
from monai.transforms.traits import RandomizableTrait

__all__ = ["LEFT_OUT", "RECIPES", "Recipe", "exported", "loaded", "volumes"]

BOTH = ["image", "label"]

#: The transforms without a recipe, and why.
LEFT_OUT = {
    "MapTransform": "is the base class of all others and has no result",
    "ToPILd": "gives a PIL image, which no record holds",
    "ToCupyd": "gives an array on the GPU that is not torch's, which no record holds",
}


def exported() -> dict[str, type]:
    """MONAI's dictionary transforms that are not random, by name."""
    kinds = [v for v in vars(mt).values() if isinstance(v, type) and issubclass(v, mt.MapTransform)]
    return {kind.__name__: kind for kind in kinds if not issubclass(kind, RandomizableTrait)}


def volumes(folder: Path) -> dict[str, Any]:
    """A small volume with a label of four classes and an oblique affine, and plain values beside them."""
    paths = {name: folder / f"{name}.nii" for name in ("image", "label")}
    if not all(path.exists() for path in paths.values()):
        rng = np.random.default_rng(0)
        affine = np.array([[1.5, 0.1, 0, -30], [0, 1.5, 0, 20], [0, 0, 2.0, 10], [0, 0, 0, 1]])
        nib.save(nib.Nifti1Image(rng.integers(-200, 1000, (12, 10, 8), dtype=np.int16), affine), paths["image"])
        label = np.zeros((12, 10, 8), np.uint8)
        label[2:7, 2:8, 1:6], label[7:11, 1:4, 2:7], label[4, 4, 3] = 1, 2, 0
        label[9:11, 6:9, 5:7] = 4
        nib.save(nib.Nifti1Image(label, affine), paths["label"])
    return {**{name: str(path) for name, path in paths.items()}, "age": 40, "weights": np.array([0.5, 2.0])}


def points(folder: Path) -> dict[str, Any]:
    """A volume with three points in it."""
    return {**volumes(folder), "points": np.array([[[1.0, 2.0, 3.0], [4.5, 5.0, 6.0], [0.0, 9.0, 2.5]]])}


def points_of_one_channel(folder: Path) -> dict[str, Any]:
    """The same without an axis for channels."""
    return {**volumes(folder), "points": points(folder)["points"][0]}


def with_affine(folder: Path) -> dict[str, Any]:
    """A volume, and another affine."""
    return {**volumes(folder), "there": np.diag([2.0, 2.0, 2.0, 1.0])}


def boxes(folder: Path) -> dict[str, Any]:
    """Two boxes, and the corners of two more."""
    corners = np.random.default_rng(1).uniform(0, 9, (2, 8, 3))
    return {"boxes": np.array([[0.0, 1, 2, 5, 6, 7], [2, 2, 2, 4, 5, 8]]), "corners": corners}


def predictions(folder: Path) -> dict[str, Any]:
    """Three models' outputs."""
    rng = np.random.default_rng(2)
    return {f"pred{i}": torch.from_numpy(rng.uniform(size=(2, 6, 5))) for i in range(3)}


def signal(folder: Path) -> dict[str, Any]:
    """Two leads with gaps."""
    values = np.random.default_rng(3).normal(size=(2, 50))
    values[:, 7:12] = np.nan
    return {"signal": values, "tensor": torch.from_numpy(values)}


def colours(folder: Path) -> dict[str, Any]:
    """A flat image of three channels, and labels of instances."""
    rng = np.random.default_rng(4)
    instances = np.zeros((1, 12, 10), np.int16)
    instances[0, 1:5, 1:5], instances[0, 6:11, 3:8] = 1, 2
    return {"rgb": rng.uniform(0, 255, (3, 12, 10)).astype(np.float32), "instances": instances}


def nested(folder: Path) -> dict[str, Any]:
    """Dictionaries and lists in an item."""
    return {
        "study": {"ct": np.arange(6.0), "site": "a", "code": 7},
        "nested": [[1, 2], [[3], 4], torch.arange(3)],
        "lists": [[torch.zeros(2)], [torch.ones(3), torch.ones(1)]],
    }


def batch(folder: Path) -> dict[str, Any]:
    """What looks like a batch of two."""
    return {"image": torch.arange(8.0).reshape(2, 1, 2, 2), "names": ["a", "b"], "age": torch.tensor([40, 41])}


def loaded() -> list[Any]:
    """What comes before most transforms."""
    return [mt.LoadImaged(["image", "label"], ensure_channel_first=True)]


def masked() -> list[Any]:
    """With a mask beside the image."""
    mask = [mt.CopyItemsd("label", names="mask"), mt.Lambdad("mask", lambda x: x > 0), mt.ToNumpyd("mask", bool)]
    return [*loaded(), *mask]


def probabilities() -> list[Any]:
    """With the image as a map of probabilities that has no channels."""
    return [*loaded(), mt.ScaleIntensityd("image"), mt.Lambdad("image", lambda x: x[0])]


def with_age() -> list[Any]:
    """With the age as a tensor."""
    return [*loaded(), mt.ToTensord("age")]


def nothing() -> list[Any]:
    """For items that are in memory."""
    return []


@dataclass(frozen=True)
class Recipe:
    """How a transform is tried.

    Attributes:
        make: gives it with its arguments, and others that it needs before or after it; called in each process.
        item: gives the item, with files in a folder.
        before: gives what comes first.
        needs: modules without which it cannot run.
        writes: whether ``make`` takes a folder that the transforms write files into.
    """

    make: Callable[..., list[Any]]
    item: Callable[[Path], dict[str, Any]] = volumes
    before: Callable[[], list[Any]] = loaded
    needs: tuple[str, ...] = ()
    writes: bool = False

    def missing(self) -> list[str]:
        """Modules that it needs and this machine has not."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def transforms(self, folder: Path) -> list[Any]:
        """Makes the pipeline, a new one at each call."""
        return [*self.before(), *(self.make(folder) if self.writes else self.make())]


def in_memory(make: Callable[[], list[Any]], item: Callable[[Path], dict[str, Any]], *needs: str) -> Recipe:
    """For a transform of arrays that no file is read for."""
    return Recipe(make, item, nothing, needs)


def inverted() -> list[Any]:
    """Geometry that is changed and changed back."""
    there = mt.Compose([mt.Spacingd("image", (2.0, 2.0, 3.0)), mt.Flipd("image", 0)])
    return [*there.transforms, mt.CopyItemsd("image", names="pred"), mt.Invertd("pred", there, "image")]


RECIPES: Mapping[str, Recipe] = {
    "Activationsd": Recipe(lambda: [mt.Activationsd("image", sigmoid=True)]),
    "AddCoordinateChannelsd": Recipe(lambda: [mt.AddCoordinateChannelsd("image", (0, 2))]),
    "AdjustContrastd": Recipe(lambda: [mt.AdjustContrastd("image", 1.7, invert_image=True)]),
    "Affined": Recipe(lambda: [mt.Affined(BOTH, (0.1, 0.2, 0.3), mode=["bilinear", "nearest"])]),
    "ApplyPendingd": Recipe(
        lambda: [mt.Flipd(BOTH, 0, lazy=True), mt.Zoomd("image", 1.2, lazy=True), mt.ApplyPendingd(BOTH)]
    ),
    "ApplyTransformToPointsd": Recipe(lambda: [mt.ApplyTransformToPointsd("points", "image")], points),
    "AsChannelLastd": Recipe(lambda: [mt.AsChannelLastd("image")]),
    "AsDiscreted": Recipe(lambda: [mt.AsDiscreted("label", to_onehot=5)]),
    "BorderPadd": Recipe(lambda: [mt.BorderPadd(BOTH, (1, 2, 3))]),
    "BoundingRectd": Recipe(lambda: [mt.BoundingRectd("label")]),
    "CastToTyped": Recipe(lambda: [mt.CastToTyped(["image", "weights"], (torch.float16, np.int8))]),
    "CenterScaleCropd": Recipe(lambda: [mt.CenterScaleCropd(BOTH, 0.6)]),
    "CenterSpatialCropd": Recipe(lambda: [mt.CenterSpatialCropd(BOTH, (6, 5, 4))]),
    "ClassesToIndicesd": Recipe(lambda: [mt.ClassesToIndicesd("label", num_classes=5, image_key="image")]),
    "ClipIntensityPercentilesd": Recipe(lambda: [mt.ClipIntensityPercentilesd("image", 5, 95)]),
    "ComputeHoVerMapsd": in_memory(lambda: [mt.ComputeHoVerMapsd("instances")], colours, "skimage"),
    "ConcatItemsd": Recipe(lambda: [mt.ConcatItemsd(BOTH, "both")]),
    "ConvertBoxToPointsd": in_memory(lambda: [mt.ConvertBoxToPointsd("boxes")], boxes),
    "ConvertPointsToBoxesd": in_memory(lambda: [mt.ConvertPointsToBoxesd("corners")], boxes),
    "ConvertToMultiChannelBasedOnBratsClassesd": Recipe(
        lambda: [mt.ConvertToMultiChannelBasedOnBratsClassesd("label")]
    ),
    "CopyItemsd": Recipe(lambda: [mt.CopyItemsd(["image", "weights"], 2, names=["a", "b", "c", "d"])]),
    "CropForegroundd": Recipe(lambda: [mt.CropForegroundd(BOTH, "label", margin=1)]),
    "Cropd": Recipe(lambda: [mt.Cropd(BOTH, mt.SpatialCrop(roi_start=(1, 1, 1), roi_end=(9, 8, 7)))]),
    "CuCIMd": in_memory(lambda: [mt.CuCIMd("rgb", "image_flip", spatial_axis=-1)], colours, "cucim", "cupy"),
    "DataStatsd": Recipe(lambda: [mt.DataStatsd(BOTH)]),
    "Decollated": in_memory(lambda: [mt.Decollated()], batch),
    "DeleteItemsd": Recipe(lambda: [mt.DeleteItemsd(["label", "age"])]),
    "DistanceTransformEDTd": Recipe(lambda: [mt.DistanceTransformEDTd("label")], needs=("scipy",)),
    "DivisiblePadd": Recipe(lambda: [mt.DivisiblePadd(BOTH, 8)]),
    "Ensembled": in_memory(
        lambda: [mt.Ensembled(["pred0", "pred1"], lambda x: torch.stack(list(x)).amax(0), "out")], predictions
    ),
    "EnsureChannelFirstd": Recipe(lambda: [mt.EnsureChannelFirstd(BOTH)], before=lambda: [mt.LoadImaged(BOTH)]),
    "EnsureTyped": Recipe(lambda: [mt.EnsureTyped(["image", "weights", "age"], dtype=torch.float64)]),
    "FgBgToIndicesd": Recipe(lambda: [mt.FgBgToIndicesd("label", image_key="image", image_threshold=100.0)]),
    "FillHolesd": Recipe(lambda: [mt.FillHolesd("label", 1)], needs=("scipy",)),
    "FlattenSequenced": in_memory(lambda: [mt.FlattenSequenced("lists")], nested),
    "FlattenSubKeysd": in_memory(lambda: [mt.FlattenSubKeysd("study", prefix="of")], nested),
    "Flipd": Recipe(lambda: [mt.Flipd(BOTH, (0, 2))]),
    "ForegroundMaskd": in_memory(
        lambda: [mt.ForegroundMaskd("rgb", 100.0, new_key_prefix="mask_")], colours, "skimage"
    ),
    "FromMetaTensord": Recipe(lambda: [mt.Flipd("image", 1), mt.FromMetaTensord(BOTH, ["tensor", "numpy"])]),
    "GaussianSharpend": Recipe(lambda: [mt.GaussianSharpend("image", 1.0, 0.5, 3.0)]),
    "GaussianSmoothd": Recipe(lambda: [mt.GaussianSmoothd("image", 0.8)]),
    "GenerateHeatmapd": Recipe(lambda: [mt.GenerateHeatmapd("points", 1.5, "heat", "image")], points_of_one_channel),
    "GibbsNoised": Recipe(lambda: [mt.GibbsNoised("image", 0.4)]),
    "GridDistortiond": Recipe(
        lambda: [mt.GridDistortiond(BOTH, 2, [(1.1, 0.9, 1.0)] * 3, mode=["bilinear", "nearest"])]
    ),
    "GridPatchd": Recipe(lambda: [mt.GridPatchd("image", (6, 5, 4), num_patches=4, sort_fn="max")]),
    "GridSplitd": in_memory(lambda: [mt.GridSplitd("rgb", (2, 2), 5)], colours),
    "HistogramNormalized": Recipe(lambda: [mt.HistogramNormalized("image", 32, 0, 1)]),
    "Identityd": Recipe(lambda: [mt.Identityd(BOTH)]),
    "ImageFilterd": Recipe(lambda: [mt.ImageFilterd("image", "mean", 3)]),
    "IntensityStatsd": Recipe(
        lambda: [mt.IntensityStatsd("image", ["mean", "max", np.ptp], "of", mask_keys="mask")], before=masked
    ),
    "Invertd": Recipe(inverted),
    "KSpaceSpikeNoised": Recipe(lambda: [mt.KSpaceSpikeNoised("image", (3, 3, 3), 13.0)]),
    "KeepLargestConnectedComponentd": Recipe(
        lambda: [mt.KeepLargestConnectedComponentd("label", [1, 2])], needs=("skimage",)
    ),
    "LabelFilterd": Recipe(lambda: [mt.LabelFilterd("label", (1, 4))]),
    "LabelToContourd": Recipe(lambda: [mt.LabelToContourd("label")]),
    "LabelToMaskd": Recipe(lambda: [mt.LabelToMaskd("label", (1, 2))]),
    "Lambdad": Recipe(lambda: [mt.Lambdad("image", lambda x: x * 2 + 1)]),
    "LoadImaged": Recipe(lambda: [mt.LoadImaged(BOTH, image_only=False, dtype=None)], before=nothing),
    "MapLabelValued": Recipe(lambda: [mt.MapLabelValued("label", [0, 1, 2, 4], [9, 8, 7, 6], torch.uint8)]),
    "MaskIntensityd": Recipe(lambda: [mt.MaskIntensityd("image", mask_key="label")]),
    "MeanEnsembled": in_memory(
        lambda: [mt.MeanEnsembled(["pred0", "pred1", "pred2"], "out", [1.0, 2.0, 0.5])], predictions
    ),
    "MedianSmoothd": Recipe(lambda: [mt.MedianSmoothd("image", 1)]),
    "NormalizeIntensityd": Recipe(lambda: [mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True)]),
    "Orientationd": Recipe(lambda: [mt.Orientationd(BOTH, "PIL", labels=None)]),
    "Padd": Recipe(lambda: [mt.Padd(BOTH, mt.SpatialPad((14, 12, 10)))]),
    "ProbNMSd": Recipe(lambda: [mt.ProbNMSd("image", 3, 0.5, 0.6, 3)], before=probabilities),
    "RemoveRepeatedChanneld": Recipe(lambda: [mt.RepeatChanneld("image", 3), mt.RemoveRepeatedChanneld("image", 3)]),
    "RemoveSmallObjectsd": Recipe(lambda: [mt.RemoveSmallObjectsd("label", 20)], needs=("skimage",)),
    "RepeatChanneld": Recipe(lambda: [mt.RepeatChanneld("image", 3)]),
    "ResampleToMatchd": Recipe(lambda: [mt.Zoomd("label", 0.7, mode="nearest"), mt.ResampleToMatchd("image", "label")]),
    "ResizeWithPadOrCropd": Recipe(lambda: [mt.ResizeWithPadOrCropd(BOTH, (8, 12, 8))]),
    "Resized": Recipe(lambda: [mt.Resized("image", (9, 9, 9), anti_aliasing=True, mode="trilinear")]),
    "Rotate90d": Recipe(lambda: [mt.Rotate90d(BOTH, 1, (0, 2))]),
    "Rotated": Recipe(lambda: [mt.Rotated(BOTH, 0.4, keep_size=False, mode=["bilinear", "nearest"])]),
    "SaveClassificationd": Recipe(
        lambda folder: [mt.SaveClassificationd("age", output_dir=folder, meta_key_postfix=None)],
        before=with_age,
        writes=True,
    ),
    "SaveImaged": Recipe(
        lambda folder: [mt.SaveImaged("image", output_dir=folder, savepath_in_metadict=True)], writes=True
    ),
    # torch's lstsq gives its coefficients another last bit from call to call, but not these
    "SavitzkyGolaySmoothd": Recipe(lambda: [mt.SavitzkyGolaySmoothd("image", 3, 0)]),
    "ScaleIntensityRangePercentilesd": Recipe(
        lambda: [mt.ScaleIntensityRangePercentilesd("image", 5, 95, 0, 1, clip=True)]
    ),
    "ScaleIntensityRanged": Recipe(lambda: [mt.ScaleIntensityRanged("image", -100, 900, 0, 1, clip=True)]),
    "ScaleIntensityd": Recipe(lambda: [mt.ScaleIntensityd("image", channel_wise=True)]),
    "SelectItemsd": Recipe(lambda: [mt.SelectItemsd(["image", "age"])]),
    "ShiftIntensityd": Recipe(lambda: [mt.ShiftIntensityd("image", 12.5)]),
    "SignalFillEmptyd": in_memory(lambda: [mt.SignalFillEmptyd(["signal", "tensor"], replacement=0.5)], signal),
    "SimulateDelayd": Recipe(lambda: [mt.SimulateDelayd(BOTH, 0.001)]),
    "SobelGradientsd": Recipe(lambda: [mt.SobelGradientsd("image", new_key_prefix="grad_")]),
    "Spacingd": Recipe(lambda: [mt.Spacingd(BOTH, (2.0, 2.0, 3.0), mode=("bilinear", "nearest"))]),
    "SpatialCropd": Recipe(lambda: [mt.SpatialCropd(BOTH, roi_center=(5, 5, 4), roi_size=(6, 4, 4))]),
    "SpatialPadd": Recipe(lambda: [mt.SpatialPadd(BOTH, (16, 12, 8), mode="edge")]),
    "SpatialResampled": Recipe(lambda: [mt.SpatialResampled("image", dst_keys="there")], with_affine),
    "SplitDimd": Recipe(lambda: [mt.SplitDimd("image", dim=3, keepdim=False)]),
    "SqueezeDimd": Recipe(lambda: [mt.SqueezeDimd("image")]),
    "StdShiftIntensityd": Recipe(lambda: [mt.StdShiftIntensityd("image", 1.5)]),
    "ThresholdIntensityd": Recipe(lambda: [mt.ThresholdIntensityd("image", 300.0, cval=-1.0)]),
    "ToDeviced": Recipe(lambda: [mt.ToDeviced(BOTH, "cpu")]),
    "ToMetaTensord": Recipe(
        lambda: [mt.FromMetaTensord(BOTH), mt.Lambdad("image", lambda x: x + 1), mt.ToMetaTensord(BOTH)]
    ),
    "ToNumpyd": Recipe(lambda: [mt.ToNumpyd(BOTH, np.float64)]),
    "ToTensord": Recipe(lambda: [mt.ToTensord(["weights", "age"], torch.float32)]),
    "TorchIOd": Recipe(lambda: [mt.TorchIOd("image", "RescaleIntensity")], needs=("torchio",)),
    "TorchVisiond": Recipe(
        lambda: [mt.TorchVisiond("rgb", "Grayscale")], colours, lambda: [mt.ToTensord("rgb")], needs=("torchvision",)
    ),
    "TransformPointsImageToWorldd": Recipe(lambda: [mt.TransformPointsImageToWorldd("points", "image")], points),
    "TransformPointsWorldToImaged": Recipe(lambda: [mt.TransformPointsWorldToImaged("points", "image")], points),
    "Transposed": Recipe(lambda: [mt.Transposed(BOTH, (0, 3, 1, 2))]),
    "VoteEnsembled": in_memory(
        lambda: [
            mt.AsDiscreted(["pred0", "pred1", "pred2"], threshold=0.5),
            mt.VoteEnsembled(["pred0", "pred1", "pred2"], "out"),
        ],
        predictions,
    ),
    "WriteFileMappingd": Recipe(
        lambda folder: [
            mt.SaveImaged("image", output_dir=folder, savepath_in_metadict=True),
            mt.WriteFileMappingd("image", folder / "mapping.json"),
        ],
        writes=True,
    ),
    "Zoomd": Recipe(lambda: [mt.Zoomd(BOTH, 0.8, mode=["area", "nearest"], keep_size=False)]),
}
