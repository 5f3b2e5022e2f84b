"""Training loops that a user writes out: each of MONAI's caching datasets and its loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import monai.data as md
import monai.transforms as mt
import torch
from monai.losses import DiceCELoss, DiceLoss
from monai.networks.nets import UNet
from torch.utils.data import ConcatDataset, Subset, WeightedRandomSampler

from tests.swap.programs.table import Study, program

KEYS = ("image", "label")


def loading() -> list[Any]:
    """Transforms up to those that draw."""
    return [
        mt.LoadImaged(KEYS, ensure_channel_first=True),
        mt.ScaleIntensityRanged("image", -1000, 1000, 0.0, 1.0, clip=True),
        mt.ThresholdIntensityd("label", 1, above=False, cval=1),
    ]


def training(*more: Any) -> mt.Compose:
    """Transforms of a training, which draw crops and flips."""
    crops = mt.RandSpatialCropd(KEYS, (16, 16, 16), random_size=False)
    return mt.Compose([*loading(), *more, crops, mt.RandFlipd(KEYS, prob=0.5, spatial_axis=0)])


def validation() -> mt.Compose:
    """Transforms without draws, to equal sizes."""
    return mt.Compose([*loading(), mt.ResizeWithPadOrCropd(KEYS, (16, 16, 16))])


def net(channels: int = 1, classes: int = 2, dimensions: int = 3) -> UNet:
    return UNet(dimensions, channels, classes, channels=(4, 8), strides=(2,))


def fit(loader: Any, epochs: int = 2, loss: Any = None) -> Iterator[Any]:
    """The usual loop, which yields batches and losses, and the weights at the end."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loss = loss or DiceLoss(to_onehot_y=True, softmax=True)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            value = loss(model(batch["image"]), batch["label"])
            value.backward()
            optimizer.step()
            yield batch
            yield value.item()
    yield list(model.state_dict().values())


@program("Dataset", "DataLoader")
def dataset(study: Study) -> Iterator[Any]:
    """A plain loop over files that are loaded in every epoch."""
    data = md.Dataset(study.items, training())
    yield from fit(md.DataLoader(data, batch_size=2, shuffle=True))


@program("PersistentDataset", "DataLoader", other="hits keep metadata, which MONAI's drops")
def persistent(study: Study) -> Iterator[Any]:
    """A plain loop over a cache on disk."""
    data = md.PersistentDataset(study.items, training(), study.scratch / "persistent")
    yield from fit(md.DataLoader(data, batch_size=2, shuffle=True))


@program("CacheDataset", "DataLoader")
def cache(study: Study) -> Iterator[Any]:
    """A plain loop over a cache in memory."""
    data = md.CacheDataset(study.items, training(), cache_rate=1.0, num_workers=2, progress=False)
    yield from fit(md.DataLoader(data, batch_size=2, shuffle=True))


@program("CacheDataset", "DataLoader")
def part_of_the_cache(study: Study) -> Iterator[Any]:
    """A loop with half of the items cached, `cache_rate=0.5`."""
    data = md.CacheDataset(study.items, training(), cache_rate=0.5, progress=False)
    yield from fit(md.DataLoader(data, batch_size=1, drop_last=True))


@program("CacheDataset", "DataLoader")
def runtime_cache(study: Study) -> Iterator[Any]:
    """A loop whose first epoch fills the cache, `runtime_cache=True`."""
    data = md.CacheDataset(study.items, training(), runtime_cache=True, hash_as_key=True, progress=False)
    yield from fit(md.DataLoader(data, batch_size=2))


@program("SmartCacheDataset", "DataLoader")
def smart_cache(study: Study) -> Iterator[Any]:
    """A loop that replaces half of the cached items in every epoch."""
    data = md.SmartCacheDataset(
        study.items, training(), replace_rate=0.5, cache_num=2, num_init_workers=1, progress=False, shuffle=True, seed=3
    )
    data.start()
    loader = md.DataLoader(data, batch_size=1)
    for _ in range(3):
        yield from fit(loader, 1)
        data.update_cache()
    data.shutdown()


@program("CacheNTransDataset", "DataLoader", other="hits keep metadata, which MONAI's drops")
def cache_n_transforms(study: Study) -> Iterator[Any]:
    """A loop that caches the result of the first three transforms."""
    data = md.CacheNTransDataset(study.items, training(), 3, study.scratch / "first three")
    yield from fit(md.DataLoader(data, batch_size=2, shuffle=True))


@program("LMDBDataset", "DataLoader", needs=("lmdb",), other="hits keep metadata, which MONAI's drops")
def lmdb(study: Study) -> Iterator[Any]:
    """A loop over a database of items."""
    data = md.LMDBDataset(study.items, training(), study.scratch / "lmdb", progress=False)
    yield from fit(md.DataLoader(data, batch_size=2, shuffle=True))


@program("CacheDataset", "ThreadDataLoader")
def fast_training(study: Study) -> Iterator[Any]:
    """The fast-training recipe: cached on the device, a loader of threads, Novograd."""
    from monai.optimizers import Novograd

    pipeline = training(mt.EnsureTyped(KEYS, device="cpu", track_meta=False))
    data = md.CacheDataset(study.items, pipeline, cache_rate=1.0, copy_cache=False, progress=False)
    model, loss = net(), DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True, batch=True)
    optimizer = Novograd(model.parameters(), 1e-2)
    for batch in md.ThreadDataLoader(data, num_workers=0, batch_size=2, shuffle=True):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model(batch["image"]), batch["label"])
        value.backward()
        optimizer.step()
        yield from (batch, value.item())


@program("CacheDataset", "ThreadDataLoader")
def repeats(study: Study) -> Iterator[Any]:
    """Every batch twice, with three in the buffer."""
    data = md.CacheDataset(study.items, training(), progress=False)
    yield from fit(md.ThreadDataLoader(data, buffer_size=3, repeats=2, num_workers=0, batch_size=2, shuffle=True), 1)


@program("CacheDataset", "DataLoader")
def workers(study: Study) -> Iterator[Any]:
    """Validation with two workers."""
    data = md.CacheDataset(study.items, validation(), progress=False)
    yield from md.DataLoader(data, batch_size=2, num_workers=2)


@program(
    "CacheDataset",
    "DataLoader",
    differs="with `num_workers` an item's draws follow from its place, not from the worker it went to",
)
def workers_that_draw(study: Study) -> Iterator[Any]:
    """Training with two workers."""
    data = md.CacheDataset(study.items, training(), progress=False)
    yield from fit(md.DataLoader(data, batch_size=2, num_workers=2), 1)


@program("CacheDataset", "DataLoader")
def weighted_sampler(study: Study) -> Iterator[Any]:
    """Items drawn by weight, with torch's sampler."""
    data = md.CacheDataset(study.items, training(), progress=False)
    sampler = WeightedRandomSampler([0.1, 0.4, 0.4, 0.1], 6)
    yield from fit(md.DataLoader(data, batch_size=2, sampler=sampler), 1)


@program("CacheDataset", "Dataset", "DataLoader")
def joined(study: Study) -> Iterator[Any]:
    """Two sites as one `ConcatDataset`, and a `Subset` of it."""
    sites = [md.CacheDataset(study.items[:2], training(), progress=False), md.Dataset(study.items[2:], training())]
    yield from fit(md.DataLoader(Subset(ConcatDataset(sites), [3, 0, 1]), batch_size=3), 2)


@program("CacheDataset", "DataLoader")
def ranks(study: Study) -> Iterator[Any]:
    """A share of the data for each of two ranks, with `partition_dataset`."""
    for share in md.partition_dataset(study.items, num_partitions=2, shuffle=True, seed=1, even_divisible=True):
        data = md.CacheDataset(share, training(), progress=False)
        yield from fit(md.DataLoader(data, batch_size=1), 1)


@program("CacheDataset", "DataLoader")
def folds(study: Study) -> Iterator[Any]:
    """Two folds of a cross-validation, each with training and validation."""
    for fold in range(2):
        inside = [item for i, item in enumerate(study.items) if i % 2 != fold]
        outside = [item for i, item in enumerate(study.items) if i % 2 == fold]
        yield from fit(md.DataLoader(md.CacheDataset(inside, training(), progress=False), batch_size=2), 1)
        yield from md.DataLoader(md.CacheDataset(outside, validation(), progress=False))


@program("CacheDataset", "DataLoader")
def without_metadata(study: Study) -> Iterator[Any]:
    """A loop on plain tensors, after `set_track_meta(False)`."""
    md.set_track_meta(False)
    try:
        data = md.CacheDataset(study.items, training(), progress=False)
        yield from fit(md.DataLoader(data, batch_size=2, shuffle=True))
    finally:
        md.set_track_meta(True)


def resampling() -> mt.Compose:
    """Lazy transforms of both kinds."""
    modes = ("bilinear", "nearest")
    spacing, rotation = mt.Spacingd(KEYS, (2.0, 2.0, 2.0), modes), mt.RandRotated(KEYS, 0.3, prob=0.5, mode=modes)
    return mt.Compose([*loading(), spacing, rotation, mt.CenterSpatialCropd(KEYS, (12, 12, 12))], lazy=True)


@program("Dataset", "DataLoader", cached=False)
def lazy(study: Study) -> Iterator[Any]:
    """Lazy resampling: spacing, rotation and crop in one step."""
    yield from fit(md.DataLoader(md.Dataset(study.items, resampling()), batch_size=2))


@program("CacheDataset", "DataLoader")
def lazy_after_the_cache(study: Study) -> Iterator[Any]:
    """Lazy resampling, in two steps, one of them cached."""
    yield from fit(md.DataLoader(md.CacheDataset(study.items, resampling(), progress=False), batch_size=2))


@program("CacheDataset", "DataLoader")
def padded(study: Study) -> Iterator[Any]:
    """Volumes of different sizes in a batch, with `pad_list_data_collate`."""
    data = md.CacheDataset(study.items, mt.Compose(loading()), progress=False)
    yield from md.DataLoader(data, batch_size=4, collate_fn=md.pad_list_data_collate)


@program("CacheDataset", "DataLoader")
def choices(study: Study) -> Iterator[Any]:
    """Augmentations of which some are chosen: `OneOf`, `SomeOf`, `RandomOrder`."""
    noise = [mt.RandGaussianNoised("image", 1.0), mt.RandGaussianSmoothd("image", prob=1.0)]
    contrast = [mt.RandAdjustContrastd("image", 1.0), mt.RandScaleIntensityd("image", 0.1, 1.0)]
    flips = [mt.RandFlipd(KEYS, prob=0.5, spatial_axis=axis) for axis in range(3)]
    steps = [mt.OneOf(noise), mt.SomeOf(contrast, num_transforms=1), mt.RandomOrder(flips)]
    pipeline = mt.Compose([*validation().transforms, *steps])
    yield from fit(md.DataLoader(md.CacheDataset(study.items, pipeline, progress=False), batch_size=2))
