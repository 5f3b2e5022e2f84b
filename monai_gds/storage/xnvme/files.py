"""The ``xnvme`` backend: files are read through xNVMe's file API (``xnvme_file_open``, ``xnvme_file_pread``).

Called from this package's own threads; reads land in the destination itself, or in pinned staging for a CUDA target.
Files are written as by every other backend.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any, NamedTuple

import torch

from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage.backend import Availability
from monai_gds.storage.blocking import BlockingBackend
from monai_gds.storage.files import Expected, open_file
from monai_gds.storage.xnvme import libxnvme

__all__ = ["XnvmeBackend", "probe_library"]

#: Linux transfers no more than this many bytes with one call.
_MOST = 0x7FFFF000


def probe_library() -> Availability:
    """Whether this machine has a libxnvme that fits, for all backends over it."""
    try:
        return Availability(True, libxnvme.load().describe())
    except BackendUnavailable as e:
        return Availability(False, str(e), libxnvme.HOW_TO_GET_IT)


class _Handle(NamedTuple):
    file: Any
    path: str


class XnvmeBackend(BlockingBackend):
    """Reads files with xNVMe, https://xnvme.io, for CPU and CUDA targets.

    Args:
        device: where destinations live.
        threads: reads in flight at once; default: one per core, at least 4 and at most 8.

    Raises:
        BackendUnavailable: libxnvme is missing or does not fit.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        super().__init__(device, threads)
        self._library = libxnvme.load()

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return probe_library()

    def _open(self, path: str, expected: Expected) -> _Handle:
        """xNVMe's handle of a file: the very file that was checked, whatever its path names by now."""
        fd = open_file(path, expected, regular=True)  # xNVMe would leave a descriptor behind for any other
        try:
            handle = self._library.open("xnvme_file_open", f"/proc/self/fd/{fd}", self._library.options())
        except StorageError as e:
            raise StorageError(e.errno, e.strerror, path) from e
        finally:
            os.close(fd)
        # xNVMe looks up the namespace with the first command, and must not do so in several threads at once.
        self._library.api.xnvme_dev_get_nsid(handle)
        return _Handle(handle, path)

    def _close(self, handle: _Handle) -> None:
        self._library.api.xnvme_file_close(handle.file)

    def _read_into(self, handle: _Handle, offset: int, dest: torch.Tensor) -> int:
        """Does one pread.

        After a short one xNVMe's status is whatever ``errno`` happened to be, so the file's size shows whether it has
        ended. After a failed one the result is 0 and the status an errno.
        """
        api, nbytes = self._library.api, min(dest.numel(), _MOST)
        if offset + nbytes > 1 << 63:
            return 0
        ctx = api.xnvme_file_get_cmd_ctx(handle.file)
        code = api.xnvme_file_pread(ctypes.byref(ctx), dest.data_ptr(), nbytes, offset)
        result = int(ctx.result)
        if code == 0 and 0 <= result <= nbytes:
            return result
        if offset + nbytes > os.stat(handle.path).st_size:
            return 0
        cause = os.strerror(-code) if code else f"result {result}"
        raise StorageError(-code or errno.EIO, f"xnvme_file_pread of {nbytes} bytes at {offset}: {cause}", handle.path)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "library": self._library.describe()}
