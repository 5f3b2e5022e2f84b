"""Simulated md RAID0 arrays, for kernels without md: members written in stripes from the image of a loop disk.

The file system is mounted from its own loop device. A sysfs below a folder of the test describes that as an array of
loop devices, to which the image was dealt out, so places on the members are right only if the arithmetic is md's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from monai_gds.storage.blockmap import extents
from tests.loopdisk import LoopDisk, loop_device, loop_disk

CHUNK = 64 << 10

#: Chunks of each member, in an odd number on the smallest, so that the layouts of unequal ones differ; and the layout.
ARRAYS = {
    "equal": ((160, 160, 160), 0),
    "unequal, original": ((65, 250, 165), 1),
    "unequal, alternate": ((65, 250, 165), 2),
}


@dataclass(frozen=True)
class Striped:
    """An array: the disk with its file system, the loop devices of its members, and its folder in sysfs."""

    disk: LoopDisk
    members: list[str]
    sysfs: Path


def dealt(image: bytes, chunk: int, sizes: Sequence[int], layout: int) -> list[bytes]:
    """What md writes to members of so many chunks: each in turn gets one, while it has room (drivers/md/raid0.c)."""
    members = [bytearray() for _ in sizes]
    level = position = 0
    for end in sorted(set(sizes)):
        larger = [member for member, size in zip(members, sizes, strict=True) if size > level]
        first = 0 if layout == 1 else position // chunk
        for _ in range((end - level) * len(larger)):
            larger[(position // chunk - first) % len(larger)] += image[position : position + chunk]
            position += chunk
        level = end
    return [bytes(member) for member in members]


@contextmanager
def striped(
    folder: Path, sizes: Sequence[int], layout: int, fill: Callable[[Path], None], patch: pytest.MonkeyPatch
) -> Iterator[Striped]:
    """An array whose file system was filled before its bytes were dealt out to its members.

    Member 1 is a partition that begins 1 MiB into its disk.
    """
    with ExitStack() as stack:
        disk = stack.enter_context(loop_disk(folder, "ext4", size=sum(sizes) * CHUNK))
        fill(disk.folder)
        os.sync()
        members = []
        for i, data in enumerate(dealt(disk.image.read_bytes(), CHUNK, sizes, layout)):
            image = folder / f"member{i}.img"
            image.write_bytes(bytes(offset_of(i)) + data + bytes(3000 << 10))  # more than the data, as members have
            members.append(stack.enter_context(loop_device(image)))
        sysfs = describe(folder / "sys", disk, members, sizes, layout)
        patch.setattr(extents, "SYSFS", folder / "sys")
        yield Striped(disk, members, sysfs)


def offset_of(member: int) -> int:
    """Where the data of a member begin on its disk: bytes."""
    return (1 << 20) * (member + 1)


def describe(root: Path, disk: LoopDisk, members: Sequence[str], sizes: Sequence[int], layout: int) -> Path:
    """Writes the sysfs, and returns the folder of the array."""
    real, numbers = Path("/sys/block"), root / "dev/block"
    array = root / "devices/virtual/block/md0"
    (array / "slaves").mkdir(parents=True)
    (array / "queue").symlink_to(real / Path(disk.device).name / "queue")
    numbers.mkdir(parents=True)
    for device, folder in ((disk.device, array), *((member, real / Path(member).name) for member in members)):
        number = os.stat(device).st_rdev
        (numbers / f"{os.major(number)}:{os.minor(number)}").symlink_to(folder)
    facts = {"dev": "9:0", "size": sum(sizes) * CHUNK // 512, "md/level": "raid0", "md/chunk_size": CHUNK}
    facts |= {"md/layout": layout, "md/raid_disks": len(members)}
    for i, (member, size) in enumerate(zip(members, sizes, strict=True)):
        name, start = Path(member).name, 0
        block = real / name
        (array / "slaves" / name).mkdir()
        if i == 1:  # /sys/block has no partition of it
            block, start = root / "devices" / name / "part", 1 << 20
            block.mkdir(parents=True)
            (block / "partition").write_text("1\n")
            (block / "start").write_text(f"{start // 512}\n")
            for name_of in ("dev", "size", "queue", "slaves"):
                (block.parent / name_of).symlink_to(real / name / name_of)
        facts |= {f"md/dev-{name}/slot": i, f"md/dev-{name}/offset": (offset_of(i) - start) // 512}
        facts |= {f"md/dev-{name}/size": size * CHUNK // 1024 + (7 if i == 1 else 0)}  # a rest that is no whole chunk
        (array / f"md/dev-{name}").mkdir(parents=True)
        (array / f"md/dev-{name}/block").symlink_to(block)
    for name, fact in facts.items():
        (array / name).write_text(f"{fact}\n")
    return array
