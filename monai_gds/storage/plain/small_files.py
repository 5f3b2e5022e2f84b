"""Reading many small files in a few system calls. For ``posix``."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from monai_gds.base.process import PerProcess
from monai_gds.storage.files import FileId
from monai_gds.storage.plain.uring import STATE, STATE_SIZE, Ring
from monai_gds.storage.reads import Reads

_rings = PerProcess(threading.local)  # a forked child must not use its parent's


def ring_of_this_thread() -> Ring | None:
    """An io_uring that no other thread uses, or None where the kernel gives none."""
    local = _rings()
    if not hasattr(local, "ring"):
        try:
            local.ring = Ring()
        except OSError:
            local.ring = None
    ring: Ring | None = local.ring
    return None if ring is None or ring.broken else ring


def read_small_files(ring: Ring, reads: Reads, into: Sequence[torch.Tensor], *, at_once: bool = False) -> np.ndarray:
    """Reads one part of each file into host memory, all in one call: at most ``limits.RING_FILES`` files.

    Returns indices of the reads that were not done, or whose file is not the expected one. Plain calls find out why.
    """
    expected = [reads.expected[file] for file in reads.file.tolist()]
    sizes = np.array([-1 if e is None or isinstance(e, FileId) else int(e) for e in expected], np.int64)
    sized = sizes >= 0
    # One byte more than a whole file has, where there is room for it, shows that it has become longer.
    more = sized & (reads.room > 0) & (reads.offset == 0) & (sizes == reads.nbytes)
    base = np.array([into[dest].data_ptr() for dest in reads.dest.tolist()], np.int64)
    identified = any(isinstance(e, FileId) for e in expected)
    # Where asking takes long too, the kernel's threads do it, and not this one with the interpreter's lock.
    states = bytearray(STATE_SIZE * len(reads)) if identified and at_once else None
    try:
        paths = [os.fsencode(reads.paths[file]) for file in reads.file.tolist()]
        got = ring.read(paths, reads.offset, reads.nbytes + more, base + reads.start, at_once=at_once, states=states)
    except ValueError:  # no path is like that
        return np.arange(len(reads))
    wrong = (got != reads.nbytes) | (more != sized)
    if identified:
        # The file that the path names now is the one that was read, if it is the expected one.
        places = range(0, STATE_SIZE * len(reads), STATE_SIZE)
        found = identities(paths) if states is None else [_identity(states, at) for at in places]
        wrong |= [isinstance(e, FileId) and e != now for e, now in zip(expected, found, strict=True)]
    return np.flatnonzero(wrong)


_AT_FDCWD = -100

#: ``struct statx`` of linux/stat.h, as far as it is used: inode, size, mtime (s, ns), device (major, minor).
_FIELDS = struct.Struct("=32xQQ64xqI12xII")

_libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock during a call
_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]


def identities(paths: Iterable[bytes]) -> list[tuple[int, int, int, int] | None]:
    """Device, inode, size and mtime (ns) of files, as FileId has them; None for one that cannot be seen.

    ``os.stat`` releases the interpreter's lock at every call: with eight threads and 64 files each, that is 500 waits
    for the thread that runs meanwhile. These files were read a moment before, so their inodes are cached.
    """
    room = ctypes.create_string_buffer(STATE_SIZE)
    return [None if _libc.statx(_AT_FDCWD, path, 0, STATE, room) else _identity(room) for path in paths]


def _identity(states: bytearray | ctypes.Array[ctypes.c_char], at: int = 0) -> tuple[int, int, int, int]:
    inode, size, seconds, ns, major, minor = _FIELDS.unpack_from(states, at)
    return os.makedev(major, minor), inode, size, seconds * 1_000_000_000 + ns
