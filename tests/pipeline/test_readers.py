"""IgzipReader: what NibabelReader gives, and where it matters by another library."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
from monai.data import NibabelReader

from monai_gds import GDSDataset, IgzipReader
from tests.same import assert_same

AFFINE = np.array([[1.5, 0.1, 0, -30], [0, 1.5, 0, 20], [0, 0, 2.0, 10], [0, 0, 0, 1]])


@pytest.fixture
def igzip() -> Any:
    return pytest.importorskip("isal.igzip", reason="this machine has no python-isal")


def saved(path: Path, dtype: str = "int16", kind: Any = nib.Nifti1Image, slope: float | None = None) -> Path:
    values = np.random.default_rng(1).integers(0, 100, (30, 21, 17)).astype(dtype)
    image = kind(values, AFFINE)
    image.header.set_slope_inter(slope, 7 if slope else None)
    nib.save(image, path)
    return path


@pytest.mark.parametrize("name", ["a.nii.gz", "a.NII.GZ", "a.nii"])
@pytest.mark.parametrize("settings", [{}, {"as_closest_canonical": True}, {"channel_dim": "no_channel"}])
def test_arrays_and_metadata_are_nibabel_readers(tmp_path: Path, igzip: Any, name: str, settings: Any) -> None:
    path = saved(tmp_path / name)
    assert_same(*(mt.LoadImage(kind, **settings)(path) for kind in (NibabelReader, IgzipReader)))


@pytest.mark.parametrize(
    "how", [{"dtype": "float32"}, {"dtype": ">i2"}, {"kind": nib.Nifti2Image}, {"slope": 0.5, "dtype": "uint8"}]
)
def test_every_form_of_nifti(tmp_path: Path, igzip: Any, how: Any) -> None:
    path = saved(tmp_path / "a.nii.gz", **how)
    assert_same(*(mt.LoadImage(kind)(path) for kind in (NibabelReader, IgzipReader)))


@pytest.mark.parametrize("name", ["a.hdr.gz", "a.img.gz"])
def test_a_pair_by_either_of_its_files(tmp_path: Path, igzip: Any, name: str) -> None:
    path = saved(tmp_path / "a.img.gz", kind=nib.Nifti1Pair).with_name(name)
    assert_same(*(mt.LoadImage(kind)(path) for kind in (NibabelReader, IgzipReader)))


def test_several_files_and_files_of_several_members(tmp_path: Path, igzip: Any) -> None:
    plain = saved(tmp_path / "a.nii").read_bytes()
    packed = tmp_path / "b.nii.gz"
    packed.write_bytes(gzip.compress(plain[:5000]) + gzip.compress(plain[5000:]))
    paths = [str(packed), str(saved(tmp_path / "c.nii.gz"))]
    assert_same(*(mt.LoadImage(kind)(paths) for kind in (NibabelReader, IgzipReader)))


def test_the_voxels_are_unpacked_by_igzip(tmp_path: Path, igzip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    original = igzip.open

    def noted(file: Any) -> Any:
        opened.append(file)
        return original(file)

    monkeypatch.setattr(igzip, "open", noted)
    item = {"image": saved(tmp_path / "a.nii.gz")}
    mt.LoadImaged("image", reader=IgzipReader)(item)
    assert opened == [str(item["image"])]


def test_a_damaged_file_is_an_error(tmp_path: Path, igzip: Any) -> None:
    path = saved(tmp_path / "a.nii.gz")
    path.write_bytes(path.read_bytes()[:-3000])
    for kind in (NibabelReader, IgzipReader):
        with pytest.raises(EOFError):
            mt.LoadImage(kind)(path)


def test_items_are_cached_under_keys_of_their_own(tmp_path: Path, igzip: Any) -> None:
    items = [{"image": str(saved(tmp_path / "a.nii.gz"))}]
    for reader in (NibabelReader, IgzipReader):
        with GDSDataset(items, mt.LoadImaged("image", reader=reader), tmp_path / "cache", "cpu") as dataset:
            assert not dataset.is_cached(0)
            dataset[0]
        assert dataset.is_cached(0)


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.igzip", None)
    with pytest.raises(ImportError, match=r"pip install 'monai_gds\[igzip\]'"):
        IgzipReader()
