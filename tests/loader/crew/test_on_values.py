"""Batches that workers make on values: one random sequence for any number, errors with names, nothing left behind."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import DataLoader, MetaTensor
from monai.utils import set_determinism
from torch.utils.data import ConcatDataset, Subset

from monai_gds import CacheWarning, GDSDataLoader, GDSDataset, WorkerDied
from monai_gds.loader.collate import collate
from monai_gds.loader.crew import sending, shared_memory, worker
from monai_gds.loader.crew.shared_memory import Arena, Arenas, Mapped, Place, pack, unpack
from monai_gds.pipeline.ahead import drawn_ahead
from tests.fresh import printed_by, warm
from tests.machines import in_child
from tests.same import assert_same

Make = Callable[..., GDSDataset]

COUNT = 7


class Volume(mt.Transform):  # type: ignore[misc]
    """Stands for loading; notes the process."""

    def __call__(self, n: int) -> dict[str, Any]:
        values = torch.rand((1, 24, 24, 24), generator=torch.Generator().manual_seed(n))
        meta = {"affine": np.eye(4), "name": f"case {n}", "table": np.full((80, 80), n)}
        return {"image": MetaTensor(values, meta=meta), "label": values > 0.5, "n": n, "made by": os.getpid()}


class Draws(mt.RandomizableTransform):  # type: ignore[misc]
    """Draws from every kind of generator; notes the process."""

    def __init__(self) -> None:
        super().__init__()
        self.modern, self.python = np.random.default_rng(), random.Random()

    def __call__(self, data: Any) -> Any:
        drawn = [self.R.rand(), self.modern.random(), self.python.random()]
        drawn += [np.random.rand(), random.random(), float(torch.rand(()))]
        return {**data, "drawn": drawn, "drawn by": os.getpid()}


class Odd(mt.RandomizableTransform):  # type: ignore[misc]
    """Does something to one item."""

    def __init__(self, what: str, n: int = 3) -> None:
        super().__init__()
        self.what, self.n = what, n

    def __call__(self, data: Any) -> Any:
        if data["n"] == self.n and self.what == "fail":
            raise KeyError("no good")
        if data["n"] == self.n and self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if data["n"] >= self.n and self.what == "hang":
            time.sleep(60)
        return data


class OnCuda(Draws):
    """Names a CUDA device, and needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda:0")


def augment() -> list[Any]:
    keys = ("image", "label")
    return [
        mt.RandFlipd(keys, prob=0.5, spatial_axis=0),
        mt.RandSpatialCropSamplesd(keys, (16, 16, 16), num_samples=2, random_size=False),
        mt.RandAffined("image", prob=0.8, rotate_range=0.3),
        mt.RandGaussianNoised("image", prob=0.8),
        Draws(),
    ]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_dataset(*random: Any, data: Any = range(COUNT), **settings: Any) -> GDSDataset:
        transform = mt.Compose([Volume(), *random])
        return GDSDataset(list(data), transform, tmp_path / "cache", **{"device": "cpu", **settings})

    return make_dataset


def batches_of(dataset: GDSDataset, **settings: Any) -> list[Any]:
    """The batches of an epoch without workers; all records are in the cache afterwards."""
    batches = list(GDSDataLoader(dataset, **settings))
    dataset.flush()  # or workers that are started at once compute what is still being written
    return batches


def load(dataset: Any, num_workers: int = 1, **settings: Any) -> GDSDataLoader:
    """A loader with workers, which are forked."""
    settings = {"multiprocessing_context": "fork", **settings}
    return GDSDataLoader(dataset, num_workers, **settings)


#: Processes that other tests keep.
_of_others: set[int] = set()


def children() -> set[int]:
    """The processes that a test has started here and that still run, without multiprocessing's own."""
    found = set()
    tracker = resource_tracker._resource_tracker._pid
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and stat.parent.name != str(tracker):
            found.add(int(stat.parent.name))
    return found - _of_others


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def arenas() -> int:
    """How much shared memory for batches is mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:monai-gds-batch")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    warm()  # a child that stays
    gc.collect()
    warm()  # or the first test that needs it leaves it behind
    _of_others.clear()
    _of_others.update(children())
    before = children(), arenas()
    yield
    set_determinism(None)
    gc.collect()
    assert (children(), arenas()) == before
    assert not [t for t in threading.enumerate() if t.name == "monai-gds-loader"]


def without_pids(epochs: Any) -> Any:
    for batches in epochs:
        for batch in batches:
            del batch["drawn by"]
    return epochs


def two_epochs(dataset: Any, num_workers: int, seed: int = 3, **settings: Any) -> Any:
    set_determinism(seed)
    loader = load(dataset, num_workers, batch_size=2, shuffle=True, **settings)
    return without_pids([list(loader), list(loader)])


def test_batches_do_not_depend_on_the_number_of_workers(make: Make) -> None:
    one, two, three = (two_epochs(make(*augment()), n) for n in (1, 2, 3))
    assert_same(two, one)
    assert_same(three, one)


class Large(mt.Transform):  # type: ignore[misc]
    """A volume and a label that are cut into tiles."""

    def __call__(self, n: int) -> dict[str, Any]:
        label = torch.zeros(1, 72, 72, 72)
        label[:, 10 + n : 30, 20:50, 30:60] = 1
        return {"image": MetaTensor(label * n), "label": MetaTensor(label)}


def test_crops_that_are_drawn_before_anything_is_read_do_not_depend_on_it_either(tmp_path: Path) -> None:
    pytest.importorskip("blosc2", reason="Blosc2 is not installed")
    keys = ("image", "label")
    crops = [
        mt.RandCropByPosNegLabeld(keys, "label", (16, 16, 16), num_samples=2),
        mt.RandFlipd(keys, prob=0.5, spatial_axis=0),
        Draws(),
    ]
    dataset = GDSDataset(list(range(5)), mt.Compose([Large(), *crops]), tmp_path, "cpu", compression="lz4")
    dataset.populate(progress=False)
    assert drawn_ahead(dataset.session.split())
    assert_same(two_epochs(dataset, 2), two_epochs(dataset, 1))


def test_a_random_sequence_belongs_to_its_seed_and_epoch(make: Make) -> None:
    dataset = make(*augment())
    first, second = two_epochs(dataset, 2)
    drawn = {tuple(map(float, values)) for batch in first + second for values in zip(*batch["drawn"], strict=True)}
    assert len(drawn) == 2 * 2 * COUNT, "each crop of each item of each epoch draws numbers of its own"
    other, _ = two_epochs(dataset, 2, seed=4)
    assert not drawn & {tuple(map(float, values)) for batch in other for values in zip(*batch["drawn"], strict=True)}


class Careless(mt.Transform):  # type: ignore[misc]
    """Draws what it does not use, as TorchIO's transforms do."""

    def __call__(self, data: Any) -> Any:
        np.random.rand(), random.random(), torch.rand(()), mt.Randomizable.R.rand()
        return data


def test_an_epoch_that_fills_the_cache_draws_as_the_next_ones(make: Make) -> None:
    dataset = make(Careless(), *augment())
    cold, warm = two_epochs(dataset, 2), two_epochs(dataset, 2)
    for one in (*cold, *warm):
        for batch in one:
            del batch["made by"]
    assert_same(cold, warm)


def test_the_generator_of_the_loader_seeds_the_epoch(make: Make) -> None:
    def epoch(seed: int) -> Any:
        loader = load(make(*augment()), generator=torch.Generator().manual_seed(seed))
        return without_pids([list(loader)])

    assert_same(epoch(1), epoch(1))
    assert epoch(1)[0][0]["drawn"][0].tolist() != epoch(2)[0][0]["drawn"][0].tolist()


def test_items_come_in_the_order_of_monais_loader(make: Make) -> None:
    def order(loader: Any) -> list[list[int]]:
        set_determinism(9)
        return [batch["n"].tolist() for _ in range(2) for batch in loader]

    expected = order(DataLoader(make(), batch_size=2, shuffle=True, num_workers=1))
    assert order(load(make(), 2, batch_size=2, shuffle=True)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 1},
        {"batch_size": 3},
        {"batch_sampler": [[0, 1, 2], [3], [4, 0]]},
        {"batch_size": None, "collate_fn": dict},
    ],
    ids=str,
)
def test_without_random_transforms_batches_are_those_of_this_process(make: Make, settings: dict[str, Any]) -> None:
    expected = batches_of(make(), **settings)
    assert_same(list(load(make(), 2, **settings)), expected)


def _nothing(items: list[Any]) -> None:
    """As a loop whose items save their results themselves collates them."""


def test_batches_may_be_none(make: Make) -> None:
    batches = list(load(make(), 2, batch_size=2, collate_fn=_nothing))
    assert batches and not any(batches)


def test_subsets_concatenations_and_a_collate_fn(make: Make) -> None:
    dataset = ConcatDataset([Subset(make(), [4, 1]), make()])
    loader = load(dataset, 2, batch_size=4, collate_fn=list)
    assert [[item["n"] for item in batch] for batch in loader] == [[4, 1, 0, 1], [2, 3, 4, 5], [6]]


def test_misses_are_computed_and_saved_by_workers(make: Make) -> None:
    made = {pid for batch in load(make(), 2) for pid in batch["made by"].tolist()}
    assert os.getpid() not in made
    dataset = make()
    assert all(dataset.is_cached(i) for i in range(COUNT))
    again = {pid for batch in load(dataset, 2) for pid in batch["made by"].tolist()}
    assert again == made, "the second loop's workers are others, and they read"


def test_the_users_transforms_invert_what_workers_did(make: Make) -> None:
    dataset = make(mt.RandFlipd("image", prob=1.0, spatial_axis=1))
    plain = [batch["image"] for batch in batches_of(make())]
    for batch, expected in zip(load(dataset), plain, strict=True):
        item = mt.Decollated()(batch)[0]
        assert torch.equal(dataset.transform.inverse(item)["image"].as_tensor(), expected[0].as_tensor())


def test_settings_of_this_process_hold_in_workers(make: Make) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        (batch, *_) = list(load(make(mt.Lambdad("n", func=_a_float)), multiprocessing_context="fork"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert batch["n"].dtype == torch.float64


def _a_float(value: Any) -> Any:
    return torch.zeros(())


def test_stats_show_what_workers_did(make: Make) -> None:
    loader = load(make(mt.RandFlipd("image", prob=1.0), Slow()), 2, stats=True)
    list(loader)
    assert loader.stats().computed == COUNT
    list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.hits, stats.computed) == (COUNT, COUNT, 0)
    assert set(stats.random_transforms) == {"RandFlipd", "Slow"}
    assert stats.random_transforms["Slow"] >= 0.02 * COUNT
    assert {"keys", "collating", "waiting for workers"} <= stats.stages.keys()


class Slow(mt.RandomizableTransform):  # type: ignore[misc]
    def __call__(self, data: Any) -> Any:
        time.sleep(0.02)
        return data


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_batches_that_are_kept_are_not_overwritten(make: Make) -> None:
    loader = load(make(), 2, batch_size=2)
    kept = [batch for _ in range(4) for batch in loader]
    expected = batches_of(make(), batch_size=2)
    assert_same(kept, [copy.deepcopy(batch) for _ in range(4) for batch in expected])
    for batch in kept[:4]:
        batch["image"].fill_(-1)
    assert_same(kept[4:8], expected)


def test_memory_is_used_again(make: Make) -> None:
    loader = load(make(data=list(range(COUNT)) * 6), 2)
    before = arenas()
    for _ in loader:
        assert arenas() - before <= 2 * 2 + 5
    assert sum(len(list(loader)) for _ in range(3)) == 18 * COUNT
    assert arenas() - before <= 2 * 2 + 5


@pytest.mark.filterwarnings("ignore:batches of .* do not all fit")
def test_the_fewest_bytes_that_may_be_asked_for_leave_room_for_no_batch(make: Make) -> None:
    data = list(range(COUNT))
    assert_same(list(load(make(data=data), 2, prefetch_bytes=1)), batches_of(make(data=data)))


@pytest.mark.parametrize("batches", [0.5, 3])
def test_a_batch_that_finds_no_room_is_pickled(make: Make, batches: float) -> None:
    data = list(range(COUNT)) * 3
    expected = batches_of(make(data=data))
    nbytes = expected[0]["image"].nbytes + expected[0]["label"].nbytes + 80 * 80 * 8
    with pytest.warns(CacheWarning, match=r"do not all fit .* prefetch_bytes=1\.\de\+06 has room") as told:
        assert_same(list(load(make(data=data), 2, prefetch_bytes=batches * nbytes)), expected)
    assert len(told) == 1


def test_a_batch_that_fits_is_not_pickled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = []
    monkeypatch.setattr(Arenas, "note", lambda self, packed: noted.append(packed))
    for batch in load(make(data=list(range(COUNT)) * 3), 2, batch_size=2):
        del batch
    assert [packed.loose for packed in noted] == [None] * 11
    assert max(len(packed.pickled) for packed in noted) < 16_000


@pytest.mark.parametrize("where", ["here", "in workers"])
@pytest.mark.parametrize(("module", "call"), [(os, "memfd_create"), (os, "ftruncate"), (mmap, "mmap"), (os, "open")])
def test_a_batch_for_which_the_system_has_no_shared_memory_is_pickled(
    make: Make, monkeypatch: pytest.MonkeyPatch, module: Any, call: str, where: str
) -> None:
    expected = batches_of(make(), batch_size=2)
    before, here, real = descriptors(), os.getpid(), getattr(module, call)

    def refused(*args: Any, **more: Any) -> Any:
        concerned = call != "open" or "/fd/" in str(args[0])
        if concerned and (os.getpid() == here) is (where == "here"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*args, **more)

    loader = load(make(), 2, batch_size=2)
    with monkeypatch.context() as during:
        during.setattr(module, call, refused)
        for _ in range(2):
            assert_same(list(loader), expected)
    del loader
    gc.collect()
    assert descriptors() <= before


def test_a_worker_writes_to_no_file_that_has_the_descriptor_of_memory_that_is_gone(tmp_path: Path) -> None:
    arena = Arena(5000)
    place = arena.place
    with (tmp_path / "a user's").open("w+b") as file:
        file.truncate(5000)
        os.dup2(file.fileno(), place.descriptor)
    assert Mapped().room(place, {place.number}) is None


def test_arenas_follow_the_largest_batch_within_their_bound() -> None:
    arenas = Arenas(1000, 10)
    small = arenas.take()
    assert small is not None and small.nbytes == 100
    packed = pack(np.zeros(20_000, np.uint8), (), None)
    arenas.note(packed._replace(nbytes=320, loose=None))
    arenas.give_back(small)
    made = [arenas.take() for _ in range(4)]
    assert [arena and arena.nbytes for arena in made] == [400, 400, None, None]
    assert len(arenas.numbers) == 2, "the one that is too small is gone"


def test_tensors_that_the_device_takes_and_others() -> None:
    """Numbers, arrays and metadata stay on the CPU, as they do where items are made on the device."""
    items = [Volume()(n) | {"array": np.ones(9_000), "nested": [torch.ones(2), 3]} for n in range(2)]
    batch = collate(items)
    packed = pack(batch, worker._moving(batch, items[0]), None)
    moved: list[int] = []

    def take(buffer: np.ndarray, moves: bool) -> Any:
        if not moves:
            return buffer
        moved.append(buffer.nbytes)
        return torch.from_numpy(buffer.copy())

    assert_same(unpack(packed, None, take), batch)
    assert sorted(moved) == sorted([batch["nested"][0].nbytes, batch["label"].nbytes, batch["image"].nbytes])


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(4, 5, 6).permute(2, 0, 1),
        torch.rand(100, 100)[::2, 3:],
        torch.rand(8, 8, 8, 8).to(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.tensor(5),
        torch.rand(90, 90).to(torch.bfloat16),
        torch.rand(90, 90).to(torch.complex64).conj(),
        torch.rand(90, 90, requires_grad=True),
        torch.rand(4, dtype=torch.bfloat16),
        torch.rand(4, dtype=torch.complex64).conj(),
        torch.rand(4, requires_grad=True),
        torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8),
        torch.eye(90).to_sparse(),
        MetaTensor(torch.rand(90, 90), meta={"a": torch.rand(70, 70)}),
        np.asfortranarray(np.random.rand(90, 80)),
        ["text", None, (1, 2.5)],
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'shape', '')} {getattr(value, 'dtype', '')}",
)
def test_any_value_comes_as_it_was(value: Any) -> None:
    room = memoryview(bytearray(1 << 20))
    for memory in (None, room):
        packed = pack({"x": value}, (), memory)
        found = unpack(packed, np.frombuffer(room, np.uint8), lambda buffer, moves: buffer)["x"]
        if isinstance(value, torch.Tensor):
            assert type(found) is type(value) and found.dtype == value.dtype
            assert torch.equal(found.to_dense(), value.to_dense())
            assert vars(found).keys() == vars(value).keys()
        else:
            assert_same(found, value)


# ---------------------------------------------------------------------------------------------------------------------
# From one epoch to the next


def processes(loader: GDSDataLoader) -> set[int]:
    return {pid for batch in loader for pid in batch["drawn by"].tolist()}


def test_workers_stay_for_the_next_epoch_and_end_with_the_loader(make: Make) -> None:
    loader = load(make(Draws()), 1)
    assert processes(loader) == processes(loader) == children()
    del loader
    gc.collect()
    assert not children()


def test_what_is_changed_between_epochs_is_noticed(make: Make) -> None:
    dataset = make(Draws(), mt.RandFlipd("image", prob=0.0))
    loader = load(dataset, 2)
    list(loader)
    before = children()
    dataset.set_data([1, 5])
    assert [batch["n"].tolist() for batch in loader] == [[1], [5]]
    plain = [batch["image"] for batch in loader]
    dataset.transform.transforms[-1].prob = 1.0
    for batch, image in zip(loader, plain, strict=True):
        assert torch.equal(batch["image"].as_tensor(), image.as_tensor().flip(2, 3, 4))
    assert before == children()


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_an_epoch_is_continued_where_it_was(make: Make, taken: int) -> None:
    """Though workers are ahead, in another loader, with another number of them."""
    set_determinism(3)
    expected = load(make(*augment()), 2, batch_size=2, shuffle=True)
    whole = without_pids([list(expected), list(expected)])
    set_determinism(3)
    interrupted = load(make(*augment()), 2, batch_size=2, shuffle=True)
    loop = iter(interrupted)
    for _ in range(taken):
        next(loop)
    state = interrupted.state_dict()
    del loop
    set_determinism(8)
    loader = load(make(*augment()), 1, batch_size=2, shuffle=True)
    loader.load_state_dict(state)
    found = without_pids([list(loader), list(loader)])
    assert_same(found, [whole[0][taken:], whole[1]])


def test_two_loops_at_once(make: Make) -> None:
    loader = load(make(Draws()), 1, batch_size=2)
    seen = [(one["n"].tolist(), other["n"].tolist()) for one, other in zip(loader, loader, strict=True)]
    assert all(one == other for one, other in seen)
    assert len(seen) == 4


def test_a_forked_child_has_workers_of_its_own(make: Make) -> None:
    loader = load(make(Draws()))
    ours = processes(loader)
    assert in_child(lambda: list(ours & processes(loader))) == []
    assert processes(loader) == ours


# ---------------------------------------------------------------------------------------------------------------------
# Errors, and leaving


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_names_item_and_transform_after_the_batches_before_it(make: Make, num_workers: int) -> None:
    loader = load(make(Odd("fail")), num_workers)
    seen = []
    with pytest.raises(RuntimeError, match=r"applying transform .*Odd") as caught:
        for batch in loader:
            seen.append(int(batch["n"]))
    assert seen == [0, 1, 2]
    assert "while computing item 3 of the dataset" in "".join(caught.value.__notes__)
    assert "KeyError: 'no good'" in "".join(traceback.format_exception(caught.value))


def test_an_error_of_collation_and_of_the_sampler(make: Make) -> None:
    with pytest.raises(ZeroDivisionError):
        list(load(make(), collate_fn=_divides))
    seen = []
    with pytest.raises(IndexError):
        for batch in load(make(), sampler=[0, 1, 99]):
            seen.append(int(batch["n"]))
    assert seen == [0, 1]


def _divides(items: list[Any]) -> Any:
    return 1 // 0


def test_a_killed_worker_is_an_error_and_the_next_epoch_has_others(make: Make) -> None:
    loader = load(make(Odd("die")), 2)
    with pytest.raises(WorkerDied, match="was killed"):
        list(loader)
    loader.dataset.transform.transforms[-1].what = "nothing"
    assert len(list(loader)) == COUNT


@pytest.mark.parametrize("way", ["break", "drop", "close", "interrupt", "error"])
def test_leaving_the_loop_early_leaves_nothing_behind(make: Make, way: str) -> None:
    """The fixture looks for processes, descriptors, memory and threads, while the loader lives."""
    before = arenas(), descriptors()
    loader = load(make(Odd("hang", 4)), 2)
    loop = iter(loader)
    batch = next(loop)
    assert len(children()) == 2
    if way == "close":
        loop.close()
    elif way == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            for batch in loop:  # noqa: B007 (is kept, as by training)
                os.kill(os.getpid(), signal.SIGINT)
    elif way == "error":
        with pytest.raises(ValueError, match="training"):
            for batch in loop:  # noqa: B007
                raise ValueError("training")
    del batch, loop
    gc.collect()
    assert not children()
    assert (arenas(), descriptors()) == before
    assert loader.idle == []


def test_an_interrupt_may_be_followed_by_more_of_the_loop(make: Make) -> None:
    loop = iter(load(make(), 2))
    next(loop)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert len(list(loop)) == COUNT - 1


def test_a_loop_that_was_never_finished_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    said = printed_by(
        """
import sys
import tests.loader.crew.test_on_values as t
from monai_gds import GDSDataset
dataset = GDSDataset(list(range(50)), t.mt.Compose([t.Volume(), t.Draws()]), sys.argv[1], "cpu")
loop = iter(t.load(dataset, 2))
print(int(next(loop)["n"]), *t.children())
""",
        str(tmp_path / "cache"),
        whole=True,
    )
    first, *pids = said.split()
    assert first == "0" and len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("what", ["transform", "collate_fn", "data"])
def test_what_cannot_be_pickled_is_named(make: Make, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "find_spec", lambda name: None)
    settings: dict[str, Any] = {}
    dataset = make(mt.RandFlipd("image"))
    if what == "transform":
        dataset = make(mt.RandFlipd("image"), mt.RandLambdad("image", func=lambda x: x))
    elif what == "collate_fn":
        settings["collate_fn"] = lambda items: items
    else:
        dataset.set_data([threading.Lock()])
    named = {"transform": "transform 2, RandLambdad,", "collate_fn": "collate_fn", "data": "the dataset's data"}[what]
    with pytest.raises(ValueError, match=f"^{named} cannot be sent to another process: "):
        next(iter(load(dataset, multiprocessing_context="spawn", **settings)))


@pytest.mark.long
def test_a_lambda_is_sent_where_cloudpickle_is_installed(make: Make) -> None:
    pytest.importorskip("cloudpickle")
    seven = make(mt.Lambdad("image", func=lambda x: x * 0 + 7))
    for batch in load(seven, multiprocessing_context="spawn"):
        assert batch["image"].eq(7).all()


class OnlyHere(mt.RandomizableTransform):  # type: ignore[misc]
    """Is not found in another process, as a class of a notebook."""

    def __call__(self, data: Any) -> Any:
        return data

    def __reduce__(self) -> Any:
        return _found_in, (os.getpid(),)


def _found_in(process: int) -> Any:
    if process != os.getpid():
        raise AttributeError("Can't get attribute 'OnlyHere'")
    return OnlyHere()


def test_what_a_worker_cannot_import_is_an_error_with_a_remedy(make: Make) -> None:
    dataset = make()
    loader = load(dataset)
    assert list(loader)
    dataset.transform = make(OnlyHere()).transform  # which is sent to the processes that there are
    with pytest.raises(ValueError, match=r"cannot load the dataset: Can't get .*OnlyHere.* in a module that it can"):
        next(iter(loader))


def test_the_old_argument_names_the_new_form(make: Make) -> None:
    with pytest.raises(TypeError, match=r"transforms_on= is gone: num_workers= is enough"):
        GDSDataLoader(make(), 2, transforms_on="workers")


@pytest.mark.long
def test_spawned_workers_give_the_same(make: Make) -> None:
    def values(context: str) -> Any:  # the order of metadata is that of MONAI's sets, which differs between processes
        batches = two_epochs(make(*augment()), 1, multiprocessing_context=context)
        return [
            (batch["image"].as_tensor(), batch["label"].as_tensor(), batch["drawn"])
            for epoch in batches
            for batch in epoch
        ]

    assert_same(values("spawn"), values("fork"))


BY_FORK_SERVER = pytest.param({"multiprocessing_context": "forkserver"}, marks=pytest.mark.long)


@pytest.mark.parametrize("settings", [{}, BY_FORK_SERVER, {"programs": "check"}], ids=str)
def test_a_run_warns_once_that_its_budget_is_used_up(tmp_path: Path, settings: dict[str, str]) -> None:
    (tmp_path / "training.py").write_text(f"""
import monai.transforms as mt, torch, warnings
from monai_gds import GDSDataLoader, GDSDataset

warnings.simplefilter("always")  # in a worker of the fork server, too
if __name__ == "__main__":
    items = [{{"image": torch.full((1, 40, 40, 40), float(n))}} for n in range(8)]
    dataset = GDSDataset(items, mt.Compose([mt.EnsureTyped("image")]), {str(tmp_path)!r}, "cpu", max_bytes=600_000)
    for _ in range(3):
        next(iter(GDSDataLoader(dataset, 2, batch_size=8, **{settings!r})))  # workers of its own
""")
    told = warm().run("training.py", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stderr.count("CacheWarning: nothing more is cached") == 1, told.stderr


def test_memory_that_workers_cannot_open_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mapped = Mapped()
    for number in range(3):
        assert mapped.room(Place(number, 2**22, number, (0, 0), 4096), {number}) is None
    (told,) = [record.getMessage() for record in caplog.records if record.name == "monai_gds"]
    assert told.startswith("batches are pickled: the memory for them cannot be opened ([Errno 2]")


def test_memory_that_cannot_be_pinned_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(address: int, nbytes: int) -> None:
        raise RuntimeError("CUDA refused")

    monkeypatch.setattr(shared_memory, "pin", pin)
    arenas = [Arena(4096), Arena(4096)]
    for arena in arenas:
        arena.pin(4096)
    told = [record.getMessage() for record in caplog.records if record.name == "monai_gds"]
    assert len(told) == 1 and told[0].startswith("batches are copied from memory that is not page-locked")
    caplog.clear()  # which holds the error, which holds an arena
    del arenas, arena


# ---------------------------------------------------------------------------------------------------------------------
# Transforms that name a CUDA device


def test_transforms_from_the_first_that_names_a_cuda_device_on_stay_here(make: Make) -> None:
    def pids(dataset: GDSDataset, where: str) -> set[int]:
        return {pid for batch in load(dataset, 2) for pid in batch[where].tolist()}

    flip = mt.RandFlipd("image", prob=0.5)
    assert os.getpid() not in pids(make(flip, Draws()), "drawn by")
    assert pids(make(flip, OnCuda()), "drawn by") == {os.getpid()}
    assert os.getpid() not in pids(make(flip, OnCuda()), "made by")
    assert pids(make(mt.RandFlipd("image"), mt.Compose([OnCuda()]), Draws()), "drawn by") == {os.getpid()}


def test_what_stays_here_is_seeded_too_and_leaves_the_generators_of_this_process_alone(make: Make) -> None:
    def epochs(num_workers: int) -> Any:
        set_determinism(3)
        batches = two_epochs(make(*augment()[:-1], OnCuda()), num_workers)
        for batch in [batch for epoch in batches for batch in epoch]:
            batch["drawn"] = batch["drawn"][:3]  # the others come from this process's own generators
        return batches

    assert_same(epochs(2), epochs(1))
    np.random.seed(5)
    expected = np.random.rand(2)
    np.random.seed(5)
    first = np.random.rand()
    list(load(make(mt.RandFlipd("image")), 2))
    assert [first, np.random.rand()] == list(expected)


def test_the_records_of_a_pipeline_that_is_divided_are_its_own(make: Make) -> None:
    dataset = make(mt.RandFlipd("image"), OnCuda())
    list(load(dataset))
    assert all(dataset.is_cached(i) for i in range(COUNT))


def test_an_error_of_what_stays_here_names_the_item(make: Make) -> None:
    with pytest.raises(RuntimeError, match="applying transform") as caught:
        list(load(make(mt.RandFlipd("image"), OnCuda(), Odd("fail"))))
    assert "while computing item 3 of the dataset" in "".join(caught.value.__notes__)


class WithAnEnd(GDSDataset):
    """Adds something after the random transforms."""

    def _post_transform(self, item_transformed: Any) -> Any:
        return {**super()._post_transform(item_transformed), "ended": True}


def test_a_subclass_that_ends_items_itself_is_not_divided(tmp_path: Path) -> None:
    steps = [Volume(), mt.RandFlipd("image")]
    whole = WithAnEnd(list(range(2)), mt.Compose([*steps, Draws()]), tmp_path / "cache", "cpu")
    assert all(all(batch["ended"]) for batch in load(whole))
    divided = WithAnEnd(list(range(2)), mt.Compose([*steps, OnCuda()]), tmp_path / "cache", "cpu")
    with pytest.raises(ValueError, match=r"up to OnCuda.*WithAnEnd has a _post_transform of its own.*num_workers=0"):
        list(load(divided))


class OnItsWay(GDSDataset):
    """A dataset for a CUDA device, on a machine without one."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, device="cpu", **settings)
        self.settings = replace(self.settings, device=torch.device("cuda:0"))


def test_workers_of_a_cuda_target_load_to_the_cpu(tmp_path: Path) -> None:
    dataset = OnItsWay(list(range(3)), mt.Compose([Volume()]), tmp_path / "cache")
    view = dataset.session.for_worker(loads="values")
    assert view.target() == torch.device("cpu")
    assert type(view.dataset[0]["image"]) is MetaTensor and isinstance(view.dataset[0]["label"], torch.Tensor)
    dataset.settings = replace(dataset.settings, compression="bitcomp")
    with pytest.raises(ValueError, match="bitcomp"):
        dataset.session.for_worker(loads="values")


def test_a_child_keeps_the_batch_that_it_was_forked_with(make: Make) -> None:
    """As a process that writes a batch into a file while training goes on."""
    forked = []
    for n, batch in enumerate(load(make(data=range(12)), 1, batch_size=1)):
        expected = Volume()(n)["image"].numpy().tobytes()
        if n < 2 and not (pid := os.fork()):
            time.sleep(0.5)
            os._exit(batch["image"].numpy().tobytes() != expected)
        if n < 2:
            forked.append(pid)
        del batch
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forked] == [0, 0]
