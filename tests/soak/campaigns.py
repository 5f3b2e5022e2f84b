"""The campaigns, in the order in which they run."""

from __future__ import annotations

import importlib
import random
import traceback
from pathlib import Path

import pytest

from tests.fresh import Interpreter
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["CAMPAIGNS", "PRELOAD", "tally_of"]

#: Names of modules of this folder, and what each does.
CAMPAIGNS = {
    "kills": "processes killed, stopped, interrupted at every place",
    "damage": "records flipped, cut, spliced, and replaced by every kind of file",
    "hostile": "records, packed images and block maps written on purpose, whose checksums hold",
    "disks": "disks that are full, read-only, failing, coarse in time, or gone",
    "crowd": "eight processes that fill, read, verify and prune; four ranks",
    "endurance": "thousands of epochs, after which nothing has grown",
    "power": "copies of ext4 and XFS in the middle of writing",
    "fuzz": "readers fuzzed by coverage, where atheris is installed",
}


#: What their processes import.
PRELOAD = [f"tests.soak.{name}" for name in CAMPAIGNS]


def tally_of(name: str, folder: Path, interpreter: Interpreter, seconds: float, seed: int = 0) -> Tally:
    """Runs a campaign for about so long, and returns what it counted. Exceptions of its own are counted, too."""
    folder.mkdir(parents=True)
    soak = Soak(folder, interpreter, seconds, random.Random(f"{name} {seed}"))
    try:
        importlib.import_module(f"tests.soak.{name}").run(soak)
    except pytest.skip.Exception as e:
        soak.tally.skipped.append(str(e))
    except Exception:
        soak.tally.found("other", f"the campaign failed: {traceback.format_exc()[-2000:]}")
    return soak.tally
