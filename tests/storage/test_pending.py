"""What a caller sees of reads under way: waiting, errors per file, steps after them, parts put together."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from monai_gds.storage import Pending
from monai_gds.storage import pending as module
from tests.interrupts import interrupted
from tests.storage import simulated

CPU = torch.device("cpu")


def pending(files: int = 1, tensors: int = 1) -> Pending:
    return Pending([torch.zeros(4, dtype=torch.uint8) for _ in range(tensors)], CPU, files)


def doubled(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
    return [tensor * 2 for tensor in tensors]


def test_wait_raises_the_first_error_by_file_and_the_others_can_be_seen() -> None:
    reads = pending(files=3)
    reads.fail(2, OSError("second"))
    reads.fail(1, OSError("first"))
    reads.fail(1, OSError("of the same file"))
    assert reads.failed(1)
    assert not reads.failed(0)
    reads.finish()
    for _ in range(3):
        with pytest.raises(OSError, match="first"):
            reads.wait()
    assert {file: str(e) for file, e in reads.errors.items()} == {1: "first", 2: "second"}
    assert len(reads.tensors) == 1


def test_an_error_that_is_raised_again_and_again_does_not_grow() -> None:
    reads = Pending.completed([], CPU, OSError("broken"))
    depths = []
    for _ in range(3):
        with pytest.raises(OSError, match="broken") as caught:
            reads.wait()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_ctrl_c_at_any_place_of_a_wait_does_not_hold_up_the_thread_that_reads() -> None:
    for n in itertools.count(1):
        reads = pending()
        reader = threading.Thread(target=reads.finish, daemon=True)
        alarm = threading.Timer(0.01 * (n % 2), reader.start)  # before it, or while the other waits
        alarm.start()
        more = interrupted(n, reads.wait, [module.__file__], "check")
        alarm.join()
        reader.join(20)
        assert not reader.is_alive(), f"after check {n}"
        assert len(reads.wait()) == 1
        if not more:
            break


def test_many_threads_wait_while_it_is_finished() -> None:
    for _ in range(100):
        reads = pending()
        with ThreadPoolExecutor(4) as pool:
            waits = [pool.submit(reads.wait) for _ in range(4)]
            reads.finish()
            assert all(len(wait.result(10)) == 1 for wait in waits)


def test_each_step_runs_once_whenever_it_is_added() -> None:
    """Also by a thread that adds one while another finishes the reads."""
    for _ in range(100):
        reads, ran = pending(), itertools.count()

        def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
            next(ran)  # noqa: B023
            return tensors

        with ThreadPoolExecutor(4) as pool:
            steps = [pool.submit(reads.then, step) for _ in range(4)]
            pool.submit(reads.finish)
            for after in steps:
                after.result(10).wait()
        assert next(ran) == 4


@pytest.mark.parametrize("late", [False, True])
def test_steps_after_steps(late: bool) -> None:
    reads = pending(tensors=2)
    if late:
        reads.finish()
    after = reads.then(doubled).then(doubled)
    for tensor in reads._tensors:
        tensor.fill_(3)
    if not late:
        assert not after.done
        reads.finish()
        assert [int(t[0]) for t in after.wait()] == [12, 12]
    assert after.done


def test_a_step_sees_the_errors_and_they_are_handed_on() -> None:
    reads, seen = pending(files=2), []

    def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
        seen.append({file: str(e) for file, e in errors.items()})
        return tensors

    after = reads.then(step)
    reads.fail(1, OSError("broken"))
    reads.finish()
    assert seen == [{1: "broken"}]
    with pytest.raises(OSError, match="broken"):
        after.wait()


def test_a_step_that_raises_fails_every_file_but_hides_no_error() -> None:
    reads = pending(files=3)

    def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
        raise ValueError("nothing to decode")

    after = reads.then(step)
    reads.fail(1, OSError("broken"))
    reads.finish()
    assert [str(after.errors[file]) for file in range(3)] == ["nothing to decode", "broken", "nothing to decode"]
    assert "in step" in after.errors[0].__notes__[0], "where it was raised"
    assert list(reads.errors) == [1], "those before the step are as they were"


@pytest.mark.parametrize("raises", [False, True])
def test_a_step_keeps_no_tensor_alive(raises: bool) -> None:
    def step(tensors: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
        mine = tensors[0]
        if raises:
            raise ValueError(f"{mine.numel()} bytes")
        return []

    gc.collect()
    gc.disable()
    try:
        reads = pending()
        kept = weakref.ref(reads._tensors[0])
        after = reads.then(step)
        reads.finish()
        del reads
        assert bool(after.errors) == raises
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_are_over_together(order: tuple[int, ...]) -> None:
    parts = [pending(files=4) for _ in range(3)]
    parts[0].fail(3, OSError("late"))
    parts[2].fail(1, OSError("early"))
    tensors = [torch.ones(4, dtype=torch.uint8)]
    whole = Pending.joined(parts, tensors, CPU)
    after = whole.then(doubled)
    for which in order:
        assert not whole.done
        parts[which].finish()
    assert whole.done
    assert sorted(whole.errors) == [1, 3]
    assert whole.tensors is tensors
    with pytest.raises(OSError, match="early"):
        after.wait()


def test_parts_are_over_together_when_threads_finish_them() -> None:
    for _ in range(100):
        parts = [pending() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            for part in parts[:2]:
                pool.submit(part.finish)
            whole = Pending.joined(parts, [], CPU)
            for part in parts[2:]:
                pool.submit(part.finish)
            assert whole.wait() == []


def test_tensors_are_cut_to_what_was_asked_for() -> None:
    reads = pending(tensors=2).trimmed([3, 0])
    reads.finish()
    assert [t.numel() for t in reads.wait()] == [3, 0]


def test_simulated_each_stream_waits_for_the_copies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = simulated.install_gpu(monkeypatch)
    waits: list[int] = []
    current = [1]
    monkeypatch.setattr(simulated.staging, "raw_current_stream", lambda device: current[0])
    monkeypatch.setattr(simulated.staging, "hand_off", lambda dests, device, after: waits.append(current[0]))
    reads = Pending([simulated.on_device(torch.zeros(4, dtype=torch.uint8))], simulated.GPU)
    go = threading.Event()
    gpu.stream.put(go.wait)
    reads.finish()
    assert reads.done, "the host does not wait for copies"
    for stream in (1, 1, 2, 1):
        current[0] = stream
        reads.wait()
    assert waits == [1, 2]
    go.set()
    gpu.stream.close()


def test_a_check_that_raises_fails_every_file_and_hides_no_error_of_a_read() -> None:
    """Nor does its error keep the frames, and with them tensors, of what raised it."""

    def check(errors: Mapping[int, Exception]) -> Mapping[int, Exception]:
        raise ValueError("of the check")

    reads = pending(files=3)
    reads.fail(1, OSError("drive died"))
    reads.fail(2, OSError("of a file that only the check needed"))
    checked = reads.checked([torch.zeros(4)], 2, check)
    reads.finish()
    assert {file: str(e) for file, e in checked.errors.items()} == {0: "of the check", 1: "drive died"}
    assert checked.errors[0].__traceback__ is None
