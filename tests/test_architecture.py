"""ARCHITECTURE.md and the code agree: the tables there say what each layer may import, and every import is checked."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from tests.machines import ROOT

PACKAGE = ROOT / "monai_gds"

#: Imports that the tables forbid and that are still there: (file, what it imports). None may be added, and one that is
#: gone must be removed here.
KNOWN: set[tuple[str, str]] = set()

#: Files of circles that are still there.
KNOWN_CIRCLES = {"dataset.py", "describe.py", "engines.py", "populate.py"}


@dataclass(frozen=True)
class Layer:
    """A row of the table."""

    name: str
    patterns: tuple[str, ...]
    imports: frozenset[str]


@dataclass(frozen=True)
class Import:
    """An import of a module, or of a package that is not ours."""

    file: str
    line: int
    module: str
    type_only: bool
    in_function: bool

    def __str__(self) -> str:
        return f"monai_gds/{self.file}:{self.line} imports {self.module}"


def table(heading: str) -> list[dict[str, str]]:
    """The table of ARCHITECTURE.md whose first column has this heading."""
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = [
        re.split(r" ?\| ?", line.strip("|")) for line in takewhile(lambda line: line.startswith("|"), lines[start:])
    ]
    headings = [cell.strip() for cell in rows[0]]
    return [dict(zip(headings, (cell.strip() for cell in row), strict=True)) for row in rows[2:]]


def quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


@cache
def layers() -> tuple[Layer, ...]:
    found = table("layer")
    return tuple(
        Layer(row["layer"], quoted(row["where"]), frozenset(n.strip() for n in row["imports"].split(",") if n.strip()))
        for row in found
    )


def layer_of(file: str) -> Layer:
    """The row that names the file, or else the first row with a pattern that matches."""
    for matches in (str.__eq__, fnmatch):
        for layer in layers():
            if any(matches(file, pattern) for pattern in layer.patterns):
                return layer
    raise AssertionError(f"monai_gds/{file} is in no layer of ARCHITECTURE.md")


@cache
def files() -> dict[str, str]:
    """Files by the names of their modules."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = str(path.relative_to(PACKAGE))
    return names


def imports_in(file: str) -> Iterator[Import]:
    tree = ast.parse((PACKAGE / file).read_text())
    type_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    in_functions = {n for node in ast.walk(tree) if isinstance(node, functions) for n in ast.walk(node)}
    for node in ast.walk(tree):
        modules: Iterable[str] = ()
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"monai_gds/{file}:{node.lineno} is a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name if name in files() else str(node.module) for name in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]  # "monai_gds.storage.posix:PosixStorage" is imported by its name
            modules = [name] if name.startswith("monai_gds.") and name in files() else []
        for module in modules:
            if files().get(module) != file:
                yield Import(file, node.lineno, module, node in type_only, node in in_functions)


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for file in files().values() for found in imports_in(file))


def ours() -> list[Import]:
    return [found for found in all_imports() if found.module in files()]


def check(violations: Iterable[Import]) -> set[tuple[str, str]]:
    """Fails with every violation that is not known; returns those that are."""
    found = list(violations)
    new = [str(one) for one in found if (one.file, one.module) not in KNOWN]
    assert not new, "ARCHITECTURE.md forbids this:\n" + "\n".join(new)
    return {(one.file, one.module) for one in found}


def layer_violations() -> Iterator[Import]:
    for found in ours():
        layer, below = layer_of(found.file), layer_of(files()[found.module])
        if layer != below and below.name not in layer.imports and not found.type_only:
            yield found


def private_violations() -> Iterator[Import]:
    """A module whose name begins with an underscore is for its own folder."""
    for found in ours():
        target = Path(files()[found.module])
        own = target.parent in Path(found.file).parents or layer_of(found.file).name == "storage"
        if target.name.startswith("_") and not target.name.startswith("__") and not own:
            yield found


def package_violations() -> Iterator[Import]:
    """Packages that only some layers may import, and optional ones, which are imported inside functions."""
    for row in table("package"):
        packages = quoted(row["package"])
        allowed = {name.strip() for name in row["layers"].split(",")}
        for found in all_imports():
            if found.module.partition(".")[0] not in packages or found.type_only:
                continue
            if allowed == {"inside functions"}:
                if not found.in_function:
                    yield found
            elif layer_of(found.file).name not in allowed:
                yield found


def test_every_file_is_in_a_layer_and_every_layer_imports_layers() -> None:
    names = {layer.name for layer in layers()}
    assert len(names) == len(layers())
    for layer in layers():
        assert layer.imports <= names, layer.name
    assert {layer_of(file).name for file in files().values()} <= names


def test_no_row_imports_one_above_it() -> None:
    order = [layer.name for layer in layers()]
    for position, layer in enumerate(layers()):
        assert layer.imports <= set(order[position + 1 :]), layer.name


def test_imports_follow_the_tables() -> None:
    still = check(layer_violations()) | check(private_violations()) | check(package_violations())
    assert still == KNOWN, "these are gone: remove them from KNOWN"


def test_packages_of_the_table_are_no_standard_modules() -> None:
    named = {name for row in table("package") for name in quoted(row["package"])}
    assert not named & sys.stdlib_module_names


def circles() -> set[str]:
    """Files that import one another, directly or not; imports for types count too."""
    reached: dict[str, set[str]] = {file: set() for file in files().values()}
    for found in ours():
        reached[found.file].add(files()[found.module])

    def below(file: str) -> set[str]:
        seen: set[str] = set()
        todo = [file]
        while todo:
            new = reached[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    return {file for file in reached if file in below(file)}


def test_there_are_no_circles() -> None:
    assert circles() == KNOWN_CIRCLES


FOLDERS = ("bench", "cache", "doctor", "imagenet", "loader", "storage")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_says_what_every_file_of_a_folder_is_for(folder: str) -> None:
    """Commands, which explain themselves, and the ``__init__`` files need no row."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    rows = {name for line in page.splitlines() if line.startswith(f"| `{folder}/") for name in quoted(line)}
    named = {name for name in rows if name.startswith(f"{folder}/")}
    there = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / folder).rglob("*.py")}
    assert named <= there
    assert {name for name in there - named if not name.endswith(("__init__.py", "cli.py"))} == set()
