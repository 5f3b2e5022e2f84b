"""``num_workers`` with programs: batches equal those of transforms run on values, whatever happens on the way."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms.utils import reset_ops_id
from monai.utils import set_determinism

from monai_gds import CacheWarning, GDSDataLoader, GDSDataset, WorkerDied, available_backends
from monai_gds.dataset import programmed
from monai_gds.dataset.making import Saved
from monai_gds.loader.crew.crew import Crew
from monai_gds.pipeline.randomness import GLOBAL, state_of, states_at
from monai_gds.programs import emission
from monai_gds.programs.ghostly import is_ghost
from monai_gds.programs.recorder import Recorded
from tests.fresh import printed_by
from tests.programs.test_recorder import (
    RECORDED,
    REFUSED,
    Own,
    drawn_before,
    drawn_in_place,
    drawn_there,
    globally_drawn,
    network,
    own_generator,
)
from tests.same import assert_same
from tests.storage.xnvme import libraries

pytestmark = pytest.mark.usefixtures("no_loop_is_left")

TARGETS = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
COUNT = 6
KEYS = ("image", "label")


class Volume(mt.Transform):
    """Stands for loading: an image and a label that are cut into tiles."""

    def __call__(self, n: int) -> dict[str, Any]:
        image = torch.rand((1, 72, 72, 72), generator=torch.Generator().manual_seed(n))
        label = torch.zeros(1, 72, 72, 72)
        label[:, 10 + n : 30, 20:50, 30:60] = 1
        return {"image": MetaTensor(image), "label": MetaTensor(label), "n": n}


class InNumpy(mt.RandomizableTransform):
    """What a user writes."""

    def __call__(self, data: Any) -> Any:
        factor = self.R.uniform(0.5, 1.5)
        return {**data, "image": torch.from_numpy(np.sqrt(data["image"].cpu().numpy() * factor))}


class Shared(mt.RandomizableTransform):
    """Draws from a generator that it shares with another transform, in torch or in NumPy."""

    def __init__(self, generator: np.random.Generator, in_numpy: bool) -> None:
        super().__init__()
        self.generator, self.in_numpy = generator, in_numpy

    def __call__(self, data: Any) -> Any:
        image, number = data["image"], self.generator.random()
        return {**data, "image": torch.from_numpy(image.cpu().numpy() + number) if self.in_numpy else image + number}


def sharing() -> list[Any]:
    generator = np.random.default_rng()
    return [*crops(), OwnState(), Shared(generator, False), Shared(generator, True)]


class OwnState(mt.RandomizableTransform):
    """Draws from a RandomState of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.RandomState()

    def __call__(self, data: Any) -> Any:
        return {**data, "image": data["image"] + self.rng.rand()}


def with_ramp(data: Any, key: str) -> Any:
    return {**data, key: data[key] + torch.arange(data[key].shape[-1]).to(data[key].device)}


class Inner(mt.RandomizableTransform):
    """Draws by a transform that it makes as it runs."""

    def __call__(self, data: Any) -> Any:
        return {**data, "image": mt.RandScaleIntensity(0.5, prob=1.0)(data["image"])}


class GoesByValues(mt.RandomizableTransform):
    """Asks for a value of the volume."""

    def __call__(self, data: Any) -> Any:
        if data["label"].max() > 0:
            return {**data, "image": data["image"] * 2 + self.R.rand()}
        return data


class Turned(mt.RandomizableTransform):
    """Reads a number that it has the device compute, or the CPU of much."""

    def __call__(self, data: Any) -> Any:
        steps = torch.linspace(0, self.R.rand(), 8, device=data["image"].device)
        return {**data, "image": data["image"] * round(float(steps.expand(1 << 14, 8).exp().mean()), 2)}


class DrawsGlobally(mt.RandomizableTransform):
    """Draws from generators of the whole process."""

    def __call__(self, data: Any) -> Any:
        return {**data, "image": data["image"] + float(np.random.rand()) + float(torch.rand(()))}


class InNumpyGlobally(mt.RandomizableTransform):
    """Cannot be recorded, and draws from a generator of the whole process."""

    def __call__(self, data: Any) -> Any:
        image = data["image"].cpu().numpy()
        return {**data, "image": torch.from_numpy(image * np.float32(np.random.rand()))}


class DrawsMore(mt.RandomizableTransform):
    """Draws a number more where it is recorded."""

    def __call__(self, data: Any) -> Any:
        factor = self.R.rand()
        if is_ghost(data["image"]):
            self.R.rand()
        return {**data, "image": data["image"] * factor}


class Odd(mt.RandomizableTransform):
    """Does something to the item 3, in a worker only or everywhere."""

    def __init__(self, what: str, times: Path) -> None:
        super().__init__()
        self.what, self.times, self.here = what, times, os.getpid()

    def __call__(self, data: Any) -> Any:
        if data["n"] == 3 and self.what == "fail":
            raise KeyError("no good")
        if data["n"] == 3 and os.getpid() != self.here:
            with self.times.open("a") as file:
                file.write("x")
            if self.what == "die" or (self.what == "once" and self.times.read_text() == "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        return data


def crops() -> list[Any]:
    return [
        mt.RandCropByPosNegLabeld(KEYS, "label", (32, 32, 32), num_samples=2, image_key="image", image_threshold=0.1),
        mt.RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        mt.RandRotate90d(KEYS, prob=0.5),
        mt.RandScaleIntensityd("image", factors=0.1, prob=0.5),
        mt.RandShiftIntensityd("image", offsets=0.1, prob=0.5),
    ]


PIPELINES: dict[str, Callable[[], list[Any]]] = {
    "crops": crops,
    "no crops": lambda: [mt.RandFlipd(KEYS, prob=0.5), mt.RandGaussianNoised("image", prob=0.9)],
    "numpy last": lambda: [*crops(), InNumpy()],
    "numpy first": lambda: [InNumpy(), *crops()],
    "values": lambda: [*crops(), GoesByValues(), mt.RandFlipd(KEYS, prob=0.5)],
    "nothing random": list,
    "generators of its own": sharing,
    "nested": lambda: [
        mt.Compose(crops()),
        mt.OneOf([mt.RandFlipd("image", 1.0), mt.RandAdjustContrastd("image", 1.0)]),
    ],
}


@pytest.fixture
def no_loop_is_left() -> Iterator[None]:
    yield
    set_determinism(None)
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "monai-gds-loader"]


Make = Callable[..., GDSDataset]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(tmp_path: Path, target: str) -> Make:
    def made(*random: Any, **settings: Any) -> GDSDataset:
        transform = mt.Compose([Volume(), *random])
        return GDSDataset(list(range(COUNT)), transform, tmp_path / "cache", device=target, **settings)

    return made


def load(dataset: GDSDataset, num_workers: int = 1, **settings: Any) -> GDSDataLoader:
    return GDSDataLoader(dataset, num_workers, **{"batch_size": 2, "programs": "check", **settings})


def epochs(dataset: GDSDataset, num_workers: int = 1, count: int = 2, **settings: Any) -> list[Any]:
    set_determinism(3)
    loader = load(dataset, num_workers, shuffle=True, **settings)
    return [list(loader) for _ in range(count)]


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """What the transforms give on the target, run one by one: nothing is recorded."""

    def run(*args: Any, **settings: Any) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(programmed, "_recorded", lambda *args: (Recorded(None, None), False))
            return epochs(*args, **settings)

    return run


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_batches_are_those_of_transforms_on_values(make: Make, pipeline: str, eagerly: Any, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        found = epochs(make(*PIPELINES[pipeline]()), 2, programs="check")  # misses, then hits
        assert_same(eagerly(make(*PIPELINES[pipeline]())), found)
        if target == "cpu":
            assert_same(epochs(make(*PIPELINES[pipeline]()), 1, programs="off"), found)


def test_they_do_not_depend_on_the_number_of_workers_nor_on_how_these_begin(make: Make) -> None:
    expected = epochs(make(*crops()), 1)
    assert_same(epochs(make(*crops()), 3), expected)
    assert_same(epochs(make(*crops()), 1, multiprocessing_context="forkserver"), expected)


@pytest.mark.long
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_no_pipeline_depends_on_who_makes_its_items(make: Make, pipeline: str) -> None:
    expected = epochs(make(*PIPELINES[pipeline]()), 1)
    for num_workers, context in ((3, "fork"), (8, "fork"), (2, "forkserver"), (2, "spawn")):
        dataset = make(*PIPELINES[pipeline]())
        assert_same(epochs(dataset, num_workers, multiprocessing_context=context), expected)
    assert_same(resumed(make(*PIPELINES[pipeline]()), make(*PIPELINES[pipeline]()), 1), expected)


#: Users' own transforms whose numbers belong to their item: not those that draw from generators of the process, or
#: that go on from item to item.
OWN = [
    *(f for f in RECORDED if f not in (network, own_generator, globally_drawn)),
    *(f for f in REFUSED if f not in (drawn_before, drawn_there, drawn_in_place)),
]


@pytest.mark.long
@pytest.mark.parametrize("function", OWN)
def test_ones_own_transforms(make: Make, function: Any, eagerly: Any) -> None:
    def dataset() -> GDSDataset:
        return make(mt.RandSpatialCropSamplesd(KEYS, (18, 17, 16), 1), Own(function), mt.RandFlipd(KEYS, 0.5, 1))

    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        found = epochs(dataset(), 8)
    assert_same(eagerly(dataset()), found)


def test_fast_programs_ask_the_device_for_nothing(
    make: Make, eagerly: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """New forms are compared all the same, by programs that are recorded once more."""
    expected = eagerly(make(*crops(), Turned()))
    monkeypatch.setattr(GDSDataLoader, "records", lambda self, device: True)  # also for a CPU target
    monkeypatch.setattr(Crew, "address", property(lambda self: pytest.fail("a worker could ask")))
    compared: list[object] = []
    again = programmed.Programmed._again
    monkeypatch.setattr(
        programmed.Programmed, "_again", lambda self, count: (compared.append(count), again(self, count))[1]
    )
    dataset = make(*crops(), Turned())
    set_determinism(3)
    loader = load(dataset, 2, shuffle=True, programs="fast", stats=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert_same([list(loader), list(loader)], expected)
    assert f"last bits of {COUNT} items may differ" in str(loader.stats())
    assert 0 < len(compared) < 2 * COUNT


def test_comparisons_have_a_row_of_their_own(make: Make) -> None:
    loader = load(make(*crops()), 1, stats=True)
    list(loader)
    assert {"comparing", "replay", "recording"} < loader.stats().random_transforms.keys()


def test_the_steps_of_each_transform_are_told(make: Make) -> None:
    transforms = [mt.RandSpatialCropd(KEYS, (32, 32, 32)), mt.RandFlipd(KEYS, 1.0), InNumpy()]
    loader = load(make(*transforms), 1, stats=True)
    list(loader)
    assert loader.stats().steps == {"RandFlipd": 2 * COUNT}, "a crop is a view, and NumPy's steps are in no program"
    assert " 2.0 steps per item" in next(line for line in str(loader.stats()).splitlines() if "RandFlipd" in line)


def test_what_is_made_on_the_cpu_for_a_gpu_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emission, "ON_HOST", emission.ON_TARGET)  # as if what is made here were for a GPU
    affine = mt.RandAffined("image", prob=1.0, rotate_range=(0.3, 0.2, 0.1))
    loader = load(make(mt.RandSpatialCropd(KEYS, (32, 32, 32)), affine, mt.RandFlipd("image", 1.0)), stats=True)
    list(loader)
    assert list(loader.stats().made) == ["RandAffined"]


@pytest.mark.parametrize(
    "transform",
    [partial(with_ramp, key="image"), mt.RandGridDistortiond("image", prob=1.0, device="cpu")],
    ids=["a partial, whose class has no signature", "MONAI's grid, which is made on the CPU with any device="],
)
def test_no_transform_is_advised_to_take_a_device_that_does_not_help(
    make: Make, transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emission, "ON_HOST", emission.ON_TARGET)
    loader = load(make(mt.RandSpatialCropd(KEYS, (32, 32, 32)), transform, mt.RandFlipd("image", 1.0)), stats=True)
    assert list(loader) and not loader.stats().made


def test_only_what_crops_touch_is_read(make: Make, tmp_path: Path, target: str) -> None:
    noise = [{"image": torch.randint(0, 4, (1, 224, 224, 224), dtype=torch.uint8)}]
    transform = mt.Compose([mt.EnsureTyped("image"), mt.RandSpatialCropd("image", (8, 8, 8))])
    dataset = GDSDataset(noise, transform, tmp_path / "noise", target, compression="lz4")
    dataset.populate(progress=False)
    loader = load(dataset, stats=True)
    list(loader)
    whole = os.path.getsize(dataset.session.cache().record_path(dataset.key(0).digest))
    assert loader.stats().nbytes < 1.5 * whole, "the crop's tiles, and once all for the comparison"


@pytest.mark.parametrize("backend", ["deepnvme", "xnvme"])
def test_programs_read_through_other_backends(make: Make, backend: str, target: str) -> None:
    expected = epochs(make(*crops()))
    with libraries.using("double"):
        found = available_backends(target)[backend]
        if not found:
            pytest.skip(f"{found.reason}; {found.remedy}")
        dataset = make(*crops(), backend=backend)
        assert_same(epochs(dataset, 2), expected)
        assert "on values" not in dataset.explain(0)


def test_arrays_of_an_item(tmp_path: Path, target: str, eagerly: Any) -> None:
    """On the CPU they are NumPy's, which no tensor without values can become."""
    data = [{"image": torch.rand(1, 72, 72, 72), "place": np.arange(n, n + 3), "n": n} for n in range(COUNT)]
    transform = mt.Compose([mt.EnsureTyped("image"), mt.RandSpatialCropd("image", (32, 32, 32)), AtPlace()])

    def make() -> GDSDataset:
        return GDSDataset(data, transform, tmp_path / "cache", device=target)

    dataset = make()
    found = epochs(dataset)
    assert_same(eagerly(make()), found)
    assert "on values" not in dataset.explain(0)


class AtPlace(mt.RandomizableTransform):
    """Uses an array of the item."""

    def __call__(self, data: Any) -> Any:
        return {**data, "image": data["image"] + int(data["place"].shape[0])}


def test_what_cannot_be_recorded_is_named(make: Make) -> None:
    dataset = make(*crops(), InNumpy())
    list(load(dataset))
    assert "InNumpy" in str(dataset.explain(0))


def test_crops_by_label_are_told_to_want_tiles(make: Make) -> None:
    dataset = make(*crops(), compression=None)
    loader = load(dataset, stats=True)
    list(loader)
    for shown in (dataset.explain(0), loader.stats()):
        assert "looks for the voxels of a label, which only records in tiles list" in str(shown)


def test_what_draws_from_generators_of_the_process_is_by_place_too(make: Make) -> None:
    """In workers. The generators of this process are not touched."""
    drawing = *crops(), DrawsGlobally(), Inner()
    first = epochs(make(*drawing), 2)
    assert_same(first, epochs(make(*drawing), 1))
    assert not np.array_equal(first[0][0]["image"].cpu(), first[1][0]["image"].cpu())
    before = process_states()
    list(load(make(*drawing), generator=torch.Generator()))
    assert process_states() == before


def test_an_item_that_was_just_being_saved_when_it_was_foreseen_is_drawn_again(make: Make) -> None:
    """In this process it would draw from other generators."""
    drawing = *crops(), DrawsGlobally()
    expected = epochs(make(*drawing))
    set_determinism(3)
    loader = load(make(*drawing), shuffle=True)
    found = [list(loader)]
    for running in crew_of(loader)._ahead.values():
        running.answer.result(20)
        running.begun, running.answer = None, Future()
        running.answer.set_result((programmed.Answer(Saved("busy")), None))
    assert_same([*found, list(loader)], expected)


def process_states() -> Any:
    return states_at(GLOBAL), state_of(mt.Randomizable.R)


def test_transforms_that_draw_from_generators_of_the_process_are_named(make: Make) -> None:
    """Those that a worker records at once, the others after some items."""
    dataset = make(*crops(), DrawsGlobally())
    loader = load(dataset, 2, stats=True)
    list(loader)
    for shown in (dataset.explain(0), str(dataset), str(loader.stats())):
        assert "DrawsGlobally drew from generators of the whole process" in shown
    dataset = make(*crops(), InNumpyGlobally(), mt.RandFlipd(KEYS, prob=0.5))
    list(load(dataset, 2))
    assert "InNumpyGlobally drew" in dataset.explain(0)
    assert "RandFlipd" not in dataset.session.runtime.global_draws.names
    assert "whole process" not in make(*crops(), InNumpy()).explain(0)


def test_the_users_transforms_invert_what_programs_did(make: Make) -> None:
    dataset = make(mt.RandFlipd("image", prob=1.0, spatial_axis=1))
    for n, batch in enumerate(load(dataset, batch_size=1)):
        (item,) = mt.Decollated()(batch)
        assert torch.equal(dataset.transform.inverse(item)["image"].cpu().as_tensor(), Volume()(n)["image"].as_tensor())


def test_the_users_random_states_do_not_move(make: Make) -> None:
    dataset = make(*crops())
    dataset.transform.set_random_state(3)
    expected = reset(dataset[0])
    dataset.transform.set_random_state(3)
    list(load(dataset))
    assert_same(reset(dataset[0]), expected)


def reset(item: Any) -> Any:
    reset_ops_id(item)
    return item


# ---------------------------------------------------------------------------------------------------------------------
# From epoch to epoch


def crew_of(loader: GDSDataLoader) -> Crew:
    (crew,) = loader.idle
    return crew


def test_the_processes_stay_and_see_what_changed(make: Make) -> None:
    dataset = make(mt.RandFlipd("image", prob=0.0, spatial_axis=1), mt.RandScaleIntensityd("image", 0.1, prob=0.0))
    loader = load(dataset, 2)
    plain = list(loader)
    pids = {process.pid for process in crew_of(loader)._workers._processes()}
    dataset[0]  # which draws
    assert_same(list(loader), plain)
    dataset.transform.transforms[1].prob = 1.0
    for batch, before in zip(loader, plain, strict=True):
        assert torch.equal(batch["image"].as_tensor(), before["image"].as_tensor().flip(3))
    dataset.set_data([4, 2])
    assert [batch["n"].tolist() for batch in loader] == [[4, 2]]
    assert pids == {process.pid for process in crew_of(loader)._workers._processes()}


def test_an_epoch_goes_on_where_it_was_in_another_loader(make: Make) -> None:
    expected = epochs(make(*crops()), 2)
    for taken in range(3):
        assert_same(resumed(make(*crops()), make(*crops()), taken), expected)


def resumed(dataset: GDSDataset, other: GDSDataset, taken: int) -> list[Any]:
    """Two epochs, which another loader goes on with after some batches."""
    set_determinism(3)
    loader = load(dataset, 2, shuffle=True)
    loop = iter(loader)
    found = [next(loop) for _ in range(taken)]
    state = loader.state_dict()
    del loop
    set_determinism(99)
    again = load(other, 3, shuffle=True)
    again.load_state_dict(state)
    return [found + list(again), list(again)]


def test_a_lazy_pipeline_applies_its_last_operations(make: Make, target: str) -> None:
    def lazily() -> GDSDataset:
        dataset = make()
        random = [mt.RandFlipd(KEYS, prob=0.5), mt.RandRotated(KEYS, 0.3, prob=1.0)]
        dataset.transform = mt.Compose([Volume(), *random], lazy=True)
        return dataset

    assert_same(epochs(lazily(), 2, programs="check"), epochs(lazily(), 1, programs="off"))


def test_an_old_loop_that_is_dropped_does_not_end_the_next_one(make: Make) -> None:
    """It has given all of its batches, though nobody asked for one more."""
    for programs in ("check", "off"):
        loader = load(make(*crops()), 2, programs=programs)
        old = iter(loader)
        for _ in range(COUNT // 2):
            next(old)
        loop = iter(loader)
        next(loop)
        del old
        gc.collect()
        assert len(list(loop)) == COUNT // 2 - 1


def test_large_data_in_memory_are_not_kept_twice(make: Make) -> None:
    dataset = make(*crops())
    loader = load(dataset, 1)
    list(loader)
    assert len(crew_of(loader)._mark or b"") < 100


def test_a_state_of_a_loader_without_workers_is_not_taken_silently(make: Make) -> None:
    state = GDSDataLoader(make(*crops()), batch_size=2).state_dict()
    with pytest.warns(UserWarning, match="a loader without workers"):
        loader = load(make(*crops()))
        loader.load_state_dict(state)
        next(iter(loader))


def test_a_pipeline_that_cannot_be_pickled_is_forked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_gds.loader.crew.sending.find_spec", lambda name: None)
    lock = threading.Lock()
    dataset = make(mt.RandFlipd("image", prob=0.5), mt.RandLambdad("image", func=lambda x: x if lock else x + 1))
    assert_same(epochs(dataset, 2), epochs(dataset, 1))
    loader = load(make(mt.RandLambdad("image", func=lambda x: x + 1)), 1)
    list(loader)
    before = crew_of(loader)
    list(loader)
    assert crew_of(loader) is before, "nothing changed"


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_killed_worker_is_replaced_once(make: Make, tmp_path: Path) -> None:
    expected = epochs(make(Odd("nothing", tmp_path / "no"), *crops()))
    assert_same(epochs(make(Odd("once", tmp_path / "once"), *crops()), 2), expected)
    assert (tmp_path / "once").read_text() >= "xx"
    loop = iter(load(make(Odd("die", tmp_path / "die"), *crops()), 2))
    next(loop)
    with pytest.raises(WorkerDied, match="was killed") as died:
        next(loop)
    assert any("item 3" in note for note in died.value.__notes__)


def test_an_error_of_a_transform_is_the_eager_one_and_names_the_item(make: Make, tmp_path: Path) -> None:
    loop = iter(load(make(Odd("fail", tmp_path / "fail")), 2))
    next(loop)
    with pytest.raises(RuntimeError) as found:
        next(loop)
    assert "no good" in repr(found.value.__cause__ or found.value) or "no good" in str(found.value)
    assert any("item 3" in note for note in getattr(found.value, "__notes__", ()))


def test_a_program_that_is_wrong_is_found_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the transform that differs on, everything runs on the voxels, and the batches are right."""
    expected = epochs(make(*crops()))
    right = programmed.replay

    def wrong(program: Any, *args: Any) -> Any:
        item = right(program, *args)
        if program.done >= 4:  # RandScaleIntensityd
            for crop in item:
                crop["image"] = crop["image"] + 1
        return item

    monkeypatch.setattr(programmed, "replay", wrong)
    with pytest.warns(CacheWarning, match="RandScaleIntensityd gives other values by its program") as told:
        found = epochs(make(*crops()))
    assert len([one for one in told if "by its program" in str(one.message)]) == 1
    assert_same(found, expected)


def test_a_transform_that_draws_other_numbers_where_it_is_recorded_is_found_out(make: Make) -> None:
    steps = [mt.RandSpatialCropd(KEYS, (32, 32, 32)), DrawsMore(), mt.RandFlipd(KEYS, prob=0.5)]
    with pytest.warns(CacheWarning, match="DrawsMore draws other numbers by its program"):
        found = epochs(make(*steps), 2)
    assert_same(found, epochs(make(*steps), programs="off"))


def test_a_record_that_is_gone_or_damaged_meanwhile_is_made_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = epochs(make(*crops()))
    dataset = make(*crops())
    init = programmed.Programmed.__init__

    def deleting(self: Any, session: Any, split: Any, index: int, *args: Any) -> None:
        if index == 2:
            Path(session.cache().record_path(session.key(index).digest)).unlink(missing_ok=True)
        if index == 4:
            path = Path(session.cache().record_path(session.key(index).digest))
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 255
            path.write_bytes(data)
        init(self, session, split, index, *args)

    monkeypatch.setattr(programmed.Programmed, "__init__", deleting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert_same(epochs(dataset, 2), expected)


def test_leaving_a_loop_ends_the_processes(make: Make) -> None:
    loader = load(make(*crops()), 2)
    loop = iter(loader)
    next(loop)
    del loop
    gc.collect()
    assert not loader.idle
    assert len(list(loader)) == COUNT // 2


def test_an_interrupt_may_be_followed_by_more_of_the_loop(make: Make) -> None:
    loop = iter(load(make(*crops()), 2))
    next(loop)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)
    assert len(list(loop)) == COUNT // 2 - 1


@pytest.mark.parametrize(
    "settings",
    [{"shuffle": True}, {}, {"shuffle": True, "generator": 7}, {"batch_size": 3, "drop_last": True}],
    ids=str,
)
def test_the_next_epoch_is_foreseen_and_nothing_is_drawn_for_that(make: Make, settings: dict[str, Any]) -> None:
    """So that it begins with items that are drawn already."""
    if "generator" in settings:
        settings = {**settings, "generator": torch.Generator().manual_seed(7)}
    loader = load(make(*crops()), 2, **settings)
    list(loader)
    for _ in range(2):
        waiting = dict(crew_of(loader)._ahead)
        assert waiting
        before = torch.get_rng_state()
        seed, batches = loader.foresight.next_epoch(loader)
        expected = list(batches)
        assert torch.equal(torch.get_rng_state(), before)
        loop = iter(loader)
        found = [next(loop)["n"].tolist()]
        assert not any(key in crew_of_loop(loop)._ahead for key in list(waiting)[:2]), "they were taken"
        found += [batch["n"].tolist() for batch in loop]
        assert [list(dict.fromkeys(batch)) for batch in found] == expected
        assert {seed} == {seed for _, _, (seed, _) in waiting}


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 1, 1, 1]), (2, [1, 0, 1, 1, 1])])
def test_the_next_epoch_is_foreseen_with_validations_between(make: Make, every: int, expected: list[int]) -> None:
    """Each draws a seed from torch's generator. How often that happens is learned from one or two epochs."""
    dataset = make(*crops())
    loader, validation = load(dataset, 1, shuffle=True), torch.utils.data.DataLoader([1, 2])
    list(loader)
    right = []
    for number in range(1, 6):
        if number % every == 0:
            list(validation)
        waiting = set(crew_of(loader)._ahead)
        loop = iter(loader)
        next(loop)
        crew = crew_of_loop(loop)
        right.append(crew.foresees and not waiting & set(crew._ahead))
        for _ in loop:
            pass
    assert right == expected


def crew_of_loop(loop: Any) -> Crew:
    *_, news, _ = loop._batches.stop.peek()[2]
    return next(one for one in gc.get_objects() if type(one) is Crew and one.news is news)


SCALED = """
import sys, torch
import monai.transforms as mt
from monai_gds import GDSDataLoader, GDSDataset

def tells(data):
    return {**data, "compiler": "torch._dynamo" in sys.modules}

random = [mt.RandScaleIntensityd("image", 0.1, prob=1.0), mt.RandGaussianSmoothd("image", prob=1.0), tells]
items = [{"image": torch.rand(1, 8, 8, 8)} for _ in range(2)]
dataset = GDSDataset(items, mt.Compose([mt.EnsureTyped("image"), *random]), sys.argv[1], "cpu")
print([batch["compiler"].tolist() for batch in GDSDataLoader(dataset, 1, programs="check")])
assert not dataset.session.runtime.on_values
"""


def test_workers_record_without_torchs_compiler(tmp_path: Path) -> None:
    """In an interpreter of its own. To import it would take each worker half a second, before the first batch."""
    assert printed_by(SCALED, str(tmp_path / "cache")) == "[[False], [False]]"


EPOCHS = """
import gc, sys
import tests.loader.crew.test_programs as t
from monai_gds import GDSDataset
dataset = GDSDataset(list(range(t.COUNT)), t.mt.Compose([t.Volume(), *t.crops()]), sys.argv[1], "cpu")
loader = t.load(dataset, 2, shuffle=True)
for _ in range(12):
    for _ in range(10):
        assert len(list(loader)) == t.COUNT // 2
    gc.collect()
    print(int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) << 10)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_epochs(tmp_path: Path) -> None:
    """In an interpreter of its own. What the allocator keeps varies by 20 MB; a batch per epoch would be 250 MB."""
    sizes = [int(line) for line in printed_by(EPOCHS, str(tmp_path / "cache"), timeout=400).split()]
    assert len(sizes) == 12
    assert min(sizes[-4:]) - min(sizes[2:6]) < 64 << 20, sizes
