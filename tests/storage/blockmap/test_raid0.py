"""Block maps of files on md RAID0: simulated arrays everywhere, a real one where the kernel has md."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.errors import BlockMapError, NotMappable
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.raid0 import Part, Raid0
from tests.loopdisk import loop_device, needs_root, run
from tests.storage.blockmap.striped import ARRAYS, Striped, dealt, striped


def fill(folder: Path) -> None:
    """Enough files to reach every zone of an array of 30 MB, one of them larger than its chunks."""
    (folder / "set").mkdir()
    for seed, size in enumerate((0, 1, 4097, 5_000_001, *[700_001] * 22)):
        (folder / f"set/{seed}.bin").write_bytes(np.random.default_rng(seed).bytes(size))


@pytest.fixture(params=ARRAYS)
def array(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Striped]:
    with striped(tmp_path, *ARRAYS[request.param], fill, monkeypatch) as array:
        yield array


@given(
    chunk=st.sampled_from([512, 1536, 4096]), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    layout=st.sampled_from([1, 2]), ends=st.tuples(st.integers(0, 1 << 17), st.integers(0, 1 << 17)),
)  # fmt: skip
def test_pieces_are_where_md_puts_them(chunk: int, sizes: list[int], layout: int, ends: tuple[int, int]) -> None:
    """Against a model that deals chunks out to the members, one after the other."""
    data = np.random.default_rng(len(sizes)).bytes(sum(sizes) * chunk)
    array = Raid0(chunk, layout, tuple(Part(512 * i, size * chunk) for i, size in enumerate(sizes)))
    on = [bytes(512 * i) + member for i, member in enumerate(dealt(data, chunk, sizes, layout))]
    start, end = sorted(min(end, len(data)) for end in ends)
    found = b"".join(on[member][at : at + nbytes] for member, at, nbytes in array.pieces(start, end - start))
    assert found == data[start:end]


def test_every_byte_is_on_the_members(array: Striped) -> None:
    """Simulated: all is read from the members, which hold the bytes only where md would have put them."""
    blocks = BlockMap.build(array.disk.folder / "set")
    assert blocks.origin is not None
    assert blocks.origin.disk.path == "/dev/md0"
    used = {
        disk.path
        for entry in blocks.values()
        for extent in entry.extents
        for disk, *_ in blocks.origin.disk.pieces(extent.start, extent.nbytes)
    }
    assert used == set(array.members)
    assert blocks.verify(data=True) == {}


def test_a_saved_map_says_how_to_find_them(array: Striped, tmp_path: Path) -> None:
    made = BlockMap.build(array.disk.folder / "set")
    made.save(tmp_path / "map.json")
    read = BlockMap.load(tmp_path / "map.json")
    assert (read.origin, dict(read)) == (made.origin, dict(made))
    with pytest.raises(BlockMapError, match="/dev/md0 is an array of drives"):
        made.plain()


def test_a_byte_that_a_member_lost_is_found(array: Striped) -> None:
    blocks = BlockMap.build(array.disk.folder / "set")
    assert blocks.origin is not None
    extent = blocks["set/10.bin"].extents[-1]
    disk, place, nbytes = list(blocks.origin.disk.pieces(extent.start, extent.nbytes))[-1]
    with open(disk.path, "r+b", buffering=0) as member:
        assert nbytes >= 4096
        member.seek(place)
        member.write(b"lost")
        os.fsync(member.fileno())
    assert blocks.verify(data=True).keys() == {"set/10.bin"}


@pytest.mark.parametrize(
    ("file", "value", "match"),
    [
        ("md/level", "raid5", "it is raid5"),
        ("md/layout", "0", r"layout, 0, is not.*layout-original"),
        ("md/raid_disks", "4", r"4 members.*slots \[0, 1, 2\]"),
        ("md/raid_disks", "3 (4)", "invalid literal"),  # while it is reshaped
        ("md/chunk_size", "1536", "blocks|bytes"),
        ("size", "4096", "and it has 2097152"),
    ],
)
def test_what_is_not_certain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, value: str, match: str
) -> None:
    with striped(tmp_path, *ARRAYS["unequal, original"], fill, monkeypatch) as array:
        (array.sysfs / file).write_text(f"{value}\n")
        with pytest.raises(NotMappable, match=f"md0, an md array, and where its bytes lie is not certain: .*({match})"):
            BlockMap.build(array.disk.folder / "set")


def test_an_array_of_arrays_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with striped(tmp_path, *ARRAYS["equal"], fill, monkeypatch) as array:
        inner = tmp_path / "sys/devices" / Path(array.members[1]).name
        (inner / "slaves").unlink()
        (inner / "slaves/sda").mkdir(parents=True)
        with pytest.raises(NotMappable, match="made of other devices"):
            BlockMap.build(array.disk.folder / "set")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"chunk": 0}, "whole chunks"), ({"chunk": 1000}, "whole chunks"), ({"chunk": "1"}, "whole number"),
        ({"parts": []}, "whole chunks"), ({"layout": 7}, "layout, 7"),
    ],
)  # fmt: skip
def test_a_map_with_an_array_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], match: str
) -> None:
    with striped(tmp_path, *ARRAYS["unequal, original"], fill, monkeypatch) as array:
        BlockMap.build(array.disk.folder / "set").save(tmp_path / "map.json")
    entries = json.loads((tmp_path / "map.json").read_text())
    entries["__blockmap__"]["disk"]["array"] |= change
    (tmp_path / "map.json").write_text(json.dumps(entries))
    with pytest.raises(BlockMapError, match=match):
        BlockMap.load(tmp_path / "map.json")


@pytest.mark.parametrize("layout", ["original", "alternate"])
def test_a_real_array(tmp_path: Path, layout: str) -> None:
    if not Path("/proc/mdstat").exists() or shutil.which("mdadm") is None:
        pytest.skip("this kernel has no md, or the machine no mdadm")
    needs_root("mkfs.ext4")
    with ExitStack() as stack:
        members = []
        for i, mib in enumerate((9, 20, 14)):
            image = tmp_path / f"{i}.img"
            image.write_bytes(bytes(mib << 20))
            members.append(stack.enter_context(loop_device(image)))
        array, mount = "/dev/md/monai-gds-test", str(tmp_path / "mnt")
        make = ("mdadm", "--create", array, "--run", "--level=0", "--chunk=64", f"--layout={layout}")
        run(*make, f"--raid-devices={len(members)}", *members)
        stack.callback(run, "mdadm", "--stop", array)
        run("mkfs.ext4", "-q", "-F", array)
        os.mkdir(mount)
        run("mount", array, mount)
        stack.callback(run, "umount", mount)
        fill(Path(mount))
        assert BlockMap.build(f"{mount}/set").verify(data=True) == {}
