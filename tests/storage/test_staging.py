"""Pinned staging and stream hand-off; and that the contract's scenarios notice each safeguard that is missing.

The latter take one safeguard out at a time, and expect the scenario to see corrupted bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from monai_gds.base.stages import DIRECT
from monai_gds.storage import Pending, Reads, Storage, resolve_device, staging
from monai_gds.storage.backend import Backend
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.testing import cuda as scenarios
from monai_gds.testing.cuda import LONG, Scenario
from tests.storage import streams
from tests.storage.sample_reaching_gpu import SampleReachingGpu

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return resolve_device("cuda")


def kvikio_reaching_gpu(device: torch.device) -> Backend:
    """A kvikio backend that gives KvikIO device memory, as it does where cuFile works."""
    pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
    from monai_gds.storage.plain.kvikio import KvikioBackend

    backend = KvikioBackend(device)
    backend.served_by = lambda path, expected: DIRECT  # type: ignore[method-assign]
    return backend


# Safeguards that are taken out. Each stands in for the function of the same name without "_without_…".


def adopt_without_waiting(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    for dest in dests:
        dest.record_stream(staging.copy_stream(device))


def adopt_without_recording(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    staging.copy_stream(device).wait_stream(torch.cuda.current_stream(device))


def hand_off_without_waiting(dests: Sequence[torch.Tensor], device: torch.device, **_: object) -> None:
    for dest in dests:
        dest.record_stream(torch.cuda.current_stream(device))


def hand_off_without_recording(
    dests: Sequence[torch.Tensor], device: torch.device, *, after: torch.cuda.Event, **_: object
) -> None:
    torch.cuda.current_stream(device).wait_event(after)


def synchronize_without_waiting(event: torch.cuda.Event) -> None:
    """In place of torch.cuda.Event.synchronize, by which a backend that reaches the GPU waits for the copy stream."""


@pytest.mark.parametrize(
    ("backend", "broken", "scenario"),
    [
        (PosixBackend, hand_off_without_waiting, streams.handed_over),
        (PosixBackend, hand_off_without_waiting, streams.handed_over_to_every_stream),
        (PosixBackend, hand_off_without_recording, scenarios.slow_consumer_keeps_its_data),
        (PosixBackend, adopt_without_waiting, scenarios.refilled_after_use),
        (PosixBackend, adopt_without_recording, streams.dropped_destination_is_not_reused),
        (SampleReachingGpu, synchronize_without_waiting, scenarios.refilled_after_use),
        (SampleReachingGpu, synchronize_without_waiting, scenarios.safe_from_another_backend),
        (SampleReachingGpu, hand_off_without_recording, scenarios.slow_consumer_keeps_its_data),
        (kvikio_reaching_gpu, synchronize_without_waiting, scenarios.refilled_after_use),
        (kvikio_reaching_gpu, synchronize_without_waiting, scenarios.safe_from_another_backend),
        (kvikio_reaching_gpu, hand_off_without_recording, scenarios.slow_consumer_keeps_its_data),
    ],
    ids=lambda value: value.__name__,
)
def test_the_scenarios_notice_a_missing_safeguard(
    backend: Callable[[torch.device], Backend],
    broken: Callable[..., None],
    scenario: Scenario,
    device: torch.device,
    blob: Path,
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = torch.cuda.Stream(device)
    with closing(Storage(backend(device))) as storage:
        storage.load(Reads.of(str(blob), [(0, len(data))])).wait()  # threads, slots and streams exist
        assert scenario(storage, blob, data, consumer), "it holds with everything in place"
        name = broken.__name__.partition("_without_")[0]
        with monkeypatch.context() as patch:
            patch.setattr(staging if hasattr(staging, name) else torch.cuda.Event, name, broken)
            intact = scenario(storage, blob, data, consumer)
        torch.cuda.synchronize(device)
        assert not intact, f"with {broken.__name__} the bytes should have been corrupted"


def test_the_scenarios_notice_a_pending_that_only_the_first_stream_waits_for(
    device: torch.device, blob: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Pending._order

    def order_once(pending: Pending) -> None:
        if not pending._ordered:
            order(pending)

    with closing(Storage(PosixBackend(device))) as storage, monkeypatch.context() as patch:
        storage.load(Reads.of(str(blob), [(0, len(data))])).wait()
        patch.setattr(Pending, "_order", order_once)
        intact = streams.handed_over_to_every_stream(storage, blob, data, torch.cuda.Stream(device))
    torch.cuda.synchronize(device)
    assert not intact


def test_a_slot_is_refilled_only_after_its_copy(device: torch.device) -> None:
    """Fails when ``StagingPool.acquire`` does not wait for the slot's event."""
    pool = staging.StagingPool(device, slots=1, slot_bytes=1 << 20)
    with torch.cuda.stream(staging.copy_stream(device)):
        torch.cuda._sleep(LONG)
    dests = [torch.zeros(1 << 20, dtype=torch.uint8, device=device) for _ in range(3)]
    torch.cuda.default_stream(device).synchronize()
    for value, dest in enumerate(dests, start=1):
        slot = pool.acquire()
        slot.buffer.fill_(value)
        pool.upload(slot, [(0, dest)])
    torch.cuda.synchronize(device)
    assert [(int(d.min()), int(d.max())) for d in dests] == [(1, 1), (2, 2), (3, 3)]
    assert pool.nbytes == 1 << 20


def test_more_threads_than_slots_take_turns(device: torch.device) -> None:
    pool = staging.StagingPool(device, slots=2, slot_bytes=1 << 16)
    dests = [torch.zeros(1 << 16, dtype=torch.uint8, device=device) for _ in range(64)]
    torch.cuda.synchronize(device)

    def work(part: int) -> None:
        for i in range(part, 64, 16):
            slot = pool.acquire()
            slot.buffer.fill_(i)
            if i % 5:
                pool.upload(slot, [(0, dests[i])])
            else:
                pool.release(slot)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    torch.cuda.synchronize(device)
    assert [int(d[-1]) for d in dests] == [i if i % 5 else 0 for i in range(64)]
    assert pool.nbytes <= 2 << 16


def test_a_failed_upload_gives_its_slot_back(device: torch.device) -> None:
    pool = staging.StagingPool(device, slots=1, slot_bytes=1 << 16)
    for _ in range(3):
        slot = pool.acquire()
        with pytest.raises(ValueError, match="of a slot: too many, or strided"):
            pool.upload(slot, [(0, torch.zeros((3, 1 << 16), device=device)[:, :5])])
    pool.release(pool.acquire())


def test_a_copy_beyond_the_end_of_a_slot_is_refused(device: torch.device) -> None:
    pool = staging.StagingPool(device, slots=1, slot_bytes=1 << 16)
    dest = torch.zeros(1 << 15, dtype=torch.uint8, device=device)
    for offset in (-1, (1 << 15) + 1):
        with pytest.raises(ValueError, match=f"from {offset} of a slot"):
            pool.upload(pool.acquire(), [(offset, dest)])
    pool.upload(pool.acquire(), [(1 << 15, dest)])


def test_a_thread_in_which_cuda_was_never_used_uploads(device: torch.device) -> None:
    """The driver, unlike CUDA's runtime, needs the device's context to be current in the thread."""
    pool = staging.StagingPool(device, slots=1, slot_bytes=1 << 16)
    slot, dest = pool.acquire(), torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    slot.buffer.fill_(7)
    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(pool.upload, slot, [(0, dest)]).result(30)
    torch.cuda.synchronize(device)
    assert bool((dest == 7).all())


def test_slots_that_cannot_be_made_block_nobody(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> staging.StagingSlot:
        raise RuntimeError("out of pinned memory")

    pool = staging.StagingPool(device, slots=1)
    monkeypatch.setattr(staging, "StagingSlot", refuse)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="pinned"):
            pool.acquire()
