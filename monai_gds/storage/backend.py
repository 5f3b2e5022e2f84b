"""The interface of storage backends. Read this file, then :mod:`.blocking` or :mod:`.queue`, before writing one.

A backend moves bytes between files and the tensors of one device. It implements :meth:`Backend.probe` and
:meth:`Backend.start`, and overrides what it does better than the defaults here. Two base classes reduce it to one
primitive:

* :class:`monai_gds.storage.blocking.BlockingBackend` for a blocking read of a part of a file;
* :class:`monai_gds.storage.queue.QueueBackend` for a queue that takes commands and gives completions.

Memory is a two-way promise. Nothing is read before it has arrived: a backend calls ``Pending.finish`` only when every
byte is there or its copy is queued on the copy stream. Nothing is overwritten before its last reader is done: every
destination is ordered after the copy stream when ``start`` is called, so a backend that fills device memory past that
stream first waits for an event recorded on it.

The tests in :mod:`monai_gds.testing` check whether a backend keeps these promises.

A backend can rely on :class:`monai_gds.storage.Storage`, which checks arguments and the process, packs small
destinations into one block, and hands tensors to the caller's stream.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from monai_gds.base import stages
from monai_gds.storage import files, staging
from monai_gds.storage.files import Buffer, Expected, FileId
from monai_gds.storage.pending import Pending
from monai_gds.storage.reads import Reads

T = TypeVar("T")

#: Why a backend that reads into GPU memory does not work for a CPU target.
CUDA_ONLY = "it serves CUDA targets only"


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend works here: ``ok``, what was found (``reason``), and what to do about it (``remedy``).

    Example:
        >>> found = Availability(False, "the package kvikio is not installed", "pip install 'monai_gds[cuda13]'")
        >>> found.remedy if not found else "nothing to do"
        "pip install 'monai_gds[cuda13]'"
    """

    ok: bool
    reason: str
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.ok


def check_threads(threads: int | None) -> None:
    """Raises ValueError for a number of threads that there cannot be; None chooses."""
    if threads is not None and (not isinstance(threads, Integral) or threads < 1):
        raise ValueError(f"threads={threads!r}: give a whole number of at least 1, or None")


class Backend(ABC):
    """Moves bytes between files and tensors of one device; see the module's docstring.

    Options are keyword arguments of the constructor, and are never seen outside of it. The constructor refuses values
    that cannot work. It loads and opens nothing, so that a dataset's constructor can try it: that is left to
    :meth:`open`. An instance is used by several threads at once, but by one process only:
    :class:`monai_gds.storage.Storage` checks that.

    Args:
        device: where destinations live, ``cpu`` or ``cuda:N``. Individual destinations may always lie on the CPU.

    Raises:
        ValueError: a value of an option that cannot work, or values that do not go together.
        TypeError: an unknown option, of a backend that takes any name.

    Example:
        >>> import os, torch
        >>> from monai_gds.storage import Availability, Reads, Storage
        >>> from monai_gds.storage.blocking import BlockingBackend
        >>> class Plain(BlockingBackend):
        ...     @classmethod
        ...     def probe(cls, device):
        ...         return Availability(True, "plain reads")
        ...
        ...     def _read_into(self, handle, offset, dest):
        ...         return os.preadv(handle, [dest.numpy()], offset)
        >>> with open("file.bin", "wb") as f:
        ...     _ = f.write(b"12345")
        >>> Storage(Plain(torch.device("cpu"))).load(Reads.of("file.bin", [(3, 2)])).wait()
        [tensor([52, 53], dtype=torch.uint8)]
    """

    #: What a user writes as ``backend="…"``. Given by the registry.
    name: ClassVar[str] = ""

    #: Whether reads see what the file system sees. If not, because the backend reads behind its back, checksums are
    #: verified at every read, not only at the first.
    coherent: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    #: Whether it fills CUDA tensors by itself. If not, they are filled through pinned staging.
    reaches_gpu: bool = False

    #: Whether it serves CUDA targets only. Then it is not probed for others.
    needs_cuda: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device) -> Availability:
        """Whether this backend works here for ``device``. No side effects; cheap enough to call often."""

    def open(self) -> None:  # noqa: B027 (optional: a backend may need nothing)
        """Loads libraries and reads files that the options name. Called once, before anything else.

        Raises:
            BackendUnavailable: it does not work here with these options.
        """

    @abstractmethod
    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        """Starts all reads and returns at once.

        Errors of files come out of the Pending, not of this call: each file fails alone (:meth:`Pending.fail`).

        Args:
            reads: any number, of any files, offsets and lengths. A length of zero still needs an existing file.
            into: the destinations: 1-D contiguous uint8 tensors, no smaller than ``reads.sizes``.
        """

    def served_by(self, path: str, expected: Expected) -> str:
        """What serves reads of a file into memory of the device: one of ``stages.WAYS``."""
        return stages.DIRECT if self.reaches_gpu else stages.STAGED

    def _count_served(self, reads: Reads, into: Sequence[torch.Tensor]) -> None:
        """Counts bytes by what serves them, for ``GDSDataLoader(stats=True)``. For :meth:`start`, where it is known."""
        if not stages.watching():
            return
        on_device = np.array([tensor.is_cuda for tensor in into], bool)[reads.dest]
        stages.count(stages.HOST, int(reads.nbytes[~on_device].sum()))
        per_file = np.bincount(reads.file, reads.nbytes * on_device, len(reads.paths))
        for path, expected, nbytes in zip(reads.paths, reads.expected, per_file.tolist(), strict=True):
            if nbytes:
                stages.count(self.served_by(path, expected), int(nbytes))

    @property
    def is_slow(self) -> bool:
        """Whether small reads take so long that many should be in flight at once, as over NFS."""
        return False

    def each(self, do: Callable[[T], None], over: Sequence[T]) -> None:
        """Calls ``do``, which raises nothing, for each of several; for many at once where :attr:`is_slow`."""
        for one in over:
            do(one)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Allocates memory that this backend fills fastest: a 1-D uint8 tensor on the device, ``nbytes`` or longer.

        The excess is room for whole blocks. It is cut off the tensor that a user gets.
        """
        if self.device.type == "cuda":
            return staging.allocate_on_copy_stream(nbytes, self.device)
        return files.aligned_empty(nbytes)

    def map(self, reads: Reads) -> list[torch.Tensor] | None:
        """Maps the ranges of one file privately (copy-on-write), or returns None where this backend cannot.

        Args:
            reads: reads of one file, each range into its own destination.

        Raises:
            OSError: the file is missing, not the expected one, or ends before a range does.
        """
        return None

    def head(self, path: str, nbytes: int) -> tuple[bytes, FileId]:
        """The first bytes of a file, fewer from a smaller one, and its identity. Blocking.

        Raises:
            OSError: the file could not be opened or read.
        """
        return files.read_head(path, nbytes)

    def write(self, path: str, buffers: Sequence[Buffer], *, durable: bool, mode: int) -> None:
        """Writes the buffers back to back as the whole content of the new file ``path``. Blocking.

        The caller publishes the file (renames it), and removes it after a failure. Work that is queued on the current
        stream may still be filling the buffers.

        Args:
            path: a file that does not exist yet, in a directory that does.
            buffers: see :data:`Buffer`.
            durable: return only once the bytes would survive a power cut (fsync).
            mode: permissions of the file from its creation on, less those that the umask takes away.

        Raises:
            ValueError: a tensor is not 1-D, contiguous and of uint8.
            OSError: disk full, no permission, input/output error.
        """
        with files.new_file(path, files.total_bytes(buffers), durable=durable, mode=mode) as fd:
            staging.write_buffers(fd, buffers)

    # How the two base classes open files. Their subclasses may override these.

    def _open(self, path: str, expected: Expected) -> Any:
        """Opens a file for reading and returns any handle.

        Raises:
            FileChanged: it is not the expected one; :func:`monai_gds.storage.files.check_open` compares.
            OSError: it cannot be opened.
        """
        return files.open_file(path, expected)

    def _close(self, handle: Any) -> None:
        """Closes what ``_open`` returned. An error here fails the file."""
        os.close(handle)

    def close(self) -> None:  # noqa: B027 (optional: a backend may hold nothing)
        """Waits for what is under way, and frees threads and devices. The backend may be used again afterwards."""

    def describe(self) -> dict[str, Any]:
        """Settings in force, for ``doctor`` and the benchmarks."""
        return {"pinned_bytes": staging.pinned_bytes(self.device)} if self.device.type == "cuda" else {}
