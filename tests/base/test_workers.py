"""Workers: processes that run a function, however they are started, and whatever becomes of them."""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.live import Live

from monai_gds import WorkerDied
from monai_gds.base.workers import Workers
from tests.fresh import ROOT, printed_by, warm
from tests.polls import until


class Odd(Exception):
    """Cannot be unpickled: it takes two arguments and keeps one."""

    def __new__(cls, a: str, b: str) -> Odd:
        return super().__new__(cls, a + b)

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a + b)


#: Spawned workers differ from those of a fork server in how they start. Each imports torch.
CONTEXTS = ["fork", pytest.param("spawn", marks=pytest.mark.long), "forkserver"]


def process(_: Any) -> int:
    return os.getpid()


def fail(kind: str) -> None:
    raise Odd("strange ", "thing") if kind == "odd" else KeyError(kind)


def say(text: str) -> None:
    print(text, file=sys.stderr)


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    return number


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def sleep_in_a_library(seconds: float) -> float:
    """As SimpleITK works: it has the interpreter's lock all the while, so that no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(int(seconds))
    return seconds


def gone(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("context", [None, *CONTEXTS])
def test_runs_in_other_processes(context: str | None) -> None:
    with closing(Workers(process, 2, context)) as workers:
        pids = {workers.submit(i).result() for i in range(8)}
        assert workers.kind == (context or "fork")
    assert os.getpid() not in pids
    assert all(gone(pid, 5) for pid in pids)


def summed(n: int) -> float:
    return float(torch.ones(n).sum())


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch has computed here on two threads, which no forked child has."""
    torch.set_num_threads(2)
    assert summed(1 << 20) == 1 << 20
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
def test_forked_workers_compute_though_their_parent_has_threads_of_openmp() -> None:
    with closing(Workers(summed, 1, "fork")) as workers:
        assert workers.submit(1 << 20).result(timeout=20) == 1 << 20


def test_forks_elsewhere_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with closing(Workers(process, 1)) as workers:
        assert workers.kind == "forkserver"
        assert workers.submit(0).result() != os.getpid()


def parent_and(name: str) -> tuple[int, str | None]:
    return os.getppid(), os.environ.get(name)


@pytest.mark.parametrize("context", CONTEXTS)
def test_workers_have_the_environment_of_now(monkeypatch: pytest.MonkeyPatch, context: str) -> None:
    for value in ("1", "2"):  # the fork server keeps running
        monkeypatch.setenv("MONAI_GDS_TEST", value)
        with closing(Workers(parent_and, 1, context)) as workers:
            parent, found = workers.submit("MONAI_GDS_TEST").result()
        assert found == value
        assert (parent == os.getpid()) == (context != "forkserver")


JOBS = """
import os
open(f"imported-{{os.getpid()}}", "w").close()
def where(n): return {where!r}
"""

OF_A_PATH = """
import os, sys
from contextlib import closing
sys.path.insert(0, "added")
import torch
from monai_gds.base.workers import Workers
from jobs import where
torch.cuda.is_initialized = lambda: True
if __name__ == "__main__":
    before = dict(os.environ)
    with closing(Workers(where, 3)) as workers:
        print(where(0), workers.submit(0).result(), os.environ == before)
"""


def test_the_fork_server_imports_once_what_the_script_would(tmp_path: Path) -> None:
    """Not another module of the name, in the current folder or on Python's own path; and for all workers."""
    for folder in (".", "added", "scripts", "installed"):
        (tmp_path / folder).mkdir(exist_ok=True)
        if folder != "scripts":
            (tmp_path / folder / "jobs.py").write_text(JOBS.format(where=folder))
    (tmp_path / "scripts/script.py").write_text(OF_A_PATH)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'installed'}"}
    done = warm().run("scripts/script.py", cwd=tmp_path, env=env)
    assert done.stdout == "added added True\n", done.stderr
    assert len(list(tmp_path.glob("imported-*"))) == 2, "by the script and the server"


AT_ONCE = """
import multiprocessing, os, sys, time
from contextlib import closing
from monai_gds.base.workers import Workers
if __name__ == "__mp_main__":
    open(str(os.getpid()), "w").close()
    while len(os.listdir()) < 3:  # the script and both workers
        time.sleep(0.01)
if __name__ == "__main__":
    with closing(Workers(os.path.exists, 2, sys.argv[1])) as workers:
        print(workers.submit("script.py").result())
"""


@pytest.mark.parametrize("context", CONTEXTS[1:])
def test_all_workers_start_at_once(tmp_path: Path, context: str) -> None:
    """Each waits in its imports for the other."""
    (tmp_path / "script.py").write_text(AT_ONCE)
    done = warm().run("script.py", context, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


def test_threads_where_the_work_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        pytest.warns(UserWarning, match="2 threads do the work of processes: .*cannot be pickled.*lambda"),
        closing(Workers(lambda n: (n, os.getpid()), 2)) as workers,
    ):
        assert workers.kind == "threads"
        assert workers.submit(5).result() == (5, os.getpid())


def test_a_context_that_cannot_be_used_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"multiprocessing_context='spawn'.*pickled"):
        Workers(lambda n: n, 1, "spawn")
    with pytest.raises(ValueError, match="warp"):
        Workers(process, 1, "warp")


IN_MAIN = """
import torch, warnings
from contextlib import closing
from monai_gds.base.workers import Workers
def work(n): return n + 1
torch.cuda.is_initialized = lambda: True
{guard}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        workers = Workers(work, 1)
    with closing(workers):
        print(workers.kind, workers.submit(1).result(), [str(w.message) for w in said])
"""


def test_threads_where_only_this_process_knows_the_function() -> None:
    said = printed_by(IN_MAIN.format(guard="if True:"))  # `python -c`, as in a notebook: no file to import
    assert said.startswith("threads 2 ")
    assert "cannot be unpickled in another process" in said


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    for guard, kind in (("if True:", None), ('if __name__ == "__main__":', "forkserver 2")):
        script.write_text(IN_MAIN.format(guard=guard))
        done = warm().run(script)
        if kind is None:
            assert done.returncode == 1
            assert "under `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]
        else:
            assert done.stdout.startswith(kind), done.stderr


@pytest.mark.parametrize("context", CONTEXTS[1:])
def test_so_is_one_whose_work_is_more_than_a_pipe_holds(context: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    start = f"Workers(partial(max, bytes(1 << 20)), 1, {context!r})"
    script.write_text(f"from functools import partial\nfrom monai_gds.base.workers import Workers\n{start}\n")
    done = warm().run(script)
    assert done.returncode == 1
    assert "under `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("context", CONTEXTS)
def test_exceptions_arrive_with_the_traceback_of_the_worker(context: str) -> None:
    with closing(Workers(fail, 1, context)) as workers:
        error = workers.submit("missing").exception()
        assert isinstance(error, KeyError)
        assert "in fail" in str(error.__cause__)
        odd = workers.submit("odd").exception()
        assert isinstance(odd, RuntimeError)
        assert "Odd: strange thing" in str(odd)
        assert isinstance(workers.submit("x").exception(), KeyError), "the workers still work"


def test_a_worker_prints_though_a_bar_was_being_drawn_when_it_was_forked() -> None:
    console, drawing, drawn = Console(file=io.StringIO(), force_terminal=True), threading.Event(), threading.Event()

    def draw() -> None:
        with console._lock:  # as rich's thread does many times a second
            drawing.set()
            drawn.wait(30)

    with Live(console=console):
        threading.Thread(target=draw).start()
        drawing.wait(30)
        with closing(Workers(say, 1, "fork")) as workers:
            assert workers.submit("from a worker").result(timeout=10) is None
        drawn.set()


@pytest.mark.parametrize("which", [1, 2, 3])
def test_where_no_more_processes_can_be_started_none_stays(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    before, descriptors = set(multiprocessing.active_children()), len(os.listdir("/proc/self/fd"))
    real, forked = os.fork, [0]

    def fork() -> int:
        forked[0] += 1
        if forked[0] == which:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real()

    with monkeypatch.context() as during:
        during.setattr(os, "fork", fork)
        with pytest.raises(BlockingIOError):
            Workers(process, 3, "fork")
    until(lambda: set(multiprocessing.active_children()) <= before)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4  # Python's own: its pipes to the process that was not


class Sleeps:
    """Work that is not done by itself."""

    def __call__(self, seconds: float) -> None:
        time.sleep(seconds)


def test_what_closed_workers_ran_is_freed() -> None:
    """Also where the collector does not run, and calls were dropped."""
    work = Sleeps()
    workers, kept = Workers(work, 1, "fork"), weakref.ref(work)
    gc.collect()
    gc.disable()
    try:
        with closing(workers):
            workers.submit(100)
        del work, workers
        assert kept() is None
    finally:
        gc.enable()


WHILE_FORKING = """
import multiprocessing, os, signal
from monai_gds.base.workers import Workers
strike = {struck!r}
def ctrl_c():
    if strike:
        os.kill(os.getpid(), strike.pop())
os.register_at_fork(after_in_parent=ctrl_c)  # where Python raises it if it strikes during the system call
try:
    Workers(os.path.exists, 2, "fork")
except KeyboardInterrupt:
    print("interrupted", multiprocessing.active_children())
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_workers_are_forked_is_not_lost(times: int) -> None:
    assert printed_by(WHILE_FORKING.format(struck=[int(signal.SIGINT)] * times)) == "interrupted []"


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_killed_worker_is_an_error_and_not_a_hang(context: str) -> None:
    with closing(Workers(die, 2, context)) as workers:
        futures = [workers.submit(i) for i in range(20)]
        errors = [future.exception(timeout=30) for future in futures]
        assert isinstance(errors[3], WorkerDied)
        assert "was killed: by a signal" in str(errors[3]) and "SIGKILL)" in str(errors[3])
        assert futures[0].result() == 0
        assert isinstance(workers.submit(1).exception(timeout=30), WorkerDied), "later ones too"


@pytest.mark.parametrize("work", [sleep, sleep_in_a_library])
def test_closing_half_way_drops_the_rest(work: Callable[[float], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: idle workers alone have time to end by themselves."""
    monkeypatch.setattr("monai_gds.base.workers._CLOSE_SECONDS", 1000.0)
    workers = Workers(work, 1)
    futures = [workers.submit(60.0) for _ in range(50)]
    time.sleep(0.3)
    closing = threading.Thread(target=workers.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "it waits for the work"
    assert isinstance(futures[0].exception(timeout=0), WorkerDied)
    assert isinstance(futures[-1].exception(timeout=0), WorkerDied)


def test_closing_does_not_wait_for_the_rest_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed while it sends one."""
    here, send = os.getpid(), Connection._send  # type: ignore[attr-defined]

    def half(connection: Connection, message: Any, *how: Any) -> None:
        if os.getpid() == here:
            send(connection, message, *how)
        else:
            os.write(connection.fileno(), message[: len(message) // 2])
            (tmp_path / "sent").touch()
            time.sleep(60)

    monkeypatch.setattr(Connection, "_send", half)
    workers = Workers(process, 1, "fork")
    future = workers.submit(0)
    until((tmp_path / "sent").exists)
    closing = threading.Thread(target=workers.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert isinstance(future.exception(timeout=0), WorkerDied)


def sleep_long(of: str) -> int:
    time.sleep(60)
    return len(of)


@pytest.mark.parametrize("kill", [False, True])
def test_closing_does_not_wait_for_large_calls_that_nobody_will_read(kill: bool) -> None:
    """The other worker, as that of a validation within an epoch, has inherited the pipe that they lie in."""
    workers = Workers(sleep_long, 1, "fork")
    futures = [workers.submit("x" * 200_000) for _ in range(3)]
    with closing(Workers(process, 1, "fork")) as other:
        assert other.submit(0).result() != os.getpid()
        if kill:
            for child in workers._processes():
                child.kill()
            assert isinstance(futures[0].exception(timeout=30), WorkerDied)
        ending = threading.Thread(target=workers.close)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()
    assert all(isinstance(future.exception(timeout=0), WorkerDied) for future in futures)


kept: list[Workers[int]] = []


def keep_workers() -> None:
    kept.append(Workers(process, 1, "fork"))
    assert kept[0].submit(0).result() != os.getpid()


def test_idle_workers_do_not_keep_a_child_of_multiprocessing() -> None:
    """Such as a rank that torch.multiprocessing.spawn starts, whose loader nobody has collected."""
    rank = multiprocessing.get_context("fork").Process(target=keep_workers)
    rank.start()
    rank.join(20)
    try:
        assert rank.exitcode == 0
    finally:
        rank.kill()


SLOW_TO_START = """
import os, sys, time
if __name__ == "__mp_main__":
    try:
        os.close(os.open("first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        open("second", "w").close()
        time.sleep(60)
from monai_gds.base import workers as module
if __name__ == "__main__":
    module._CLOSE_SECONDS = 1.0
    workers = module.Workers(os.path.exists, 2, "spawn")
    assert [f.result() for f in [workers.submit("first") for _ in range(20)]] == [True] * 20
    while not os.path.exists("second"):
        time.sleep(0.01)
    start = time.monotonic()
    workers.close()
    print(time.monotonic() - start)
"""


def test_closing_does_not_wait_for_a_worker_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLOW_TO_START)
    done = warm().run("script.py", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert float(done.stdout) < 15


END_WITH_PARENT = """
import os, sys, time
from monai_gds.base.workers import Workers
def work(n):
    open(str(os.getpid()), "w").close()
    time.sleep(60)
if __name__ == "__main__":
    workers = Workers(work, 2, sys.argv[1])
    for i in range(2): workers.submit(i)
    time.sleep(60)
"""


@pytest.mark.parametrize("context", CONTEXTS)
def test_workers_end_with_their_parent(tmp_path: Path, context: str) -> None:
    (script := tmp_path / "script.py").write_text(END_WITH_PARENT)
    (pids := tmp_path / "pids").mkdir()
    parent = warm().program(script, context, cwd=pids)
    until(lambda: len(os.listdir(pids)) == 2)
    parent.send_signal(signal.SIGKILL)
    assert parent.result().returncode == -signal.SIGKILL
    assert all(gone(int(pid), 10) for pid in os.listdir(pids))
