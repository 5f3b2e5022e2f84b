"""One-line faults in the package, each of which some test has to notice: ``python -m tests.mutants [TEXT …]``.

``mutants.txt`` lists them in paragraphs of four lines: a file; ``-`` and a text that occurs once in it; ``+`` and what
takes its place; and files of tests, or single ones (``file.py::test``), of which one is to fail. Each mutant is tried
in a copy of this tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".txt")

#: Seconds after which tests count as hanging, which is one way to notice.
PATIENCE = 600


@dataclass(frozen=True)
class Mutant:
    """A fault: ``before`` in ``file`` becomes ``after``, and ``tests`` are to fail."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.before.strip()} -> {self.after.strip()}"

    @property
    def fault(self) -> str | None:
        """What is wrong with this entry of the list, if anything."""
        if not (ROOT / self.file).is_file():
            return "there is no such file"
        count = (ROOT / self.file).read_text().count(self.before)
        if count != 1:
            return f"its text occurs {count} times"
        missing = [test for test in self.tests if not (ROOT / test.split("::")[0]).exists()]
        return f"there is no {missing[0]}" if missing else None


def parse(text: str) -> Iterator[Mutant]:
    """The mutants of a list; lines that begin with ``#`` are comments."""
    for paragraph in "\n".join(line for line in text.splitlines() if not line.startswith("#")).split("\n\n"):
        if not paragraph.strip():
            continue
        file, before, after, tests = paragraph.strip("\n").split("\n")
        assert (before[:2], after.rstrip() and after[:2]) in {("- ", "+ "), ("- ", "+")}, paragraph
        yield Mutant(file, before[2:], after[2:], tuple(tests.split()))


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of this tree, without what is built in it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.chmod(folder, 0o755)  # some tests go on as another user, who reads the code here
        ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")
        yield shutil.copytree(ROOT, Path(folder, "tree"), ignore=ignored)


def run(tree: Path, tests: Sequence[str], patience: float | None = PATIENCE) -> tuple[str, str]:
    """Runs tests in a tree; returns ``passed``, ``failed`` or what else came of it, and what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--tb=line", *tests]
    # bytecode would be taken for current where a mutant is as long as what it replaces and as old
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        return "hung", ""
    return {0: "passed", 1: "failed"}.get(done.returncode, f"status {done.returncode}"), done.stdout + done.stderr


def tried(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """``caught``, ``SURVIVED`` or why it could not be tried, and what pytest printed."""
    if mutant.fault is not None:
        return mutant.fault, ""
    path = tree / mutant.file
    sound = path.read_text()
    path.write_text(sound.replace(mutant.before, mutant.after))
    try:
        outcome, output = run(tree, mutant.tests)
    finally:
        path.write_text(sound)
    return {"failed": "caught", "hung": "caught", "passed": "SURVIVED"}.get(outcome, outcome), output


def main() -> int:
    """Prints a line for each mutant; returns 1 unless each one was caught."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description="Faults that tests have to notice.")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="only mutants whose file contains one of these")
    parser.add_argument("--processes", type=int, default=2, help="how many are tried at a time")
    options = parser.parse_args()
    mutants = [m for m in parse(LIST.read_text()) if not options.texts or any(t in m.file for t in options.texts)]
    if not mutants:
        parser.error(f"no mutant's file contains {' or '.join(options.texts)}")
    uncaught = 0
    with copied_tree() as one:
        tests = sorted({test for mutant in mutants if mutant.fault is None for test in mutant.tests})
        outcome, output = run(one, tests, patience=None)
        if outcome != "passed":
            print(f"{output}\nwithout a mutant, these tests have {outcome}")
            return 1
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.processes):
            trees.put(shutil.copytree(one, one.with_name(str(i))))

        def in_a_tree(mutant: Mutant) -> tuple[str, str, float]:
            tree, began = trees.get(), time.monotonic()
            try:
                return *tried(mutant, tree), time.monotonic() - began
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(options.processes) as pool:
            for mutant, (outcome, output, seconds) in zip(mutants, pool.map(in_a_tree, mutants), strict=True):
                print(f"{outcome:<10}{seconds:5.0f} s  {mutant}", flush=True)
                if outcome != "caught":
                    uncaught += 1
                    print(output[-2000:])
    print(f"{len(mutants) - uncaught} of {len(mutants)} caught")
    return int(uncaught > 0)


if __name__ == "__main__":
    sys.exit(main())
