"""Items that cannot be made: an error on one screen, or others in their places, so that no batch changes its size."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import (
    Compose,
    EnsureTyped,
    LoadImaged,
    RandomizableTransform,
    RandScaleIntensityd,
    RandSpatialCropd,
    Transform,
)
from torch.utils.data import DistributedSampler, Sampler

from monai_gds import CacheWarning, GDSDataLoader, GDSDataset, PopulateError
from monai_gds.errors import BrokenItem, WorkerDied
from tests.fresh import Interpreter
from tests.polls import until

Make = Callable[..., GDSDataset]

ITEMS, BROKEN = 60, frozenset({3, 17, 41})


class Fails(Transform):  # type: ignore[misc]
    """Fails for some items."""

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken

    def __cache_key__(self) -> str:
        return "fails"

    def __call__(self, item: Any) -> Any:
        if item["n"] in self.broken:
            raise ValueError(f"cut short at {item['n']}")
        return item


def made_in(folder: Path, broken: Iterable[int] = BROKEN, crop: bool = False) -> GDSDataset:
    edge = 80 if crop else 8
    data = [{"image": torch.full((1, edge, edge, edge), float(n)), "n": n} for n in range(20 if crop else ITEMS)]
    first = RandSpatialCropd("image", (16, 16, 16), random_size=False) if crop else None
    steps = [Fails(set(broken)), EnsureTyped("image"), first, RandScaleIntensityd("image", factors=0.1, prob=1)]
    folder = folder / ("cache" if set(broken) else "whole")
    return GDSDataset(data, Compose([step for step in steps if step]), folder, "cpu")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(made_in, tmp_path)


def epoch(dataset: GDSDataset, num_workers: int = 0, **settings: Any) -> tuple[list[list[int]], GDSDataLoader]:
    torch.manual_seed(5)
    settings = {"batch_size": 4, "shuffle": True, "on_error": "skip", "stats": True} | settings
    loader = GDSDataLoader(dataset, num_workers, **settings)
    return [batch["n"].tolist() for batch in loader], loader


@pytest.mark.parametrize("programs", ["off", "check"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_others_take_the_places(make: Make, num_workers: int, programs: str) -> None:
    whole, _ = epoch(make(set()))
    with pytest.warns(CacheWarning, match="3 items were skipped in this epoch.*cut short at") as told:
        found, loader = epoch(make(), num_workers, programs=programs)
    assert [one.filename for one in told if "skipped" in str(one.message)] == [__file__], "once, at the loop"
    for before, after in zip(whole, found, strict=True):
        assert [n if n not in BROKEN else None for n in before] == [
            m if n not in BROKEN else None for n, m in zip(before, after, strict=True)
        ]
        assert not BROKEN & set(after)
    assert {one.index for one in loader.stats().skipped} == BROKEN
    assert "skipped item 17" in str(loader.stats())
    with pytest.warns(CacheWarning):
        assert epoch(make())[0] == found, "the same items whoever makes them"


class Unsized(Sampler[int]):
    """Comes to its end only when a loop that counts is over."""

    def __iter__(self) -> Iterator[int]:
        yield from range(ITEMS)
        time.sleep(0.2)


class Sized(Unsized):
    def __len__(self) -> int:
        return ITEMS


def test_where_no_length_is_told_the_end_of_the_loop_tells(make: Make) -> None:
    with pytest.warns(CacheWarning, match="3 items were skipped in this epoch"):
        assert len([*GDSDataLoader(make(), batch_size=4, sampler=Unsized(), on_error="skip")]) == ITEMS // 4


def test_a_loop_that_counts_its_batches_is_told_what_was_skipped(make: Make) -> None:
    """As under Lightning and Ignite. It is left before the loader's thread finds that there is no other batch.

    One that is left in the middle is not told; one that goes on there is.
    """
    loader = GDSDataLoader(make(), batch_size=4, sampler=Sized(), on_error="skip", prefetch=1)

    def take(until: int, before: int = 0) -> None:
        for number, _ in enumerate(loader, before + 1):
            if number == until:
                return

    with warnings.catch_warnings(action="error"):
        take(until=7)
    state = loader.state_dict()
    with pytest.warns(CacheWarning, match="3 items were skipped in this epoch") as told:
        take(until=len(loader))
    assert [one.filename for one in told] == [__file__]
    loader.load_state_dict(state)
    with pytest.warns(CacheWarning, match="1 item was skipped in this epoch"):
        take(until=len(loader), before=7)


class OnCuda(RandomizableTransform):  # type: ignore[misc]
    """Names a device, so that it is left to the loader's process, and fails for some items."""

    def __init__(self, broken: frozenset[int]) -> None:
        super().__init__()
        self.device, self.broken = "cuda:0", broken

    def __call__(self, item: Any) -> Any:
        if item["n"] in self.broken:
            raise ValueError(f"no room for {item['n']}")
        return {**item, "drawn": self.R.rand(), "by": os.getpid()}


def test_transforms_that_are_left_to_the_loaders_process_may_fail_too(make: Make) -> None:
    def found(broken: frozenset[int]) -> list[Any]:
        dataset = make({17})
        dataset.transform = Compose([*dataset.transform.transforms, OnCuda(broken)])
        torch.manual_seed(5)
        loader = GDSDataLoader(dataset, 1, batch_size=4, shuffle=True, on_error="skip", programs="off")
        return list(loader)

    with pytest.warns(CacheWarning, match="1 item was skipped"):
        whole = found(frozenset())
    with pytest.warns(CacheWarning, match="3 items were skipped in this epoch.*no room for"):
        some = found(frozenset({3, 41}))
    for before, after in zip(whole, some, strict=True):
        assert set(after["by"].tolist()) == {os.getpid()}
        assert torch.equal(before["drawn"], after["drawn"]), "numbers follow from the place"
        same = torch.tensor([n not in {3, 41} for n in before["n"].tolist()])
        assert torch.equal(before["n"][same], after["n"][same])
        assert not {3, 17, 41} & set(after["n"].tolist())
        assert torch.equal(before["image"][same], after["image"][same])
    with pytest.raises(BrokenItem, match=r"4 of 60 items cannot be made.*no room for"):
        found(frozenset({1, 2, 3}))


def test_another_epoch_has_others_and_a_mended_item_comes_back(make: Make) -> None:
    dataset = make()
    with pytest.warns(CacheWarning):
        _, loader = epoch(dataset)
    dataset.transform.transforms[0].broken.clear()
    assert {n for batch in loader for n in batch["n"].tolist()} == set(range(ITEMS))
    assert loader.stats().skipped == ()


@pytest.mark.filterwarnings("ignore:.*skipped in this epoch")
def test_a_loop_that_continues_has_the_same(make: Make) -> None:
    whole, _ = epoch(make())
    torch.manual_seed(5)
    loader = GDSDataLoader(make(), batch_size=4, shuffle=True, on_error="skip")
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    batches.close()  # type: ignore[attr-defined]
    later = GDSDataLoader(make(), batch_size=4, shuffle=True, on_error="skip")
    later.load_state_dict(loader.state_dict())
    assert [batch["n"].tolist() for batch in later] == whole[6:]


@pytest.mark.filterwarnings("ignore:.*skipped in this epoch")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_items_only(make: Make, rank: int) -> None:
    sampler: Any = DistributedSampler(range(ITEMS), 2, rank, seed=3)
    found, _ = epoch(make(), shuffle=None, sampler=sampler)
    assert sum(map(len, found)) == ITEMS // 2
    assert {n for batch in found for n in batch} <= set(sampler)


@pytest.mark.filterwarnings("ignore:.*skipped in this epoch")
def test_one_item_at_a_time_may_begin_with_a_broken_one(make: Make) -> None:
    found, _ = epoch(make({0}), batch_size=1, shuffle=False)
    assert len(found) == ITEMS
    assert found[0] != [0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_more_than_a_twentieth_is_an_error(make: Make, num_workers: int) -> None:
    with pytest.raises(BrokenItem, match=r"4 of 60 items cannot be made, which is more than 5%: item .*cut short"):
        epoch(make({1, 2, 3, 4}), num_workers)


@pytest.mark.parametrize("told", [True, False])
def test_an_order_without_an_end(make: Make, told: bool) -> None:
    class Endless(Sampler[int]):
        def __init__(self) -> None: ...

        def __iter__(self) -> Iterator[int]:
            return cycle(range(ITEMS))

    class Told(Endless):
        def __len__(self) -> int:
            return ITEMS

    loader = GDSDataLoader(make(), batch_size=4, sampler=Told() if told else Endless(), on_error="skip")
    first = next(iter(loader))["n"].tolist()
    assert first[:3] == [0, 1, 2] and first[3] not in BROKEN


@pytest.mark.filterwarnings("ignore:.*skipped in this epoch")
def test_items_that_are_cropped_before_they_are_read(make: Make) -> None:
    dataset = make({7}, crop=True)
    for _ in range(2):  # misses, then hits
        found, _ = epoch(dataset)
        assert [len(batch) for batch in found] == [4] * 5


class Kills(RandomizableTransform):  # type: ignore[misc]
    """Kills the process that runs it, unless that is the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = os.getpid()

    def __call__(self, item: Any) -> Any:
        if os.getpid() != self.maker:
            os.kill(os.getpid(), signal.SIGKILL)
        return item


@pytest.mark.parametrize("programs", ["off", "check"])
def test_workers_that_die_are_no_broken_items(make: Make, programs: str) -> None:
    dataset = make(())
    dataset.transform = Compose([*dataset.transform.transforms, Kills()])
    loader = GDSDataLoader(dataset, 1, batch_size=4, on_error="skip", programs=programs)
    with pytest.raises(WorkerDied):
        list(loader)
    assert loader.skipping is not None and not loader.skipping.failed


def test_what_cannot_skip_is_refused() -> None:
    with pytest.raises(ValueError, match="on_error='skip' is for GDSDatasets"):
        GDSDataLoader(Dataset([1]), on_error="skip")
    with pytest.raises(ValueError, match="on_error='ignore': use one of 'raise', 'skip'"):
        GDSDataLoader(Dataset([1]), on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("programs", ["off", "check"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_error_keeps_no_loader_in_memory(
    interpreter: Interpreter, tmp_path: Path, programs: str, on_error: str
) -> None:
    """Also where the collector does not run."""
    interpreter.call(_leaves_nothing, tmp_path, programs, on_error)


def _leaves_nothing(folder: Path, programs: Any, on_error: Any) -> None:
    warnings.simplefilter("ignore", CacheWarning)  # of what was skipped
    dataset = made_in(folder)
    loader = GDSDataLoader(dataset, 2, batch_size=4, programs=programs, on_error=on_error)
    kept: list[weakref.ref[Any]] = [weakref.ref(loader), weakref.ref(dataset)]
    gc.collect()
    gc.disable()
    with suppress(RuntimeError):
        for _ in loader:
            pass
    del loader, dataset
    until(lambda: not any(one() for one in kept), "they are kept", 20)


# ---------------------------------------------------------------------------------------------------------------------
# Corrupt files


@pytest.fixture
def cut(tmp_path: Path) -> Any:
    """A dataset whose second item has a label that was cut."""
    for name in ("a", "b"):
        nib.save(nib.Nifti1Image(np.random.default_rng(1).random((16, 16, 16)), np.eye(4)), tmp_path / f"{name}.nii.gz")
    whole, short = str(tmp_path / "a.nii.gz"), tmp_path / "b.nii.gz"
    short.write_bytes(short.read_bytes()[:9000])
    items = [{"image": whole, "label": whole}, {"image": whole, "label": str(short)}]
    return GDSDataset(items, Compose([LoadImaged(["image", "label"])]), tmp_path / "cache", "cpu")


@pytest.mark.parametrize(
    "way",
    [lambda d: d[1], lambda d: list(DataLoader(d)), *(lambda d, n=n: list(GDSDataLoader(d, n)) for n in (0, 1))],
)
def test_a_corrupt_volume_is_named_first_on_one_screen(cut: GDSDataset, way: Callable[[GDSDataset], Any]) -> None:
    with pytest.raises(BrokenItem, match=r"^\S+/b\.nii\.gz: LoadImaged cannot load it: EOFError") as caught:
        way(cut)
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 40


class OwnError(Transform):  # type: ignore[misc]  # MONAI is untyped
    """A transform of the user's that fails."""

    def __call__(self, data: Any) -> Any:
        return data["no such entry"]


class LoadOwn(OwnError):
    """A loader of the user's."""


@pytest.mark.parametrize("way", [lambda d: d[1], *(lambda d, n=n: list(GDSDataLoader(d, n)) for n in (0, 1))])
def test_an_error_in_a_loader_of_the_users_shows_its_line(
    cut: GDSDataset, tmp_path: Path, way: Callable[[GDSDataset], Any]
) -> None:
    dataset = GDSDataset(cut.data, Compose([LoadOwn()]), tmp_path / "own", "cpu")
    with pytest.raises(BrokenItem, match="LoadOwn cannot load it: KeyError: 'no such entry'") as caught:
        way(dataset)
    text = "".join(traceback.format_exception(caught.value))
    assert 'return data["no such entry"]' in text and len(text.splitlines()) < 40


@pytest.mark.parametrize("fails", [LoadOwn, OwnError])
@pytest.mark.parametrize("workers", [0, 2])
def test_populate_names_the_line_of_an_error_in_a_transform_of_the_users(
    cut: GDSDataset, tmp_path: Path, workers: int, fails: type
) -> None:
    dataset = GDSDataset(cut.data, Compose([fails()]), tmp_path / "own", "cpu")
    line = fails.__call__.__code__.co_firstlineno + 1
    with pytest.raises(PopulateError, match=rf"KeyError: 'no such entry', at {__file__}:{line}") as caught:
        dataset.populate(workers, progress=False)
    assert all(f"{__file__}:{line}" in one.error for one in caught.value.failures)


@pytest.mark.parametrize("workers", [0, 2])
def test_populate_names_a_corrupt_volume_on_one_screen(cut: GDSDataset, workers: int) -> None:
    with pytest.raises(PopulateError, match=r"b\.nii\.gz: LoadImaged cannot load it: EOFError") as caught:
        cut.populate(workers, progress=False)
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 20


def test_populate_lists_what_is_broken_until_it_is_mended(cut: GDSDataset, tmp_path: Path) -> None:
    with pytest.raises(PopulateError, match=r"broken\.json lists them all"):
        cut.populate(num_workers=0, progress=False)
    (listed,) = tmp_path.glob("cache/.index/*.broken.json")
    (item,) = json.loads(listed.read_text())
    assert (item["index"], item["path"]) == (1, str(tmp_path / "a.nii.gz"))
    assert "b.nii.gz" in item["error"]
    (tmp_path / "b.nii.gz").write_bytes((tmp_path / "a.nii.gz").read_bytes())
    cut.populate(num_workers=0, progress=False)
    assert not listed.exists()
