"""Sizes and budgets are on one page, ``monai_gds/limits.py``; what may be elsewhere is listed here, with the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from monai_gds import limits
from tests.machines import ROOT

PACKAGE = ROOT / "monai_gds"

#: The wings keep their own limits; the others are tools around the library.
EXEMPT = ("limits.py", "storage/blockmap/", "storage/deepnvme/", "storage/xnvme/", "bench/", "doctor/", "testing/")

#: Constants that look like limits, by file and name.
ALLOWED = {
    # the file format
    ("pipeline/global_draws.py", "_ITEMS"): "how many items tell",
    ("records/writing.py", "LARGE"): "which tensors are aligned",
    ("records/header.py", "_LONGEST"): "safetensors'",
    ("base/dtypes.py", "MOST_AXES"): "NumPy's",
    ("records/header.py", "_MOST_HOLES"): "a ratio",
    ("items/types.py", "MAX_DEPTH"): "nesting that a record may have",
    ("folder/index.py", "_MOST"): "what a file system counts up to",
    ("shared/leases.py", "_MOST_BYTES"): "more than a lease has",
    ("items/rounding.py", "ROUNDED_BYTES"): "decides values of items, so it belongs to the key",
    ("items/rounding.py", "_CHUNK"): "fits the processor's cache",
    ("items/rounding.py", "_MOST"): "of float32's bits",
    ("tiles/palette.py", "MOST_VALUES"): "what indices of two bytes tell apart",
    ("tiles/runs.py", "_MOST_VALUES"): "what indices of one byte tell apart",
    ("tiles/runs.py", "_CHUNK"): "fits the processor's cache",
    ("tiles/palette.py", "_CHUNK"): "fits the processor's cache",
    ("tiles/blosc.py", "HEADER_BYTES"): "Blosc2's",
    ("items/decoding.py", "_MOST_BYTES"): "what NumPy refuses",
    ("items/decoding.py", "_MOST_OF_NO_SIZE"): "no honest record has more",
    # interfaces of the kernel and of the processor
    ("storage/memory.py", "HUGE"): "the size of a huge page",
    ("storage/plain/uring.py", "_OFFSET_SQES"): "linux/io_uring.h",
    ("storage/plain/uring.py", "_WORD"): "the ring counts in 32 bits",
    ("base/checksum.py", "_MASK"): "sums are modulo 2**64",
    ("keys/source_names.py", "_MOST_CHARACTERS"): "the kernel's PATH_MAX",
    # times, and patience
    ("keys/source_memo.py", "_TICK"): "nanoseconds",
    ("keys/source_memo.py", "_CLOCKS_DIFFER"): "nanoseconds",
    ("keys/observed.py", "_BEHIND"): "nanoseconds",
    ("dataset/populate.py", "_PATIENCE_ITEMS"): "a time, in mean times per item",
    # text
    ("pipeline/words.py", "_MOST_PATHS"): "of a message",
    ("pipeline/words.py", "_MOST_CHARACTERS"): "of a message",
    ("base/console.py", "_UNLIMITED"): "columns of a table that is not cut off",
}

LOOKS_LIKE_A_LIMIT = re.compile(r"_?(MOST|MAX|MIN|LIMIT)_.*|.*_(BYTES|ITEMS|MOST|MAX|LIMIT)")


def value(node: ast.expr) -> object:
    """The value of an expression of literals; None for any other."""
    if any(isinstance(inner, (ast.Name, ast.Call, ast.Attribute)) for inner in ast.walk(node)):
        return None
    return eval(compile(ast.Expression(node), "", "eval"))


def constants(source: str) -> Iterator[tuple[str, int]]:
    """Name and value of each whole number that a module defines in capitals."""
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        found = value(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            numbers = found if isinstance(found, tuple) else [found]
            for name, number in zip(names, numbers, strict=False):
                if isinstance(name, ast.Name) and name.id.isupper() and type(number) is int:
                    yield name.id, number


def strays(folder: Path) -> set[tuple[str, str]]:
    """File and name of each constant outside ``limits.py`` that looks like a limit."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.py")}
    return {
        (file, name)
        for file, path in files.items()
        if not file.startswith(EXEMPT)
        for name, number in constants(path.read_text())
        if number >= 64 << 10 or LOOKS_LIKE_A_LIMIT.fullmatch(name)
    }


def test_sizes_and_budgets_are_on_one_page() -> None:
    assert strays(PACKAGE) - ALLOWED.keys() == set(), "belongs into monai_gds/limits.py, with its reason"
    assert ALLOWED.keys() - strays(PACKAGE) == set(), "is gone: remove it from ALLOWED"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("HEADS_BYTES = 5", True),
        ("_QUEUE_ITEMS: int = 5", True),
        ("_MOST_KNOWN = 5", True),
        ("A, BIG = 1, 1 << 20", True),
        ("_CHUNK = 64 << 10", True),
        ("AHEAD = 4", False),
        ("SECONDS_BYTES = 5.0", False),
        ("HEADS_BYTES = limits.HEADS_BYTES", False),
        ("def read(): HEADS_BYTES = 5", False),
    ],
)
def test_a_limit_elsewhere_is_found(tmp_path: Path, line: str, found: bool) -> None:
    (tmp_path / "module.py").write_text(line)
    assert bool(strays(tmp_path)) == found


def page() -> list[str]:
    return Path(limits.__file__).read_text().splitlines()


def test_every_limit_is_a_number_with_a_reason_and_used() -> None:
    everywhere = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    lines = page()
    for name, number in constants("\n".join(lines)):
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{name} ="))
        while re.match(r"[A-Z]", lines[at - 1]):  # one reason for several
            at -= 1
        assert lines[at - 1].startswith("#:"), f"{name} has no reason"
        assert number > 0
        assert f"limits.{name}" in everywhere, f"{name} is not used"


def test_the_page_imports_nothing() -> None:
    imported = [line for line in page() if re.match(r"\s*(import|from) ", line)]
    assert imported == ["from __future__ import annotations"]
