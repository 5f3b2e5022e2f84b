"""``DataLoader`` and ``ThreadDataLoader`` under ``patch``: ours over our datasets, with the same batches."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import monai.data
import numpy as np
import pytest
import torch
from monai.data import DataLoader, ThreadDataLoader, list_data_collate  # names that were imported before
from monai.transforms import (
    Compose,
    EnsureTyped,
    RandFlipd,
    RandomizableTransform,
    RandSpatialCropSamplesd,
    reset_ops_id,
)
from torch.utils.data import Subset

import monai_gds
from monai_gds import GDSDataLoader, GDSDataset
from tests.same import assert_same

ITEMS = [{"image": np.full((1, 8, 8), number, np.float32)} for number in range(6)]


def transform() -> Compose:
    return Compose(
        [EnsureTyped("image"), RandSpatialCropSamplesd("image", (4, 4), 2, random_size=False), RandFlipd("image", 0.5)]
    )


def batches(loader: Any) -> list[Any]:
    torch.manual_seed(1)
    loader.dataset.transform.set_random_state(2)
    found = list(loader)
    reset_ops_id(found)  # of random transforms, which are others in a copy
    return found


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (DataLoader, {"batch_size": 2, "shuffle": True, "drop_last": True}),
        (DataLoader, {"batch_size": 4, "collate_fn": list_data_collate}),
        (ThreadDataLoader, {"num_workers": 0, "batch_size": 2, "shuffle": True}),
        (ThreadDataLoader, {}),
    ],
    ids=["torch loader", "collated", "thread loader, shuffled", "thread loader"],
)
def test_they_are_ours_with_the_same_batches(kind: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    dataset = GDSDataset(ITEMS, transform(), tmp_path, "cpu")
    expected = batches(kind(dataset, **arguments))
    with monai_gds.patch(tmp_path):
        ours = kind(dataset, **arguments)
        assert type(ours) is GDSDataLoader
        assert_same(batches(ours), expected)
        with monai_gds.patch(tmp_path):
            assert type(kind(dataset, **arguments)) is GDSDataLoader
    assert type(kind(dataset, **arguments)) is kind
    assert_same(batches(pickle.loads(pickle.dumps(ours))), expected)


def test_positions_of_arguments_are_monais(tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path):
        dataset = monai.data.CacheDataset(ITEMS, transform(), progress=False)
        ours = DataLoader(Subset(dataset, [0, 2]), 1, batch_size=2)
        assert (type(ours), ours.num_workers, len(list(ours))) == (GDSDataLoader, 1, 1)


def test_an_argument_without_effect_is_told_at_the_line_that_gives_it(tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path):
        dataset = monai.data.CacheDataset(ITEMS, transform(), progress=False)
        with pytest.warns(UserWarning, match="without effect: buffer_timeout") as told:
            ThreadDataLoader(dataset, buffer_timeout=1.0)
    assert [one.filename for one in told] == [__file__]


def test_they_stay_monais_over_other_datasets_and_where_that_is_asked_for(tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path):
        assert type(DataLoader(monai.data.Dataset(ITEMS, transform()))) is DataLoader
        assert type(ThreadDataLoader(ITEMS, buffer_size=2)) is ThreadDataLoader
        ours = monai.data.CacheDataset(ITEMS, transform(), progress=False)

        class Mine(DataLoader):
            pass

        assert type(Mine(ours)) is Mine and len(list(Mine(ours))) == 6
    with monai_gds.patch(tmp_path, loaders=False):
        assert type(DataLoader(ours)) is DataLoader


class Flags(RandomizableTransform):  # type: ignore[misc]
    """Adds the settings of the thread that it runs in."""

    def __call__(self, data: Any) -> Any:
        found = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
        return {**data, "flags": found, "made": torch.zeros(1)}


def flags(items: list[Any]) -> Any:
    here = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return items[0]["flags"], items[0]["made"].is_inference(), here, items[0]["made"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (DataLoader, {}),
        (DataLoader, {"num_workers": 1}),
        (ThreadDataLoader, {}),
        (ThreadDataLoader, {"num_workers": 1}),
        (ThreadDataLoader, {"num_workers": 1, "use_thread_workers": True}),
    ],
    ids=["torch loader", "workers", "thread loader", "thread loader with workers", "workers that are threads"],
)
def test_transforms_run_under_the_settings_that_they_have_with_monais(
    kind: Any, arguments: dict[str, Any], mode: Any, tmp_path: Path
) -> None:
    """``ThreadDataLoader`` runs them in a thread, where the consumer's settings do not hold."""

    def found() -> list[Any]:
        dataset = monai.data.CacheDataset(ITEMS[:2], [EnsureTyped("image"), Flags()], progress=False)
        loaders = [kind(dataset, collate_fn=flags, **arguments) for _ in range(3)]
        with mode():
            whole, begun = list(loaders[0]), iter(loaders[1])
        outside, later = list(begun), iter(loaders[2])
        with mode():
            return [(*rest, made.is_inference()) for *rest, made in (*whole, *outside, *later)]

    expected = found()
    with warnings.catch_warnings(), monai_gds.patch(tmp_path):
        warnings.simplefilter("ignore")  # workers are processes here
        ours = found()
    if kind is DataLoader and arguments and mode is torch.inference_mode:
        # What a worker made is unpacked as the loop began here, and there as the consumer is now.
        expected, ours = ([*some[:2], *(one[:-1] for one in some[2:])] for some in (expected, ours))
    assert ours == expected


def test_lightning_makes_them_again_with_its_own_samplers(tmp_path: Path) -> None:
    """It notes the arguments that a loader is made with, whose constructor it wraps for that."""
    data = pytest.importorskip("lightning.fabric.utilities.data", reason="Lightning is not installed on this machine")
    with monai_gds.patch(tmp_path), data._replace_dunder_methods(torch.utils.data.DataLoader, "dataset"):
        dataset = monai.data.CacheDataset(ITEMS, transform(), progress=False)
        ours = ThreadDataLoader(dataset, batch_size=2, shuffle=True)
    again = data._update_dataloader(ours, torch.utils.data.SequentialSampler(dataset))
    assert type(ours) is type(again) is GDSDataLoader and again.batch_size == 2
    assert isinstance(again.sampler, torch.utils.data.SequentialSampler) and len(list(again)) == 3
