"""Tests of ``tools/``: its scripts are loaded by their path; ``tools/bench`` is a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_tool(name: str) -> ModuleType:
    """``tools/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
