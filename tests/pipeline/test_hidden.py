"""A transform that draws without being marked random is named; one that does not is never suspected aloud."""

from __future__ import annotations

import datetime
import os
import random
import secrets
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns as ticks
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds import CacheWarning, GDSDataset
from monai_gds.pipeline import hidden
from monai_gds.pipeline.parts import parts
from tests.global_states import GlobalStates

ITEMS = [{"image": torch.arange(64.0).reshape(1, 8, 8) + n, "n": n} for n in range(4)]

#: A generator of this module, as scripts have it.
SOURCE = np.random.RandomState(7)


class Counted(mt.Transform):
    """Adds what a function gives, and counts its calls."""

    def __init__(self, give: Callable[..., Any], *args: Any) -> None:
        self.give, self.args, self.calls = give, args, []

    def __cache_key__(self) -> Any:
        return self.give

    def __deepcopy__(self, memo: Any) -> Any:
        copied = type(self)(self.give, *self.args)
        copied.calls = self.calls  # of all copies together
        return copied

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(1)
        return {**data, "x": self.give(*self.args)}


class Named:
    """A function whose code does not count."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __cache_key__(self) -> str:
        return self.function.__name__

    def __call__(self) -> Any:
        return self.function()


class Waiting(Counted):
    """Has a function that cannot be hashed."""

    def __cache_key__(self) -> str:
        return "waiting"


class Own(mt.Transform):
    """Has generators of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        draw = getattr(self.generator, "normal", None) or self.generator.gauss
        return {**data, "image": data["image"] + draw(0, 1)}


class Held:
    """No transform, and holds a generator."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(3)

    def __call__(self, x: Any) -> Any:
        return x * self.source.normal()


class Shown(mt.Transform):
    """Keeps a text of itself."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "by": object.__repr__(self)}


class Within(mt.Transform):
    """A random transform that runs within one that claims to be deterministic."""

    def __init__(self) -> None:
        self.noise = mt.RandGaussianNoise(prob=1.0)

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "image": self.noise(data["image"])}


def closure() -> Callable[[Any], Any]:
    source = random.Random(5)
    return lambda x: x + source.gauss(0, 1)


#: Clocks that no code here names.
CLOCKS = [time.time, time.time_ns]


def in_tensor() -> torch.Tensor:
    return torch.tensor([0, CLOCKS[1]()])


def in_meta() -> MetaTensor:
    return MetaTensor(torch.zeros(3), meta={"made": np.float64(CLOCKS[0]())})


def scipy_normal(x: Any) -> Any:
    from scipy import stats

    return x + stats.norm.rvs(size=x.shape)


def skimage_noise(x: Any) -> Any:
    util = pytest.importorskip("skimage.util", reason="scikit-image is not installed")
    return util.random_noise(np.asarray(x) / 100)


def lambdad(function: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: mt.Lambdad("image", function)


def added(**functions: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Transforms that give an item another value."""
    return {name: lambda f=f: mt.Lambda(lambda d: {**d, "x": f()}) for name, f in functions.items()}


#: Each makes a transform that freezes something.
WAYS: dict[str, Callable[[], Any]] = {
    "own RandomState": lambda: Own(np.random.RandomState(0)),
    "own Generator": lambda: Own(np.random.default_rng(0)),
    "own Random": lambda: Own(random.Random(0)),
    "own torch.Generator": lambda: mt.Lambdad("image", Drawn(torch.Generator())),
    "an object's": lambda: mt.Lambdad("image", Held()),
    "a closure's": lambda: mt.Lambdad("image", closure()),
    "a random transform within": Within,
    "a module's": lambdad(lambda x: x + SOURCE.normal()),
    "random": lambdad(lambda x: x + random.gauss(0, 1)),
    "NumPy's old": lambdad(lambda x: x * np.random.uniform(0.9, 1.1)),
    "NumPy's new": lambdad(lambda x: x + np.random.default_rng().normal()),
    "torch": lambdad(lambda x: x + torch.rand(())),
    "dropout": lambdad(lambda x: torch.nn.functional.dropout(x)),
    "scipy": lambdad(scipy_normal),
    "skimage": lambdad(skimage_noise),
    "an address in a text": Shown,
    "a clock's": lambda: Counted(time.time),
    "a clock's in a tensor": lambda: Counted(in_tensor),
    "a clock's in the meta": lambda: Counted(in_meta),
    **added(
        uuid4=lambda: str(uuid.uuid4()),
        urandom=lambda: os.urandom(4),
        token_hex=lambda: secrets.token_hex(4),
        SystemRandom=lambda: random.SystemRandom().random(),
        time=lambda: time.time(),
        time_as_tensor=lambda: torch.tensor(time.time(), dtype=torch.float64),
        time_in_ns=lambda: time.time_ns(),
        ticks=lambda: ticks(),
        now=lambda: datetime.datetime.now().isoformat(),
        id=lambda: id(object()),
        initial_seed=lambda: np.random.RandomState(torch.initial_seed() % 2**32).normal(),
    ),
}


class Drawn:
    """Draws from torch."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, x: Any) -> Any:
        return x + torch.randn(x.shape, generator=self.generator)


def dataset_of(folder: Path, *steps: Any, **settings: Any) -> GDSDataset:
    return GDSDataset(ITEMS, mt.Compose(list(steps)), folder / "cache", device="cpu", **settings)


def said_of(dataset: GDSDataset, count: int = len(ITEMS)) -> list[str]:
    """What is warned of while items are made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(count):
            dataset[i]
        dataset.flush()
    return [str(w.message) for w in caught if issubclass(w.category, CacheWarning)]


@pytest.mark.parametrize("way", WAYS)
def test_what_would_be_frozen_is_named_once(way: str, tmp_path: Path) -> None:
    seed_all(4)  # an earlier test may have seeded them as the second look does, which then finds no difference
    transform = WAYS[way]()
    said = said_of(dataset_of(tmp_path, mt.ScaleIntensityd("image"), transform))
    assert len(said) == 1, said
    assert f"{type(transform).__name__} (transforms[1])" in said[0]
    assert "RandomizableTransform" in said[0]


@pytest.mark.parametrize("way", ["random", "NumPy's old", "torch", "own RandomState"])
def test_populate_tells_too_and_generators_go_on_as_if_nobody_had_looked(way: str, tmp_path: Path) -> None:
    transform = WAYS[way]()
    dataset = dataset_of(tmp_path, transform)
    with pytest.warns(CacheWarning, match="not marked random"):
        dataset.populate(num_workers=0, progress=False)
    got = []
    for caches in (True, False):
        seed_all(1)
        transform = WAYS[way]()
        items = ITEMS
        made = GDSDataset(items, mt.Compose([transform]), tmp_path / "other" if caches else None, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got.append([made[i]["image"] for i in range(len(items))])
    assert all(map(torch.equal, *got))


def test_a_pipeline_is_computed_once_without_a_hint(tmp_path: Path) -> None:
    transform = Counted(float, "1")
    assert said_of(dataset_of(tmp_path, transform)) == []
    assert len(transform.calls) == len(ITEMS)


def seeded_elsewhere() -> int:
    """Seeds as a loader's worker does that starts meanwhile."""
    beside = threading.Thread(target=seed_all, args=(4,))
    beside.start()
    beside.join()
    return 1


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_seeding_everything_is_no_hint(tmp_path: Path) -> None:
    transform = Counted(Named(seeded_elsewhere))
    assert said_of(dataset_of(tmp_path, transform)) == []
    assert len(transform.calls) == len(ITEMS)


def seeded() -> float:
    np.random.seed(3)
    return float(np.random.normal())


def test_one_item_is_computed_once_more_after_a_hint_and_a_deterministic_one_is_not_blamed(tmp_path: Path) -> None:
    transform = Counted(seeded)
    assert said_of(dataset_of(tmp_path, transform)) == []
    assert len(transform.calls) == len(ITEMS) + 1
    assert said_of(dataset_of(tmp_path, transform)) == []
    assert len(transform.calls) == len(ITEMS) + 1


def test_training_that_draws_meanwhile_is_no_reason_and_is_not_disturbed(tmp_path: Path) -> None:
    """Items are made by a thread beside; each transform lets the main thread draw while it runs."""
    turns, drawn = [threading.Barrier(2, timeout=10) for _ in range(2)], []

    def wait() -> int:
        for turn in turns:
            turn.wait()
        return 1

    transform = Waiting(wait)
    dataset, said = dataset_of(tmp_path, transform), []
    torch.manual_seed(0)
    expected = torch.rand(len(ITEMS) + 1)
    torch.manual_seed(0)
    beside = threading.Thread(target=lambda: said.extend(said_of(dataset)))
    beside.start()
    for _ in range(len(ITEMS) + 1):  # one is computed twice
        turns[0].wait()
        drawn.append(torch.rand(()))
        turns[1].wait()
    beside.join(10)
    assert said == [] and len(transform.calls) == len(ITEMS) + 1
    assert torch.equal(torch.stack(drawn), expected)


def test_two_datasets_over_one_cache_tell_once(tmp_path: Path) -> None:
    def noisy(x: Any) -> Any:
        return x + random.random()

    said = [said_of(dataset_of(tmp_path, mt.Lambdad("image", noisy)), count) for count in (2, 4)]
    assert [len(each) for each in said] == [1, 0]


class Once(mt.Transform):
    """Works only once for each item, and draws."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __deepcopy__(self, memo: Any) -> Once:
        return self

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        if data["n"] in self.seen:
            raise RuntimeError("it is gone")
        self.seen.append(data["n"])
        return {**data, "x": random.random()}


def test_an_error_of_the_second_time_is_nobodys(tmp_path: Path) -> None:
    states = GlobalStates()
    assert said_of(dataset_of(tmp_path, Once())) == []
    assert states.moved()


def test_files_are_not_written_twice(tmp_path: Path) -> None:
    save = mt.SaveImaged("image", output_dir=tmp_path, print_log=False, separate_folder=False)
    drawn = Counted(random.random)
    dataset = dataset_of(tmp_path, drawn, save)
    dataset.set_data([{"image": MetaTensor(torch.zeros(1, 4, 4, 4), meta={"spatial_shape": (4, 4, 4)})}])
    assert said_of(dataset, 1) == []
    assert len(drawn.calls) == len(list(tmp_path.glob("*.nii.gz"))) == 1


def test_what_is_not_saved_is_not_computed_again(tmp_path: Path) -> None:
    unsaved = Counted(lambda: [random.random(), threading.Lock()])
    assert len(said_of(dataset_of(tmp_path, unsaved))) == 1  # that it cannot be saved
    plain = Counted(random.random)
    made = GDSDataset(ITEMS, mt.Compose([plain]), None, device="cpu")
    assert said_of(made) == []
    assert len(unsaved.calls) == len(plain.calls) == len(ITEMS)


def test_the_last_bits_of_a_sum_are_no_randomness(tmp_path: Path) -> None:
    last_bits = mt.Lambdad("image", lambda x: x * (1 + 2e-7 * random.choice((0, 1))))
    assert said_of(dataset_of(tmp_path, *[last_bits] * 8)) == []


def test_the_identity_of_transforms_in_applied_operations_is_none(tmp_path: Path) -> None:
    transforms = [mt.EnsureTyped("image"), mt.Flipd("image", 0), mt.Lambdad("n", lambda n: n + 0 * random.random())]
    assert said_of(dataset_of(tmp_path, *transforms, reset_ops_id=False)) == []


def test_large_tables_of_transforms_are_not_walked_for_each_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[Any] = []
    data = GDSDataset(ITEMS, [mt.ScaleIntensityd("image")], tmp_path, device="cpu")
    monkeypatch.setattr(hidden, "parts", lambda transform: walks.append(transform) or parts(transform))
    for n in range(len(ITEMS)):
        data[n]
    assert len(walks) == 2
