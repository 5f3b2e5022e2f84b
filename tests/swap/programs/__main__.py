"""``python -m tests.swap.programs`` writes the table of programs into ``docs/howto/moving.md`` again."""

from __future__ import annotations

from tests.swap.programs import engines, loops, parts, tasks  # noqa: F401  they list their programs
from tests.swap.programs.table import write

write()
