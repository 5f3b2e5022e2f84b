"""Running somebody's script or module unchanged, under :func:`~monai_gds.patch`. Used by ``monai-gds run``.

The processes that it starts are patched too, in whatever way it starts them: spawned workers, what ``torchrun`` and
``subprocess`` start. They inherit variables of the environment, by which Python runs ``startup/sitecustomize.py``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The variable by which a process knows that it is to be patched: the arguments of ``patch`` as JSON.
VARIABLE = "MONAI_GDS_PATCH"


def prepare(**arguments: Any) -> None:
    """Has this process patched, and every Python process that it starts from now on.

    Args:
        arguments: those of :func:`~monai_gds.patch`, which JSON can express.
    """
    from monai_gds.swap.patching import patch

    os.environ[VARIABLE] = json.dumps({**arguments, "cache_dir": os.path.abspath(arguments["cache_dir"])})
    here = str(Path(__file__).parent / "startup")
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != here]
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *paths])
    patch(**arguments)


def run(target: str, arguments: Sequence[str], module: bool) -> None:
    """Runs a script, or a module as ``python -m`` does, as this process's main program.

    Args:
        target: the path of the script, or the name of the module.
        arguments: what it finds in ``sys.argv`` behind its own name.
        module: whether ``target`` names a module.

    Raises:
        ImportError: there is no such module.
        BaseException: whatever it raises.
    """
    sys.argv = [target, *arguments]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
    runpy.run_path(target, run_name="__main__")
