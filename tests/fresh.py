"""Fresh processes for tests, at the price of a fork: what a user's next run would find, without 4 s of imports each.

An :class:`Interpreter` has imported torch and MONAI and done nothing else; its children are as good as new. It is not
multiprocessing's fork server, which is one for each process, so that whoever used it first would have chosen its
imports and its PYTHONHASHSEED.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from tests.machines import ROOT

__all__ = ["Interpreter", "Process"]

#: Imported before the first fork.
_PRELOAD = ("nibabel", "monai.data", "monai.transforms", "monai_gds.dataset.dataset", "monai_gds.storage.plain.posix")


class Process:
    """One process, which runs functions one after another until it is closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        """Begins ``work(*args)`` there, which :meth:`result` waits for."""
        self._connection.send_bytes(pickle.dumps((work, args)))  # send() would share tensors, not send them

    def result(self, timeout: float = 120) -> Any:
        """Waits for the work that was started, and returns what it returned.

        Raises:
            AssertionError: it raised, which the message shows as that process saw it; or the process died.
            TimeoutError: it took longer than ``timeout`` seconds.
        """
        if not self._connection.poll(timeout):
            raise TimeoutError(f"it took longer than {timeout} s")
        try:
            ok, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise AssertionError("the process died") from None
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

    def close(self) -> None:
        """Ends it. Processes that are still open go on."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _serve() -> None:
    """Forks a child for each connection that comes through stdin, until that is closed."""
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in (*_PRELOAD, *sys.argv[1:]):
        importlib.import_module(name)
    gc.freeze()  # or each child's first collection would copy the pages of all of this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(Connection(descriptors[0]))
        os.close(descriptors[0])


def _answer(connection: Connection) -> None:
    """Runs what is asked until the asker is gone, and ends this process without its parent's exit handlers."""
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request = connection.recv_bytes()
            try:
                work, args = pickle.loads(request)
                answer = pickle.dumps((True, work(*args)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
    os._exit(0)


if __name__ == "__main__":
    _serve()
