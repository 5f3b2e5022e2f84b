"""OpenMP on a busy machine: a thread that does nothing is there while it is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from monai.transforms import Compose, EnsureTyped

from monai_gds import GDSDataLoader, GDSDataset
from monai_gds.base import cores
from monai_gds.pipeline.openmp import heed_load
from tests.machines import in_child


def idle() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "monai-gds-openmp"]


@pytest.fixture(autouse=True)
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What the machine's load is."""
    loads = [0.0]
    monkeypatch.setattr(os, "getloadavg", lambda: (loads[0], 0.0, 0.0))
    yield loads
    loads[0] = 0.0
    heed_load()


def test_it_comes_and_goes_with_the_load(tmp_path: Path, load: list[float]) -> None:
    data = [{"x": torch.ones(9)}] * 3
    loader = GDSDataLoader(GDSDataset(data, Compose([EnsureTyped("x")]), tmp_path, "cpu"))
    processors = cores.usable()
    for busy in (False, True, True, False, True, False):
        before = idle()
        load[0] = processors * (2.0 if busy else 1.2)
        assert len(list(loader)) == 3
        if not busy:
            for thread in before:
                thread.join(20)
        assert len(idle()) == busy
        assert not before or not busy or idle() == before


def test_an_interrupt_while_it_begins_waits_until_it_is_out_of_torch(
    load: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, computed = threading.Thread.start, threading.Event()
    ones = torch.ones

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        raise KeyboardInterrupt

    def slow(*size: int) -> torch.Tensor:
        assert not computed.wait(0.2)
        computed.set()
        return ones(*size)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(torch, "ones", slow)
    load[0] = 1e6
    with pytest.raises(KeyboardInterrupt):
        heed_load()
    assert computed.is_set()


def test_a_forked_child_has_its_own(load: list[float]) -> None:
    def child() -> int:
        heed_load()
        return len(idle())

    load[0] = 1e6
    heed_load()
    assert in_child(child) == 1
