"""Files registered with CUDA: which are, for how long, and when they are not used. CUDA's own part runs on a GPU only
(``TestPosixPinnedOnCuda``); here stand-ins count what is registered."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monai_gds.storage import staging
from monai_gds.storage.files import FileId
from monai_gds.storage.plain.pinned_files import PinnedFiles

SIZE = (1 << 20) + 100
CPU = torch.device("cpu")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Addresses and sizes of what is registered."""
    now: dict[int, int] = {}
    monkeypatch.setattr(staging, "pin", now.__setitem__)
    monkeypatch.setattr(staging, "unpin", now.pop)
    yield now
    assert not now, "closed, but still registered"


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Three files in the page cache."""
    found = [tmp_path / f"{n}.bin" for n in range(3)]
    for path in found:
        path.write_bytes(os.urandom(SIZE))
    return [str(path) for path in found]


def offer(pinned: PinnedFiles, path: str) -> bool:
    """Offers a file, and returns whether it is registered then."""
    pinned.offer(path, FileId.of(path))
    pinned._thread and pinned._thread.submit(int).result()  # after what was offered
    return pinned.get(path, FileId.of(path)) is not None


def test_first_come_first_kept(registered: dict[int, int], paths: list[str]) -> None:
    pinned = PinnedFiles(2 * SIZE + 8192, CPU)
    assert [offer(pinned, path) for path in paths] == [True, True, False]
    assert [offer(pinned, path) for path in paths] == [True, True, False]
    assert sum(registered.values()) == pinned.used == 2 * ((1 << 20) + 4096)
    pinned.close()


def test_another_file_of_the_same_name_is_not_taken_for_it(registered: dict[int, int], paths: list[str]) -> None:
    pinned = PinnedFiles(10 * SIZE, CPU)
    path, before = paths[0], FileId.of(paths[0])
    assert offer(pinned, path)
    os.replace(paths[1], path)
    assert pinned.get(path, before) is None
    assert not registered
    assert pinned.used == 0
    assert offer(pinned, path)
    os.truncate(path, 10)
    assert pinned.get(path, before) is None
    assert offer(pinned, paths[2])
    before = FileId.of(paths[2])
    os.remove(paths[2])
    with pytest.raises(FileNotFoundError):
        pinned.get(paths[2], before)
    assert not registered, "a deleted file would take room on its disk"
    assert pinned.used == 0
    pinned.close()


def test_a_file_in_use_stays_registered_until_its_copies_are_over(registered: dict[int, int], paths: list[str]) -> None:
    pinned = PinnedFiles(10 * SIZE, CPU)
    before = FileId.of(paths[0])
    assert offer(pinned, paths[0])
    in_use = pinned.get(paths[0], before)
    os.replace(paths[1], paths[0])
    assert pinned.get(paths[0], before) is None
    assert len(registered) == 1
    pinned.close()
    assert len(registered) == 1
    del in_use


def test_only_what_is_in_the_page_cache_as_a_whole_is_registered(registered: dict[int, int], paths: list[str]) -> None:
    pinned = PinnedFiles(10 * SIZE, CPU)
    fd = os.open(paths[0], os.O_RDONLY)
    os.fsync(fd)
    end = time.monotonic() + 10
    os.posix_fadvise(fd, 1 << 19, 0, os.POSIX_FADV_DONTNEED)
    while offer(pinned, paths[0]) and time.monotonic() < end:  # a page that is being written out stays
        pinned.close()
        os.posix_fadvise(fd, 1 << 19, 0, os.POSIX_FADV_DONTNEED)
    assert not registered
    os.pread(fd, SIZE, 0)
    os.close(fd)
    assert offer(pinned, paths[0])
    pinned.close()


def test_gives_up_where_cuda_refuses(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(address: int, nbytes: int) -> None:
        asked.append(address)
        raise RuntimeError("CUDA refused cuMemHostRegister_v2: error 2")

    monkeypatch.setattr(staging, "pin", refuse)
    before = Path("/proc/self/maps").read_text().count(".bin")
    pinned = PinnedFiles(10 * SIZE, CPU)
    with pytest.warns(UserWarning, match=r"0\.bin.*cuMemHostRegister"):
        assert not offer(pinned, paths[0])
    assert not any(offer(pinned, path) for path in paths[1:])
    assert len(asked) == 1
    assert Path("/proc/self/maps").read_text().count(".bin") == before
    pinned.close()


def test_a_forked_child_unregisters_nothing(registered: dict[int, int], paths: list[str]) -> None:
    pinned = PinnedFiles(10 * SIZE, CPU)
    assert offer(pinned, paths[0])
    if (pid := os.fork()) == 0:
        pinned._held.clear()
        os._exit(0 if registered else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pinned.close()
