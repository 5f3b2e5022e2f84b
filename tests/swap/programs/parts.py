"""Datasets that cut or join others, and what goes back from predictions: inverses, ensembles of augmentations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import monai.data as md
import monai.transforms as mt
import numpy as np
import torch

from tests.swap.programs.loops import KEYS, loading, net, training, validation
from tests.swap.programs.table import Study, program


@program("GridPatchDataset", "CacheDataset", "DataLoader")
def grid_patches(study: Study) -> Iterator[Any]:
    """Volumes in a grid of patches, `GridPatchDataset` over cached volumes."""
    volumes = md.CacheDataset(study.items, mt.Compose(loading()), progress=False)
    patches = md.GridPatchDataset(volumes, md.PatchIterd(KEYS, (12, 12, None)), mt.RandFlipd(KEYS, prob=0.5))
    yield from md.DataLoader(patches, batch_size=2)


@program("PatchDataset", "Dataset", "DataLoader")
def random_patches(study: Study) -> Iterator[Any]:
    """Two random patches of each volume, `PatchDataset`."""
    volumes = md.Dataset(study.items, mt.Compose(loading()))
    crops = mt.RandSpatialCropSamplesd(KEYS, (8, 8, 8), 2, random_size=False)
    patches = md.PatchDataset(volumes, crops, samples_per_image=2, transform=mt.RandGaussianNoised("image", 0.5))
    yield from md.DataLoader(patches, batch_size=3)


@program("ArrayDataset", "DataLoader")
def arrays(study: Study) -> Iterator[Any]:
    """Images and labels as lists of files, `ArrayDataset`."""
    steps = [
        mt.LoadImage(ensure_channel_first=True),
        mt.ScaleIntensity(),
        mt.RandSpatialCrop((8, 8, 8), random_size=False),
    ]
    labels = [mt.LoadImage(ensure_channel_first=True), mt.RandSpatialCrop((8, 8, 8), random_size=False)]
    images, segs = ([item[key] for item in study.items] for key in KEYS)
    data = md.ArrayDataset(images, mt.Compose(steps), segs, mt.Compose(labels))
    yield from md.DataLoader(data, batch_size=2, shuffle=True)


@program("ZipDataset", "Dataset", "CacheDataset", "DataLoader")
def zipped(study: Study) -> Iterator[Any]:
    """Images and labels of two datasets, `ZipDataset`."""
    images = md.CacheDataset([item["image"] for item in study.items], mt.Compose(mt.LoadImage()), progress=False)
    labels = md.Dataset([item["label"] for item in study.items], mt.Compose(mt.LoadImage()))
    yield from md.DataLoader(md.ZipDataset([images, labels]))


@program("ImageDataset", "DataLoader")
def image_files(study: Study) -> Iterator[Any]:
    """Files with a segmentation and a class each, `ImageDataset`."""
    images, segs = ([item[key] for item in study.items] for key in KEYS)
    steps = mt.Compose([mt.EnsureChannelFirst(), mt.ScaleIntensity(), mt.RandRotate90(prob=0.5), mt.Resize((8, 8, 8))])
    flat = mt.Compose([mt.EnsureChannelFirst(), mt.RandRotate90(prob=0.5), mt.Resize((8, 8, 8), mode="nearest")])
    data = md.ImageDataset(images, segs, [0, 1, 0, 1], steps, flat, image_only=True, transform_with_metadata=False)
    yield from md.DataLoader(data, batch_size=2, shuffle=True)


@program("CacheDataset", "PatchDataset", "DataLoader")
def slices(study: Study) -> Iterator[Any]:
    """A two-dimensional net on random slices of cached volumes."""
    volumes = md.CacheDataset(study.items, mt.Compose(loading()), progress=False)
    slices = mt.RandSpatialCropSamplesd(KEYS, (24, 20, 1), 3, random_size=False)
    flat = mt.Compose([mt.SqueezeDimd(KEYS, dim=-1), mt.RandRotated(KEYS, 0.3, prob=0.5)])
    model = net(dimensions=2)
    for batch in md.DataLoader(md.PatchDataset(volumes, slices, 3, flat), batch_size=4):
        yield batch
        yield model(batch["image"]).detach()


def _slide(study: Study) -> str:
    """The path of a slide."""
    import tifffile

    path = study.data / "slide.tiff"
    if not path.exists():
        pixels = np.random.default_rng(0).integers(0, 255, (64, 80, 3), np.uint8)
        tifffile.imwrite(path, pixels, photometric="rgb", tile=(32, 32))
    return str(path)


def _patches(study: Study, *more: Any) -> Any:
    """A dataset of patches of a slide."""
    places = [{"image": _slide(study), "location": [20, 16 + i], "label": i % 2} for i in range(4)]
    return md.PatchWSIDataset(places, 16, 0, mt.Compose([mt.ScaleIntensityd("image"), *more]), reader="tifffile")


@program("PatchWSIDataset", "DataLoader", needs=("tifffile",))
def slides(study: Study) -> Iterator[Any]:
    """Patches of a whole slide with their labels, `PatchWSIDataset`."""
    yield from md.DataLoader(_patches(study), batch_size=2, shuffle=True)


@program(
    "PatchWSIDataset",
    "DataLoader",
    differs="after `set_determinism` MONAI's seeds the transforms again per patch, and all patches get equal draws",
    needs=("tifffile",),
)
def slides_that_draw(study: Study) -> Iterator[Any]:
    """Patches of a whole slide, flipped at random."""
    yield from md.DataLoader(_patches(study, mt.RandFlipd("image", prob=0.5)), batch_size=2, shuffle=True)


@program("SlidingPatchWSIDataset", "DataLoader", needs=("tifffile",))
def whole_slide(study: Study) -> Iterator[Any]:
    """Every patch of a slide, `SlidingPatchWSIDataset`."""
    scale = mt.Compose(mt.ScaleIntensityd("image"))
    slides = [{"image": _slide(study)}]
    data = md.SlidingPatchWSIDataset(slides, 32, 0, overlap=0.5, transform=scale, reader="tifffile")
    yield from md.DataLoader(data, batch_size=4)


@program("CacheDataset", "DataLoader")
def inverse(study: Study) -> Iterator[Any]:
    """Predictions back in the space of the files, with `Invertd`."""
    data = md.CacheDataset(study.items, validation(), progress=False)
    invert = mt.Invertd("pred", data.transform, "image", nearest_interp=False, to_tensor=True)
    model = net()
    with torch.no_grad():
        for batch in md.DataLoader(data, batch_size=2):
            batch["pred"] = model(batch["image"])
            yield [invert(one)["pred"] for one in md.decollate_batch(batch)]


@program("CacheDataset", "DataLoader")
def inverse_of_draws(study: Study) -> Iterator[Any]:
    """Augmented batches back in the space of the files, with `BatchInverseTransform`."""
    pipeline = mt.Compose([*validation().transforms, mt.RandFlipd(KEYS, prob=0.5), mt.RandZoomd(KEYS, prob=0.5)])
    loader = md.DataLoader(md.CacheDataset(study.items, pipeline, progress=False), batch_size=2)
    batches = list(loader)  # an inverse seeds the pipeline again, and items that were read ahead are drawn already
    yield from map(mt.BatchInverseTransform(pipeline, loader), batches)


@program("CacheDataset", "DataLoader")
def saved(study: Study) -> Iterator[Any]:
    """Predictions saved as NIfTI files, and loaded again, `SaveImaged`."""
    data = md.CacheDataset(study.items, validation(), progress=False)
    save = mt.SaveImaged("pred", output_dir=study.scratch / "out", separate_folder=False, print_log=False)
    model = net()
    with torch.no_grad():
        for batch in md.DataLoader(data):
            batch["pred"] = model(batch["image"]).argmax(1, keepdim=True).float()
            for one in md.decollate_batch(batch):
                save(one)
    for path in sorted((study.scratch / "out").iterdir()):
        yield path.name
        yield np.asarray(mt.LoadImage(image_only=True)(path))


@program("TestTimeAugmentation", "Dataset", "DataLoader", cached=False)
def augmentation_at_test_time(study: Study) -> Iterator[Any]:
    """Augmentation at test time, with the inverses of its draws."""
    found = validation()(study.items[0])
    pipeline = mt.Compose([mt.RandFlipd(KEYS, prob=0.5), mt.RandRotated(KEYS, 0.2, prob=0.5)])
    model = net()
    average = md.TestTimeAugmentation(
        pipeline, 2, 0, lambda images: model(images).detach(), orig_key="image", progress=False
    )
    pipeline.set_random_state(5)
    yield average(found, num_examples=4)


@program("CacheDataset", "DataLoader")
def cached_items(study: Study) -> Iterator[Any]:
    """A loop that indexes and slices the dataset, without a loader."""
    data = md.CacheDataset(study.items, training().set_random_state(4), progress=False)
    yield from data
    yield from data[1:3]
    data.set_data(study.items[:2])
    yield len(data)
    yield data[-1]


@program("CacheDataset", "Dataset", "DataLoader")
def dataset_of_a_dataset(study: Study) -> Iterator[Any]:
    """Draws that a second dataset makes of cached items."""
    volumes = md.CacheDataset(study.items, validation(), progress=False)
    noise = mt.Compose([mt.RandGaussianNoised("image", 0.5), mt.RandFlipd(KEYS, prob=0.5)])
    yield from md.DataLoader(md.Dataset(volumes, noise), batch_size=2, shuffle=True)
