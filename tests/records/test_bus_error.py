"""A bus error in a mapped record: the process ends as before, and a message names the record.

Each case runs in a process of its own that is forked from a clean one, and ends by the signal.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import fcntl
import functools
import hashlib
import mmap
import os
import platform
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from monai_gds.records import bus_error
from monai_gds.records.header import SUFFIX
from tests.fresh import Interpreter
from tests.tools import load_tool

compiling = load_tool("bus_error")

pytestmark = pytest.mark.skipif(
    platform.machine() not in bus_error._CODE, reason=f"there is no handler for {platform.machine()}"
)

NBYTES = 8 << 20

Case = Callable[[torch.Tensor], object]


def cut(path: Path) -> torch.Tensor:
    """A mapped tensor whose second half cannot be read."""
    path.write_bytes(bytes(NBYTES))
    tensor = torch.from_file(str(path), shared=False, size=NBYTES // 4, dtype=torch.float32)
    os.truncate(path, NBYTES // 2)
    return tensor


# How the page is touched.


def by_torch(tensor: torch.Tensor) -> object:
    """In threads of OpenMP, none of which has the interpreter's lock."""
    torch.set_num_threads(2)
    return tensor.sum()


def by_numpy(tensor: torch.Tensor) -> object:
    """With the lock held."""
    return np.array(tensor.numpy())[0].tobytes()


def by_another_thread(tensor: torch.Tensor) -> object:
    """In a thread without the lock, for which a thread with the lock waits: compiled code with OpenMP does that."""
    plain, locked = ctypes.CDLL(None), ctypes.PyDLL(None)
    thread = ctypes.c_ulong()
    start = ctypes.c_void_p(tensor.data_ptr() + NBYTES // 2 + 5000)
    plain.pthread_create(ctypes.byref(thread), None, ctypes.cast(plain.strlen, ctypes.c_void_p), start)
    return locked.pthread_join(thread, None)


def by_a_forked_child(tensor: torch.Tensor) -> None:
    """Its parent installed the handler."""
    _in_forked_child(tensor.sum)


def _in_forked_child(work: Callable[[], object]) -> None:
    """Ends this process as the child ended."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(os.waitpid(child, 0)[1]))
    time.sleep(30)


def by_a_forked_child_that_installs_it_again(tensor: torch.Tensor) -> None:
    """Whose handler of before puts this one back: it was installed over the parent's."""

    def install_and_sum() -> None:
        bus_error.explain()
        tensor.sum()

    _in_forked_child(install_and_sum)


def by_many_threads(tensor: torch.Tensor) -> None:
    """At once, none of them with the lock."""
    libc, threads = ctypes.CDLL(None), (ctypes.c_ulong * 24)()
    start = ctypes.c_void_p(tensor.data_ptr() + NBYTES // 2 + 5000)
    for i in range(len(threads)):
        thread = ctypes.byref(threads, i * ctypes.sizeof(ctypes.c_ulong))
        libc.pthread_create(thread, None, ctypes.cast(libc.strlen, ctypes.c_void_p), start)
    for each in threads:
        libc.pthread_join(ctypes.c_ulong(each), None)


def by_torchs_worker(tensor: torch.Tensor) -> object:
    """In which torch has installed a handler of its own, over that of the parent."""
    torch._C._set_worker_signal_handlers()  # which calls no handler of before
    bus_error.explain.forget()  # as in a forked child, which this is
    bus_error.explain()
    return tensor.sum()


def by_nobody(tensor: torch.Tensor) -> None:
    """Somebody sends the signal."""
    os.kill(os.getpid(), signal.SIGBUS)
    time.sleep(30)


# What is installed, in this order.


def ours() -> None:
    bus_error.explain()


def theirs() -> None:
    faulthandler.enable(all_threads=False)


def _ends(path: Path, install: Sequence[Callable[[], None]], case: Case, limit: float) -> tuple[int, str]:
    """The signal by which the process of a case ended, and what it wrote."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for many messages of faulthandler, but not for all
    child = os.fork()
    if not child:
        os.dup2(writing, 2)
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        tensor = cut(path)
        for each in install:
            each()
        case(tensor)
        os._exit(0)
    os.close(writing)
    end = time.monotonic() + limit
    while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    if not found[0]:
        os.kill(child, signal.SIGKILL)
        return -1, "it hangs"
    with os.fdopen(reading, errors="replace") as file:
        return os.WTERMSIG(found[1]), file.read()


@pytest.mark.parametrize(
    "case", [by_torch, by_numpy, by_another_thread, by_a_forked_child, by_torchs_worker], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("install", [(ours,), (theirs, ours)], ids=lambda some: "-".join(f.__name__ for f in some))
def test_the_message_names_the_record_and_the_process_ends_as_before(
    tmp_path: Path, interpreter: Interpreter, install: Sequence[Callable[[], None]], case: Case
) -> None:
    path = tmp_path / f"été {'0' * 32}{SUFFIX}"
    number, told = interpreter.call(_ends, path, install, case, 20.0)
    assert number == signal.SIGBUS, told
    assert told.count(f"mapped record {path} could not be read") == 1
    assert "mmap=False" in told
    assert "cache verify" in told
    assert ("Fatal Python error: Bus error" in told) is (theirs in install and case is not by_torchs_worker)
    assert ("insufficient shared memory" in told) is (case is by_torchs_worker)


@pytest.mark.parametrize(
    ("name", "install", "case"),
    [(f"x{SUFFIX}", (ours, theirs), by_torch), (f"x{SUFFIX}", (ours,), by_nobody), ("volume.nii", (ours,), by_torch),
     (f"x{SUFFIX}", (theirs, ours), by_nobody), (f"x{SUFFIX}", (ours, theirs), by_nobody)],
)  # fmt: skip
def test_a_process_ends_by_the_signal_also_where_there_is_nothing_to_tell(
    tmp_path: Path, interpreter: Interpreter, name: str, install: Sequence[Callable[[], None]], case: Case
) -> None:
    number, told = interpreter.call(_ends, tmp_path / name, install, case, 20.0)
    assert number == signal.SIGBUS, told
    assert "monai_gds" not in told or theirs in install  # faulthandler lists modules
    assert "mapped record" not in told


def test_a_record_that_was_replaced_is_named_too(tmp_path: Path, interpreter: Interpreter) -> None:
    path = tmp_path / f"x{SUFFIX}"
    number, told = interpreter.call(_ends, path, (ours, path.unlink), by_torch, 20.0)
    assert number == signal.SIGBUS
    assert f"{path} (deleted) could not be read" in told


def test_a_handler_of_before_that_puts_this_one_back_ends_the_process(tmp_path: Path, interpreter: Interpreter) -> None:
    path = tmp_path / f"x{SUFFIX}"
    number, told = interpreter.call(_ends, path, (ours, theirs), by_a_forked_child_that_installs_it_again, 20.0)
    assert number == signal.SIGBUS, told
    assert told.count("could not be read") == 1
    assert told.count("Fatal Python error") == 1


def test_many_threads_end_the_process_once(tmp_path: Path, interpreter: Interpreter) -> None:
    for i in range(30):
        path = tmp_path / f"{i}{SUFFIX}"
        number, told = interpreter.call(_ends, path, (theirs, ours), by_many_threads, 20.0)
        assert number == signal.SIGBUS, (i, told)
        assert told.count("could not be read") == 1, (i, told)


def test_a_thread_that_comes_late_leaves_what_another_installed(interpreter: Interpreter) -> None:
    """Two threads faulted; the handler of before is done with the first when the second gets here."""
    assert interpreter.call(_late_thread) == signal.SIG_DFL


def _late_thread() -> object:
    theirs()
    ours()
    shared = bus_error._laid_out()
    assert shared is not None
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    shared.state = 2
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(ctypes.addressof(shared) - bus_error._SHARED_AT)
    handler(signal.SIGBUS, (ctypes.c_int * 32)(signal.SIGBUS, 0, 2))  # BUS_ADRERR
    now = bus_error._Action()
    bus_error._libc.sigaction(signal.SIGBUS, None, ctypes.byref(now))
    return now.handler or signal.SIG_DFL


def test_where_memory_is_short_there_is_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = signal.getsignal(signal.SIGBUS)
    monkeypatch.setattr(bus_error, "_laid_out", bus_error._laid_out.__wrapped__)
    monkeypatch.setattr(mmap, "mmap", full)
    bus_error._install()
    assert signal.getsignal(signal.SIGBUS) == before


def test_the_code_is_that_of_its_source() -> None:
    source = compiling.SOURCE.read_bytes()
    assert hashlib.sha256(source).hexdigest()[:16] == bus_error._SOURCE, "copy what tools/bus_error.py prints"


@pytest.mark.parametrize("machine", sorted(bus_error._CODE))
def test_the_source_compiles_to_the_code(tmp_path: Path, interpreter: Interpreter, machine: str) -> None:
    found = compiling.compiler(machine)
    if found is None:
        pytest.skip(f"this machine has no GCC and binutils for {machine}")
    code = compiling.make(machine).decode()
    if found == bus_error._COMPILER:
        assert code == bus_error._CODE[machine]
    if machine == platform.machine():
        path, install = tmp_path / f"x{SUFFIX}", (functools.partial(_use, code), theirs, ours)
        number, told = interpreter.call(_ends, path, install, by_torch, 20.0)
        assert number == signal.SIGBUS, told
        assert told.count(f"mapped record {path} could not be read") == 1


def _use(code: str) -> None:
    bus_error._CODE = {platform.machine(): code}
