"""The helper process of deepnvme-gds, with a stand-in for gds_handle: errors, hangs, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage import Storage, open_storage
from monai_gds.storage.deepnvme import gds, gds_helper
from monai_gds.testing.disks import broken_disk
from monai_gds.testing.tools import bytes_of, content
from tests.storage.deepnvme.common import fill, over_host_memory


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    """One for all tests: each of them may end its helper, and then the next one starts another."""
    with over_host_memory() as storage:
        yield storage


def helper_of(storage: Storage) -> gds._Helper:
    lane = storage._backend._lanes._all[0]  # type: ignore[attr-defined]
    assert isinstance(lane, gds._GdsLane)
    return lane._helper


def test_a_read_error_ends_the_helper_and_not_the_process(storage: Storage, tmp_path: Path) -> None:
    good = tmp_path / "good.bin"
    good.write_bytes(content(1 << 20))
    fill(storage, good, torch.zeros(1 << 20, dtype=torch.uint8))
    ended = helper_of(storage).process
    with broken_disk(tmp_path, content(4 << 20)) as path:
        with pytest.raises(StorageError, match="Input/output error") as caught:
            fill(storage, path, torch.zeros(4 << 20, dtype=torch.uint8))
        assert str(path) in str(caught.value)
    assert bytes_of(fill(storage, good, torch.zeros(1 << 20, dtype=torch.uint8))) == good.read_bytes()
    assert ended.poll() == 1
    assert helper_of(storage).process is not ended


def test_a_helper_that_was_killed_is_replaced(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content(9 << 20))
    for end in (True, False):
        dest = torch.zeros(9 << 20, dtype=torch.uint8)
        fill(storage, path, dest)
        assert bytes_of(dest) == path.read_bytes()
        if end:
            os.kill(helper_of(storage).process.pid, signal.SIGKILL)
            helper_of(storage).process.wait()


def test_a_helper_that_hangs_is_an_error_and_is_replaced(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "good.bin", tmp_path / "hangs.bin"
    for path in (good, bad):
        path.write_bytes(content(1 << 20))
    dest = torch.zeros(1 << 20, dtype=torch.uint8)
    fill(storage, good, dest)
    monkeypatch.setattr(gds, "_ANSWER_SECONDS", 0.3)
    with pytest.raises(StorageError, match=r"it did not answer for 0\.3 s") as caught:
        fill(storage, bad, dest)
    assert str(bad) in str(caught.value)
    monkeypatch.undo()
    fill(storage, good, dest)
    assert bytes_of(dest) == good.read_bytes()


def test_the_last_lines_of_gds_handle_are_in_the_error(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would keep nothing back anyway
    path = tmp_path / "prints.bin"
    path.write_bytes(content(1 << 20))
    with pytest.raises(StorageError, match="Cuda failure in the middle of it"):
        fill(storage, path, torch.zeros(1 << 20, dtype=torch.uint8))


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
        slot = gds_helper._Slot(handle, 1 << 20, theirs)
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
        fill(storage, path, torch.zeros(1 << 20, dtype=torch.uint8))


def test_the_helper_ends_with_the_storage_and_leaves_directory_and_environment_of_the_user_as_they_are(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gds_handle writes local_cufile.json into the working directory and sets CUFILE_ENV_PATH_JSON."""
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    fill(storage, "file.bin", torch.zeros(1 << 20, dtype=torch.uint8))
    helper = helper_of(storage)
    folder = Path(helper._folder)
    assert (folder / "local_cufile.json").exists()
    storage.close()
    assert helper.process.poll() == 0
    assert os.listdir(tmp_path) == ["file.bin"]
    assert dict(os.environ) == before
    assert not folder.exists()


def test_serves_cuda_targets_only() -> None:
    with pytest.raises(BackendUnavailable, match="deepnvme"):
        open_storage("deepnvme-gds", "cpu")
