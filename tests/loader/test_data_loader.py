"""GDSDataLoader: ThreadDataLoader's batches, sooner, and nothing lost, whatever happens in a thread."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import pickle
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monai.transforms as mt
import pytest
import torch
from monai.data import DataLoader, Dataset, PersistentDataset, ThreadDataLoader
from monai.utils import set_determinism
from torch.utils.data import ConcatDataset, DistributedSampler, RandomSampler, Subset, WeightedRandomSampler

from monai_gds import CacheWarning, GDSDataLoader, GDSDataset, WorkerDied
from monai_gds.dataset.programmed import draw
from monai_gds.dataset.session import Begun, Session
from monai_gds.folder.writer import process_writer
from monai_gds.loader import ahead as read_ahead
from monai_gds.loader import epoch as pass_over
from monai_gds.loader import hand_over, later, resume
from monai_gds.loader.hand_over import HandOver
from tests.fixtures_nifti import KEYS, preprocessing, write_volumes
from tests.fresh import Interpreter, printed_by
from tests.interrupts import interrupted
from tests.machines import in_child
from tests.polls import until
from tests.same import assert_same

Make = Callable[..., GDSDataset]


def pipeline(*random: Any) -> mt.Compose:
    """Volumes of one size, so that they go into one batch."""
    return mt.Compose([*preprocessing(), mt.ResizeWithPadOrCropd([*KEYS, "mask"], (24, 24, 24)), *random])


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_volumes(tmp_path_factory.mktemp("volumes"), count=5)


@pytest.fixture
def make(volumes: list[dict[str, Any]], tmp_path: Path) -> Make:
    def make_dataset(*random: Any, data: Any = None, transform: Any = None, **settings: Any) -> GDSDataset:
        items = copy.deepcopy(volumes) if data is None else data
        chosen = pipeline(*random) if transform is None else transform
        return GDSDataset(items, chosen, tmp_path / "cache", **{"device": "cpu", **settings})

    return make_dataset


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    process_writer().flush()
    gc.collect()
    set_determinism(None)
    assert not threads(), "the loader's thread outlived its loop"


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "monai-gds-loader"]


def augment() -> list[Any]:
    """Random transforms: flips, noise, and four crops an item."""
    return [
        mt.RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        mt.RandGaussianNoised("image", prob=0.8),
        mt.RandSpatialCropSamplesd(KEYS, (12, 12, 12), num_samples=4, random_size=False),
    ]


def two_epochs(loader_class: type, dataset: Any, seed: int = 3, **settings: Any) -> list[Any]:
    set_determinism(seed)
    loader = loader_class(dataset, **settings)
    return [list(loader), list(loader)]


SETTINGS: list[dict[str, Any]] = [
    {"batch_size": 1},
    {"batch_size": 2, "shuffle": True},
    {"batch_size": 2, "shuffle": True, "drop_last": True},
    {"batch_size": 3, "sampler": [4, 0, 2, 2]},
    {"batch_sampler": [[0, 1, 2], [3], [4, 0]]},
    {"batch_size": None},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("prefetch", [1, pytest.param(2, marks=pytest.mark.long), None])
def test_batches_are_those_of_thread_data_loader(make: Make, settings: dict[str, Any], prefetch: int | None) -> None:
    dataset = make(*augment())
    expected = two_epochs(ThreadDataLoader, dataset, **settings)
    assert_same(two_epochs(GDSDataLoader, dataset, prefetch=prefetch, **settings), expected)


@pytest.mark.parametrize(
    "sampler",
    [lambda d: RandomSampler(d, replacement=True, num_samples=7), lambda d: WeightedRandomSampler([1] * 5, 7)],
)
def test_samplers_draw_as_ever(make: Make, sampler: Any) -> None:
    dataset = make()

    def names(loader_class: type) -> list[Any]:
        set_determinism(5)
        loader = loader_class(dataset, batch_size=2, sampler=sampler(dataset))
        return [[batch["name"] for batch in loader] for _ in range(2)]

    assert names(GDSDataLoader) == names(ThreadDataLoader)


def test_a_generator_of_ones_own(make: Make) -> None:
    def names(loader_class: type) -> list[Any]:
        loader = loader_class(make(), batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(9))
        return [[batch["name"] for batch in loader] for _ in range(2)]

    assert names(GDSDataLoader) == names(ThreadDataLoader)


def test_the_global_generator_ends_where_it_would(make: Make) -> None:
    def after(loader_class: type) -> float:
        set_determinism(1)
        list(loader_class(make(), batch_size=2, shuffle=True))
        return float(torch.rand(()))

    assert after(GDSDataLoader) == after(ThreadDataLoader)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: Subset(d, [4, 1, 2]),
        lambda d: Subset(Subset(d, [4, 3, 1, 2]), [2, 0]),
        lambda d: d[1:4],
        lambda d: ConcatDataset([d, Subset(d, [1, 0])]),
        lambda d: Subset(ConcatDataset([d, d]), [9, 0, 5, -1]),
    ],
)
def test_subsets_and_concatenations_are_read_ahead(make: Make, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [batch["name"] for batch in DataLoader(wrap(make()), batch_size=2)]
    seen = []
    begin = Session.begin
    monkeypatch.setattr(Session, "begin", lambda self, indices: seen.extend(indices) or begin(self, indices))
    assert [batch["name"] for batch in GDSDataLoader(wrap(make()), batch_size=2)] == expected
    assert len(seen) == sum(map(len, expected))


@pytest.mark.parametrize("index", [-8, 7])
def test_an_index_that_does_not_exist_is_an_error(make: Make, index: int) -> None:
    dataset = ConcatDataset([make(), Subset(make(), [1, 0])])
    with pytest.raises(IndexError, match=f"no item {index} in a ConcatDataset of 7"):
        list(GDSDataLoader(dataset, sampler=[index]))


class Doubled(Dataset):  # type: ignore[misc]
    def __init__(self, dataset: GDSDataset) -> None:
        self.inner = dataset
        super().__init__(dataset.data)

    def __getitem__(self, index: int) -> Any:
        return {"name": self.inner[index]["name"] * 2}


class DoubledItself(GDSDataset):
    def __getitem__(self, index: int) -> Any:
        return {"name": super().__getitem__(index)["name"] * 2}


class Marked(GDSDataset):
    def _cachecheck(self, item: Any) -> Any:
        return {**super()._cachecheck(item), "mark": 1}


class MarkedTogether(GDSDataset):
    def __getitems__(self, indices: Any) -> Any:
        return [{**item, "mark": 1} for item in super().__getitems__(indices)]


@pytest.mark.parametrize("kind", [Marked, MarkedTogether])
def test_a_subclass_with_its_own_way_to_an_item_is_asked(tmp_path: Path, volumes: Any, kind: type[GDSDataset]) -> None:
    dataset = kind(volumes, pipeline(), tmp_path / "cache", "cpu")
    assert all("mark" in item for item in dataset.__getitems__([0, 1]))
    assert [batch["mark"].tolist() for batch in GDSDataLoader(dataset, batch_size=3)] == [[1, 1, 1], [1, 1]]


def test_any_other_dataset_is_loaded_as_by_monai(make: Make, tmp_path: Path, volumes: Any) -> None:
    persistent = PersistentDataset(volumes, pipeline(), tmp_path / "persistent")
    list(DataLoader(persistent))  # a hit of it is another thing than a miss
    expected = two_epochs(DataLoader, persistent, batch_size=2, shuffle=True)
    assert_same(two_epochs(GDSDataLoader, persistent, batch_size=2, shuffle=True), expected)
    for dataset in (Doubled(make()), DoubledItself(volumes, pipeline(), tmp_path / "cache", "cpu")):
        names = [name for batch in GDSDataLoader(dataset, batch_size=2) for name in batch["name"]]
        assert names == [volume["name"] * 2 for volume in volumes]


class Pid(mt.Transform):  # type: ignore[misc]
    """Notes in which process it ran."""

    def __cache_key__(self) -> str:
        return "pid"

    def __call__(self, data: Any) -> Any:
        if data["name"] == "case 3" and self.__dict__.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if data["name"] == "case 3" and self.__dict__.get("fail"):
            raise KeyError("no good: case 3")
        return {**data, "pid": os.getpid()}


def with_workers(dataset: GDSDataset, context: str = "fork", **settings: Any) -> Any:
    """The loop that workers and a CUDA target give, on the CPU."""
    return iter(GDSDataLoader(dataset, 2, programs="check", multiprocessing_context=context, **settings))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_compute_what_is_not_cached_and_nothing_else(make: Make, context: str) -> None:
    transform = mt.Compose([mt.LoadImaged(KEYS), Pid()])
    dataset = make(transform=transform)
    _ = dataset[1]
    dataset.flush()
    batches = list(with_workers(dataset, context, batch_size=2))
    pids = [pid for batch in batches for pid in batch["pid"].tolist()]
    assert pids[1] == os.getpid()
    assert os.getpid() not in [pids[0], *pids[2:]]
    assert [name for batch in batches for name in batch["name"]] == [f"case {i}" for i in range(5)]
    assert_same(list(GDSDataLoader(dataset, batch_size=2)), batches)


@pytest.mark.parametrize("what", ["fail", "die"])
def test_what_goes_wrong_in_a_worker_reaches_the_consumer(make: Make, what: str) -> None:
    broken = Pid()
    setattr(broken, what, True)
    seen = []
    with pytest.raises((RuntimeError, WorkerDied)) as caught:
        for batch in with_workers(make(transform=mt.Compose([broken])), batch_size=1, prefetch=1):
            seen.append(batch["name"][0])
    assert seen == ["case 0", "case 1", "case 2"]
    text = "".join(traceback.format_exception(caught.value))
    assert ("no good: case 3" if what == "fail" else "killed") in text
    assert [batch["name"][0] for batch in GDSDataLoader(make(transform=mt.Compose([Pid()]))[:3])] == seen


def test_what_workers_leave_half_written_goes_with_them(make: Make, tmp_path: Path, monkeypatch: Any) -> None:
    here, rename = os.getpid(), os.rename

    def hang(*paths: Any, **folders: Any) -> None:  # folders are named where the index is renamed
        if os.getpid() != here and not folders and "case 0" not in Path(paths[0]).read_bytes().decode("latin1"):
            time.sleep(60)
        rename(*paths, **folders)

    monkeypatch.setattr(os, "rename", hang)
    temporary = tmp_path / "cache" / ".tmp"
    for _ in with_workers(make(transform=mt.Compose([Pid()])), batch_size=1):
        until(lambda: os.listdir(temporary))
        break
    gc.collect()
    assert os.listdir(temporary) == []


def test_leaving_the_loop_ends_the_workers(make: Make) -> None:
    class Slow(Pid):
        def __call__(self, data: Any) -> Any:
            time.sleep(30 if data["name"] != "case 0" else 0)
            return super().__call__(data)

    started = time.monotonic()
    for batch in with_workers(make(transform=mt.Compose([Slow()])), batch_size=1):
        pid = int(batch["pid"][0])
        break
    del batch
    gc.collect()
    assert time.monotonic() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_a_cache_and_with_nothing_to_cache(make: Make, volumes: Any) -> None:
    uncached = GDSDataset(volumes, pipeline(*augment()), None, device="cpu")
    expected = two_epochs(ThreadDataLoader, uncached, batch_size=2)
    assert_same(two_epochs(GDSDataLoader, uncached, batch_size=2), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Bounds


class Watched:
    """Counts what is begun and not ended, by a size that is told after each begin, and remembers the most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: Callable[[Begun], int] = lambda _: 1) -> None:
        self.in_flight = self.most = 0
        self.begun: list[list[int]] = []
        begin, end = Session.begin, Begun.end

        def watched_begin(session: Session, indices: Any) -> Any:
            self.begun.append([*indices])
            found = begin(session, indices)
            self.in_flight += sum(map(size, found))
            self.most = max(self.most, self.in_flight)
            return found

        def watched_end(begun: Begun) -> Any:
            self.in_flight -= size(begun)
            return end(begun)

        monkeypatch.setattr(Session, "begin", watched_begin)
        monkeypatch.setattr(Begun, "end", watched_end)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"prefetch": 1}, 1),
        ({"prefetch": 3}, 3),
        ({"prefetch": 2, "batch_size": 4}, 2),
        ({"prefetch_bytes": 1}, 1),
        ({"prefetch_bytes": 1, "batch_size": 4}, 1),
        ({"prefetch_bytes": "450kB"}, 4),
    ],
)
def test_no_more_is_in_flight_than_was_allowed(
    tmp_path: Path, settings: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = mt.Compose([mt.Lambda(lambda n: {"x": torch.full((25_000,), float(n))})])
    dataset = GDSDataset(list(range(24)), transform, tmp_path / "cache", "cpu")
    watched = Watched(monkeypatch)
    for _ in range(2):
        watched.most = 0
        values = [float(x) for batch in GDSDataLoader(dataset, **settings) for x in batch["x"][:, 0]]
        assert values == list(range(24))
    assert watched.most == most, "the second epoch reads"


@pytest.mark.parametrize(("memory", "most"), [(8, 1.0), (24, 1.5), (32, 2.0), (141, 2.0)], ids=str)
def test_more_may_be_on_its_way_to_a_gpu_with_more_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch, memory: int, most: float
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory << 30))
    assert GDSDataLoader(make()).bytes_in_flight(gpu) == most * (1 << 30)
    assert GDSDataLoader(make()).bytes_in_flight(torch.device("cpu")) == 1 << 30
    assert GDSDataLoader(make(), prefetch_bytes="3GB").bytes_in_flight(gpu) == 3_000_000_000


def test_records_of_unknown_size_do_not_widen_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = mt.Compose([mt.Lambda(lambda n: {"x": torch.full((25_000,), float(n))})])
    dataset = GDSDataset(list(range(32)), transform, tmp_path / "cache", "cpu")
    for i in range(32):
        if i % 4 < 3:
            _ = dataset[i]
    dataset.flush()
    largest = max(path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors"))
    watched = Watched(monkeypatch, attrgetter("nbytes"))
    assert len(list(GDSDataLoader(dataset, batch_size=8, prefetch=32, prefetch_bytes=2 * largest))) == 4
    assert 0 < watched.most <= 2 * largest


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 16}, {"batch_sampler": [list(range(i, i + 16)) for i in range(0, 64, 16)]}],
    ids=["batch_size", "batch_sampler"],
)
def test_reads_of_a_batch_begin_together(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    dataset = GDSDataset(list(range(64)), mt.Compose([mt.Lambda(lambda n: {"x": n})]), tmp_path / "cache", "cpu")
    dataset.populate(progress=False)
    list(GDSDataLoader(dataset, **settings))
    assert [len(indices) for indices in watched.begun] == [1, 15, 16, 16, 16]


def test_a_slow_consumer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = mt.Compose([mt.Lambda(lambda n: {"x": torch.full((9,), float(n))})])
    watched = Watched(monkeypatch)
    dataset = GDSDataset(list(range(20)), transform, tmp_path / "cache", "cpu")
    loop = iter(GDSDataLoader(dataset, prefetch=4))
    next(loop)
    time.sleep(0.3)
    assert sum(map(len, watched.begun)) == 5, "one was taken and four are in flight"
    assert len(list(loop)) == 19


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefetch": 0}, "prefetch=0"),
        ({"prefetch": -2}, "prefetch=-2"),
        ({"prefetch": 1.5}, "prefetch=1.5"),
        ({"prefetch": "4"}, "prefetch='4'"),
        ({"prefetch_bytes": 0}, "prefetch_bytes=0"),
        ({"prefetch_bytes": "4 parsecs"}, "prefetch_bytes='4 parsecs'"),
        ({"prefetch_bytes": float("nan")}, "prefetch_bytes=nan"),
    ],
)
def test_bad_bounds_name_themselves(make: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        GDSDataLoader(make(), **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Errors, leaving, forking


class Fails(mt.RandomizableTransform):  # type: ignore[misc]
    """Fails on one case, after the cache."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __call__(self, data: Any) -> Any:
        if data["name"] == self.name:
            raise KeyError(f"no good: {self.name}")
        return data


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_error_comes_after_the_batches_before_it_with_its_traceback(make: Make, epoch: int) -> None:
    dataset = make(Fails("case 3"))
    if epoch == 2:
        list(GDSDataLoader(make(), batch_size=1))
    seen = []
    with pytest.raises(RuntimeError, match="applying transform") as caught:
        for batch in GDSDataLoader(dataset, batch_size=1):
            seen.append(batch["name"][0])
    assert seen == ["case 0", "case 1", "case 2"]
    assert "no good: case 3" in "".join(traceback.format_exception(caught.value))
    assert [batch["name"][0] for batch in GDSDataLoader(dataset[:3])] == seen, "the dataset is as good as before"


def test_the_loop_is_over_after_an_error(make: Make) -> None:
    loop = iter(GDSDataLoader(make(Fails("case 1"))))
    next(loop)
    with pytest.raises(RuntimeError):
        next(loop)
    with pytest.raises(StopIteration):
        next(loop)


@pytest.mark.parametrize("what", ["sampler", "index", "collate_fn", "data"])
def test_errors_in_the_users_own_parts(make: Make, what: str) -> None:
    def sampler() -> Iterator[int]:
        yield from (0, 1)
        raise OSError("no more numbers")

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            return sampler()

        def __len__(self) -> int:
            return 5

    def collate(items: list[Any]) -> Any:
        if items[0]["name"] == "case 2":
            raise OSError("no more numbers")
        return items

    class Data(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise OSError("no more numbers")
            return super().__getitem__(index)

    settings: dict[str, dict[str, Any]] = {
        "sampler": {"sampler": Sampler()},
        "index": {"sampler": [0, 1, 7, 2]},
        "collate_fn": {"collate_fn": collate},
    }
    dataset = make()
    if what == "data":
        dataset.set_data(Data(dataset.data))
    seen = []
    with pytest.raises((OSError, IndexError), match=r"no more numbers|out of range") as caught:
        for batch in GDSDataLoader(dataset, **settings.get(what, {})):
            seen.append(batch[0]["name"] if what == "collate_fn" else batch["name"][0])
    assert seen == ["case 0", "case 1"]
    assert len(traceback.extract_tb(caught.value.__traceback__)) > 3


def test_a_stop_iteration_of_the_users_is_not_the_end_of_the_epoch(make: Make) -> None:
    def collate(items: list[Any]) -> Any:
        return next(iter(items if items[0]["name"] != "case 2" else []))

    seen = 0
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        for _ in GDSDataLoader(make(), collate_fn=collate):
            seen += 1
    assert seen == 2
    assert "in collate" in "".join(traceback.format_exception(caught.value))


def test_leaving_the_loop_stops_the_thread_and_frees_the_batches(make: Make) -> None:
    for batch in GDSDataLoader(make(), batch_size=1):
        kept = weakref.ref(batch["image"])
        break
    del batch
    gc.collect()
    assert not threads()
    assert kept() is None


def test_a_loop_that_was_stopped_is_over(make: Make) -> None:
    loop = iter(GDSDataLoader(make(), batch_size=1))
    next(loop)
    loop.close()
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(next(loop, None)), daemon=True)
    asking.start()
    asking.join(20)
    assert found == [None]


@pytest.mark.parametrize("name", ["monai-gds-kvikio", "anything"])
def test_a_loop_may_be_collected_in_a_thread_for_which_it_waits(make: Make, name: str) -> None:
    go_on = threading.Event()

    class Waits(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            assert data["name"] == "case 0" or go_on.wait(30)
            return data

    loop = iter(GDSDataLoader(make(Waits())))
    next(loop)
    collector = threading.Thread(target=loop.close, name=name)
    collector.start()
    collector.join(20)
    stopped = not collector.is_alive()
    go_on.set()
    assert stopped
    for thread in threads():
        thread.join(20)


@pytest.mark.parametrize("name", ["monai-gds-of-the-user", "consumer"])
def test_leaving_the_loop_waits_for_its_thread_whatever_the_consumers_is_called(make: Make, name: str) -> None:
    running: list[bool] = []

    class Slow(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            time.sleep(0 if data["name"] == "case 0" else 0.3)
            return data

    loop = [iter(GDSDataLoader(make(Slow()), batch_size=1))]

    def consume() -> None:
        next(loop[0])
        loop.clear()
        running.extend(thread.is_alive() for thread in threads())

    consumer = threading.Thread(target=consume, name=name)
    consumer.start()
    consumer.join(20)
    assert running == []


def test_the_next_loop_waits_for_the_thread_of_one_that_another_thread_left(make: Make) -> None:
    class Slow(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            time.sleep(0 if data["name"] == "case 0" else 0.5)
            return data

    loader = GDSDataLoader(make(Slow()), batch_size=1)
    loop = iter(loader)
    next(loop)
    (thread,) = threads()
    leaving = threading.Thread(target=loop.close)
    leaving.start()
    leaving.join(20)
    next_loop = iter(loader)
    next(next_loop)
    assert not thread.is_alive()
    next_loop.close()


def test_the_interpreter_may_end_while_a_loop_that_another_thread_began_is_in_torch(tmp_path: Path) -> None:
    """A daemon thread that comes back from a C++ call then would end the process with SIGABRT."""
    said = printed_by(
        """
import sys, threading, time, torch
from monai.transforms import Compose, EnsureTyped, RandomizableTransform
from monai_gds import GDSDataLoader, GDSDataset

entered = threading.Event()

class Slow(RandomizableTransform):
    def __call__(self, data):
        entered.set()
        values = torch.rand(1000, 1000)
        for _ in range(20):
            values = (values @ values).clamp(-1, 1)
        return data

data = [{"image": torch.ones(4) * i} for i in range(9)]
dataset = GDSDataset(data, Compose([EnsureTyped("image"), Slow()]), sys.argv[1], "cpu")
loops = []

def begin():
    loops.append(iter(GDSDataLoader(dataset, batch_size=1)))
    next(loops[0])
    entered.clear()

beginning = threading.Thread(target=begin)
beginning.start()
beginning.join()
entered.wait(60)
loops.clear()
print([thread.name for thread in threading.enumerate() if thread.name == "monai-gds-loader"])
        """,
        str(tmp_path / "cache"),
        whole=True,
    )
    assert said == "['monai-gds-loader']", "its thread still runs when the interpreter ends"


def test_threads_that_share_a_loop_get_each_item_once(make: Make) -> None:
    together = threading.Barrier(2)

    class Order:
        def __iter__(self) -> Iterator[int]:
            with contextlib.suppress(threading.BrokenBarrierError):  # only one thread begins the loop
                together.wait(0.5)
            return iter(range(5))

        def __len__(self) -> int:
            return 5

    loop = iter(GDSDataLoader(make(), batch_size=1, sampler=Order()))
    found: list[str] = []

    def consume() -> None:
        for batch in loop:
            found.extend(batch["name"])

    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join(60)
    assert sorted(found) == [f"case {i}" for i in range(5)]


def test_an_error_is_raised_also_if_the_states_after_it_cannot_be_noted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(place: resume.Place) -> Any:
        raise MemoryError

    monkeypatch.setattr(resume.Place, "made", fails)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    raised = threading.Event()

    def consume() -> None:
        with contextlib.suppress(MemoryError):
            next(iter(GDSDataLoader(make())))
            return
        raised.set()

    threading.Thread(target=consume, daemon=True).start()
    assert raised.wait(60)


def test_a_loop_is_left_for_good_at_the_end_of_a_block(make: Make) -> None:
    with contextlib.closing(iter(GDSDataLoader(make(), batch_size=1))) as loop:  # type: ignore[type-var]
        next(loop)
        assert threads()
    assert not threads()
    with pytest.raises(StopIteration):
        next(loop)


def test_a_loop_may_be_collected_in_a_thread_that_holds_what_its_own_waits_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_over, "_LEAVE_SECONDS", 0.5)
    lock = threading.Lock()

    class Locks(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            with lock if data["name"] != "case 0" else contextlib.nullcontext():
                return data

    loop = [iter(GDSDataLoader(make(Locks()), prefetch=1))]
    with lock:
        next(loop[0])
        loop.append(loop)
        del loop
        gc.collect()  # as it may happen by itself, at any line
    for thread in threads():
        thread.join(20)


def test_items_that_come_twice_are_computed_once(tmp_path: Path) -> None:
    computed: list[int] = []
    transform = mt.Compose([mt.Lambda(lambda n: computed.append(n) or {"x": torch.tensor(n)})])
    dataset = GDSDataset([0, 1, 2], transform, tmp_path / "cache", "cpu", hash_transform=None)
    batches = list(GDSDataLoader(dataset, batch_size=3, sampler=[1, 1, 2, 1, 2, 0]))
    assert [batch["x"].tolist() for batch in batches] == [[1, 1, 2], [1, 2, 0]]
    assert computed == [1, 2, 0]


def test_a_loop_that_was_never_finished_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    printed = printed_by(
        """
import sys, numpy as np
from monai.transforms import Compose, EnsureTyped
from monai_gds import GDSDataset, GDSDataLoader
dataset = GDSDataset([{"x": np.ones(9)}] * 50, Compose([EnsureTyped("x")]), sys.argv[1], device="cpu")
loop = iter(GDSDataLoader(dataset))
print(tuple(next(loop)["x"].shape))
""",
        str(tmp_path / "cache"),
        whole=True,
    )
    assert printed == "(1, 9)"
    assert not list((tmp_path / "cache" / ".tmp").iterdir()), "what was computed is saved"


def test_many_epochs_and_several_loops_at_once(make: Make) -> None:
    loader = GDSDataLoader(make(), batch_size=2)
    for _ in range(10):
        assert [len(batch["name"]) for batch in loader] == [2, 2, 1]
    for one, other in zip(loader, loader, strict=True):
        assert one["name"] == other["name"]


@pytest.mark.parametrize("settings", [{"stats": True}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_begins_loops_of_its_own(make: Make, settings: dict[str, Any], copied: Callable[[Any], Any]) -> None:
    """As one of torch's. It holds no worker, lock or pipe of the loop that ended, or of the one under way."""
    loader = GDSDataLoader(make(), **settings)
    expected = list(loader)
    batches = iter(loader)
    next(batches)
    again = copied(loader)
    assert_same(list(again), expected)
    del again
    gc.collect()
    assert len(list(batches)) == len(expected) - 1
    assert_same(list(loader), expected)


@pytest.mark.parametrize("settings", [{}, {"stats": True}, {"num_workers": 1}], ids=str)
def test_a_loop_that_nobody_iterates_over_draws_nothing(make: Make, settings: dict[str, Any]) -> None:
    """Lightning begins one before that of each epoch for which it makes the loaders again."""

    dataset = make(*augment())

    def batches(unused: bool) -> list[Any]:
        set_determinism(3)
        loader = GDSDataLoader(dataset, shuffle=True, **settings)
        begun = iter(loader) if unused else None
        found = list(loader)
        del begun
        return found

    assert_same(batches(unused=True), batches(unused=False))


def test_set_data_between_epochs(make: Make, volumes: Any) -> None:
    dataset = make()
    loader = GDSDataLoader(dataset, batch_size=1)
    assert len(list(loader)) == 5
    dataset.set_data(volumes[:2])
    assert [batch["name"][0] for batch in loader] == ["case 0", "case 1"]


def test_a_loop_does_not_go_on_in_a_forked_child_but_a_new_one_does(make: Make) -> None:
    loader = GDSDataLoader(make(), batch_size=1)
    loop = iter(loader)
    next(loop)

    def child() -> tuple[str, int]:
        try:
            next(loop)
        except RuntimeError as e:
            return str(e), len(list(loader))
        return "", 0

    message, batches = in_child(child)
    assert "fork" in message
    assert batches == 5
    assert len(list(loop)) == 4


def test_a_forked_child_that_drops_a_loop_leaves_it_to_its_parent(make: Make) -> None:
    """Its workers are not the child's own."""

    class Slow(Pid):
        def __call__(self, data: Any) -> Any:
            time.sleep(0.2)
            return super().__call__(data)

    loops = [with_workers(make(transform=mt.Compose([Slow()])))]
    next(loops[0])

    def child() -> bool:
        loops.clear()
        gc.collect()
        return True

    assert in_child(child)
    assert len(list(loops[0])) == 4, "its workers were not ended"


def test_a_keyboard_interrupt_reaches_the_consumer_and_the_loop_can_go_on(make: Make) -> None:
    waits, interrupted = threading.Event(), threading.Event()

    class Interrupts(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            if not interrupted.is_set():
                assert waits.wait(60)
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGINT)
                assert interrupted.wait(60)
            return data

    list(GDSDataLoader(make()))
    loop = iter(GDSDataLoader(make(Interrupts())))
    with pytest.raises(KeyboardInterrupt):
        waits.set()
        next(loop)
    interrupted.set()
    assert len(list(loop)) == 5


@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupt_while_the_loops_thread_begins_leaves_no_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    begin = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if begins:
            begin(thread)
        if not begins or thread.name == "monai-gds-loader":
            raise KeyboardInterrupt

    loader = GDSDataLoader(make())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook does
            next(iter(loader))
    for thread in threads():
        thread.join(20)
    assert not threads()
    assert len(list(loader)) == 5
    assert kept.tb


def test_an_interrupt_that_loses_a_batch_leaves_room_for_as_many_records(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[Any] = []
    taken = read_ahead.ReadAhead.taken

    def interrupted_once(self: Any, *batch: Any) -> None:
        ahead.append(self)
        if len(ahead) == 2:
            raise KeyboardInterrupt
        taken(self, *batch)

    monkeypatch.setattr(read_ahead.ReadAhead, "taken", interrupted_once)
    dataset = make()
    list(dataset)
    loop = iter(GDSDataLoader(dataset, prefetch=3))
    next(loop)
    time.sleep(0.5)  # the third batch waits to be handed over
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    rest: list[Any] = []
    consumer = threading.Thread(target=lambda: rest.extend(loop), daemon=True)
    consumer.start()
    consumer.join(20)
    assert len(rest) == 3
    assert ahead[-1]._room() == 3


@pytest.mark.parametrize("how", ["plain", "measured", "continued"])
def test_a_loop_that_ctrl_c_ended_is_over_though_a_notebook_keeps_the_traceback(
    make: Make, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def ahead() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) is read_ahead.ReadAhead]

    others = ahead()  # of tests before
    loader = GDSDataLoader(make(), stats=how == "measured")
    if how == "continued":
        loader.load_state_dict(loader.state_dict())
    with monkeypatch.context() as patch:

        def interrupt(hand_over: HandOver) -> None:
            raise KeyboardInterrupt

        patch.setattr(HandOver, "take", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:
            for _ in loader:
                pass
    for thread in threads():
        thread.join(20)
    assert not threads(), "two loops would run the same random transforms at the same time"
    assert all(any(one is other for other in others) for one in ahead()), "records stay in memory"
    assert len(list(loader)) == 5
    assert kept.tb


def test_ctrl_c_at_any_place_of_a_loop_leaves_the_next_one_whole(make: Make) -> None:
    files = [module.__file__ for module in (pass_over, hand_over, read_ahead, resume, later)]
    loader = GDSDataLoader(make(data=[{"x": torch.tensor(i)} for i in range(6)], transform=mt.Identity()), batch_size=2)
    places = itertools.count(1, 5)

    def loop() -> list[int]:
        found = []
        for batch in loader:
            found += batch["x"].tolist()
        return found

    while interrupted(next(places), loop, files, "check"):
        for thread in threads():
            thread.join(20)
        assert not threads(), "the loop was not left"
        assert loop() == [*range(6)]


def _number(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(n)}


def _epochs_of_rank(rank: int, folder: Path) -> list[list[int]]:
    """The items that a rank gets in two epochs."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dataset = GDSDataset(list(range(7)), mt.Compose([mt.Lambda(_number)]), folder / "cache", device="cpu")
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = GDSDataLoader(dataset, batch_size=2, sampler=sampler)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen.append([int(v) for batch in loader for v in batch["x"]])
        assert seen[-1] == list(sampler), (seen, list(sampler))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return seen


def test_distributed_ranks_see_their_own_shards(tmp_path: Path, interpreter: Interpreter) -> None:
    with interpreter.process() as first, interpreter.process() as second:
        for rank, process in enumerate((first, second)):
            process.start(_epochs_of_rank, rank, tmp_path)
        for one, other in zip(first.result(), second.result(), strict=True):
            assert set(one) | set(other) == set(range(7))


EPOCHS = """
import gc, sys
import monai.transforms as mt, torch
from monai_gds import GDSDataset, GDSDataLoader

transform = mt.Compose([mt.Lambda(lambda n: {"x": torch.full((500_000,), float(n))}), mt.RandFlipd("x", prob=0.0)])
loader = GDSDataLoader(GDSDataset(list(range(20)), transform, sys.argv[1], "cpu"), batch_size=2)

def anonymous():
    gc.collect()
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) << 10

for _ in range(24):
    assert sum(float(batch["x"].sum()) for batch in loader) == 500_000 * sum(range(20))
    print(anonymous())
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_epochs(tmp_path: Path) -> None:
    """In an interpreter of its own: what the allocator keeps of other tests' threads comes and goes.

    How much of the last batches is kept when a size is taken varies, by up to 60 MB: the least of four is compared.
    """
    sizes = [int(line) for line in printed_by(EPOCHS, str(tmp_path / "cache")).split()]
    assert len(sizes) == 24
    assert min(sizes[-4:]) - min(sizes[2:6]) < 40 << 20, sizes  # a batch kept per epoch is 72 MB over 18 epochs


def test_what_a_worker_cannot_save_is_left_to_the_loaders_process(tmp_path: Path) -> None:
    dataset = GDSDataset([{"x": 1}], mt.Compose([mt.Lambda(lambda d: {"odd": object()})]), tmp_path, device="cpu")
    answer = draw(dataset.session.for_worker(loads="programs"), 0, (0, 0), torch.device("cpu"), None, {}, None)
    assert answer.saved.how == "busy" and answer.program is None
    with pytest.warns(CacheWarning, match="computed in every epoch"):
        (batch,) = GDSDataLoader(dataset, 1, programs="check", collate_fn=list)
    assert set(batch[0]) == {"odd"}
