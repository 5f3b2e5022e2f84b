"""Fresh processes for tests, at the price of a fork: what a user's next run would find, without 4 s of imports each.

An :class:`Interpreter` has imported torch and MONAI and done nothing else; its children are as good as new. It is not
multiprocessing's fork server, which is one for each process, so that whoever used it first would have chosen its
imports and its PYTHONHASHSEED. :func:`warm` gives the one that all tests of this process share.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing.process
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

__all__ = ["ROOT", "Interpreter", "Process", "Program", "printed_by", "settle", "warm"]

ROOT = Path(__file__).parent.parent

#: Imported before the first fork.
_PRELOAD = ("nibabel", "monai.data", "monai.transforms", "monai_gds.dataset.dataset", "monai_gds.storage.plain.posix")


class Died(AssertionError):
    """A process died, with this code; a signal's is negative."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process died: {code}")
        self.code = code


class Process:
    """One process, which runs functions one after another until it is closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._late = 0  # answers that nobody waits for any more

    def start(self, work: Callable[..., Any] | None, *args: Any) -> None:
        """Begins ``work(*args)`` there, which :meth:`result` waits for."""
        self._connection.send_bytes(pickle.dumps((work, args)))  # send() would share tensors, not send them

    def result(self, timeout: float = 120) -> Any:
        """Waits for the work that was started, and returns what it returned.

        Raises:
            AssertionError: it raised, which the message shows as that process saw it.
            Died: the process died.
            TimeoutError: it took longer than ``timeout`` seconds.
        """
        for late in range(self._late + 1):
            if not self._connection.poll(timeout):
                self._late += 1 - late
                raise TimeoutError(f"it took longer than {timeout} s")
            if late < self._late:
                self._connection.recv_bytes()
        self._late = 0
        ok, value = pickle.loads(self._connection.recv_bytes())
        if ok is None:
            raise Died(value)
        assert ok, value
        return value

    def call(self, work: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
        """What ``work(*args)`` returns there; see :meth:`result`."""
        self.start(work, *args)
        return self.result(timeout)

    def close(self) -> None:
        """Ends it."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Program:
    """A running Python program, whose output goes to files."""

    def __init__(
        self, process: Process, command: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None, whole: bool
    ) -> None:
        self._process = process
        self._command = list(command)
        self._output = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.pid: int = process.call(os.getpid)
        process.start(
            None,  # it ends with this program
            {
                "command": self._command,
                "cwd": str(cwd or ROOT),
                "env": dict(os.environ if env is None else env),
                "whole": whole,
                "output": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._output],
            },
        )

    def send_signal(self, number: int) -> None:
        """Sends it a signal; it must not have ended."""
        os.kill(self.pid, number)

    def result(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """What came of it.

        Raises:
            TimeoutError: it took longer than ``timeout`` seconds.
        """
        with self._process:
            try:
                self._process.result(timeout)
            except Died as end:
                code = end.code
        said = []
        for file in self._output:
            with file:
                file.seek(0)
                said.append(file.read())
        return subprocess.CompletedProcess(self._command, code, *said)


class Interpreter:
    """A Python that has only imported things, and forks processes on demand.

    Args:
        preload: modules to import beside torch, MONAI and monai_gds.
        hash_seed: its PYTHONHASHSEED.
    """

    def __init__(self, *preload: str, hash_seed: str = "0") -> None:
        self._socket, theirs = socket.socketpair()
        env = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
            "1"  # or an import that asks for CUDA devices spoils CUDA in the children
        )
        command = [sys.executable, "-W", "ignore", "-m", "tests.fresh", *preload]
        self._process = subprocess.Popen(command, stdin=theirs.fileno(), cwd=ROOT, env=env)
        theirs.close()

    def process(self) -> Process:
        """A process as good as new."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"+"], [theirs.fileno()])
        return Process(Connection(ours.detach()))

    def call(self, work: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
        """What ``work(*args)`` gives in a process of its own; see :meth:`Process.call`."""
        with self.process() as process:
            return process.call(work, *args, timeout=timeout)

    def program(
        self,
        *command: str | os.PathLike[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        whole: bool = False,
    ) -> Program:
        """Starts ``python *command``, which is ``-c`` and code, ``-m`` and a module, or a script; then arguments.

        It has imported MONAI, and the hash seed is this interpreter's. ``PYTHONWARNINGS`` may be ``"ignore"``.

        Args:
            command: the command.
            cwd: its working directory; None for this project.
            env: its environment; None for this process's.
            whole: let Python clear its modules away at the end, which takes as long as thirty forks.
        """
        return Program(self.process(), [os.fspath(part) for part in command], cwd, env, whole)

    def run(
        self,
        *command: str | os.PathLike[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        whole: bool = False,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """What came of ``python *command``; see :meth:`program`."""
        return self.program(*command, cwd=cwd, env=env, whole=whole).result(timeout)

    def close(self) -> None:
        """Ends it. Processes that are still open go on."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


#: By hash seed.
_warm: dict[str, Interpreter] = {}


def warm(hash_seed: str = "0") -> Interpreter:
    """The interpreter with this PYTHONHASHSEED that all tests of this process share. It ends with the process."""
    if hash_seed not in _warm:
        _warm[hash_seed] = Interpreter("tests.studies", hash_seed=hash_seed)
    return _warm[hash_seed]


def printed_by(code: str, *args: str, hash_seed: str = "0", whole: bool = False, timeout: float = 120) -> str:
    """What ``python -W ignore -c code *args`` prints; see :meth:`Interpreter.program`."""
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = warm(hash_seed).run("-c", code, *args, env=quiet, whole=whole, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def settle() -> None:
    """Prepares this process for many forks, once it has imported what it needs."""
    gc.collect()
    gc.freeze()  # or each child's first collection would copy the pages of all of this
    _collapse()


#: madvise's advice to make huge pages at once.
_MADV_COLLAPSE = 25
_HUGE = 2 << 20


def _collapse() -> None:
    """Puts memory into huge pages, where the kernel does that: a fork copies one entry for each, not 512."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, mode, _, _, _, *name = line.split()
        first, last = (int(address, 16) for address in extent.split("-"))
        first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
        if mode == "rw-p" and name in ([], ["[heap]"]) and first < last:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)


def _serve() -> None:
    """Forks a child for each connection that comes through stdin, until that is closed."""
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.disable()  # or it would go through all that was imported again and again
    for name in (*_PRELOAD, *sys.argv[1:]):
        importlib.import_module(name)
    settle()
    gc.enable()
    wakeup, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, Connection] = {}
    while True:
        ready = wait([requests, wakeup])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap(children)
        if requests in ready:
            _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
            if not descriptors:
                return
            connection = Connection(descriptors[0])
            if (child := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for inherited in (requests, *children.values()):
                    inherited.close()
                os.close(wakeup)
                os.close(woken)
                _answer(connection)
            children[child] = connection


def _reap(children: dict[int, Connection]) -> None:
    """Lets those who asked for children know how they ended."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        with children.pop(child) as connection, contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps((None, os.waitstatus_to_exitcode(status))))


def _answer(connection: Connection) -> None:
    """Runs what is asked until the asker is gone, and ends this process without its parent's exit handlers.

    A program is the last that is asked: it ends this process as it would end its own.
    """
    import torch

    torch.set_num_threads(1)
    program: dict[str, Any] | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while program is None:
            request = connection.recv_bytes()
            try:
                work, args = pickle.loads(request)
                if work is None:
                    (program,) = args
                    break
                answer = pickle.dumps((True, work(*args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
    if program is None:
        os._exit(0)
    if program.pop("whole"):
        _main(**program)
        sys.exit()
    os._exit(_ended(program))


def _ended(program: dict[str, Any]) -> int:
    """Runs a program, what it has registered for its exit too, but leaves all modules as they are. Returns its code."""
    code: object = None
    try:
        _main(**program)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return code if isinstance(code, int) else 0


def _main(command: list[str], cwd: str, env: dict[str, str], output: list[str]) -> None:
    """Does in this process what ``python *command`` does in its own."""
    for number, name in enumerate(output, 1):
        with open(name, "a") as file:
            os.dup2(file.fileno(), number)
    if env.get("PYTHONWARNINGS") != "ignore":
        warnings.filters.remove(("ignore", None, Warning, None, 0))  # type: ignore[attr-defined]  # of -W ignore
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    multiprocessing.process.ORIGINAL_DIR = cwd  # where workers look for the script
    tempfile.tempdir = None  # or TMPDIR would not count
    first, *arguments = command
    module = sys.modules["__main__"] = ModuleType("__main__")
    there = "" if first == "-c" else cwd if first == "-m" else os.path.dirname(os.path.abspath(first))
    sys.path[:] = [there, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    if first == "-m":
        sys.argv[:] = arguments
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(module))
    else:
        sys.argv[:] = command
        module.__file__ = os.path.abspath(first)
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(module))


if __name__ == "__main__":
    _serve()
