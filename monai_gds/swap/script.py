"""Running somebody's script or module unchanged, under :func:`~monai_gds.patch`. Used by ``monai-gds run``.

Python itself runs it, in the place of this process: its ``__main__``, its threads and Ctrl-C are as without us. It and
the processes that it starts are patched in whatever way they start: spawned workers, what ``torchrun`` and
``subprocess`` start. They inherit variables of the environment, by which Python runs ``startup/sitecustomize.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

#: The variable by which a process knows that it is to be patched: the arguments of ``patch`` as JSON.
VARIABLE = "MONAI_GDS_PATCH"

#: Python's options that would hide the variables, or the folder of the script. Installers put them into our first line.
_ISOLATING = ("-E", "-I", "-P")


def run(target: str, arguments: Sequence[str], module: bool, **patching: Any) -> NoReturn:
    """Replaces this process by ``python target arguments``, with Python's own options kept.

    Args:
        target: the path of the script, or the name of the module.
        arguments: its own arguments.
        module: whether ``target`` names a module, as for ``python -m``.
        patching: the arguments of :func:`~monai_gds.patch`, which JSON can express.
    """
    startup = str(Path(__file__).parent / "startup")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != startup]
    environment = {
        **os.environ,
        VARIABLE: json.dumps({**patching, "cache_dir": os.path.abspath(patching["cache_dir"])}),
        "PYTHONPATH": os.pathsep.join([startup, *paths]),
    }
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    options = [flag for flag in flags if flag not in _ISOLATING]
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")  # which is not among the flags, and torchrun gives
    command = [sys.executable, *options, *["-m"] * module, target, *arguments]
    os.execve(command[0], command, environment)
