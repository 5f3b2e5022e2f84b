"""libxnvme for the backends ``xnvme`` and ``xnvme-block``: finding it, its declarations, and three small classes.

The few functions needed are declared from include/libxnvme_{opts,geo,cmd,queue,buf,dev,file,nvm}.h of xNVMe 0.7.5.
The layout of a library's ``struct xnvme_opts`` is derived from its symbols, since the development branch calls itself
0.7.5 too, and is checked by what ``xnvme_opts_set_defaults`` writes.

Devices are always opened for reading only. xNVMe's default is to open them for writing, which ``rdonly`` alone does not
undo.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from contextlib import suppress
from ctypes import POINTER, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

from monai_gds.base.library import library
from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage.xnvme.user_space import claims, sharing_id

#: The variable that names the library, xNVMe's own.
ENVIRONMENT = "XNVME_LIBRARY_PATH"

HOW_TO_GET_IT = (
    f"install libxnvme 0.7.5 or later (conda-forge has it as libxnvme; or build https://github.com/xnvme/xnvme) and, "
    f"where the loader does not find it, set {ENVIRONMENT} to the path of libxnvme.so"
)

#: Names for the dynamic loader.
_NAMES = ("libxnvme.so.0", "libxnvme.so")

#: xNVMe's interfaces to the kernel, which transfer bytes as pread does. io_uring_cmd passes NVMe commands through.
KERNEL_INTERFACES = ("io_uring", "libaio", "thrpool", "posix", "emu")
PASSTHROUGH = "io_uring_cmd"

#: A drive in user space that completes nothing for so long has lost its commands. The kernel has a limit of its own.
SILENT_SECONDS = 30.0

_CHARS = POINTER(c_char)


_OPTS: list[Any] = [
    *((name, _CHARS) for name in ("be", "dev", "mem", "sync", "async", "admin")),
    ("nsid", c_uint32),
    *((name, c_uint8) for name in ("rdonly", "wronly", "rdwr", "create", "truncate", "direct")),
    ("create_mode", c_uint32),
    *((name, c_uint8) for name in ("poll_io", "poll_sq", "register_files", "register_buffers")),
    ("css", c_uint32 * 2),
    *((name, c_uint32) for name in ("use_cmb_sqs", "shm_id", "main_core")),
    ("core_mask", _CHARS),
]
_OPTS_FABRICS: list[Any] = [
    *((name, _CHARS) for name in ("adrfam", "subnqn", "hostnqn")),
    *((name, c_uint32) for name in ("admin_timeout", "command_timeout", "spdk_fabrics", "keep_alive_timeout_ms")),
]
_HEAPS = [("host_heap_size", c_size_t), ("device_heap_size", c_size_t), ("gpu_id", c_uint32)]


class xnvme_opts(ctypes.Structure):  # noqa: N801 (xNVMe's own names)
    _fields_: ClassVar = [*_OPTS, *_OPTS_FABRICS]


class xnvme_opts_next(ctypes.Structure):  # noqa: N801
    """As on the development branch, with room for what a later version may append."""

    _fields_: ClassVar = [*_OPTS, ("iova_mode", _CHARS), *_OPTS_FABRICS, *_HEAPS, ("spare", c_uint8 * 256)]


class xnvme_geo(ctypes.Structure):  # noqa: N801
    _fields_: ClassVar = [
        *((name, c_uint32) for name in ("type", "npugrp", "npunit", "nzone")),
        ("nsect", c_uint64),
        *((name, c_uint32) for name in ("nbytes", "nbytes_oob")),
        *((name, c_uint64) for name in ("tbytes", "ssw")),
        *((name, c_uint32) for name in ("mdts_nbytes", "lba_nbytes")),
        ("rest", c_uint8 * 8),
    ]


class xnvme_cmd_ctx(ctypes.Structure):  # noqa: N801
    """With its parts ``struct xnvme_spec_cpl`` (``result`` to ``status``) and ``async`` (``queue`` to ``cb_arg``)."""

    _fields_: ClassVar = [
        ("cmd", c_uint8 * 64),
        ("result", c_uint64),
        ("ids", c_uint16 * 3),
        ("status", c_uint16),
        ("dev", c_void_p),
        *((name, c_void_p) for name in ("queue", "cb", "cb_arg")),
        ("opts", c_uint32),
        ("be_rsvd", c_uint8 * 12),
    ]


_CTX = POINTER(xnvme_cmd_ctx)
xnvme_queue_cb = ctypes.CFUNCTYPE(None, _CTX, c_void_p)

#: Every function used: what it returns, and its arguments. Options, whose layout differs, count as any pointer.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "xnvme_opts_set_defaults": (None, c_void_p),
    "xnvme_dev_open": (c_void_p, c_char_p, c_void_p),
    "xnvme_dev_close": (None, c_void_p),
    "xnvme_dev_get_geo": (POINTER(xnvme_geo), c_void_p),
    "xnvme_dev_get_nsid": (c_uint32, c_void_p),
    "xnvme_file_open": (c_void_p, c_char_p, c_void_p),
    "xnvme_file_close": (c_int, c_void_p),
    "xnvme_file_get_cmd_ctx": (xnvme_cmd_ctx, c_void_p),
    "xnvme_file_pread": (c_int, _CTX, c_void_p, c_size_t, c_int64),
    "xnvme_file_pwrite": (c_int, _CTX, c_void_p, c_size_t, c_int64),
    "xnvme_buf_alloc": (c_void_p, c_void_p, c_size_t),
    "xnvme_buf_free": (None, c_void_p, c_void_p),
    "xnvme_buf_virt_alloc": (c_void_p, c_size_t, c_size_t),
    "xnvme_buf_virt_free": (None, c_void_p),
    "xnvme_queue_init": (c_int, c_void_p, c_uint16, c_int, POINTER(c_void_p)),
    "xnvme_queue_term": (c_int, c_void_p),
    "xnvme_queue_poke": (c_int, c_void_p, c_uint32),
    "xnvme_queue_get_cmd_ctx": (_CTX, c_void_p),
    "xnvme_queue_set_cb": (c_int, c_void_p, xnvme_queue_cb, c_void_p),
    "xnvme_nvm_read": (c_int, _CTX, c_uint32, c_uint64, c_uint16, c_void_p, c_void_p),
}


class Library:
    """A loaded libxnvme."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.path = _path_of(library)
        #: ``0.7`` or ``next``: of its options, and of how its interfaces are named.
        self.layout = "0.7" if hasattr(library, "xnvme_be_attr_list_bundled") else "next"
        self._opts = xnvme_opts if self.layout == "0.7" else xnvme_opts_next
        self.api: Any = library  # its functions by xNVMe's names
        room = (self._opts * 8)()  # a library with larger options than declared writes into what follows
        opts = room[0]
        self.api.xnvme_opts_set_defaults(ctypes.byref(opts))
        if (opts.rdwr, opts.nsid, opts.command_timeout) != (1, 1, 30_000_000):
            raise BackendUnavailable(
                f"{self.path} lays out its options as neither xNVMe 0.7.5 nor its development branch of 2026 does"
            )

    def options(self, **fields: str | int | None) -> Any:
        """``struct xnvme_opts``: the defaults, for reading only, and what is given; None leaves the default."""
        opts = self._opts()
        self.api.xnvme_opts_set_defaults(ctypes.byref(opts))
        for name, value in {"rdwr": 0, "wronly": 0, "rdonly": 1, **fields}.items():
            if isinstance(value, str):
                setattr(opts, name, ctypes.create_string_buffer(os.fsencode(value)))
            elif value is not None:
                setattr(opts, name, value)
        return opts

    def open(self, function: str, path: str, opts: Any, *, named: str = "") -> Any:
        """``xnvme_dev_open`` or ``xnvme_file_open``. Raises StorageError, which names ``named`` or ``path``."""
        ctypes.set_errno(0)
        handle = getattr(self.api, function)(ctypes.create_string_buffer(os.fsencode(path)), ctypes.byref(opts))
        if not handle:
            code = ctypes.get_errno() or errno.EIO
            raise StorageError(code, f"{function} could not open it: {os.strerror(code)}", named or path)
        return handle

    def check_driver(self, interface: str) -> None:
        """Raises BackendUnavailable if the library was built without the driver of an interface."""
        drivers = self.drivers()
        if drivers and self.driver_of(interface) not in drivers:
            raise BackendUnavailable(
                f"{self.path} was built without {interface!r}; its drivers are {', '.join(drivers)}. "
                "Choose another be, or a libxnvme that was built with it"
            )

    def driver_of(self, interface: str) -> str:
        """The value of the option ``be`` for an interface."""
        if self.layout == "0.7":
            return "linux" if interface in (*KERNEL_INTERFACES, PASSTHROUGH) else interface
        # "io_uring" there means an NVMe namespace whose synchronous commands go by ioctl; _bdev any block device
        return f"{interface}_bdev" if interface in KERNEL_INTERFACES else interface

    def describe(self) -> str:
        return f"{self.path}, options as in {self.layout}"

    def version(self) -> str:
        """For instance ``0.7.5``; empty if the library does not report it."""
        parts = [getattr(self.api, f"xnvme_ver_{part}", None) for part in ("major", "minor", "patch")]
        return ".".join(str(part()) for part in parts if part is not None)

    def drivers(self) -> list[str]:
        """The drivers that it was built with, by xNVMe's names; empty if the library does not list them."""
        return [os.fsdecode(driver.name) for driver in self._drivers()]

    def shm_id(self, uri: str, driver: str) -> int:
        """The ``shm_id`` by which processes share a drive in user space; 0 where only one can have it."""
        return sharing_id(uri, driver) if driver in self.sharing_drivers() else 0

    def sharing_drivers(self) -> list[str]:
        """The drivers that say that they share drives. Those of release 0.7.5 have the option, but say nothing."""
        return [os.fsdecode(one.name) for one in self._drivers() if self.layout == "next" and one.caps & _SHARES]

    def _drivers(self) -> list[_Attribute]:
        if self.layout == "0.7":
            bundled = POINTER(_Attributes)()
            if self.api.xnvme_be_attr_list_bundled(ctypes.byref(bundled)) or not bundled:
                return []
            first = ctypes.addressof(bundled.contents) + _Attributes.item.offset
            items = (_Attribute * bundled.contents.count).from_address(first)
            return [item for item in items if item.enabled]  # not freed, as in xNVMe's own program
        get = getattr(self.api, "xnvme_be_attr_get", None)
        found: list[_Attribute] = []
        if get is not None:
            get.restype = POINTER(_Attribute)
            while attribute := get(len(found)):
                found.append(attribute.contents)
        return found


class _Attribute(ctypes.Structure):
    """``struct xnvme_be_attr``: ``enabled`` is that of 0.7.5, and ``caps`` that of the development branch."""

    _fields_: ClassVar = [
        *(("name", c_char_p), ("enabled", c_uint8), ("rest", c_uint8 * 7)),
        *(("caps", c_uint32), ("reserved", c_uint8 * 4)),
    ]


_SHARES = 1 << 8  # XNVME_BE_CAP_MPROC, include/xnvme_be.h


class _Attributes(ctypes.Structure):
    _fields_: ClassVar = [("capacity", c_uint32), ("count", c_int), ("item", _Attribute * 0)]


class Completion(NamedTuple):
    """How a command ended: its tag, its NVMe status (0 is success), and its result (bytes, except by passthrough)."""

    tag: Any
    status: int
    result: int


class Device:
    """A device open for reading, through one of xNVMe's interfaces. Use it from one thread at a time.

    Args:
        uri: a device node, or a PCI address for a driver in user space.
        interface: one of KERNEL_INTERFACES, PASSTHROUGH, or the name of such a driver.
        mem: xNVMe's name of an allocator; None for the interface's own.
        gpu: index of the CUDA device for a driver with buffers on a GPU.
        nsid: namespace of a drive in user space; None for the first.
        heap_bytes: size of uPCIe's heaps; None for its own default.
    """

    def __init__(
        self, library: Library, uri: str, interface: str, mem: str | None, gpu: int | None = None,
        nsid: int | None = None, heap_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.library, self.uri, self.interface = library, uri, interface
        self.in_kernel = interface in (*KERNEL_INTERFACES, PASSTHROUGH)
        self.counts_bytes = interface in KERNEL_INTERFACES
        self._api = library.api
        with _opening:
            before = _descriptors_of(uri) if self.in_kernel else set()
            self.handle = self._open(mem, gpu, nsid, heap_bytes)
            try:
                if self.in_kernel:
                    _check_read_only(_descriptors_of(uri) - before, uri, direct=self.counts_bytes)
                geo = self._api.xnvme_dev_get_geo(self.handle).contents
                self.block_size, self.nbytes = geo.lba_nbytes, geo.tbytes
                self.max_transfer = geo.mdts_nbytes
                self.nsid = self._api.xnvme_dev_get_nsid(self.handle)
                if self.block_size not in (512, 1024, 2048, 4096) or not self.nbytes or not self.max_transfer:
                    guess = "is it a partition? Name the whole disk"
                    if not self.in_kernel:
                        guess = f"does the drive have a namespace {self.nsid} (nsid)?"
                    if mem is not None:
                        guess = f"does mem={mem!r} give no memory (huge pages that nobody reserved, for instance)?"
                    found = f"blocks of {self.block_size} bytes, {self.nbytes} in all"
                    raise StorageError(errno.EINVAL, f"xNVMe finds no geometry ({found}): {guess}", uri)
            except BaseException:
                self.close()
                raise

    def _open(self, mem: str | None, gpu: int | None, nsid: int | None, heap_bytes: int | None) -> Any:
        fields: dict[str, str | int | None] = {"be": self.library.driver_of(self.interface), "mem": mem, "nsid": nsid}
        if self.library.layout == "next":
            fields |= {"gpu_id": gpu, "host_heap_size": heap_bytes, "device_heap_size": heap_bytes}
        elif self.in_kernel:
            # sync "block": by pread, so that thrpool reports bytes and MDTS is not cut to what an ioctl takes
            fields |= {"async": self.interface, "sync": "block" if self.counts_bytes else "nvme"}
        shm_id = self.library.shm_id(self.uri, self.interface)
        opts = self.library.options(direct=int(self.counts_bytes), shm_id=shm_id or None, **fields)
        if not self.in_kernel:
            claims.take(self.uri, shared=shm_id > 0)
        try:
            return self.library.open("xnvme_dev_open", self.uri, opts)
        except StorageError as e:
            if not self.in_kernel:
                claims.give_up(self.uri)
            if mem is None:
                raise
            why = f"{e.strerror}; perhaps {self.interface} has no allocator {mem!r}"
            raise StorageError(e.errno, why, self.uri) from e

    def alloc(self, nbytes: int) -> int:
        """The address of a buffer that commands may read into. Raises StorageError where no memory is left for it."""
        address = self._api.xnvme_buf_alloc(self.handle, nbytes)
        if not address:
            raise StorageError(errno.ENOMEM, f"xnvme_buf_alloc gave no buffer of {nbytes} bytes", self.uri)
        return int(address)

    def free(self, address: int) -> None:
        self._api.xnvme_buf_free(self.handle, address)

    def close(self) -> None:
        """Closes the device; its queues are closed and its buffers freed before."""
        handle, self.handle = self.handle, None
        if handle:
            close = partial(self._api.xnvme_dev_close, handle)
            close() if self.in_kernel else claims.give_up(self.uri, close)


class Queue:
    """A command queue of a device, of ``depth`` commands at once, a power of two below 4096. For one thread at a time.

    Raises StorageError if the device gives no queue (for instance io_uring where the kernel has it switched off).
    """

    def __init__(self, device: Device, depth: int) -> None:
        self._api, self._device = device.library.api, device
        pointer = c_void_p()
        code = self._api.xnvme_queue_init(device.handle, depth, 0, ctypes.byref(pointer))
        if code:
            raise StorageError(-code, f"xnvme_queue_init with {device.interface}: {os.strerror(-code)}", device.uri)
        self._queue: c_void_p | None = pointer
        # xNVMe keeps no reference
        self._callback = xnvme_queue_cb(lambda _, number: self._finished.append(number))
        self._api.xnvme_queue_set_cb(pointer, self._callback, None)
        # Each context is taken once and kept: making ctypes objects per command would cost as much as the command.
        self._contexts: list[xnvme_cmd_ctx] = []
        for number in range(1, depth + 1):
            context = self._api.xnvme_queue_get_cmd_ctx(pointer)
            if not context:
                raise StorageError(errno.ENOMEM, "the queue has fewer contexts than its depth", device.uri)
            context.contents.cb_arg = number
            self._contexts.append(context.contents)
        self._free = list(range(1, depth + 1))
        self._tags: dict[int, Any] = {}  # of the commands in flight
        self._finished: list[int] = []
        self._silent_since: float | None = None  # the first look since which nothing was complete

    @property
    def outstanding(self) -> int:
        return len(self._tags)

    def read(self, tag: Any, block: int, count: int, address: int) -> bool:
        """Reads ``count`` blocks from ``block`` into memory at ``address``. False while the queue is full."""
        if not self._free:
            return False
        number = self._free.pop()
        context = self._contexts[number - 1]
        context.status = context.result = 0  # contexts are used again, and success does not clear a status
        self._tags[number] = tag
        code = self._api.xnvme_nvm_read(context, self._device.nsid, block, count - 1, address, None)
        if code == 0:
            return True
        del self._tags[number]
        self._free.append(number)
        if code in (-errno.EBUSY, -errno.EAGAIN):
            return False
        raise StorageError(-code, f"xnvme_nvm_read of block {block}: {os.strerror(-code)}", self._device.uri)

    def poll(self) -> list[Completion]:
        """The commands that completed since the last call, without waiting. Called while some are in flight.

        Raises StorageError if the queue is broken, or a drive without the kernel's time limit does not answer.
        """
        now = time.monotonic()  # first: this process may be stopped after any line, and the drive answers meanwhile
        code = self._api.xnvme_queue_poke(self._queue, 0)
        if code < 0 and code not in (-errno.EBUSY, -errno.EAGAIN, -errno.EINTR):
            raise StorageError(-code, f"xnvme_queue_poke: {os.strerror(-code)}", self._device.uri)
        finished, self._finished = self._finished, []
        if not self._device.in_kernel:
            self._check_time(now, bool(finished))
        done = []
        for number in finished:
            context = self._contexts[number - 1]
            done.append(Completion(self._tags.pop(number), context.status & 0xFFFE, context.result))
            self._free.append(number)
        return done

    def _check_time(self, now: float, answered: bool) -> None:
        if answered or self._silent_since is None:
            self._silent_since = None if answered else now
        elif now - self._silent_since > SILENT_SECONDS:
            raise StorageError(
                errno.ETIMEDOUT,
                f"the drive did not answer within {SILENT_SECONDS:g} s, and its reads are given up. If others fail "
                "too, end this process: the driver resets the drive when the next one opens it",
                self._device.uri,
            )

    def close(self) -> None:
        """Ends the queue; nothing may be in flight."""
        queue, self._queue = self._queue, None
        if queue:
            self._api.xnvme_queue_term(queue)


_opening = threading.Lock()  # a device's own descriptors are those that exist after opening it and not before


def _descriptors_of(path: str) -> set[int]:
    """This process's descriptors on one device node."""
    wanted = os.stat(path)
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor, or one that another thread closed
            if os.path.samestat(os.fstat(int(name)), wanted):
                found.add(int(name))
    return found


def _check_read_only(descriptors: set[int], uri: str, *, direct: bool) -> None:
    """Raises StorageError unless xNVMe opened the device as requested: it falls back silently."""
    if not descriptors:
        raise StorageError(errno.EIO, "xNVMe opened it without a descriptor that could be checked", uri)
    for fd in descriptors:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise StorageError(errno.EPERM, "xNVMe opened it for writing, although read-only was requested", uri)
        if direct and not flags & os.O_DIRECT:
            why = "xNVMe opened it without O_DIRECT, and a buffered read of a device gives stale blocks"
            raise StorageError(errno.EINVAL, why, uri)


def load() -> Library:
    """The libxnvme of this machine. Raises BackendUnavailable if none fits, with what was found, and where."""
    return _load(os.environ.get(ENVIRONMENT))


@lru_cache(maxsize=8)
def _load(named: str | None) -> Library:
    names = [named] if named else _NAMES
    hint = f"{ENVIRONMENT} {'names it' if named else 'is not set'}"
    load = partial(ctypes.CDLL, use_errno=True)
    return Library(library(names, hint, functions=_FUNCTIONS, load=load, error=BackendUnavailable))


def _path_of(library: ctypes.CDLL) -> str:
    """The file that a library was loaded from."""
    info = (c_char_p * 4)()  # Dl_info: the file comes first
    if not ctypes.CDLL(None).dladdr(ctypes.cast(library.xnvme_opts_set_defaults, c_void_p), info):
        return str(library._name)
    return os.path.realpath(os.fsdecode(info[0] or b""))
