"""Questions between processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from monai_gds.base.questions import Answers, ask
from tests.fresh import warm


def _half(question: int) -> tuple[int, int]:
    if question % 2:
        raise ValueError(f"{question} is odd")
    return question // 2, os.getpid()


def _asked(address: str, numbers: list[int], found: Any) -> None:
    for number in numbers:
        try:
            found.put(ask(address, number))
        except Exception as e:
            found.put((type(e).__name__, str(e)))


def _by(kind: str, address: str, numbers: list[int]) -> list[Any]:
    context = multiprocessing.get_context(kind)
    found = context.Queue()
    child = context.Process(target=_asked, args=(address, numbers, found))
    child.start()
    got = [found.get(timeout=60) for _ in numbers]
    child.join()
    return got


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_a_child_gets_the_answer_of_this_process(kind: str) -> None:
    answers = Answers(_half)
    assert _by(kind, answers.address, [4, 10]) == [(2, os.getpid()), (5, os.getpid())]
    answers.close()


def test_an_error_is_raised_where_it_was_asked_and_the_next_question_is_answered() -> None:
    answers = Answers(_half)
    assert _by("fork", answers.address, [3, 8]) == [("RuntimeError", "ValueError: 3 is odd"), (4, os.getpid())]
    answers.close()


class Slow:
    """Answers a question with itself; 0 once it may go on."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def __call__(self, question: int) -> int:
        if question == 0:
            self.asked.set()
            self.go_on.wait(30)
        return question


def test_a_child_that_is_killed_while_it_asks_disturbs_nobody() -> None:
    slow = Slow()
    answers = Answers(slow)
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=_asked, args=(answers.address, [0], context.Queue()))
    killed.start()
    assert slow.asked.wait(30)
    killed.kill()
    killed.join()
    slow.go_on.set()
    assert _by("fork", answers.address, [6]) == [6]
    answers.close()


def test_nobody_waits_for_answers_that_were_closed() -> None:
    answers = Answers(_half)
    answers.close()
    for thread in threading.enumerate():
        if thread.name == "monai-gds-answers":
            thread.join(30)
    ((name, _),) = _by("fork", answers.address, [4])
    assert name == "ConnectionRefusedError"


def test_the_folder_of_temporary_files_may_have_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    code = (
        "import os\n"
        "from tests.base.test_questions import Answers, _by, _half\n"
        "if __name__ == '__main__':\n"
        "    answers = Answers(_half)\n"
        "    assert _by('fork', answers.address, [4]) == [(2, os.getpid())]\n"
    )
    (tmp_path / "asks.py").write_text(code)
    done = warm().run(tmp_path / "asks.py", env={**os.environ, "TMPDIR": str(folder)}, whole=True)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_silence_keeps_nobody_waiting() -> None:
    answers, context = Answers(_half), multiprocessing.get_context("fork")
    came, stop, found = context.Event(), context.Event(), context.Queue()

    def stranger() -> None:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(answers.address)
            came.set()
            stop.wait()

    silent = context.Process(target=stranger)
    asking = context.Process(target=_asked, args=(answers.address, [4], found))
    silent.start()
    try:
        assert came.wait(30)
        asking.start()
        assert found.get(timeout=20) == (2, os.getpid())
    finally:
        for child in (silent, asking):
            if child.pid is not None:
                child.kill()
                child.join()
        answers.close()


def test_whoever_asks_while_it_is_closed_is_told_though_a_sibling_has_the_connection_too() -> None:
    slow = Slow()
    answers: Any = Answers(slow)
    context = multiprocessing.get_context("fork")
    found, stop = context.Queue(), context.Event()
    first = context.Process(target=_asked, args=(answers.address, [0, 1], found))
    first.start()
    assert slow.asked.wait(30)
    late = context.Process(target=_asked, args=(answers.address, [2], found))  # it is not let in yet
    sibling = context.Process(target=stop.wait)
    late.start()
    sibling.start()
    del answers
    slow.go_on.set()
    try:
        assert 0 in [found.get(timeout=30) for _ in range(3)]
    finally:
        stop.set()
        for child in (first, late, sibling):
            child.kill()
            child.join()


def test_the_thread_ends_with_the_object() -> None:
    before = threading.active_count()
    answers: Any = Answers(_half)
    assert threading.active_count() == before + 1
    (thread,) = [t for t in threading.enumerate() if t.name == "monai-gds-answers"]
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    child = context.Process(target=stop.wait)  # which has all that this process has open
    child.start()
    del answers
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    stop.set()
    child.join()


def test_a_forked_child_that_drops_its_copy_ends_nothing() -> None:
    answers: Any = Answers(_half)
    held, context = [answers], multiprocessing.get_context("fork")
    child = context.Process(target=held.clear)
    address = answers.address
    del answers
    child.start()
    child.join()
    assert _by("fork", address, [4]) == [(2, os.getpid())]
