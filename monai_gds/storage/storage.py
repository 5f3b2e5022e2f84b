"""``Storage``, which everyone but a backend calls. It checks, allocates, and packs small reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.errors import StorageError
from monai_gds.storage import plan, staging
from monai_gds.storage.backend import Backend
from monai_gds.storage.files import Buffer, FileId
from monai_gds.storage.pending import Pending, Unpacked
from monai_gds.storage.reads import Reads, check_destinations

T = TypeVar("T")


@final
class Storage:
    """Moves bytes between files and tensors of one target device, through one backend. Made by ``open_storage``.

    An instance belongs to the process that made it, since threads, pinned memory and CUDA streams do not survive a
    fork: in another process its methods raise StorageError. Several threads may use it at once.

    Memory is a two-way promise. Nothing is read before it has arrived: what ``wait()`` returns may be used at once on
    the current stream. Nothing is overwritten before its last reader is done: a destination of the caller's is filled
    only after the work that was queued on the current stream when :meth:`fill` was called.

    Args:
        backend: what moves the bytes. It is opened here, which may raise.

    Attributes:
        name: the backend's name.
        device: where tensors go.
        coherent: whether reads see what the file system sees; see :class:`Backend`.

    Example:
        >>> import os, torch
        >>> from monai_gds import open_storage
        >>> from monai_gds.storage import Reads
        >>> storage = open_storage("auto", "cpu")
        >>> storage.write("new.bin", [b"head", torch.arange(4, dtype=torch.uint8)])
        >>> os.path.getsize("new.bin")
        8
        >>> storage.load(Reads.of("new.bin", [(4, 4)])).wait()
        [tensor([0, 1, 2, 3], dtype=torch.uint8)]
        >>> storage.close()
    """

    def __init__(self, backend: Backend) -> None:
        backend.open()
        self.name = backend.name
        self.device = backend.device
        self.coherent = backend.coherent
        self._backend = backend
        self._process = os.getpid()

    def load(self, reads: Reads) -> Pending:
        """Reads into new tensors. Starts all reads and returns at once.

        Args:
            reads: one read per destination.

        Returns:
            Pending of one 1-D uint8 tensor per destination, each owning its storage, on ``self.device``.

        Raises:
            ValueError: reads overlap, are out of order, or do not fit into their destinations.
            StorageError: this storage belongs to another process. Errors of files come out of the Pending.
        """
        self._check_process()
        reads.check()
        stages.read(reads)
        if (  # several small ones, one per destination: they go into one block
            self.device.type == "cuda"
            and limits.PACK_READS <= len(reads) == len(reads.sizes)
            and reads.nbytes.max() < limits.PACK_BYTES
            and reads.total <= limits.TOGETHER_BYTES
        ):
            packed = plan.pack(reads, limits.PACK_GAP_BYTES)
            return Unpacked(self._start(packed), packed, self.device)
        return self._start(reads)

    def _start(self, reads: Reads) -> Pending:
        sizes = reads.sizes.tolist()
        with staging.on_copy_stream(self.device):
            into = [self._backend.memory(nbytes) for nbytes in sizes]
        pending = self._backend.start(reads, into)
        exact = all(tensor.numel() == nbytes for tensor, nbytes in zip(into, sizes, strict=True))
        return pending if exact else pending.trimmed(sizes)

    def map(self, reads: Reads) -> Pending:
        """As :meth:`load`, but for a CPU target ranges are mapped privately (copy-on-write) where the backend can.

        Writing into a mapped tensor never reaches the file. If the disk fails or the file is truncated, touching a
        mapping ends the process, where :meth:`load` would give an error.

        Args:
            reads: ranges of one file, one per destination.

        Raises:
            StorageError: this storage belongs to another process. Errors of the file come out of the Pending.
        """
        self._check_process()
        try:
            tensors = self._backend.map(reads)
        except OSError as e:
            return Pending.completed([], self.device, e)
        if tensors is None:
            return self.load(reads)
        stages.read(reads)
        return Pending.completed(tensors, self.device)

    def fill(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        """Reads into destinations of the caller's own. Starts all reads and returns at once.

        Args:
            reads: what to read; see :class:`Reads` for other bytes of ``into`` that may be overwritten.
            into: 1-D contiguous uint8 tensors on ``self.device`` or the CPU, no smaller than ``reads.sizes``.

        Returns:
            Pending of ``into``.

        Raises:
            ValueError: a destination is not as described, or lies on another device, or the reads are not in order.
            StorageError: this storage belongs to another process. Errors of files come out of the Pending.
        """
        self._check_process()
        reads.check()
        check_destinations(reads, into, self.device)
        stages.read(reads)
        on_device = [tensor for tensor in into if tensor.is_cuda]
        if on_device:
            staging.adopt(on_device, self.device)
        return self._backend.start(reads, into)

    def memory(self, nbytes: int) -> torch.Tensor:
        """A new, uninitialised 1-D uint8 tensor of ``nbytes`` on the device, in memory that is filled fastest."""
        self._check_process()
        return self._backend.memory(nbytes)[:nbytes]

    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        """Reads the first bytes of a file to the host, fewer from a smaller one, and returns them with its identity.

        Raises:
            OSError: the file could not be opened or read.
        """
        self._check_process()
        return self._backend.head(path, nbytes)

    @property
    def is_slow(self) -> bool:
        """Whether small reads take so long, as over NFS, that many should be in flight at once."""
        return self._backend.is_slow

    def each(self, do: Callable[[T], None], over: Sequence[T]) -> None:
        """Calls ``do``, which reads and raises nothing, for each of several; for many at once where :attr:`is_slow`."""
        self._check_process()
        self._backend.each(do, over)

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool = False, mode: int = 0o666) -> None:
        """Writes the buffers back to back as the whole content of the new file ``path``; see :meth:`Backend.write`.

        Raises:
            ValueError: a tensor is not 1-D, contiguous and of uint8.
            OSError: disk full, no permission, input/output error.
        """
        self._check_process()
        self._backend.write(path, buffers, durable=durable, mode=mode)

    def close(self) -> None:
        """Waits for what is under way and frees threads and devices; does nothing in another process.

        Tensors that were handed out stay valid.
        """
        if self._process == os.getpid():
            self._backend.close()

    def describe(self) -> dict[str, Any]:
        """Settings in force, for ``doctor`` and the benchmarks."""
        return {"backend": self.name, "device": str(self.device), **self._backend.describe()}

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StorageError(
                f"this {self.name} storage belongs to process {self._process}, which made it, and this is process "
                f"{os.getpid()}: call open_storage where it is needed"
            )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Storage belongs to the process that made it and cannot be pickled or copied: call open_storage where it "
            "is needed"
        )
