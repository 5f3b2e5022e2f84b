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
from tests.polls import until


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
    Path(pid_file).with_suffix(".new").write_text(str(child.pid))
    Path(pid_file).with_suffix(".new").rename(pid_file)
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


def test_a_probe_that_hangs_is_killed_with_the_processes_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, wait = tmp_path / "pid", subprocess.Popen.wait

    def out_of_patience(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None or hanging.exists():
            return wait(process, timeout)
        until(hanging.exists)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", out_of_patience)
    told = ask({"hangs": partial(hangs_with_a_child, str(hanging)), "fine": fine}, limit=60)
    assert "no answer within 60 seconds" in told["hangs"].error and told["fine"]
    status = Path(f"/proc/{hanging.read_text()}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()
