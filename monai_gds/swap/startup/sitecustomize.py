"""Run by Python at its start, in the processes of ``monai-gds run``: MONAI is patched as soon as it is imported.

``sitecustomize`` is a name that others use too. Theirs is run first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Patched(importlib.abc.Loader):
    """Loads a package as its own loader does, and then patches MONAI."""

    def __init__(self, loader: Any, arguments: dict[str, Any]) -> None:
        self._loader, self._arguments = loader, arguments

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        from monai_gds import patch

        patch(**self._arguments)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds MONAI once, for :class:`_Patched`; or ours before it, which are no longer whole where they import MONAI."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ("monai", "monai_gds") or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            spec.loader = _Patched(spec.loader, json.loads(os.environ["MONAI_GDS_PATCH"]))
        return spec


def _run_next() -> None:
    """Runs the ``sitecustomize`` that this one hides, if there is one."""
    here, before = os.path.dirname(os.path.abspath(__file__)), list(sys.path)
    sys.path[:] = [path for path in before if os.path.abspath(path) != here]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as e:
        if e.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine
    finally:
        sys.path[:] = before


if __name__ == "sitecustomize":
    _run_next()
    if "MONAI_GDS_PATCH" in os.environ and "monai" not in sys.modules:
        sys.meta_path.insert(0, _Finder())
