"""Recipes for a task: spleen, BTCV, BraTS, MedNIST, detection, registration, self-supervision, diffusion."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from typing import Any

import monai.apps
import monai.data as md
import monai.transforms as mt
import numpy as np
import torch
from monai.inferers import sliding_window_inference
from monai.losses import BendingEnergyLoss, ContrastiveLoss, DiceCELoss, DiceLoss
from monai.metrics import DiceMetric

from tests.swap.programs.loops import KEYS, fit, loading, net, training, validation
from tests.swap.programs.table import Study, program


def steps_of(model: torch.nn.Module, loader: Any, loss: Any) -> Iterator[Any]:
    """A loop over a loader: ``loss`` of a batch, and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in loader:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        yield value.item()
    yield list(model.state_dict().values())


@program("CacheDataset", "DataLoader")
def spleen(study: Study) -> Iterator[Any]:
    """Spleen: balanced crops, sliding-window validation, `decollate_batch`, Dice."""
    geometry = [
        mt.Orientationd(KEYS, "RAS"),
        mt.Spacingd(KEYS, (1.5, 1.5, 1.5), mode=("bilinear", "nearest")),
        mt.CropForegroundd(KEYS, "image"),
    ]
    crops = mt.RandCropByPosNegLabeld(KEYS, "label", (16, 16, 16), 1, 1, 2, image_key="image", image_threshold=0)
    train = md.CacheDataset(study.items[:3], mt.Compose([*loading(), *geometry, crops]), progress=False)
    val = md.CacheDataset(study.items[3:], mt.Compose([*loading(), *geometry]), progress=False)
    yield from fit(md.DataLoader(train, batch_size=2, shuffle=True))
    model, metric = net(), DiceMetric(include_background=False)
    pred, truth = mt.Compose([mt.AsDiscrete(argmax=True, to_onehot=2)]), mt.Compose([mt.AsDiscrete(to_onehot=2)])
    with torch.no_grad():
        for batch in md.DataLoader(val):
            outputs = sliding_window_inference(batch["image"], (16, 16, 16), 4, model)
            found = [pred(one) for one in md.decollate_batch(outputs)]
            metric(y_pred=found, y=[truth(one) for one in md.decollate_batch(batch["label"])])
            yield found
    yield metric.aggregate().item()


@program("CacheDataset", "ThreadDataLoader", long=True)
def btcv(study: Study) -> Iterator[Any]:
    """BTCV with Swin UNETR: crops, flips, quarter turns, intensity shifts."""
    from monai.networks.nets import SwinUNETR

    listed = [{key: f"{key}{i}.nii.gz" for key in KEYS} for i in range(4)]
    (study.scratch / "list.json").write_text(json.dumps({"training": listed}))
    items = md.load_decathlon_datalist(study.scratch / "list.json", True, "training", base_dir=study.data)
    pipeline = mt.Compose(
        [
            *loading()[:2],
            mt.Orientationd(KEYS, "RAS"),
            mt.SpatialPadd(KEYS, (32, 32, 32)),
            mt.EnsureTyped(KEYS, device="cpu", track_meta=False),
            mt.RandCropByPosNegLabeld(KEYS, "label", (32, 32, 32), 1, 1, 2),
            *(mt.RandFlipd(KEYS, prob=0.1, spatial_axis=axis) for axis in range(3)),
            mt.RandRotate90d(KEYS, prob=0.1, max_k=3),
            mt.RandShiftIntensityd("image", 0.1, prob=0.5),
        ]
    )
    data = md.CacheDataset(items, pipeline, cache_rate=1.0, progress=False)
    model, loss = (
        SwinUNETR(1, 5, feature_size=12, depths=(1, 1, 1, 1), norm_name="batch"),
        DiceCELoss(to_onehot_y=True, softmax=True),
    )
    loader = md.ThreadDataLoader(data, num_workers=0, batch_size=1, shuffle=True)
    yield from steps_of(model, loader, lambda batch: loss(model(batch["image"]), batch["label"]))


@program("Dataset", "DataLoader")
def brats(study: Study) -> Iterator[Any]:
    """BraTS: four modalities a volume, three overlapping regions, SegResNet."""
    from monai.networks.nets import SegResNet

    items = [{"image": [item["image"]] * 4, "label": item["label"]} for item in study.items]
    pipeline = mt.Compose(
        [
            mt.LoadImaged(KEYS),
            mt.EnsureChannelFirstd("image"),
            mt.ConvertToMultiChannelBasedOnBratsClassesd("label"),
            mt.Spacingd(KEYS, (2.0, 2.0, 2.0), mode=("bilinear", "nearest")),
            mt.RandSpatialCropd(KEYS, (16, 16, 16), random_size=False),
            *(mt.RandFlipd(KEYS, prob=0.5, spatial_axis=axis) for axis in range(3)),
            mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True),
            mt.RandScaleIntensityd("image", 0.1, prob=1.0),
        ]
    )
    model = SegResNet(init_filters=8, in_channels=4, out_channels=3, blocks_down=(1, 1), blocks_up=(1,))
    loss = DiceLoss(sigmoid=True, smooth_nr=0, smooth_dr=1e-5, squared_pred=True)
    loader = md.DataLoader(md.Dataset(items, pipeline), batch_size=2, shuffle=True)
    yield from steps_of(model, loader, lambda batch: loss(model(batch["image"]), batch["label"].float()))


def _classifier() -> torch.nn.Module:
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 6))


@program("MedNISTDataset", "DataLoader", needs=("PIL",))
def mednist(study: Study) -> Iterator[Any]:
    """MedNIST: classes of small pictures."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for kind in ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT"):
        folder = study.scratch / "MedNIST" / kind
        if not folder.exists():
            folder.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(rng.integers(0, 255, (16, 16), np.uint8)).save(folder / f"{i}.jpeg")
    load = mt.LoadImaged("image", ensure_channel_first=True)
    pipeline = mt.Compose([load, mt.ScaleIntensityd("image"), mt.RandRotated("image", 0.2, prob=0.5)])
    data = monai.apps.MedNISTDataset(
        study.scratch, "training", pipeline, val_frac=0.2, test_frac=0.2, progress=False, num_workers=1
    )
    model, loss = _classifier(), torch.nn.CrossEntropyLoss()
    loader = md.DataLoader(data, batch_size=5, shuffle=True)
    yield data.get_num_classes()
    yield from steps_of(model, loader, lambda batch: loss(model(batch["image"]), batch["label"]))


def _decathlon(study: Study) -> dict[str, Any]:
    """The data as the Decathlon has it: a folder with a list; and arguments of MONAI's dataset."""
    folder = study.data.parent / "Task09_Spleen"
    if not folder.exists():
        shutil.copytree(study.data, folder)
        listed = [{key: f"./{key}{i}.nii.gz" for key in KEYS} for i in range(4)]
        texts = dict.fromkeys(("name", "description", "reference", "licence", "tensorImageSize"), "made up")
        known = {**texts, "modality": {"0": "CT"}, "labels": {"1": "spleen"}, "numTraining": 4, "numTest": 0}
        (folder / "dataset.json").write_text(json.dumps({**known, "training": listed, "test": []}))
    return {"root_dir": folder.parent, "task": "Task09_Spleen", "progress": False}


@program("DecathlonDataset", "DataLoader")
def decathlon(study: Study) -> Iterator[Any]:
    """The Decathlon's dataset, training and validation."""
    known = _decathlon(study)
    train = monai.apps.DecathlonDataset(section="training", transform=training(), val_frac=0.25, **known)
    val = monai.apps.DecathlonDataset(section="validation", transform=validation(), val_frac=0.25, **known)
    yield train.get_properties(["labels"])
    yield from fit(md.DataLoader(train, batch_size=1, shuffle=True))
    yield from md.DataLoader(val)


@program("CrossValidation", "DecathlonDataset", "DataLoader")
def cross_validation(study: Study) -> Iterator[Any]:
    """`CrossValidation` over the Decathlon's dataset."""

    class Fold(monai.apps.DecathlonDataset):  # type: ignore[name-defined, misc, unused-ignore]
        def _split_datalist(self, datalist: list[Any]) -> list[Any]:
            return datalist

    whole = monai.apps.CrossValidation(Fold, nfolds=2, seed=1, section="training", **_decathlon(study))
    for fold in range(2):
        train = whole.get_dataset(folds=[1 - fold], transform=training())
        yield from fit(md.DataLoader(train, batch_size=1, shuffle=True), 1)
        yield from md.DataLoader(whole.get_dataset(folds=fold, transform=validation()))


@program(
    "CacheDataset",
    "DataLoader",
    other="MONAI's cached items share `pixdim`, an array of their metadata, which the zoom of a later epoch overwrites",
)
def detection(study: Study) -> Iterator[Any]:
    """Detection: boxes in millimetres, zoomed, flipped and cropped with their volumes."""
    from monai.apps.detection.transforms import dictionary as boxes

    items = [
        {"image": item["image"], "box": [[-30.0, 6.0, 8.0, -12.0, 24.0, 28.0], [-20.0, 4.0, 4.0, -4.0, 12.0, 12.0]],
         "label": [0, 1]}
        for item in study.items
    ]  # fmt: skip
    pipeline = mt.Compose(
        [
            mt.LoadImaged("image", ensure_channel_first=True),
            mt.ToTensord(["box", "label"]),
            mt.EnsureTyped(["image", "box"], dtype=torch.float32),
            mt.Orientationd("image", "RAS"),
            boxes.AffineBoxToImageCoordinated("box", "image"),
            boxes.ClipBoxToImaged("box", "label", "image"),
            boxes.RandZoomBoxd("image", "box", "image", prob=0.5, min_zoom=0.8, max_zoom=1.2, keep_size=True),
            boxes.RandFlipBoxd("image", "box", "image", prob=0.5, spatial_axis=0),
            boxes.RandCropBoxByPosNegLabeld("image", "box", "label", (16, 16, 16), num_samples=2),
        ]
    )
    data = md.CacheDataset(items, pipeline, progress=False)
    for _ in range(2):
        yield from md.DataLoader(data, batch_size=2, shuffle=True, collate_fn=md.utils.no_collation)


@program("CacheDataset", "DataLoader")
def registration(study: Study) -> Iterator[Any]:
    """Registration of pairs: LocalNet, `Warp`, bending energy."""
    from monai.networks.blocks import Warp
    from monai.networks.nets import LocalNet

    pairs = ("fixed", "moving")
    items = [{"fixed": a["image"], "moving": b["image"]} for a, b in zip(study.items, study.items[1:], strict=False)]
    pipeline = mt.Compose(
        [
            mt.LoadImaged(pairs, ensure_channel_first=True),
            mt.ScaleIntensityRanged(pairs, -1000, 1000, 0.0, 1.0),
            mt.Resized(pairs, (16, 16, 16), mode="trilinear"),
            mt.RandAffined(pairs, prob=1.0, rotate_range=(0.1, 0.1, 0.1), padding_mode="border"),
        ]
    )
    model, warp, bending = LocalNet(3, 2, 4, (0, 1), "zeros", None, 3), Warp(), BendingEnergyLoss()

    def loss(batch: Any) -> Any:
        field = model(torch.cat([batch["moving"], batch["fixed"]], 1))
        return torch.nn.functional.mse_loss(warp(batch["moving"], field), batch["fixed"]) + bending(field)

    loader = md.DataLoader(md.CacheDataset(items, pipeline, progress=False), batch_size=2, shuffle=True)
    yield from steps_of(model, loader, loss)


@program("Dataset", "DataLoader")
def self_supervised(study: Study) -> Iterator[Any]:
    """Self-supervision: two views with holes and shuffled boxes, reconstruction and contrast."""
    from monai.networks.nets import AutoEncoder

    holes = {"prob": 1.0, "holes": 2, "spatial_size": 4, "max_spatial_size": 8}
    pipeline = mt.Compose(
        [
            mt.LoadImaged("image", ensure_channel_first=True),
            mt.ScaleIntensityd("image"),
            mt.RandSpatialCropSamplesd("image", (16, 16, 16), 2, random_size=False),
            mt.CopyItemsd("image", 2, ["truth", "second"]),
            mt.OneOf([mt.RandCoarseDropoutd("image", **holes), mt.RandCoarseShuffled("image", **holes)]),
            mt.RandCoarseDropoutd("second", dropout_holes=False, **holes),
        ]
    )
    items = [{"image": item["image"]} for item in study.items]
    model, contrast = AutoEncoder(3, 1, 1, (4, 8), (2, 2)), ContrastiveLoss(0.05)

    def loss(batch: Any) -> Any:
        one, two = model(batch["image"]), model(batch["second"])
        return torch.nn.functional.l1_loss(one, batch["truth"]) + contrast(one.flatten(1), two.flatten(1))

    yield from steps_of(model, md.DataLoader(md.Dataset(items, pipeline), batch_size=2), loss)


@program("CacheDataset", "DataLoader", needs=("einops",))
def diffusion(study: Study) -> Iterator[Any]:
    """A diffusion model: noise predicted at random times, then a sample."""
    from monai.inferers import DiffusionInferer
    from monai.networks.nets import DiffusionModelUNet
    from monai.networks.schedulers import DDPMScheduler

    pipeline = mt.Compose([*training().transforms, mt.SelectItemsd("image")])
    data = md.CacheDataset(study.items, pipeline, progress=False)
    model = DiffusionModelUNet(
        3, 1, 1, channels=(4, 8), attention_levels=(False, False), num_res_blocks=1, norm_num_groups=4
    )
    scheduler = DDPMScheduler(20)
    inferer = DiffusionInferer(scheduler)

    def loss(batch: Any) -> Any:
        noise = torch.randn_like(batch["image"])
        times = torch.randint(0, 20, (len(noise),))
        return torch.nn.functional.mse_loss(inferer(batch["image"], model, noise, times), noise)

    yield from steps_of(model, md.DataLoader(data, batch_size=2, shuffle=True), loss)
    scheduler.set_timesteps(3)
    with torch.no_grad():
        yield inferer.sample(torch.randn(1, 1, 16, 16, 16), model, scheduler, verbose=False)


@program("CSVDataset", "DataLoader", needs=("pandas",))
def table_of_patients(study: Study) -> Iterator[Any]:
    """Images and ages out of a table, `CSVDataset`."""
    path = study.scratch / "patients.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "age"), *((item["image"], 40 + i) for i, item in enumerate(study.items))])
    load, flip = mt.LoadImaged("image", ensure_channel_first=True), mt.RandFlipd("image", 0.5)
    data = md.CSVDataset(str(path), transform=mt.Compose([load, mt.Resized("image", (8, 8, 8)), flip]))
    yield from md.DataLoader(data, batch_size=2, shuffle=True)
