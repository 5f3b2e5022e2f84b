"""Datasets of whole slide images: the patches of MONAI's, whose slides are not opened at a hit."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import monai.data
import monai.data.wsi_datasets
import monai.data.wsi_reader
import numpy as np
import pytest
import torch
from monai.transforms import Compose, RandFlipd, ScaleIntensityd

import monai_gds
from monai_gds import GDSDataset
from tests.same import assert_same

tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed on this machine")

THEIRS = {
    name: getattr(monai.data, name) for name in ("PatchWSIDataset", "SlidingPatchWSIDataset", "MaskedPatchWSIDataset")
}


@pytest.fixture
def slide(tmp_path: Path) -> str:
    """A white slide with a piece of tissue."""
    pixels = np.full((128, 160, 3), 240, np.uint8)
    pixels[40:90, 30:100] = np.random.default_rng(0).integers(0, 255, (50, 70, 3))
    tifffile.imwrite(tmp_path / "slide.tiff", pixels, photometric="rgb", tile=(64, 64))
    return str(tmp_path / "slide.tiff")


@pytest.fixture(autouse=True)
def _plain_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otsu's threshold needs scikit-image, which is not everywhere."""

    class Mask:
        def __init__(self, **_: Any) -> None: ...

        def __call__(self, image: Any) -> Any:
            mask = torch.zeros(1, *image.shape[1:])
            mask[:, 40:90:20, 30:100:20] = 1
            return mask

    monkeypatch.setattr(monai.data.wsi_datasets, "ForegroundMask", Mask)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often a slide was opened, in this process and in forked ones: its ``value``."""
    opened = multiprocessing.get_context("fork").Value("i", 0)
    original = monai.data.wsi_reader.TiffFile

    def counted(*args: Any, **kwargs: Any) -> Any:
        opened.value += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(monai.data.wsi_reader, "TiffFile", counted)
    return opened


def arguments(name: str, slide: str) -> dict[str, Any]:
    data: list[dict[str, Any]] = [{"image": slide}]
    if name == "PatchWSIDataset":
        data = [{"image": slide, "location": [60, 50 + number], "label": number, "case": "a"} for number in range(3)]
        return {"data": data, "patch_size": 32, "reader": "tifffile", "additional_meta_keys": ["case"]}
    own = {"overlap": 0.25, "offset": (4, 2)} if name.startswith("Sliding") else {"mask_level": 0}
    return {"data": data, "patch_size": (32, 16), "patch_level": 0, "reader": "tifffile", **own}


@pytest.mark.parametrize("name", THEIRS)
def test_patches_are_records_and_the_slide_is_not_opened_again(
    name: str, slide: str, tmp_path: Path, opened: Any
) -> None:
    def made(kind: Any) -> Any:
        return kind(transform=Compose([ScaleIntensityd("image")]), **arguments(name, slide))

    theirs = made(THEIRS[name])
    with monai_gds.patch(tmp_path / "cache"), made(getattr(monai.data, name)) as ours:
        assert isinstance(ours, THEIRS[name]) and isinstance(ours, GDSDataset)
        assert len(ours) == len(theirs) > 2
        cold = list(ours)
    ours = _reset(ours)
    before = opened.value
    assert before > 0
    for index, item in enumerate(cold):
        assert_same(ours[index], item)
    assert opened.value == before
    for index, item in enumerate(theirs):
        assert item.keys() == cold[index].keys() and torch.equal(item["image"], cold[index]["image"])
        assert_same(dict(cold[index]["image"].meta), {**item["image"].meta})
        assert torch.equal(item.get("label", torch.zeros(1)), cold[index].get("label", torch.zeros(1)))


def test_a_forked_process_opens_slides_of_its_own(slide: str, tmp_path: Path, opened: Any) -> None:
    """Processes that share an open file share the place in it, too."""
    with monai_gds.patch(tmp_path / "cache"):
        ours = monai.data.PatchWSIDataset(**arguments("PatchWSIDataset", slide))
    ours[0]
    child = multiprocessing.get_context("fork").Process(target=ours.__getitem__, args=(1,))
    child.start()
    child.join()
    assert opened.value == 2
    ours[2]
    assert opened.value == 2  # this process has its own still


def _reset(dataset: Any) -> Any:
    """The dataset without what it has open."""
    return pickle.loads(pickle.dumps(dataset))


def test_the_transforms_draw_as_they_were_seeded(slide: str, tmp_path: Path) -> None:
    steps = Compose([RandFlipd("image", prob=0.5)]).set_random_state(4)
    draws = [steps.transforms[0].R.rand() < 0.5 for _ in range(3)]
    steps.set_random_state(4)
    with monai_gds.patch(tmp_path / "cache"):
        ours = monai.data.PatchWSIDataset(transform=steps, **arguments("PatchWSIDataset", slide))
    whole = [item["image"] for item in THEIRS["PatchWSIDataset"](**arguments("PatchWSIDataset", slide))]
    for index, flipped in enumerate(draws):
        expected = whole[index].flip(1, 2) if flipped else whole[index]
        assert torch.equal(ours[index]["image"], expected)


def test_methods_that_a_user_overrides_are_used(slide: str, tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"):

        class Mine(monai.data.PatchWSIDataset):  # type: ignore[misc, name-defined, unused-ignore]
            def _get_label(self, sample: dict[str, Any]) -> torch.Tensor:
                return torch.tensor(sample["label"] + 10)

        ours = Mine(**arguments("PatchWSIDataset", slide))
        assert [int(ours[index]["label"]) for index in range(3)] == [10, 11, 12]
        assert ours.is_cached(0) or ours.flush() is None


def test_another_size_is_another_record(slide: str, tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"):
        shapes = []
        for size in (32, 16):
            with monai.data.PatchWSIDataset(**{**arguments("PatchWSIDataset", slide), "patch_size": size}) as ours:
                shapes.append(tuple(ours[0]["image"].shape))
    assert shapes == [(3, 32, 32), (3, 16, 16)]
