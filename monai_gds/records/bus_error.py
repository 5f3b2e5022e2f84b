"""A message that names the record when a bus error ends the process. Used by :mod:`monai_gds.records.reader`.

A page of a mapped record that cannot be read ends the process with SIGBUS. No handler in Python can report it: the
thread that faulted may have the interpreter's lock, or need it from a thread that waits for it, and then the process
hangs instead. This holds for ``signal.signal``, its wake-up descriptor, and a ctypes callback. So the handler is a few
hundred bytes of machine code, which ``tools/bus_error.py`` compiles from ``bus_error.c``. It writes the message to the
standard error and puts back the previous handler, faulthandler's for instance. Then the fault occurs again, and the
previous handler gets it.

If the machine does not allow such code, there is no message.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import mmap
import platform
import signal

from monai_gds.base.process import PerProcess
from monai_gds.records.header import SUFFIX

__all__ = ["explain"]

_BEFORE = b"monai_gds: bus error, because a page of the mapped record "
_AFTER = (
    b" could not be read: the disk fails, or another program cut the file. `monai-gds cache verify` finds all records"
    b" that cannot be read. With GDSDataset(mmap=False), such a record is computed anew.\n"
)

# What `python tools/bus_error.py` prints: which bus_error.c this was compiled from, by which compiler, and the code.
_SOURCE = "55910e1d5de838a2"
_COMPILER = "Debian 12.2.0-14"
_CODE = {
    "x86_64": (
        "QVe6AQAAAEFWQVVBVFVTSIHsqAAAAItGCESNcP8xwPAPsRXZAAEAg/gBD4QcAgAATGP/QYnAhcAPhW0BAABBg/4DD4e2AQAATItm"
        "EEUx0kiNNXoAAQAx0rgBAQAASMfHnP///w8FRTHJSInHSIXAD4jxAAAAMe1FMe0x20iDxjS6ABAAAEUx0jHADwVIhcAPjsIAAABM"
        "jR1k/wAATAHYTYnaQQ++iwQBAACA+Qp1EIXtD4WgAAAARTHA6YUAAABFhcB1BYD5LXRyQYP4AXUegPkgdRlNOexBuAIAAAAPk8Ex"
        "7Uk53EAPksUhzetZQYP4AX8dSMHjBID5OX8Ig+kwSGPJ6weD6VdID77JSAnL6zaF7XQyQYP4A3QFgPkvdSdBuAMAAABJgfn/HwAA"
        "dxhDiIwKBBEAAEn/wesLSYndQbgBAAAAMdtJ/8NMOdgPhVD////pLv///zHSRTHSuAMAAABIidYPBUiNDZP+AAAxwEwByUw5yA+E"
        "gwAAAEiJz0iNFXv+AABIKcdAirLgAAAAQIT2dEhIOdd0DUj/wkA6tAIDEQAAdOJI/8Drx0iLDU7+AACD+AJ1R0iNVCQIMfZEif//"
        "0UiNBTb+//8x0kiNNTUvAQBIOUQkCHU26ytMiQ3V/gAARTHSuBQAAABIjTWu/gAAvwIAAAC6AwAAAA8FMdJIjTUB/gAARIn//xXw"
        "/QAAxwXm/gAAAgAAAEGD/gN2LDHSRTHSuLoAAABIiddIidYPBUmJwLgnAAAADwVIicdMica46gAAAEyJ+g8FSIHEqAAAAFtdQVxB"
        "XUFeQV/D"
    ),
    "aarch64": (
        "/XuzqSQAgFL9AwCR81MBqTQIQLn1WwKplQAAkKMCBJFi/F+IYgAANWT8BYil//81XwQAcUASAFTzAwAqlAYAUeQDAioCDQA1nw4A"
        "cSgTAFQrCED5CAeA0mAMgJICAIDSAwCA0oEAAJAhQAORAQAA1OcDAKpAC/i3gQAAkCEQBJEJAIBSBQCA0gwAgNIGAIDS7f+D0uAD"
        "B6roB4DSAgCC0gMAgNIBAADUHwAA8WwDAFQoB4DS4AMHqgEAgNICAIDSAwCA0gEAANQAAIDSgQAAkIcggtIfAAXrwA4AVCIAAJHj"
        "AwCqBgAHi0SAQznoAwKq5AwANH8ABevAAABUCGlmOEIEAJFjBACRHwEEa+D+/1QABACR8P//FwgAgNIjaGg4fygAcaEAAFRJ/P81"
        "BACAUgYAgNILAAAUf7QAcYAIQHqABABUf4AAcYAIQXohAQBUfwEM60QAgFJiIUb66SefGggFAJEfAQDrof3/VMr//xefBABxLAEA"
        "VGrAAFFiXAFRf+QAcUp9QJNCfECTQoCKmkYQBqrz//8XSf7/NH+8AHGEGEN64f3/VL8ADevoAABUhAAAkIQAAJGEAAWLpQQAkYQE"
        "QJGDEAQ5ZACAUuX//xfsAwaqJACAUtb//xcFAIDSuv//F5YAAJDDAkD5XwgAcQEGAFQBAIDS4uMAkWAAP9bhH0D5AAAAkAAAAJE/"
        "AADr4QAAVMMCQPmBAADwISAEkQIAgNLgAxMqYAA/1rUCBJFAAIBSoP6fiJ8OAHEJAgBUiBWA0gAAgNIBAIDSAgCA0gMAgNIBAADU"
        "SBaA0uQDAKoAAIDSAQAA1GgQgNLhAwCqYn5Ak+ADBKoBAADU81NBqfVbQqn9e82owANf1iEAAJFICIDSQACA0mIAgNIDAIDSJVwA"
        "+YEAAJAhgAKRAQAA1IAAAJCBAACQAgCA0iEgAJEDAED52P//Fw=="
    ),
}

#: The offset of what the code shares with this module, and so the most bytes of code; a multiple of every page size.
_SHARED_AT = 1 << 16

#: SA_SIGINFO: the handler gets the address.
_SIGINFO = 4

_libc = ctypes.CDLL(None)


class _Action(ctypes.Structure):
    """``struct sigaction`` of glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128), ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )  # fmt: skip


class _Shared(ctypes.Structure):
    """The structure of this name in bus_error.c, followed by the texts."""

    _fields_ = (
        ("sigaction", ctypes.c_void_p), ("previous", _Action), ("said", ctypes.c_size_t * 6),
        ("maps", ctypes.c_char * 16), ("suffix", ctypes.c_char * 32), ("state", ctypes.c_int),
        ("piece", ctypes.c_char * 4096), ("path", ctypes.c_char * 8192), ("none", _Action),
        ("texts", ctypes.c_char * 1024),
    )  # fmt: skip


@functools.cache
def _laid_out() -> _Shared | None:
    """What the code shares with this module; the code lies before it. None where it cannot be run.

    Neither is ever freed: the signal may come when the interpreter has ended. A forked child inherits both.
    """
    code = base64.b64decode(_CODE.get(platform.machine(), ""))
    if not code:
        return None
    try:
        memory = mmap.mmap(-1, 2 * _SHARED_AT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None  # no memory, or too many mappings: records are read all the same
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
