"""Reads a part of an open file, however few bytes single calls return. Imports only the standard library."""

from __future__ import annotations

import os

__all__ = ["read_at"]


def read_at(fd: int, nbytes: int, offset: int = 0) -> bytes:
    """Reads ``nbytes`` of an open file from ``offset``; fewer only if the file ends before.

    A call may return fewer bytes than there are: over FUSE and network file systems, for more than 2 GiB, and after a
    signal.

    Raises:
        OSError: the file cannot be read.
    """
    data = os.pread(fd, nbytes, offset)
    if len(data) == nbytes or not data:  # nearly always
        return data
    parts = [data]
    done = len(data)
    while done < nbytes and (data := os.pread(fd, nbytes - done, offset + done)):
        parts.append(data)
        done += len(data)
    return b"".join(parts)
