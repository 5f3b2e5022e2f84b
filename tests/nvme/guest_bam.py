"""What runs inside the emulated machine: the kernel of xnvme-bam, compiled for its processor, drives QEMU's controller.

Through the real BAR and doorbells, and so against a controller that somebody else wrote.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from monai_gds.storage import Reads
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.xnvme.bam import bam
from monai_gds.testing.tools import bytes_of, content
from tests.nvme.pci_controller import PciController, device_with_serial, take_from_kernel
from tests.storage.xnvme.bam.bam_commands import BLOCK, DISK_BYTES, commands, opened, some

SIZES = (1, 511, 512, 4097, 116_000, 3_000_001, (16 << 20) + 5)


class Taken:
    """The drive, taken from the kernel.

    Attributes:
        blocks: a map of the files below ``folder``, which is not mounted any more.
        raw: a file with the drive's first DISK_BYTES bytes.
    """

    def __init__(self, scratch: Path) -> None:
        self.device, namespace = device_with_serial("bam")
        self.folder = scratch / "bam"
        self.folder.mkdir()
        subprocess.run(["mkfs.ext4", "-q", "-F", f"/dev/{namespace}"], check=True)
        subprocess.run(["mount", f"/dev/{namespace}", self.folder], check=True)
        for size in SIZES:
            (self.folder / f"{size}.bin").write_bytes(content(size, size))
        os.sync()
        self.blocks = BlockMap.build(self.folder, checksums=True)
        subprocess.run(["umount", self.folder], check=True)
        self.raw = scratch / "raw.img"
        with open(f"/dev/{namespace}", "rb") as drive:
            self.raw.write_bytes(drive.read(DISK_BYTES))
        take_from_kernel(self.device)


@pytest.fixture(scope="module")
def taken() -> Taken:
    return Taken(Path(os.environ["TMPDIR"]))


@pytest.fixture
def make(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the controller where tests and the backend make one in software."""

    def make(path: str, target: Any, block: int, max_transfer: int = 2 << 20) -> PciController:
        return PciController(taken.device, max_transfer)

    monkeypatch.setattr(bam, "SoftwareController", make)
    yield make


@pytest.mark.parametrize(("pairs", "depth"), [(1, 2), (1, 64), (1, 1024), (5, 9), (64, 5), (128, 2)])
def test_queues_of_every_number_and_depth(taken: Taken, make: Any, pairs: int, depth: int) -> None:
    with commands(1, taken.raw, pairs, depth, 1100, 16384, make) as made:
        for seed, count in enumerate((1100, 1, 333)):
            assert all(completion.status == 0 for completion in made.read(some(count, 32, seed)))


def test_prp_lists_up_to_the_largest_transfer(taken: Taken, make: Any) -> None:
    with commands(1, taken.raw, 2, 8, 30, 512 << 10, make) as made:
        assert made.controller.max_transfer == 512 << 10
        sizes = [1, 7, 8, 9, 15, 16, 17, 24, 25, 511, 512, 513, 1016, 1017, 1023, 1024]
        for first in (0, 3):
            assert all(completion.status == 0 for completion in made.read([(first + n, n) for n in sizes]))


def test_a_command_that_it_refuses_has_its_status(taken: Taken, make: Any) -> None:
    with commands(1, taken.raw, 2, 8, 30, 4096, make) as made:
        beyond = made.controller.nbytes // BLOCK
        done = {completion.tag: completion.status for completion in made.read([(0, 8), (beyond, 1), (8, 8)])}
        assert done[0, 8] == done[8, 8] == 0
        assert done[beyond, 1] >> 1 & 0x7FF == 0x80  # LBA Out of Range
        assert all(completion.status == 0 for completion in made.read(some(30, 8)))


def test_a_queue_that_was_given_up_is_deleted_and_made_anew(taken: Taken, make: Any) -> None:
    """The drive is no longer told of commands: its doorbell is out of reach for a while."""
    with commands(1, taken.raw, 2, 8, 30, 4096, make, 1.0) as made:
        doorbells = made.queue._queues["submission_doorbell"].copy()
        made.queue._queues["submission_doorbell"] = made.controller.memory(4096).tensor.data_ptr()
        assert {completion.status for completion in made.read(some(30, 8))} == {-1, -3}
        assert (made.queue._queues["submission_doorbell"] == doorbells).all()
        assert all(completion.status == 0 for completion in made.read(some(30, 8, 1)))


def test_files_by_a_map(taken: Taken, make: Any) -> None:
    dice = random.Random(0)
    with closing(opened("cpu", uri=str(taken.raw), blockmap=taken.blocks, seconds=60.0)) as storage:
        for size in SIZES:
            data = content(size, size)
            ranges = [(0, size)]
            for _ in range(10):
                offset = dice.randint(0, size - 1)
                ranges.append((offset, dice.randint(0, size - offset)))
            got = storage.load(Reads.of(str(taken.folder / f"{size}.bin"), ranges)).wait()
            assert [bytes_of(tensor) for tensor in got] == [data[o : o + n] for o, n in ranges]
