"""Pinned staging and stream hand-off; and that the contract's memory tests notice each piece that is missing.

The latter take one safeguard of ``staging.py`` out and expect the scenario of the contract to see corrupted bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monai_gds.storage import Storage, resolve_device, staging
from tests.storage import contract
from tests.storage.contract import LONG, opened

pytestmark = pytest.mark.gpu

Scenario = Callable[[Storage, Path, bytes, torch.cuda.Stream], bool]


@pytest.fixture
def device() -> torch.device:
    return resolve_device("cuda")


@pytest.mark.parametrize(
    ("backend", "owner", "safeguard", "scenario"),
    [
        ("posix", "Stream", "wait_stream", contract.handed_over),
        ("posix", "Tensor", "record_stream", contract.slow_consumer_keeps_its_data),
        ("posix", "Stream", "wait_event", contract.refilled_after_use),
        ("posix", "Tensor", "record_stream", contract.dropped_destination_is_not_reused),
        ("kvikio", "Tensor", "record_stream", contract.slow_consumer_keeps_its_data),
        ("kvikio", "Event", "synchronize", contract.refilled_after_use),
    ],
)
def test_the_contract_notices_a_missing_safeguard(
    backend: str,
    owner: str,
    safeguard: str,
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
        storage.load(str(blob), [(0, contract.BLOB_BYTES)]).wait()  # threads, slots and streams exist
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        assert scenario(storage, blob, data, consumer), "it holds with everything in place"
        classes = {"Stream": torch.cuda.Stream, "Tensor": torch.Tensor, "Event": torch.cuda.Event}
        with monkeypatch.context() as patch:
            patch.setattr(classes[owner], safeguard, lambda *_: None)
            intact = scenario(storage, blob, data, consumer)
        torch.cuda.synchronize(device)
        assert not intact, f"without {owner}.{safeguard} the bytes should have been corrupted"


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
        with pytest.raises((RuntimeError, TypeError)):
            pool.upload(slot, torch.zeros((3, 1 << 16), device=device)[:, :5])
    pool.release(pool.acquire())


def test_slots_that_cannot_be_made_block_nobody(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> staging.StagingSlot:
        raise RuntimeError("out of pinned memory")

    pool = staging.StagingPool(device, slots=1)
    monkeypatch.setattr(staging, "StagingSlot", refuse)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="pinned"):
            pool.acquire()
