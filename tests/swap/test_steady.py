"""``Dataset`` under ``patch``, with transforms that change from call to call: MONAI's values, cold and warm."""

from __future__ import annotations

import itertools
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.data
import numpy as np
import pytest
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import (
    Compose,
    Lambdad,
    LoadImaged,
    RandFlipd,
    RandGaussianNoise,
    Randomizable,
    ScaleIntensityd,
    Spacingd,
    Transform,
    reset_ops_id,
)
from monai.utils import set_determinism

import monai_gds
from monai_gds import CacheWarning, GDSDataset
from tests.fixtures_nifti import write_volumes
from tests.same import assert_same

KEYS = ("image", "label")
CALLS = 0


@pytest.fixture
def items(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "volumes").mkdir()
    return write_volumes(tmp_path / "volumes", 6, (12, 10, 8))


class Counting(Transform):
    """Multiplies by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        return {**data, "image": data["image"] * self.calls}


class CountingSome(Counting):
    """Counts one of the items only."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return super().__call__(data) if data["age"] == 42 else {**data, "image": data["image"] * (1 + self.calls)}


class Before(Transform):
    """Adds the item that it met before."""

    def __init__(self) -> None:
        self.last: list[Any] = []

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        mean, self.last[:] = sum(self.last), [float(data["image"].mean())]
        return {**data, "image": data["image"] + mean}


class Seldom(Transform):
    """Draws always, and does something for one of ten items in the mean."""

    def __init__(self, source: Any = random) -> None:
        self.source = source

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "image": -data["image"]} if self.source.random() < 0.1 else data


class Own(Transform):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(3)

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "image": data["image"] + self.source.normal()}


class Within(Transform):
    """A random transform that runs within one that claims to be deterministic."""

    def __init__(self) -> None:
        self.noise = RandGaussianNoise(prob=1.0)

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "image": self.noise(data["image"])}


def of_module(image: Any) -> Any:
    global CALLS
    CALLS += 1
    return image + CALLS


def closure() -> Any:
    count = itertools.count()
    return lambda image: image + next(count)


def dropout() -> Any:
    net = torch.nn.Dropout(0.5)
    return lambda image: net(image)


WAYS: dict[str, Callable[[], Any]] = {
    "counter": Counting,
    "counter of one item": CountingSome,
    "counter of a module": lambda: Lambdad("image", of_module),
    "counter of a closure": lambda: Lambdad("image", closure()),
    "what came before": Before,
    "NumPy": lambda: Lambdad("image", lambda image: image + np.random.normal()),
    "Python, seldom": Seldom,
    "torch": lambda: Lambdad("image", lambda image: image + torch.rand(image.shape)),
    "function of a library": lambda: Lambdad("image", torch.rand_like),
    "own generator": Own,
    "own generator, seldom": lambda: Seldom(np.random.default_rng(3)),
    "counter in a pipeline of its own": lambda: Compose([Counting()], map_items=False),
    "transform within": Within,
    "network": lambda: Lambdad("image", dropout()),
}


def transform(*more: Any) -> Compose:
    return Compose(
        [LoadImaged(KEYS, ensure_channel_first=True), ScaleIntensityd("image"), *more, RandFlipd(KEYS, prob=0.5)]
    )


def epochs(items: Any, *more: Any, load: Callable[[Any], Any] = list) -> list[Any]:
    """Two epochs over a new dataset, with a new pipeline."""
    global CALLS
    CALLS = 0
    set_determinism(0)
    Randomizable.R.seed(0)
    dataset = Dataset(items, transform(*more))
    found = [item for _ in range(2) for item in load(dataset)]
    if isinstance(dataset, GDSDataset):
        dataset.flush()
    set_determinism(None)
    reset_ops_id(found)
    return found


LOADS: dict[str, Callable[[Any], Any]] = {
    "access": lambda dataset: [dataset[index] for index in range(len(dataset))],
    "loader": lambda dataset: DataLoader(dataset, batch_size=2, shuffle=True),
    "torch's, with workers": lambda dataset: torch.utils.data.DataLoader(dataset, num_workers=2, shuffle=True),
}


@pytest.mark.parametrize(
    ("way", "load"),
    [
        *((way, "access") for way in WAYS),
        *((way, "loader") for way in ("counter", "counter of one item", "NumPy", "Python, seldom", "own generator")),
        *((way, "torch's, with workers") for way in ("counter", "NumPy")),
    ],
)
def test_values_are_those_of_monai(way: str, load: str, items: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = {name: epochs(items, WAYS[way](), load=LOADS[name]) for name in {load, "access"}}
    for name in (load, "access", load):
        with monai_gds.patch(tmp_path / "cache"), warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            assert_same(epochs(items, WAYS[way](), load=LOADS[name]), expected[name])


def test_workers_of_ours_freeze_nothing_either(items: list[dict[str, Any]], tmp_path: Path) -> None:
    """Where items are drawn by their place, as everything is with workers."""
    found = []
    for _ in range(2):
        with monai_gds.patch(tmp_path / "cache"), warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            means = epochs(items, WAYS["NumPy"](), load=lambda dataset: DataLoader(dataset, num_workers=1))
        found.append([float(item["image"].mean()) for item in means])
    assert found[0] == found[1] and len(set(found[0])) == len(found[0]) == 2 * len(items)


@pytest.mark.parametrize("way", ["counter", "NumPy", "Python, seldom", "own generator"])
def test_one_warning_names_the_transform(way: str, items: list[dict[str, Any]], tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        epochs(items, WAYS[way](), load=LOADS["access"])
    said = [str(one.message) for one in caught if issubclass(one.category, CacheWarning)]
    assert len(said) == 1 and type(WAYS[way]()).__name__ in said[0] and "RandomizableTrait" in said[0]


class Late(Transform):
    """Makes what it needs when it is first called."""

    def __init__(self) -> None:
        self.table: Any = None

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        if self.table is None:
            self.table = np.ones(3)
        return {**data, "image": data["image"] + self.table[0]}


@pytest.mark.parametrize("way", ["function", "class that makes something first"])
def test_what_gives_the_same_each_time_is_cached(way: str, items: list[dict[str, Any]], tmp_path: Path) -> None:
    steps = Lambdad("image", lambda image: image + np.float32(CALLS)) if way == "function" else Late()
    with monai_gds.patch(tmp_path / "cache"), warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        with Dataset(items, transform(steps)) as ours:
            for index in [*range(len(items)), 0]:
                _ = ours[index]
        assert all(map(ours.is_cached, range(len(items))))


def test_records_that_another_dataset_froze_do_not_count(items: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = epochs(items, WAYS["torch"]())
    with monai_gds.patch(tmp_path / "cache"), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        monai.data.CacheDataset(items, transform(WAYS["torch"]()), progress=False, num_workers=0)
        assert_same(epochs(items, WAYS["torch"]()), expected)


def test_an_attribute_that_is_changed_takes_effect(items: list[dict[str, Any]], tmp_path: Path) -> None:
    """As MONAI's Dataset has it. A GDSDataset must be told, by assigning ``transform``."""

    class Times(Transform):
        def __init__(self) -> None:
            self.factor = 1

        def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
            return {**data, "image": data["image"] * self.factor}

    times = Times()
    with monai_gds.patch(tmp_path / "cache"), Dataset(items, transform(times)) as ours:
        means = []
        for factor in (1, 3, 1):
            times.factor = factor
            means.append(float(next(iter(DataLoader(ours)))["image"].mean()))
            ours.flush()
    assert means[0] > 0 and means == pytest.approx([means[0], 3 * means[0], means[0]])


def test_training_that_draws_meanwhile_costs_an_item_its_record_for_now(
    items: list[dict[str, Any]], tmp_path: Path
) -> None:
    class Beside(Transform):
        """A thread of the training draws while it runs, as long as it is told to."""

        draws = True

        def __cache_key__(self) -> str:
            return "beside"

        def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
            if self.draws:
                beside = threading.Thread(target=random.random)
                beside.start()
                beside.join()
            return data

    step = Beside()
    with monai_gds.patch(tmp_path / "cache"), warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        ours = Dataset(items, transform(step))
        loader = threading.Thread(target=lambda: [ours[index] for index in range(2)])
        loader.start()
        loader.join()
        step.draws = False
        with ours:
            _ = ours[0], ours[2]
        assert [ours.is_cached(index) for index in range(3)] == [True, False, True]


def test_filling_it_names_what_is_not_cached(items: list[dict[str, Any]], tmp_path: Path) -> None:
    with monai_gds.patch(tmp_path / "cache"):
        ours = Dataset(items, transform(Counting()))
        error = pytest.raises(monai_gds.PopulateError, match="Counting keeps what it met")
        with pytest.warns(CacheWarning, match="Counting"), error:
            ours.populate(num_workers=0, progress=False)  # type: ignore[attr-defined, unused-ignore]


def test_transforms_of_monais_own_are_not_watched(items: list[dict[str, Any]], tmp_path: Path) -> None:
    """Watching takes time, and their records serve other datasets too."""
    with monai_gds.patch(tmp_path / "cache"):
        full = monai.data.CacheDataset(items, transform(Spacingd(KEYS, (2, 2, 2))), progress=False)
        ours = Dataset(items, transform(Spacingd(KEYS, (2, 2, 2))))
    assert not ours.session.split().steady.watches
    assert all(ours.is_cached(index) for index in range(len(full)))
