"""Names of processes: whether the process that wrote a file still runs."""

from __future__ import annotations

import os
import signal

from monai_gds.shared.owner import still_runs, this_process
from tests.machines import in_child


def test_a_process_runs_until_it_ends() -> None:
    assert still_runs(this_process()) is True
    child = in_child(this_process)
    assert child != this_process()
    assert still_runs(child) is False
    place, pid, start = this_process().split(".")
    assert still_runs(f"{place}.{pid}.{int(start) + 1}") is False
    assert still_runs(f"0a0b0c0d-1.{pid}.{start}") is None
    for text in ("", "x", f"{place}.{pid}", f"{place}.{pid}.{start}.0", f"{place}.../../etc.{start}", "unknown.1.None"):
        assert still_runs(text) is None


def test_a_process_that_was_killed_has_ended_though_its_parent_does_not_ask_for_it() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, this_process().encode())
        signal.pause()
    try:
        name = os.read(reading, 100).decode()
        assert still_runs(name) is True
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # leaves it in the table
        assert still_runs(name) is False
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
