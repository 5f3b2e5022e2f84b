"""The block map: right places on every kind of disk, refusals by name, and no stale map unnoticed."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.base.checksum import checksum
from monai_gds.errors import BlockMapError, FileChanged, NotMappable
from monai_gds.storage.blockmap import extents, inodes, saved
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk, Extent
from monai_gds.storage.blockmap.saved import FileBlocks, Origin
from tests.loopdisk import LoopDisk, loop_disk, new_uuid, run

SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000, 116_000, 3_000_001)

DISKS: list[dict[str, Any]] = [
    {"kind": kind, "block_size": block, "partitioned": partitioned}
    for kind in ("ext4", "xfs")
    for block in (512, 4096)
    for partitioned in (False, True)
]


def content(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def fill(folder: Path) -> None:
    """Files of every size, one with holes, one of many extents."""
    folder.mkdir()
    for seed, size in enumerate(SIZES):
        (folder / f"{size}.bin").write_bytes(content(size, seed))
    with (folder / "sparse.bin").open("wb") as f:
        f.truncate(1 << 20)
        for offset, nbytes in ((100_000, 5000), (700_000, 1)):
            f.seek(offset)
            f.write(content(nbytes))
    with (folder / "cut.bin").open("wb") as f, (folder / "other.bin").open("wb") as g:
        for i in range(60):
            for out in (f, g):
                out.write(content(5000, i))
                out.flush()
                os.fsync(out.fileno())


def read_disk(device: str, blocks: FileBlocks) -> bytes:
    """A file's bytes from the places that a map gives, past the device's page cache, which may be older."""
    fd = os.open(device, os.O_RDONLY | os.O_DIRECT)
    try:
        data = bytearray(max([blocks.size, *(e.offset + e.nbytes for e in blocks.extents)]))
        for offset, start, nbytes in blocks.extents:
            first, end = start // 4096 * 4096, -(-(start + nbytes) // 4096) * 4096
            with mmap.mmap(-1, end - first) as pages:
                os.preadv(fd, [pages], first)
                data[offset : offset + nbytes] = pages[start - first : start - first + nbytes]
        return bytes(data[: blocks.size])
    finally:
        os.close(fd)


@pytest.fixture(scope="module", params=DISKS, ids=lambda d: "-".join(map(str, d.values())))
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path_factory.mktemp("disk"), **request.param) as disk:
        fill(disk.folder / "set")
        yield disk


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path, "ext4") as disk:
        yield disk


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path, "xfs") as disk:
        yield disk


class TestBuild:
    def test_every_file_is_where_it_says_on_the_whole_disk(self, disk: LoopDisk) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        assert len(blocks) == len(SIZES) + 3
        for path, entry in blocks.items():
            assert read_disk(disk.device, entry) == (disk.folder / path).read_bytes(), path
        assert len(blocks["set/cut.bin"].extents) > 1
        assert sum(e.nbytes for e in blocks["set/sparse.bin"].extents) < 100_000

    def test_says_where_it_was_made(self, disk: LoopDisk) -> None:
        origin = BlockMap.build(disk.folder / "set").origin
        assert origin is not None
        assert (origin.parent, origin.disk.path) == (str(disk.folder), disk.device)
        assert origin.uuid == run("blkid", "-o", "value", "-s", "UUID", disk.partition)
        assert origin.disk.block_size == int(run("blockdev", "--getss", disk.device))
        assert origin.start == (0 if disk.partition == disk.device else 1 << 20)

    def test_agrees_with_filefrag(self, disk: LoopDisk) -> None:
        listed = run("filefrag", "-b512", "-v", str(disk.folder / "set/116000.bin"))
        _, _, physical, *_ = next(line for line in listed.splitlines() if line.strip().startswith("0:")).split(":")
        (first,) = BlockMap.build(disk.folder / "set")["set/116000.bin"].extents
        partition = 0 if disk.partition == disk.device else 2048
        assert first.start // 512 == int(physical.split("..")[0]) + partition

    def test_the_uuid_is_the_disks_own_where_the_kernel_does_not_tell(
        self, disk: LoopDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = BlockMap.build(disk.folder / "set").origin
        monkeypatch.setattr(extents, "_GETFSUUID", 0)
        assert BlockMap.build(disk.folder / "set").origin == told

    def test_looks_up_by_the_files_own_path_too(self, disk: LoopDisk, monkeypatch: pytest.MonkeyPatch) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        assert blocks[str(disk.folder / "set/512.bin")] == blocks["set/512.bin"]
        monkeypatch.chdir(disk.folder / "set")
        assert blocks["512.bin"] == blocks["./512.bin"] == blocks["set/512.bin"]
        with pytest.raises(KeyError, match=r"set/no\.bin is not in the block map"):
            blocks["set/no.bin"]

    def test_an_unsynced_file_is_settled_first(self, disk: LoopDisk) -> None:
        path = disk.folder / "set" / "fresh.bin"
        path.write_bytes(content(50_000, 5))
        try:
            assert read_disk(disk.device, BlockMap.build(disk.folder / "set")["set/fresh.bin"]) == content(50_000, 5)
        finally:
            path.unlink()

    def test_names_with_any_bytes_and_links_to_files(self, ext4: LoopDisk, tmp_path: Path) -> None:
        folder = ext4.folder / "set"
        folder.mkdir()
        odd = os.fsencode(folder) + b"/\xff \xe4\n.bin"
        with open(odd, "wb") as f:
            f.write(b"odd")
        (folder / "link").symlink_to(odd)
        os.link(odd, folder / "hard")
        (folder / "to-above").symlink_to(ext4.folder)
        os.mkfifo(folder / "fifo")
        BlockMap.build(folder).save(tmp_path / "map.json")
        blocks = BlockMap.load(tmp_path / "map.json")
        assert {os.path.basename(p) for p in blocks} == {os.fsdecode(b"\xff \xe4\n.bin"), "link", "hard"}
        assert len({b.extents for b in blocks.values()}) == 1

    def test_folders_are_kept_also_without_files(self, ext4: LoopDisk, tmp_path: Path) -> None:
        folder = ext4.folder / "set"
        (folder / "a/deep").mkdir(parents=True)
        (folder / "empty").mkdir()
        (ext4.folder / "elsewhere/below").mkdir(parents=True)
        (ext4.folder / "elsewhere/x").write_bytes(b"x")
        (folder / "linked").symlink_to(ext4.folder / "elsewhere")
        (folder / "a/linked").symlink_to(ext4.folder / "elsewhere")
        os.mkdir(os.fsencode(folder) + b"/\xff")
        BlockMap.build(folder).save(tmp_path / "map.json")
        blocks = BlockMap.load(tmp_path / "map.json")
        assert set(blocks) == {"set/linked/x"}
        expected = {"set/a", "set/a/deep", "set/empty", "set/linked", "set/linked/below", os.fsdecode(b"set/\xff")}
        assert set(blocks.folders) == expected
        assert blocks.verify() == {}

    def test_a_dead_link_is_named(self, ext4: LoopDisk) -> None:
        (ext4.folder / "set").mkdir()
        (ext4.folder / "set/dead").symlink_to("nowhere")
        with pytest.raises(FileNotFoundError, match="set/dead"):
            BlockMap.build(ext4.folder / "set")

    def test_an_empty_folder_is_an_error(self, ext4: LoopDisk) -> None:
        (ext4.folder / "set").mkdir()
        with pytest.raises(BlockMapError, match="holds no file"):
            BlockMap.build(ext4.folder / "set")

    def test_another_file_system_below_is_an_error(self, ext4: LoopDisk) -> None:
        (ext4.folder / "set").mkdir()
        (ext4.folder / "set/elsewhere").symlink_to("/bin/sh")
        with pytest.raises(BlockMapError, match="another file system"):
            BlockMap.build(ext4.folder / "set")

    def test_a_file_that_cannot_be_mapped_is_listed_and_the_rest_is_mapped(self, xfs: LoopDisk, tmp_path: Path) -> None:
        folder = xfs.folder / "set"
        folder.mkdir()
        for name in ("a.bin", "b.bin", "shared.bin", "tail.bin"):
            (folder / name).write_bytes(content(10_000))
        _reflink(folder / "shared.bin", xfs.folder / "elsewhere.bin")
        with (folder / "tail.bin").open("r+b") as f:
            os.posix_fallocate(f.fileno(), 0, 1 << 20)
        BlockMap.build(folder).save(tmp_path / "map.json")
        blocks = BlockMap.load(tmp_path / "map.json")
        assert set(blocks) == {"set/a.bin", "set/b.bin"}
        assert {path: entry.size for path, entry in blocks.unmapped.items()} == {
            "set/shared.bin": 10_000,
            "set/tail.bin": 1 << 20,
        }
        for name, why in (("shared.bin", "reflink"), ("tail.bin", "never written")):
            with pytest.raises(KeyError, match=rf"{name} could not be mapped.*{why}.*cp --reflink=never"):
                blocks[str(folder / name)]
        assert blocks.verify() == {}

    def test_its_remedy_helps(self, xfs: LoopDisk) -> None:
        folder = xfs.folder / "set"
        folder.mkdir()
        (folder / "a.bin").write_bytes(content(10_000))
        (folder / "shared.bin").write_bytes(content(10_000))
        _reflink(folder / "shared.bin", xfs.folder / "elsewhere.bin")
        (folder / "tail.bin").write_bytes(content(10_000))
        with (folder / "tail.bin").open("r+b") as f:
            os.posix_fallocate(f.fileno(), 0, 1 << 20)
        assert len(BlockMap.build(folder).unmapped) == 2
        for name in ("shared.bin", "tail.bin"):
            run("cp", "--reflink=never", str(folder / name), str(folder / "copy"))
            os.rename(folder / "copy", folder / name)
        blocks = BlockMap.build(folder)
        assert blocks.unmapped == {}
        assert read_disk(xfs.device, blocks["set/tail.bin"]) == content(10_000) + bytes((1 << 20) - 10_000)

    def test_checksums_are_those_of_the_files(self, disk: LoopDisk, tmp_path: Path) -> None:
        BlockMap.build(disk.folder / "set", checksums=True).save(tmp_path / "map.json")
        blocks = BlockMap.load(tmp_path / "map.json")
        assert blocks.has_checksums
        assert not BlockMap.build(disk.folder / "set").has_checksums
        for path, entry in blocks.items():
            data = np.frombuffer((disk.folder / path).read_bytes(), np.uint8).copy()
            assert entry.checksum == checksum(torch.from_numpy(data)), path

    def test_inodes_are_found_on_the_disk(self, disk: LoopDisk) -> None:
        """As a driver in user space sees them, when the file system is unmounted."""
        blocks = BlockMap.build(disk.folder / "set")
        assert blocks.origin is not None
        run("umount", str(disk.folder))
        try:
            with open(disk.device, "rb") as device:
                start = blocks.origin.start

                def read(offset: int, nbytes: int) -> bytes:
                    return os.pread(device.fileno(), nbytes, start + offset)

                table = inodes.inode_table(blocks.origin.kind, read)
                assert table is not None
                for entry in blocks.values():
                    place = table.place(entry.inode or 0)
                    assert place is not None
                    found = table.parse(read(place, table.nbytes))
                    assert found == inodes.Inode(True, entry.size, entry.mtime_ns or 0)
                for number in (0, -5, 1 << 62):
                    assert table.place(number) is None or not table.parse(read(table.place(number), 4096)).in_use
        finally:
            run("mount", disk.partition, str(disk.folder))

    def test_progress_ends_at_the_number_of_files(self, disk: LoopDisk) -> None:
        seen: list[tuple[int, int]] = []
        BlockMap.build(disk.folder / "set", progress=lambda *at: seen.append(at))
        assert seen[-1] == (len(SIZES) + 3, len(SIZES) + 3)

    @pytest.mark.parametrize("folders", [10, pytest.param(100, marks=pytest.mark.long)])
    def test_a_thousand_files_in_each_of_many_folders(self, tmp_path: Path, folders: int) -> None:
        with loop_disk(tmp_path, "xfs", size=2 << 30) as disk:
            for folder in range(folders):
                (disk.folder / f"set/{folder}").mkdir(parents=True)
                for file in range(1000):
                    (disk.folder / f"set/{folder}/{file}").write_bytes(b"x")
            os.sync()
            blocks = BlockMap.build(disk.folder / "set")
        assert len(blocks) == 1000 * folders
        assert {len(blocks[path].extents) for path in blocks} == {1}


def _reflink(path: Path, copy: Path) -> None:
    with path.open("rb") as source, copy.open("wb") as target:
        fcntl.ioctl(target.fileno(), 0x40049409, source.fileno())  # FICLONE


def refused(folder: Path, match: str) -> None:
    with pytest.raises(NotMappable, match=match) as caught:
        BlockMap.build(folder)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert str(folder) in str(caught.value)


class TestRefusals:
    def one_file(self, disk: LoopDisk, data: bytes = b"x" * 10_000) -> Path:
        folder = disk.folder / "set"
        folder.mkdir()
        (folder / "file.bin").write_bytes(data)
        return folder

    def test_btrfs(self, tmp_path: Path) -> None:
        with loop_disk(tmp_path, "btrfs") as disk:
            refused(self.one_file(disk), "btrfs")

    def test_tmpfs(self) -> None:
        if not os.path.ismount("/dev/shm"):
            pytest.skip("this machine has no /dev/shm")
        refused(Path("/dev/shm"), "tmpfs")

    def test_journalled_data_by_mount_option(self, tmp_path: Path) -> None:
        with loop_disk(tmp_path, "ext4", mount="data=journal") as disk:
            refused(self.one_file(disk), "data=journal")

    def test_journalled_data_by_the_superblock(self, tmp_path: Path) -> None:
        """tune2fs -o journal_data does not show in mountinfo."""
        with loop_disk(tmp_path, "ext4") as disk:
            run("umount", str(disk.folder))
            run("tune2fs", "-o", "journal_data", disk.partition)
            run("mount", disk.partition, str(disk.folder))
            refused(self.one_file(disk), "data=journal")

    def test_journalled_data_of_one_file(self, ext4: LoopDisk) -> None:
        folder = self.one_file(ext4)
        run("umount", str(ext4.folder))  # chattr +j needs a capability that root in a container may lack
        run("debugfs", "-w", "-R", "set_inode_field /set/file.bin flags 0x84000", ext4.device)
        run("mount", ext4.device, str(ext4.folder))
        refused(folder, "journal")

    def test_inline_data(self, tmp_path: Path) -> None:
        with loop_disk(tmp_path, "ext4", make=("-O", "inline_data", "-I", "512")) as disk:
            refused(self.one_file(disk, b"tiny"), "inline")

    def test_encrypted(self, tmp_path: Path) -> None:
        """fscrypt's extents look like any other's; the inode tells."""
        with loop_disk(tmp_path, "ext4", make=("-O", "encrypt")) as disk:
            folder = disk.folder / "set"
            folder.mkdir()
            _encrypt(folder)
            (folder / "file.bin").write_bytes(b"x" * 10_000)
            refused(folder, "fscrypt")

    def test_never_written(self, ext4: LoopDisk) -> None:
        folder = self.one_file(ext4)
        with (folder / "file.bin").open("r+b") as f:
            os.posix_fallocate(f.fileno(), 0, 1 << 20)
        refused(folder, "never written")

    def test_shared(self, xfs: LoopDisk) -> None:
        folder = self.one_file(xfs)
        _reflink(folder / "file.bin", folder / "copy.bin")
        refused(folder, "reflink")

    @pytest.mark.parametrize(
        ("flag", "match"),
        [(0x2, "unknown"), (0x4 | 0x2, "unknown"), (0x4, "delayed"), (0x8, "encoded"), (0x80, "encrypted"),
         (0x100, "aligned"), (0x200, "inline"), (0x400, "tails"), (0x800, "never written"), (0x2000, "shared"),
         (0x4000, "unknown flags")],
    )  # fmt: skip
    def test_every_flag(self, ext4: LoopDisk, monkeypatch: pytest.MonkeyPatch, flag: int, match: str) -> None:
        answer = struct.pack("=QQQ16xI12x", 0, 1 << 20, 12_288, flag | 0x1)
        monkeypatch.setattr(saved, "look", lambda *_: answer)
        refused(self.one_file(ext4), match)

    @pytest.mark.parametrize(("mark", "match"), [("dm", "device-mapper"), ("bcache", "bcache")])
    def test_layers(
        self, ext4: LoopDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, match: str
    ) -> None:
        """Stood in for by a sysfs of our own: no kernel has all of these at hand."""
        folder = self.one_file(ext4)
        device = tmp_path / f"sys/block/{mark}-0"
        (device / mark).mkdir(parents=True)
        st = folder.stat()
        link = tmp_path / "sys/dev/block" / f"{os.major(st.st_dev)}:{os.minor(st.st_dev)}"
        link.parent.mkdir(parents=True)
        link.symlink_to(device)
        monkeypatch.setattr(extents, "SYSFS", tmp_path / "sys")
        refused(folder, match)

    def test_other_stacked_devices(self, ext4: LoopDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = self.one_file(ext4)
        st = folder.stat()
        slaves = tmp_path / "sys/dev/block" / f"{os.major(st.st_dev)}:{os.minor(st.st_dev)}" / "slaves"
        (slaves / "sda").mkdir(parents=True)
        monkeypatch.setattr(extents, "SYSFS", tmp_path / "sys")
        refused(folder, "made of other devices")

    def test_xfs_realtime(self, xfs: LoopDisk, monkeypatch: pytest.MonkeyPatch) -> None:
        """Simulated: this needs a kernel with CONFIG_XFS_RT."""
        monkeypatch.setattr(extents, "_xfs_realtime_blocks", lambda _: 1)
        refused(self.one_file(xfs), "realtime")


def _encrypt(folder: Path) -> None:
    """Gives an empty folder an fscrypt v2 policy with a key of zeros."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        key = bytearray(struct.pack("=II32sII32x", 2, 0, b"", 64, 0) + bytes(64))
        fcntl.ioctl(fd, 0xC0506617, key)  # FS_IOC_ADD_ENCRYPTION_KEY
        policy = struct.pack("=BBBBB3x16s", 2, 1, 4, 0, 0, bytes(key[8:24]))
        fcntl.ioctl(fd, 0x800C6613, policy)  # FS_IOC_SET_ENCRYPTION_POLICY
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.ENOTTY):
            pytest.skip("this kernel is built without fscrypt")
        raise
    finally:
        os.close(fd)


class TestFile:
    def test_saved_and_loaded_is_the_same(self, disk: LoopDisk, tmp_path: Path) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        blocks.save(tmp_path / "map.json")
        again = BlockMap.load(tmp_path / "map.json")
        assert dict(again) == dict(blocks)
        assert again.origin == blocks.origin

    def test_entries_are_inclusive_blocks_of_the_disk(self, disk: LoopDisk, tmp_path: Path) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        blocks.save(tmp_path / "map.json")
        entries = json.loads((tmp_path / "map.json").read_text())
        assert blocks.origin is not None
        block = blocks.origin.disk.block_size
        entry = entries["set/10000.bin"]
        assert entry["endblock"] - entry["startblock"] + 1 == -(-10_000 // block)
        with open(disk.device, "rb") as f:
            f.seek(entry["startblock"] * block)
            assert f.read(10_000) == (disk.folder / "set/10000.bin").read_bytes()
        assert "startblock" not in entries["set/cut.bin"]

    def test_plain_is_sectors_of_512_bytes_and_nothing_else(self, disk: LoopDisk, tmp_path: Path) -> None:
        (disk.folder / "plain").mkdir(exist_ok=True)
        (disk.folder / "plain/a.bin").write_bytes(content(5000))
        blocks = BlockMap.build(disk.folder / "plain")
        blocks.plain().save(tmp_path / "map.json")
        (extent,) = blocks["plain/a.bin"].extents
        first, last = extent.start // 512, (extent.start + extent.nbytes) // 512 - 1
        assert json.loads((tmp_path / "map.json").read_text()) == {
            "plain/a.bin": {"startblock": first, "endblock": last}
        }
        loaded = BlockMap.load(tmp_path / "map.json")
        assert loaded["plain/a.bin"] == FileBlocks(extent.nbytes, (extent,))
        with pytest.raises(BlockMapError, match="parent"):
            loaded.verify()
        assert BlockMap.load(tmp_path / "map.json", parent=disk.folder).verify(data=True) == {}

    def test_plain_leaves_out_what_it_cannot_hold_and_says_why(self, disk: LoopDisk, tmp_path: Path) -> None:
        blocks = BlockMap.build(disk.folder / "set")
        part = blocks.plain()
        part.save(tmp_path / "map.json")
        assert "set/cut.bin" in part.unmapped.keys() & blocks.keys()
        assert part.keys() | part.unmapped.keys() == blocks.keys()
        assert set(BlockMap.load(tmp_path / "map.json")) == set(part)
        assert "plain map cannot hold" in str(part.why_not("set/cut.bin"))

    def test_reads_the_comparisons_format(self, tmp_path: Path) -> None:
        file = tmp_path / "map.json"
        file.write_text('{"train/n01491361/n01491361_8657.JPEG": {"startblock": 2048, "endblock": 2275}}')
        blocks = BlockMap.load(file)
        assert blocks["train/n01491361/n01491361_8657.JPEG"].extents == (Extent(0, 2048 * 512, 228 * 512),)

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("[1]", "not a block map"),
            ("{", "not a block map"),
            ('{"a/b": {"startblock": 5}}', "not a block map"),
            ('{"a/b": {"startblock": 5, "endblock": 3}}', "extent from byte"),
            ('{"a/b": {"startblock": 5, "endblock": 9}, "a/c": {"startblock": 9, "endblock": 9}}', "share bytes"),
            ('{"a/b": {"extents": [[-1, 5, 9]]}}', "overlap or are out of order"),
            ('{"a/b": {"extents": [[0, 5, 9]], "size": -1}}', "a size of -1 bytes"),
            ('{"a/b": {"extents": [[0, 5, 9], [3, 50, 51]]}}', "overlap or are out of order"),
            ('{"__blockmap__": {"version": 2}, "a/b": {}}', "newer than 1: update monai_gds"),
            ('{"__blockmap__": {"version": 1}, "a/b": {}}', "not a block map"),
            ("[" * 200_000, "nested too deeply"),
            ('{"a":' * 100_000, "nested too deeply"),
            ('{"a/b": {"startblock": 1e400, "endblock": 5}}', "not a whole number"),
            ('{"a/b": {"startblock": 1, "endblock": 1e400}}', "not a whole number"),
            ('{"a/b": {"startblock": 1.5, "endblock": 5}}', "not a whole number"),
            ('{"a/b": {"startblock": "1", "endblock": "5"}}', "not a whole number"),
            ('{"a/b": {"startblock": true, "endblock": 5}}', "not a whole number"),
            (f'{{"a/b": {{"startblock": 1, "endblock": {10**400}}}}}', "not a whole number"),
            ('{"a/b": {"extents": [[0, 5, 9]], "size": Infinity}}', "not a whole number"),
            ('{"a/b": {"extents": [[0, 5, 9]], "size": 5, "inode": "1", "mtime_ns": 1}}', "not a whole number"),
            *(
                (f'{{"a/b": {{"extents": [[0, 5, 9]], "size": 5, "inode": 1, "mtime_ns": 1, "wsum64": {bad}}}}}', match)
                for bad, match in (("7", "not text"), ('"7"', "not a checksum"), (f'"{"g" * 16}"', "not a checksum"))
            ),
            ('{"../../etc/shadow": {"startblock": 1, "endblock": 5}}', "not a path below"),
            ('{"a/../../b": {"startblock": 1, "endblock": 5}}', "not a path below"),
            ('{"/etc/shadow": {"startblock": 1, "endblock": 5}}', "not a path below"),
            ('{"etc//shadow": {"startblock": 1, "endblock": 5}}', "not a path below"),
            ('{"\\ud800/b": {"startblock": 1, "endblock": 5}}', "surrogates not allowed"),
            ('{"a/\\u0000": {"startblock": 1, "endblock": 5}}', "not a path below"),
        ],
    )
    def test_what_is_not_a_map_is_refused(self, tmp_path: Path, text: str, match: str) -> None:
        file = tmp_path / "map.json"
        file.write_text(text)
        with pytest.raises(BlockMapError, match=match) as caught:
            BlockMap.load(file)
        assert str(file) in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            *(
                ({"disk": {"name": name}}, "not the name of a disk")
                for name in ("../etc/shadow", "/etc/shadow", "..", "")
            ),
            *(({"disk": {"name": name}}, "not the name of a disk") for name in ("a/../../b", "a\0", "-x", "nvme0n1\n")),
            ({"disk": {"name": None}}, "not text"),
            ({"disk": {"number": 7}}, "not text"),
            ({"disk": {"number": "../../x"}}, "not the number of a disk"),
            ({"disk": {"nbytes": float("inf")}}, "not a whole number"),
            ({"disk": {"nbytes": 0}}, "its disk is empty"),
            ({"disk": {"max_transfer": 0}}, "less than a block"),
            ({"disk": {"max_transfer": None}}, "not a whole number"),
            ({"disk": {"block_size": 512.0}, "block_size": 512.0}, "not a whole number"),
            ({"parent": 5}, "not text"),
            ({"uuid": []}, "not text"),
            ({"kind": None}, "not text"),
            ({"start": "x"}, "not a whole number"),
            ({"start": -512}, "begins at byte -512"),
            ({"folders": "abc"}, "not a list"),
            ({"folders": [5]}, "not text"),
            ({"folders": ["../x"]}, "not a path below"),
            ({"unmapped": []}, "not a block map"),
            ({"unmapped": {"a/c": "why"}}, "not a block map"),
            ({"unmapped": {"a/c": {"size": 5}}}, "not a block map"),
            ({"unmapped": {"a/c": {"size": -5, "why": "x"}}}, "negative"),
            ({"unmapped": {"a/c": {"size": 1e400, "why": "x"}}}, "not a whole number"),
            ({"unmapped": {"a/c": {"size": 5, "why": 7}}}, "not text"),
            ({"unmapped": {"../c": {"size": 5, "why": "x"}}}, "not a path below"),
            ({"unmapped": {"a/b": {"size": 5, "why": "x"}}}, "a/b is listed both as mapped and as unmapped"),
        ],
    )
    def test_a_header_that_no_map_has_is_refused(self, tmp_path: Path, change: dict[str, Any], match: str) -> None:
        disk = {"name": "loop0", "number": "7:0", "block_size": 512, "nbytes": 1 << 20, "max_transfer": 1 << 20}
        known = {
            "version": 1,
            "block_size": 512,
            "parent": "/d",
            "kind": "ext4",
            "uuid": "u",
            "start": 0,
            "folders": [],
        }
        entry = {"startblock": 1, "endblock": 1, "size": 5, "inode": 1, "mtime_ns": 1}
        file = tmp_path / "map.json"

        def saved(change: dict[str, Any]) -> Path:
            header = {**known, **change, "disk": {**disk, **change.get("disk", {})}}
            file.write_text(json.dumps({"__blockmap__": header, "a/b": entry}))
            return file

        assert len(BlockMap.load(saved({}))) == 1
        with pytest.raises(BlockMapError, match=match):
            BlockMap.load(saved(change))

    def test_an_extent_beyond_the_disk_is_refused(self) -> None:
        origin = Origin("/", "ext4", "", 0, Disk("loop0", "7:0", 512, 1 << 20, 1 << 20))
        BlockMap({"a/b": FileBlocks(512, (Extent(0, (1 << 20) - 512, 512),))}, origin)
        with pytest.raises(BlockMapError, match="of a disk of 1048576 bytes"):
            BlockMap({"a/b": FileBlocks(512, (Extent(0, 1 << 20, 512),))}, origin)

    def test_an_older_map_is_read(self, disk: LoopDisk, tmp_path: Path) -> None:
        """One without folders, checksums and what could not be mapped."""
        blocks = BlockMap.build(disk.folder / "set")
        blocks.save(tmp_path / "map.json")
        saved = json.loads((tmp_path / "map.json").read_text())
        del saved["__blockmap__"]["folders"], saved["__blockmap__"]["unmapped"]
        (tmp_path / "map.json").write_text(json.dumps(saved))
        again = BlockMap.load(tmp_path / "map.json")
        assert (dict(again), again.unmapped, again.has_checksums) == (dict(blocks), {}, False)

    def test_a_parent_takes_the_place_of_the_maps_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        origin = Origin("/data", "ext4", "", 0, Disk("loop0", "7:0", 512, 1 << 20, 1 << 20))
        BlockMap({"set/a": FileBlocks(512, (Extent(0, 512, 512),), 1, 1)}, origin).save(tmp_path / "map.json")
        monkeypatch.chdir(tmp_path)
        for parent, there in ((None, "/data"), ("/mnt", "/mnt"), ("mnt", f"{tmp_path}/mnt")):
            blocks = BlockMap.load("map.json", parent=parent)
            assert blocks.parent == there
            assert blocks[f"{there}/set/a"] == blocks["set/a"]
            with pytest.raises(KeyError, match=f"below {there}"):
                blocks["/elsewhere/set/a"]
        (tmp_path / "plain.json").write_text('{"set/a": {"startblock": 1, "endblock": 1}}')
        blocks = BlockMap.load("plain.json")
        assert blocks["/elsewhere/set/a"] == blocks["set/a"]
        with pytest.raises(KeyError, match="below /mnt"):
            BlockMap.load("plain.json", parent="/mnt")["/elsewhere/set/a"]


class TestVerify:
    def test_a_true_map(self, disk: LoopDisk) -> None:
        assert BlockMap.build(disk.folder / "set").verify(data=True) == {}

    def test_whatever_changed_is_named(self, ext4: LoopDisk) -> None:
        folder = ext4.folder / "set"
        folder.mkdir()
        for name in ("grown", "rewritten", "replaced", "gone", "moved", "same"):
            (folder / name).write_bytes(content(20_000))
        blocks = BlockMap.build(folder)
        with (folder / "grown").open("ab") as f:
            f.write(b"x")
        (folder / "rewritten").write_bytes(content(20_000, 1))
        (folder / "new").write_bytes(content(20_000, 1))
        os.rename(folder / "new", folder / "replaced")
        (folder / "gone").unlink()
        st = (folder / "moved").stat()
        fd = os.open(folder / "moved", os.O_RDWR)
        os.ftruncate(fd, 0)
        (folder / "taker").write_bytes(content(20_000, 2))
        os.sync()
        os.write(fd, content(20_000))
        os.close(fd)
        os.utime(folder / "moved", ns=(st.st_atime_ns, st.st_mtime_ns))
        wrong = blocks.verify()
        assert set(wrong) == {f"set/{name}" for name in ("grown", "rewritten", "replaced", "gone", "moved", "taker")}
        reasons = {"grown": "size", "rewritten": "written to", "replaced": "replaced", "moved": "moved", "taker": "new"}
        for name, why in reasons.items():
            assert why in wrong[f"set/{name}"]

    def test_new_and_gone_folders_are_named(self, ext4: LoopDisk) -> None:
        folder = ext4.folder / "set"
        (folder / "gone").mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
        blocks = BlockMap.build(folder)
        (folder / "gone").rmdir()
        (folder / "new").mkdir()
        assert blocks.verify() == {"set/new": "it is a new folder", "set/gone": "the folder is gone"}
        (folder / "dead").symlink_to("nowhere")
        assert "dead" in blocks.verify()["set/dead"]

    def test_many_files_are_verified_one_by_one(self, ext4: LoopDisk) -> None:
        folder = ext4.folder / "set"
        folder.mkdir()
        for i in range(1000):
            (folder / f"{i}").write_bytes(content(100 + i))
        blocks = BlockMap.build(folder)
        for i in (0, 255, 256, 999):
            (folder / f"{i}").write_bytes(b"other")
        seen: list[tuple[int, int]] = []
        assert set(blocks.verify(progress=lambda *at: seen.append(at))) == {f"set/{i}" for i in (0, 255, 256, 999)}
        assert seen[-1] == (1000, 1000)

    def test_data_finds_what_the_extents_do_not_show(self, ext4: LoopDisk) -> None:
        """A byte changed on the device, below the file system."""
        folder = ext4.folder / "set"
        folder.mkdir()
        (folder / "file.bin").write_bytes(content(20_000))
        blocks = BlockMap.build(folder)
        (folder / "file.bin").read_bytes()
        fd = os.open(ext4.device, os.O_RDWR | os.O_DIRECT | os.O_SYNC)
        page = memoryview(mmap.mmap(-1, 4096))
        os.preadv(fd, [page], blocks["set/file.bin"].extents[0].start)
        page[100] ^= 1
        os.pwritev(fd, [page], blocks["set/file.bin"].extents[0].start)
        os.close(fd)
        assert blocks.verify() == {}
        assert "should be bytes 0 to" in blocks.verify(data=True)["set/file.bin"]

    def test_another_file_system_at_the_same_place(self, tmp_path: Path) -> None:
        with loop_disk(tmp_path, "ext4") as disk:
            (disk.folder / "set").mkdir()
            (disk.folder / "set/file.bin").write_bytes(content(20_000))
            blocks = BlockMap.build(disk.folder / "set")
            run("umount", str(disk.folder))
            new_uuid(disk.device)
            run("mount", disk.device, str(disk.folder))
            assert "another file system" in blocks.verify()["set/file.bin"]

    def test_an_entry_says_what_no_longer_holds(self) -> None:
        entry = FileBlocks(10, (Extent(0, 512, 512),), 5, 7)
        entry.check(entry, "x")
        for now in (
            entry._replace(size=11),
            entry._replace(inode=6),
            entry._replace(mtime_ns=8),
            entry._replace(extents=()),
        ):
            with pytest.raises(FileChanged, match="build the map again"):
                entry.check(now, "x")
