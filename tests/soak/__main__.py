"""Runs campaigns, one after another, and prints the tally: ``python -m tests.soak --minutes 10 kills damage``."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.fresh import Interpreter
from tests.soak.campaigns import CAMPAIGNS, PRELOAD, tally_of
from tests.soak.tally import Tally


def main() -> int:
    """Returns 1 if anything was found that should not be."""
    parser = argparse.ArgumentParser("python -m tests.soak", description="Campaigns of faults against the cache.")
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(CAMPAIGNS)}; all by default")
    parser.add_argument("--minutes", type=float, default=10, help="for all of them together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of their random numbers")
    options = parser.parse_args()
    names = options.campaigns or list(CAMPAIGNS)
    if unknown := [name for name in names if name not in CAMPAIGNS]:
        parser.error(f"no campaign {unknown[0]!r}: choose of {', '.join(CAMPAIGNS)}")
    end, total = time.monotonic() + 60 * options.minutes, Tally()
    print(f"seed {options.seed}\n{'campaign':<12}{'s':>6}{Tally.head()}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    folder.chmod(0o755)
    try:
        with Interpreter(*PRELOAD) as interpreter:
            for left, name in zip(range(len(names), 0, -1), names, strict=True):
                began = time.monotonic()
                tally = tally_of(name, folder / name, interpreter, max(1.0, end - began) / left, options.seed)
                print(f"{name:<12}{time.monotonic() - began:>6.0f}{tally.row()}", flush=True)
                for note in [*tally.skipped, *tally.notes]:
                    print("    " + note.replace("\n", "\n    "), flush=True)
                total.add(tally)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'all':<18}{total.row()}", flush=True)
    return int(total.bad > 0)


if __name__ == "__main__":
    sys.exit(main())
