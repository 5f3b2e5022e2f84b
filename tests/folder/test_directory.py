"""The cache directory: whole records or none, whatever happens to processes, disks and other people's files."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.errors import CacheWarning, FileChanged, MonaiGdsError
from monai_gds.folder import directory
from monai_gds.folder.directory import CacheDirectory, prepare
from monai_gds.folder.maintenance import check, survey
from monai_gds.folder.writer import process_writer
from monai_gds.items.tree import encode_item
from monai_gds.records.compression import Compression
from monai_gds.records.header import SUFFIX
from monai_gds.shared.temporary import abandoned
from monai_gds.storage import Pending, Reads, Storage, open_storage
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.tiles import blosc
from monai_gds.tiles.codecs import ON_CPU
from tests.caches import key
from tests.machines import fork, in_child, mounted_tmpfs, read_only, shared_folder
from tests.records.test_writing import header_of, with_header
from tests.same import assert_same

LARGE = 1 << 20  # bytes that are mapped once they were verified, and read by threads before


def item(value: float, nbytes: int = LARGE) -> dict[str, Any]:
    return {"image": torch.full((nbytes // 4,), float(value)), "value": value, "names": np.array(["x"])}


def put(cache: CacheDirectory, name: str, value: float, nbytes: int = LARGE) -> bool:
    return cache.publish(key(name), encode_item(item(value, nbytes)))


def get(cache: CacheDirectory, name: str) -> Any:
    """The item of a record, checked to be consistent; None when there is none."""
    pending = cache.start([key(name).digest])[0]
    found = None if pending is None else pending.wait()
    if found is None:
        return None
    assert bool((found[0]["image"] == found[0]["value"]).all())
    return found[0]["value"]


def records(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob(f"*{SUFFIX}"))


def path_of(cache: CacheDirectory, name: str) -> Path:
    return Path(cache.record_path(key(name).digest))


def flip(path: Path, place: int, *, keep_mtime: bool = False) -> None:
    st = path.stat()
    with path.open("r+b") as f:
        f.seek(place)
        byte = f.read(1)[0]
        f.seek(place)
        f.write(bytes([byte ^ 1]))
    if keep_mtime:
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def temporaries(folder: Path) -> list[str]:
    return os.listdir(folder / ".tmp") if (folder / ".tmp").exists() else []


def opened(path: Path, codec: str | None = None, **settings: Any) -> CacheDirectory:
    compression = Compression(codec)
    return CacheDirectory(path, open_storage("posix", "cpu"), compression=compression, **settings)


@pytest.fixture
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Reading and publishing


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("kind", [str, np.array], ids=["in its header", "in its small arrays"])
def test_a_record_replaced_while_its_front_is_read_is_not_damaged(
    cache: CacheDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[str], Any]
) -> None:
    """The front is longer than the first read, and that of the file that takes its place is longer still."""
    publish = CacheDirectory(tmp_path, open_storage("posix", "cpu")).publish
    read_head, texts = PosixBackend.head, [kind(length * "x") for length in (200_000, 100_000, 200_000, 100_000)]
    calls = 0

    def replaced_behind(self: Any, path: str, nbytes: int) -> Any:
        nonlocal calls
        calls += 1
        found = read_head(self, path, nbytes)
        if calls % 2 and texts:
            assert publish(key(), encode_item({"text": texts.pop()}))
        return found

    assert publish(key(), encode_item({"text": kind("x" * 50_000)}))
    monkeypatch.setattr(PosixBackend, "head", replaced_behind)
    assert not cache.holds(key().digest)
    pending = cache.start([key().digest])[0]
    assert pending is not None
    found = pending.wait()
    assert found is not None and len(str(found[0]["text"])) == 200_000


@pytest.mark.usefixtures("no_warning")
def test_a_missing_record_is_not_reported(cache: CacheDirectory) -> None:
    assert get(cache, "a") is None


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("nbytes", [8, 64 << 10, LARGE])
def test_what_was_published_is_read(cache: CacheDirectory, nbytes: int) -> None:
    assert put(cache, "a", 1, nbytes)
    for _ in range(3):
        assert get(cache, "a") == 1
    assert temporaries(Path(cache.path)) == []
    assert [p.name for p in records(cache.path)] == [path_of(cache, "a").name]


def test_small_items_are_saved_at_once_on_a_drive_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, waited = PosixBackend.write, []

    def noted(*args: Any, **more: Any) -> None:
        waited.append(threading.current_thread() is threading.main_thread())
        write(*args, **more)

    monkeypatch.setattr(PosixBackend, "write", noted)
    for name, nbytes, kind in (("small", 4096, 0xEF53), ("large", LARGE, 0xEF53), ("to a server", 4096, 0x6969)):
        monkeypatch.setattr(directory, "kind_of_folder", {str(tmp_path): kind}.get)
        cache = CacheDirectory(tmp_path, open_storage("posix", "cpu"))
        cache.publish_behind(key(name), encode_item(item(1, nbytes)))
        process_writer().flush()
        assert get(cache, name) == 1
    assert waited == [True, False, False]


@pytest.mark.usefixtures("no_warning")
def test_a_record_that_another_process_replaced_is_read_anew(cache: CacheDirectory, tmp_path: Path) -> None:
    put(cache, "a", 1)
    assert get(cache, "a") == 1
    for value in range(2, 6):
        put(opened(tmp_path), "a", value)
        assert get(cache, "a") == value


def test_an_item_in_use_survives_replacing_and_removing_its_record(cache: CacheDirectory) -> None:
    put(cache, "a", 1)
    get(cache, "a")
    held = cache.start([key("a").digest])[0].wait()[0]["image"]  # type: ignore[union-attr]
    put(cache, "a", 2)
    path_of(cache, "a").unlink()
    assert bool((held == 1).all())


class Moving(PosixBackend):
    """Reports so many times that the file was replaced while it was read."""

    changes = 0

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        if not self.changes:
            return super().start(reads, into)
        self.changes -= 1
        pending = Pending(list(into), self.device)
        pending.fail(0, FileChanged(f"{reads.paths[0]} was replaced"))
        pending.finish()
        return pending

    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        if not self.changes:
            return super().map(reads)
        self.changes -= 1
        raise FileChanged(f"{reads.paths[0]} was replaced")


@pytest.mark.usefixtures("no_warning")
def test_a_record_replaced_between_start_and_wait_is_read_again(tmp_path: Path) -> None:
    storage = Moving(torch.device("cpu"))
    cache = CacheDirectory(tmp_path, Storage(storage))
    put(cache, "a", 1)
    storage.changes = 2
    assert get(cache, "a") == 1


def test_a_file_system_without_stable_ids_costs_the_cache_only(tmp_path: Path) -> None:
    storage = Moving(torch.device("cpu"))
    cache = CacheDirectory(tmp_path, Storage(storage))
    put(cache, "a", 1)
    storage.changes = 10**9
    with pytest.warns(CacheWarning, match="cannot be used"):
        assert get(cache, "a") is None


@pytest.mark.usefixtures("no_warning")
def test_the_memory_for_heads_is_bounded(cache: CacheDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, "0", 0, 8)
    get(cache, "0")
    memory = cache._reader.heads
    monkeypatch.setattr(memory, "_budget", memory.nbytes * 3)
    for round_ in range(2):
        for i in range(10):
            if round_ == 0:
                put(cache, str(i), i, 8)
            assert get(cache, str(i)) == i
            assert 1 <= len(memory._kept) <= 3
            assert memory.nbytes <= memory._budget
    for i in range(10):
        cache._reader.forget(cache.record_path(key(str(i)).digest))
    assert (len(memory._kept), memory.nbytes) == (0, 0)


def test_thousands_of_records_of_one_pipeline_are_kept_in_little_memory(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path), opened(tmp_path, verify="never")
    memory = reader._reader.heads
    rng = np.random.default_rng(0)
    count = 200
    for i in range(-1, count):
        meta = {name: rng.random(n) for name, n in (("affine", 16), ("pixdim", 8))}
        meta |= {f"field{j}": np.array(j, np.int16) for j in range(30)}
        meta |= {"filename_or_obj": f"/data/case{i}.nii.gz", "space": "RAS", "original_channel_dim": float("nan")}
        writer.publish(key(str(i)), encode_item({"image": MetaTensor(torch.zeros(3), meta=meta), "id": i}))
    assert reader.start([key("-1").digest])[0] is not None  # pays for what they share
    gc.collect()
    tracemalloc.start()
    before, counted = tracemalloc.get_traced_memory()[0], memory.nbytes
    for i in range(count):
        reader.start([key(str(i)).digest])[0]
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(memory._kept) == count + 1
    assert taken < memory.nbytes - counted, "no more is taken than is counted"
    assert taken / count < 3000


@pytest.mark.parametrize("tensors", [1, 20])
def test_where_the_tensors_of_records_lie_is_counted_too(tmp_path: Path, tensors: int) -> None:
    """Every record has tensors of other shapes, so no two records share a table."""
    writer, reader = opened(tmp_path), opened(tmp_path, verify="never")
    memory = reader._reader.heads
    count = 300  # more than the shared tables that are remembered besides
    for i in range(-1, count):
        writer.publish(key(str(i)), encode_item({f"image{j}": torch.zeros(2 * i + 5) for j in range(tensors)}))
    assert get_all(reader, "-1") is not None  # pays for what they share
    gc.collect()
    tracemalloc.start()
    before, counted = tracemalloc.get_traced_memory()[0], memory.nbytes
    for i in range(count):
        assert get_all(reader, str(i)) is not None
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken < memory.nbytes - counted, "no more is taken than is counted"
    for i in range(-1, count):
        reader._reader.forget(reader.record_path(key(str(i)).digest))
    assert memory.nbytes == 0


def get_all(cache: CacheDirectory, name: str) -> Any:
    pending = cache.start([key(name).digest])[0]
    return None if pending is None else pending.wait()


def test_tensors_share_no_storage(cache: CacheDirectory) -> None:
    two = {"image": torch.ones(LARGE), "label": torch.ones(4), "mask": torch.ones(LARGE // 8)}
    cache.publish(key("a"), encode_item(two))
    for _ in range(2):  # read and verified; mapped
        back = cache.start([key("a").digest])[0].wait()[0]  # type: ignore[union-attr]
        for name, tensor in back.items():
            assert tensor.untyped_storage().nbytes() <= tensor.nbytes + 4096, name
            tensor.fill_(7)
    assert bool((cache.start([key("a").digest])[0].wait()[0]["image"] == 1).all())  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------------------------
# Damage

DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut tail": lambda p: os.truncate(p, p.stat().st_size - 1),
    "cut in the header": lambda p: os.truncate(p, 100),
    "empty": lambda p: os.truncate(p, 0),
    "flipped bit in the header": lambda p: flip(p, 300),
    "flipped bit in a tensor": lambda p: flip(p, p.stat().st_size // 2),
    "flipped bit in the arrays": lambda p: flip(p, 4096),
    "foreign file": lambda p: p.write_bytes(b"hello") and None,
    "zeros": lambda p: p.write_bytes(bytes(p.stat().st_size)) and None,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "read before"])
def test_damage_is_reported_once_with_the_path_and_gone_when_replaced(
    cache: CacheDirectory, damage: Callable[[Path], None], known: bool
) -> None:
    put(cache, "a", 1)
    if known:
        get(cache, "a")
    time.sleep(0.01)  # so that the mtime differs
    damage(path_of(cache, "a"))
    with pytest.warns(CacheWarning) as caught:
        for _ in range(3):
            assert get(cache, "a") is None
    assert len(caught) == 1
    assert str(path_of(cache, "a")) in str(caught[0].message)
    put(cache, "a", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get(cache, "a") == 2


def test_a_folder_in_the_place_of_a_record(cache: CacheDirectory) -> None:
    path_of(cache, "a").mkdir()
    with pytest.warns(CacheWarning) as caught:
        assert get(cache, "a") is None
        assert not put(cache, "a", 1)
    assert {"cannot be used", "nothing more is cached"} <= {
        text for text in ("cannot be used", "nothing more is cached") for w in caught if text in str(w.message)
    }
    assert temporaries(Path(cache.path)) == []


def test_input_output_errors_are_reported_and_cost_the_cache_only(
    cache: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "a", 1)

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.warns(CacheWarning, match="Input/output error") as caught:
        assert get(cache, "a") is None
        assert get(cache, "a") is None
    assert len(caught) == 1


def test_a_failing_disk_is_reported_once_and_not_once_per_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "abcd"
    for name in names:
        put(opened(tmp_path), name, 1)

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    cache = opened(tmp_path)
    with pytest.warns(CacheWarning, match=r"the disk fails.*the same goes for others") as caught:
        assert [get(cache, name) for name in names] == [None] * 4
    assert len(caught) == 1


def test_too_many_open_files_are_reported_once_with_the_remedy(tmp_path: Path) -> None:
    names = "abcd"
    for name in names:
        put(opened(tmp_path), name, 1)

    def without_descriptors() -> tuple[list[Any], list[str], list[Any]]:
        cache = opened(tmp_path)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            found = [get(cache, name) for name in names]
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return found, [str(one.message) for one in caught], [get(cache, name) for name in names]

    found, (said,), later = in_child(without_descriptors)
    assert found == [None] * 4
    assert "too many files open: raise the limit (ulimit -n)" in said
    assert later == [1] * 4


@pytest.mark.parametrize(("verify", "noticed"), [("first", [0]), ("always", [0, 1]), ("never", [])])
def test_verify_decides_when_bytes_are_compared(tmp_path: Path, verify: Any, noticed: list[int]) -> None:
    put(opened(tmp_path), "a", 1)
    place = (tmp_path / path_of(opened(tmp_path), "a").name).stat().st_size - LARGE // 2
    for moment in (0, 1):
        cache = opened(tmp_path, verify=verify)
        put(cache, "a", 1)
        if moment == 1:
            get(cache, "a")
        flip(path_of(cache, "a"), place, keep_mtime=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache.start([key("a").digest])[0].wait()  # type: ignore[union-attr]
        assert bool(caught) == (moment in noticed), (verify, moment)


def test_a_replaced_record_is_verified_although_no_head_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a head in memory, only the identity of the file shows that it is another one."""
    monkeypatch.setattr(limits, "HEADS_BYTES", 0)
    cache = opened(tmp_path)
    for value in (1, 2):
        put(opened(tmp_path), "a", value)
        assert [get(cache, "a"), get(cache, "a")] == [value, value]
    put(opened(tmp_path), "a", 3)
    flip(path_of(cache, "a"), path_of(cache, "a").stat().st_size - LARGE // 2)
    with pytest.warns(CacheWarning, match="'image' do not match their checksum"):
        assert get(cache, "a") is None


def test_records_without_tensors_are_read_together_with_others(tmp_path: Path) -> None:
    cache = opened(tmp_path, verify="always")
    items: list[dict[str, Any]] = [{"n": 0}, {"x": torch.ones(3), "y": torch.zeros(2)}, {"n": 2}, {"x": torch.rand(4)}]
    for i, made in enumerate(items):
        assert cache.publish(key(str(i)), encode_item(made))
    for _ in range(2):  # those whose heads are in memory are read together
        started = cache.start([key(str(i)).digest for i in range(4)])
        for pending, made in zip(started, items, strict=True):
            found = None if pending is None else pending.wait()
            assert found is not None
            assert_same(found[0], made)


def test_durable_syncs_the_file_before_and_the_directory_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (calls.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)),
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append("rename"), rename(a, b)))
    put(opened(tmp_path), "a", 1)
    assert calls == ["rename"]
    calls.clear()
    put(opened(tmp_path, durable=True), "b", 1)
    assert [c.split()[0] for c in calls] == ["sync", "rename", "sync"]
    assert calls[0].startswith(f"sync {key('b').digest}")
    assert calls[2] == f"sync {tmp_path.name}"


# ---------------------------------------------------------------------------------------------------------------------
# Disks and rights


def test_full_disk_costs_the_cache_and_nothing_is_half_written(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 3 << 20) as small:
        cache = opened(small)
        with pytest.warns(CacheWarning) as caught:
            done = [put(cache, str(i), i) for i in range(5)]
        assert done == [True, True, False, False, False]
        assert len(caught) == 1
        assert "free some space" in str(caught[0].message)
        assert str(small) in str(caught[0].message)
        assert temporaries(small) == []
        assert [get(cache, str(i)) for i in range(5)] == [0, 1, None, None, None]
        path_of(cache, "0").unlink()  # space is back: so is the cache
        assert put(cache, "4", 4)
        assert get(cache, "4") == 4


def test_a_disk_without_room_for_more_files_is_told_from_a_full_one(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 8 << 20, "nr_inodes=6") as small:
        cache = opened(small)
        with pytest.warns(CacheWarning, match=r"no room for more files \(df -i\)") as caught:
            assert sum(put(cache, str(i), i) for i in range(5)) < 5
        assert len(caught) == 1 and "free some space" not in str(caught[0].message)


def test_a_read_only_directory_is_read_and_reported_once(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 8 << 20) as small:
        put(opened(small), "a", 1)
        read_only(small)
        cache = opened(small)
        prepare(small)
        with pytest.warns(CacheWarning) as caught:
            assert not put(cache, "b", 1)
            assert not put(cache, "c", 1)
        assert len(caught) == 1
        assert str(caught[0].message).endswith("lasts: Read-only file system (mount it writable, or move cache_dir)")
        assert get(cache, "a") == 1


def _attempt(folder: Path) -> tuple[list[Any], list[str]]:
    """Reads and writes several records; gives what came back and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = opened(folder, unmade=not prepare(folder))
        found = [get(cache, name) for name in "abc"] + [put(cache, name, 5) for name in "xyz"]
    return found, [str(w.message) for w in caught]


def test_without_permission_to_write_records_are_read() -> None:
    with shared_folder() as folder:
        for name in "abc":
            put(opened(folder), name, 1)
        found, said = in_child(lambda: _attempt(folder), nobody=True)
        assert found == [1, 1, 1, False, False, False]
        assert len(said) == 1
        assert "Permission denied" in said[0]
        assert f"(change the permissions of {folder / '.tmp'}, or move cache_dir)" in said[0]


def test_a_directory_that_may_not_be_made_is_reported_with_the_one_that_forbids_it() -> None:
    with shared_folder() as folder:
        _, said = in_child(lambda: _attempt(folder / "a" / "{b}"), nobody=True)
        assert len(said) == 1
        assert f"(change the permissions of {folder}, or move cache_dir)" in said[0]


def test_without_permission_to_read_there_is_one_warning_for_all_records() -> None:
    with shared_folder() as folder:
        for name in "abc":
            put(opened(folder), name, 1)
        (folder / ".tmp").chmod(0o700)
        folder.chmod(0o700)
        found, said = in_child(lambda: _attempt(folder), nobody=True)
        assert found == [None, None, None, False, False, False]
        assert len(said) == 1
        assert "Permission denied" in said[0]
        assert f"(change the permissions of {folder}, or move cache_dir)" in said[0]


def test_a_directory_that_cannot_be_made_costs_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    found, said = _attempt(tmp_path / "file" / "cache")
    assert found == [None, None, None, False, False, False]
    assert len(said) == 1
    assert "cannot be made" in said[0]
    assert f"({tmp_path / 'file'} is a file: name another folder)" in said[0]


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_disk_that_fails_for_a_moment_does_not_make_a_directory_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    real, asked = os.stat, [0]

    def fails(path: Any, *args: Any, **more: Any) -> Any:
        asked[0] += path == str(tmp_path)
        if path == str(tmp_path) and asked[0] == which:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = prepare(tmp_path)
    assert there is (not said)
    assert all("cannot be made" in str(w.message) and "the disk fails" in str(w.message) for w in said)


def test_a_directory_that_cannot_be_made_on_a_read_only_disk_is_reported_once(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 8 << 20) as small:
        read_only(small)
        found, said = _attempt(small / "cache")
        assert found == [None, None, None, False, False, False]
        assert len(said) == 1
        assert "mount it writable" in said[0]


def test_once_it_can_be_made_it_is_used_and_failures_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(CacheWarning, match="cannot be made"):
        cache = opened(tmp_path / "file" / "cache", unmade=not prepare(tmp_path / "file" / "cache"))
    (tmp_path / "file").unlink()
    assert put(cache, "a", 1)
    assert get(cache, "a") == 1
    path_of(cache, "b").write_bytes(b"damaged")
    with pytest.warns(CacheWarning, match="cannot be used"):
        assert get(cache, "b") is None


def test_a_directory_that_became_a_file_is_reported_once_with_the_remedy(tmp_path: Path) -> None:
    cache = opened(tmp_path / "cache")
    prepare(tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_bytes(b"")
    with pytest.warns(CacheWarning) as caught:
        assert get(cache, "a") is None
        assert not put(cache, "b", 1)
    assert len(caught) == 1
    assert f"({tmp_path / 'cache'} is a file: name another folder)" in str(caught[0].message)


# ---------------------------------------------------------------------------------------------------------------------
# prepare


def test_prepare_makes_a_directory_with_its_parents(tmp_path: Path) -> None:
    prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_prepare_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cache_dir='.*file' is a file"):
        prepare(tmp_path / "file")


def test_prepare_leaves_everything_else_alone(cache: CacheDirectory, tmp_path: Path) -> None:
    put(cache, "a", 1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.safetensors").write_bytes(b"")
    prepare(tmp_path)
    assert get(cache, "a") == 1
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "other.safetensors").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Processes


class Halting(PosixBackend):
    """Writes half of a record, says so, and waits for ever."""

    def __init__(self, say: int) -> None:
        super().__init__(torch.device("cpu"))
        self._say = say

    def write(self, path: str, buffers: Sequence[Any], **how: Any) -> None:
        super().write(path, buffers[: len(buffers) // 2], **how)
        os.write(self._say, b"x")
        time.sleep(600)


def _halted_writer(folder: Path) -> int:
    """A process in the middle of writing record "a"."""
    read_end, write_end = os.pipe()
    pid = fork()
    if pid == 0:
        put(CacheDirectory(folder, Storage(Halting(write_end))), "a", 1)
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1) == b"x"
    os.close(read_end)
    return pid


@pytest.mark.usefixtures("no_warning")
def test_half_a_record_is_never_served_and_goes_with_its_writer(tmp_path: Path) -> None:
    pid = _halted_writer(tmp_path)
    try:
        (half,) = temporaries(tmp_path)
        prepare(tmp_path)
        assert temporaries(tmp_path) == [half], "its writer is alive"
        assert get(opened(tmp_path), "a") is None
        assert records(tmp_path) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert [path for path, _ in abandoned(tmp_path)] == [f"{tmp_path}/.tmp/{half}"]
    assert get(opened(tmp_path), "a") is None
    prepare(tmp_path)
    assert temporaries(tmp_path) == []


def test_killed_at_any_moment_leaves_whole_records(tmp_path: Path) -> None:
    for delay in (0.0, 0.002, 0.005, 0.02, 0.05):
        pid = fork()
        if pid == 0:
            cache = opened(tmp_path)
            while True:
                for name in "abcd":
                    put(cache, name, 3)
        time.sleep(0.05 + delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert {get(opened(tmp_path), name) for name in "abcd"} <= {3, None}
    prepare(tmp_path)
    assert temporaries(tmp_path) == []


def _fill(folder: Path, seed: int) -> list[str]:
    """Reads or makes every record several times, in an order of its own."""
    cache, rng = opened(folder), np.random.default_rng(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            for i in rng.permutation(8):
                found = get(cache, str(i))
                assert found in (None, i)
                if found is None or rng.random() < 0.3:
                    assert put(cache, str(i), int(i), 100_000)
    return [str(w.message) for w in caught]


def test_many_processes_fill_one_directory(tmp_path: Path) -> None:
    pipes = []
    for seed in range(4):
        read_end, write_end = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                said = "\n".join(_fill(tmp_path, seed)) or "fine"
            except BaseException as e:
                said = repr(e)
            os.write(write_end, said.encode()[:4000])
            os._exit(0)
        os.close(write_end)
        pipes.append((pid, read_end))
    for pid, read_end in pipes:
        with open(read_end) as f:
            assert f.read() == "fine"
        os.waitpid(pid, 0)
    assert len(records(tmp_path)) == 8
    assert temporaries(tmp_path) == []


def test_many_threads_and_caches_of_one_process_fill_one_directory(tmp_path: Path) -> None:
    said: list[Any] = []

    def work(seed: int) -> None:
        try:
            said.extend(_fill(tmp_path, seed))
        except BaseException as e:
            said.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert said == []
    assert temporaries(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# Compressed records

needs_blosc2 = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


def image(seed: int = 0) -> torch.Tensor:
    """A volume of 400 values, 2 MB."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 400, (1, 80, 80, 80), generator=generator).float().div_(7)


def image_of(cache: CacheDirectory, name: str) -> torch.Tensor | None:
    pending = cache.start([key(name).digest])[0]
    found = None if pending is None else pending.wait()
    return None if found is None else found[0]["image"]


def compressed(cache: CacheDirectory, seed: int = 0) -> Path:
    assert cache.publish(key("a"), encode_item({"image": image(seed)}))
    return path_of(cache, "a")


@needs_blosc2
@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("codec", ON_CPU)
def test_a_compressed_record_gives_the_same_and_is_smaller(tmp_path: Path, codec: str, verify: Any) -> None:
    cache = opened(tmp_path, codec=codec, verify=verify)
    assert compressed(cache).stat().st_size < image().nbytes / 2
    for reader in (cache, cache, opened(tmp_path, verify=verify), opened(tmp_path, codec="zstd", verify=verify)):
        found = image_of(reader, "a")
        assert found is not None and torch.equal(found, image())
        found += 1  # memory of the user's own


@needs_blosc2
def test_any_byte_that_flips_in_a_compressed_record_is_noticed(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    path = compressed(cache)
    whole = path.read_bytes()
    for place in [*range(0, 20_000, 499), *range(20_000, len(whole), 9973), len(whole) - 1]:
        flip(path, place)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            found = image_of(opened(tmp_path), "a")
        if found is None:
            assert "computed again" in str(given[0].message) or "without being replaced" in str(given[0].message)
        else:  # padding, which nobody reads
            assert torch.equal(found, image())
        flip(path, place)
    found = image_of(opened(tmp_path), "a")
    assert found is not None and torch.equal(found, image())


@needs_blosc2
def test_streams_damaged_after_they_were_verified_do_not_end_an_epoch(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="zstd")
    path = compressed(cache)
    assert image_of(cache, "a") is not None
    with path.open("r+b") as f:  # in place, within one tick of the clock: the identity of the file stays
        st = path.stat()
        f.seek(st.st_size // 2)
        f.write(bytes(20_000))
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
    with pytest.warns(CacheWarning, match="computed again"):
        assert image_of(opened(tmp_path, verify="never"), "a") is None


@needs_blosc2
def test_without_the_library_a_compressed_record_is_computed_and_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compressed(opened(tmp_path, codec="lz4"))
    before = path.read_bytes()
    monkeypatch.setattr(blosc, "why_not", lambda: "Blosc2 is not installed: pip install it")
    cache = opened(tmp_path)
    with pytest.warns(CacheWarning, match="without being replaced: Blosc2 is not installed") as given:
        assert image_of(cache, "a") is None
        assert not cache.publish(key("a"), encode_item({"image": image()}))
        assert image_of(cache, "a") is None
    assert len(given) == 1 and "Update monai_gds" not in str(given[0].message)
    assert path.read_bytes() == before
    assert cache.holds(key("a").digest)


@needs_blosc2
def test_heads_count_the_tables_of_tiles(tmp_path: Path) -> None:
    cache = opened(tmp_path, codec="lz4")
    compressed(cache)
    image_of(cache, "a")
    assert cache._reader.heads.nbytes > 8 * 27 + 400 * 4


def _with_tree(blob: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A compressed record whose description of the tiles was changed, with a right checksum."""
    found = header_of(blob)
    tree = json.loads(found["__metadata__"]["tree"])
    change(tree["image"]["$tensor"]["tiles"])
    found["__metadata__"]["tree"] = json.dumps(tree)
    return with_header(blob, found)


@needs_blosc2
@pytest.mark.parametrize(
    "change",
    [
        {"codec": []}, {"codec": "new"}, {"shape": [10**400]}, {"shape": [-5, 3]}, {"shape": [1] * 100},
        {"shape": [1 << 16, 1 << 14, 256], "tile": [128, 64, 128]}, {"palette": 3}, {"dtype": 7}, {"tile": "x"},
        {"shape": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_description_of_tiles_ends_neither_an_epoch_nor_a_listing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = compressed(opened(tmp_path, codec="lz4"))
    path.write_bytes(_with_tree(path.read_bytes(), lambda tiles: tiles.update(change)))
    with pytest.warns(CacheWarning, match="computed again|without being replaced"):
        assert image_of(opened(tmp_path), "a") is None
    assert len(list(survey(tmp_path))) == 1
    found = check(path)
    assert found is not None and (found.problem or "palette" in change)


@needs_blosc2
def test_what_cannot_be_compressed_is_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise MonaiGdsError("Blosc2 could not compress 5 bytes (error -35)")

    monkeypatch.setattr(blosc, "compress", failing)
    cache = opened(tmp_path, codec="lz4")
    with pytest.warns(CacheWarning, match=r"saved uncompressed: .*error -35"):
        path = compressed(cache)
    assert path.stat().st_size > image().nbytes
    found = image_of(cache, "a")
    assert found is not None and torch.equal(found, image())
