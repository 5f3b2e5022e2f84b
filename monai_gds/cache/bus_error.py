"""What a bus error leaves behind: a message that names the record.

A page of a mapped record that cannot be read ends the process with SIGBUS. No handler in Python can say so: the thread
that faulted may have the interpreter's lock, or need it from one that waits for it, and then the process hangs instead
(each way to do so was tried: ``signal.signal``, its wake-up descriptor, a ctypes callback). So the handler is a few
hundred bytes of machine code, compiled from ``bus_error.c``. It writes the message to the standard error and puts back
the handler that was there before, faulthandler's for instance. The fault then comes again, to that one.

Where the machine allows no such code, bus errors stay as they are.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import mmap
import platform
import signal

from monai_gds.cache.header import SUFFIX
from monai_gds.process import PerProcess

__all__ = ["explain"]

_BEFORE = b"monai_gds: bus error, because a page of the mapped record "
_AFTER = (
    b" could not be read: the disk fails, or another program cut the file. `monai-gds cache verify` finds all records"
    b" that cannot be read. With GDSDataset(mmap=False), such a record is computed anew.\n"
)

#: Which bus_error.c this was compiled from.
_SOURCE = "d693d8cc78377f3a"
_CODE = {
    "x86_64": (
        "QVdBVkFVQVRVU1KLRgi6AQAAAESNcP8xwPAPsRXfAAEAg/gBD4TdAQAATGP/QYP+Aw+HggEAAIXAD4V6AQAATItmEEUx0kiNNYMA"
        "AQAx0rgBAQAASMfHnP///w8FRTHASInHSIXAD4jqAAAAMe0x20Ux7UUxyUiDxjS6ABAAAEUx0jHADwVIhcAPjrgAAABMjR1q/wAA"
        "TAHYTYnaQQ++iwQBAACA+Qp1DIXtD4WWAAAAMdvrfoXbdQWA+S10bYP7AXUdgPkgdRhNOey7AgAAAA+TwTHtTTnMQA+SxSHN61aD"
        "+wF/HUnB4QSA+Tl/CIPpMEhjyesHg+lXSA++yUkJyes0he10MIP7A3QFgPkvdSa7AwAAAEmB+P8fAAB3GEOIjAIEEQAASf/A6wtN"
        "ic27AQAAAEUxyUn/w0w52A+FWv///+k4////MdJFMdK4AwAAAEiJ1g8FSI0No/4AADHATAHBTDnAdFJIic9IjRWP/gAASCnHQIqy"
        "4AAAAECE9nQXSDnXdA1I/8JAOrQCAxEAAHTiSP/A68tMiQUa/wAARTHSuBQAAABIjTXz/gAAvwIAAAC6AwAAAA8FMdJIjTVG/gAA"
        "RIn//xU1/gAAxwUr/wAAAgAAAEGD/gN2LDHSRTHSuLoAAABIiddIidYPBUmJwLgnAAAADwVIicdMica46gAAAEyJ+g8FWFtdQVxB"
        "XUFeQV/D"
    ),
    "aarch64": (
        "/Xu9qSIAgFL9AwCR81MBqfQDACozCEC59RMA+ZUAAJCgAgSRBPxfiGQAADUC/AOIo///NZ8AAmvAEQBUcwYAUSQOADV/DgBx6A0A"
        "VCsIQPkIB4DSYAyAkgIAgNIDAIDSgQAAkCFAA5EBAADU5wMAqkAL+LeBAACQIRAEkQkAgFIFAIDSDACA0gYAgNLt/4PS4AMHqugH"
        "gNICAILSAwCA0gEAANQfAADxbAMAVCgHgNLgAweqAQCA0gIAgNIDAIDSAQAA1AEAgNKDAACQhyCC0j8ABeuACQBUYAAAkeIDAaom"
        "AAeLBIBDOegDAKqkBwA0XwAF68AAAFQIaWY4AAQAkUIEAJEfAQRr4P7/VCEEAJHw//8XAgCA0iNoYjh/KABxoQAAVEn8/zUEAIBS"
        "BgCA0gsAABR/tABxgAhAeoAEAFR/gABxgAhBeiEBAFR/AQzrRACAUmIhRvrpJ58aQgQAkV8AAOuh/f9Uyv//F58EAHEsAQBUasAA"
        "UWhcAVF/5ABxSn1Akwh9QJMDgYqaZhAGqvP//xdJ/v80f7wAcYQYQ3rh/f9UvwAN6+gAAFSEAACQhAAAkYQABYulBACRhARAkYMQ"
        "BDlkAIBS5f//F+wDBqokAIBS1v//FwUAgNK6//8XYwAAkYEAAJBICIDSQACA0iGAApFiAIDSZVwA+QMAgNIBAADUgAAAkAIAgNK1"
        "AgSRgQAAkAMAQPkhIACR4AMUKmAAP9ZAAIBSoP6fiH8OAHEJAgBUiBWA0gAAgNIBAIDSAgCA0gMAgNIBAADUSBaA0uQDAKoAAIDS"
        "AQAA1GgQgNLhAwCqgn5Ak+ADBKoBAADU81NBqfUTQPn9e8OowANf1g=="
    ),
}

#: Where the code ends at most, and what it shares with this module begins; a multiple of every page size.
_SHARED_AT = 1 << 16

#: SA_SIGINFO: the handler is told the address.
_SIGINFO = 4

_libc = ctypes.CDLL(None)


class _Action(ctypes.Structure):
    """``struct sigaction`` of glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128), ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )  # fmt: skip


class _Shared(ctypes.Structure):
    """As in bus_error.c, and the texts."""

    _fields_ = (
        ("sigaction", ctypes.c_void_p), ("previous", _Action), ("said", ctypes.c_size_t * 6),
        ("maps", ctypes.c_char * 16), ("suffix", ctypes.c_char * 32), ("state", ctypes.c_int),
        ("piece", ctypes.c_char * 4096), ("path", ctypes.c_char * 8192), ("texts", ctypes.c_char * 1024),
    )  # fmt: skip


@functools.cache
def _laid_out() -> _Shared | None:
    """What the code shares with this module; the code lies before it. None where it cannot be run.

    Neither is ever freed: the signal may come when the interpreter has ended. A forked child inherits both.
    """
    code = base64.b64decode(_CODE.get(platform.machine(), ""))
    if not code:
        return None
    memory = mmap.mmap(-1, 2 * _SHARED_AT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    memory[: len(code)] = code
    shared = _Shared.from_buffer(memory, _SHARED_AT)
    start = ctypes.addressof(shared)
    shared.sigaction = ctypes.cast(_libc.sigaction, ctypes.c_void_p)
    shared.maps, shared.suffix, shared.texts = b"/proc/self/maps", SUFFIX.encode(), _BEFORE + _AFTER
    texts = start + _Shared.texts.offset
    shared.said[:] = (texts, len(_BEFORE), start + _Shared.path.offset, 0, texts + len(_BEFORE), len(_AFTER))
    begin = ctypes.c_void_p(start - _SHARED_AT)
    if _libc.mprotect(begin, ctypes.c_size_t(_SHARED_AT), mmap.PROT_READ | mmap.PROT_EXEC):
        return None  # SELinux or systemd may refuse
    return shared


def _install() -> None:
    """Installs the handler over whatever is there."""
    shared = _laid_out()
    if shared is None:
        return
    ours, now = ctypes.addressof(shared) - _SHARED_AT, _Action()
    _libc.sigaction(signal.SIGBUS, None, ctypes.byref(now))
    if now.handler != ours:
        shared.previous = now
    shared.state = 0
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_Action(ours, flags=_SIGINFO)), None)


#: To be called before records are mapped: once per process, since torch puts a handler of its own into its workers.
explain: PerProcess[None] = PerProcess(_install)
