"""The ``xnvme`` backend: files through xNVMe's file API (``xnvme_file_open``, ``pread``, ``pwrite``).

Called from this package's own threads; reads land in the destination itself, or in pinned staging for a CUDA target.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage.backend import Availability
from monai_gds.storage.blocking import BlockingBackend
from monai_gds.storage.files import Buffer, Expected, as_bytes_view, new_file, open_file, total_bytes
from monai_gds.storage.xnvme import libxnvme

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
    """Reads and writes files with xNVMe, https://xnvme.io, for CPU and CUDA targets.

    Args:
        device: where destinations live.
        threads: reads in flight at once; default: one per core, at least 4 and at most 8.

    Raises:
        BackendUnavailable: libxnvme is missing or does not fit.
    """

    def open(self) -> None:
        self._library = libxnvme.load()

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return probe_library()

    def _open(self, path: str, expected: Expected) -> _Handle:
        fd = open_file(path, expected, regular=True)  # xNVMe would leave a descriptor behind for any other
        try:
            return _Handle(self._open_again(fd, path, self._library.options()), path)
        finally:
            os.close(fd)

    def _open_again(self, fd: int, path: str, opts: Any) -> Any:
        """xNVMe's handle of an open file: the very same file, whatever its path names by now and however long it is."""
        handle = self._library.open("xnvme_file_open", f"/proc/self/fd/{fd}", opts, named=path)
        # xNVMe looks up the namespace with the first command, and must not do so in several threads at once.
        self._library.api.xnvme_dev_get_nsid(handle)
        return handle

    def _close(self, handle: _Handle) -> None:
        self._library.api.xnvme_file_close(handle.file)

    def _read_into(self, handle: _Handle, offset: int, dest: torch.Tensor) -> int:
        return self._transfer("xnvme_file_pread", handle, dest.data_ptr(), dest.numel(), offset)

    def _transfer(self, function: str, handle: _Handle, address: int, nbytes: int, offset: int) -> int:
        """Does one pread or pwrite, and returns the bytes transferred.

        After a short transfer xNVMe's status is whatever ``errno`` happened to be, so the file's size shows whether it
        has ended. After a failed one the result is 0 and the status an errno.
        """
        api, nbytes = self._library.api, min(nbytes, _MOST)
        ctx = api.xnvme_file_get_cmd_ctx(handle.file)
        if offset + nbytes > 1 << 63:
            return 0
        code = getattr(api, function)(ctypes.byref(ctx), address, nbytes, offset)
        result = int(ctx.result)
        if code == 0 and 0 <= result <= nbytes:
            return result
        if function == "xnvme_file_pread" and offset + nbytes > os.stat(handle.path).st_size:
            return 0
        cause = os.strerror(-code) if code else f"result {result}"
        raise StorageError(-code or errno.EIO, f"{function} of {nbytes} bytes at {offset}: {cause}", handle.path)

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        nbytes = total_bytes(buffers)
        views = [as_bytes_view(buffer) for buffer in buffers]
        offset = 0
        with new_file(path, nbytes, durable=durable, mode=mode) as fd:
            handle = _Handle(self._open_again(fd, path, self._library.options(rdonly=0, wronly=1)), path)
            try:
                for view in views:
                    array = np.frombuffer(view, dtype=np.uint8)
                    while array.size:
                        count = self._transfer("xnvme_file_pwrite", handle, array.ctypes.data, array.size, offset)
                        if not count:
                            raise StorageError(errno.EIO, f"wrote no byte at {offset}", path)
                        array, offset = array[count:], offset + count
            finally:
                self._close(handle)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "library": self._library.describe()}
