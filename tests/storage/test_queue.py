"""The base for completion queues: the contract over a sample backend, and devices that behave badly."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage import Pending, Reads, Storage, queue, staging
from monai_gds.storage.backend import Availability
from monai_gds.storage.queue import LINGER, Command, QueueBackend, _Pump
from monai_gds.testing import BackendContract
from monai_gds.testing.tools import bytes_of, content, descriptors
from tests.fresh import warm
from tests.interrupts import interrupted
from tests.polls import until
from tests.storage import sample_queue_backend, simulated
from tests.storage.full_contract import FullContract
from tests.storage.sample_queue_backend import SampleQueueBackend

CPU = torch.device("cpu")


class TestSampleQueueBackend(FullContract):
    """A backend that was written from the documentation alone."""

    @pytest.fixture
    def backend(self) -> SampleQueueBackend:
        return SampleQueueBackend(CPU)


class TestStagedSimulated(BackendContract):
    """The same for a simulated GPU, through staging slots."""

    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[SampleQueueBackend]:
        gpu = simulated.install_gpu(monkeypatch)
        yield SampleQueueBackend(simulated.GPU)
        gpu.stream.close()

    def dest(self, storage: Storage, nbytes: int, fill: int = 0xA5) -> torch.Tensor:
        return simulated.on_device(torch.full((nbytes,), fill, dtype=torch.uint8))


def test_a_queue_backend_is_short() -> None:
    assert len(Path(sample_queue_backend.__file__).read_text().splitlines()) <= 150


class Device(QueueBackend):
    """A queue that completes commands when it is polled, in whatever way a test wants.

    Attributes:
        depth: commands in flight at once.
        newest_first: whether the last command completes first.
        most: bytes that one command reads at most.
        refuse, broken: called with each command when it is submitted, or polled; may raise.
        log: (path, offset) of each command that was submitted.
    """

    name = "device"
    piece_bytes = 64 << 10
    group_bytes = 256 << 10

    def __init__(self, depth: int = 4, newest_first: bool = False, most: int = 1 << 30) -> None:
        super().__init__(CPU)
        self.depth, self.newest_first, self.most = depth, newest_first, most
        self.refuse: Callable[[Command], Any] = lambda command: None
        self.broken: Callable[[Command], Any] = lambda command: None
        self.waiting: list[Command] = []
        self.log: list[tuple[str, int]] = []
        self.open_now = self.most_open = self.most_in_flight = 0
        self.paths: dict[int, str] = {}
        self.go = threading.Event()
        self.go.set()

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "for tests")

    def _open(self, path: str, expected: Any) -> int:
        fd: int = super()._open(path, expected)
        self.paths[fd] = Path(path).name
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        return fd

    def _close(self, handle: int) -> None:
        super()._close(handle)
        self.open_now -= 1

    def _submit(self, command: Command) -> bool:
        if len(self.waiting) == self.depth:
            return False
        self.refuse(command)
        self.log.append((self.paths[command.handle], command.offset))
        self.waiting.append(command)
        self.most_in_flight = max(self.most_in_flight, len(self.waiting))
        return True

    def _poll(self) -> Iterable[tuple[Command, int | Exception]]:
        if not self.go.wait(0.001):
            return []
        command = self.waiting[-1 if self.newest_first else 0]
        self.broken(command)
        self.waiting.remove(command)
        try:
            with open(command.handle, "rb", buffering=0, closefd=False) as file:
                file.seek(command.offset)
                return [(command, file.readinto(command.dest.numpy().data[: self.most]) or 0)]
        except OSError as e:
            return [(command, e)]


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


def make(folder: Path, *sizes: int) -> list[str]:
    """Files of these sizes, with the content that belongs to their number."""
    names = [str(folder / f"{i}.bin") for i in range(len(sizes))]
    for i, (name, nbytes) in enumerate(zip(names, sizes, strict=True)):
        Path(name).write_bytes(content(nbytes, i))
    return names


def start(device: Device, *ranges: tuple[str, int, int]) -> Pending:
    """Reads (path, offset, bytes) each, in one submission."""
    reads = Reads.join([Reads.of(path, [(offset, nbytes)]) for path, offset, nbytes in ranges])
    return Storage(device).load(reads)


@pytest.mark.parametrize("depth", [1, 3, 64])
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("most", [1 << 30, 4097])
def test_commands_complete_in_any_order_and_in_parts(tmp_path: Path, depth: int, newest_first: bool, most: int) -> None:
    device = Device(depth, newest_first, most)
    names = make(tmp_path, 500_000, 1, 70_001, 0)
    tensors = start(device, (names[0], 1, 499_999), (names[1], 0, 1), (names[2], 0, 70_001), (names[3], 0, 0)).wait()
    expected = [content(500_000, 0)[1:], content(1, 1), content(70_001, 2), b""]
    assert [bytes_of(t) for t in tensors] == expected
    assert device.most_in_flight <= depth
    device.close()
    assert device.open_now == 0


def test_submissions_are_served_in_the_order_in_which_they_came(device: Device, tmp_path: Path) -> None:
    names = make(tmp_path, 2_000_000, 300_000, 300_000)
    device.go.clear()
    pendings = [start(device, (name, 0, Path(name).stat().st_size)) for name in names]
    device.go.set()
    for i, pending in enumerate(pendings):
        assert bytes_of(pending.wait()[0]) == content((2_000_000, 300_000, 300_000)[i], i)
    order = [name for name, _ in device.log]
    assert order == sorted(order)
    assert [at for name, at in device.log if name == "0.bin"] == sorted(
        at for name, at in device.log if name == "0.bin"
    )


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    device = Device(depth=1000)
    names = make(tmp_path, *[70_000] * 300)
    before = descriptors()
    tensors = start(device, *[(name, 0, 70_000) for name in names]).wait()
    assert all(bytes_of(t) == content(70_000, i) for i, t in enumerate(tensors))
    assert device.most_open <= device.open_files
    device.close()
    assert descriptors() <= before


def test_a_refused_command_fails_its_file_alone(device: Device, tmp_path: Path) -> None:
    names = make(tmp_path, 300_000, 300_000, 300_000)

    def refuse(command: Command) -> None:
        if device.paths[command.handle] == "1.bin" and command.offset:
            raise RuntimeError("no such block")

    device.refuse = refuse
    pending = start(device, *[(name, 0, 300_000) for name in names])
    assert list(pending.errors) == [1]
    with pytest.raises(StorageError, match=r"no such block.*1\.bin"):
        pending.wait()
    assert [bytes_of(pending.tensors[i]) == content(300_000, i) for i in (0, 2)] == [True, True]
    assert device.open_now == 0


def test_the_rest_of_a_file_that_failed_is_not_read(tmp_path: Path) -> None:
    device = Device(depth=1)
    names = make(tmp_path, 10, 5_000_000)
    with pytest.raises(StorageError, match=r"ends at byte 10.*0\.bin"):
        start(device, (names[0], 0, 2_000_000), (names[1], 0, 5_000_000)).wait()
    assert [name for name, _ in device.log].count("0.bin") <= 3


def test_an_error_of_closing_fails_the_file(tmp_path: Path) -> None:
    """A backend may find out with its last command that it read the blocks of another file."""

    class Suspicious(Device):
        def _close(self, handle: int) -> None:
            name = self.paths[handle]
            super()._close(handle)
            if name == "0.bin":
                raise FileChanged(f"{tmp_path / name} was changed meanwhile")

    device = Suspicious()
    names = make(tmp_path, 100_000, 100_000)
    pending = start(device, *[(name, 0, 100_000) for name in names])
    assert {file: type(e) for file, e in pending.errors.items()} == {0: FileChanged}
    device.close()


def test_a_broken_queue_fails_what_is_there_and_not_what_comes(device: Device, tmp_path: Path) -> None:
    names = make(tmp_path, 300_000, 300_000)

    def broken(command: Command) -> None:
        raise RuntimeError("the device is gone")

    device.broken = broken
    device.go.clear()
    pendings = [start(device, (name, 0, 300_000)) for name in names]
    device.go.set()
    for name, pending in zip(names, pendings, strict=True):
        with pytest.raises(StorageError, match="the device is gone") as caught:
            pending.wait()
        assert caught.value.filename == name
    device.broken = lambda command: None
    device.waiting.clear()
    assert bytes_of(start(device, (names[1], 0, 300_000)).wait()[0]) == content(300_000, 1)


def test_a_broken_queue_takes_no_slots_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = simulated.install_gpu(monkeypatch, slots=4)

    class Broken(SampleQueueBackend):
        def _poll(self) -> Iterable[tuple[Command, int | Exception]]:
            raise RuntimeError("the device is gone")

    names = make(tmp_path, 20 << 20)
    for kind, errors in ((Broken, 1), (Broken, 1), (SampleQueueBackend, 0)):
        backend = kind(simulated.GPU)
        pending = start(backend, (names[0], 0, 20 << 20))  # type: ignore[arg-type]
        assert len(pending.errors) == errors
        backend.close()
    assert bytes_of(pending.tensors[0]) == content(20 << 20)
    gpu.stream.close()


def test_pinned_memory_that_cannot_be_had_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = simulated.install_gpu(monkeypatch)

    def refuse(nbytes: int) -> None:
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(staging, "StagingSlot", refuse)
    backend = SampleQueueBackend(simulated.GPU)
    names = make(tmp_path, 3 << 20, 100)
    pending = start(backend, (names[0], 0, 3 << 20), (names[1], 0, 100))  # type: ignore[arg-type]
    assert list(pending.errors) == [0, 1]
    assert all(type(e) is RuntimeError and "out of pinned memory" in str(e) for e in pending.errors.values())
    backend.close()
    gpu.stream.close()


@pytest.mark.parametrize("reads", [[(0, 0)], [(0, 0), (70_000, 0)], [(0, 0), (70_000, 5)]])
def test_nothing_is_copied_of_an_empty_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[int, int]]
) -> None:
    gpu = simulated.install_gpu(monkeypatch)
    copied: list[int] = []
    send = simulated.Slot.send

    def noting(self: simulated.Slot, address: int, nbytes: int, *how: Any) -> None:
        copied.append(nbytes)
        send(self, address, nbytes, *how)

    monkeypatch.setattr(simulated.Slot, "send", noting)
    backend = SampleQueueBackend(simulated.GPU)
    (name,) = make(tmp_path, 80_000)
    pending = start(backend, *((name, offset, nbytes) for offset, nbytes in reads))  # type: ignore[arg-type]
    tensors = pending.wait()
    backend.close()
    gpu.stream.close()
    assert [tensor.nbytes for tensor in tensors] == [nbytes for _, nbytes in reads]
    assert copied == [nbytes for _, nbytes in reads if nbytes]


# Threads.


def test_reads_all_the_same_where_no_thread_can_be_started(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = make(tmp_path, 300_000)
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pending = start(device, (names[0], 0, 300_000))
    assert pending.done
    assert bytes_of(pending.wait()[0]) == content(300_000)
    monkeypatch.setattr(threading.Thread, "start", begin)  # the executor may still have the task it could not start
    for _ in range(3):
        assert bytes_of(start(device, (names[0], 0, 300_000)).wait()[0]) == content(300_000)


def test_an_interrupt_of_a_caller_that_works_comes_when_nothing_is_under_way(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    pressed = [False]

    def press(command: Command) -> None:
        if not pressed[0]:
            pressed[0] = True
            raise KeyboardInterrupt

    names = make(tmp_path, 300_000)
    dest = torch.zeros(300_000, dtype=torch.uint8)
    device.broken = press
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", refuse)
        with pytest.raises(KeyboardInterrupt):
            Storage(device).fill(Reads.of(names[0], [(0, 300_000)]), [dest])
    assert not device.waiting
    assert device.open_now == 0
    assert bytes_of(dest) == content(300_000)
    assert bytes_of(start(device, (names[0], 0, 300_000)).wait()[0]) == content(300_000)


def test_ctrl_c_at_any_place_of_a_submission_leaves_the_queue_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content(100))
    storage = Storage(SampleQueueBackend(torch.device("cpu")))
    found: list[bytes] = []

    def load() -> None:
        (tensor,) = storage.load(Reads.of(path, [(0, 100)])).wait()
        found.append(bytes_of(tensor))

    load()
    for n in itertools.count(1, 2):
        more = interrupted(n, load, [queue.__file__], "check")
        found.clear()
        following = threading.Thread(target=load, daemon=True)
        following.start()
        following.join(20)
        assert found == [content(100)], f"after check {n}"
        if not more:
            break
    storage.close()


def test_one_caller_works_for_all_where_no_thread_can_be_started(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    work, all_there = _Pump._work, threading.Barrier(4)

    def together(self: _Pump, executor: Any = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            all_there.wait()
        work(self, executor)

    workers: set[int] = set()
    device.broken = lambda command: (workers.add(threading.get_ident()), time.sleep(0.001))
    names = make(tmp_path, 3_000_000)
    pendings: list[Pending] = []
    callers = [
        threading.Thread(target=lambda: pendings.append(start(device, (names[0], 0, 3_000_000)))) for _ in range(4)
    ]
    device.go.clear()
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", refuse)
        patch.setattr(_Pump, "_work", together)
        for caller in callers:
            caller.start()
        until(lambda: device.waiting)
        threading.Timer(0.1, device.go.set).start()
        device.close()
        assert device.go.is_set(), "close() waits for a caller that works"
        assert not device.waiting
        for caller in callers:
            caller.join()
    assert all(bytes_of(pending.wait()[0]) == content(3_000_000) for pending in pendings)
    assert len(workers) == 1


def test_close_waits_and_leaves_no_thread(device: Device, tmp_path: Path) -> None:
    before = threading.active_count()
    names = make(tmp_path, 300_000)
    for _ in range(3):
        pendings = [start(device, (names[0], 0, 300_000)) for _ in range(5)]
        device.close()
        assert all(pending.done for pending in pendings)
        assert threading.active_count() == before


def test_a_step_that_reads_from_the_same_storage_is_an_error_and_not_a_wait_for_ever(
    device: Device, tmp_path: Path
) -> None:
    (path,) = make(tmp_path, 5000)
    device.go.clear()
    pending = start(device, (path, 0, 5000))
    after = pending.then(lambda tensors, errors: start(device, (path, 0, 100)).wait())
    device.go.set()
    with pytest.raises(RuntimeError, match="cannot read from the same storage"):
        after.wait()
    assert bytes_of(pending.wait()[0]) == content(5000)
    assert bytes_of(start(device, (path, 0, 100)).wait()[0]) == content(5000)[:100]


def test_a_backend_that_is_dropped_ends_its_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    names = make(tmp_path, 300_000)
    start(Device(), (names[0], 0, 300_000))  # nobody waits either
    until(lambda: gc.collect() >= 0 and threading.active_count() <= before)


def test_an_idle_pump_does_nothing(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = make(tmp_path, 1000)
    start(device, (names[0], 0, 1000)).wait()
    time.sleep(5 * LINGER)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.1


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_destinations_are_freed_without_the_garbage_collector(
    device: Device, tmp_path: Path, missing: bool, waits: bool
) -> None:
    """A volume's worth of memory must not wait for it, after an error either."""
    path = str(tmp_path / "missing.bin") if missing else make(tmp_path, 300_000)[0]

    def attempt() -> weakref.ref[torch.Tensor]:
        dest = torch.empty(300_000, dtype=torch.uint8)
        pending = Storage(device).fill(Reads.of(path, [(0, 300_000)]), [dest])
        if waits:
            assert len(pending.errors) == missing
        return weakref.ref(dest)

    gc.collect()
    gc.disable()
    try:
        kept = attempt()
        device.close()
        assert kept() is None
    finally:
        gc.enable()


SCRIPT = """
import torch
from monai_gds.storage import Reads, Storage
from tests.storage.sample_queue_backend import SampleQueueBackend
storage = Storage(SampleQueueBackend(torch.device("cpu")))
pendings = [storage.load(Reads.of({path!r}, [(0, 8 << 20)])) for _ in range(5)]
print("over")
"""


def test_a_process_ends_with_reads_under_way(tmp_path: Path) -> None:
    (path,) = make(tmp_path, 8 << 20)
    done = warm().run("-c", SCRIPT.format(path=path), whole=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "over", "")
