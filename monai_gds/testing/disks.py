"""Disks that misbehave, made from loop devices: one that is small, one that gives input/output errors.

Both need root and a free loop device. Without them the test is skipped, and the reason says which is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _make_image(image: Path, size: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a loop device needs root, which this process is not")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("this machine has no mkfs.ext4")
    with image.open("wb") as f:
        f.truncate(size)
    _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", str(image))


@contextmanager
def _mounted(image: Path, where: Path, options: str) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    try:
        _run("mount", "-o", options, str(image), str(where))
    except subprocess.CalledProcessError as e:
        pytest.skip(f"this machine does not mount loop devices: {e.stderr.strip()}")
    try:
        yield where
    finally:
        _run("umount", "-l", str(where))


@contextmanager
def small_disk(folder: Path, size: int = 8 << 20) -> Iterator[Path]:
    """A mounted ext4 file system of ``size`` bytes, nearly all of them free."""
    image = folder / "small.img"
    _make_image(image, size)
    with _mounted(image, folder / "small", "loop") as where:
        yield where


@contextmanager
def broken_disk(folder: Path, content: bytes) -> Iterator[Path]:
    """A file whose size and blocks are known, but of which no byte can be read: the kernel reports EIO."""
    image = folder / "broken.img"
    _make_image(image, 4 * len(content) + (8 << 20))
    with _mounted(image, folder / "broken", "loop") as where:
        (where / "record.bin").write_bytes(content)
    with _mounted(image, folder / "broken", "loop,ro") as where:
        path = where / "record.bin"
        path.stat()  # the inode and its extents are in memory now
        os.truncate(image, 0)
        yield path
