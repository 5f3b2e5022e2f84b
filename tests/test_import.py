"""Importing the package is cheap until something of it is used, and it has every public name."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import monai_gds
from monai_gds.bench.made_up import write_image_folder


def _modules_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has imported after a statement."""
    script = f"{statement}\nimport sys; print(*{{m.partition('.')[0] for m in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).split())


HEAVY = {"torch", "monai", "numpy", "deepspeed", "kvikio", "cupy", "nvidia", "xnvme", "squirrel"}


@pytest.mark.parametrize(
    "statement", ["import monai_gds", "from monai_gds import StorageError", "import monai_gds.command.main"]
)
def test_nothing_heavy_is_imported_before_it_is_used(statement: str) -> None:
    assert not HEAVY & _modules_after(statement)


def test_storage_does_not_import_monai() -> None:
    assert not (HEAVY - {"torch", "numpy"}) & _modules_after("import monai_gds; monai_gds.open_storage('posix', 'cpu')")


def test_images_do_not_import_monai(tmp_path: Path) -> None:
    """Not even where they are packed, shuffled and read: MONAI's import takes more time and memory than torch's."""
    pytest.importorskip("PIL", reason="Pillow is not installed on this machine")
    images = write_image_folder(tmp_path / "images", 3)
    statement = f"""if True:
        from monai_gds import ImageNetDataset
        from monai_gds.imagenet import open_images, pack_folder

        pack_folder(open_images({str(images)!r}), {str(tmp_path / "packed")!r})
        assert len(list(ImageNetDataset({str(tmp_path / "packed")!r}, 2, device="cpu", decode=False))) == 2"""
    assert not (HEAVY - {"torch", "numpy"}) & _modules_after(statement)


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
    assert {*seen, *monai_gds.errors.__all__, "__version__"} == set(monai_gds.__all__)
