"""The arguments of torch's and MONAI's loaders: GDSDataLoader heeds them, or names those that do nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.data import Dataset, ThreadDataLoader
from monai.transforms import Compose, EnsureTyped, RandScaleIntensityd

from monai_gds import GDSDataLoader, GDSDataset
from monai_gds.loader.epoch import Epoch
from tests.polls import until
from tests.same import assert_same

Make = Callable[..., GDSDataset]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_dataset(items: int = 6) -> GDSDataset:
        data = [{"image": torch.full((1, 4), float(i))} for i in range(items)]
        transform = Compose([EnsureTyped("image"), RandScaleIntensityd("image", factors=0.5, prob=1)])
        return GDSDataset(data, transform.set_random_state(1), tmp_path / "cache", "cpu")

    return make_dataset


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_repeated_as_by_thread_data_loader(make: Make, num_workers: int) -> None:
    torch.manual_seed(1)
    found = list(GDSDataLoader(make(), num_workers, batch_size=4, repeats=3))
    if num_workers == 0:
        torch.manual_seed(1)
        assert_same(found, list(ThreadDataLoader(make(), batch_size=4, repeats=3)))
    assert [len(batch["image"]) for batch in found] == [4, 4, 4, 2, 2, 2]
    assert found[0] is found[1] is found[2]


def test_any_dataset_is_repeated() -> None:
    loader = GDSDataLoader(Dataset([1, 2]), batch_size=1, repeats=2)
    assert [int(batch) for batch in loader] == [1, 1, 2, 2]


@pytest.mark.parametrize(("num_workers", "of_monai"), [(0, False), (1, False), (0, True)])
def test_a_repeated_loop_continues_in_the_turn_where_it_was(make: Make, num_workers: int, of_monai: bool) -> None:
    def fresh(seed: int) -> GDSDataLoader:
        mine = make()
        torch.manual_seed(seed)
        mine.transform.set_random_state(seed)
        data = Dataset(mine.data, mine.transform) if of_monai else mine
        return GDSDataLoader(data, num_workers, batch_size=2, repeats=3, shuffle=True)

    whole = list(fresh(1))
    for taken in range(1, len(whole), 1 + 2 * num_workers):
        state = fresh(1).state_dict()
        for given in (taken - 1, 1):  # continued, and continued again
            loader = fresh(1 if given > 1 else 9)
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            batches = iter(loader)
            for _ in range(given):
                next(batches)
            state = loader.state_dict()
        later = fresh(9)
        later.load_state_dict(state)
        assert_same(list(later), whole[taken:])
        assert len(list(later)) == len(whole)


def test_a_turn_of_a_loop_that_repeats_less_is_given_once(make: Make) -> None:
    loader = GDSDataLoader(make(), batch_size=2, repeats=3)
    next(iter(loader))
    later = GDSDataLoader(make(), batch_size=2)
    later.load_state_dict(loader.state_dict())
    assert len(list(later)) == 3


def test_as_many_batches_wait_as_the_buffer_holds(make: Make) -> None:
    loader = GDSDataLoader(make(12), batch_size=1, buffer_size=5)
    batches = iter(loader)
    next(batches)
    epoch = batches._batches  # type: ignore[attr-defined]
    assert isinstance(epoch, Epoch)
    until(lambda: len(epoch._hand_over._parcels) == 5)


def test_a_buffer_without_a_bound_has_the_usual_one(make: Make) -> None:
    """0 is that in MONAI's ThreadDataLoader."""
    assert len(list(GDSDataLoader(make(4), batch_size=2, buffer_size=0))) == 2


def test_each_worker_is_given_as_many_batches_as_asked_for(make: Make) -> None:
    assert GDSDataLoader(make(), 2, prefetch_factor=3).batches_in_flight() == 6
    assert GDSDataLoader(make(), 2).batches_in_flight() == 4


@pytest.mark.parametrize(
    "given",
    [
        {"buffer_timeout": 1.0},
        {"use_thread_workers": True, "num_workers": 1},
        {"worker_init_fn": print, "num_workers": 1},
        {"timeout": 9, "num_workers": 1},
    ],
)
def test_what_has_no_effect_is_named_once(make: Make, given: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=f"without effect: {next(iter(given))} ") as told:
        loader = GDSDataLoader(make(), batch_size=2, **given)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert len(list(loader)) == 3


def test_defaults_and_what_is_heeded_need_no_word(make: Make) -> None:
    with warnings.catch_warnings(action="error"):
        GDSDataLoader(make(), buffer_size=1, buffer_timeout=0.01, use_thread_workers=False, timeout=0)
        GDSDataLoader(make(), 1, persistent_workers=True, prefetch_factor=4, pin_memory=False, drop_last=True)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"batchsize": 2}, TypeError, "no argument 'batchsize': did you mean 'batch_size'"),
        ({"num_worker": 2}, TypeError, "did you mean 'num_workers'"),
        ({"prefetchbytes": 2}, TypeError, "did you mean 'prefetch_bytes'"),
        ({"colour": 2}, TypeError, r"no argument 'colour': help\(GDSDataLoader\)"),
        ({"repeats": 0}, ValueError, "repeats=0"),
        ({"repeats": 1.5}, TypeError, "repeats=1.5"),
        ({"buffer_size": -1}, ValueError, "buffer_size=-1"),
    ],
)
def test_wrong_arguments_name_themselves(make: Make, given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        GDSDataLoader(make(), **given)
