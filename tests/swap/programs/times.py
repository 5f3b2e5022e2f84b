"""How long the programs take under ``patch()``, cold and warm, beside MONAI's: measures and saves it."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

from tests.swap.programs.table import PROGRAMS, TIMES, Program, Study, records, run

__all__ = ["measure"]

#: The volumes are so many times larger than in the tests, in each direction: there, starting a thread takes longest.
SCALE = 5

ROUNDS = 5


def measure(folder: Path) -> None:
    """Measures every program that can run here, which takes minutes, and saves the figures.

    Args:
        folder: an empty one, for the volumes and all caches.
    """
    able = [one for one in PROGRAMS.values() if all(map(find_spec, one.needs))]  # the others have no figures
    seconds = {one.name: _seconds(one, folder) for one in able}
    about = {
        "voxels": " x ".join(str(side * SCALE) for side in (24, 22, 20)),
        "rounds": ROUNDS,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[2]),  # of the last quarter of an hour
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    TIMES.write_text(json.dumps({"about": about, "seconds": seconds}, indent=1) + "\n")


def _seconds(one: Program, folder: Path) -> dict[str, float]:
    """The shortest times of a program: MONAI's with its own caches empty, and ours in turns with it."""
    least = dict.fromkeys(("monai", "cold", "warm"), math.inf)
    for number in range(ROUNDS + 1):
        cache = folder / "cache"
        for how in least:
            study = Study(folder / "data", folder / ("monai" if how == "monai" else "ours"), SCALE)
            before = time.perf_counter()
            run(one, study, None if how == "monai" else cache)
            if number:  # the first round loads what is loaded once
                least[how] = min(least[how], round(time.perf_counter() - before, 4))
            records(cache)
        for used in ("cache", "monai", "ours"):
            shutil.rmtree(folder / used, ignore_errors=True)
    return least
