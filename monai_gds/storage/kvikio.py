"""The ``kvikio`` backend: GPUDirect Storage through cuFile where the machine has it, KvikIO's POSIX path where not.

Reads are issued with ``CuFile.raw_read`` from this package's own threads, so none of KvikIO's process-wide settings
(``kvikio.defaults``) is changed and none needs to be: its thread count does not matter here, and its bounce buffers
(16 MiB unless the user set otherwise) are taken one a thread.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import stat
from collections.abc import Sequence
from typing import Any

import torch

from monai_gds.errors import StorageError
from monai_gds.storage.base import Availability, Buffer, FileId, naming
from monai_gds.storage.posix import pread_into
from monai_gds.storage.threaded import ThreadedStorage, as_bytes_view, create_file, write_all, write_file

__all__ = ["KvikioStorage"]


class KvikioStorage(ThreadedStorage):
    """Reads and writes CUDA tensors through KvikIO, https://docs.rapids.ai/api/kvikio/.

    Args:
        device: a CUDA device.
        threads: reads in flight at once. Pinned host memory used: this many of KvikIO's bounce buffers.

    Raises:
        BackendUnavailable: by ``open_storage``, where KvikIO is missing or there is no CUDA device.
    """

    name = "kvikio"
    reaches_gpu = True
    piece_bytes = 4 << 20  # measured: 2 and 4 MiB are alike, 16 MiB leaves threads idle at the end of a record

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        super().__init__(device, threads)
        import kvikio

        self._kvikio = kvikio

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        if device.type != "cuda":
            return Availability(False, "it serves CUDA targets only", 'use backend="posix" for a CPU target')
        if not torch.cuda.is_available():
            return Availability(False, "there is no CUDA device (KvikIO needs libcuda.so.1)", 'use device="cpu"')
        if importlib.util.find_spec("kvikio") is None:
            extra = "cuda12" if (torch.version.cuda or "").startswith("12") else "cuda13"
            return Availability(False, "the package kvikio is not installed", f"pip install 'monai_gds[{extra}]'")
        try:
            import kvikio
            import kvikio.defaults
        except Exception as e:
            return Availability(False, f"importing kvikio failed: {e}", "install the wheel for your CUDA version")
        how = "its POSIX path" if kvikio.defaults.is_compat_mode_preferred() else "cuFile"
        return Availability(True, f"KvikIO {kvikio.__version__} through {how}")

    def _open(self, path: str, expect: FileId | None) -> tuple[Any, str]:
        file = self._open_file(path, "r")
        if expect is not None:
            try:
                expect.check(FileId.of(file.fileno()), path)
            except BaseException:
                file.close()
                raise
        return file, path

    def _open_file(self, path: str, flags: str) -> Any:
        if not stat.S_ISREG(os.stat(path).st_mode):  # KvikIO would wait for ever to open a FIFO
            raise StorageError(errno.EINVAL, "not a regular file", path)
        try:
            return self._kvikio.CuFile(path, flags)
        except Exception as e:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # the system's own error names the cause
            raise StorageError(errno.EIO, f"KvikIO could not open it: {e}", path) from e

    def _close(self, handle: Any) -> None:
        handle[0].close()

    def _enter_thread(self) -> None:
        # KvikIO calls the driver, which wants a current context. A thread gets torch's by its first call of the
        # runtime; selecting the device that is selected already is none.
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()

    def _read_into(self, handle: Any, offset: int, dest: torch.Tensor) -> None:
        file, path = handle
        if not dest.is_cuda:
            pread_into(file.fileno(), offset, dest.numpy().data, path)
            return
        nbytes = dest.numel()
        try:
            with torch.cuda.device(dest.device):
                count = file.raw_read(dest, nbytes, offset)
        except Exception as e:
            raise StorageError(errno.EIO, f"KvikIO could not read {nbytes} bytes at {offset}: {e}", path) from e
        if count != nbytes:
            raise StorageError(errno.EIO, f"read {count} of {nbytes} bytes at {offset}", path)

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False) -> None:
        if not any(isinstance(b, torch.Tensor) and b.is_cuda for b in buffers):
            write_file(path, buffers, durable=durable)
            return
        torch.cuda.current_stream(self.device).synchronize()  # KvikIO does not wait for who is filling the buffers
        fd = create_file(path, sum(b.nbytes if isinstance(b, torch.Tensor) else memoryview(b).nbytes for b in buffers))
        try:
            with self._open_file(path, "r+") as file, naming(path):
                self._write_parts(fd, file, path, buffers)
                if durable:
                    os.fsync(fd)
        finally:
            os.close(fd)

    def _write_parts(self, fd: int, file: Any, path: str, buffers: Sequence[Buffer]) -> None:
        offset = 0
        for buffer in buffers:
            if isinstance(buffer, torch.Tensor) and buffer.is_cuda:
                offset += self._write_tensor(file, path, buffer.detach(), offset)
            else:
                os.lseek(fd, offset, os.SEEK_SET)
                view = as_bytes_view(buffer)
                write_all(fd, [view])
                offset += view.nbytes

    def _write_tensor(self, file: Any, path: str, tensor: torch.Tensor, offset: int) -> int:
        nbytes = tensor.nbytes
        if not nbytes:
            return 0
        try:
            count = file.pwrite(tensor, nbytes, offset).get()
        except Exception as e:
            raise StorageError(errno.EIO, f"KvikIO could not write {nbytes} bytes at {offset}: {e}", path) from e
        if count != nbytes:
            raise StorageError(errno.EIO, f"wrote {count} of {nbytes} bytes at {offset}", path)
        return nbytes

    def describe(self) -> dict[str, Any]:
        import kvikio.defaults

        bounce = kvikio.defaults.get("bounce_buffer_size")
        return {
            **super().describe(),
            "compatibility_mode": kvikio.defaults.is_compat_mode_preferred(),
            "pinned_bytes": bounce * self.threads,
        }
