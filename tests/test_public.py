"""Every public name has a description and an example that runs; so do the examples of other names."""

from __future__ import annotations

import doctest
import inspect
import re
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import monai_gds
import monai_gds.imagenet
import monai_gds.storage
from monai_gds import errors
from tests.machines import ROOT

MODULES = (monai_gds, errors, monai_gds.storage, monai_gds.imagenet)

#: Extras that an example needs.
NEEDS = {
    "DaliIterator": ("nvidia.dali",),
    "IgzipReader": ("isal",),
    "ImageNetDataset": ("nvidia.dali", "PIL"),
    "ImageSource": ("nvidia.dali", "PIL"),
    "dali_iterator": ("nvidia.dali",),
    "open_images": ("PIL",),
    "pack_folder": ("PIL",),
    "rank_states": ("lightning",),
    "squirrel_source": ("nvidia.dali", "squirrel"),
    "verify_packed": ("PIL",),
}

#: Values and aliases have no docstrings: a comment with ``#:`` describes them where they are defined.
VALUES = {"ALIGNMENT", "Buffer", "READERS", "__version__"}


def public() -> dict[str, Any]:
    found = {name: getattr(module, name) for module in MODULES for name in module.__all__}
    return {name: thing for name, thing in sorted(found.items()) if name not in VALUES}


PUBLIC = public()

#: The modules whose docstrings hold examples.
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "monai_gds").rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_exists_and_its_module_has_a_docstring(module: ModuleType) -> None:
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name)


def test_every_error_can_be_caught_by_its_public_name() -> None:
    raised = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert raised <= set(monai_gds.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_it_and_its_public_methods_are_described(name: str) -> None:
    thing = PUBLIC[name]
    assert inspect.getdoc(thing)
    assert thing.__doc__ != getattr(thing.__mro__[1], "__doc__", None) if inspect.isclass(thing) else True
    if inspect.isclass(thing):
        own = [member for at, member in vars(thing).items() if not at.startswith("_") and inspect.isfunction(member)]
        assert [member.__name__ for member in own if not inspect.getdoc(member)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_its_arguments_are_described(name: str) -> None:
    thing = PUBLIC[name]
    if inspect.isclass(thing) and issubclass(thing, (Exception, Warning)):
        return
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return
    documented = inspect.getdoc(thing) or ""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [p.name for p in parameters if p.kind in kinds and not re.search(rf"\b{p.name}\b", documented)]
    assert missing == []


@pytest.mark.parametrize("name", PUBLIC)
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = PUBLIC[name]
    module = inspect.getmodule(thing)
    assert module is not None
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, module=module) or (None,)
    assert test is not None
    assert test.examples, f"{name} has no example"
    monkeypatch.chdir(tmp_path)
    run(test, name)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_of_names_that_are_not_public_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for test in doctest.DocTestFinder().find(import_module(module)):
        name = test.name.removeprefix(f"{module}.")
        if test.examples and name not in PUBLIC:
            folder = tmp_path / name
            folder.mkdir()
            monkeypatch.chdir(folder)
            run(test, name)


def run(test: doctest.DocTest, name: str) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"{package} is not installed on this machine")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_the_version_is_written_in_one_place() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert monai_gds.__version__ == version("monai_gds") == written
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == written
