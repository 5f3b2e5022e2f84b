"""Records converted to another form: they hold the same item, are whole at any moment, and are never converted back."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.errors import CacheWarning, FileChanged
from monai_gds.folder import directory
from monai_gds.folder.directory import CacheDirectory, prepare
from monai_gds.folder.index import Index
from monai_gds.folder.maintenance import check, survey
from monai_gds.items.tree import encode_item
from monai_gds.records import header
from monai_gds.records.compression import WHOLE, Compression
from monai_gds.records.heads import Form
from monai_gds.shared import temporary
from monai_gds.storage import Storage, open_storage
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.tiles import blosc
from tests.caches import key
from tests.machines import fork, mounted_tmpfs, read_only
from tests.same import assert_same

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")

LZ4, SMALL_TILES, ZSTD = Compression("lz4"), Compression("lz4", 16), Compression("zstd")
KEY = key("a")


def item() -> dict[str, Any]:
    """Large tensors that gain by packing and one that does not, small ones, arrays, and metadata."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 400, (1, 80, 80, 80), generator=generator).float().div_(7)
    image[0, 0, 0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    return {
        "image": MetaTensor(image, meta={"affine": np.eye(4), "name": "ct", "spacing": [0.1, 1e300, -0.0]}),
        "label": (image[0] > 20).long().numpy(),
        "noise": torch.randn(1 << 18, generator=generator),
        "complex": torch.zeros(1 << 17, dtype=torch.complex64),
        "small": torch.arange(100),
        "empty": torch.empty(0, 3),
        "words": np.array(["a", "b"]),
        "$odd": {"tiles": {"$tensor": 1}, "__x": (1, {2, 3})},
    }


def cache_in(folder: Path, form: Compression = WHOLE, storage: Storage | None = None) -> CacheDirectory:
    return CacheDirectory(
        folder, storage or open_storage("posix", "cpu"), compression=form, verify="always", index=Index(folder),
        form=Form(numpy=True),
    )  # fmt: skip


def saved(folder: Path, form: Compression) -> Path:
    cache = cache_in(folder, form)
    cache.save(KEY, encode_item(item()))
    return Path(cache.record_path(KEY.digest))


def form_of(path: Path) -> str:
    with path.open("rb") as file:
        return header.read(file.fileno()).form


def assert_sound(folder: Path) -> None:
    """The record gives the item, as new, and the command finds nothing wrong with it."""
    pending = cache_in(folder).start([KEY.digest])[0]
    found = None if pending is None else pending.wait()
    assert found is not None
    assert_same(found[0], item())
    checked = check(cache_in(folder).record_path(KEY.digest))
    assert checked is not None and not checked.problem


@pytest.fixture(autouse=True)
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("before", "after"),
    list(itertools.permutations([WHOLE, LZ4, SMALL_TILES, ZSTD], 2)),
    ids=lambda form: form.text or "whole",
)
def test_a_record_is_converted_into_what_saving_it_would_have_given(
    tmp_path: Path, before: Compression, after: Compression
) -> None:
    path = saved(tmp_path / "converted", before)
    wanted = saved(tmp_path / "saved", after)
    cache = cache_in(path.parent, after)
    assert cache.holds(KEY.digest) and not cache.holds(KEY.digest, converted=True)
    assert cache.convert(KEY) == "converted"
    assert cache.holds(KEY.digest, converted=True)
    assert (form_of(path), path.stat().st_size) == (after.text, wanted.stat().st_size)
    assert_sound(path.parent)
    assert os.listdir(path.parent / ".tmp") == []


def test_readers_go_on_with_what_they_have_and_then_with_the_new_form(tmp_path: Path) -> None:
    path = saved(tmp_path, WHOLE)
    reader = cache_in(tmp_path)
    held = reader.start([KEY.digest])[0].wait()[0]["image"]  # type: ignore[union-attr]
    begun = reader.start([KEY.digest])[0]
    assert cache_in(tmp_path, LZ4).convert(KEY) == "converted"
    assert begun is not None and form_of(path) == "lz4 32"
    for _ in range(3):
        assert_same(begun.wait()[0], item())
        begun = reader.start([KEY.digest])[0]
        assert begun is not None
    assert_same(held, item()["image"])


def test_the_listing_tells_the_new_form(tmp_path: Path) -> None:
    for form in (WHOLE, LZ4, ZSTD):
        path = saved(tmp_path, WHOLE)
        if form is not WHOLE:
            assert cache_in(tmp_path, form).convert(KEY) == "converted"
        by_index, by_header = survey(tmp_path, Index(tmp_path)), survey(tmp_path)
        assert [found.form for found in (*by_index, *by_header)] == [form.text] * 2
        assert by_index[0].packed == by_header[0].packed
        assert (f"({form.codec}, 32³)" in by_header[0].packed) == (form is not WHOLE)
        path.unlink()


def test_converting_a_missing_record_does_nothing(tmp_path: Path) -> None:
    assert cache_in(tmp_path, LZ4).convert(KEY) is None
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# Interrupted


class Dying(PosixBackend):
    """Ends its process while it writes, or once it has written."""

    def __init__(self, half: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._half = half

    def write(self, path: str, buffers: Sequence[Any], **how: Any) -> None:
        super().write(path, buffers[: len(buffers) // 2] if self._half else buffers, **how)
        os.kill(os.getpid(), signal.SIGKILL)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_a_write(folder: Path, half: bool) -> None:
    cache_in(folder, LZ4, Storage(Dying(half))).convert(KEY)


def _die_before_the_rename(folder: Path) -> None:
    temporary.os.rename = _die  # type: ignore[assignment]
    cache_in(folder, LZ4).convert(KEY)


def _die_behind_the_rename(folder: Path) -> None:
    directory._note = _die
    cache_in(folder, LZ4).convert(KEY)


@pytest.mark.parametrize(
    ("step", "form"),
    [
        (lambda folder: _die_in_a_write(folder, half=True), "zstd 32"),
        (lambda folder: _die_in_a_write(folder, half=False), "zstd 32"),
        (_die_before_the_rename, "zstd 32"),
        (_die_behind_the_rename, "lz4 32"),
    ],
    ids=["half written", "written", "before the rename", "after the rename"],
)
def test_a_kill_leaves_one_form_or_the_other(tmp_path: Path, step: Callable[[Path], None], form: str) -> None:
    path = saved(tmp_path, ZSTD)
    pid = fork()
    if pid == 0:
        step(tmp_path)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert form_of(path) == form
    assert_sound(tmp_path)
    prepare(tmp_path)
    assert os.listdir(tmp_path / ".tmp") == [], "what the dead process left is gone"
    if form != "lz4 32":
        assert cache_in(tmp_path, LZ4).convert(KEY) == "converted"
    assert_sound(tmp_path)
    assert [found.form for found in survey(tmp_path, Index(tmp_path))] == ["lz4 32"]


def test_a_full_disk_and_a_read_only_one_leave_the_record_as_it_was(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", 8 << 20) as folder:
        path = saved(folder, ZSTD)
        with pytest.raises(OSError, match="No space left"):
            cache_in(folder, WHOLE).convert(KEY)
        assert os.listdir(folder / ".tmp") == []
        read_only(folder)
        with pytest.raises(OSError, match="Read-only"):
            cache_in(folder, LZ4).convert(KEY)
        assert form_of(path) == "zstd 32"
        assert_sound(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Others


class Meanwhile(PosixBackend):
    """Something happens to the record while its new form is written."""

    def __init__(self, what: Callable[[], Any]) -> None:
        super().__init__(torch.device("cpu"))
        self._what = what

    def write(self, path: str, buffers: Sequence[Any], **how: Any) -> None:
        super().write(path, buffers, **how)
        self._what()


def test_a_record_that_was_replaced_meanwhile_stays(tmp_path: Path) -> None:
    path = saved(tmp_path, WHOLE)
    other = Storage(Meanwhile(lambda: cache_in(tmp_path, ZSTD).convert(KEY)))
    assert cache_in(tmp_path, LZ4, other).convert(KEY) == "cached"
    assert form_of(path) == "zstd 32"
    assert os.listdir(tmp_path / ".tmp") == []
    assert_sound(tmp_path)


def test_a_record_that_was_deleted_meanwhile_stays_so(tmp_path: Path) -> None:
    path = saved(tmp_path, WHOLE)
    assert cache_in(tmp_path, LZ4, Storage(Meanwhile(path.unlink))).convert(KEY) is None
    assert not path.exists()
    assert os.listdir(tmp_path / ".tmp") == []


def test_saving_over_a_file_that_changed_leaves_the_new_file(tmp_path: Path) -> None:
    path = saved(tmp_path, WHOLE)
    cache = cache_in(tmp_path, LZ4)
    file = directory.read_whole(str(path), KEY.digest)[0]
    os.utime(path)
    before = path.read_bytes()
    with pytest.raises(FileChanged, match="was replaced or removed"):
        cache.save(KEY, encode_item(item()), replaces=file)
    assert path.read_bytes() == before


@pytest.mark.parametrize("part", ["image", "noise", "__tiles.label", "__arrays", "header", "end"])
def test_a_damaged_record_is_reported_and_not_converted(tmp_path: Path, part: str) -> None:
    path = saved(tmp_path, LZ4)
    with path.open("rb") as file:
        read = header.read(file.fileno())
    entries = {**read.tensors, **read.front()}
    if part == "end":
        os.truncate(path, path.stat().st_size - 4096)
    else:
        place = 1000 if part == "header" else entries[part].offset + entries[part].nbytes // 2
        with path.open("r+b") as f:
            f.seek(place)
            byte = f.read(1)[0]
            f.seek(place)
            f.write(bytes([byte ^ 1]))
    before = path.read_bytes()
    with pytest.warns(CacheWarning, match="computed again"):
        assert cache_in(tmp_path, ZSTD).convert(KEY) is None
    assert path.read_bytes() == before


def test_another_records_bytes_are_not_converted(tmp_path: Path) -> None:
    path = saved(tmp_path, LZ4)
    other = path.with_name(path.name.replace(KEY.digest, key("b").digest))
    path.rename(other)
    with pytest.warns(CacheWarning, match="swapped, copied or linked"):
        assert cache_in(tmp_path, ZSTD).convert(key("b")) is None


def test_records_that_cannot_be_unpacked_here_count_as_cached_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, LZ4)
    before = path.read_bytes()
    monkeypatch.setattr(blosc, "why_not", lambda: "Blosc2 is not installed")
    cache = cache_in(tmp_path, WHOLE)
    with pytest.warns(CacheWarning, match="without being replaced: Blosc2 is not installed") as given:
        assert cache.holds(KEY.digest) and cache.holds(KEY.digest, converted=True)
        assert cache.convert(KEY) == "cached"
    assert len(given) == 1
    assert cache.why_unusable(KEY.digest) == "Blosc2 is not installed"
    assert path.read_bytes() == before


def test_small_items_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TILED_BYTES", 64 << 20)
    saved(tmp_path, WHOLE)
    assert cache_in(tmp_path, LZ4).holds(KEY.digest, converted=True)


def test_machines_where_auto_chooses_differently_stop_converting(tmp_path: Path) -> None:
    saved(tmp_path, WHOLE)
    machines = [
        cache_in(tmp_path, Compression("lz4", 32, named=False)),
        cache_in(tmp_path, Compression(named=False)),
        cache_in(tmp_path, Compression("lz4", 16, named=False)),
    ]
    converted = [n for n in [0, 1, 2] * 3 if not machines[n].holds(KEY.digest, True) and machines[n].convert(KEY)]
    assert converted == [0]
