"""Files that stay registered with CUDA where they lie in the page cache. For ``posix``, see ``pinned_bytes`` there.

The device copies from such a file without work of the CPU: an H100 received epochs of 6.9 GB at 52 GB/s, where staging
reached 38 with eight threads and a pinned copy 49 to 55. Registering takes tens of ms per GiB, so it pays only for
files that stay registered; it runs in a separate thread, after the first read. Only files whose every page is in the
page cache are registered. For a file that the user neither owns nor may write, the kernel reports every page as cached:
missing pages are then read from the drive.

A registered page outlives its file: a file that is replaced or deleted still yields its old bytes. A file that is
truncated yields wrong bytes without an error. So the identity of the path is compared before and after each copy. The
CPU never reads through these mappings, hence there is no SIGBUS.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from monai_gds.errors import warn
from monai_gds.storage import files, memory, staging
from monai_gds.storage.files import Expected, FileId


class PinnedFile:
    """A whole file, registered until nothing refers to this object.

    Raises OSError if it is another file, is not wholly in the page cache, or cannot be mapped, and RuntimeError if CUDA
    refused.
    """

    __slots__ = ("_address", "_process", "file")

    def __init__(self, path: str, file: FileId) -> None:
        self.file = file
        self._address = 0
        self._process = os.getpid()
        fd = files.open_file(path, file)
        try:
            address = memory.map_file(fd, 0, file.size, shared=True)
        finally:
            os.close(fd)
        try:
            if memory.resident(address, file.size) < 1:
                raise BlockingIOError(f"{path} is not in the page cache as a whole")
            staging.pin(address, self.nbytes)
        except BaseException:
            memory.unmap(address, file.size)
            raise
        self._address = address

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are registered: whole pages."""
        return files.whole_pages(self.file.size)

    def copy(self, offsets: Sequence[int], dests: Sequence[torch.Tensor], device: torch.device) -> None:
        """Copies parts of the file to CUDA tensors on the copy stream, and waits for that without using the CPU."""
        stream = staging.copy_stream(device)
        with torch.cuda.stream(stream):
            for offset, dest in zip(offsets, dests, strict=True):
                if dest.nbytes:
                    staging.copy_to_device(dest.data_ptr(), self._address + offset, dest.nbytes, stream.cuda_stream)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
        done.synchronize()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._address and not ending() and os.getpid() == self._process:  # CUDA does not work in a forked child
            staging.unpin(self._address)
            memory.unmap(self._address, self.file.size)


class PinnedFiles:
    """The registered files of one storage, of at most ``nbytes`` together: first come, first kept."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        self.used = 0
        self._refused = False  # by CUDA, once: all further files of this storage are staged
        self._held: dict[str, PinnedFile | None] = {}  # None: being registered, or refused
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def holds(self, path: str, expected: Expected) -> bool:
        """Whether :meth:`get` is likely to return a file."""
        held = self._held.get(path)
        return held is not None and held.file == expected

    def get(self, path: str, expected: FileId) -> PinnedFile | None:
        """The file, if it is registered and the path still names it. Keep it until the copies from it are over."""
        held = self._held.get(path)
        if held is None:
            return None
        try:
            if held.file == expected == FileId.of(path):
                return held
        except OSError:  # it was deleted, and takes room on its disk as long as it is registered
            self._drop(path, held, held.nbytes)
            raise
        self._drop(path, held, held.nbytes)
        return None

    def _drop(self, path: str, held: PinnedFile | None, nbytes: int) -> None:
        with self._lock:
            if path in self._held and self._held[path] is held:
                del self._held[path]
                self.used -= nbytes

    def offer(self, path: str, file: FileId) -> None:
        """Registers a file that was just read, in the background, if there is room for it."""
        with self._lock:
            if self._refused or path in self._held or self.used + file.size > self.nbytes:
                return
            self._held[path] = None
            self.used += file.size
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "monai-gds-pin")
            thread = self._thread
        try:
            thread.submit(self._register, path, file)
        except RuntimeError:  # the process is ending, or may start no more threads
            self._drop(path, None, file.size)

    def _register(self, path: str, file: FileId) -> None:
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                pinned = PinnedFile(path, file)
        except OSError:  # it was replaced, or pushed out of the page cache: the next read may offer it again
            self._drop(path, None, file.size)
        except RuntimeError as e:
            self._drop(path, None, file.size)
            if not self._refused:
                self._refused = True
                warn(f"{path} and further files are copied as without pinned_bytes: {e}", UserWarning)
        else:
            with self._lock:
                self._held[path] = pinned
                self.used += pinned.nbytes - file.size

    def close(self) -> None:
        """Unregisters everything. Nothing may be under way."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)
        self._held.clear()
        self.used = 0
