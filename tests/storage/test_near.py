"""Threads that read for a GPU stay on the cores of its NUMA node: simulated, with a /sys laid out in a folder.

Of the GPU and of KvikIO, only what the package asks of them is there. The cores on which threads run are the kernel's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monai_gds.base import cores
from monai_gds.base.process import PerProcess
from monai_gds.limits import KVIKIO_LEAST_BYTES
from monai_gds.storage import Reads, staging
from monai_gds.storage.plain.kvikio import KvikioBackend
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.testing.tools import bytes_of, content
from tests.storage import simulated

NBYTES = 2 * KVIKIO_LEAST_BYTES

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core may be used here: no choice")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A simulated GPU at 0001:17:00.0, which CUDA has used. ``slots``: the cores of the threads that made slots."""
    found = simulated.install_gpu(monkeypatch)
    found.slots = []

    class Slot(simulated.Slot):
        def __init__(self, nbytes: int) -> None:
            found.slots.append(os.sched_getaffinity(0))
            super().__init__(nbytes)

    monkeypatch.setattr(staging, "StagingSlot", Slot)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield found
    found.stream.close()


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lays out the list of cores near the GPU."""

    def laid(local: str) -> None:
        file = tmp_path / "sys/bus/pci/devices/0001:17:00.0/local_cpulist"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(local)
        monkeypatch.setattr(cores, "ROOT", tmp_path)
        monkeypatch.setattr(staging, "_near", PerProcess(staging._find_near))

    return laid


class Noting(PosixBackend):
    """Notes on which cores the threads that read may run."""

    def __init__(self, threads: int) -> None:
        super().__init__(simulated.GPU, threads)
        self.seen: dict[int, set[int]] = {}  # by thread

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> int:
        self.seen[threading.get_ident()] = os.sched_getaffinity(0)
        return super()._read_into(handle, offset, dest)


def read(backend: Any, path: Path) -> None:
    """Reads a file into the device's memory."""
    path.write_bytes(data := content(NBYTES))
    dest = simulated.on_device(torch.zeros(NBYTES, dtype=torch.uint8))
    backend.start(Reads.of(str(path), [(0, NBYTES)]), [dest]).wait()
    assert bytes_of(dest) == data


def test_simulated_threads_that_read_and_the_slots_they_fill_are_on_the_gpus_node(
    gpu: Any, lay: Callable[[str], None], tmp_path: Path
) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    lay(f"{one},4000-4095\n")  # of the others none may be used
    backend = Noting(1)
    try:
        read(backend, tmp_path / "data")
    finally:
        backend.close()
    assert list(backend.seen.values()) == [{one}]
    assert threading.get_ident() not in backend.seen
    assert gpu.slots == [{one}]
    for _ in range(2):  # the first is there
        gpu.pool.acquire()
    assert gpu.slots == [{one}] * 2, "for whatever thread"
    assert os.sched_getaffinity(0) == before, "the caller's thread is left alone"


@pytest.mark.parametrize(
    ("local", "threads"),
    [
        ("0-4095\n", 1),  # one node
        ("4000-4095\n", 1),  # another node than the one that this process may use
        ("{one}\n", 2),  # fewer cores than threads
        ("\n", 1),
        ("nonsense\n", 1),
    ],
)
def test_simulated_where_there_is_no_choice_nothing_changes(
    gpu: Any, lay: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: str, threads: int
) -> None:
    before = os.sched_getaffinity(0)
    asked: set[int] = set()
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, processors: asked.update(processors))
    lay(local.format(one=min(before)))
    backend = Noting(threads)
    try:
        read(backend, tmp_path / "data")
    finally:
        backend.close()
    assert set(map(frozenset, backend.seen.values())) == {frozenset(before)}
    assert not asked or threads > 1, "with too few cores near, only the memory is there"


def test_simulated_reads_before_cuda_is_used_do_not_begin_it(
    gpu: Any, lay: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    lay(f"{one}\n")
    backend = Noting(1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: False)
            patch.delattr(torch.cuda, "get_device_properties")
            read(backend, tmp_path / "early")
        assert list(backend.seen.values()) == [before]
        backend.seen.clear()
        read(backend, tmp_path / "later")
        assert list(backend.seen.values()) == [{one}]
    finally:
        backend.close()


@pytest.mark.parametrize("set_by_user", [False, True])
def test_simulated_kvikios_threads_are_on_the_gpus_node_unless_they_are_the_users(
    gpu: Any, lay: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by_user: bool
) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    lay(f"{one}\n")
    kvikio = simulated.KvikIO(threads=5)
    kvikio.install(monkeypatch)
    seen = []
    pump = []
    kvikio.fail = lambda offset: seen.append(os.sched_getaffinity(0))  # called in its threads
    kvikio.called = lambda name: pump.append(os.sched_getaffinity(0)) if name == "pread" else None
    backend = KvikioBackend(simulated.GPU, threads=None if set_by_user else 1)
    backend.open()
    try:
        read(backend, tmp_path / "data")
        read(backend, tmp_path / "more")
    finally:
        backend.close()
        kvikio.pool.shutdown()
    assert pump and all(on == {one} for on in pump)
    assert seen and all(on == (before if set_by_user else {one}) for on in seen)
    assert kvikio.settings["num_threads"] == (5 if set_by_user else 1)
    assert os.sched_getaffinity(0) == before


def test_simulated_a_torch_that_does_not_tell_where_the_gpu_is(
    gpu: Any, lay: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lay("0\n")
    assert staging.pci_address(simulated.GPU) == "0001:17:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H100"))
    assert staging.near(simulated.GPU) == frozenset()
