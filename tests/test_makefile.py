"""The Makefile: what it would run, without running it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.machines import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="this machine has no make")


def would_run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["make", "--dry-run", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_demo_on_the_gpu_after_one_on_the_cpu_installs_what_it_needs(tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    assert "-c constraints.txt -e .\n" in would_run(tmp_path, "demo")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.core").touch()  # as the first demo leaves it
    assert "install" not in would_run(tmp_path, "demo")
    on_gpu = would_run(tmp_path, "demo", "EXTRAS=cuda12", "CONSTRAINTS=")
    assert "-e .[cuda12]" in on_gpu
    assert "constraints.txt" not in on_gpu
    assert ".venv-cuda12/bin/monai-gds demo" in on_gpu


def test_only_the_long_tests_wait_for_a_compiler() -> None:
    """The commands of both targets, in a checkout that was never set up."""
    quick, long = (would_run(ROOT, target, "VENV=.venv-of-nobody") for target in ("test", "test-long"))
    assert "prepare_deepnvme" in long
    assert "prepare_deepnvme" not in quick
    assert "--hypothesis-profile=long" in long


def test_the_site_needs_nothing_but_its_own_extra() -> None:
    would = would_run(ROOT, "docs", "VENV=.venv-of-nobody")
    assert "-e .[docs]\n" in would
    assert "dev" not in would
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras["docs"] if name.startswith("monai_gds")] == ["monai_gds[bench]"]


def test_a_soak_takes_the_minutes_and_the_campaigns_that_it_is_given() -> None:
    given = would_run(ROOT, "soak", "VENV=.venv-of-nobody", "MINUTES=2", "CAMPAIGNS=kills disks")
    assert "-m tests.soak --minutes 2 kills disks" in given


def test_the_lowest_versions_are_those_that_the_package_allows() -> None:
    listed = [line for line in (ROOT / "tests/lowest.txt").read_text().splitlines() if not line.startswith("#")]
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(re.sub(r"(\.0)+$", "", line.replace("==", ">=")) for line in listed) == sorted(allowed)
