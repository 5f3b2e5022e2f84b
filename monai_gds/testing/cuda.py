"""Further tests for a CUDA target: streams, and memory that changes hands.

The scenarios are functions that return whether the bytes were right. They are of what a backend can break that writes
to the device, or allocates there, by itself. Tests of ours remove one safeguard at a time, and check that they notice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from monai_gds.storage import Reads, Storage, open_storage, staging
from monai_gds.testing.contract import BackendContract
from monai_gds.testing.tools import BLOB_BYTES, assert_bytes, bytes_of

#: Clock cycles that keep a stream busy for some tenths of a second: far longer than anything here takes.
LONG = 600_000_000

#: Gets a storage, a file, its bytes and the stream that uses them; returns whether the bytes were right.
Scenario = Callable[[Storage, Path, bytes, torch.cuda.Stream], bool]


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _stream(storage: Storage) -> torch.cuda.Stream:
    return torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]


def _load(storage: Storage, path: Path, *ranges: tuple[int, int]) -> list[torch.Tensor]:
    return storage.load(Reads.of(str(path), ranges)).wait()


def _fill(storage: Storage, path: Path, offset: int, dest: torch.Tensor) -> None:
    storage.fill(Reads.of(str(path), [(offset, dest.numel())]), [dest]).wait()


def slow_consumer_keeps_its_data(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether a consumer that uses and frees each tensor late sees its own bytes and not those of the next load.

    Fails when ``staging.hand_off`` does not record the tensors on the consumer's stream.
    """
    nbytes = 12 << 20
    seen = []
    with torch.cuda.stream(consumer):
        for i in range(8):
            (tensor,) = _load(storage, path, (i * 4096, nbytes))
            _sleep(LONG // 4)
            seen.append(tensor.clone())
            del tensor  # the host is done with it, the stream is not
    torch.cuda.synchronize(storage.device)
    return all(bytes_of(t) == data[i * 4096 : i * 4096 + nbytes] for i, t in enumerate(seen))


def refilled_after_use(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether a tensor that is read into again keeps its old bytes for the work that was queued before.

    Fails when ``staging.adopt`` does not make the copy stream wait, and when a backend that writes past that stream
    does not wait for it.
    """
    nbytes = 9 << 20
    with torch.cuda.stream(consumer):
        dest = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=storage.device)
        _sleep(LONG)
        before = dest.clone()
        _fill(storage, path, 3, dest)
        after = dest.clone()
    torch.cuda.synchronize(storage.device)
    return bytes_of(before) == b"\xa5" * nbytes and bytes_of(after) == data[3 : 3 + nbytes]


def safe_from_another_backend(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether what is loaded is safe from copies of another backend into the same memory that are still under way.

    For a backend that writes to the device by itself. Buffers come from the copy stream's pool, and that stream's order
    protects only what goes through it: such a backend must wait for it, also before it fills a fresh buffer.
    """
    nbytes = 20 << 20
    torch.cuda.synchronize(storage.device)
    torch.cuda.empty_cache()
    with torch.cuda.stream(staging.copy_stream(storage.device)):
        _sleep(LONG)
    with closing(open_storage("posix", storage.device)) as posix:
        posix.load(Reads.of(str(path), [(0, nbytes)]))  # nobody waits: the block is free, its copies are not over
    with torch.cuda.stream(consumer):
        (seen,) = _load(storage, path, (100, nbytes))
    torch.cuda.synchronize(storage.device)
    return bytes_of(seen) == data[100 : 100 + nbytes]


_SCENARIOS = (slow_consumer_keeps_its_data, refilled_after_use, safe_from_another_backend)


@pytest.mark.gpu
class CudaBackendContract(BackendContract):
    """What a backend promises for a CUDA target."""

    @pytest.fixture(params=["default stream", "another stream"])
    def consumer(self, request: pytest.FixtureRequest, storage: Storage) -> torch.cuda.Stream:
        """The stream that uses what was loaded."""
        if request.param == "default stream":
            return torch.cuda.default_stream(storage.device)
        return _stream(storage)

    @pytest.mark.parametrize("scenario", _SCENARIOS, ids=lambda scenario: scenario.__name__)
    def test_memory_is_safe(
        self, storage: Storage, blob: Path, data: bytes, consumer: torch.cuda.Stream, scenario: Scenario
    ) -> None:
        assert scenario(storage, blob, data, consumer), scenario.__doc__

    def test_fills_host_memory_too(self, storage: Storage, blob: Path, data: bytes) -> None:
        host, device = torch.zeros(9 << 20, dtype=torch.uint8), self.dest(storage, 9 << 20)
        self.fill(storage, (blob, 5, host), (blob, 6, device), (blob, 7, host[:0])).wait()
        assert_bytes(host, data[5 : 5 + (9 << 20)])
        assert_bytes(device, data[6 : 6 + (9 << 20)])

    def test_leaves_the_current_device_and_stream_alone(self, storage: Storage, blob: Path) -> None:
        stream = _stream(storage)
        with torch.cuda.stream(stream):
            _load(storage, blob, (0, 1 << 20))
            _fill(storage, blob, 0, self.dest(storage, 100))
            assert torch.cuda.current_stream(storage.device) == stream

    def test_loads_while_the_default_stream_is_busy(self, storage: Storage, blob: Path, data: bytes) -> None:
        """Reading ahead must not wait for the training that it runs ahead of."""
        _load(storage, blob, (0, BLOB_BYTES))
        busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
        _sleep(LONG)
        busy.record(torch.cuda.default_stream(storage.device))
        with torch.cuda.stream(_stream(storage)):
            (tensor,) = _load(storage, blob, (0, BLOB_BYTES))
            torch.cuda.current_stream(storage.device).synchronize()
        busy_still = not busy.query()  # type: ignore[no-untyped-call]
        assert busy_still, "it waited for the default stream"
        assert_bytes(tensor, data)
