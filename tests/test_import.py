"""Importing the package is cheap until something of it is used, and it has every public name."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import monai_gds


def _modules_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has imported after a statement."""
    script = f"{statement}\nimport sys; print(*{{m.partition('.')[0] for m in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).split())


HEAVY = {"torch", "monai", "numpy", "deepspeed", "kvikio", "cupy", "nvidia", "xnvme", "squirrel"}


@pytest.mark.parametrize(
    "statement", ["import monai_gds", "from monai_gds import StorageError", "import monai_gds.cli"]
)
def test_nothing_heavy_is_imported_before_it_is_used(statement: str) -> None:
    assert not HEAVY & _modules_after(statement)


def test_storage_does_not_import_monai() -> None:
    assert not (HEAVY - {"torch", "numpy"}) & _modules_after("import monai_gds; monai_gds.open_storage('posix', 'cpu')")


def test_every_public_name_is_there() -> None:
    for name in monai_gds.__all__:
        assert getattr(monai_gds, name) is not None
        assert name in dir(monai_gds)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = monai_gds.no_such_name
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from monai_gds import no_such_name")


def test_type_checkers_see_the_same_names() -> None:
    """Type checkers read the imports below TYPE_CHECKING."""
    tree = ast.parse(inspect.getsource(monai_gds))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen | {"__version__"} == set(monai_gds.__all__)
