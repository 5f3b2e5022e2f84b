"""Where every open takes long, as over NFS, many are in flight, however few cores there are. See ``tools/slow_disk``.

The slow file system counts, so that nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch
from monai.transforms import Lambda

from monai_gds import GDSDataLoader, GDSDataset, limits, open_storage
from monai_gds.imagenet.files.image_storage import ImageStorage
from monai_gds.imagenet.files.listing import ImageList
from monai_gds.imagenet.readers import FileReader
from monai_gds.imagenet.source import open_images
from monai_gds.storage import FileId, Pending, Reads, latency
from monai_gds.storage.latency import SLOW, Latency
from monai_gds.storage.plain import posix, uring
from monai_gds.storage.plain.small_files import read_small_files
from monai_gds.storage.plain.uring import Ring
from monai_gds.testing.tools import assert_each, content
from tools.slow_disk import NoSlowDisk, SlowDisk, slow_disk

#: Long enough that as many opens as may be in flight are, on a machine that has other work.
DELAY = 0.1

FILES = 2 * limits.SLOW_READS

#: Most of the 64 that may be.
MANY = 0.9 * limits.SLOW_READS


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowDisk]:
    with ExitStack() as stack:
        try:
            mounted = stack.enter_context(slow_disk(tmp_path_factory.mktemp("disk")))
        except NoSlowDisk as e:
            pytest.skip(str(e))
        yield mounted


@pytest.fixture
def ring() -> Ring:
    try:
        return Ring()
    except OSError as e:
        pytest.skip(f"this machine's kernel gives no io_uring that chains commands: {e}")


@pytest.fixture(scope="module", params=[3000, 110_000])
def files(disk: SlowDisk, request: pytest.FixtureRequest) -> Sequence[str]:
    for i in range(FILES):
        (disk.behind / f"{i}.{request.param}").write_bytes(content(request.param, i))
    return [str(disk.folder / f"{i}.{request.param}") for i in range(FILES)]


def whole(files: Sequence[str]) -> Reads:
    """All of each file, and room for another byte."""
    nbytes = int(files[0].rpartition(".")[2])
    pitch = (nbytes // 4096 + 1) * 4096
    starts = np.arange(len(files)) * pitch
    return Reads.of_files(
        files, np.full(len(files), nbytes), starts, len(files) * pitch, expected=[nbytes] * len(files)
    )


def contents(files: Sequence[str]) -> list[bytes]:
    return [content(int(file.rpartition(".")[2]), i) for i, file in enumerate(files)]


@pytest.mark.parametrize("small_files", ["io_uring", "one call after another"])
def test_many_files_of_one_read_are_opened_at_once(
    disk: SlowDisk, files: Sequence[str], small_files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_files != "io_uring":
        monkeypatch.setattr(posix, "ring_of_this_thread", lambda: None)
    with closing(open_storage("posix", "cpu")) as storage:
        if storage.describe()["small_files"] != small_files:
            pytest.skip("this machine's kernel gives no io_uring that chains commands")
        reads = whole(files)
        disk.set_delay(DELAY)
        into = storage.load(reads).wait()
        assert disk.most_in_flight >= MANY
        assert disk.opens <= FILES + 1
        assert storage.is_slow
    assert_each(reads.parts(into), contents(files))


def test_whether_a_file_was_replaced_takes_no_request(disk: SlowDisk, files: Sequence[str]) -> None:
    with closing(open_storage("posix", "cpu")) as storage:
        if storage.describe()["small_files"] != "io_uring":
            pytest.skip("this machine's kernel gives no io_uring that chains commands")
        reads = whole(files)
        reads.expected = [FileId.of(file) for file in files]
        disk.set_delay(DELAY)
        storage.load(reads).wait()  # a file that is read has another time of its last access
        disk.set_delay(DELAY)
        assert_each(reads.parts(storage.load(reads).wait()), contents(files))
        assert disk.asked <= 1, "some files are read one by one, to see how long that takes"
        os.utime(files[5], ns=(1, 1))
        assert list(storage.load(reads).errors) == [5]


def test_a_ring_that_the_kernel_refuses_is_done_with_the_memory_when_it_returns(
    disk: SlowDisk, files: Sequence[str], ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has taken the commands, and opens the files. Their memory may be another read's a moment later."""
    call, reads = uring._call, whole(files[:5])
    into = torch.zeros(int(reads.sizes[0]), dtype=torch.uint8)

    def refused(number: int, *arguments: object) -> int:
        call(number, *arguments[:2], 0, *arguments[3:])
        raise OSError(errno.EBADF, "refused")

    disk.set_delay(DELAY)
    with monkeypatch.context() as patch:
        patch.setattr(uring, "_call", refused)
        assert read_small_files(ring, reads, [into], at_once=True).tolist() == [*range(5)], "plain calls do it"
    assert_each(reads.parts([into]), contents(files[:5]))


def test_reads_of_one_file_each_are_opened_at_once(disk: SlowDisk, files: Sequence[str]) -> None:
    with closing(open_storage("posix", "cpu")) as storage:
        disk.set_delay(DELAY)
        pending = [storage.load(whole([file])) for file in files]
        assert_each(
            [one.wait()[0][: len(data)] for one, data in zip(pending, contents(files), strict=True)], contents(files)
        )
    assert MANY <= disk.most_in_flight <= limits.SLOW_READS


def test_no_more_threads_than_were_asked_for(disk: SlowDisk, files: Sequence[str]) -> None:
    with closing(open_storage("posix", "cpu", threads=12)) as storage:
        disk.set_delay(DELAY)
        for one in [storage.load(whole([file])) for file in files[:64]]:
            one.wait()
    assert 0.9 * 12 <= disk.most_in_flight <= 12


def test_a_disk_that_answers_again_is_read_by_the_caller(disk: SlowDisk, files: Sequence[str]) -> None:
    with closing(open_storage("posix", "cpu")) as storage:
        disk.set_delay(DELAY)
        storage.load(whole(files[:1])).wait()
        assert storage.is_slow
        disk.set_delay(0)
        for file in files:  # a few are enough, but on a busy machine
            storage.load(whole([file])).wait()
            if not storage.is_slow:
                break
        assert not storage.is_slow
        before = threading.active_count()
        assert storage.load(whole(files[:1])).done
        assert threading.active_count() == before


@pytest.mark.parametrize("batch", [1, 16])
def test_small_batches_of_images_are_read_further_ahead(disk: SlowDisk, files: Sequence[str], batch: int) -> None:
    folder = disk.behind / "images" / "class"
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(FILES):
        (folder / f"{i}.jpg").write_bytes(content(20_000, i))
    disk.set_delay(0)
    images = open_images(disk.folder / "images")
    assert isinstance(images, ImageList)
    reader = FileReader(images, ImageStorage("posix", torch.device("cpu")))
    try:
        disk.set_delay(DELAY)
        read = sum(len(found.images) for found in reader.read(np.arange(FILES).reshape(-1, batch)))
    finally:
        reader.close()
    assert read == FILES
    assert disk.most_in_flight >= MANY


@pytest.mark.parametrize("batch_size", [1, pytest.param(4, marks=pytest.mark.long), 32])
def test_records_are_read_at_once_by_the_loader(disk: SlowDisk, batch_size: int) -> None:
    """In the first epoch, where the head of each record is read before, and in those after it."""
    disk.set_delay(0)
    dataset = cached(disk)
    dataset.populate()
    loader = GDSDataLoader(cached(disk), batch_size=batch_size)
    for _ in range(2):
        disk.set_delay(DELAY)
        assert sum(map(len, loader)) == FILES
        assert disk.most_in_flight >= MANY


@pytest.mark.parametrize("prefetch", [1, pytest.param(2, marks=pytest.mark.long), 5])
def test_no_more_records_are_begun_than_were_asked_for(disk: SlowDisk, prefetch: int) -> None:
    disk.set_delay(0)
    cached(disk).populate()
    loader = GDSDataLoader(cached(disk), batch_size=4, prefetch=prefetch, sampler=range(12))
    disk.set_delay(DELAY / 5)  # long enough that more would be seen
    assert sum(map(len, loader)) == 12
    assert disk.most_in_flight <= max(2, prefetch)  # one more to a batch that is not complete


def test_where_bytes_are_what_bounds_records_they_are_read_ahead_too(disk: SlowDisk) -> None:
    disk.set_delay(0)
    cached(disk).populate()
    loader = GDSDataLoader(cached(disk), prefetch_bytes=400_000, sampler=range(64))  # of some 30 records
    disk.set_delay(DELAY / 2)
    assert len(list(loader)) == 64
    assert disk.most_in_flight >= 8


def cached(disk: SlowDisk) -> GDSDataset:
    make = Lambda(lambda i: torch.full((1000,), float(i)))
    return GDSDataset(list(range(FILES)), [make], cache_dir=disk.folder / "cache", device="cpu")


def test_a_damaged_or_missing_record_is_computed_again_where_many_are_read_at_once(disk: SlowDisk) -> None:
    disk.set_delay(0)
    dataset = cached(disk)
    dataset.populate()
    records = sorted((disk.behind / "cache").glob("*.safetensors"))
    records[0].unlink()
    records[1].write_bytes(b"damaged")
    disk.set_delay(0.01)
    with pytest.warns(UserWarning, match="not a record"):
        found = torch.cat(list(GDSDataLoader(cached(disk), batch_size=16)))
    assert found[:, 0].tolist() == list(range(FILES))


# ---------------------------------------------------------------------------------------------------------------------
# What counts as long


def test_most_of_the_last_reads_decide() -> None:
    found = Latency()
    assert found.is_unknown
    assert not found.is_long
    for seconds, is_long in [
        (1, True),
        (0, False),
        (1, True),
        (1, True),
        (0, True),
        (0, False),
        (0, False),
        (1, False),
    ]:
        found.note(seconds)
        assert found.is_long == is_long, f"after {seconds} s"
    assert not found.is_unknown


def test_waiting_for_the_interpreter_is_not_the_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits behind a training loop takes 5 ms for each call, whatever that does."""
    now = [0.0]
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(latency.time, "sleep", lambda _: now.__setitem__(0, now[0] + 5e-3))
    found = Latency()
    for _ in range(5):
        found.note(3 * 5e-3 + 1e-5)
        assert not found.is_long
    for _ in range(5):
        found.note(4 * 5e-3 + SLOW)
    assert found.is_long


def test_work_for_each_of_several_is_done_at_once_only_where_reads_take_long(
    disk: SlowDisk, files: Sequence[str]
) -> None:
    me, threads = threading.get_ident(), set[int]()
    with closing(open_storage("posix", "cpu")) as storage:
        storage.each(lambda _: threads.add(threading.get_ident()), range(8))
        assert threads == {me}
        disk.set_delay(DELAY)
        _: Pending = storage.load(whole(files[:1]))
        all_there = threading.Barrier(8)
        storage.each(lambda _: threads.add(threading.get_ident() if all_there.wait(60) >= 0 else 0), range(8))
    assert len(threads - {me}) == 8
