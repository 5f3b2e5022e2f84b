"""ARCHITECTURE.md and the code agree: the tables there say what each layer may import, and every import is checked."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
KNOWN_CIRCLES: set[str] = set()


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
def rooms() -> dict[str, set[str]]:
    """The folders of the package, from the ground up, and those that the files of each may import from."""
    named = [(quoted(row["room"])[0].rstrip("/"), row["imports"]) for row in table("room")]
    found: dict[str, set[str]] = {}
    for name, imports in named:
        below = {one.strip("` /") for one in imports.split(",")} - {""}
        found[name] = set(found) if below == {"all above"} else below
    return found


def room_of(file: str) -> str:
    """The folder of a file; ``monai_gds`` for those at the top."""
    return file.rpartition("/")[0] or "monai_gds"


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


def room_violations() -> Iterator[Import]:
    for found in ours():
        room, below = room_of(found.file), room_of(files()[found.module])
        top = below == "monai_gds" or found.file == "__main__.py"
        if room != below and not top and below not in rooms()[room] and not found.type_only:
            yield found


def private_violations() -> Iterator[Import]:
    """A module whose name begins with an underscore is for its own folder."""
    for found in ours():
        target = Path(files()[found.module])
        own = target.parent in Path(found.file).parents
        if target.name.startswith("_") and not target.name.startswith("__") and not own:
            yield found


def package_violations() -> Iterator[Import]:
    """Packages that only some layers may import, and optional ones, which are imported inside functions."""
    for row in table("package"):
        packages = quoted(row["package"])
        allowed = {name.strip("` /") for name in row["rooms"].split(",")}
        for found in all_imports():
            if found.module.partition(".")[0] not in packages or found.type_only:
                continue
            if allowed == {"inside functions"}:
                if not found.in_function:
                    yield found
            elif room_of(found.file) not in allowed:
                yield found


def test_every_folder_is_a_room_that_imports_rooms_above_its_row() -> None:
    assert {room_of(file) for file in files().values()} == set(rooms())
    seen: set[str] = set()
    for room, below in rooms().items():
        assert below <= seen, room
        seen.add(room)


def test_imports_follow_the_tables() -> None:
    still = check(room_violations()) | check(private_violations()) | check(package_violations())
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


#: How many files, methods and lines one may have to look at in one place.
MOST_FILES, MOST_FILES_AT_THE_TOP, MOST_METHODS, MOST_LINES = 14, 8, 20, 60

#: What is still larger. None may be added, and one that shrank must be removed here.
KNOWN_LARGE: set[str] = set()


def large() -> Iterator[str]:
    """Folders with too many files, classes with too many methods, functions with too many lines."""
    for room in rooms():
        here = [file for file in files().values() if room_of(file) == room]
        if len(here) > (MOST_FILES_AT_THE_TOP if room == "monai_gds" else MOST_FILES):
            yield room
    for file in files().values():
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.ClassDef):
                if sum(isinstance(one, ast.FunctionDef) for one in node.body) > MOST_METHODS:
                    yield f"{file}:{node.name}"
            elif isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
                end = node.end_lineno or 0
                head = node.body[0].lineno - node.lineno if ast.get_docstring(node) is not None else 0
                if end - (first.lineno if head else node.lineno) + 1 + head > MOST_LINES:
                    yield f"{file}:{node.name}"


def test_nothing_is_too_large_to_look_at() -> None:
    assert set(large()) == KNOWN_LARGE


@pytest.mark.parametrize("room", sorted(set(rooms()) - {"monai_gds"}))
def test_the_page_says_what_every_file_of_a_room_is_for(room: str) -> None:
    """A file is described by the first sentence of its docstring."""
    for file in (file for file in files().values() if room_of(file) == room):
        tree = ast.parse((PACKAGE / file).read_text())
        assert ast.get_docstring(tree) or not tree.body, f"monai_gds/{file} has no docstring that says what it is for"
