"""What runs inside the emulated machine: block map, posix, xnvme and xnvme-block on NVMe namespaces.

Started by ``run.py``. Without a libxnvme its two backends are left out, and say so; one that XNVME_LIBRARY_PATH names
has to work.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from monai_gds.errors import NotMappable
from monai_gds.storage import Reads, Storage, available_backends, open_storage
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.xnvme import libxnvme

SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 116_000, 3_000_001)
MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}

#: Backend and options, with the node of a namespace to fill in.
READERS = {
    "posix": {},
    "xnvme": {},
    "xnvme-block, the disk found": {},
    "xnvme-block, io_uring": {"uri": "/dev/nvme0n{}", "be": "io_uring"},
    "xnvme-block, libaio": {"uri": "/dev/nvme0n{}", "be": "libaio"},
    "xnvme-block, thrpool": {"uri": "/dev/nvme0n{}", "be": "thrpool"},
    "xnvme-block, io_uring_cmd": {"uri": "/dev/ng0n{}", "be": "io_uring_cmd"},
    "xnvme-block, passthrough by its node": {"uri": "/dev/ng0n{}"},
    "xnvme-block, passthrough found": {"be": "io_uring_cmd"},
}


#: Number of a namespace (1: blocks of 512 bytes, 2: of 4096), file system, and whether that is in a partition.
PLACES = [*((n, kind, False) for n in (1, 2) for kind in MAKE), (1, "xfs", True), (2, "ext4", True)]


@pytest.fixture(scope="module", params=PLACES, ids=lambda p: f"n{p[0]}-{p[1]}{'-partition' if p[2] else ''}")
def namespace(request: pytest.FixtureRequest) -> Iterator[tuple[int, Path]]:
    """Number of a namespace and a folder of files on a new file system there."""
    number, kind, partitioned = request.param
    disk = node = f"/dev/nvme0n{number}"
    with ExitStack() as stack:
        if partitioned:
            node = f"{disk}p1"
            subprocess.run(["addpart", disk, "1", "2048", "1500000"], check=True)
            stack.callback(subprocess.run, ["delpart", disk, "1"], check=True)
        where = Path(os.environ["TMPDIR"]) / "drive"
        where.mkdir(exist_ok=True)
        subprocess.run([*MAKE[kind], node], check=True)
        subprocess.run(["mount", "-t", kind, node, where], check=True)
        stack.callback(subprocess.run, ["umount", where], check=True)
        folder = where / "set"
        fill(folder)
        yield number, folder


def fill(folder: Path) -> None:
    """Files of every size, and one with holes."""
    folder.mkdir()
    for seed, size in enumerate(SIZES):
        (folder / f"{size}.bin").write_bytes(np.random.default_rng(seed).bytes(size))
    with (folder / "sparse.bin").open("wb") as f:
        f.truncate(1 << 20)
        f.seek(700_000)
        f.write(b"in the middle")


def test_a_file_system_with_a_realtime_device_is_refused() -> None:
    """Here and not with the other refusals: it takes a kernel with CONFIG_XFS_RT, as Debian's is, and two drives."""
    where = Path(os.environ["TMPDIR"]) / "realtime"
    where.mkdir()
    data, realtime = "/dev/nvme0n2", "/dev/nvme0n1"  # mkfs.xfs wants the blocks of the first on the second
    subprocess.run([*MAKE["xfs"], "-m", "reflink=0", "-r", f"rtdev={realtime}", data], check=True)
    subprocess.run(["mount", "-t", "xfs", "-o", f"rtdev={realtime}", data, where], check=True)
    try:
        (where / "set").mkdir()
        (where / "set/data.bin").write_bytes(b"x" * 10_000)
        with pytest.raises(NotMappable, match="realtime device"):
            BlockMap.build(where / "set")
    finally:
        subprocess.run(["umount", where], check=True)


def test_block_map(namespace: tuple[int, Path], tmp_path: Path) -> None:
    number, folder = namespace
    BlockMap.build(folder).save(tmp_path / "map.json")
    blocks = BlockMap.load(tmp_path / "map.json")
    assert blocks.origin is not None
    assert blocks.origin.disk.path == f"/dev/nvme0n{number}"
    assert blocks.origin.disk.block_size == {1: 512, 2: 4096}[number]
    assert len(blocks) == len(SIZES) + 1
    assert blocks.verify(data=True) == {}


@pytest.mark.parametrize("reader", READERS)
def test_reads_what_is_there(namespace: tuple[int, Path], reader: str, tmp_path: Path) -> None:
    number, folder = namespace
    with_map = {"blockmap": BlockMap.build(folder)} if "xnvme-block" in reader else {}
    storage = opened(reader, number, **with_map)
    try:
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            ranges = [(0, len(data)), (len(data) // 3, len(data) // 2), (0, min(len(data), 4096))]
            tensors = storage.map(Reads.of(str(path), ranges)).wait()
            assert [t.numpy().tobytes() for t in tensors] == [data[o : o + n] for o, n in ranges], path.name
        with pytest.raises(OSError, match="ends"):
            storage.load(Reads.of(str(folder / "4096.bin"), [(0, 4097)])).wait()
        print(reader, storage.describe())
    finally:
        storage.close()


@pytest.mark.parametrize("reader", [name for name in READERS if name != "posix"])
def test_reads_what_it_wrote_a_moment_ago(namespace: tuple[int, Path], reader: str) -> None:
    number, folder = namespace
    storage = opened(reader, number)
    path = folder.parent / "fresh.bin"
    try:
        for seed in range(5):
            data = np.random.default_rng(seed).bytes(50_000)
            storage.write(str(path), [data])
            assert storage.load(Reads.of(str(path), [(0, 50_000)])).wait()[0].numpy().tobytes() == data
            path.unlink()
    finally:
        storage.close()


@pytest.mark.parametrize("reader", [name for name in READERS if name.startswith("xnvme-block")])
def test_the_drive_is_open_for_reading_only(namespace: tuple[int, Path], reader: str) -> None:
    number, folder = namespace
    storage = opened(reader, number)
    node = f"/dev/{'ng' if 'passthrough' in reader or 'cmd' in reader else 'nvme'}0n{number}"
    try:
        before = libxnvme._descriptors_of(node)
        storage.load(Reads.of(str(folder / "4096.bin"), [(0, 4096)])).wait()
        descriptors = libxnvme._descriptors_of(node) - before
        assert descriptors
        for fd in descriptors:
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    finally:
        storage.close()


def test_commands_are_as_large_as_the_device_allows(namespace: tuple[int, Path]) -> None:
    number, folder = namespace
    storage = opened("xnvme-block, io_uring", number)
    storage.load(Reads.of(str(folder / "3000001.bin"), [(0, 3_000_001)])).wait()
    (drive,) = storage._backend._drives  # type: ignore[attr-defined]
    print(f"n{number}: MDTS {drive.device.max_transfer}, commands of up to {drive.most} bytes")
    kernel = int(Path(f"/sys/block/nvme0n{number}/queue/max_sectors_kb").read_text()) * 1024
    assert drive.most == min(drive.device.max_transfer, kernel) // 4096 * 4096
    storage.close()


def test_a_partition_is_refused_by_name(namespace: tuple[int, Path]) -> None:
    number, _ = namespace
    uri = f"/dev/nvme0n{number}"
    subprocess.run(["addpart", uri, "2", "1600000", "100000"], check=True)
    try:
        with pytest.raises(NotMappable, match=f"open the whole disk, {uri}"):
            opened("xnvme-block, the disk found", number, uri=f"{uri}p2")
    finally:
        subprocess.run(["delpart", uri, "2"], check=True)


def opened(reader: str, number: int, **more: object) -> Storage:
    """The storage of a reader; skips where the machine has no libxnvme, and fails where one was named and is unfit."""
    backend = reader.partition(",")[0]
    if "XNVME_LIBRARY_PATH" not in os.environ:
        found = available_backends("cpu")[backend]
        if not found:
            pytest.skip(f"{found.reason} (XNVME_LIBRARY_PATH names one)")
    options = {name: value.format(number) for name, value in READERS[reader].items()}
    return open_storage(backend, "cpu", **{**options, **more})
