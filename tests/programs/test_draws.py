"""Crops that are drawn before anything is read: items, batches and random states are those of MONAI's own dataset."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import DataLoader, Dataset, ThreadDataLoader, list_data_collate
from torch.utils.data import ConcatDataset

from monai_gds import GDSDataLoader, GDSDataset, limits
from monai_gds.dataset.session import Begun, Session
from monai_gds.pipeline.parts import parts
from monai_gds.pipeline.randomness import put_state, state_of
from monai_gds.programs import recorder
from monai_gds.records.pending import PendingItem, Volumes
from tests.global_states import GlobalStates
from tests.polls import until
from tests.same import assert_same, strides

BOTH = ["image", "label"]
COUNT = 8


@cache
def _items() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    shape = (1, 40, 36, 33)
    label = np.zeros(shape, np.float32)
    label[:, 8:20, 10:22, 5:15], label[:, 22:28, 3:8, 12:20] = 1, 2
    return [
        {
            "image": np.round(generator.normal(size=shape) * 20).astype(np.float32),
            "label": np.roll(label, 3 * i, axis=1),
            "number": i,
        }
        for i in range(COUNT)
    ]


def items() -> list[dict[str, Any]]:
    """Volumes that get smaller when they are packed."""
    return copy.deepcopy(_items())


@pytest.fixture(autouse=True)
def _small_volumes_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TILED_BYTES", 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of all items after EnsureTyped."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TILED_BYTES", 1000)
        dataset(path, crops).populate(0, progress=False)
    return path


def dataset(folder: Path, make: Callable[[], list[Any]], seed: int | None = 3, data: Any = None) -> GDSDataset:
    data = items() if data is None else data
    return GDSDataset(data, pipeline(make, seed), folder, device="cpu", compression="lz4")


def pipeline(make: Callable[[], list[Any]], seed: int | None = 3) -> mt.Compose:
    out = mt.Compose([mt.EnsureTyped(BOTH), *make()])
    return out if seed is None else out.set_random_state(seed)


def monais(make: Callable[[], list[Any]], seed: int | None = 3, data: Any = None) -> Dataset:
    return Dataset(items() if data is None else data, pipeline(make, seed))


def states(of: Any) -> Any:
    """The random states of a dataset's pipeline, and the global ones."""
    mine = [state_of(part.R) for part in _randomizables(of.transform)]
    return [mine, random.getstate(), np.random.get_state()[1:], torch.get_rng_state()]


def assert_equal(expected: Any, got: Any) -> None:
    for out in (expected, got):
        mt.utils.reset_ops_id(out)
    assert_same(expected, got)
    assert_same(strides(expected), strides(got))


def assert_outcome_is_monais(theirs: Dataset, got: GDSDataset, expected: list[Any], found: list[Any]) -> None:
    """Asserts that items and the random states that they left are those of MONAI's dataset."""
    for out, mine in zip(expected, found, strict=True):
        assert_equal(out, mine)
    assert_same(states(theirs), states(got))


def assert_as_monai(theirs: Dataset, got: GDSDataset, order: list[int], found: list[Any] | None = None) -> None:
    """Asserts that, of items taken in this order."""
    assert_outcome_is_monais(
        theirs, got, [theirs[i] for i in order], [got[i] for i in order] if found is None else found
    )


def drawn(begun: Begun) -> bool:
    """Whether it is certain what is read for an item, and that is not everything."""
    return begun.drawn is not None


class Watch:
    """Counts what is run on ghosts, and notes the boxes that are read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.boxes: list[dict[str, Any]] = []
        run, read = recorder.standing_in, PendingItem.read

        def watched_run(step: Any, *args: Any) -> Any:
            self.ran.append(type(step).__name__)
            return run(step, *args)

        def watched_read(lazy: PendingItem, boxes: Any) -> Volumes:
            self.boxes.append(boxes)
            return read(lazy, boxes)

        patch.setattr(recorder, "standing_in", watched_run)
        patch.setattr(PendingItem, "read", watched_read)

    def whole(self) -> list[bool]:
        """Whether all of the image was read, for each item."""
        return [box["image"] == [(slice(0, 40), slice(0, 36), slice(0, 33))] for box in self.boxes]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


# Pipelines


def crop() -> mt.RandSpatialCropd:
    return mt.RandSpatialCropd(BOTH, (20, 18, 16))


def crops() -> list[Any]:
    """What patch training does."""
    return [
        mt.RandSpatialCropSamplesd(BOTH, (16, 16, 16), 2),
        mt.RandFlipd(BOTH, prob=0.5),
        mt.RandGaussianNoised("image", prob=0.5),
    ]


def by_values() -> list[Any]:
    """A crop that needs values, of the image too."""
    by = mt.RandCropByPosNegLabeld(BOTH, "label", (12, 12, 12), num_samples=2, image_key="image")
    return [by, mt.RandFlipd(BOTH, prob=0.5)]


def by_label() -> list[Any]:
    """A crop that needs values of the label, which come from its runs."""
    return [mt.RandCropByPosNegLabeld(BOTH, "label", (12, 12, 12), num_samples=2), mt.RandFlipd(BOTH, prob=0.5)]


PIPELINES: dict[str, Callable[[], list[Any]]] = {
    "crops": crops,
    "one crop": lambda: [crop()],
    "crop of a crop": lambda: [crop(), mt.RandSpatialCropd(BOTH, (8, 9, 10)), mt.RandFlipd(BOTH, prob=0.5)],
    "a crop of crops": lambda: [*crops()[:1], mt.RandSpatialCropd(BOTH, (8, 9, 9)), mt.NormalizeIntensityd("image")],
    "crops of crops": lambda: [*crops()[:1], mt.RandSpatialCropSamplesd(BOTH, 8, 2)],
    "pad and crop": lambda: [crop(), mt.SpatialPadd(BOTH, 17), mt.RandSpatialCropd(BOTH, (15, 15, 15))],
    "pad before": lambda: [mt.RandScaleCropd(BOTH, 0.5), mt.ResizeWithPadOrCropd(BOTH, 21), crop()],
    "by values": by_values,
    "by label": by_label,
    "by classes": lambda: [mt.RandCropByLabelClassesd(BOTH, "label", (9, 9, 9), [1, 2, 1], 3, 3), crop()],
    "crop, by label": lambda: [crop(), *by_label()],
    "by label, crop": lambda: [*by_label(), mt.RandSpatialCropd(BOTH, (5, 6, 7))],
    "crop, flip, crop": lambda: [crop(), mt.RandFlipd(BOTH, prob=0.5), mt.RandSpatialCropd(BOTH, (9, 9, 9))],
    "weighted": lambda: [mt.RandWeightedCropd(BOTH, "label", (9, 9, 9), 2)],
    "nested": lambda: [mt.Compose([crop(), mt.RandFlipd(BOTH, prob=0.5)]), mt.RandSpatialCropd(BOTH, (9, 9, 9))],
    "nested twice": lambda: [mt.Compose([mt.Compose([crop(), mt.RandSpatialCropd(BOTH, (9, 9, 9))]), crop()])],
    "one of": lambda: [mt.OneOf([crop(), mt.RandSpatialCropSamplesd(BOTH, 8, 2)]), mt.RandFlipd(BOTH, prob=0.5)],
    "flip first": lambda: [mt.RandFlipd(BOTH, prob=0.5), crop()],
    "a function after it": lambda: [crop(), lambda d: {**d, "sum": d["image"].sum()}],
    "everything is pending": lambda: [mt.RandSpatialCropd(BOTH, (9, 9, 9), lazy=True), mt.RandFlipd(BOTH, prob=0.5)],
}


ORDERS = [list(range(COUNT)), [3, 3, 1, 7, 3], [5]]


@pytest.mark.parametrize("name", PIPELINES)
def test_items_are_monais(name: str, folder: Path) -> None:
    make = PIPELINES[name]
    for order in ORDERS:
        theirs = monais(make)
        expected = [theirs[i] for i in order]
        got = dataset(folder, make)
        assert_outcome_is_monais(theirs, got, expected, [got[i] for i in order])
        got = dataset(folder, make)
        assert_outcome_is_monais(theirs, got, expected, got.__getitems__(order))
        got = dataset(folder, make)
        ahead, found = [], []
        for i in range(len(order)):  # as a loader that reads three items ahead
            while len(ahead) < min(i + 3, len(order)):
                ahead += got.session.begin([order[len(ahead)]])
            found.append(ahead[i].end())
        assert_outcome_is_monais(theirs, got, expected, found)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("prefetch", [pytest.param(1, marks=pytest.mark.long), 5])
def test_batches_are_those_of_thread_data_loader(name: str, prefetch: int, folder: Path) -> None:
    make = PIPELINES[name]

    def batches(loader: Any, of: Any) -> list[Any]:
        kwargs = {"shuffle": True, "generator": torch.Generator().manual_seed(1), "collate_fn": list}
        torch.manual_seed(5)
        return [batch for _ in range(2) for batch in loader(of, batch_size=3, **kwargs)]

    theirs, mine = monais(make), dataset(folder, make)
    expected = batches(ThreadDataLoader, theirs)
    got = batches(lambda *args, **kwargs: GDSDataLoader(*args, prefetch=prefetch, **kwargs), mine)
    assert_equal(expected, got)
    assert_same(states(theirs)[0], states(mine)[0])


def test_first_epoch_fills_and_crops_alike(tmp_path: Path) -> None:
    mine, theirs = dataset(tmp_path, crops), monais(crops)
    loaders = [
        kind(one, batch_size=3, collate_fn=list) for kind, one in ((ThreadDataLoader, theirs), (GDSDataLoader, mine))
    ]
    for _ in range(3):
        assert_equal(*map(list, loaders))
        assert_same(states(theirs)[0], states(mine)[0])
        mine.flush()


# What is read


def test_only_what_crops_cover_is_read(folder: Path, watch: Watch) -> None:
    mine = dataset(folder, lambda: [mt.RandSpatialCropd(BOTH, (8, 9, 10), random_center=True)])
    _ = mine[0]
    ((image,),) = [box["image"] for box in watch.boxes]
    assert [axis.stop - axis.start for axis in image] == [8, 9, 10]
    assert watch.boxes[0]["label"] == [image]


def test_bytes_are_those_of_the_crops(folder: Path) -> None:
    mine = dataset(folder, lambda: [mt.RandSpatialCropd(BOTH, (8, 8, 8))])
    few = mine.session.begin([0])[0].nbytes
    (begun,) = dataset(folder, by_values).session.begin([0])
    assert 2 * few < begun.nbytes
    assert few == _nbytes_behind(mine.session.begin([0])[0]) or few


def _nbytes_behind(begun: Begun) -> int:
    begun.end()
    return begun.nbytes


def test_a_pipeline_without_a_crop_in_front_is_read_as_before(folder: Path, watch: Watch) -> None:
    mine = dataset(folder, PIPELINES["flip first"])
    assert [begun.queue for begun in mine.session.begin([0, 1])] == [None, None]
    assert not watch.boxes


def test_crops_see_no_ghosts_in_inference_mode(folder: Path, watch: Watch) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    with torch.inference_mode():
        assert_as_monai(theirs, mine, [0, 1])
    assert not watch.ran


def test_crops_by_label_read_no_voxel_for_their_centres(folder: Path, watch: Watch) -> None:
    mine = dataset(folder, by_label)
    assert all(map(drawn, mine.session.begin([0, 1, 2])))
    assert not any(watch.whole())


# The queue


def test_all_items_that_are_begun_are_drawn(folder: Path) -> None:
    mine = dataset(folder, crops)
    begun = mine.session.begin([4, 2, 0])
    assert all(map(drawn, begun))
    assert_as_monai(monais(crops), mine, [4, 2, 0], [b.end() for b in begun])


def test_the_first_batch_waits_for_few_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun, when_collated = Session.begin, list[int](), list[int]()

    def watched(session: Session, indices: Any) -> Any:
        begun.extend(indices)
        return begin(session, indices)

    def collate(batch: Any) -> Any:
        when_collated.append(len(begun))
        return list_data_collate(batch)

    monkeypatch.setattr(Session, "begin", watched)
    list(GDSDataLoader(dataset(folder, crops), batch_size=2, prefetch=8, collate_fn=collate))
    assert when_collated == [4, 8, 8, 8]


def test_drawing_stops_at_a_miss_and_goes_on_after_it(folder: Path, tmp_path: Path) -> None:
    mine = dataset(tmp_path, crops)
    for i in (0, 2, 3):
        mine.session.save(i)
    begun = mine.session.begin(range(4))
    assert [drawn(b) for b in begun] == [True, False, False, False]
    assert [b.waits for b in begun] == [False, False, True, True]
    whole = begun[2].nbytes
    found = [b.end() for b in begun[:2]]
    assert [drawn(b) for b in begun[2:]] == [True, True]
    assert begun[2].nbytes < whole
    assert_as_monai(monais(crops), mine, [0, 1, 2, 3], [*found, *(b.end() for b in begun[2:])])


def test_drawing_stops_at_a_record_without_tiles(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = dataset(tmp_path, crops)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "TILED_BYTES", 1 << 30)
        mine.session.save(1)
    mine.populate(0, progress=False)
    begun = mine.session.begin(range(3))
    assert [drawn(b) for b in begun] == [True, False, False]
    assert_as_monai(monais(crops), mine, [0, 1, 2], [b.end() for b in begun])


def test_one_that_needs_values_is_tried_once_in_a_loop(folder: Path, watch: Watch) -> None:
    mine = dataset(folder, by_values)
    begun = mine.session.begin(range(4))
    assert watch.ran == ["RandCropByPosNegLabeld"]
    assert watch.whole() == [True] * 4
    found = [b.end() for b in begun[:3]]
    begun += mine.session.begin([4])
    found += [b.end() for b in begun[3:]]
    assert watch.ran == ["RandCropByPosNegLabeld"]
    assert_as_monai(monais(by_values), mine, [0, 1, 2, 3, 4], found)
    del begun
    gc.collect()
    _ = mine[0]
    assert watch.ran == ["RandCropByPosNegLabeld"] * 2, "another loop tries it again"


def test_what_comes_before_one_that_needs_values_is_drawn(folder: Path, watch: Watch) -> None:
    make = PIPELINES["crop, by label"]
    mine = dataset(folder, make)
    begun = mine.session.begin(range(3))
    assert watch.ran == ["RandSpatialCropd", "RandCropByPosNegLabeld", *["RandSpatialCropd"] * 3]
    assert not any(watch.whole())
    assert_as_monai(monais(make), mine, [0, 1, 2], [b.end() for b in begun])


def test_a_miss_after_one_that_needs_values_holds_nothing_up(tmp_path: Path, watch: Watch) -> None:
    mine = dataset(tmp_path, by_values)
    for i in (0, 2):
        mine.session.save(i)
    begun = mine.session.begin(range(3))
    assert watch.whole() == [True, True]
    assert_as_monai(monais(by_values), mine, [0, 1, 2], [b.end() for b in begun])


def test_crops_by_indices_that_the_user_caches_are_drawn(tmp_path: Path) -> None:
    def make(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        keys = {"fg_indices_key": "label_fg", "bg_indices_key": "label_bg"}
        steps = [
            mt.EnsureTyped(BOTH), mt.FgBgToIndicesd("label", "_fg", "_bg"),
            mt.RandCropByPosNegLabeld(BOTH, "label", 12, num_samples=2, **keys), mt.RandFlipd(BOTH),
        ]  # fmt: skip
        return kind(items(), mt.Compose(steps).set_random_state(3), *args, **kwargs)

    mine = make(GDSDataset, tmp_path, device="cpu", compression="lz4")
    mine.populate(0, progress=False)
    begun = mine.session.begin([0, 2, 1])
    queue = begun[0].queue
    until(lambda: queue.go_on() or all(map(drawn, begun)), "the indices to arrive")
    assert_as_monai(make(Dataset), mine, [0, 2, 1], [one.end() for one in begun])


# ---------------------------------------------------------------------------------------------------------------------
# Centres where an image is above a threshold


def scans(kind: str) -> list[dict[str, Any]]:
    """Items whose image is positive in one region, which gets smaller when it is packed, or does not."""
    data = items()
    for i, item in enumerate(data):
        positive = np.zeros((2, *item["label"].shape[1:]), np.float32)
        positive[0, 5 : 15 + i, :, :20], positive[1, 20:35, 10 + i :] = 1, 1
        if kind == "whole":  # with random exponents
            positive = (2 * positive - 1) * np.exp2(np.random.default_rng(i).uniform(-100, 100, positive.shape))
        item["image"] = (positive if kind == "of two channels" else positive[:1]).astype(np.float32)
    return data


def by_threshold(threshold: Any = 0) -> list[Any]:
    image = {"image_key": "image", "image_threshold": threshold}
    by = mt.RandCropByPosNegLabeld(BOTH, "label", (12, 12, 12), neg=3, num_samples=2, **image)  # type: ignore[arg-type]
    return [by, mt.RandFlipd(BOTH, prob=0.5)]


BY_IMAGE: dict[str, Callable[[], list[Any]]] = {
    "grounds": by_threshold,
    "classes": lambda: [mt.RandCropByLabelClassesd(BOTH, "label", 9, [1, 2, 1], 3, 3, "image", 0.5)],
    "nothing above": lambda: by_threshold(1e39),
    "all above": lambda: by_threshold(-1e39),
}


@pytest.mark.filterwarnings("ignore:Num foregrounds|no available indices")  # MONAI's, of what is above
@pytest.mark.parametrize("kind", ["in tiles", "whole", "of two channels"])
@pytest.mark.parametrize("name", BY_IMAGE)
def test_centres_where_an_image_is_above_a_threshold_need_no_values(kind: str, name: str, tmp_path: Path) -> None:
    make = BY_IMAGE[name]
    mine = dataset(tmp_path, make, data=scans(kind))
    mine.populate(0, progress=False)
    begun = mine.session.begin(range(4))
    whole = begun[0].lazy.later.keys() == {"label"}
    assert whole == (kind == "whole")
    assert all(map(drawn, begun))
    assert_as_monai(monais(make, data=scans(kind)), mine, [0, 1, 2, 3], [b.end() for b in begun])


def test_a_record_for_another_threshold_serves_as_it_did(tmp_path: Path) -> None:
    with dataset(tmp_path, by_threshold, data=scans("in tiles")) as filling:
        filling.populate(0, progress=False)
    for make in (lambda: by_threshold(0.5), lambda: by_threshold(0.0)):
        mine = dataset(tmp_path, make, data=scans("in tiles"))
        begun = mine.session.begin(range(3))
        assert not any(map(drawn, begun))
        assert_as_monai(monais(make, data=scans("in tiles")), mine, [0, 1, 2], [b.end() for b in begun])


@pytest.mark.parametrize(("keys", "size"), [("image", (40, 36, 33)), (BOTH, (39, 36, 33))], ids=["the same", "less"])
@pytest.mark.parametrize("kind", ["in tiles", "whole"])
def test_an_image_that_was_cropped_before(kind: str, keys: Any, size: Any, tmp_path: Path) -> None:
    def make() -> list[Any]:
        return [mt.RandSpatialCropd(keys, size), *by_threshold()]

    mine = dataset(tmp_path, make, data=scans(kind))
    mine.populate(0, progress=False)
    assert_as_monai(monais(make, data=scans(kind)), mine, [0, 3, 1])


def test_states_are_those_of_the_last_item_that_is_over(folder: Path) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    begun = mine.session.begin(range(5))
    assert_same(states(theirs), states(mine))
    for i in range(3):
        assert_equal(theirs[i], begun[i].end())
        assert_same(states(theirs), states(mine))
    del begun  # leaves the loop
    gc.collect()
    assert_as_monai(theirs, mine, [6, 7, 0])


def test_a_loop_left_early_leaves_no_draws_behind(folder: Path) -> None:
    mine, theirs = dataset(folder, lambda: [crop()]), monais(lambda: [crop()])
    torch.manual_seed(0)
    loader = GDSDataLoader(mine, batch_size=1, prefetch=6, collate_fn=list)  # which seeds the transforms
    torch.manual_seed(0)
    DataLoader(theirs)
    loop = iter(loader)
    next(loop)
    loop.close()
    left = states(mine)[0]
    theirs[0]
    assert_same(left, states(theirs)[0], "after the batch that was taken")
    old = monais(lambda: [crop()])
    for owner, state in zip(_randomizables(old.transform), left, strict=True):
        put_state(owner.R, state)
    assert_equal([[old[i]] for i in range(COUNT)], list(loader))


def test_items_that_end_in_another_order(folder: Path) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    a, b, c, d = mine.session.begin([0, 1, 2, 3])
    assert_as_monai(theirs, mine, [1, 0, 3, 2], [x.end() for x in (b, a, d, c)])
    assert_as_monai(theirs, mine, [4, 5])


def test_an_item_that_is_begun_again_and_one_that_is_dropped(folder: Path) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    begun = mine.session.begin([0, 1, 2])
    again = mine.session.begin([0])
    found = [again[0].end()]
    del begun[0]
    found += [b.end() for b in begun]
    assert_as_monai(theirs, mine, [0, 1, 2], found)


def test_an_item_that_ends_twice(folder: Path) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    first, second = mine.session.begin([0, 1])
    assert_as_monai(theirs, mine, [0, 0, 1], [first.end(), first.end(), second.end()])


def test_seeds_that_are_set_in_between(folder: Path) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    begun = mine.session.begin([0, 1, 2])
    found = [begun[0].end()]
    expected = [theirs[0]]
    for one in (mine, theirs):
        one.transform.set_random_state(11)
    found += [b.end() for b in begun[1:]]
    expected += [theirs[1], theirs[2]]
    assert_equal(expected, found)
    assert_same(states(theirs), states(mine))


def test_another_pipeline_in_between(folder: Path) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    begun = mine.session.begin([0, 1])
    for one in (mine, theirs):
        one.transform = pipeline(lambda: [crop()], 7)
    assert_as_monai(theirs, mine, [0, 1], [b.end() for b in begun])


def test_an_attribute_that_changes_to_somebodys_function(folder: Path, watch: Watch) -> None:
    def center(img_size: Any) -> None:
        step.cropper._size, step.cropper._slices = (4, 4, 4), tuple(slice(2, 6) for _ in range(3))

    mine = dataset(folder, lambda: [crop()])
    step: Any = mine.transform.transforms[1]
    _ = mine[0]
    step.randomize = center
    assert mine[0]["image"].shape == (1, 4, 4, 4)
    assert watch.whole() == [False, True]
    assert "center" in mine.session.runtime.on_values["RandSpatialCropd"]


def test_later_transforms_see_the_attributes_of_their_item(folder: Path) -> None:
    def make() -> list[Any]:
        first = crop()
        return [first, lambda d: {**d, "starts": [s.start for s in first.cropper._slices]}]

    mine, theirs = dataset(folder, make), monais(make)
    begun = mine.session.begin(range(4))
    assert all(map(drawn, begun))
    assert_as_monai(theirs, mine, [0, 1, 2, 3], [b.end() for b in begun])


def test_a_size_that_changes_in_between(folder: Path) -> None:
    mine, theirs = dataset(folder, lambda: [crop()]), monais(lambda: [crop()])
    begun = mine.session.begin([0, 1, 2])
    expected, found = [theirs[0]], [begun[0].end()]
    for one in (mine, theirs):
        one.transform.transforms[1].cropper.roi_size = (5, 6, 7)
    expected += [theirs[1], theirs[2]]
    found += [b.end() for b in begun[1:]]
    assert_equal(expected, found)
    assert_same(states(theirs), states(mine))


@pytest.mark.parametrize("what", ["size", "seed"])
def test_what_is_set_while_an_item_is_read_stays(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(one: Any) -> None:
        if what == "size":
            one.transform.transforms[1].cropper.roi_size = (5, 6, 7)
        else:
            one.transform.set_random_state(7)

    def waited(volumes: Volumes) -> Any:
        change(mine)  # as another thread may, such as the training's
        return wait(volumes)

    mine, theirs = dataset(folder, lambda: [crop()]), monais(lambda: [crop()])
    begun, wait = mine.session.begin([0, 1, 2]), Volumes.wait
    expected = [theirs[0]]
    change(theirs)
    with monkeypatch.context() as patch:
        patch.setattr(Volumes, "wait", waited)
        found = [begun[0].end()]
    assert_as_monai(theirs, mine, [1, 2], [b.end() for b in begun[1:]])
    assert_equal(expected, found)


def test_an_item_that_cannot_be_drawn_ahead_spoils_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    begun = mine.session.begin([0])
    read = PendingItem.read

    def refused(lazy: PendingItem, boxes: Any) -> Any:
        raise MemoryError("for the next item")

    with monkeypatch.context() as patch:
        patch.setattr(PendingItem, "read", refused)
        begun += mine.session.begin([1])
        found = [begun[0].end()]
    assert PendingItem.read is read
    assert_as_monai(theirs, mine, [0, 1], [*found, begun[1].end()])


# States that others draw from


def test_a_generator_that_a_later_transform_shares(folder: Path) -> None:
    mine, theirs = dataset(folder, crops), monais(crops)
    for one in (mine, theirs):
        generator = np.random.RandomState(4)
        for step in one.transform.transforms[1:]:
            step.set_random_state(state=generator)
    begun = mine.session.begin(range(4))
    found = [begun[0].end(), begun[1].end()]
    assert not any(map(drawn, begun)), "a draw was wrong, and the next ones would be"
    assert_as_monai(theirs, mine, list(range(4)), [*found, *(b.end() for b in begun[2:])])


def test_a_generator_that_a_later_function_draws_from(folder: Path) -> None:
    def make() -> list[Any]:
        first = crop()
        return [first, lambda d: {**d, "random": first.cropper.R.rand()}]

    mine, theirs = dataset(folder, make), monais(make)
    assert_as_monai(theirs, mine, list(range(5)), mine.__getitems__(list(range(5))))


def test_a_generator_that_another_dataset_of_the_loader_shares(folder: Path) -> None:
    order = [0, 8, 1, 9, 2, 10, 11, 3]

    def batches(kind: Callable[..., Any], make: Callable[..., Any]) -> tuple[Any, Any]:
        parts = [make(), make()]
        loader = kind(ConcatDataset(parts), sampler=order, batch_size=2, collate_fn=list)
        generator = np.random.RandomState(4)
        for part in parts:
            part.transform.transforms[1].set_random_state(state=generator)
        return list(loader), [states(part)[0] for part in parts]

    theirs = batches(ThreadDataLoader, lambda: monais(lambda: [crop()]))
    mine = batches(GDSDataLoader, lambda: dataset(folder, lambda: [crop()]))
    assert_equal(theirs, mine)


def test_unseeded_transforms_draw_from_one_generator(folder: Path) -> None:
    def make(of: Callable[..., Any]) -> Any:
        out = of(folder, crops) if of is dataset else of(crops)
        for part in _randomizables(out.transform):
            vars(part).pop("R", None)
        return out

    mine, theirs = make(dataset), make(monais)
    generator = mt.Randomizable.R
    before = generator.get_state()
    expected = [theirs[i] for i in range(4)]
    after = generator.get_state()
    generator.set_state(before)
    found = [b.end() for b in mine.session.begin([0, 1, 2, 3])]
    assert_equal(expected, found)
    assert_same(after[1:], generator.get_state()[1:])


def test_a_generator_that_the_transforms_had_before_a_seed(folder: Path) -> None:
    mine = dataset(folder, lambda: [crop()])
    generator = np.random.RandomState(4)
    mine.transform.transforms[1].set_random_state(state=generator)
    begun = mine.session.begin([0, 1])
    mine.transform.set_random_state(5)
    begun += mine.session.begin([2])
    assert len(begun) == 3
    assert_same(generator.get_state()[1:], np.random.RandomState(4).get_state()[1:], "nothing has ended")


def _randomizables(compose: mt.Compose) -> list[Any]:
    return [part for step in compose.transforms for part in parts(step) if isinstance(part, mt.Randomizable)]


@pytest.mark.parametrize("draw", [np.random.rand, random.random, lambda: torch.rand(1)])
def test_a_crop_that_draws_from_a_global_generator(
    draw: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    randomize = mt.RandSpatialCrop.randomize

    def also(self: Any, *args: Any) -> None:
        randomize(self, *args)
        self._slices = tuple(slice(s.start // 2, s.stop) for s in self._slices) if float(draw()) < 0.5 else self._slices

    monkeypatch.setattr(mt.RandSpatialCrop, "randomize", also)
    mine, theirs = dataset(folder, lambda: [crop()]), monais(lambda: [crop()])
    outs = []
    for one in (theirs, mine):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        before = GlobalStates()
        if one is mine:
            begun = mine.session.begin(range(4))
            assert not before.moved()
            assert not any(map(drawn, begun))
            outs.append([b.end() for b in begun])
        else:
            outs.append([theirs[i] for i in range(4)])
        outs.append(states(one))
    assert_equal(outs[0], outs[2])
    assert_same(outs[1], outs[3])


def test_the_training_draws_from_global_generators_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, time steps, dropout: what the training draws under a seed is what it draws without this dataset."""
    run, drawn_by_training = recorder.standing_in, list[tuple[float, ...]]()

    def train() -> None:
        drawn_by_training.append((float(torch.rand(1)), float(np.random.rand()), random.random()))

    def while_the_training_goes_on(*args: Any) -> Any:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        return run(*args)

    monkeypatch.setattr(recorder, "standing_in", while_the_training_goes_on)
    mine = dataset(folder, lambda: [crop()])
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    begun = mine.session.begin(range(4))
    assert all(map(drawn, begun))
    for one in begun:
        one.end()
    found = drawn_by_training.copy()
    drawn_by_training.clear()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    for _ in found:
        train()
    assert found == drawn_by_training


# Records that change


@pytest.mark.parametrize("what", ["removed", "replaced", "damaged"])
def test_a_record_that_changes_after_the_draw(what: str, tmp_path: Path) -> None:
    mine, theirs = dataset(tmp_path, crops), monais(crops)
    mine.populate(0, progress=False)
    begun = mine.session.begin([0, 1, 2, 3])
    assert all(map(drawn, begun))
    begun[1].volumes = _lost() if what != "replaced" else begun[1].volumes
    path = mine.session.cache().record_path(mine.key(1).digest)
    if what == "removed":
        os.remove(path)
    elif what == "replaced":
        os.remove(path)
        mine.session.save(1)
    else:
        os.truncate(path, 100)
        mine.session.cache()._reader.forget(path)  # type: ignore[union-attr]
    with pytest.warns() if what == "damaged" else contextlib.nullcontext():
        found = [b.end() for b in begun]
    assert_as_monai(theirs, mine, [0, 1, 2, 3], found)


def _lost() -> Any:
    class Lost:
        def wait(self) -> None:
            return None

    return Lost()


def test_an_error_after_the_crop_leaves_the_states_that_monai_leaves(folder: Path) -> None:
    def make() -> list[Any]:
        return [crop(), mt.Lambdad("image", _refuse)]

    mine, theirs = dataset(folder, make), monais(make)
    begun = mine.session.begin([0, 1])
    for i in range(2):
        with pytest.raises(RuntimeError, match="applying"):
            _ = theirs[i]
        with pytest.raises(RuntimeError, match="applying"):
            begun[i].end()
        assert_same(states(theirs), states(mine))


def _refuse(x: Any) -> Any:
    raise ValueError("no")


def test_a_subclass_with_its_own_random_half(folder: Path, watch: Watch) -> None:
    class Mine(GDSDataset):
        def _post_transform(self, item_transformed: Any) -> Any:
            return {**super()._post_transform(item_transformed), "mine": True}

    mine = Mine(items(), pipeline(lambda: [crop()]), folder, device="cpu")
    assert mine[0]["mine"]
    assert mine.__getitems__([1])[0]["mine"]
    assert not watch.ran


@pytest.fixture(autouse=True)
def _no_loops_left() -> Iterator[None]:
    yield
    gc.collect()


# In words


def test_says_what_is_drawn_first_and_what_ran_on_values(folder: Path) -> None:
    mine = dataset(folder, PIPELINES["crop, by label"])
    crops_of = "crops: RandSpatialCropd, RandCropByPosNegLabeld drawn before anything is read"
    assert f"{crops_of}\n" in _spaced(str(mine))
    _ = mine[0]
    assert "on values: RandCropByPosNegLabeld: it raised" in mine.explain(0)
    assert f"{crops_of}\non values: RandCropByPosNegLabeld: it raised" in _spaced(str(mine))
    mine.transform = dataset(folder, PIPELINES["crop, by label"]).transform  # which has not run
    assert f"{crops_of}\n" in _spaced(str(mine))
    none = "crops: none is drawn before items are read: RandFlipd comes first, and RandFlipd neither crops nor pads"
    assert none in _spaced(str(dataset(folder, PIPELINES["flip first"])))
    assert none in dataset(folder, PIPELINES["flip first"]).explain(0)
    assert "crops:" not in _spaced(str(dataset(folder, lambda: [mt.RandFlipd(BOTH)])))


def _spaced(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def test_arrays_are_read_whole_and_that_is_said(tmp_path: Path) -> None:
    def make(kind: Callable[..., Any], *args: Any) -> Any:
        steps = [mt.ScaleIntensityd("number"), mt.RandSpatialCropd(BOTH, (9, 9, 9))]
        data = [{**item, "number": np.arange(3.0)} for item in items()]
        return kind(data, mt.Compose(steps).set_random_state(2), *args)

    mine = make(lambda *args: GDSDataset(*args, device="cpu", compression="lz4"), tmp_path)
    mine.populate(0, progress=False)
    assert "'image' is an array" in mine.explain(0)
    assert "EnsureTyped" in mine.explain(0)
    assert_as_monai(make(Dataset), mine, [0, 1, 2], mine.__getitems__([0, 1, 2]))
    assert "is an array" not in dataset(tmp_path, crops).explain(0)
