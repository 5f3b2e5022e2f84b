"""The split caches what PersistentDataset would cache, and the two halves give what the whole would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor, PersistentDataset

from monai_gds.errors import CacheWarning
from monai_gds.pipeline.split import Split
from tests.same import assert_same

KEYS = ["image", "label"]


def item() -> dict[str, Any]:
    image = torch.arange(2 * 12 * 14 * 10, dtype=torch.float32).reshape(2, 12, 14, 10) / 100
    affine = torch.diag(torch.tensor([1.0, 1.5, 2.0, 1.0]))
    return {
        "image": MetaTensor(image, affine=affine),
        "label": MetaTensor((image > 20).float(), affine=affine),
        "id": 7,
    }


def resample() -> list[Any]:
    return [mt.Spacingd(KEYS, (1.5, 1.5, 1.5), mode=("bilinear", "nearest")), mt.Orientationd(KEYS, "LPS", labels=None)]


def scale() -> mt.ScaleIntensityd:
    return mt.ScaleIntensityd("image")


def crops(num_samples: int = 3) -> mt.RandSpatialCropSamplesd:
    return mt.RandSpatialCropSamplesd(KEYS, (4, 4, 4), num_samples=num_samples, random_size=False)


def random_zoom() -> mt.RandZoomd:
    return mt.RandZoomd(KEYS, prob=1.0)


def first() -> mt.Lambda:
    return mt.Lambda(lambda d: d[0])


def flip() -> mt.RandFlipd:
    return mt.RandFlipd(KEYS, prob=0.5, spatial_axis=0)


def noise() -> mt.RandGaussianNoised:
    return mt.RandGaussianNoised("image", prob=1.0)


class Times(mt.Transform):
    """Gives several copies of an item, deterministically."""

    def __call__(self, data: Any) -> Any:
        return [dict(data), dict(data)]


class Collect(mt.Transform, mt.traits.ReduceTrait):
    """Takes a whole list."""

    def __call__(self, data: Any) -> Any:
        return {"count": torch.tensor(len(data)), **data[0]}


FLAT: dict[str, Callable[[], mt.Compose]] = {
    "deterministic and random": lambda: mt.Compose([*resample(), scale(), flip(), noise()]),
    "crops": lambda: mt.Compose([scale(), crops(), flip(), noise()]),
    "deterministic only": lambda: mt.Compose([*resample(), scale()]),
    "random in the middle": lambda: mt.Compose([scale(), flip(), *resample(), noise()]),
    "a plain function is random": lambda: mt.Compose([scale(), lambda d: {**d, "new": torch.ones(1)}, *resample()]),
    "a list in the middle": lambda: mt.Compose([scale(), Times(), flip(), noise()]),
    "a list reduced": lambda: mt.Compose([scale(), Times(), Collect(), flip()]),
    "map_items off": lambda: mt.Compose([scale(), Times(), first(), flip()], map_items=False),
    "lazy": lambda: mt.Compose([*resample(), mt.Zoomd(KEYS, 1.2), flip(), noise()], lazy=True),
    "lazy at the split": lambda: mt.Compose([scale(), *resample(), random_zoom()], lazy=True),
    "lazy None": lambda: mt.Compose([mt.Zoomd(KEYS, 1.2, lazy=True), mt.Flipd(KEYS, 0), flip()], lazy=None),
    "lazy with overrides": lambda: mt.Compose(
        [*resample(), flip()], lazy=True, overrides={"image": {"mode": "nearest"}, "label": {"mode": "nearest"}}
    ),
}

NESTED: dict[str, Callable[[], mt.Compose]] = {
    "nested deterministic": lambda: mt.Compose([mt.Compose([*resample(), scale()]), flip(), noise()]),
    "nested both": lambda: mt.Compose([mt.Compose([scale(), flip(), noise()]), noise(), flip()]),
    "nested twice": lambda: mt.Compose([mt.Compose([mt.Compose([scale(), flip()]), noise()]), crops(), noise()]),
    "nested crops": lambda: mt.Compose([mt.Compose([scale(), crops(), flip()]), noise()]),
    "nested after a list": lambda: mt.Compose([Times(), mt.Compose([scale(), flip(), noise()]), noise()]),
    "nested reduce after a list": lambda: mt.Compose([Times(), mt.Compose([scale(), flip(), Collect()]), noise()]),
    "nested random only": lambda: mt.Compose([scale(), mt.Compose([flip(), noise()]), noise()]),
    "nested in random": lambda: mt.Compose([flip(), mt.Compose([scale(), noise()])]),
    "nested lazy": lambda: mt.Compose([mt.Compose(resample(), lazy=True), flip()]),
    "nested lazy with random": lambda: mt.Compose([scale(), mt.Compose([*resample(), random_zoom()], lazy=True)]),
    "nested in lazy": lambda: mt.Compose([mt.Compose(resample()), mt.Zoomd(KEYS, 1.2), flip()], lazy=True),
    "nested map_items off": lambda: mt.Compose([scale(), mt.Compose([Times(), first()], map_items=False), flip()]),
    "OneOf": lambda: mt.Compose([scale(), mt.OneOf([flip(), noise()]), noise()]),
    "OneOf of deterministic ones": lambda: mt.Compose([scale(), mt.OneOf([mt.Flipd(KEYS, 0), mt.Flipd(KEYS, 1)])]),
    "RandomOrder": lambda: mt.Compose([scale(), mt.RandomOrder([flip(), noise()])]),
}  # fmt: skip


LAZY_SPLITS = {"lazy at the split": 3, "nested in lazy": 2}


@pytest.mark.parametrize("name", [*FLAT, *NESTED])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_halves_give_what_the_whole_gives(name: str, seed: int) -> None:
    make = {**FLAT, **NESTED}[name]
    whole, halves = make().set_random_state(seed), make()
    if seed:  # the split leaves the seeds alone, and those set after it reach the transforms too
        split = Split(halves.set_random_state(seed))
    else:
        split = Split(halves)
        halves.set_random_state(seed)
    for _ in range(3):
        # What is pending is applied at the split: with a random transform pending too, that is another result.
        at = LAZY_SPLITS.get(name)
        expected = whole(item()) if at is None else whole(whole(item(), end=at), start=at)
        between = split.before(item())
        got = split.after(between)
        mt.utils.reset_ops_id(expected)
        mt.utils.reset_ops_id(got)
        assert_same(expected, got)


@pytest.mark.parametrize("make", FLAT.values(), ids=FLAT.keys())
def test_first_half_is_what_persistent_dataset_caches(make: Callable[[], mt.Compose]) -> None:
    peer = PersistentDataset([item()], make(), cache_dir=None)
    expected, got = peer._pre_transform(item()), Split(make()).before(item())
    mt.utils.reset_ops_id(got)
    assert_same(expected, got)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nested deterministic", 3),
        ("nested both", 1),
        ("nested twice", 1),
        ("nested crops", 1),
        ("nested after a list", 2),
        ("nested random only", 1),
        ("nested in random", 0),
        ("nested lazy", 1),
        ("nested lazy with random", 1),
        ("nested in lazy", 2),
        ("nested map_items off", 2),
        ("OneOf", 1),
        ("OneOf of deterministic ones", 1),
    ],
)
def test_looks_into_a_nested_compose(name: str, expected: int) -> None:
    assert len(Split(NESTED[name]()).deterministic) == expected


@pytest.mark.parametrize("kind", [mt.OneOf, mt.RandomOrder, mt.SomeOf])
def test_a_random_compose_is_random_as_a_whole(kind: Any) -> None:
    def make() -> Any:
        return kind([mt.Flipd(KEYS, 0), mt.Rotate90d(KEYS), mt.Zoomd(KEYS, 1.2)])

    split = Split(make().set_random_state(3))
    assert split.deterministic == []
    whole = make().set_random_state(3)
    for _ in range(4):
        assert_same(whole(item())["image"].shape, split.after(split.before(item()))["image"].shape)


def test_a_compose_of_the_users_own_is_looked_into() -> None:
    class Named(mt.Compose):  # type: ignore[misc]
        """Adds nothing to what runs."""

    class Twice(mt.Compose):  # type: ignore[misc]
        def __call__(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(super().__call__(data, *args, **kwargs), *args, **kwargs)

    assert len(Split(Named([scale(), Named([scale(), mt.RandFlipd(KEYS)])])).deterministic) == 2
    assert Split(Twice([scale()])).deterministic == []
    assert len(Split(mt.Compose([scale(), Twice([scale()])])).deterministic) == 1


def test_the_pipeline_is_not_changed() -> None:
    compose = NESTED["nested both"]()
    before = [type(t) for t in compose.flatten().transforms]
    Split(compose).after(Split(compose).before(item()))
    assert [type(t) for t in compose.flatten().transforms] == before


def test_settings_are_those_that_change_results() -> None:
    def settings(**kwargs: Any) -> Any:
        return Split(mt.Compose([scale()], **kwargs)).settings()

    assert settings(log_stats=True) == settings()
    assert settings(lazy=True) != settings()
    assert settings(map_items=2) != settings()
    assert settings(unpack_items=True) != settings()


def test_unpack_items() -> None:
    def make() -> mt.Compose:
        pair = mt.Lambda(lambda d: (d, 2))
        return mt.Compose([pair, lambda a, b: a["id"] * b], unpack_items=True, map_items=False)

    split = Split(make())
    assert make()(item()) == split.after(split.before(item())) == 14


def test_numpy_stays_numpy_in_between() -> None:
    split = Split(mt.Compose([mt.Lambda(lambda d: {"x": d["x"] + 1})]))
    assert isinstance(split.before({"x": np.ones(2)})["x"], np.ndarray)


class Holder(mt.RandomizableTransform):  # type: ignore[misc]
    """Holds what a copy has for itself, and what it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.own = [0], torch.Generator().manual_seed(1)
        self.lock, self.network = threading.Lock(), torch.nn.Linear(2, 2)

    def __call__(self, data: Any) -> Any:
        return data


def test_a_copy_has_the_random_half_for_itself() -> None:
    flips, holder, scaling = [flip(), flip()], Holder(), scale()
    compose = mt.Compose([scaling, mt.Compose([flips[0], mt.OneOf([flips[1], holder])])])
    flips[1].R = flips[0].R = np.random.RandomState(4)
    del holder.R  # unseeded, it draws from its class's
    split = Split(compose)
    copied = split.copied()
    inner = copied.compose.transforms[1]
    one, two, other = inner.transforms[0], *inner.transforms[1].transforms
    assert copied.deterministic[0] is copied.compose.transforms[0] is scaling
    assert copied.steps()[0] is one is not flips[0]
    assert one.R is two.R is not flips[0].R
    assert one.R.randint(1000) == flips[0].R.randint(1000)
    assert other.R is not holder.R
    assert other.R.randint(1000) == holder.R.randint(1000)
    assert other.own is not holder.own
    assert torch.equal(other.own.get_state(), holder.own.get_state())
    assert other.drawn is not holder.drawn
    assert other.lock is holder.lock
    assert other.network is holder.network


def test_a_copy_while_another_thread_sets_attributes() -> None:
    holder = Holder()

    class Sets:
        tried = 0

        def __deepcopy__(self, memo: Any) -> Any:
            Sets.tried += 1
            if Sets.tried == 1:
                raise RuntimeError("dictionary changed size during iteration")
            return self

    holder.sets = Sets()
    copied = Split(mt.Compose([scale(), holder])).copied()
    assert copied.steps()[0] is not holder


def test_a_transform_that_cannot_be_copied_is_shared_with_a_warning() -> None:
    class Whole(Holder):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("a handle cannot be copied")

    whole = Whole()
    with pytest.warns(CacheWarning, match="Whole cannot be copied, .* share it: a handle"):
        copied = Split(mt.Compose([scale(), whole])).copied()
    assert copied.steps()[0] is whole
