"""Saving in the background: bounded, in order, nothing is lost, and items may change once they are submitted."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from monai_gds import limits
from monai_gds.base import process
from monai_gds.folder import writer as module
from monai_gds.folder.writer import Writer, process_writer
from monai_gds.items.tree import EncodedItem
from monai_gds.keys.key import Key, Pipeline
from tests import interrupts
from tests.machines import ROOT, in_child
from tests.polls import until


def key(name: str) -> Key:
    return Key(name, "", Pipeline())


def item(value: float, nbytes: int = 4000) -> EncodedItem:
    return EncodedItem(tree={"$tensor": "t"}, tensors={"t": torch.full((nbytes // 4,), value)})


class Disk:
    """Takes what is published; ``open`` lets it go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.got: list[tuple[str, float, int]] = []

    def publish(self, key: Key, item: EncodedItem) -> bool:
        assert self.open.wait(20)
        (value,) = item.tensors["t"].unique().tolist()
        self.got.append((key.digest, value, threading.get_ident()))
        return True


def test_what_is_written_is_the_item_as_it_was_submitted() -> None:
    disk, writer = Disk(), Writer()
    disk.open.clear()
    encoded = item(1.0)
    writer.submit("a", disk.publish, key("a"), encoded)
    encoded.tensors["t"].fill_(-1)
    encoded.tensors.clear()
    disk.open.set()
    writer.flush()
    assert [(name, value) for name, value, _ in disk.got] == [("a", 1.0)]
    assert disk.got[0][2] != threading.get_ident()


def test_items_are_written_in_order_and_nothing_runs_afterwards() -> None:
    disk, writer = Disk(), Writer()
    for burst in range(3):
        for n in range(20):
            writer.submit(f"{burst}.{n}", disk.publish, key(f"{burst}.{n}"), item(n))
        writer.flush()
        time.sleep(0.01)
        assert not [t for t in threading.enumerate() if t.name == "monai-gds-writer"]
    assert [name for name, _, _ in disk.got] == [f"{burst}.{n}" for burst in range(3) for n in range(20)]


def test_no_more_than_the_limit_waits_but_one_item_of_any_size_does() -> None:
    disk, writer = Disk(), Writer(limit=10_000)
    disk.open.clear()
    writer.submit("huge", disk.publish, key("huge"), item(0, 40_000))
    submitted: list[str] = []

    def train() -> None:
        for name in "abcdef":
            writer.submit(name, disk.publish, key(name), item(0, 4000))
            submitted.append(name)

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.1)
    assert submitted == []
    disk.open.set()
    thread.join(20)
    writer.flush()
    assert [name for name, _, _ in disk.got] == ["huge", *"abcdef"]


def test_waiting_for_one_path() -> None:
    disk, writer = Disk(), Writer()
    writer.wait_for("never submitted")
    disk.open.clear()
    writer.submit("a", disk.publish, key("a"), item(1))
    threading.Timer(0.1, disk.open.set).start()
    writer.wait_for("a")
    assert disk.got


def test_an_error_that_is_not_the_disks_is_raised_later_and_does_not_stop_the_others() -> None:
    disk, writer = Disk(), Writer()

    def broken(key: Key, item: EncodedItem) -> bool:
        raise ZeroDivisionError("a defect")

    writer.submit("a", broken, key("a"), item(1))
    writer.wait_for("a")
    with pytest.raises(ZeroDivisionError, match="a defect"):
        writer.submit("b", disk.publish, key("b"), item(2))
    writer.submit("c", disk.publish, key("c"), item(3))
    writer.flush()
    assert [name for name, _, _ in disk.got] == ["c"]


def test_a_forked_child_does_not_write_or_wait_for_the_parents_items() -> None:
    disk = Disk()
    disk.open.clear()
    process_writer().submit("a", disk.publish, key("a"), item(1))

    def child() -> list[str]:
        process_writer().wait_for("a")
        process_writer().flush()
        process_writer().submit("b", disk.publish, key("b"), item(2))
        disk.open.set()
        process_writer().flush()
        return [name for name, _, _ in disk.got]

    try:
        assert in_child(child) == ["b"]
    finally:
        disk.open.set()
        process_writer().flush()
    assert [name for name, _, _ in disk.got] == ["a"]


@pytest.mark.parametrize("started", [False, True])
def test_an_interrupt_while_the_thread_starts_loses_nothing(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    disk, writer, start = Disk(), Writer(), threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupt)
        writer.submit("a", disk.publish, key("a"), item(1))
    flushed = threading.Thread(target=writer.flush, daemon=True)
    flushed.start()
    flushed.join(20)
    assert not flushed.is_alive()
    writer.submit("b", disk.publish, key("b"), item(2))
    writer.wait_for("b")
    assert [name for name, _, _ in disk.got] == ["a", "b"]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user may have no more of them; the tests' own are there."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "monai-gds-writer":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_no_more_threads_means_that_the_caller_writes() -> None:
    disk, writer = Disk(), Writer()
    writer.submit("a", disk.publish, key("a"), item(1))
    assert disk.got == [("a", 1.0, threading.get_ident())]


def test_not_even_a_bare_thread_means_that_the_caller_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(process, "start_new_thread", refuse)
    disk, writer = Disk(), Writer()
    writer.submit("a", disk.publish, key("a"), item(1))
    assert disk.got == [("a", 1.0, threading.get_ident())]


def test_a_queued_item_is_not_queued_twice() -> None:
    disk, writer = Disk(), Writer()
    done: list[str] = []
    disk.open.clear()
    for name in ("first", "second"):
        writer.submit("a", disk.publish, key("a"), item(1), lambda name=name: done.append(name))  # type: ignore[misc]
    assert done == ["second"]
    disk.open.set()
    writer.flush()
    assert done == ["second", "first"]
    assert [name for name, _, _ in disk.got] == ["a"]
    writer.submit("a", disk.publish, key("a"), item(2))
    writer.flush()
    assert [value for _, value, _ in disk.got] == [1, 2]


def test_done_is_called_once_whatever_happens() -> None:
    disk, writer = Disk(), Writer()
    calls: list[str] = []

    def broken(key: Key, item: EncodedItem) -> bool:
        calls.append("published")
        raise ZeroDivisionError("a defect")

    def done() -> None:
        calls.append("done")

    writer.submit("a", broken, key("a"), item(1), done)
    writer.wait_for("a")
    assert calls == ["published", "done"]
    with pytest.raises(ZeroDivisionError):  # of the item before
        writer.submit("b", disk.publish, key("b"), item(1), done)
    assert calls == ["published", "done", "done"]
    no_tensor: Any = EncodedItem(tree={}, tensors={"t": 1})  # type: ignore[dict-item]
    with pytest.raises(AttributeError):
        writer.submit("c", disk.publish, key("c"), no_tensor, done)
    assert calls == ["published", "done", "done", "done"]
    writer.submit("d", disk.publish, key("d"), item(1), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        writer.flush()
    writer.flush()


def test_the_number_of_waiting_items_is_limited_however_small_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUE_ITEMS", 3)
    disk, writer = Disk(), Writer()
    disk.open.clear()
    submitted: list[int] = []

    def train() -> None:
        for n in range(10):
            writer.submit(str(n), disk.publish, key(str(n)), item(n))
            submitted.append(n)

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.1)
    assert len(submitted) == 3
    disk.open.set()
    thread.join(20)
    writer.flush()
    assert len(disk.got) == 10


def test_many_threads_submit_and_wait() -> None:
    disk, writer = Disk(), Writer(limit=20_000)

    def work(n: int) -> None:
        for m in range(50):
            name = f"{n}.{m}"
            writer.submit(name, disk.publish, key(name), item(m))
            if m % 7 == 0:
                writer.wait_for(name)
                assert any(got == name for got, _, _ in list(disk.got))
            if m % 11 == 0:
                writer.flush()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    in_time(writer.flush)
    assert len(disk.got) == len({name for name, _, _ in disk.got}) == 400


# ---------------------------------------------------------------------------------------------------------------------
# Interrupts


def in_time(work: Callable[[], object]) -> None:
    """Does it in another thread; a failure if that hangs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"


#: Where Ctrl-C strikes: where CPython looks for it, and in ``make test-long`` before any operation.
events = pytest.mark.parametrize("event", ["check", pytest.param("opcode", marks=pytest.mark.long)])


def interrupted(n: int, work: Callable[[], object], event: Literal["check", "opcode"]) -> bool:
    """Does it with Ctrl-C at the n-th event in the writer. What the tests' disk calls does not count."""
    return interrupts.interrupted(n, work, [module.__file__, process.__file__], event)


class Session:
    """A writer, its disk, and what of the items given to it has come of them."""

    def __init__(self) -> None:
        self.disk, self.writer = Disk(), Writer(limit=10_000)
        self.accepted: list[str] = []
        self.done: list[str] = []

    def submit(self, name: str, nbytes: int = 4000) -> None:
        self.writer.submit(name, self.disk.publish, key(name), item(1, nbytes), lambda: self.done.append(name))
        self.accepted.append(name)

    def open_soon(self) -> None:
        threading.Timer(0.001, self.disk.open.set).start()


def submit(session: Session) -> None:
    session.submit("a")


def submit_to_a_full_queue(session: Session) -> None:
    session.submit("b", 8000)


def flush(session: Session) -> None:
    session.writer.flush()


def wait_for(session: Session) -> None:
    session.writer.wait_for("first")


CALLS = [submit, submit_to_a_full_queue, flush, wait_for]


def sessions() -> Iterator[tuple[int, Session]]:
    return ((n, Session()) for n in itertools.count(1))


def check(session: Session) -> None:
    """Nothing hangs, what was accepted is there and whole, and the queue has room."""
    session.disk.open.set()
    in_time(session.writer.flush)
    got = [name for name, _, _ in session.disk.got]
    assert set(session.accepted) <= set(got)
    assert set(session.accepted) <= set(session.done)
    in_time(lambda: session.submit("large", 40_000))
    in_time(session.writer.flush)
    assert session.disk.got[-1][:2] == ("large", 1.0)
    in_time(lambda: session.writer.wait_for("large"))
    until(lambda: not any(thread.name == "monai-gds-writer" for thread in threading.enumerate()), "the thread ends")


@events
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_anywhere_neither_hangs_nor_loses_an_item(
    call: Callable[[Session], None], event: Literal["check", "opcode"]
) -> None:
    """The disk is busy with another item, so that everybody waits, unless this thread comes late on a busy machine."""
    struck = 0
    for n, session in sessions():
        session.disk.open.clear()
        session.submit("first")
        session.open_soon()
        one_more = interrupted(n, lambda session=session: call(session), event)  # type: ignore[misc]
        check(session)
        struck += one_more
        if not one_more and n > 20:
            break
    assert struck > (15 if event == "opcode" else 5)


@events
def test_an_interrupt_anywhere_in_the_first_submit(event: Literal["check", "opcode"]) -> None:
    for n, session in sessions():
        struck = interrupted(n, lambda session=session: submit(session), event)  # type: ignore[misc]
        check(session)
        if not struck:
            break
    assert n > 20
    assert session.accepted[0] == "a"


@events
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("no_threads")
def test_an_interrupt_anywhere_where_the_caller_writes(
    call: Callable[[Session], None], event: Literal["check", "opcode"]
) -> None:
    """What waits was left by an earlier interrupt."""
    for n, session in sessions():
        leave(session, "first")
        struck = interrupted(n, lambda session=session: call(session), event)  # type: ignore[misc]
        session.accepted.append("first")
        check(session)
        if not struck:
            break
    assert n > 20


def leave(session: Session, name: str) -> None:
    """An item in the queue, and nobody who writes it: Ctrl-C came between the two."""

    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupt)
        session.submit(name)
    assert session.disk.got == []


@pytest.mark.usefixtures("no_threads")
def test_ctrl_c_while_the_caller_writes_comes_through_and_the_item_is_written_later() -> None:
    disk, writer = Disk(), Writer()
    interrupts = [KeyboardInterrupt(), SystemExit()]

    def publish(key: Key, item: EncodedItem) -> bool:
        if interrupts:
            raise interrupts.pop()
        return disk.publish(key, item)

    with pytest.raises(SystemExit):
        writer.submit("a", publish, key("a"), item(1))
    with pytest.raises(KeyboardInterrupt):
        writer.submit("b", disk.publish, key("b"), item(2))
    in_time(lambda: writer.wait_for("a"))
    in_time(writer.flush)
    assert [name for name, _, _ in disk.got] == ["a", "b"]


def test_what_ends_other_threads_does_not_end_the_writers() -> None:
    disk, writer = Disk(), Writer()

    def publish(key: Key, item: EncodedItem) -> bool:
        raise SystemExit

    writer.submit("a", publish, key("a"), item(1))
    in_time(lambda: writer.wait_for("a"))
    with pytest.raises(SystemExit):
        writer.flush()
    writer.submit("b", disk.publish, key("b"), item(2))
    writer.flush()
    assert [name for name, _, _ in disk.got] == ["b"]


#: Forks processes, each of which saves items for a second, and sends them SIGINT all the while.
#: Each logs what was accepted and written; those that do not end are printed.
STORM = r"""
import os, random, signal, sys, time
import torch
from monai_gds.keys.key import Key, Pipeline
from monai_gds.items.tree import EncodedItem
from monai_gds.folder.writer import process_writer

armed, struck = False, 0

def strike(*_):
    global armed, struck
    if armed:
        armed, struck = False, struck + 1
        raise KeyboardInterrupt

def publish(key, item):
    assert bool((item.tensors["t"] == int(key.digest)).all())
    os.write(log, f"wrote {key.digest}\n".encode())
    return True

def save(n):
    global armed
    item = EncodedItem(tree={}, tensors={"t": torch.full((1000 * random.randint(1, 9),), n)})
    try:
        armed = True
        process_writer().submit(str(n), publish, Key(str(n), "", Pipeline()), item)
        os.write(log, f"accepted {n}\n".encode())
        if n % 3 == 0:
            process_writer().wait_for(str(n))
        if n % 5 == 0:
            process_writer().flush()
        armed = False
    except KeyboardInterrupt:
        pass

signal.signal(signal.SIGINT, strike)
pids = []
for number in range(int(sys.argv[1])):
    pids.append(os.fork())
    if pids[-1] == 0:
        pids = []
        log = os.open(f"{sys.argv[2]}/{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        process_writer()._limit = 20_000
        n, until = 0, time.monotonic() + 0.7
        while time.monotonic() < until:
            save(n := n + 1)
        os.write(log, f"struck {struck}\n".encode())
        break  # to the end of the interpreter, which waits for what is queued
deadline = time.monotonic() + 60
while pids:
    time.sleep(random.uniform(0.0002, 0.002))
    pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    if pids and time.monotonic() > deadline:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        print(f"{len(pids)} hung", flush=True)
        break
"""


@pytest.mark.long
def test_a_storm_of_ctrl_c_ends_and_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STORM, "4", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "")
    logs = [log.read_text().split("\n") for log in tmp_path.iterdir()]
    assert len(logs) == 4
    for lines in logs:
        accepted, wrote = ({line.split()[1] for line in lines if line.startswith(how)} for how in ("accepted", "wrote"))
        assert accepted <= wrote
        assert any(line.startswith("struck") and line != "struck 0" for line in lines)
