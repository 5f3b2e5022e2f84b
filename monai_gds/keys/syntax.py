"""Code by its syntax tree, in a form that every version of Python gives alike.

Bytecode differs between 3.11, 3.12 and 3.13. Where the source of a function is there and belongs to it, the function
counts by its tree: without comments, formatting, docstrings, and annotations that run nothing. The source belongs to
it if compiling it gives the function's bytecode. Nothing is run.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import linecache
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from monai_gds.keys.reads import with_inner


class Tree(NamedTuple):
    """The canonical form of some code."""

    form: bytes  # the digest of everything but the constants
    constants: tuple[Any, ...]  # its texts and numbers, in their order


class _Source:
    """A file that was compiled: its tree, the code in it, and the forms of functions made so far."""

    def __init__(self, lines: list[str], name: str) -> None:
        self.lines = lines
        self.module = ast.parse("".join(lines))
        self.code = set(with_inner(compile(self.module, name, "exec", dont_inherit=True)))
        self.trees: dict[types.CodeType, Tree | None] = {}


#: By the name of the file; None if it does not compile, or there is none.
_sources: dict[str, tuple[list[str], _Source | None]] = {}

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def tree_of(code: types.CodeType) -> Tree | None:
    """The tree of a function, given its code; None if there is no source of it."""
    name = code.co_filename
    linecache.checkcache(name)
    lines = linecache.getlines(name)
    known, source = _sources.get(name, (None, None))
    if known is not lines:
        source = None
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            source = _Source(lines, name) if lines else None
        _sources[name] = lines, source
    if source is None or code not in source.code:
        return None
    if code not in source.trees:
        node = _node_of(code, source.module)
        source.trees[code] = None if node is None else _tree(node)
    return source.trees[code]


def tree_of_file(path: str) -> tuple[Tree, types.CodeType | None]:
    """The tree of a file of Python code, and the code; of any other file, what stands for its content, and None."""
    with open(path, "rb") as file:
        content = file.read()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        module = ast.parse(content)
        return _tree(module), compile(module, path, "exec", dont_inherit=True)
    return Tree(hashlib.blake2b(content, digest_size=16).digest(), ()), None


def _node_of(code: types.CodeType, module: ast.Module) -> _Function | None:
    """The function of a tree that some code was compiled from; None if several look alike."""
    found = [node for node in _around(module, code.co_firstlineno) if getattr(node, "name", "<lambda>") == code.co_name]
    if code.co_name == "<lambda>":  # there may be several in a line, and each in another
        spans = [
            (a, c, b, d) for a, b, c, d in code.co_positions() if a and b and d and c is not None and (a, c) != (b, d)
        ]
        found = [node for node in found if all(_covers(node.body, *span) for span in spans)]
        found = [node for node in found if not any(other is not node and other in ast.walk(node) for other in found)]
    return found[0] if len(found) == 1 else None


def _around(node: ast.AST, line: int) -> Iterator[Any]:
    """The functions below a node that begin in a line."""
    for child in ast.iter_child_nodes(node):
        first = min([getattr(child, "lineno", 0), *(each.lineno for each in getattr(child, "decorator_list", ()))])
        if first <= line <= getattr(child, "end_lineno", line):
            if first == line and isinstance(child, _Function):
                yield child
            yield from _around(child, line)


def _covers(node: Any, line: int, column: int, end_line: int, end_column: int) -> bool:
    begins = (node.lineno, node.col_offset) <= (line, column)
    return begins and (end_line, end_column) <= (node.end_lineno, node.end_col_offset)


def _tree(node: ast.AST) -> Tree:
    words: list[str] = []
    constants: list[Any] = []
    _write(node, words, constants, frozenset(("name", "decorator_list", "defaults", "kw_defaults")))
    return Tree(hashlib.blake2b("\n".join(words).encode(), digest_size=16).digest(), tuple(constants))


#: Fields that do not count. Where variables of a function are annotated, nothing is run; classes keep the annotations.
_NOISE = frozenset(("ctx", "kind", "type_comment", "type_ignores", "returns"))
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
_SCOPES = (*_DOCUMENTED, ast.Lambda)


def _write(node: Any, words: list[str], constants: list[Any], without: frozenset[str], scope: Any = None) -> None:
    """Writes a node as words, in which constants are left out.

    A function counts without what is run where it is defined, such as its defaults (``without``), but what is inside
    it counts with all of that.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes, int, float, complex)):
        words.append("constant")
        constants.append(node.value)
        return
    if not isinstance(node, ast.AST):
        words.append(repr(node))
        return
    if isinstance(node, ast.AnnAssign) and isinstance(scope, _Function) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    words.append(type(node).__name__)
    for name in sorted(node._fields):
        value = getattr(node, name, None)
        is_unused = name == "annotation" and isinstance(node, ast.arg)
        if name in _NOISE or name in without or is_unused or value is None or value == []:
            continue
        if name == "body" and isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if isinstance(node, ast.JoinedStr):
            value = _joined(value)
        words.append(f"{name} {len(value) if isinstance(value, list) else ''}")
        within = without if isinstance(value, ast.arguments) else frozenset()
        for each in value if isinstance(value, list) else (value,):
            _write(each, words, constants, within, node if isinstance(node, _SCOPES) else scope)


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, each text in one piece, as Python 3.12 and later have them."""
    found: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Constant) and found and isinstance(found[-1], ast.Constant):
            found[-1] = ast.Constant(str(found[-1].value) + str(part.value))
        elif not isinstance(part, ast.Constant) or part.value:
            found.append(part)
    return found
