"""Leases: one process computes an item, and the others never wait for ever, whatever happens to it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monai_gds.folder.directory import tidy
from monai_gds.shared import leases as leases_module
from monai_gds.shared import temporary
from monai_gds.shared.leases import Lease, Leases, Pace, take_turn
from monai_gds.shared.owner import this_process
from tests import interrupts
from tests.loopdisk import loop_disk
from tests.machines import ROOT, in_child, mounted_tmpfs, read_only
from tests.polls import until

A, B = f"{10:032x}", f"{11:032x}"

#: In force in this process and in those that tests start, in place of seconds.
BEAT, STALE = 0.1, 1.0

#: After which a lease that nobody beats for is stale.
LONGER = 1.4 * STALE

LONG = 30.0

#: Seconds by which a clock may be off.
WRONG = [pytest.param(-3600, marks=pytest.mark.long), 3600]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(leases_module, "STALE_SECONDS", STALE)


def file_of(folder: Path, digest: str = A) -> Path:
    return folder / ".tmp" / f"{digest}.lease"


class Other:
    """A process of its own that does what it is told, line by line, with ``leases`` over a folder."""

    _CODE = f"""
import os, signal, sys, time
from monai_gds.shared import leases as module
from monai_gds.shared.leases import Leases
from tests.polls import until
module.BEAT_SECONDS, module.STALE_SECONDS = {BEAT}, {STALE}
exec(sys.argv[2])
leases = Leases(sys.argv[1])
for line in sys.stdin:
    try:
        told = eval(line)
    except SyntaxError:
        told = exec(line)
    print(repr(told), flush=True)
"""

    def __init__(self, folder: Path, before: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", self._CODE, str(folder), before],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.pid = self._process.pid

    def __call__(self, line: str) -> str:
        """What the process says to a line of Python."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(autouse=True)
def nothing_computed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long items took in tests before is no part of a test here."""
    monkeypatch.setattr(leases_module, "pace", Pace())


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., Other]]:
    with contextlib.ExitStack() as stack:

        def start(folder: Path = tmp_path, before: str = "") -> Other:
            process = Other(folder, before)
            stack.callback(process.close)
            return process

        yield start


def seconds(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


# ---------------------------------------------------------------------------------------------------------------------
# Held by one, free for all


def test_another_process_gets_it_when_it_is_released_and_not_before(tmp_path: Path, other: Any) -> None:
    process = other()
    process(f"held = leases.take('{A}')")
    leases = Leases(tmp_path)
    assert leases.take(A) is None
    assert leases.held_elsewhere(A)
    assert leases.take(B) is not None
    process("held.release()")
    assert not leases.held_elsewhere(A)
    lease = leases.take(A)
    assert lease is not None
    assert process(f"leases.take('{A}') is None") == "True"
    lease.release()
    until(lambda: not file_of(tmp_path, B).exists())  # it was dropped
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_threads_and_objects_of_one_process_share_leases(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    lease = Leases(tmp_path).take(A)
    assert Leases(tmp_path).take(A) is None
    assert Leases(str(tmp_path / "link")).take(A) is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(Leases(tmp_path).take(A)))
    thread.start()
    thread.join()
    assert found == [None]
    assert lease is not None
    thread = threading.Thread(target=lease.release)
    thread.start()
    thread.join()
    lease.release()
    assert Leases(tmp_path).take(A) is not None


def test_threads_share_leases_where_no_file_can_be_made(tmp_path: Path) -> None:
    (tmp_path / ".tmp").write_text("in the way")
    lease = Leases(tmp_path).take(A)
    assert lease is not None
    assert Leases(tmp_path).take(A) is None
    lease.release()
    assert Leases(tmp_path).take(A) is not None


def test_a_late_release_leaves_the_next_holders_lease(tmp_path: Path, other: Any) -> None:
    process = other()
    lease = Leases(tmp_path).take(A)
    assert lease is not None
    lease.release()
    process(f"held = leases.take('{A}')")
    lease.release()
    assert file_of(tmp_path).exists()


def test_a_block_releases_unless_it_handed_over(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    with leases.take(A) as lease:
        assert leases.take(A) is None
    assert not leases.held_elsewhere(A)
    with leases.take(A) as lease:
        release = lease.hand_over()
    assert leases.held_elsewhere(A)
    release()
    assert not leases.held_elsewhere(A)
    with contextlib.suppress(ZeroDivisionError), leases.take(A) as lease:
        lease.hand_over()
        _ = 1 // 0
    assert not leases.held_elsewhere(A)


def test_of_several_that_want_it_at_once_one_gets_it(tmp_path: Path, other: Any) -> None:
    processes = [other() for _ in range(3)]
    for process in processes:
        process("held = []")
    start = time.time() + 0.3
    line = f"while time.time() < {start}: pass"
    threads = [threading.Thread(target=process, args=(f"exec({line!r})",)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    take = (
        "held += [n for n in range(300) if (lease := leases.take(f'{n:032x}')) and not setattr(leases, f'n{n}', lease)]"
    )
    threads = [threading.Thread(target=process, args=(take,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = sorted(n for process in processes for n in eval(process("held")))
    assert taken == list(range(300))


# ---------------------------------------------------------------------------------------------------------------------
# Heartbeat


def test_a_lease_is_kept_as_long_as_its_holder_lives(tmp_path: Path, other: Any) -> None:
    process = other()
    process(f"held = leases.take('{A}')")
    leases = Leases(tmp_path)
    assert not leases.wait(A, LONGER)
    assert leases.take(A) is None


def test_waiting_ends_with_the_release(tmp_path: Path, other: Any) -> None:
    process = other()
    process(f"held = leases.take('{A}')")
    threading.Timer(0.2, process, ("held.release()",)).start()
    found: list[bool] = []
    assert seconds(lambda: found.append(Leases(tmp_path).wait(A, LONG))) < LONG
    assert found == [True]
    assert Leases(tmp_path).wait(B, LONG)


def test_a_killed_holder_is_noticed_at_once(tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "STALE_SECONDS", 1000.0)
    process = other()
    process(f"held = leases.take('{A}'), leases.take('{B}')")
    leases = Leases(tmp_path)
    assert leases.take(A) is None
    process.signal(signal.SIGKILL)
    assert not leases.held_elsewhere(A)
    assert leases.take(A) is not None
    assert file_of(tmp_path, B).exists()
    leases.sweep()
    assert not file_of(tmp_path, B).exists()


def test_a_stopped_holder_loses_its_lease_and_cannot_take_it_back(tmp_path: Path, other: Any) -> None:
    process = other()
    process(f"held = leases.take('{A}')")
    process.signal(signal.SIGSTOP)
    leases = Leases(tmp_path)
    assert seconds(lambda: leases.wait(A, LONG)) < LONG
    lease = leases.take(A)
    assert lease is not None
    written = file_of(tmp_path).read_bytes()
    process.signal(signal.SIGCONT)
    process("held.release()")
    assert file_of(tmp_path).read_bytes() == written
    assert process(f"leases.take('{A}') is None") == "True"


def test_a_process_that_lost_a_lease_does_not_keep_the_next_holders_alive(tmp_path: Path, other: Any) -> None:
    first, second = other(), other()
    first(f"held = leases.take('{A}')")
    first.signal(signal.SIGSTOP)
    assert Leases(tmp_path).wait(A, LONG)
    second(f"held = leases.take('{A}')")
    second.signal(signal.SIGSTOP)
    first.signal(signal.SIGCONT)
    assert Leases(tmp_path).wait(A, LONG)


def test_the_thread_is_there_while_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "monai-gds-leases"]

    lease = Leases(tmp_path).take(A)
    assert lease is not None
    assert len(threads()) == 1
    time.sleep(3 * BEAT)
    assert len(threads()) == 1
    lease.release()
    monkeypatch.setattr(leases_module, "BEAT_SECONDS", LONG)
    time.sleep(3 * BEAT)
    lease = Leases(tmp_path).take(A)  # in this thread's first pause, which is a long one
    assert lease is not None
    time.sleep(3 * BEAT)
    lease.release()
    assert len(threads()) == 1
    in_child(lambda: None)
    assert threads() == [], "Python 3.12 warns of a fork of a process with threads"
    with Leases(tmp_path).take(A) or pytest.fail("it is free"):
        assert len(threads()) == 1


def test_no_more_threads_means_a_lease_that_others_take_over(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    process = other()
    leases_module._here().end_idle_thread()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert Leases(tmp_path).take(A) is not None
        held = Leases(tmp_path).take(B)
    assert held is not None
    assert process(f"leases.wait('{B}', {LONG})") == "True"


# ---------------------------------------------------------------------------------------------------------------------
# Clocks and hosts


@pytest.mark.parametrize("wrong", WRONG)
def test_this_hosts_clock_does_not_matter(tmp_path: Path, other: Any, wrong: int) -> None:
    off = f"now, now_ns = time.time, time.time_ns; time.time = lambda: now() + {wrong}; "
    off += f"time.time_ns = lambda: now_ns() + {wrong} * 10**9"
    right, process = other(), other(before=off)
    right(f"held = leases.take('{A}')")
    process(f"held = leases.take('{B}')")
    with ThreadPoolExecutor(2) as both:
        waits = both.map(lambda one, of: one(f"leases.wait('{of}', {LONGER})"), (process, right), (A, B))
        assert list(waits) == ["False", "False"]
    process.signal(signal.SIGSTOP)
    assert right(f"leases.wait('{B}', {LONG})") == "True"
    process.signal(signal.SIGCONT)
    right.signal(signal.SIGSTOP)
    assert process(f"leases.wait('{A}', {LONG})") == "True"


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_server_whose_clock_is_an_hour_off(tmp_path: Path, other: Any, wrong: int) -> None:
    dated = f"""
class Dated:
    def __init__(self, found): self.found, self.st_mtime = found, found.st_mtime + {wrong}
    def __getattr__(self, name): return getattr(self.found, name)
for name in ("stat", "fstat"):
    setattr(os, name, lambda *what, call=getattr(os, name), **more: Dated(call(*what, **more)))
"""
    first, second = other(before=dated), other(before=dated)
    first(f"held = leases.take('{A}')")
    assert second(f"leases.wait('{A}', {LONGER})") == "False"
    first.signal(signal.SIGSTOP)
    assert second(f"leases.wait('{A}', {LONG})") == "True"
    assert second(f"leases.take('{A}') is None") == "False"


def let_others_reach(folder: Path) -> None:
    """Opens the folders of pytest, and of pytest-xdist, to other users."""
    for parent in folder.parents:
        if parent.owner() == "root" and parent.name.startswith(("pytest", "popen")):
            parent.chmod(0o755)


def foreign(folder: Path, mark: str = "0000beef-1.77.88.0") -> None:
    """A lease of a process on another host."""
    file_of(folder).parent.mkdir(exist_ok=True)
    file_of(folder).write_text(mark)


def test_another_hosts_lease_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    marks = ["0000beef-1.77.88.0", "unknown.77.None.0", "", "\x00\xff.nonsense", "x" * 5000]
    digests = [f"{n:032x}" for n in range(len(marks))]
    leases = Leases(tmp_path)
    (tmp_path / ".tmp").mkdir()
    for digest, mark in zip(digests, marks, strict=True):
        file_of(tmp_path, digest).write_text(mark)
    assert [leases.take(digest) for digest in digests] == [None] * len(marks)
    leases.sweep()
    assert all(file_of(tmp_path, digest).exists() for digest in digests)
    assert 0.5 * STALE < seconds(lambda: [leases.wait(digest, LONG) for digest in digests]) < LONG
    for digest in digests:
        lease = leases.take(digest)
        assert lease is not None
        assert file_of(tmp_path, digest).read_text().startswith(this_process())


@pytest.mark.parametrize("age", [-3600, 3600])
def test_a_lease_touched_an_hour_ago_or_ahead_is_abandoned(tmp_path: Path, age: int) -> None:
    foreign(tmp_path)
    os.utime(file_of(tmp_path), (time.time() - age,) * 2)
    assert not Leases(tmp_path).held_elsewhere(A)
    with Leases(tmp_path).take(A) or pytest.fail("nobody holds it"):
        assert not file_of(tmp_path).read_text().startswith("0000beef")
    foreign(tmp_path)
    os.utime(file_of(tmp_path), (time.time() - age,) * 2)
    Leases(tmp_path).sweep()
    assert not file_of(tmp_path).exists()


@pytest.mark.parametrize("how", ["taken over", "touched"])
def test_a_lease_that_somebody_has_again_when_it_is_to_be_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    is_abandoned = leases_module._is_abandoned

    def then_another_is_faster(*found: Any) -> bool:
        abandoned = is_abandoned(*found)
        if how == "taken over":
            file_of(tmp_path).unlink()
            foreign(tmp_path, "0000cafe-1.99.88.0")
        os.utime(file_of(tmp_path))
        return abandoned

    foreign(tmp_path)
    os.utime(file_of(tmp_path), (0, 0))
    with monkeypatch.context() as during:
        during.setattr(leases_module, "_is_abandoned", then_another_is_faster)
        assert Leases(tmp_path).take(A) is None
    assert file_of(tmp_path).read_text().startswith("0000cafe" if how == "taken over" else "0000beef")


def test_a_lease_that_ends_while_it_is_touched_touches_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch, lease = os.utime, Leases(tmp_path).take(A)
    assert lease is not None

    def late(*args: Any, **options: Any) -> None:
        lease.release()
        foreign(tmp_path)
        touch(file_of(tmp_path), (0, 0))
        touch(*args, **options)

    with monkeypatch.context() as during:
        during.setattr(os, "utime", late)
        lease._beat()
    assert file_of(tmp_path).stat().st_mtime == 0


def test_a_process_id_that_was_given_again_is_not_the_holder(tmp_path: Path) -> None:
    place, _, started = this_process().split(".")
    foreign(tmp_path, f"{place}.{os.getppid()}.{int(started) + 1}.0")
    assert not Leases(tmp_path).held_elsewhere(A)


# ---------------------------------------------------------------------------------------------------------------------
# Forks


def test_a_child_neither_has_nor_ends_its_parents_leases(tmp_path: Path) -> None:
    lease = Leases(tmp_path).take(A)
    assert lease is not None

    def child() -> tuple[Any, Any]:
        nonlocal lease
        assert lease is not None
        lease.release()
        with lease:
            pass
        lease = None
        gc.collect()
        own = Leases(tmp_path).take(B)
        return Leases(tmp_path).take(A), own is None

    assert in_child(child) == (None, False)
    assert file_of(tmp_path).exists()
    assert Leases(tmp_path).take(B) is not None, "what the child took ended with it"


def test_a_child_does_not_keep_its_parents_leases_alive(tmp_path: Path, other: Any) -> None:
    process = other()
    process(f"held = leases.take('{A}')")
    child = int(process("os.fork() or time.sleep(60) or os._exit(0)"))
    try:
        process.signal(signal.SIGSTOP)
        assert Leases(tmp_path).wait(A, LONG)
    finally:
        os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# Holders that are gone within a living process


def freed(folder: Path, digest: str = A) -> bool:
    """Whether the lease's file goes; the thread may be just touching it."""
    until(lambda: not file_of(folder, digest).exists())
    return True


def test_a_dropped_lease_is_released(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    assert leases.take(A) is not None  # and dropped
    assert freed(tmp_path)

    def fails() -> None:
        lease = leases.take(A)
        assert lease is not None
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        fails()
    assert freed(tmp_path)
    knot: list[Any] = [leases.take(A)]
    knot.append(knot)
    del knot
    gc.collect()
    assert freed(tmp_path)


def interrupted(work: Callable[[], Any], at: int) -> bool:
    """Whether Ctrl-C struck at the n-th instruction in single_flight.py."""
    return interrupts.interrupted(at, work, [leases_module.__file__])


def test_dropping_a_lease_runs_nothing_that_an_interrupt_could_strike(tmp_path: Path) -> None:
    held = [Leases(tmp_path).take(A)]
    assert not interrupted(held.clear, 1)
    assert freed(tmp_path)


def test_a_process_killed_at_any_step_of_taking_a_lease_keeps_nobody_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    files = [leases_module.__file__, temporary.__file__]
    kept: list[Lease | None] = []
    copies = interrupts.as_killed(folder, lambda: kept.append(Leases(folder).take(A)), files, tmp_path / "copies")
    assert any(file_of(copy).exists() for copy in copies)
    for n, copy in enumerate(copies, 1):
        assert not Leases(copy).held_elsewhere(A), f"killed at step {n}"


# Both in a process of their own: an exception between any two instructions may leave the interpreter itself with one
# that it takes for being handled, and every later error of these tests would be shown as raised meanwhile.


def test_an_interrupt_at_any_instruction_leaves_nothing_that_hangs_anybody(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = 0.1  # after some interrupts the other process waits until the file is
    monkeypatch.setattr(leases_module, "BEAT_SECONDS", stale / 10)
    monkeypatch.setattr(leases_module, "STALE_SECONDS", stale)
    process, leases = other(before=f"module.STALE_SECONDS = {stale}"), Leases(tmp_path)
    process("leases")  # it has started

    def take_and_release() -> None:
        with leases.take(A) or pytest.fail("it is free"):
            pass

    def interrupt_everywhere() -> int:
        at, reached = 0, True
        while reached:
            at += 1
            reached = interrupted(take_and_release, at)
            if at % 2:  # in the other half only the other process asks
                leases.wait(A, LONG)  # the thread that touches its file may hold it for a moment
                lease = leases.take(A)
                assert lease is not None, f"this process holds it since an interrupt at instruction {at}"
                lease.release()
            began = time.monotonic()
            assert process(f"leases.wait('{A}', {LONG})") == "True", f"interrupt at instruction {at}"
            assert time.monotonic() - began < LONG
        return at

    assert in_child(interrupt_everywhere) > 100, "the whole of take and release was gone through"


def test_an_interrupt_while_a_lease_is_taken_over(tmp_path: Path) -> None:
    leases = Leases(tmp_path)

    def take_over() -> None:
        with leases.take(A) or pytest.fail("it is free"):
            pass

    def interrupt_everywhere() -> int:
        at, reached = 0, True
        while reached:
            at += 1
            foreign(tmp_path)
            os.utime(file_of(tmp_path), (0, 0))
            reached = interrupted(take_over, at)
            leases.wait(A, LONG)  # the thread that touches its file may hold it for a moment
            lease = leases.take(A)
            assert lease is not None, f"interrupt at instruction {at}"
            lease.release()
        return at

    assert in_child(interrupt_everywhere) > 100


# ---------------------------------------------------------------------------------------------------------------------
# Whatever the file system refuses


def test_on_a_read_only_file_system_everything_is_computed(tmp_path: Path, other: Any) -> None:
    with mounted_tmpfs(tmp_path / "disk", 1 << 20) as disk:
        process = other(disk)
        process(f"held = leases.take('{A}')")
        read_only(disk)
        leases = Leases(disk)
        for digest in (A, B):
            assert not leases.held_elsewhere(digest)
            with leases.take(digest) or pytest.fail("nothing can be leased"):
                pass
        leases.sweep()
        assert process("held.release()") == "None"


def test_on_a_full_disk_everything_is_computed(tmp_path: Path) -> None:
    with loop_disk(tmp_path, size=32 << 20) as disk:
        leases = Leases(disk.folder)
        before = leases.take(B)
        assert before is not None
        with contextlib.suppress(OSError), (disk.folder / "fill").open("wb", buffering=0) as f:
            while True:
                f.write(bytes(4096))
        with contextlib.suppress(OSError):
            for n in range(100_000):
                (disk.folder / f"fill{n}").touch()
        lease = leases.take(A)
        assert lease is not None
        assert leases.take(A) is None, "this process's own threads share it all the same"
        lease.release()
        assert not file_of(disk.folder).exists()
        before.release()


def test_in_another_users_folder_everything_is_computed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    let_others_reach(tmp_path)
    (tmp_path / ".tmp").mkdir()

    def stranger() -> bool:
        lease = Leases(tmp_path).take(A)
        return lease is not None and not Leases(tmp_path).held_elsewhere(B)

    assert in_child(stranger, nobody=True)
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_an_unreadable_lease_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    let_others_reach(tmp_path)
    foreign(tmp_path)
    (tmp_path / ".tmp").chmod(0o777)
    file_of(tmp_path).chmod(0o600)

    def stranger() -> tuple[bool, bool]:
        leases = Leases(tmp_path)
        leases_module.STALE_SECONDS = 1000.0  # in the child only, which may take a while to begin
        held = leases.held_elsewhere(A)
        leases_module.STALE_SECONDS = STALE
        return held, leases.wait(A, LONG) and leases.take(A) is not None

    assert in_child(stranger, nobody=True) == (True, True)


def test_a_linked_temporary_folder_is_left_alone(tmp_path: Path) -> None:
    theirs, cache = tmp_path / "theirs", tmp_path / "cache"
    theirs.mkdir()
    cache.mkdir()
    (cache / ".tmp").symlink_to(theirs)
    (theirs / f"{B}.lease").write_text("theirs")
    os.utime(theirs / f"{B}.lease", (0, 0))
    leases = Leases(cache)
    with leases.take(A) or pytest.fail("computed all the same"):
        assert [path.name for path in theirs.iterdir()] == [f"{B}.lease"]
    leases.sweep()
    assert (theirs / f"{B}.lease").read_text() == "theirs"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "link to nothing"])
def test_a_pipe_folder_or_link_with_a_leases_name_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = file_of(tmp_path)
    path.parent.mkdir()
    (tmp_path / "thesis.docx").write_text("dear")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / ("thesis.docx" if kind == "link" else "nothing"))
    os.utime(path, (0, 0), follow_symlinks=False)
    leases = Leases(tmp_path)
    with leases.take(A) or pytest.fail("computed all the same"):
        assert not leases.held_elsewhere(B)
    assert seconds(lambda: leases.wait(A, LONG)) < LONG
    leases.sweep()
    tidy(tmp_path)
    assert os.path.lexists(path) or kind != "folder"
    assert (tmp_path / "thesis.docx").read_text() == "dear"
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    with Leases(tmp_path / "gone" / "with" / "all").take(A) or pytest.fail("it is free"):
        assert file_of(tmp_path / "gone" / "with" / "all").exists()


def test_sweeping_takes_leases_only(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    for name in ("thesis.lease", f"{A}.lease.docx", f"{A}.safetensors", "x"):
        (tmp_path / ".tmp" / name).write_text("dear")
        os.utime(tmp_path / ".tmp" / name, (0, 0))
    lease = Leases(tmp_path).take(B)
    Leases(tmp_path).sweep()
    assert len(list((tmp_path / ".tmp").iterdir())) == 5
    del lease


# ---------------------------------------------------------------------------------------------------------------------
# Taking turns


def test_what_another_finished_is_taken_and_not_computed(tmp_path: Path, other: Any) -> None:
    process = other()
    process(f"held = leases.take('{A}')")
    record = tmp_path / "record"

    def finish() -> None:
        record.write_text("made")
        process("held.release()")

    threading.Timer(0.2, finish).start()
    lease, found = take_turn(tmp_path, A, lambda: record.read_text() if record.exists() else None)
    assert found == "made"
    assert Leases(tmp_path).take(A) is not None
    assert isinstance(lease, Lease)


def test_what_another_failed_to_make_is_computed_under_a_lease(tmp_path: Path, other: Any) -> None:
    process = other()
    process(f"held = leases.take('{A}')")
    threading.Timer(0.2, process, ("held.release()",)).start()
    lease, found = take_turn(tmp_path, A, lambda: None)
    assert found is None
    with lease:
        assert process(f"leases.take('{A}') is None") == "True"
    assert process(f"leases.take('{A}') is None") == "False"


def test_an_item_is_waited_for_as_long_as_one_takes_here(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, mean = other(), Pace()
    process(f"held = leases.take('{A}')")
    monkeypatch.setattr(leases_module, "pace", mean)
    monkeypatch.setattr(leases_module, "UNKNOWN_SECONDS", 1.0)
    assert 0.9 < seconds(lambda: take_turn(tmp_path, A, lambda: None)) < 30
    monkeypatch.setattr(leases_module, "UNKNOWN_SECONDS", 60.0)
    mean.note(0.2)
    mean.note(0.4)
    assert mean.mean == pytest.approx(0.3)
    began = time.monotonic()
    lease, found = take_turn(tmp_path, A, lambda: None)
    assert 0.25 < time.monotonic() - began < 30
    with lease:
        pass
    assert (found, process(f"leases.take('{A}') is None")) == (None, "True"), "it stays the other's"


def test_an_error_while_looking_gives_the_lease_back(tmp_path: Path) -> None:
    def look() -> None:
        raise ZeroDivisionError

    kept: list[BaseException] = []  # with its traceback, as a notebook keeps it
    try:
        take_turn(tmp_path, A, look)
    except ZeroDivisionError as e:
        kept.append(e)
    assert kept
    assert Leases(tmp_path).take(A) is not None
