"""The count of how often threads give Python's lock back."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import pytest

from tests.machines import ROOT


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("cc") or platform.machine() != "x86_64", reason="this machine has no cc or no x86")
def test_the_loaders_thread_is_counted_line_by_line() -> None:
    said = subprocess.run([sys.executable, "-m", "tools.lock_count"], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    threads, lines = said.stdout.split("turns of the lock per batch, by ")[1:]
    counts = {name: float(count) for count, name in (line.split(None, 1) for line in threads.splitlines()[1:] if line)}
    assert counts["monai-gds-loader"] > 10
    named = sum(float(line.split()[0]) for line in lines.splitlines()[1:] if line)
    assert named == pytest.approx(counts["monai-gds-loader"], rel=0.2)
