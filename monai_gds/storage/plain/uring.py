"""An io_uring that opens, reads and closes many files in one system call. For :mod:`.small_files`.

The open, read and close of a file of 100 kB take 15 µs, and Python releases and takes its lock three times. In one
thread that does not matter. In several it is most of the time: a thread that returns from a call waits for the one that
runs, 5 ms (``sys.getswitchinterval``) if that is a training loop. Here it happens once per ``limits.RING_FILES`` files.

The kernel's interface is described in io_uring_setup(2), io_uring_enter(2) and linux/io_uring.h. The files are opened
into the ring's own table (``file_index``), which uses no descriptors of the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Sequence

import numpy as np

from monai_gds import limits

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # on every architecture
_REGISTER_FILES = 2
_REGISTER_WORKERS = 19
_GETEVENTS = 1
_OFFSET_SQES = 0x10000000
_OPENAT, _CLOSE, _STATX, _READ = 18, 19, 21, 22
_FIXED_FILE, _HARDLINK, _ASYNC = 1 << 0, 1 << 3, 1 << 4
_AT_FDCWD = -100
_WORD = 0xFFFFFFFF  #: the ring counts in 32 bits
#: What is asked of a file's state: inode, size, mtime. The time of the last access, which file systems over a network
#: forget at every read, would take a request to their server each time.
STATE = 0x340

#: Bytes of ``struct statx``.
STATE_SIZE = 256

#: Linux 5.17: a command of a chain finds the file that one before it opened.
_FEAT_LINKED_FILE = 1 << 12

#: ``struct io_uring_sqe`` as far as it is used, ``struct io_uring_cqe``.
_SQE = np.dtype(
    {
        "names": ["opcode", "flags", "fd", "off", "addr", "len", "open_flags", "user_data", "file_index"],
        "formats": ["u1", "u1", "i4", "u8", "u8", "u4", "u4", "u8", "u4"],
        "offsets": [0, 1, 4, 8, 16, 24, 28, 32, 44],
        "itemsize": 64,
    }
)
_CQE = np.dtype([("user_data", "u8"), ("res", "i4"), ("flags", "u4")])

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Ring:
    """An io_uring for one thread.

    Raises:
        OSError: the kernel has no io_uring, is too old (before 5.17), does not let this process have one, as in many
            containers, or the processor is not an x86-64.
    """

    def __init__(self) -> None:
        self._fd = -1
        self.broken = False  # whether the kernel has refused commands: nothing is read with it any more
        # Head and tail are shared with the kernel on other cores. Python has no memory barriers, and x86-64 keeps loads
        # in order without them. On a processor that does not, a completion could be read before it is there.
        if platform.machine() != "x86_64":
            raise OSError(errno.ENOSYS, f"io_uring needs memory barriers on {platform.machine()}, which Python lacks")
        files = limits.RING_FILES
        entries = 1 << (4 * files - 1).bit_length()
        # struct io_uring_params: sq_entries, cq_entries, flags, cpu, idle, features, …, then offsets in the mappings
        params = (ctypes.c_uint32 * 30)()
        self._fd = _call(_SETUP, ctypes.c_uint(entries), params)
        sq_entries, cq_entries, features = params[0], params[1], params[5]
        if not features & _FEAT_LINKED_FILE:
            raise OSError(errno.ENOSYS, "io_uring of this kernel cannot chain the open and the read of a file")
        sq, cq = params[10:20], params[20:30]  # head, tail, ring_mask, ring_entries, …: struct io_sqring_offsets
        nbytes = max(sq[6] + 4 * sq_entries, cq[5] + _CQE.itemsize * cq_entries)
        ring = mmap.mmap(self._fd, nbytes, offset=0)
        words = np.frombuffer(ring, np.uint32, nbytes // 4)
        self._sq_head, self._sq_tail = words[sq[0] // 4 :][:1], words[sq[1] // 4 :][:1]  # submissions: head and tail
        self._sq_array = words[sq[6] // 4 :][:sq_entries]
        self._cq_head, self._cq_tail = words[cq[0] // 4 :][:1], words[cq[1] // 4 :][:1]  # completions: head and tail
        self._completions = np.frombuffer(ring, _CQE, cq_entries, cq[5])
        self._numbers = np.arange(max(sq_entries, cq_entries), dtype=np.uint32)
        sqes = mmap.mmap(self._fd, _SQE.itemsize * sq_entries, offset=_OFFSET_SQES)
        self._chains = self._prepare(np.frombuffer(sqes, _SQE, 4 * files))
        _call(_REGISTER, self._fd, _REGISTER_FILES, (ctypes.c_int32 * files)(*[-1] * files), files)
        # By default the kernel has four threads per core for commands that have to wait.
        _call(_REGISTER, self._fd, _REGISTER_WORKERS, (ctypes.c_uint32 * 2)(limits.SLOW_READS, 0), 2)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @staticmethod
    def _prepare(sqes: np.ndarray) -> np.ndarray:
        """Fills in what is the same in every call. With a hard link, the close also follows a read that failed."""
        chains = sqes.reshape(-1, 4)
        place = np.arange(len(chains))
        chains["opcode"] = _OPENAT, _READ, _CLOSE, _STATX
        chains["flags"] = _HARDLINK, _HARDLINK | _FIXED_FILE, 0, 0
        chains["fd"][:, 0] = chains["fd"][:, 3] = _AT_FDCWD
        chains["fd"][:, 1] = place
        chains["len"][:, 3] = STATE
        chains["open_flags"][:, 0] = os.O_RDONLY | os.O_NONBLOCK  # opening a FIFO must not wait
        chains["file_index"][:, 0] = chains["file_index"][:, 2] = place + 1
        chains["user_data"] = np.arange(chains.size).reshape(chains.shape)
        return chains

    def read(
        self, paths: Sequence[bytes], offsets: np.ndarray | int, sizes: np.ndarray, addresses: np.ndarray, *,
        at_once: bool = False, states: bytearray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Tries to read a part of each file to an address, and returns when all attempts are over.

        There are at most ``limits.RING_FILES`` files. The caller keeps the memory at the addresses until then.

        Args:
            paths, offsets, sizes, addresses: the files, first byte and bytes of each, and where they go.
            at_once: has a thread of the kernel's open and read each file. Otherwise the kernel opens a file whose path
                it remembers in the calling thread, one after another, which is cheapest where nothing has to wait.
            states: gets a ``struct statx`` per file: the state of what the path names once it was read. Zeros of one
                that cannot be seen. Costs a thread of the kernel's, so it is for ``at_once``.

        Returns:
            Bytes read of each, or a negative errno, int32 (files,). A short read does not mean that the file has ended.
            If the kernel refuses, that is its error for every file, and the ring is ``broken``.

        Raises:
            ValueError: a path holds a null byte.
        """
        count = len(paths)
        names = b"\0".join(paths) + b"\0"
        if names.count(0) != count:
            raise ValueError("embedded null byte in a path")
        lengths = np.fromiter(map(len, paths), np.int64, count) + 1
        begin = ctypes.cast(ctypes.c_char_p(names), ctypes.c_void_p).value or 0
        chains = self._chains[:count]
        chains["addr"][:, 0] = begin + np.cumsum(lengths) - lengths
        chains["addr"][:, 1] = addresses
        chains["off"][:, 1] = offsets
        chains["len"][:, 1] = sizes
        chains["flags"][:, 0] = _HARDLINK | (_ASYNC if at_once else 0)
        chains["flags"][:, 2] = 0 if states is None else _HARDLINK
        if states is not None:
            chains["addr"][:, 3] = chains["addr"][:, 0]
            room = ctypes.addressof(ctypes.c_char.from_buffer(states))
            chains["off"][:, 3] = room + STATE_SIZE * np.arange(count)
        commands = np.arange(self._chains.size).reshape(self._chains.shape)[:count, : 3 if states is None else 4]
        try:
            opened, got = self._run(commands.ravel())[commands[:, :2]].T
        except OSError as e:
            return np.full(count, -(e.errno or errno.EIO), np.int32)
        done: np.ndarray = np.where(opened < 0, opened, got)
        return done

    def _run(self, commands: np.ndarray) -> np.ndarray:
        """Submits the commands with these numbers, waits for all of them, and returns the results by number."""
        numbers = self._numbers[: len(commands)]
        self._sq_array[(self._sq_tail[0] + numbers) % len(self._sq_array)] = commands
        try:
            self._sq_tail[0] = (int(self._sq_tail[0]) + len(commands)) & _WORD
            self._wait()
            completions = self._completions[(self._cq_head[0] + numbers) % len(self._completions)]
            results = np.empty(self._chains.size, np.int32)
            results[completions["user_data"]] = completions["res"]
            return results
        finally:
            self._settle()

    def _wait(self) -> None:
        """Submits all commands that have not been submitted, and waits until every command has completed."""
        while (tail := int(self._sq_tail[0])) != int(self._cq_tail[0]):
            to_submit, to_complete = (tail - int(self._sq_head[0])) & _WORD, (tail - int(self._cq_head[0])) & _WORD
            try:
                _call(_ENTER, self._fd, to_submit, to_complete, _GETEVENTS, None, 0)
            except OSError as e:
                if e.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    raise
                time.sleep(0.001)  # the kernel is short of memory

    def _settle(self) -> None:
        """Waits for the commands under way, even after Ctrl-C, and takes their completions off the ring.

        Otherwise the kernel would go on using names and memory that are freed, and the next call would take these
        results for its own.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                self._wait()
                self._cq_head[0] = self._sq_tail[0]
                break
            except (KeyboardInterrupt, SystemExit) as e:
                interrupt = e
            except OSError:
                self.broken = True
                self._sq_tail[0] = self._sq_head[0]  # the rest was not submitted, and never will be
                while self._sq_tail[0] != self._cq_tail[0]:
                    time.sleep(0.001)
        if interrupt is not None:
            raise interrupt
