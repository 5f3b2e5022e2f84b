"""What every test module shares: the ``gpu`` marker, and a Ctrl-C that means the same wherever the tests run."""

from __future__ import annotations

import platform
import signal

import pytest
import torch

pytest.register_assert_rewrite("tests.storage.contract")


def pytest_configure() -> None:
    """Takes Ctrl-C: a shell has what a script starts in the background ignore it, and processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    reason = f"no CUDA device on this machine ({platform.node()}, torch {torch.__version__})"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
