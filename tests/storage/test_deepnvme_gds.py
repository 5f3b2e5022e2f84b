"""The deepnvme-gds backend: the contract with the real gds_handle on a GPU, and its helper process without one."""

from __future__ import annotations

import json
import os
import signal
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage import Read, Storage, available_backends, deepnvme_build, deepnvme_gds_helper, open_storage
from monai_gds.storage import deepnvme_gds as gds
from monai_gds.storage.deepnvme_gds import DeepNvmeGdsStorage
from tests.storage.contract import CudaStorageContract, StorageContract, bytes_of, content, opened
from tests.storage.disks import broken_disk

CPU = torch.device("cpu")


def need_cufile(folder: Path) -> None:
    """Skips where gds_handle is missing, or where cuFile refuses the file system of ``folder``."""
    found = available_backends("cuda")["deepnvme-gds"]
    if not found:
        pytest.skip(f"{found.reason}; {found.remedy}")
    path = folder / "does-cufile-take-this.bin"
    path.write_bytes(bytes(1 << 20))
    with opened("deepnvme-gds", "cuda", threads=1) as storage:
        try:
            storage.load(str(path), [(0, 1 << 20)]).wait()
        except StorageError as e:
            pytest.skip(f"cuFile refuses the files of this machine: {e}")


class WithHelper(StorageContract):
    """What both runs of the contract need."""

    reads_while_closing = 2  # a close ends the helper, and the next read starts another
    reads_while_shrinking = 4  # so does a file that is too short

    @pytest.fixture
    def stable_descriptors(self, storage: Storage, blob: Path) -> Iterator[None]:
        """Opens every lane first: the storage keeps a socket for each."""
        self.get(storage, blob, *[(0, 1 << 20)] * 12)
        yield


@pytest.mark.gpu
class TestDeepNvmeGds(WithHelper, CudaStorageContract):
    """One storage for all: a helper with a CUDA context of its own starts slowly."""

    @pytest.fixture(scope="class")
    @classmethod
    def storage(cls, shared_folder: Path) -> Iterator[Storage]:
        need_cufile(shared_folder)
        with opened("deepnvme-gds", "cuda", threads=4) as storage:
            yield storage

    def test_says_what_cufile_does_here(self, storage: Storage) -> None:
        assert ("nvidia-fs" in storage.describe()["cufile"]) and ("cuFile" in storage.describe()["cufile"])

    def test_a_file_that_cufile_refuses_is_an_error_and_not_the_end_of_the_process(self, storage: Storage) -> None:
        path = Path("/dev/shm/monai-gds-test.bin")
        path.write_bytes(bytes(1 << 20))
        try:
            storage.load(str(path), [(0, 1 << 20)]).wait()
        except OSError as e:
            assert str(path) in str(e)
        finally:
            path.unlink()


@contextmanager
def over_host_memory() -> Iterator[Storage]:
    """The backend over host memory, with a helper process that has no gds_handle but behaves like it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gds._Helper, "module", "tests.storage.fake_gds_helper")
        patch.setattr(deepnvme_build, "build_for_use", lambda operator: None)
        storage = DeepNvmeGdsStorage(CPU, threads=3)
        yield storage
        storage.close()


@pytest.fixture
def storage() -> Iterator[Storage]:
    with over_host_memory() as storage:
        yield storage


class TestHelperOnCpu(WithHelper):
    """Requests, sockets, descriptors and errors; all but CUDA and cuFile. One storage for all: helpers start slowly."""

    @pytest.fixture(scope="class")
    @classmethod
    def storage(cls) -> Iterator[Storage]:
        with over_host_memory() as storage:
            yield storage


def helper_of(storage: Storage) -> gds._Helper:
    helper = storage._helper  # type: ignore[attr-defined]
    assert helper is not None
    return helper


def test_a_read_error_ends_the_helper_and_not_the_process(storage: Storage, tmp_path: Path) -> None:
    good = tmp_path / "good.bin"
    good.write_bytes(content(1 << 20))
    with broken_disk(tmp_path, content(4 << 20)) as path:
        with pytest.raises(StorageError, match="Input/output error") as caught:
            storage.read([Read(str(path), 0, torch.zeros(4 << 20, dtype=torch.uint8))])
        assert str(path) in str(caught.value)
        ended = helper_of(storage).process
        dest = torch.zeros(1 << 20, dtype=torch.uint8)
        storage.read([Read(str(good), 0, dest)])  # another helper
        assert bytes_of(dest) == good.read_bytes()
        assert ended.poll() == 1
        assert helper_of(storage).process is not ended


def test_a_helper_that_was_killed_is_replaced(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content(9 << 20))
    for _ in range(2):
        dest = torch.zeros(9 << 20, dtype=torch.uint8)
        storage.read([Read(str(path), 0, dest)])
        assert bytes_of(dest) == path.read_bytes()
        os.kill(helper_of(storage).process.pid, signal.SIGKILL)
        helper_of(storage).process.wait()


def test_a_helper_that_hangs_is_an_error_and_is_replaced(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good.bin", tmp_path / "hangs.bin"
    for path in (good, bad):
        path.write_bytes(content(1 << 20))
    dest = torch.zeros(1 << 20, dtype=torch.uint8)
    storage.read([Read(str(good), 0, dest)])
    monkeypatch.setattr(gds, "_ANSWER_SECONDS", 0.3)
    with pytest.raises(StorageError, match=r"it did not answer for 0\.3 s") as caught:
        storage.read([Read(str(bad), 0, dest)])
    assert str(bad) in str(caught.value)
    monkeypatch.undo()
    storage.read([Read(str(good), 0, dest)])
    assert bytes_of(dest) == good.read_bytes()


def test_what_gds_handle_printed_last_is_said(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would keep nothing back anyway
    path = tmp_path / "prints.bin"
    path.write_bytes(content(1 << 20))
    with pytest.raises(StorageError, match="Cuda failure in the middle of it"):
        storage.read([Read(str(path), 0, torch.zeros(1 << 20, dtype=torch.uint8))])


class LateHandle:
    """A handle whose thread lets go of an operation's tensor as late as the real one's: with the next operation."""

    def __init__(self) -> None:
        self.asked: list[weakref.ref[torch.Tensor]] = []

    def new_pinned_device_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(count, dtype=like.dtype)

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self.asked.append(weakref.ref(tensor))
        return 0

    def wait(self) -> int:
        assert all(tensor() is not None for tensor in self.asked[-2:]), "its thread would free it, and wait for ever"
        return 1


def test_no_tensor_is_left_to_the_handles_thread(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handle = LateHandle()
    with ours, theirs, open(tmp_path / "file.bin", "wb") as file:
        slot = deepnvme_gds_helper._Slot(handle, 1 << 20, theirs)
        for _ in range(5):
            request = {"do": "read", "offset": 0, "nbytes": 4096}
            socket.send_fds(ours, [json.dumps(request).encode()], [file.fileno()])
            assert slot.start()
            slot.finish()
    assert [tensor() is not None for tensor in handle.asked] == [False, False, False, True, True]


def test_a_helper_that_cannot_start_says_why(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds._Helper, "module", "no.such.module")
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    with pytest.raises(StorageError, match=r"could not start.*No module named"):
        storage.read([Read(str(path), 0, torch.zeros(1 << 20, dtype=torch.uint8))])


def test_the_users_directory_and_environment_stay_as_they_are(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gds_handle writes local_cufile.json into the working directory and sets CUFILE_ENV_PATH_JSON."""
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    storage.read([Read("file.bin", 0, torch.zeros(1 << 20, dtype=torch.uint8))])
    folder = Path(helper_of(storage)._folder)
    assert (folder / "local_cufile.json").exists()
    storage.close()
    assert os.listdir(tmp_path) == ["file.bin"]
    assert dict(os.environ) == before
    assert not folder.exists()


def test_the_helper_ends_with_the_storage(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    storage.read([Read(str(path), 0, torch.zeros(1 << 20, dtype=torch.uint8))])
    process = helper_of(storage).process
    storage.close()
    assert process.poll() == 0


def test_serves_cuda_targets_only() -> None:
    with pytest.raises(BackendUnavailable, match="deepnvme"):
        open_storage("deepnvme-gds", "cpu")
