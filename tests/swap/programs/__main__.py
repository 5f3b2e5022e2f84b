"""``python -m tests.swap.programs`` writes the table of programs into ``docs/howto/moving.md`` again.

With ``--measure`` it measures their times first, which takes minutes on a quiet machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.swap.programs import engines, loops, parts, tasks  # noqa: F401  they list their programs
from tests.swap.programs.table import write
from tests.swap.programs.times import measure

if __name__ == "__main__":  # which workers import too
    if "--measure" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder))
    write()
