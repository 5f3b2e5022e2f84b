"""Many small files in a few system calls: io_uring and statx."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from monai_gds.errors import FileChanged, StorageError
from monai_gds.limits import RING_FILES
from monai_gds.storage import FileId, Reads, files, open_storage
from monai_gds.storage.files import Expected
from monai_gds.storage.plain import small_files, uring
from monai_gds.storage.plain.small_files import identities, read_small_files, ring_of_this_thread
from monai_gds.storage.plain.uring import Ring
from monai_gds.testing.tools import assert_each, content, descriptors

PITCH = 4096


@pytest.fixture
def ring() -> Iterator[Ring]:
    found = ring_of_this_thread()
    if found is None:
        pytest.skip("this machine's kernel gives no io_uring that chains commands")
    yield found


def make(folder: Path, sizes: list[int]) -> list[str]:
    paths = [str(folder / f"many-{i}.bin") for i in range(len(sizes))]
    for i, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        Path(path).write_bytes(content(size, i))
    return paths


def parts_of(
    paths: list[str], nbytes: int, offsets: np.ndarray | int = 0, expected: list[Expected] | None = None
) -> Reads:
    """``nbytes`` of each file, each into a page of its own."""
    sizes = np.full(len(paths), nbytes)
    starts = np.arange(len(paths)) * PITCH
    return Reads.of_files(paths, sizes, starts, len(paths) * PITCH, offsets=offsets, expected=expected)


def buffer_for(reads: Reads) -> torch.Tensor:
    return torch.from_numpy(np.zeros(int(reads.sizes[0]), np.uint8))  # no OpenMP, which does not survive a fork


def test_many_files_take_no_calls_of_their_own(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several threads, each call into the kernel can mean a wait for the interpreter's lock."""
    opened: list[str] = []
    open_file = files.open_file
    monkeypatch.setattr(files, "open_file", lambda path, *more: (opened.append(path), open_file(path, *more))[1])
    paths = make(tmp_path, [3000] * 200)
    reads = parts_of(paths, 3000, expected=[(None, FileId.of(p), 3000)[i % 3] for i, p in enumerate(paths)])
    with closing(open_storage("posix", "cpu")) as storage:
        into = storage.load(reads).wait()
        assert storage.describe()["small_files"] == "io_uring"
    assert_each(reads.parts(into), [content(3000, i) for i in range(200)])
    assert len(opened) <= 1, "but for the first one, which is timed"


def test_names_may_hold_anything_but_a_null_byte(tmp_path: Path) -> None:
    names = ["a b", "ü", os.fsdecode(b"\xff\xfe"), "\n", "x" * 200]
    paths = [str(tmp_path / name) for name in names]
    for i, path in enumerate(paths):
        Path(path).write_bytes(content(50, i))
    bad = [f"{tmp_path}/a\0b", f"{tmp_path}/\ud800"]  # the second has no bytes in any file system
    reads = parts_of([*paths, *bad], 50)
    with closing(open_storage("posix", "cpu")) as storage:
        pending = storage.load(reads)
        assert sorted(pending.errors) == [5, 6]
        assert all(isinstance(error, StorageError) for error in pending.errors.values())
        assert_each(reads.parts(pending.tensors)[:5], [content(50, i) for i in range(5)])


def test_parts_of_files_and_only_of_those_expected(tmp_path: Path, ring: Ring) -> None:
    paths = make(tmp_path, [3000] * 10)
    expected: list[Expected] = [FileId.of(path) if i % 2 else None for i, path in enumerate(paths)]
    reads = parts_of(paths, 2000, np.arange(10) * 7, expected)
    into = buffer_for(reads)
    assert not len(read_small_files(ring, reads, [into]))
    assert_each(reads.parts([into]), [content(3000, i)[7 * i :][:2000] for i in range(10)])
    os.utime(paths[4])
    os.utime(paths[5])
    os.unlink(paths[7])
    os.truncate(paths[8], 2000)
    assert read_small_files(ring, reads, [into]).tolist() == [5, 7, 8]


def test_whole_files_that_became_longer_are_noticed_where_there_is_room_for_a_byte(tmp_path: Path, ring: Ring) -> None:
    paths = make(tmp_path, [3000] * 4)
    apart = parts_of(paths, 3000, expected=[3000] * 4)
    dense = Reads.of_files(paths, apart.nbytes, np.arange(4) * 3000, 12_000, expected=[3000] * 4)
    os.truncate(paths[2], 3001)
    for reads, left in ((apart, [2]), (dense, [0, 1, 2, 3])):  # without that byte plain calls look at the size
        into = buffer_for(reads)
        assert read_small_files(ring, reads.with_room([into]), [into]).tolist() == left
        with closing(open_storage("posix", "cpu")) as storage:
            errors = storage.fill(reads, [into]).errors
        assert list(errors) == [2]
        assert isinstance(errors[2], FileChanged)


def test_a_forked_child_has_rings_of_its_own(tmp_path: Path, ring: Ring) -> None:
    paths = make(tmp_path, [3000] * 10)
    reads = parts_of(paths, 3000)

    def right() -> bool:
        mine = ring_of_this_thread()
        into = buffer_for(reads)
        assert mine is not None
        assert not len(read_small_files(mine, reads, [into]))
        return all(part.numpy().tobytes() == content(3000, i) for i, part in enumerate(reads.parts([into])))

    def child() -> None:
        os._exit(0 if right() and ring_of_this_thread() is not ring else 1)

    assert right()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 0
    assert right()


def test_a_read_that_was_interrupted_leaves_nothing_to_the_next(
    tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches a read of a few bytes, which the caller's own thread does."""
    enter, presses = uring._call, iter([True])

    def interrupted(number: int, *arguments: object) -> int:
        result = enter(number, *arguments)
        if number == uring._ENTER and next(presses, False):
            raise KeyboardInterrupt
        return result

    reads = parts_of(make(tmp_path, [3000] * 10), 3000)
    into = buffer_for(reads)
    with monkeypatch.context() as patch:
        patch.setattr(uring, "_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_small_files(ring, reads, [into])
    os.unlink(reads.paths[7])
    assert read_small_files(ring, reads, [into]).tolist() == [7]


def test_a_ring_that_the_kernel_refuses_has_written_all_that_it_will_when_it_returns(
    tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here after half of the files were submitted. Their memory may belong to another read a moment later."""
    call = uring._call

    def refused(number: int, *arguments: object) -> int:
        if number == uring._ENTER:
            call(number, arguments[0], 15, 0, *arguments[3:])
            raise OSError(errno.EBADF, "refused")
        return call(number, *arguments)

    paths = make(tmp_path, [3000] * 10)
    reads = parts_of(paths, 3000)
    with monkeypatch.context() as patch:
        patch.setattr(uring, "_call", refused)
        assert read_small_files(ring, reads, [buffer_for(reads)]).tolist() == list(range(10)), "plain calls do it"
    assert ring._cq_tail[0] == ring._sq_tail[0] == ring._sq_head[0], "nothing is under way"
    assert ring_of_this_thread() is None
    with closing(open_storage("posix", "cpu")) as storage:
        assert_each(reads.parts(storage.load(reads).wait()), [content(3000, i) for i in range(10)])
    del small_files._rings().ring  # the next test gets another


def test_a_ring_is_full_at_once_and_goes_with_its_thread(tmp_path: Path, ring: Ring) -> None:
    reads = parts_of(make(tmp_path, [100] * RING_FILES), 100)
    into = buffer_for(reads)
    before = descriptors()
    own = Ring()
    for _ in range(300):  # its counters pass the end of the ring
        assert not len(read_small_files(own, reads, [into]))
    assert_each(reads.parts([into]), [content(100, i) for i in range(RING_FILES)])
    del own
    assert descriptors() == before


@pytest.mark.parametrize("refusal", [PermissionError(1, "Operation not permitted"), OSError(38, "No io_uring")])
def test_a_kernel_that_gives_no_ring_is_tried_once_per_thread(
    monkeypatch: pytest.MonkeyPatch, refusal: OSError
) -> None:
    tries: list[int] = []

    def refuse() -> Ring:
        tries.append(1)
        raise refusal

    small_files._rings.forget()
    monkeypatch.setattr(small_files, "Ring", refuse)
    try:
        assert ring_of_this_thread() is ring_of_this_thread() is None
        assert tries == [1]
    finally:
        small_files._rings.forget()


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le"])
def test_a_processor_that_reorders_loads_gets_no_ring(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(OSError, match=f"memory barriers on {machine}"):
        Ring()


def test_identities_are_those_of_os_stat(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "ü b", os.fsdecode(b"\xff"))]
    for i, path in enumerate(paths):
        path.write_bytes(bytes(i))
        os.utime(path, ns=(0, (-5, 10**18 + 7, 2**33 * 10**9)[i]))
    (tmp_path / "link").symlink_to(paths[1])
    everything = [*paths, tmp_path / "link", Path("/dev/null"), tmp_path]
    assert identities(map(os.fsencode, everything)) == [FileId.of(path) for path in everything]


def test_what_is_not_there_has_no_identity(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    missing = (tmp_path / "missing", tmp_path / "file" / "below", tmp_path / ("x" * 300))
    assert identities(map(os.fsencode, missing)) == [None] * 3
