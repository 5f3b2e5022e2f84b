"""Shared libraries through ctypes: one way to find and load one, or to tell why it is not there and how to get it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monai_gds.errors import MonaiGdsError

#: What the system's loader says of a library that is nowhere.
_NOT_FOUND = "cannot open shared object file: No such file or directory"


def library(
    name: str | Sequence[str], hint: str, *, functions: Mapping[str, Sequence[Any]] | None = None, package: str = "",
    folder: str = "", load: Callable[[str], ctypes.CDLL] = ctypes.CDLL, error: type[MonaiGdsError] = MonaiGdsError,
) -> Any:  # fmt: skip
    """Loads a shared library.

    Args:
        name: the library's path or file name, or several to try in turn. The system's loader looks for a file name.
        hint: says how to get the library, and what it is for where that is not plain. It ends the message of the error.
        functions: functions that the library must have: by its name, what each returns and the types of its arguments.
        package: the Python package whose wheel may hold the library. It is found, but not imported.
        folder: where in the package the library lies.
        load: loads one: ``ctypes.PyDLL`` for calls that keep the interpreter's lock.
        error: the class of the error.

    Raises:
        MonaiGdsError: none of them can be used. The message gives the reason for each.
    """
    names = [name] if isinstance(name, str) else name
    reasons, absent = [], ""
    if package:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # the package around it is not there
            spec = None
        if spec is None or spec.origin is None:
            absent = f"the package {package} is not installed"
        else:
            names = [*(os.path.join(os.path.dirname(spec.origin), folder, one) for one in names), *names]
    for one in names:
        try:
            found = load(one)
            for function, (returned, *arguments) in (functions or {}).items():
                declared = getattr(found, function)
                declared.restype, declared.argtypes = returned, arguments
            return found
        except (OSError, AttributeError) as e:  # it does not load, or it lacks a function
            reasons.append(str(e) if one in str(e) else f"{one}: {e}")
    if reasons == [f"{one}: {_NOT_FOUND}" for one in names] and "/" not in "".join(names):
        raise error(f"{absent or f'{names[-1]} is not installed'}: {hint}")  # the usual reason
    raise error(f"{names[-1]} cannot be loaded ({'; '.join([*filter(None, [absent]), *reasons])}): {hint}")


def problem_with(load: Callable[[], object]) -> str | None:
    """Why a library cannot be used, by what a function that loads it raises; None if it can be used."""
    try:
        load()
    except MonaiGdsError as e:
        return str(e)
    return None
