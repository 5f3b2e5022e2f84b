"""The canonical form of code: alike in every version of Python."""

from __future__ import annotations

import glob
import subprocess
import sys
from pathlib import Path

import monai
import pytest

from tests.fresh import ROOT

#: Prints what counts of each function of some files.
_FORMS = """
import sys
from monai_gds.keys import reads, syntax
for path in sys.argv[1:]:
    for code in reads.with_inner(compile(open(path).read(), path, "exec", dont_inherit=True)):
        if code.co_flags & 2 and (code.co_name == "<lambda>" or code.co_name[0] != "<"):  # no class, and no list
            form, constants = syntax.tree_of(code)
            found = reads.reads_of(code)
            read = [(name, sorted(map(str, paths))) for name, paths in sorted(found.variables.items())]
            print(code.co_qualname, form.hex(), constants, sorted(found.names), read, found.imports, code.co_freevars)
"""

_OTHERS = [p for v in ("3.12", "3.13") for p in glob.glob(f"/root/.pyenv/versions/{v}*/bin/python")]


@pytest.mark.skipif(not _OTHERS, reason="this machine has one version of Python")
def test_functions_of_monai_are_the_same_in_every_version_of_python() -> None:
    files = sorted(map(str, Path(monai.__file__).parent.glob("transforms/[is]*/array.py")))
    forms = [
        subprocess.run([python, "-c", _FORMS, *files], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, *_OTHERS)
    ]
    assert len(forms[0].splitlines()) > 100
    assert len(set(forms)) == 1
