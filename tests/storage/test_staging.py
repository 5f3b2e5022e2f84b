"""Pinned staging and stream hand-off; and that the contract's memory tests notice each piece that is missing.

The latter take one safeguard of ``staging.py`` out and expect the scenario of the contract to see corrupted bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from monai_gds.storage import Storage, kvikio, resolve_device, staging
from tests.storage import contract
from tests.storage.contract import LONG, opened

pytestmark = pytest.mark.gpu

Scenario = Callable[[Storage, Path, bytes, torch.cuda.Stream], bool]


@pytest.fixture
def device() -> torch.device:
    return resolve_device("cuda")


# staging.adopt and staging.hand_off, each with one safeguard taken out.


def adopt_without_waiting(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    for dest in dests:
        dest.record_stream(staging.copy_stream(device))


def adopt_without_recording(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    staging.copy_stream(device).wait_stream(torch.cuda.current_stream(device))


def hand_off_without_waiting(dests: Sequence[torch.Tensor], device: torch.device, *, arrived: bool = False) -> None:
    for dest in dests:
        dest.record_stream(torch.cuda.current_stream(device))


def hand_off_without_recording(dests: Sequence[torch.Tensor], device: torch.device, *, arrived: bool = False) -> None:
    torch.cuda.current_stream(device).wait_stream(staging.copy_stream(device))


def without_keeping(dests: Sequence[torch.Tensor], device: torch.device) -> None:
    """In place of kvikio.keep_for_current_stream."""


def without_synchronizing(stream: torch.cuda.Stream) -> None:
    """In place of torch.cuda.Stream.synchronize."""


@pytest.mark.parametrize(
    ("backend", "name", "broken", "scenario"),
    [
        ("posix", "hand_off", hand_off_without_waiting, contract.handed_over),
        ("posix", "hand_off", hand_off_without_recording, contract.slow_consumer_keeps_its_data),
        ("posix", "adopt", adopt_without_waiting, contract.refilled_after_use),
        ("posix", "adopt", adopt_without_recording, contract.dropped_destination_is_not_reused),
        ("kvikio", "keep_for_current_stream", without_keeping, contract.slow_consumer_keeps_its_data),
        ("kvikio", "synchronize", without_synchronizing, contract.refilled_after_use),
        ("kvikio", "pool_stream", staging.copy_stream, contract.safe_from_another_backend),
    ],
)
def test_the_contract_notices_a_missing_safeguard(
    backend: str,
    name: str,
    broken: Callable[..., None],
    scenario: Scenario,
    device: torch.device,
    blob: Path,
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "kvikio":
        pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
    consumer = torch.cuda.Stream(device)
    with opened(backend, "cuda") as storage:
        if isinstance(storage, kvikio.KvikioStorage):
            storage._direct = True  # the path that has safeguards of its own
        storage.load(str(blob), [(0, contract.BLOB_BYTES)]).wait()  # threads, slots and streams exist
        assert scenario(storage, blob, data, consumer), "it holds with everything in place"
        with monkeypatch.context() as patch:
            owner = next(o for o in (staging, kvikio, torch.cuda.Stream) if hasattr(o, name))
            patch.setattr(owner, name, broken)
            intact = scenario(storage, blob, data, consumer)
        torch.cuda.synchronize(device)
        assert not intact, f"with {broken.__name__} the bytes should have been corrupted"


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
        pool.upload(slot, dest)
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
                pool.upload(slot, dests[i])
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
        with pytest.raises(ValueError, match="do not fit into"):
            pool.upload(slot, torch.zeros((3, 1 << 16), device=device)[:, :5])
    pool.release(pool.acquire())


def test_a_copy_beyond_the_end_of_a_slot_is_refused(device: torch.device) -> None:
    pool = staging.StagingPool(device, slots=1, slot_bytes=1 << 16)
    dest = torch.zeros(1 << 15, dtype=torch.uint8, device=device)
    for offset in (-1, (1 << 15) + 1):
        with pytest.raises(ValueError, match=f"from {offset} of a slot"):
            pool.upload(pool.acquire(), dest, offset)
    pool.upload(pool.acquire(), dest, 1 << 15)


def test_a_thread_in_which_cuda_was_never_used_uploads(device: torch.device) -> None:
    """The driver, unlike CUDA's runtime, needs the device's context to be current in the thread."""
    pool = staging.StagingPool(device, slots=1, slot_bytes=1 << 16)
    slot, dest = pool.acquire(), torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    slot.buffer.fill_(7)
    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(pool.upload, slot, dest).result(30)
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
