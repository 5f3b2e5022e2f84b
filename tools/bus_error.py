#!/usr/bin/env python3
"""Compiles ``monai_gds/records/bus_error.c``, and prints what belongs into ``bus_error.py`` beside it.

    python tools/bus_error.py

It needs GCC and binutils for each architecture: ``apt install gcc gcc-aarch64-linux-gnu`` on x86-64. Run the code of
the other architecture before you ship it, for instance under qemu-user.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import textwrap
from pathlib import Path

__all__ = ["SOURCE", "compiler", "main", "make"]

SOURCE = Path(__file__).resolve().parent.parent / "monai_gds/records/bus_error.c"

#: No call of a function that is not here, no data beside the code, and `shared` where bus_error.py has it.
_FLAGS = (
    "-Os", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-fPIC", "-ffreestanding", "-fno-stack-protector",
    "-fno-jump-tables", "-fno-tree-loop-distribute-patterns", "-fno-asynchronous-unwind-tables", "-nostdlib", "-static",
    "-Wl,-Ttext=0", "-Wl,--build-id=none", "-Wl,--defsym=shared=0x10000", "-Wl,-e,on_bus_error",
)  # fmt: skip

#: Of each architecture.
_MORE = {"x86_64": [], "aarch64": ["-mno-outline-atomics"]}


def _tool(machine: str, name: str) -> str:
    return name if machine == platform.machine() else f"{machine}-linux-gnu-{name}"


def compiler(machine: str) -> str | None:
    """The name and version of GCC's package for an architecture; None where that or its binutils are missing."""
    if not all(shutil.which(_tool(machine, name)) for name in ("gcc", "objcopy")):
        return None
    first = subprocess.check_output([_tool(machine, "gcc"), "--version"], text=True).partition("\n")[0]
    return re.sub(r".*\((.*?)[+)].*", r"\1", first)  # gcc (Debian 12.2.0-14+deb12u1) 12.2.0


def make(machine: str) -> bytes:
    """The handler's code for an architecture, in base64.

    Raises:
        subprocess.CalledProcessError: it does not compile.
        RuntimeError: the compiler did not put the handler first.
    """
    with tempfile.TemporaryDirectory() as folder:
        linked, code = Path(folder, "handler"), Path(folder, "code")
        subprocess.run([_tool(machine, "gcc"), *_FLAGS, *_MORE[machine], "-o", linked, SOURCE], check=True)
        if struct.unpack_from("<Q", linked.read_bytes(), 24) != (0,):  # the entry point in the header of ELF
            raise RuntimeError("on_bus_error is not at the beginning of the code")
        subprocess.run([_tool(machine, "objcopy"), "-O", "binary", "-j", ".text", linked, code], check=True)
        return base64.b64encode(code.read_bytes())


def main() -> None:
    """Prints the lines of ``bus_error.py``."""
    print(f'_SOURCE = "{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"')
    print(f'_COMPILER = "{compiler(platform.machine())}"\n_CODE = {{')
    for machine in _MORE:
        lines = textwrap.wrap(make(machine).decode(), 100)
        print(f'    "{machine}": (', *(f'        "{line}"' for line in lines), "    ),", sep="\n")
    print("}")


if __name__ == "__main__":
    main()
