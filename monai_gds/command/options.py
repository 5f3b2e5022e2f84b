"""Options that several commands share, checked while the command line is parsed.

Neither torch nor MONAI is imported before an option is used: ``--help`` and the shell's completion wait for imports.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from monai_gds.base.units import bytes_of
from monai_gds.errors import meant

if TYPE_CHECKING:
    from monai_gds.dataset.dataset import GDSDataset

#: How the names of this package's files begin.
PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"

T = TypeVar("T")
D = TypeVar("D")


def app(summary: str, example: str) -> typer.Typer:
    """A group of commands, with its help and an example of one of them."""
    return typer.Typer(no_args_is_help=True, help=summary, epilog=f"Example: monai-gds {example}")


def known_device(name: str | None) -> str | None:
    """Refuses a device that this machine does not have."""
    if name not in (None, "cpu"):  # every machine has one, and torch takes seconds to import
        from monai_gds.storage import resolve_device

        parsed(lambda text: resolve_device(int(text) if text.isdecimal() else text), name, None)
    return name


def one_of(known: Collection[str], names: Iterable[str], option: str | None = None) -> None:
    """Refuses names that are not known."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint=option)


def _known_backend(name: str) -> str:
    """Checks that the backend exists. Whether it works here is checked when it is opened."""
    if name != "auto":
        from monai_gds.storage.registry import backend_names

        one_of(["auto", *backend_names()], [name])
    return name


def parsed(parse: Callable[[str], T], text: str | None, default: D, option: str | None = None) -> T | D:
    """The value of an option, or its default. A ValueError of ``parse`` is wrong usage."""
    try:
        return default if text is None else parse(text)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint=option) from None


def _heap(size: str | None) -> str | None:
    """Refuses a value that is not a size. The backend takes it as it is."""
    parsed(partial(bytes_of, argument="--heap-bytes", least=1), size, None)
    return size


DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda:N; default: a GPU if there is one.", callback=known_device)
]
BackendOption = Annotated[
    str, typer.Option(help="The storage backend: auto, or one that `monai-gds doctor` lists.", callback=_known_backend)
]
HeapOption = Annotated[
    str | None,
    typer.Option(
        "--heap-bytes",
        help="With --be upcie: the memory that it takes in huge pages, 128MiB for example; default: 1GiB.",
        callback=_heap,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DatasetFunction = Annotated[str, typer.Argument(help="module:function. The function returns a GDSDataset.")]
DatasetArguments = Annotated[
    list[str] | None, typer.Argument(help="The function's arguments, such as fold=3.", metavar="KEY=VALUE")
]


def _named(arguments: Sequence[str]) -> dict[str, Any]:
    """``fold=3 name=ct`` as ``{"fold": 3, "name": "ct"}``: values are Python literals, or else text."""
    found = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not (equals and name.isidentifier()):
            raise typer.BadParameter(f"{argument!r} does not have the form key=value", param_hint="KEY=VALUE")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


class UsersError(Exception):
    """An error of the user's function or its module, the cause of this one."""


@contextmanager
def _users_code() -> Iterator[None]:
    """Makes a :class:`UsersError` of what the user's code raises. What this package raises on its call stays."""
    try:
        yield
    except Exception as e:
        if traceback.extract_tb(e.__traceback__)[-1].filename.startswith(PACKAGE):
            raise
        raise UsersError from e


def dataset_from(function: str, arguments: Sequence[str]) -> GDSDataset:
    """Imports ``module:function``, calls it with ``arguments``, each ``key=value``, and checks what it returns."""
    named = _named(arguments)
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        what = f"{function!r} does not have the form module:function: name a function of yours that returns the dataset"
        raise typer.BadParameter(what, param_hint="FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        with _users_code():
            found = importlib.import_module(module)
    except UsersError as e:
        missing = e.__cause__.name if isinstance(e.__cause__, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise  # the module exists; it may import one that does not
        hint = ": a module is named as in `import`, without .py" if module.endswith(".py") else ""
        what = f"no module {missing!r} in {os.getcwd()} or installed{hint}"
        raise typer.BadParameter(what, param_hint="FUNCTION") from None
    make = getattr(found, name, None)
    if not callable(make):
        hint = meant(name, (one for one, value in vars(found).items() if callable(value)))
        raise typer.BadParameter(f"the module {module!r} has no function {name!r}{hint}", param_hint="FUNCTION")
    try:
        inspect.signature(make).bind(**named)
    except TypeError as e:
        raise typer.BadParameter(f"{function}: {e}; give its arguments as key=value", param_hint="FUNCTION") from None
    with _users_code():
        dataset = make(**named)
    from monai_gds.dataset.dataset import GDSDataset

    if not isinstance(dataset, GDSDataset):
        kind = type(dataset).__name__
        raise typer.BadParameter(f"{function} returned a value of type {kind}, not a GDSDataset", param_hint="FUNCTION")
    return dataset
