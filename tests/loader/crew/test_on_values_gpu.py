"""Batches that workers make on values, on a CUDA device: what arrives, when, and what is left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.utils import set_determinism

from monai_gds import CacheWarning, GDSDataLoader, GDSDataset
from monai_gds.loader.crew import shared_memory
from monai_gds.storage.staging import pin
from tests.loader.test_gpu import assert_waits_for_no_training
from tests.same import assert_same

pytestmark = pytest.mark.gpu

COUNT = 12
SIZE = 1 << 20

Make = Callable[..., GDSDataset]


class Numbered(mt.Transform):  # type: ignore[misc]
    """An item whose tensor holds its number in every element."""

    def __call__(self, n: int) -> dict[str, Any]:
        meta = {"affine": np.eye(4), "table": np.full((80, 80), n)}
        return {"x": MetaTensor(torch.full((1, SIZE), float(n)), meta=meta), "mask": torch.ones(3) * n, "n": n}


class Draws(mt.RandomizableTransform):  # type: ignore[misc]
    """Adds what it draws; notes process and device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.device = device

    def __call__(self, data: Any) -> Any:
        x = data["x"].to(self.device) if self.device else data["x"]
        return {**data, "x": x + self.R.rand(), "by": os.getpid(), "on": str(x.device)}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_dataset(*random: Any) -> GDSDataset:
        return GDSDataset(list(range(COUNT)), mt.Compose([Numbered(), *random]), tmp_path / "cache", 0)

    return make_dataset


@pytest.fixture(autouse=True)
def clean_up() -> Iterator[None]:
    torch.zeros(1, device="cuda")  # so that a fork server starts workers, as in training
    yield
    set_determinism(None)
    gc.collect()
    torch.cuda.synchronize()


def load(dataset: GDSDataset, num_workers: int = 2, **settings: Any) -> GDSDataLoader:
    return GDSDataLoader(dataset, num_workers, **{"programs": "off", **settings})


@pytest.mark.parametrize("batch_size", [1, 3])
def test_without_random_transforms_batches_are_those_of_this_process(make: Make, batch_size: int) -> None:
    """Devices included: tensors on the GPU, numbers and metadata on the CPU."""

    def sorted_meta(batches: Any) -> Any:  # MONAI's sets have another order in another process
        for batch in batches:
            batch["x"].meta = dict(sorted(batch["x"].meta.items(), key=lambda entry: str(entry[0])))
        return batches

    expected = sorted_meta(list(GDSDataLoader(make(), batch_size=batch_size)))
    assert expected[0]["x"].is_cuda and expected[0]["mask"].is_cuda and not expected[0]["n"].is_cuda
    assert_same(sorted_meta(list(load(make(), batch_size=batch_size))), expected)


def test_batches_do_not_depend_on_the_number_of_workers(make: Make) -> None:
    def epochs(num_workers: int) -> Any:
        set_determinism(3)
        loader = load(make(Draws()), num_workers, batch_size=2, shuffle=True)
        batches = [batch for _ in range(2) for batch in loader]
        assert all(batch["x"].is_cuda and set(batch["on"]) == {"cpu"} for batch in batches)
        return [batch["x"].as_tensor() for batch in batches]

    assert_same(epochs(1), epochs(2))


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_slow_consumer_sees_its_own_batch(make: Make, own_stream: bool) -> None:
    """The device is far behind the host: arenas are filled again, and batches dropped, before kernels have run."""
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    loader, seen = load(make(), batch_size=3), []
    with torch.cuda.stream(stream):
        for _ in range(6):
            for batch in loader:
                torch.cuda._sleep(20_000_000)  # about 10 ms
                seen.append((batch["n"], batch["x"].amin(dim=(1, 2)), batch["x"].amax(dim=(1, 2))))
                del batch
    torch.cuda.synchronize()
    for numbers, low, high in seen:
        assert low.tolist() == high.tolist() == [float(n) for n in numbers]


def test_arenas_are_page_locked_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(shared_memory, "pin", lambda address, nbytes: (pinned.append(nbytes), pin(address, nbytes)))
    loader = load(make(), batch_size=2)
    for _ in range(10):
        assert len(list(loader)) == COUNT // 2
    assert 0 < len(pinned) <= 2 * 2 + 5, "at most as many as there may be arenas"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        list(loader)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "Memcpy HtoD" in event.name]
    assert names and all("Pinned" in name for name in names), names


def test_page_locking_that_is_refused_costs_only_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "pin", lambda address, nbytes: pin(0, nbytes))
    assert torch.cat([batch["x"][:, 0, 0] for batch in load(make())]).tolist() == list(range(COUNT))


def test_a_batch_that_finds_no_room_is_pickled(make: Make) -> None:
    with pytest.warns(CacheWarning, match="prefetch_bytes"):
        batches = list(load(make(), batch_size=2, prefetch_bytes=1e5))
    assert torch.cat([batch["x"][:, 0, 0] for batch in batches]).tolist() == list(range(COUNT))
    assert all(batch["x"].is_cuda for batch in batches)


def test_transforms_that_name_the_device_run_here_on_it(make: Make) -> None:
    def epoch(num_workers: int) -> Any:
        set_determinism(5)
        batches = list(
            load(make(mt.RandScaleIntensityd("x", 0.5, prob=1.0), Draws("cuda:0")), num_workers, batch_size=2)
        )
        assert {pid for batch in batches for pid in batch["by"].tolist()} == {os.getpid()}
        assert {name for batch in batches for name in batch["on"]} == {"cuda:0"}
        return [batch["x"].as_tensor() for batch in batches]

    assert_same(epoch(1), epoch(2))


def test_nothing_waits_for_the_training_that_is_queued(make: Make) -> None:
    loader = load(make(), batch_size=2)
    list(loader)
    assert_waits_for_no_training(iter(loader), COUNT // 2)


def test_leaving_half_way_frees_device_and_host(make: Make) -> None:
    def arenas() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:monai-gds-batch")

    list(load(make()))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loop = iter(load(make()))
    next(loop)
    assert arenas()
    del loop
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert not arenas()


class RandCollects(mt.RandomizableTransform):
    """Collects garbage, as may happen at any line."""

    def __call__(self, data: Any) -> Any:
        gc.collect()
        return data


def test_a_forked_worker_frees_no_tensor_of_the_device(make: Make) -> None:
    """Garbage of this process waits for the collector, in memory that another stream has used, when it is forked."""
    for _ in range(2):
        for batch in GDSDataLoader(make(RandCollects()), batch_size=1):
            circle: list[object] = [batch]
            circle.append(circle)
            del batch, circle
        loader = GDSDataLoader(make(RandCollects()), 1, batch_size=1)
        assert len(list(loader)) == COUNT
        (crew,) = loader.idle
        assert crew._generation == 0, "no worker was killed"
