"""What every test module shares: the ``gpu`` marker."""

from __future__ import annotations

import platform

import pytest
import torch

pytest.register_assert_rewrite("tests.storage.contract")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    reason = f"no CUDA device on this machine ({platform.node()}, torch {torch.__version__})"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
