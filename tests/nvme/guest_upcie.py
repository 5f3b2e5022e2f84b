"""What runs inside the emulated machine: xnvme-block over uPCIe, a driver in user space, and a drive that it takes.

The maps are made while the file systems are mounted; everything is then read by them alone. Without a libxnvme that has
uPCIe (xNVMe's development branch, named by XNVME_LIBRARY_PATH) all of it is skipped.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds import ImageNetDataset
from monai_gds.bench.made_up import write_image_folder
from monai_gds.errors import BackendUnavailable, FileChanged, StorageError
from monai_gds.storage import Reads, Storage, open_storage
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.xnvme import libxnvme
from monai_gds.testing.tools import bytes_of, content
from tests.commands import run
from tests.nvme.pci_controller import device_with_serial

SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, 116_000, 3_000_001, (16 << 20) + 5)
IMAGES = 48
MAKE = {1: ["mkfs.ext4", "-q", "-F"], 2: ["mkfs.xfs", "-q", "-f"]}
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")

#: Files that change once they are mapped: replaced, deleted, written in place.
STALE = ("replaced.bin", "deleted.bin", "written.bin")

#: Bytes of uPCIe's heap: its default, and enough for one drive.
HEAPS = [None, 128 << 20]

#: What was read and found right, for the line at the end.
TALLY = {"loads": 0, "images": 0}


class Taken:
    """The drive, taken from the kernel, with a file system on each of its namespaces.

    Attributes:
        address: on the PCI bus.
        copy: of the folder of images on each namespace.
        refusal: the error of opening it before it was taken.
        files: what is in the files of each namespace, by their paths in its map.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.copy = write_image_folder(scratch / "train", IMAGES, per_class=10)
        device, first = device_with_serial("upcie")
        self.address = device.name
        self.files = {nsid: self._filled(nsid, f"{first[:-1]}{nsid}", scratch) for nsid in MAKE}
        with closing(self.opened(1)) as storage, pytest.raises(StorageError) as refused:
            storage.load(Reads.of("set/1.bin", [(0, 1)])).wait()
        self.refusal = str(refused.value)
        (device / "driver/unbind").write_text(device.name)
        (device / "driver_override").write_text("uio_pci_generic")
        Path("/sys/bus/pci/drivers_probe").write_text(device.name)

    def _filled(self, nsid: int, node: str, scratch: Path) -> dict[str, bytes]:
        folder = scratch / f"upcie{nsid}"
        folder.mkdir()
        subprocess.run([*MAKE[nsid], f"/dev/{node}"], check=True)
        subprocess.run(["mount", f"/dev/{node}", folder], check=True)
        (folder / "set").mkdir()
        for size in SIZES:
            (folder / f"set/{size}.bin").write_bytes(content(size, size))
        shutil.copytree(self.copy, folder / "set/train")
        for name in STALE:
            (folder / "set" / name).write_bytes(content(70_000, 1))
        os.sync()
        BlockMap.build(folder / "set", checksums=True).save(self.map(nsid))
        BlockMap.build(folder / "set/train", checksums=True).save(self.images(nsid))
        (folder / "set/new").write_bytes(content(70_000, 2))
        os.replace(folder / "set/new", folder / "set/replaced.bin")
        (folder / "set/deleted.bin").unlink()
        with (folder / "set/written.bin").open("r+b") as f:
            f.write(b"in place")
        files = {
            str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(folder.glob("set/**/*"))
            if p.is_file() and p.name not in STALE
        }
        subprocess.run(["umount", folder], check=True)
        return files

    def drive(self, nsid: int) -> dict[str, Any]:
        """The options for one of its namespaces."""
        return {"be": "upcie", "uri": self.address, "nsid": nsid}

    def opened(self, number: int, **options: Any) -> Storage:
        """The storage over the map of one namespace."""
        given = {**self.drive(number), "blockmap": self.map(number), **options}
        return open_storage("xnvme-block", "cpu", **given)

    def map(self, nsid: int) -> Path:
        """The map of everything there."""
        return self.scratch / f"set{nsid}.json"

    def images(self, nsid: int) -> Path:
        """The map of the images there."""
        return self.scratch / f"train{nsid}.json"


@pytest.fixture(scope="module")
def taken(request: pytest.FixtureRequest) -> Iterator[Taken]:
    if "XNVME_LIBRARY_PATH" not in os.environ:
        pytest.skip("no libxnvme was named (XNVME_LIBRARY_PATH)")
    if "upcie" not in libxnvme.load().drivers():
        pytest.skip(f"{libxnvme.load().path} was built without upcie, as all of 0.7 are")
    yield Taken(Path(os.environ["TMPDIR"]))
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nupcie: {TALLY['loads']} loads and {TALLY['images']} images, all right")


def test_a_drive_that_the_kernel_has_is_named_as_such(taken: Taken) -> None:
    assert "it is bound to nvme: unmount it" in taken.refusal


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("nsid", MAKE)
def test_loads(taken: Taken, nsid: int, heap: int | None) -> None:
    dice = random.Random(nsid)
    files = taken.files[nsid]
    with closing(taken.opened(nsid, heap_bytes=heap, mem="cpu")) as storage:
        for path, data in files.items():
            ranges = [(0, len(data)), (len(data) // 3, len(data) // 2)]
            for _ in range(3):
                offset = dice.randint(0, len(data))
                ranges.append((offset, dice.randint(0, len(data) - offset)))
            got = storage.load(Reads.of(path, ranges)).wait()
            assert [bytes_of(tensor) for tensor in got] == [data[o : o + n] for o, n in ranges], path
            TALLY["loads"] += 1
        everything = [storage.load(Reads.of(path, [(0, len(data))])) for path, data in files.items()]
        for pending, (path, data) in zip(everything, files.items(), strict=True):
            assert bytes_of(pending.wait()[0]) == data, path
            TALLY["loads"] += 1


@pytest.mark.parametrize("nsid", MAKE)
def test_files_that_changed_once_they_were_mapped(taken: Taken, nsid: int) -> None:
    with closing(taken.opened(nsid)) as storage:
        for name in STALE:
            with pytest.raises(FileChanged, match="build the map again"):
                storage.load(Reads.of(f"set/{name}", [(0, 70_000)])).wait()


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("nsid", MAKE)
def test_epochs_of_imagenet(taken: Taken, nsid: int, decode: bool) -> None:
    """Image by image as over the copy, by posix."""
    made = taken.images(nsid)
    options = {**taken.drive(nsid), "blockmap": made}
    how: dict[str, Any] = {"shuffle": True, "last_batch": "exact"}
    try:
        ours = ImageNetDataset(made, 7, "xnvme-block", "cpu", decode, storage_options=options, **how)
    except BackendUnavailable as e:
        assert decode, e
        pytest.skip(str(e))
    with closing(ours), closing(ImageNetDataset(taken.copy, 7, "posix", "cpu", decode, **how)) as theirs:
        for epoch in range(2):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            count = 0
            for got, wanted in zip(ours, theirs, strict=True):
                assert got["label"].tolist() == wanted["label"].tolist()
                for image, expected in zip(got["image"], wanted["image"], strict=True):
                    assert torch.equal(image, expected)
                    count += 1
            assert count == IMAGES
            TALLY["images"] += count


@pytest.mark.parametrize("nsid", MAKE)
def test_bench_loaders(taken: Taken, nsid: int) -> None:
    done = run(
        "bench", "loaders", "--be", "upcie", "--uri", taken.address, "--nsid", nsid, "--bmap", taken.images(nsid),
        "--batchsize", 8, "--no-decode", "--repeats", 1, "--threads", 1, "--device", "cpu", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)["reports"][0]["rows"]}
    assert rows["xnvme-block"]["samples"], rows


def test_the_namespace_of_another_map(taken: Taken) -> None:
    with closing(taken.opened(1, nsid=2)) as storage, pytest.raises(StorageError, match="not the disk that the block"):
        storage.load(Reads.of("set/1.bin", [(0, 1)])).wait()


def test_another_process_may_not_reset_the_drive(taken: Taken) -> None:
    with closing(taken.opened(1)) as storage:
        storage.load(Reads.of("set/511.bin", [(0, 511)])).wait()
        child = os.fork()
        if not child:
            with closing(taken.opened(1)) as other:
                try:
                    other.load(Reads.of("set/511.bin", [(0, 511)])).wait()
                    os._exit(1)
                except StorageError as e:
                    os._exit(2 if "another process reads this drive" in str(e) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert bytes_of(storage.load(Reads.of("set/513.bin", [(0, 513)])).wait()[0]) == content(513, 513)


#: Reads all files of a map three times; its arguments are the options of the storage, and the files' checksums.
READER = """
import json, sys, zlib
from monai_gds.storage import Reads, open_storage
options, files = map(json.loads, sys.argv[1:])
storage, loads = open_storage("xnvme-block", "cpu", **options), 0
for _ in range(3):
    for path, (nbytes, checksum) in files.items():
        (got,) = storage.load(Reads.of(path, [(0, nbytes)])).wait()
        assert zlib.crc32(got.numpy()) == checksum, path
        loads += 1
storage.close()
print(loads)
"""


def test_processes_share_the_drive(taken: Taken) -> None:
    """Each with a heap of its own, all at once; the one that opened the drive first reads on after the others."""
    if "upcie" not in libxnvme.load().sharing_drivers():
        pytest.skip(f"upcie of {libxnvme.load().path} says nothing of sharing drives")
    files = taken.files[1]
    options = {**taken.drive(1), "blockmap": str(taken.map(1)), "heap_bytes": HEAPS[1]}
    checksums = {path: (len(data), zlib.crc32(data)) for path, data in files.items()}
    command = [sys.executable, "-c", READER, json.dumps(options), json.dumps(checksums)]
    with closing(taken.opened(1, heap_bytes=HEAPS[1])) as storage:

        def read_all() -> int:
            for path, data in files.items():
                assert bytes_of(storage.load(Reads.of(path, [(0, len(data))])).wait()[0]) == data, path
            return len(files)

        loads = read_all()
        others = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
        while any(other.poll() is None for other in others):
            loads += read_all()
        for other in others:
            said = other.communicate()[0].decode()
            assert other.returncode == 0, said
            loads += int(said.splitlines()[-1])
        TALLY["loads"] += loads + read_all()


def test_a_namespace_that_is_not_there(taken: Taken) -> None:
    with closing(taken.opened(1, nsid=7)) as storage, pytest.raises(StorageError, match="have a namespace 7"):
        storage.load(Reads.of("set/1.bin", [(0, 1)])).wait()


def test_huge_pages_that_are_missing(taken: Taken) -> None:
    before = HUGE_PAGES.read_text()
    HUGE_PAGES.write_text("200")
    try:
        with (
            closing(taken.opened(1)) as storage,
            pytest.raises(StorageError, match="1024 MiB lies in huge pages") as e,
        ):
            storage.load(Reads.of("set/1.bin", [(0, 1)])).wait()
        assert "Cannot allocate memory" in str(e.value)
        with closing(taken.opened(1, heap_bytes=HEAPS[1])) as storage:
            assert bytes_of(storage.load(Reads.of("set/511.bin", [(0, 511)])).wait()[0]) == content(511, 511)
    finally:
        HUGE_PAGES.write_text(before)
