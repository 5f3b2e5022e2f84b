"""Shared libraries: found, or the reason why not and the remedy."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from monai_gds.base.library import library, problem_with
from monai_gds.errors import BackendUnavailable, MonaiGdsError

HINT = "numbers need it: install glibc"


def test_the_first_that_loads_is_taken_with_its_functions_declared() -> None:
    found = library(("libnot-here.so", "libm.so.6"), HINT, functions={"cos": (ctypes.c_double, ctypes.c_double)})
    assert found.cos(0) == 1.0


@pytest.mark.parametrize(
    ("name", "where", "reason"),
    [
        ("/lib/libnot-here.so", {}, r"libnot-here\.so: cannot open shared object file"),
        ("libm.so.6", {"functions": {"sinus": (ctypes.c_int,)}}, r"libm\.so\.6: undefined symbol: sinus"),
        (
            "libm.so.6",
            {"package": "none.at_all", "functions": {"sinus": (ctypes.c_int,)}},
            r"the package none\.at_all is not installed; .*sinus",
        ),
        ("libnot-here.so", {"package": "torch", "folder": "lib"}, r"torch/lib/libnot-here\.so: cannot open"),
    ],
)
def test_a_library_that_cannot_be_used_has_its_reason_and_a_remedy(
    name: str, where: dict[str, Any], reason: str
) -> None:
    with pytest.raises(MonaiGdsError, match=rf"^{name} cannot be loaded \(.*{reason}.*\): {HINT}$"):
        library(name, HINT, **where)


def test_what_is_not_installed_is_all_that_there_is_to_say() -> None:
    with pytest.raises(MonaiGdsError, match=rf"^libnot-here\.so is not installed: {HINT}$"):
        library(("libnot-here.so.0", "libnot-here.so"), HINT)
    with pytest.raises(MonaiGdsError, match=rf"^the package none\.at_all is not installed: {HINT}$"):
        library("libnot-here.so", HINT, package="none.at_all")


def test_the_error_is_of_the_class_that_its_caller_promises() -> None:
    with pytest.raises(BackendUnavailable, match=HINT):
        library("libnot-here.so", HINT, error=BackendUnavailable)


def test_a_problem_is_told_without_an_error() -> None:
    assert problem_with(lambda: library("libm.so.6", HINT)) is None
    assert HINT in str(problem_with(lambda: library("libnot-here.so", HINT)))


def test_the_library_of_a_wheel_is_taken_before_the_systems() -> None:
    assert "torch/lib" in library("libtorch_cpu.so", HINT, package="torch", folder="lib")._name
