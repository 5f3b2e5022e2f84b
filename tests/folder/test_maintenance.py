"""What the commands `monai-gds cache ls`, `verify` and `prune` find in a cache directory, and what they may delete.

How they print it is tested in tests/command/test_cache.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from dataclasses import replace
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from monai.data import PersistentDataset
from monai.transforms import Compose, EnsureTyped, ScaleIntensityd

from monai_gds.base.dtypes import DTYPES
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.folder.index import Index, IndexEntry
from monai_gds.folder.maintenance import (
    Found,
    check,
    other_files,
    pipeline_of,
    prunable,
    record_files,
    remove,
    survey,
)
from monai_gds.keys.sources import Sources
from monai_gds.records import header
from monai_gds.records.soundness import check_record
from monai_gds.shared.notes import FOLDER
from monai_gds.tiles import blosc
from tests.commands import run
from tests.machines import in_child, shared_folder
from tests.records.handmade import key_of_version_2, version_2, write

needs_blosc2 = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")

EARLIER = Compose([EnsureTyped("image")])
LATER = Compose([EnsureTyped("image"), ScaleIntensityd("image")])


def fill(folder: Path, transform: Any = EARLIER, items: int = 1, **more: Any) -> None:
    """Caches items that differ."""
    data = [{"image": torch.full((1, 64, 64), float(i)), **more} for i in range(items)]
    with GDSDataset(data, transform, folder, "cpu") as dataset:
        _ = [dataset[i] for i in range(items)]


def records(folder: Path) -> set[Path]:
    return set(folder.glob("*.safetensors"))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The one record of a cache directory."""
    fill(tmp_path)
    (record,) = records(tmp_path)
    return record


def flip_last_tensor(record: Path) -> None:
    """Damages the data, which the header's checksum does not cover."""
    with record.open("r+b") as file:
        read = header.read(file.fileno())
        file.seek(max(t.offset for t in read.tensors.values()))
        file.write(b"\xff")


def state(path: Path) -> list[int]:
    """Size and mtime of a source."""
    return [path.stat().st_size, path.stat().st_mtime_ns]


def content(path: Path) -> list[Any]:
    """Size and hash, as records keep them of a source."""
    return list(Sources("content", None).identity(str(path)) or ())


# ---------------------------------------------------------------------------------------------------------------------
# prune


@pytest.mark.parametrize("damage", [b"", b"no header at all", b"\x08" + bytes(7) + b'{"a":0} '])
def test_a_damaged_record_is_deleted(record: Path, damage: bytes) -> None:
    record.write_bytes(damage)
    done = run("cache", "prune", record.parent)
    assert done.exit_code == 0
    assert "1 files" in done.stdout
    assert not record.exists()


def test_files_of_others_are_left_alone(record: Path) -> None:
    """A training's folder by mistake: its checkpoints, weights and MONAI's own cache stay, and a renamed record."""
    folder = record.parent
    torch.save({"epoch": 1}, folder / "checkpoint.pt")
    safetensors.torch.save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    _ = PersistentDataset([{"image": torch.ones(1, 8, 8, 8)}], Compose([EnsureTyped("image")]), folder)[0]
    (folder / "kept.safetensors").write_bytes(record.read_bytes())
    before = {path.name for path in folder.iterdir() if path.is_file()}
    assert len(before) == 5
    done = run("cache", "prune", "--damaged", folder)
    assert done.exit_code == 0
    assert "0 files" in done.stdout
    assert {path.name for path in folder.iterdir() if path.is_file()} == before


def test_a_record_that_was_replaced_meanwhile_stays(record: Path) -> None:
    """Whoever reads a damaged record computes it again."""
    sound = record.read_bytes()
    record.write_bytes(b"no header at all")
    (doomed,) = prunable(record.parent, survey(record.parent))
    record.unlink()
    record.write_bytes(sound)
    assert not remove(doomed)
    assert record.read_bytes() == sound
    record.unlink()
    assert not remove(doomed)


# Superseded: a source is another


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source file, outside of the cache directory."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "ct.npy"
    np.save(path, np.zeros(8))
    return path


def pruned(folder: Path, *options: str) -> set[str]:
    """The names of records that ``prune`` deletes."""
    before = records(folder)
    assert run("cache", "prune", *options, folder).exit_code == 0
    return {path.name for path in before - records(folder)}


def test_a_source_of_another_size_supersedes_and_a_touched_one_does_not(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    record = version_2(cache, key_of_version_2(**{str(source): content(source)}))
    os.utime(source, ns=(0, 0))
    assert pruned(cache, "--check-sources") == set()
    source.write_bytes(source.read_bytes() + b"more")
    assert pruned(cache) == {record.name}


def test_contents_are_compared_when_asked(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    record = version_2(cache, key_of_version_2(**{str(source): content(source)}))
    np.save(source, np.ones(8))
    assert pruned(cache) == set()
    assert pruned(cache, "--check-sources") == {record.name}


def test_an_mtime_that_identifies_is_compared(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    size, mtime = state(source)
    record = version_2(cache, key_of_version_2(**{str(source): [size, f"stat:{mtime}"]}))
    assert pruned(cache, "--check-sources") == set()
    os.utime(source, ns=(0, 0))
    assert pruned(cache) == {record.name}


@pytest.mark.parametrize("identity", [[-1, "told"], [-1, "ab" * 16], [192, "unreadable:1:2"], [0, "unlisted"]])
def test_a_source_that_cannot_be_judged_from_here_supersedes_nothing(
    tmp_path: Path, source: Path, identity: list[Any]
) -> None:
    assert source.stat().st_size == 192
    where = source if identity[0] else source.parent
    version_2(tmp_path / "cache", key_of_version_2(**{str(where): identity}))
    assert pruned(tmp_path / "cache", "--check-sources") == set()


def test_records_with_missing_sources_go_when_asked(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    record = version_2(cache, key_of_version_2(**{str(source): content(source)}))
    source.unlink()
    assert pruned(cache, "--check-sources") == set()
    assert pruned(cache, "--missing-sources") == {record.name}


# Superseded: there is a newer record


def older_and_newer(older: Path, newer: Path) -> None:
    os.utime(older, (0, 1_000_000_000))
    os.utime(newer, (0, 1_000_000_100))


def test_a_newer_record_of_the_same_item_sources_and_transforms_supersedes(tmp_path: Path, source: Path) -> None:
    sources = {str(source): content(source)}
    older, newer = (version_2(tmp_path, key_of_version_2(monai=version, **sources)) for version in "12")
    older_and_newer(older, newer)
    assert pruned(tmp_path) == {older.name}


def test_records_that_differ_by_more_than_that_stay(tmp_path: Path, source: Path) -> None:
    sources = {str(source): content(source)}
    version_2(tmp_path, key_of_version_2(**sources))
    version_2(tmp_path, key_of_version_2(item="another", **sources))
    version_2(tmp_path, key_of_version_2(transform="another", **sources))
    version_2(tmp_path, key_of_version_2())
    untracked = key_of_version_2(**sources)
    untracked["parts"][4] = {"track_meta": False}
    version_2(tmp_path, untracked)
    rooted = key_of_version_2(**sources)
    rooted["parts"][6] = True
    version_2(tmp_path, rooted)
    assert len(records(tmp_path)) == 6
    assert pruned(tmp_path) == set()


# Pipelines


@pytest.mark.filterwarnings("ignore:every item was computed again")
def test_a_pipeline_that_was_given_up_goes_when_it_is_named(tmp_path: Path) -> None:
    fill(tmp_path, EARLIER, 2)
    earlier = records(tmp_path)
    fill(tmp_path, LATER, 3)
    later = records(tmp_path) - earlier
    assert "0 files" in run("cache", "prune", tmp_path).stdout
    listed = run("cache", "ls", tmp_path).stdout
    (digits,) = re.findall(
        r"^pipeline (\w{8}): 2 records, 0\.\d MB, the newest from [-\d]+ [:\d]+$", listed, re.MULTILINE
    )

    done = run("cache", "prune", "--pipeline", digits.upper(), "--dry-run", tmp_path)
    assert "2 files" in done.stdout
    assert all(str(path) in done.stdout for path in earlier)
    assert records(tmp_path) == earlier | later
    assert run("cache", "prune", "--pipeline", digits[:4], tmp_path).exit_code == 0
    assert records(tmp_path) == later


@pytest.mark.parametrize(("digits", "why"), [("abc", "4 or more"), ("", "4 or more"), ("graf", "4 or more")])
def test_text_that_cannot_name_a_pipeline_is_wrong_usage(record: Path, digits: str, why: str) -> None:
    done = run("cache", "prune", f"--pipeline={digits}", record.parent)
    assert done.exit_code == 2
    assert why in done.output
    assert record.exists()


def test_an_unknown_pipeline_is_wrong_usage_and_the_known_ones_are_listed(record: Path) -> None:
    (found,) = survey(record.parent)
    other = f"{int(found.pipeline[:8], 16) ^ 1:08x}"
    done = run("cache", "prune", "--pipeline", other, record.parent)
    assert done.exit_code == 2
    assert other in done.output
    assert found.pipeline[:8] in done.output
    assert record.exists()


def test_digits_that_fit_several_pipelines_are_refused() -> None:
    several = [Found("", 0, pipeline=blake2b(bytes([i % 256, i // 256])).hexdigest()[:32]) for i in range(2000)]
    prefixes = [found.pipeline[:4] for found in several]
    twice = next(prefix for prefix in prefixes if prefixes.count(prefix) > 1)
    with pytest.raises(ValueError, match=f"'{twice}' is the beginning of several pipelines: {twice}.*, {twice}"):
        pipeline_of(several, twice)


def test_records_whose_transforms_are_not_part_of_the_key_have_no_pipeline(tmp_path: Path) -> None:
    with GDSDataset([{"image": torch.ones(1)}], EARLIER, tmp_path, "cpu", hash_transform=None) as dataset:
        _ = dataset[0]
    assert "pipeline -: 1 records" in run("cache", "ls", tmp_path).stdout
    done = run("cache", "prune", "--pipeline", "abcd", tmp_path)
    assert done.exit_code == 2
    assert "name none" in done.output


# ---------------------------------------------------------------------------------------------------------------------
# verify


def test_damage_is_counted_and_prune_damaged_deletes_it(tmp_path: Path) -> None:
    fill(tmp_path, items=3)
    victim = min(records(tmp_path))
    flip_last_tensor(victim)
    (tmp_path / "notes.txt").write_text("mine")
    safetensors.torch.save_file({"weight": torch.ones(4)}, tmp_path / "model.safetensors")

    done = run("cache", "verify", tmp_path)
    assert done.exit_code == 1
    assert f"{victim}: the bytes of 'image' do not match" in done.stdout
    assert "3 records, 1 damaged; 2 other files\n" in done.stdout
    assert "model.safetensors:" not in done.stdout
    assert "computed again when" in done.stdout
    assert f"monai-gds cache prune --damaged {tmp_path}" in done.stdout

    assert "0 files" in run("cache", "prune", tmp_path).stdout  # it reads headers only
    assert "1 files" in run("cache", "prune", "--damaged", "--dry-run", tmp_path).stdout
    assert victim.exists()
    assert "1 files" in run("cache", "prune", "--damaged", tmp_path).stdout
    assert not victim.exists()
    done = run("cache", "verify", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "2 records, 0 damaged; 2 other files\n")


def test_a_record_of_a_newer_version_is_not_damaged_and_stays(tmp_path: Path) -> None:
    record = write(tmp_path / f"{'a' * 32}{header.SUFFIX}", 3, {})
    done = run("cache", "verify", record.parent)
    assert done.exit_code == 1
    assert "format version 3" in done.stdout
    assert "1 records, 0 damaged, 1 that cannot be checked\n" in done.stdout
    assert "prune" not in done.stdout
    assert "0 files" in run("cache", "prune", "--damaged", record.parent).stdout
    assert record.exists()


@pytest.mark.parametrize("how", ["swapped", "copied", "linked", "hard linked"])
def test_a_record_under_another_name_is_damaged(tmp_path: Path, how: str) -> None:
    a, b = version_2(tmp_path, key_of_version_2("a")), version_2(tmp_path, key_of_version_2("b"))
    assert [check(path).problem for path in (a, b)] == ["", ""]  # type: ignore[union-attr]
    other = tmp_path / f"{'c' * 32}.v2.safetensors"
    wrong = {other.name}
    if how == "swapped":
        a.rename(tmp_path / "x")
        b.rename(a)
        (tmp_path / "x").rename(b)
        wrong = {a.name, b.name}
    elif how == "copied":
        other.write_bytes(a.read_bytes())
    elif how == "linked":
        other.symlink_to(a)
    else:
        os.link(a, other)
    assert {found.name for found in survey(tmp_path) if found.damaged} == wrong
    assert {found.name for found in map(check, records(tmp_path)) if found and found.damaged} == wrong
    assert run("cache", "verify", "--summary", tmp_path).stdout.startswith(
        f"{len(records(tmp_path))} records, {len(wrong)} damaged"
    )
    assert pruned(tmp_path) == wrong


#: Keys that no writer wrote, as JSON.
ODD_KEYS = [
    "[]",
    "1",
    "null",
    '"text"',
    "NaN",
    "{",
    "[" * 50_000,
    '{"sources": []}',
    '{"sources": {"/a": 1}}',
    '{"a": 1}',
    '{"parts": [], "item": "i", "pipeline": "", "sources": {}}',  # not what the file is called after
    '{"parts": {}, "item": "i", "pipeline": "", "sources": {}}',
    '{"parts": [1], "item": 1, "pipeline": "", "sources": {}}',
    '{"parts": [1], "item": "i", "pipeline": [], "sources": {}}',
    '{"parts": [1], "item": "i", "pipeline": "\\u001b", "sources": {}}',
    '{"parts": [1], "item": "i", "pipeline": "", "sources": [1]}',
    '{"parts": [1], "item": "i", "pipeline": "", "sources": {"/a": [1.5, ""]}}',
    '{"parts": [1], "item": "i", "pipeline": "", "sources": {"/a": [1, []]}}',
    *(
        '{"parts": [' + "[" * n + "]" * n + '], "item": "i", "pipeline": "", "sources": {}}'
        for n in range(800, 1000, 8)
    ),
]


def test_an_odd_key_costs_its_own_row_only(tmp_path: Path) -> None:
    sound = version_2(tmp_path, key_of_version_2())
    odd = {write(tmp_path / f"{n:032x}{header.SUFFIX}", header.VERSION, key).name for n, key in enumerate(ODD_KEYS)}
    for options in (["ls"], ["ls", "--json"], ["ls", "--sort", "source"], ["verify"], ["prune", "--dry-run"]):
        done = run("cache", *options, tmp_path)
        assert sound.name in done.stdout or options[0] in ("verify", "prune")
        assert done.stderr == ""
    assert {found.name for found in survey(tmp_path, Index(tmp_path)) if found.damaged} == odd
    assert pruned(tmp_path) == odd


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("dtype", bad) for bad in ("F31", None, [])),
        *(("shape", bad) for bad in ([4, -256], None, ["4", 256], [1024.0], [[4], 256])),
        *(("data_offsets", bad) for bad in ([0], [0, 4095], "ab", [None, 1], [1, 4097], [0.0, 4096.0], None)),
    ],
)
def test_an_odd_entry_is_damage(tmp_path: Path, name: str, bad: Any) -> None:
    record = version_2(tmp_path, key_of_version_2())
    data = record.read_bytes()
    length = int.from_bytes(data[:8], "little")
    told = json.loads(data[8 : 8 + length])
    told["image"][name] = bad
    text = bytearray(json.dumps(told, separators=(",", ":")).encode().ljust(length))
    text[33:41] = b"00000000"
    text[33:41] = b"%08x" % zlib.crc32(text)
    record.write_bytes(data[:8] + text + data[8 + length :])
    (found,) = survey(tmp_path)
    assert found.damaged, found


def test_any_flipped_bit_of_a_header_is_damage(tmp_path: Path) -> None:
    record = version_2(tmp_path, key_of_version_2())
    data = record.read_bytes()
    for at in [*range(64), *range(64, 4096, 97)]:
        record.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        (found,) = survey(tmp_path)
        assert found.damaged, at
    for length in [*range(64), *range(64, len(data), 97)]:
        record.write_bytes(data[:length])
        (found,) = survey(tmp_path)
        assert found.damaged, length


def test_dtypes_of_headers_are_those_of_encoders() -> None:
    assert all(getattr(torch, name).itemsize == size for name, size in DTYPES.values())


def test_a_failing_disk_is_damage_and_a_lack_of_memory_is_not(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, damaged in ((errno.EIO, True), (errno.ENOMEM, False), (errno.EMFILE, False), (errno.ESTALE, False)):

        def fail(*_: Any, code: int = code) -> bytes:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fail)
            found = check(record)
        assert found is not None
        assert (found.damaged, bool(found.problem)) == (damaged, True)


def test_records_without_read_permission_are_not_damaged_and_stay() -> None:
    """In a group's folder, another user's records."""
    with shared_folder() as folder:
        fill(folder)
        (record,) = records(folder)
        record.chmod(0o600)
        verified, pruned = in_child(
            lambda: [run("cache", *command, folder).stdout for command in (["verify"], ["prune", "--damaged"])],
            nobody=True,
        )
        assert "1 records, 0 damaged, 1 that cannot be checked" in verified
        assert "0 files" in pruned
        assert record.exists()


def test_a_record_deleted_while_it_is_looked_at_is_not_damaged(record: Path) -> None:
    record.unlink()
    assert check(record) is None


@pytest.mark.parametrize("by", [b"", b"no record", None], ids=["an empty file", "another file", "nothing"])
def test_a_record_that_is_replaced_while_it_is_verified_is_judged_as_it_was(
    record: Path, by: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_and_check(file: BufferedReader, read: header.Header) -> None:
        record.unlink()
        if by is not None:
            record.write_bytes(by)
        check_record(file, read)

    monkeypatch.setattr("monai_gds.folder.maintenance._check_bytes", replace_and_check)
    found = check(record)
    assert found is not None
    assert not found.problem


# ---------------------------------------------------------------------------------------------------------------------
# ls: with an index and without


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose headers are read from now on."""
    from monai_gds.folder import maintenance

    names: list[str] = []
    look = maintenance.look
    monkeypatch.setattr(
        maintenance, "look", lambda path, *more: names.append(os.path.basename(path)) or look(path, *more)
    )
    return names


def without_key(found: list[Found]) -> list[Found]:
    """What an index tells of records, too."""
    return [replace(one, same="", inode=0) for one in found]


def test_headers_are_read_once_and_then_the_index_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {version_2(tmp_path, key_of_version_2(**{path: [1, "x"]})).name for path in ("/a", "/b")}
    plain = survey(tmp_path)
    assert not (tmp_path / FOLDER).exists()
    names = looked_at(monkeypatch)
    first = survey(tmp_path, Index(tmp_path))
    assert set(names) == both
    names.clear()
    second = survey(tmp_path, Index(tmp_path))
    assert names == []
    assert without_key(second) == without_key(first) == without_key(plain)


def test_a_record_that_is_not_as_noted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [version_2(tmp_path, key_of_version_2(item)) for item in "abc"]
    survey(tmp_path, Index(tmp_path))
    names = looked_at(monkeypatch)
    os.utime(paths[0], (2e9, 2e9))
    made = paths[1].stat().st_mtime_ns
    with paths[1].open("ab") as file:
        file.write(b"x")
    os.utime(paths[1], ns=(made, made))  # the size alone tells
    new = version_2(tmp_path, key_of_version_2("d"))
    found = {one.name: one for one in survey(tmp_path, Index(tmp_path))}
    assert set(names) == {paths[0].name, paths[1].name, new.name}
    assert [path.name for path in paths if found[path.name].damaged] == [paths[1].name]
    names.clear()
    survey(tmp_path, Index(tmp_path))
    assert names == [paths[1].name]  # what is damaged is not noted


def test_a_record_whose_mtime_was_set_back_is_not_noted_again_and_again(tmp_path: Path) -> None:
    record = version_2(tmp_path, key_of_version_2())
    survey(tmp_path, Index(tmp_path))
    (facts,) = (tmp_path / FOLDER).iterdir()
    os.utime(record, (0, 0))
    (found,) = survey(tmp_path, Index(tmp_path))
    assert found.mtime_ns == 0
    assert list((tmp_path / FOLDER).iterdir()) == [facts]


def test_swapped_records_are_found_despite_the_index(tmp_path: Path) -> None:
    a, b = version_2(tmp_path, key_of_version_2("a")), version_2(tmp_path, key_of_version_2("b"))
    survey(tmp_path, Index(tmp_path))
    a.rename(tmp_path / "x")
    b.rename(a)
    (tmp_path / "x").rename(b)
    assert [found.damaged for found in survey(tmp_path, Index(tmp_path))] == [True, True]


def test_prune_does_not_trust_the_index(tmp_path: Path, source: Path) -> None:
    """It may be wrong, or somebody else's doing: a record is deleted for what its own header tells."""
    record = version_2(tmp_path, key_of_version_2(**{str(source): content(source)}))
    (found,) = survey(tmp_path)
    digest = record.name[:32]
    wrong = IndexEntry(digest, "i", "beef0123", found.nbytes, found.mtime_ns, (), {str(source): (1, "x")})
    Index(tmp_path).note_records([wrong])
    assert run("cache", "ls", "--json", tmp_path).stdout.count("beef0123") == 2
    assert pruned(tmp_path, "--missing-sources") == set()
    assert run("cache", "prune", "--pipeline", "beef0123", tmp_path).exit_code == 2


def test_looking_at_another_users_cache_leaves_nothing_in_it() -> None:
    with shared_folder() as folder:
        folder.chmod(0o777)
        version_2(folder, key_of_version_2())
        in_child(lambda: run("cache", "ls", folder), nobody=True)
        assert not (folder / FOLDER).exists()
        run("cache", "ls", folder)
        assert (folder / FOLDER).exists()


def test_a_folder_without_records_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for command in ("ls", "verify", "prune"):
        assert run("cache", command, tmp_path).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_links_to_themselves_and_folders_are_not_records(tmp_path: Path) -> None:
    for i, make in enumerate([lambda p: p.symlink_to(p), Path.mkdir, lambda p: p.symlink_to("nowhere"), os.mkfifo]):
        make(tmp_path / f"{i:032x}.v2.safetensors")
    assert survey(tmp_path) == [] == record_files(tmp_path) == other_files(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Compressed records


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """A compressed record of a tensor of 2 MB."""
    volume = torch.arange(80).float().repeat(80 * 80).view(1, 80, 80, 80)
    with GDSDataset([{"image": volume}], EARLIER, tmp_path, "cpu", compression="lz4") as dataset:
        _ = dataset[0]
    (record,) = records(tmp_path)
    return record


@needs_blosc2
@pytest.mark.parametrize("indexed", [True, False])
def test_a_compressed_record_is_listed_by_what_is_in_it(compressed: Path, indexed: bool) -> None:
    if not indexed:
        shutil.rmtree(compressed.parent / FOLDER)
    (found,) = survey(compressed.parent)
    assert found.tensors == (("image", "float32", (1, 80, 80, 80)),)
    assert found.ratio == 80**3 * 4 / compressed.stat().st_size > 50
    listed = run("cache", "ls", compressed.parent).stdout
    assert f"image (1, 80, 80, 80) float32 ÷ {found.ratio:.1f}" in listed
    (as_json,) = json.loads(run("cache", "ls", compressed.parent, "--json").stdout)["records"]
    assert as_json["ratio"] == round(found.ratio, 3)


@needs_blosc2
def test_damage_in_tiles_and_in_their_table_is_found(compressed: Path) -> None:
    sound = check(compressed)
    assert sound is not None and not sound.problem
    with compressed.open("rb") as file:
        read = header.read(file.fileno())
    for part, name in ((read.tensors["image"], "image"), (read.tiles["image"].table, "__tiles.image")):
        before = compressed.read_bytes()
        with compressed.open("r+b") as file:
            file.seek(part.offset + part.nbytes // 2)
            file.write(b"\xff\xfe")
        found = check(compressed)
        assert found is not None and found.damaged and repr(name) in found.problem
        compressed.write_bytes(before)
