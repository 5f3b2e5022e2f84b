"""What staging.py makes of the driver's answers, and how it takes tensors off a device. Runs without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monai_gds.storage import staging
from monai_gds.testing.tools import content

INVALID_CONTEXT = 201


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver that returns a test's ``answers``, and a runtime that notes when it was called."""
    state = SimpleNamespace(answers=[0], copies=[], runtime_calls=0)

    def copy(*arguments: Any) -> int:
        state.copies.append(arguments)
        return int(state.answers.pop(0))

    def call_the_runtime() -> tuple[int, int]:
        state.runtime_calls += 1
        return 0, 0

    monkeypatch.setattr(staging, "_driver", lambda _: SimpleNamespace(cuMemcpyHtoDAsync_v2=copy))
    monkeypatch.setattr(torch.cuda, "mem_get_info", call_the_runtime)
    return state


def test_a_thread_without_a_context_gets_one_and_its_copy_is_made(driver: SimpleNamespace) -> None:
    driver.answers = [INVALID_CONTEXT, 0]
    staging.copy_to_device(1, 2, 3, 4)
    assert driver.copies == [(1, 2, 3, 4)] * 2
    assert driver.runtime_calls == 1


def test_a_thread_with_a_context_copies_once(driver: SimpleNamespace) -> None:
    staging.copy_to_device(1, 2, 3, 4)
    assert driver.copies == [(1, 2, 3, 4)]
    assert driver.runtime_calls == 0


@pytest.mark.parametrize("answers", [[700], [INVALID_CONTEXT, INVALID_CONTEXT]])
def test_what_cuda_refuses_is_an_error_with_its_number(driver: SimpleNamespace, answers: list[int]) -> None:
    driver.answers = list(answers)
    with pytest.raises(RuntimeError, match=f"cuMemcpyHtoDAsync_v2: error {answers[-1]}"):
        staging.copy_to_device(1, 2, 3, 4)


def test_a_tensor_leaves_the_device_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over host memory in place of a pinned slot, which also goes back to its pool."""
    buffer = torch.empty(4096, dtype=torch.uint8)
    slot, free = SimpleNamespace(buffer=buffer), []
    pool = SimpleNamespace(slot_bytes=4096, acquire=lambda: slot, release=free.append)
    monkeypatch.setattr(staging, "staging_pool", lambda device: pool)
    data = content(3 * 4096 + 5)
    pieces = [bytes(piece) for piece in staging._on_host(torch.frombuffer(bytearray(data), dtype=torch.uint8))]
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [4096, 4096, 4096, 5]
    assert free == [slot]
    pieces_of_another = staging._on_host(torch.zeros(2 * 4096, dtype=torch.uint8))
    next(pieces_of_another)
    del pieces_of_another  # the disk is full, for example
    assert free == [slot, slot]
