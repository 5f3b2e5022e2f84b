"""Probes in processes of their own: whatever one does, there is an answer, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from monai_gds.doctor.isolation import Answer, ask


def fine() -> dict[str, Any]:
    return {"x": os.environ.get("OF_A_TEST", "")}


def broken() -> dict[str, Any]:
    raise RuntimeError("broken wheel")


def noisy() -> dict[str, Any]:
    print('{"noise": 1}', flush=True)
    Path("dropped").touch()
    return {}


def aborts() -> dict[str, Any]:
    os.abort()


def exits() -> dict[str, Any]:
    sys.exit(3)


def fails_to_link() -> dict[str, Any]:
    print("libfoo.so: version mismatch", file=sys.stderr, flush=True)
    os._exit(127)


def hangs_with_a_child(pid_file: str) -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(child.pid))
    time.sleep(600)
    return {}


def test_values_errors_and_deaths(capfd: pytest.CaptureFixture[str]) -> None:
    """Those after one that ends the process are asked all the same."""
    before = os.listdir()
    asked = {"fine": fine, "broken": broken, "noisy": noisy, "aborts": aborts, "exits": exits, "fails": fails_to_link}
    told = ask({**asked, "again": fine}, {"OF_A_TEST": "set"})
    assert told["fine"] == told["again"] == Answer({"x": "set"})
    assert told["broken"].error == "RuntimeError: broken wheel"
    assert told["noisy"]
    assert "SIGABRT" in told["aborts"].error
    assert "exit status 3" in told["exits"].error
    assert "exit status 127): libfoo.so: version mismatch" in told["fails"].error
    assert (os.listdir(), capfd.readouterr()) == (before, ("", ""))


def test_a_probe_that_hangs_is_killed_with_the_processes_it_started(tmp_path: Path) -> None:
    begin = time.monotonic()
    told = ask({"hangs": partial(hangs_with_a_child, str(tmp_path / "pid")), "fine": fine}, limit=6)
    assert "no answer within 6 seconds" in told["hangs"].error and told["fine"]
    assert time.monotonic() - begin < 60
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()
