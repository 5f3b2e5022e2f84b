"""GDSDataLoader on a CUDA device: batches have arrived, nobody overwrites them, nothing waits for the device."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch
from monai.data import MetaTensor, ThreadDataLoader
from monai.utils import set_determinism

from monai_gds import GDSDataLoader, GDSDataset, available_backends
from monai_gds.folder.writer import process_writer
from monai_gds.tiles import device
from tests.fresh import warm
from tests.machines import in_child
from tests.same import assert_same

pytestmark = pytest.mark.gpu

COUNT = 12
SIZE = 4 << 20

Make = Callable[..., GDSDataset]


def assert_waits_for_no_training(loop: Iterator[Any], batches: int) -> None:
    """Takes all batches of a loop while a second of work is queued after the first, before that work is over."""
    next(loop)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    started = time.perf_counter()
    left = len(list(loop))
    waited = time.perf_counter() - started
    assert not torch.cuda.current_stream().query(), "the training that was queued has ended: the test shows nothing"
    assert left == batches - 1
    assert waited < 0.6


@pytest.fixture(params=["kvikio", "posix"])
def backend(request: pytest.FixtureRequest) -> str:
    found = available_backends("cuda:0")[request.param]
    if not found:
        pytest.skip(f"backend {request.param} does not work on this machine: {found.reason}")
    return str(request.param)


@pytest.fixture(params=[None, "lz4"])
def compression(request: pytest.FixtureRequest) -> Any:
    if request.param is not None and (why := device.why_not()):
        pytest.skip(f"compressed records are not unpacked by this machine's GPU: {why}")
    return request.param


@pytest.fixture
def make(tmp_path: Path, backend: str, compression: Any) -> Make:
    """A dataset of ``COUNT`` items, the number of each in every element of its tensor; filled and verified."""

    def make_dataset(*random: Any, size: int = SIZE, fill: bool = True) -> GDSDataset:
        numbered = mt.Lambda(lambda n: {"x": MetaTensor(torch.full((1, size), float(n))), "n": n})
        dataset = GDSDataset(
            list(range(COUNT)), mt.Compose([numbered, *random]), tmp_path / "cache", 0, backend=backend,
            compression=compression,
        )  # fmt: skip
        for i in range(COUNT if fill else 0):
            dataset.session.begin([i])[0].finish()
        dataset.flush()
        for i in range(COUNT if fill else 0):
            dataset.session.begin([i])[0].finish()
        return dataset

    return make_dataset


@pytest.fixture(autouse=True)
def clean_up() -> Iterator[None]:
    yield
    set_determinism(None)
    process_writer().flush()
    torch.cuda.synchronize()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_are_those_of_thread_data_loader(make: Make, batch_size: int) -> None:
    random = [
        mt.RandGaussianNoised("x", prob=0.7),
        mt.RandSpatialCropSamplesd("x", (64,), num_samples=2, random_size=False),
    ]
    dataset = make(*random)

    def epochs(loader_class: type) -> Any:
        set_determinism(4)
        loader = loader_class(dataset, batch_size=batch_size, shuffle=True)
        return [list(loader), list(loader)]

    expected = epochs(ThreadDataLoader)
    assert expected[0][0]["x"].device == torch.device("cuda:0")
    assert_same(epochs(GDSDataLoader), expected)


def test_an_epoch_is_continued(make: Make) -> None:
    dataset = make(mt.RandGaussianNoised("x", prob=0.7), mt.RandSpatialCropd("x", (64,), random_size=False))

    def fresh(seed: int) -> GDSDataLoader:
        set_determinism(seed)
        return GDSDataLoader(dataset, batch_size=3, shuffle=True)

    loader = fresh(4)
    expected = [list(loader), list(loader)]
    for taken in range(4):
        loader = fresh(4)
        assert_same(list(islice(loop := iter(loader), taken)), expected[0][:taken])
        state = loader.state_dict()
        del loop
        again = fresh(99)
        again.load_state_dict(state)
        assert_same([list(again), list(again)], [expected[0][taken:], expected[1]])


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_slow_consumer_sees_its_own_batch(make: Make, batch_size: int, own_stream: bool) -> None:
    """The device is far behind the host: batches are dropped long before the kernels that read them have run."""
    dataset = make()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    seen = []
    with torch.cuda.stream(stream):
        for _ in range(4):
            for batch in GDSDataLoader(dataset, batch_size=batch_size, prefetch=6):
                torch.cuda._sleep(20_000_000)  # about 10 ms
                low, high = batch["x"].amin(dim=(1, 2)), batch["x"].amax(dim=(1, 2))
                seen.append((batch["n"], low, high))
                del batch, low, high
    torch.cuda.synchronize()
    assert len(seen) == 4 * COUNT // batch_size
    for numbers, low, high in seen:
        assert low.tolist() == high.tolist() == [float(n) for n in numbers]


def test_in_place_work_on_a_batch_reaches_nobody_else(make: Make) -> None:
    dataset = make()
    for _ in range(2):
        for i, batch in enumerate(GDSDataLoader(dataset, batch_size=1)):
            assert float(batch["x"].as_tensor().mean()) == i
            batch["x"].mul_(-7)


def test_nothing_waits_for_the_training_that_is_queued(make: Make) -> None:
    """A batch, random transform with a host synchronisation included, is there while earlier work still runs."""

    class Looks(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            assert float(data["x"].as_tensor()[0, -1]) == data["n"]  # waits for the item
            return data

    dataset = make(Looks())
    list(GDSDataLoader(dataset, batch_size=2))
    assert_waits_for_no_training(iter(GDSDataLoader(dataset, batch_size=2)), COUNT // 2)


def test_metatensors_are_collated_on_the_device(make: Make) -> None:
    dataset = make()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in GDSDataLoader(dataset, batch_size=4):
            assert isinstance(batch["x"], MetaTensor) and batch["x"].is_cuda
        torch.cuda.synchronize()
    copies = [event.name for event in profile.events() if "Memcpy DtoH" in event.name]
    assert not copies


def test_device_memory_does_not_grow(make: Make) -> None:
    loader = GDSDataLoader(make(), batch_size=2, prefetch=4)

    def reserved() -> int:
        for batch in loader:
            batch["x"].sum()
            del batch
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    sizes = [reserved() for _ in range(40)]
    # A batch that comes late for once needs other memory than those before. One that stayed would take it each time.
    assert max(sizes[5:]) <= sizes[5] + 4 * 4 * SIZE, sizes


def test_leaving_half_way_frees_the_device(make: Make) -> None:
    dataset = make()
    list(GDSDataLoader(dataset, batch_size=1))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        loop = iter(GDSDataLoader(dataset, batch_size=1))
        next(loop)
        del loop
    gc.collect()
    torch.cuda.synchronize()
    time.sleep(0.2)  # reads that were under way free their memory later
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before


def test_misses_are_saved_beside_the_training_as_they_were(make: Make, backend: str, tmp_path: Path) -> None:
    class Spoil(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            data["x"].fill_(-1)
            return data

    on_gpu = mt.Lambda(lambda n: {"x": torch.full((1, SIZE), float(n), device="cuda:0")})
    spoiling = GDSDataset(list(range(COUNT)), mt.Compose([on_gpu, Spoil()]), tmp_path / "spoiled", 0, backend=backend)
    with spoiling:
        for batch in GDSDataLoader(spoiling, batch_size=1):
            assert float(batch["x"].max()) == -1
    clean = GDSDataset(list(range(COUNT)), mt.Compose([on_gpu]), tmp_path / "spoiled", 0, backend=backend)
    assert all(map(clean.is_cached, range(COUNT)))
    for i, batch in enumerate(GDSDataLoader(clean, batch_size=1)):
        assert float(batch["x"].min()) == float(batch["x"].max()) == i


def test_a_forked_child_loads_to_the_cpu(make: Make) -> None:
    dataset = make(size=1000)
    list(GDSDataLoader(dataset, batch_size=2))

    def child() -> list[str]:
        return [str(batch["x"].device) for batch in GDSDataLoader(dataset, batch_size=6)]

    assert in_child(child) == ["cpu", "cpu"]


class Pid(mt.Transform):  # type: ignore[misc]
    """A volume, and in which process it was made."""

    def __call__(self, n: int) -> dict[str, Any]:
        return {"x": torch.full((1, 100_000), float(n)), "pid": os.getpid()}


class Where(mt.RandomizableTransform):  # type: ignore[misc]
    def __call__(self, data: Any) -> Any:
        return {**data, "parent": os.getpid(), "device": str(data["x"].device)}


def test_workers_compute_the_misses_and_the_parent_does_the_rest(tmp_path: Path, backend: str) -> None:
    torch.cuda.init()
    dataset = GDSDataset(list(range(6)), mt.Compose([Pid(), Where()]), tmp_path / "cache", 0, backend=backend)
    loader = GDSDataLoader(dataset, num_workers=2, batch_size=2)
    for epoch in range(2):
        batches = list(loader)
        assert torch.cat([batch["x"][:, 0, 0] for batch in batches]).tolist() == list(range(6))
        assert all(batch["x"].is_cuda and batch["device"] == ["cuda:0"] * 2 for batch in batches)
        assert all(pid == os.getpid() for batch in batches for pid in batch["parent"].tolist())
        pids = {pid for batch in batches for pid in batch["pid"].tolist()}
        assert os.getpid() not in pids, f"epoch {epoch}"


def test_an_error_in_the_loop_ends_the_process_as_it_should(tmp_path: Path, backend: str) -> None:
    """Reads are under way then, in threads that are not Python's."""
    code = f"""
import torch
from monai.transforms import Compose, Lambda
from monai_gds import GDSDataLoader, GDSDataset
dataset = GDSDataset(list(range(8)), Compose([Lambda(lambda n: {{"x": torch.full((9_000_000,), float(n))}})]),
                     {str(tmp_path / "cache")!r}, 0, backend={backend!r})
list(GDSDataLoader(dataset))
dataset.flush()
for batch in GDSDataLoader(dataset):
    raise SystemExit(f"step {{int(batch['x'][0, 0])}}")
"""
    done = warm().run("-c", code, whole=True)
    assert (done.returncode, done.stderr.strip().splitlines()[-1:]) == (1, ["step 0"]), done.stderr


class RandBusy(mt.RandomizableTransform):
    """Keeps the device busy for some 20 ms, and returns at once."""

    def __call__(self, item: Any) -> Any:
        torch.cuda._sleep(40_000_000)
        return item


def test_stages_include_their_time_on_the_device(make: Make) -> None:
    loader = GDSDataLoader(make(RandBusy()), stats=True)
    for _ in loader:
        pass
    stats = loader.stats()
    assert stats.hits == COUNT
    assert stats.random_transforms["RandBusy"] > COUNT * 0.01
    assert max(stats.stages, key=stats.stages.__getitem__) == "random transforms"
