"""Disks to test on: an image file behind a loop device, with a file system of a given kind on it.

Making one needs root and a free loop device; a test that asks on a machine without is skipped with that reason.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: Bytes of an image, sparse. mkfs.xfs wants 300 MB.
SIZE = 320 << 20

_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}


@dataclass(frozen=True)
class LoopDisk:
    """A loop device with a mounted file system.

    Attributes:
        device: the whole disk, ``/dev/loop0`` for instance.
        folder: where its file system is mounted.
        image: the file behind it.
        partition: the device that the file system is on: the disk itself, or a partition of it.
    """

    device: str
    folder: Path
    image: Path
    partition: str


def run(*command: str) -> str:
    """What a command prints; a failure shows its error output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def new_uuid(partition: str) -> None:
    """Gives an ext4 file system that is not mounted another UUID, and so makes it another one to whoever knew it."""
    # -T: tune2fs refuses a file system that was mounted in a later second than its last check, which mkfs counts as
    run("tune2fs", "-T", "now", "-U", "random", partition)


def not_permitted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the system refuse to open this device, as a container's device rules do whoever asks."""
    system = os.open

    def refuse(path: Any, *arguments: Any, **more: Any) -> int:
        if path == device:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        return system(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)


def needs_root(*tools: str) -> None:
    """Skips the test where this process cannot make disks."""
    if os.geteuid() != 0:
        pytest.skip("making a loop device needs root, which this process is not")
    missing = [t for t in tools if shutil.which(t) is None]
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)}")


@contextmanager
def loop_device(image: Path, block_size: int = 512) -> Iterator[str]:
    """``image`` as a block device with this logical block size."""
    needs_root("losetup")
    try:
        device = run("losetup", "--find", "--show", "--sector-size", str(block_size), str(image))
    except RuntimeError as e:
        pytest.skip(f"this machine gives no loop device: {e}")
    try:
        yield device
    finally:
        run("losetup", "--detach", device)


@contextmanager
def loop_disk(
    folder: Path,
    kind: str = "ext4",
    *,
    block_size: int = 512,
    partitioned: bool = False,
    make: Sequence[str] = (),
    mount: str = "noatime",
    size: int = SIZE,
) -> Iterator[LoopDisk]:
    """A disk with one file system.

    Args:
        folder: where its image and its mount point are put.
        kind: of file system: ext4, xfs or btrfs.
        block_size: the disk's logical block, in bytes.
        partitioned: put the file system into a partition that begins 1 MiB into the disk.
        make: further arguments for mkfs.
        mount: mount options.
        size: bytes of the disk.
    """
    needs_root("losetup", _MAKE[kind][0], *(["addpart"] if partitioned else []))
    image, where = folder / f"{kind}.img", folder / f"{kind}.mnt"
    with image.open("xb") as f:
        f.truncate(size)
    where.mkdir()
    with ExitStack() as stack:
        device = stack.enter_context(loop_device(image, block_size))
        partition = device
        if partitioned:
            partition = f"{device}p1"
            # not by a partition table: kernels without one compiled in know this too
            run("addpart", device, "1", str((1 << 20) // 512), str((size - (2 << 20)) // 512))
            stack.callback(run, "delpart", device, "1")
        run(*_MAKE[kind], *make, partition)
        run("mount", "-t", kind, "-o", mount, partition, str(where))
        stack.callback(run, "umount", "-l", str(where))
        yield LoopDisk(device, where, image, partition)
