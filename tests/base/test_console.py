"""What people see: bars beside other output."""

from __future__ import annotations

import sys

from tests.commands import on_a_terminal

FORKS_BESIDE_A_BAR = """
import os, signal, sys, threading
from monai_gds.base import console

drawing, drawn = threading.Event(), threading.Event()

def draw():
    with console.stderr._lock:  # as the thread that draws the bar does many times a second
        drawing.set()
        drawn.wait()

with console.progress():
    threading.Thread(target=draw).start()
    drawing.wait()
    if not (child := os.fork()):
        signal.alarm(5)
        print("from a worker", file=sys.stderr)
        os._exit(0)
    drawn.set()
    print("from the parent, which saw the worker end with", os.waitpid(child, 0)[1])
"""


def test_a_process_that_is_forked_while_a_bar_is_drawn_can_print() -> None:
    """A worker of populate that printed a warning used to wait for ever."""
    shown = on_a_terminal([sys.executable, "-c", FORKS_BESIDE_A_BAR])
    assert "from a worker" in shown
    assert "which saw the worker end with 0" in shown


def test_sentences_are_broken_between_words_on_a_terminal_and_paths_are_not() -> None:
    path = "/nvme/" + "cache/" * 20
    program = f"from monai_gds.base.console import say; say({'forty ' * 20 + path!r})"
    lines = on_a_terminal([sys.executable, "-c", program], columns=80).split("\n")
    assert [line.strip() for line in lines[:3]] == [" ".join(["forty"] * 13), " ".join(["forty"] * 7), path]
