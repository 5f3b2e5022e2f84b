"""Process matters: per-process results after a fork, owners, and children that end with their parents."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monai_gds.base.process import Owner, PerProcess, undisturbed
from tests.machines import in_child, python
from tests.polls import until


class Stream:
    """Stands for what a forked child must not free."""

    freed: list[int] = []  # noqa: RUF012

    def __del__(self) -> None:
        self.freed.append(os.getpid())


@pytest.fixture(autouse=True)
def none_freed() -> None:
    gc.collect()
    Stream.freed.clear()


def test_one_result_for_all_threads_and_equal_arguments() -> None:
    made: list[tuple[str, int]] = []

    def make(name: str, number: int) -> object:
        time.sleep(0.01)
        made.append((name, number))
        return object()

    results = PerProcess(make)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: results("a", 1), range(8)))
    assert found == {results.made("a", 1)}
    assert results("a", 2) not in found
    assert made == [("a", 1), ("a", 2)]
    assert results.made("b", 1) is None


def test_what_cannot_be_made_is_tried_again() -> None:
    answers = iter([0, 5])
    results = PerProcess(lambda: 1 // next(answers))
    with pytest.raises(ZeroDivisionError):
        results()
    assert results() == 0


def test_a_forked_child_makes_its_own_and_frees_none_of_its_parents() -> None:
    results = PerProcess(Stream)
    ours = results()

    def child() -> tuple[bool, bool, list[int]]:
        nonlocal ours, results
        empty, other = results.made() is None, results() is not ours
        del ours
        gc.collect()
        freed = list(Stream.freed)
        del results  # its own result is freed as usual
        return empty and other, freed == [], Stream.freed

    fresh, parents_kept, freed = in_child(child)
    assert fresh
    assert parents_kept
    assert len(freed) == 1
    assert results() is ours


def test_a_child_that_drops_everything_unused_frees_nothing() -> None:
    held = [PerProcess(Stream)]
    held[0]()

    def child() -> list[int]:
        held.clear()
        gc.collect()
        return Stream.freed

    assert in_child(child) == []
    held.clear()
    assert Stream.freed == [os.getpid()]


def test_a_fork_while_another_thread_makes_one() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make() -> int:
        if not begun.is_set():
            begun.set()
            go_on.wait(30)
        return os.getpid()

    results = PerProcess(make)
    thread = threading.Thread(target=results)
    thread.start()
    assert begun.wait(30)

    def child() -> bool:
        signal.alarm(20)  # or it would wait for ever for a lock of a thread that it does not have
        return results() == os.getpid()

    assert in_child(child)
    go_on.set()
    thread.join()


def test_an_owner_is_the_process_that_made_it() -> None:
    owner = Owner()
    assert owner.is_this_process()
    assert not in_child(owner.is_this_process)
    assert in_child(lambda: Owner().is_this_process())


def test_a_killed_parent_takes_its_children_along() -> None:
    printed = python(
        """
import os, signal, time
from monai_gds.base.process import end_with_parent

middle = os.fork()
if middle == 0:
    child = os.fork()
    if child == 0:
        end_with_parent()
        time.sleep(60)
    print(child, flush=True)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(middle, 0)
os._exit(0)
"""
    )
    state = Path(f"/proc/{printed}/stat")
    until(
        lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "it outlived its parent"
    )


def test_a_ctrl_c_while_a_thread_starts_is_raised_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = threading.Event()
    begin = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        begin(thread)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupted)
            with undisturbed():
                threading.Thread(target=ran.set).start()
        assert ran.wait(20)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
