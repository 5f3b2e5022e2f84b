"""A folder on a slow disk: mounted by FUSE, with a given time per open, and a count of the opens in flight.

It needs root, ``/dev/fuse`` and a C compiler.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["NoSlowDisk", "SlowDisk", "slow_disk"]

SOURCE = Path(__file__).with_name("slow_disk.c")

#: ``struct counts`` of the source.
_COUNTS = struct.Struct("=6Q")


class NoSlowDisk(Exception):
    """This machine has none, and why."""


class SlowDisk:
    """A mounted folder.

    Attributes:
        folder: where it is mounted.
        behind: the folder itself, where nothing is slow and nothing is counted.
    """

    def __init__(self, folder: Path, behind: Path, counts: mmap.mmap) -> None:
        self.folder, self.behind, self._counts = folder, behind, counts

    def set_delay(self, seconds: float) -> None:
        """Sets the time that every open takes from now on, and counts from 0."""
        _COUNTS.pack_into(self._counts, 0, round(seconds * 1e9), 0, 0, 0, 0, 0)

    @property
    def opens(self) -> int:
        """How many files were opened."""
        return int(_COUNTS.unpack_from(self._counts)[1])

    @property
    def asked(self) -> int:
        """How many requests asked for the state of a file."""
        return int(_COUNTS.unpack_from(self._counts)[5])

    @property
    def most_in_flight(self) -> int:
        """How many opens were in flight at once, at most."""
        return int(_COUNTS.unpack_from(self._counts)[3])


@contextmanager
def slow_disk(where: Path) -> Iterator[SlowDisk]:
    """Mounts a new folder in ``where``, without any delay yet. Raises NoSlowDisk."""
    if os.geteuid() != 0:
        raise NoSlowDisk("mounting a file system needs root, which this process is not")
    if not os.path.exists("/dev/fuse"):
        raise NoSlowDisk("this machine has no /dev/fuse")
    if shutil.which("cc") is None:
        raise NoSlowDisk("this machine has no C compiler to build the file system with")
    program, behind, folder, counts = (where / name for name in ("program", "behind", "slow", "counts"))
    behind.mkdir()
    folder.mkdir()
    counts.write_bytes(bytes(_COUNTS.size))
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["cc", *flags, "-o", program, SOURCE], check=True)
    with open(counts, "r+b") as file, mmap.mmap(file.fileno(), _COUNTS.size) as shared:
        server = subprocess.Popen([program, behind, folder, counts], stderr=subprocess.PIPE, text=True)
        try:
            while not os.path.ismount(folder):
                if server.poll() is not None and server.stderr is not None:
                    raise NoSlowDisk(f"this machine mounts nothing by FUSE: {server.stderr.read().strip()}")
                time.sleep(0.01)
            yield SlowDisk(folder, behind, shared)
        finally:
            server.terminate()  # which unmounts the folder
            server.wait(60)
