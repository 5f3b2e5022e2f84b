"""Whatever a record contains, it costs nothing but itself: it is refused with a warning, or it is usable.

Every kind of :mod:`tests.records.hostile` goes through all ways of reading, converting, listing and verifying.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, RandCropByPosNegLabeld, Transform

from monai_gds import GDSDataset, limits
from monai_gds.errors import CacheWarning, RecordError
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.maintenance import check, survey
from monai_gds.items.tree import encode_item
from monai_gds.records import header
from monai_gds.records.compression import WHOLE, Compression
from monai_gds.records.entries import read_whole
from monai_gds.storage import open_storage
from monai_gds.tiles import blosc
from monai_gds.tiles.boxes import whole_box
from tests.caches import key
from tests.loopdisk import loop_disk, run
from tests.records.hostile import JOINT, KINDS, TILED, Opened
from tests.same import assert_same, same

needs_blosc2 = pytest.mark.skipif(blosc.why_not() is not None, reason=f"{blosc.why_not()}")

SMALL = {
    "image": MetaTensor(torch.rand(1, 40, 40, 20), meta={"affine": torch.eye(4), "name": "a"}),
    "small": torch.tensor([1.0, 2.0, 3.0]),
    "text": "t",
    "names": np.array(["a", "b"]),
}


def volumes() -> dict[str, Any]:
    """An item of which two tensors come in tiles. One of these has runs, and joint runs with the other."""
    image = torch.randint(0, 100, (1, 64, 64, 72), generator=torch.Generator().manual_seed(0)).float()
    image[:, :, 30:] = 0
    label = torch.zeros(1, 64, 64, 72)
    label[:, 10:30, 10:40, 10:60] = 1
    return {"image": MetaTensor(image, meta={"name": "a"}), "label": label, "small": torch.ones(3)}


class Place:
    """A folder with a sound record, in place of which others are put."""

    def __init__(self, folder: Path, item: Any, compression: Compression) -> None:
        self.folder, self.item, self.compression = folder, item, compression
        cache = self.cache()
        assert cache.publish(key(), encode_item(item))
        assert cache.publish(key("b"), encode_item(item))
        self.path = folder / f"{key().digest}{header.SUFFIX}"
        self.sound = self.path.read_bytes()

    def cache(self, **options: Any) -> CacheDirectory:
        return CacheDirectory(self.folder, open_storage("posix", "cpu"), compression=self.compression, **options)

    def put(self, blob: bytes) -> None:
        new = self.folder / "new"
        new.write_bytes(blob)
        os.replace(new, self.path)

    def read(self) -> dict[str, Any]:
        """What each way of reading returns: the item in a tuple, or None."""
        found = {}
        for verify in ("first", "always", "never"):
            pending = self.cache(verify=verify).start([key().digest])[0]
            found[verify] = None if pending is None else pending.wait()
        again = self.cache()
        for n in range(2):  # read, then mapped
            pending = again.start([key().digest])[0]
            found[f"the same {n}"] = None if pending is None else pending.wait()
        first, second = self.cache().start([key().digest, key("b").digest])
        found["together"] = None if first is None else first.wait()
        assert second is not None and second.wait() is not None
        found["lazily"] = self._lazily()
        return found

    def _lazily(self) -> Any:
        (lazy,) = self.cache().start([key().digest], first="rest")
        if lazy is None or not lazy.later:
            return None if lazy is None else lazy.wait()
        for runs in lazy.runs.values():
            for value in range(len(runs.values)):
                chosen = np.arange(len(runs.values)) == value
                with contextlib.suppress(RecordError, IndexError):
                    runs.find(chosen, runs.count(chosen) - 1)
        parts = lazy.read({name: [whole_box(form.shape)] for name, form in lazy.later.items()}).wait()
        return None if parts is None else lazy.wait(tensors={name: volume.whole() for name, volume in parts.items()})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("small"), SMALL, WHOLE)


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("tiled"), volumes(), Compression("lz4", joint=(tuple(JOINT),)))


#: What another process may be able to use: it has the types, the item or the data root.
ELSEWHERE = {
    f"tree: {what}"
    for what in (
        "a named tuple of os", "a named tuple of os.path", "a named tuple that is an instance",
        "a named tuple of an unimported module", "a type of an earlier version", "a named tuple of other fields",
        "a registered type that is none", "a path below a root", "a value of the item", "$registered of text",
        "$root of text", "$item of text", "$item of an object", "$dtype of a list of lists",
    )
} | {"tiles: bitcomp without a filter"}  # fmt: skip

#: Whole, and without a contradiction: nothing shows that these hold another item than they should.
FORGED = {
    "tiles: a shape of 64 axes", "tiles: a shape of 63 axes", "tiles: a shape that is too small",
    "tiles: a shape of other axes", "table: another palette of NaN",
}  # fmt: skip


def test_a_record_written_anew_is_sound(small: Place) -> None:
    found, problem = _tried(small, lambda record: None)
    assert not problem
    for item in found.values():
        assert_same(item[0], SMALL)


@pytest.mark.parametrize("name", KINDS)
def test_any_record_is_refused_or_usable(small: Place, name: str) -> None:
    _, problem = _tried(small, KINDS[name])
    assert not problem or name not in ELSEWHERE


@needs_blosc2
@pytest.mark.parametrize("name", TILED)
def test_any_record_in_tiles_is_refused_or_right(tiled: Place, name: str) -> None:
    found, problem = _tried(tiled, TILED[name])
    if name not in FORGED and not problem:
        assert all(item is None or same(item[0], tiled.item) for item in found.values())
    assert not problem or name not in ELSEWHERE


def _tried(place: Place, change: Callable[[Opened], Any]) -> tuple[dict[str, Any], str]:
    """What each way of reading returns, and what verifying calls wrong."""
    record = Opened.of(place.sound)
    change(record)
    place.put(record.bytes())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = place.read()
        with contextlib.suppress(RecordError):
            read_whole(str(place.path), key().digest)
        assert len(survey(place.folder)) == 2
        checked = check(place.path)
    for item in found.values():
        _used(item)
    assert checked is not None
    said = [str(warning.message) for warning in told]
    assert all(warning.category is CacheWarning for warning in told), said
    assert "\0" not in checked.problem and "\x1b" not in checked.problem
    refused = [way for way, item in found.items() if item is None]
    if refused:
        assert any("cannot be used and is computed" in text for text in said), "refused in silence"
        sound = {name for name, kind in {**KINDS, **TILED}.items() if kind is change} <= ELSEWHERE
        assert checked.problem or sound, f"verified, but refused by {refused}"
    return found, checked.problem


def _used(value: Any) -> None:
    """Uses an item as a user would: copies its arrays, and looks at each element."""
    if isinstance(value, dict):
        _used([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for part in value:
            _used(part)
    elif isinstance(value, np.ndarray):
        assert value.copy().size < 1 << 24
        value.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# A dataset gives the right item, and puts a right record in place of the wrong one


class Make(Transform):  # type: ignore[misc]  # MONAI is untyped
    def __call__(self, data: Any) -> Any:
        return volumes()


def dataset(folder: Path, crops: bool = False, image: str | None = None) -> GDSDataset:
    steps: list[Any] = [Make()]
    if crops:
        both = ["image", "label"]
        steps.append(RandCropByPosNegLabeld(both, "label", (16, 16, 16), num_samples=2, image_key=image))
    transform = Compose(steps)
    transform.set_random_state(1)
    return GDSDataset([{"i": 0}, {"i": 1}], transform, folder, device="cpu", compression="lz4", options={"tiles": 32})


def plain(item: Any) -> Any:
    """Crops without the metadata that name the transform."""
    return [{"image": crop["image"].as_tensor(), "label": crop["label"].as_tensor()} for crop in item]


SOME = (
    "version is 1e999", "a header nested deeply", "shape nothing by a huge number", "small arrays that were cut",
    "a key nested deeply", "tree: small tensor of quint8", "tree: nested deeply", "tiles: a tile of one voxel",
    "table: a size of INT_MIN", "streams: zeros with their checksums", "runs: a huge size",
)  # fmt: skip


@needs_blosc2
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("way", ["one", "several", "crops"])
def test_the_item_is_computed_and_the_record_replaced(tmp_path: Path, name: str, way: str) -> None:
    with dataset(tmp_path) as made:
        paths = [tmp_path / f"{made.key(i).digest}{header.SUFFIX}" for i in range(2)]
        made[0], made[1]
    expected = plain(dataset(tmp_path, crops=True)[0]) if way == "crops" else made[0]
    record = Opened.of(paths[0].read_bytes())
    {**KINDS, **TILED}[name](record)
    paths[0].unlink()
    paths[0].write_bytes(record.bytes())
    with dataset(tmp_path, way == "crops") as wrong, pytest.warns(CacheWarning, match="is computed again"):
        found = wrong[0] if way == "one" else wrong.__getitems__([0, 1])[0]
    assert_same(plain(found) if way == "crops" else found, expected)
    checked = check(paths[0])
    assert checked is not None and not checked.problem


@needs_blosc2
@pytest.mark.parametrize("name", ["tree: small tensor of quint8", "table: a size of INT_MIN", "runs: a huge size"])
def test_populating_computes_what_could_not_be_used(tmp_path: Path, name: str) -> None:
    with dataset(tmp_path) as made:
        path = tmp_path / f"{made.key(0).digest}{header.SUFFIX}"
        made[0], made[1]
    record = Opened.of(path.read_bytes())
    {**KINDS, **TILED}[name](record)
    path.unlink()
    path.write_bytes(record.bytes())
    with pytest.warns(CacheWarning, match="is computed again"):
        done = dataset(tmp_path).populate(progress=False)
    assert (done.computed, done.cached) == (1, 1)
    checked = check(path)
    assert checked is not None and not checked.problem


# ---------------------------------------------------------------------------------------------------------------------
# Memory and time


@contextmanager
def takes_little() -> Iterator[None]:
    """Fails if what happens meanwhile takes 200 MB more memory, or two seconds of processor time."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, began = _peak(), time.process_time()
    yield
    assert _peak() - before < 200 << 10
    assert time.process_time() - began < 2


def _peak() -> int:
    """Peak of this process's memory, in kB."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)


def sparse(record: Opened, path: Path, name: str, nbytes: int) -> None:
    """Writes a record whose entry ``name`` has so many bytes, all in a hole but a few, with right checksums."""
    entry = record.entries[name]
    size = {"F32": 4, "U8": 1}[entry.dtype]
    blob = record.bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    head = json.loads(blob[8:start])
    begin, _ = head[name]["data_offsets"]
    more = nbytes - len(entry.data)

    def stretch(whole: dict[str, Any]) -> None:
        for other, described in whole.items():
            if other != "__metadata__":
                described["data_offsets"] = [n + more if n > begin else n for n in described["data_offsets"]]
        whole[name].update(shape=[nbytes // size], data_offsets=[begin, begin + nbytes])

    record.header = stretch
    blob = record.bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    with path.open("wb") as file:
        file.write(blob[:start])
        file.write(blob[start : start + begin])
        file.truncate(start + nbytes + len(blob) - start - len(entry.data))


@pytest.mark.parametrize("nbytes", [512 << 20, 2 << 30, 40 << 30, 1 << 42], ids=lambda n: f"{n >> 20} MiB")
@pytest.mark.parametrize("name", ["__arrays", "small"])
def test_a_sparse_file_costs_neither_memory_nor_time(tmp_path: Path, name: str, nbytes: int) -> None:
    place = Place(tmp_path, {"small": torch.ones(3), "names": np.array(["a", "b"])}, WHOLE)
    place.path.unlink()
    sparse(Opened.of(place.sound), place.path, name, nbytes)
    assert place.path.stat().st_size > nbytes
    with takes_little(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = place.read()
        checked = check(place.path)
        with pytest.raises(RecordError):
            read_whole(str(place.path), key().digest)
        assert len(survey(tmp_path)) == 2
    assert set(found.values()) == {None}
    assert checked is not None and "holes" in checked.problem
    assert all("are there, all others are holes" in str(warning.message) for warning in told)


@needs_blosc2
@pytest.mark.parametrize(
    "name",
    [*(f"{runs}: {what}" for runs in ("runs", "joint runs") for what in (
        "another checksum", "values the other way round", "counts the other way round"
    )), "joint runs: flags the other way round"],
)  # fmt: skip
def test_runs_that_lie_do_not_move_a_crop(tmp_path: Path, name: str) -> None:
    """Their checksums are right. The voxels that are read are others than the runs say."""
    image = "image" if name.startswith("joint") else None
    with dataset(tmp_path, crops=True, image=image) as made:
        path = tmp_path / f"{made.key(0).digest}{header.SUFFIX}"
        made[0]
    expected = plain(dataset(tmp_path, crops=True, image=image)[0])
    record = Opened.of(path.read_bytes())
    TILED[name](record)
    path.unlink()
    path.write_bytes(record.bytes())
    found = check(path)
    assert found is not None and "runs" in found.problem
    with (
        dataset(tmp_path, crops=True, image=image) as wrong,
        pytest.warns(CacheWarning, match=r"computed again: .*runs"),
    ):
        assert_same(plain(wrong[0]), expected)
    found = check(path)
    assert found is not None and not found.problem


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "btrfs with compression", "xfs"])
def test_no_honest_record_is_refused_for_its_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(limits, "HOLES_BYTES", 1 << 20)
    name, _, compressed = kind.partition(" with ")
    with loop_disk(tmp_path, name, mount="compress-force=zstd" if compressed else "noatime") as disk:
        noise = np.random.default_rng(0).random((1, 20, 64, 64), np.float32)
        item = {"image": torch.from_numpy(noise), "label": torch.zeros(1, 80, 64, 64)}
        place = Place(disk.folder, item, WHOLE)
        os.sync()
        for copy in ([], ["cp", "--sparse=always"], ["fallocate", "--dig-holes"]):
            if copy[:1] == ["cp"]:
                run(*copy, str(place.path), str(place.path) + ".new")
                os.replace(str(place.path) + ".new", place.path)
            elif copy:
                run(*copy, str(place.path))
            assert all(same(found[0], item) for found in place.read().values())
            checked = check(place.path)
            assert checked is not None and not checked.problem


def test_more_than_fits_into_memory_is_refused(small: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of terabytes that has no holes, as a file system may say."""
    small.put(small.sound)
    monkeypatch.setattr(torch, "empty", _too_much(torch.empty))
    with pytest.warns(CacheWarning, match="computed again"):
        pending = small.cache().start([key().digest])[0]
        assert pending is None or pending.wait() is None


def _too_much(empty: Any) -> Any:
    def refuse(*size: Any, **options: Any) -> Any:
        if size and type(size[0]) is int and size[0] > 100_000:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
            )
        return empty(*size, **options)

    return refuse
