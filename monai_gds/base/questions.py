"""Questions that child processes ask the process that started them, which answers in a thread.

Used by the loader: workers that have no GPU ask for the few numbers that a transform reads and a GPU computes.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import current_process
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import Any
from uuid import uuid4


class Answers:
    """Answers questions, one after the other, until it is closed or nobody has it any more.

    Args:
        answer: returns the answer to a question. It must not keep this object alive. If it raises, so does
            :func:`ask`, with the error's text.

    Attributes:
        address: what :func:`ask` takes: an abstract socket, which needs no file, and so no short path to one. Only
            processes that ``multiprocessing`` started know the password.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.address = f"\0monai-gds-{uuid4().hex}"
        door = socket.socket(socket.AF_UNIX)
        door.bind(self.address)
        door.listen(128)
        read, write = os.pipe()
        thread = threading.Thread(target=_serve, args=(door, read, answer), name="monai-gds-answers", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _wake, write, os.getpid())


def _wake(closed: int, process: int) -> None:
    """Ends the thread. Forked children have its pipe too, so closing that would not be enough."""
    if os.getpid() == process:
        os.write(closed, b"x")
    os.close(closed)


def _serve(door: socket.socket, closed: int, answer: Callable[[Any], Any]) -> None:
    asking: list[Connection] = []
    try:
        while True:
            ready: list[Any] = wait([closed, door, *asking])
            if closed in ready:
                return
            for one in ready:
                try:
                    if one is door:
                        asking.append(_let_in(door))
                    else:
                        one.send(_answered(answer, one.recv()))
                except Exception:  # it has ended, or is a stranger
                    if one in asking:
                        asking.remove(one)
                        one.close()
    finally:
        _hang_up(door, asking)
        door.close()
        os.close(closed)


def _let_in(door: socket.socket) -> Connection:
    """Takes the next connection. Another user's is refused unheard: its silence would keep all others waiting."""
    visitor = door.accept()[0]
    _, user, _ = struct.unpack("iII", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    connection = Connection(visitor.detach())  # closed where nobody keeps it
    if user != os.geteuid():
        raise PermissionError(f"user {user} is another one")
    deliver_challenge(connection, _password())
    answer_challenge(connection, _password())
    return connection


def _hang_up(door: socket.socket, asking: list[Connection]) -> None:
    """Ends all connections, also where a forked process has inherited them: closing them would leave askers waiting."""
    door.setblocking(False)
    with suppress(OSError):
        door.shutdown(socket.SHUT_RDWR)  # nobody comes any more
        while True:  # those who have come, and were not let in yet
            _end(door.accept()[0])
    for connection in asking:
        _end(socket.socket(fileno=os.dup(connection.fileno())))
        connection.close()


def _end(connection: socket.socket) -> None:
    with connection, suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _answered(answer: Callable[[Any], Any], question: Any) -> tuple[bool, Any]:
    try:
        return True, answer(question)
    except Exception as e:
        return False, f"{type(e).__name__}: {e}"


def _password() -> bytes:
    return bytes(current_process().authkey)


_connection: tuple[int, str, Connection] | None = None


def ask(address: str, question: Any) -> Any:
    """Asks a question, and waits for the answer.

    Args:
        address: :attr:`Answers.address` of a process that started this one.
        question: what pickle can send.

    Raises:
        RuntimeError: answering it raised an error.
        OSError: the process that would answer has ended, or does not answer any more.
        EOFError: it ended meanwhile.
    """
    global _connection
    here = os.getpid()
    if _connection is None or _connection[:2] != (here, address):
        _connection = here, address, Client(address, authkey=_password())
    connection = _connection[2]
    connection.send(question)
    done, found = connection.recv()
    if not done:
        raise RuntimeError(found)
    return found
