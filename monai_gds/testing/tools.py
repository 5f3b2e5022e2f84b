"""What the contract's tests share: bytes to read, limits to run into, and comparisons."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings

#: Bytes around the sizes at which backends change their behaviour: sectors, pages, pieces.
LENGTHS = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000, 65_536, (3 << 20) + 5)
OFFSETS = (0, 1, 511, 512, 513, 4095, 4096, 4097, 10_000, 65_536, (4 << 20) - 1, (8 << 20) - 1, 8 << 20)

#: Bytes of the file that most tests read: more than one piece of any backend, and not a multiple of anything.
BLOB_BYTES = (20 << 20) + 123

property_test = settings(
    max_examples=min(100, settings().max_examples // 2),  # each is a read: the profile's number is for less
    deadline=None,
    # differing_executors: each backend's class inherits the same test, on purpose
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.differing_executors],
)


def content(nbytes: int, seed: int = 0) -> bytes:
    """Random bytes: no two pages are alike, so bytes from a wrong place do not go unnoticed."""
    return np.random.default_rng(seed).bytes(nbytes)


class _Blob(bytes):
    """Is not printed: hypothesis shows all arguments of a test that fails."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@functools.cache
def blob_content() -> bytes:
    """The content of the file that most tests read."""
    return _Blob(content(BLOB_BYTES))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, on the host."""
    return tensor.cpu().numpy().tobytes()


def assert_file(path: Path, expected: bytes) -> None:
    """As :func:`assert_bytes`, for what is in a file."""
    assert_bytes(torch.from_numpy(np.fromfile(path, np.uint8)), expected, str(path))


def assert_bytes(tensor: torch.Tensor, expected: bytes, what: str = "a tensor") -> None:
    """Fails with the position of the first byte that differs; pytest would print both sides in full."""
    got, wanted = tensor.cpu().numpy(), np.frombuffer(expected, np.uint8)
    assert len(got) == len(wanted), f"{what} has {len(got)} bytes instead of {len(wanted)}"
    if not np.array_equal(got, wanted):
        wrong = np.flatnonzero(got != wanted)
        raise AssertionError(f"{what}: {len(wrong)} of {len(got)} bytes are wrong, the first at {wrong[0]}")


def assert_each(tensors: Sequence[torch.Tensor], expected: Sequence[bytes]) -> None:
    """As :func:`assert_bytes`, for several."""
    assert len(tensors) == len(expected)
    for i, (tensor, wanted) in enumerate(zip(tensors, expected, strict=True)):
        assert_bytes(tensor, wanted, f"tensor {i} of {len(tensors)}")


def descriptors() -> int:
    """How many descriptors this process has open."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def error_of(action: Callable[[], object]) -> Exception | None:
    """The exception that ``action`` raises, without its traceback, which would keep tensors alive."""
    try:
        action()
    except Exception as e:
        return e.with_traceback(None)
    return None


@contextmanager
def meanwhile(action: Callable[[], object], pause: float = 0) -> Iterator[None]:
    """Another thread does this again and again during the block."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(pause):
            action()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def without_permission(folder: Path) -> Iterator[None]:
    """Takes the permission to write to ``folder`` from this process, root or not."""
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
