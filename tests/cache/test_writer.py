"""Saving behind the training: bounded, in order, nothing lost, nobody else's bytes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from monai_gds.cache.key import Key, Pipeline
from monai_gds.cache.tree import EncodedItem
from monai_gds.cache.writer import Writer, process_writer
from tests.machines import in_child


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
        self.got.append((key.digest, float(item.tensors["t"][0]), threading.get_ident()))
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


def test_no_more_threads_means_that_the_caller_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, writer = Disk(), Writer()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer.submit("a", disk.publish, key("a"), item(1))
    assert disk.got == [("a", 1.0, threading.get_ident())]
