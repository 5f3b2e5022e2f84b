"""Fuzzing by coverage: bytes that reach new code of the readers are changed further.

It needs atheris, in this Python or in a folder named by ``ATHERIS``; without it there is nothing to run. Checksums are
made right before a record is read, so that the fuzzer need not guess them. What it finds goes to ``corpus/``, which
every run of the tests reads again.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from tests.machines import ROOT
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["CORPUS", "run", "run_again"]

#: Inputs that once found something, by the name of their reader.
CORPUS = Path(__file__).with_name("corpus")

#: How long the fuzzer may take to begin, on a busy machine, and to end.
_START_SECONDS = 900

# The readers are imported inside functions: the fuzzer's process does so under atheris, to see what they run.


def run(soak: Soak) -> None:
    """The corpus; then the fuzzer for the rest of the time, reader by reader."""
    from tests.soak.readers import READERS

    soak.call(run_again, soak.folder / "again")
    if soak.quick:
        return
    if not (os.environ.get("ATHERIS") or importlib.util.find_spec("atheris")):
        pytest.skip("atheris is not installed")
    for number, reader in enumerate(READERS, 1):
        fuzz(soak, reader, max(5.0, soak.share(number / len(READERS)) - time.monotonic()))


def run_again(folder: Path) -> Tally:
    """Reads what is in the corpus, and what the fuzzer begins with."""
    from tests.soak.readers import READERS, reader_of

    tally = Tally()
    folder.mkdir()
    for reader in READERS:
        read, seeds = reader_of(reader, folder / reader)
        kept = [(file.name, file.read_bytes()) for file in sorted((CORPUS / reader).glob("*"))]
        for name, data in [*kept, *((f"seed {number}", seed) for number, seed in enumerate(seeds))]:
            tally.trials += 1
            try:
                read(data)
            except Exception:
                tally.found("lost", f"{reader}, {name}: {traceback.format_exc()[-1500:]}")
    return tally


def fuzz(soak: Soak, reader: str, seconds: float) -> None:
    """Runs libFuzzer in a process of its own, again after each input that it stopped at."""
    folder = soak.folder / reader
    for name in ("corpus", "found", "files"):
        (folder / name).mkdir(parents=True)
    end, seen = time.monotonic() + seconds, set[str]()
    while (left := int(end - time.monotonic())) > 3:
        before = set((folder / "found").iterdir())
        paths = [str(ROOT), os.environ.get("ATHERIS", ""), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [
                sys.executable, "-W", "ignore", "-m", "tests.soak.fuzz", reader, str(folder / "files"),
                f"-max_total_time={left}", "-timeout=20", "-rss_limit_mb=6000", "-max_len=40000",
                "-print_final_stats=1", f"-artifact_prefix={folder}/found/", str(folder / "corpus"),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=left + _START_SECONDS,
        )  # fmt: skip
        for line in done.stderr.splitlines():
            if line.startswith("stat::number_of_executed_units:"):
                soak.tally.trials += int(line.split()[-1])
        if done.returncode == 0:
            return
        said = done.stdout.partition("Uncaught Python exception")[2]
        where = [line.strip() for line in said.splitlines() if line.strip().startswith('File "')][-1:]
        new = set((folder / "found").iterdir()) - before
        kind = "hangs" if any("timeout" in path.name for path in new) else "lost" if where else "crashes"
        if (place := f"{kind} {where}") not in seen:
            seen.add(place)
            soak.tally.found(kind, f"{reader}: {said[-2500:] or done.stderr[-1500:]}")
            for path in new:
                if os.environ.get("SOAK_KEEP"):
                    (Path(os.environ["SOAK_KEEP"]) / f"{reader}-{path.name}").write_bytes(path.read_bytes())
        if not new:
            return  # it cannot even start


def main() -> None:
    """The fuzzer's own process."""
    import atheris  # type: ignore[import-not-found]

    reader, folder = sys.argv[1], Path(sys.argv[2])
    with atheris.instrument_imports(include=["monai_gds"]):
        from tests.soak.readers import reader_of

        read, seeds = reader_of(reader, folder)
    for number, data in enumerate(seeds):
        (Path(sys.argv[-1]) / f"seed{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *sys.argv[3:]], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
