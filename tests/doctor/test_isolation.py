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


@pytest.mark.parametrize("fresh", [False, True])
def test_values_errors_and_deaths(fresh: bool, capfd: pytest.CaptureFixture[str]) -> None:
    before = os.listdir()
    assert ask(fine, {"OF_A_TEST": "set"}, fresh=fresh) == Answer({"x": "set"})
    assert ask(broken, fresh=fresh).error == "RuntimeError: broken wheel"
    assert ask(noisy, fresh=fresh)
    assert "SIGABRT" in ask(aborts, fresh=fresh).error
    assert "exit status 3" in ask(exits, fresh=fresh).error
    assert "exit status 127): libfoo.so: version mismatch" in ask(fails_to_link, fresh=fresh).error
    assert (os.listdir(), capfd.readouterr()) == (before, ("", ""))


def test_the_environment_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(fine)
    monkeypatch.setenv("OF_A_TEST", "later than the server's start")
    assert ask(fine).values == {"x": "later than the server's start"}


def test_a_temporary_folder_with_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("n" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert ask(fine)


def test_a_probe_that_hangs_is_killed_with_the_processes_it_started(tmp_path: Path) -> None:
    assert ask(fine)
    begin = time.monotonic()
    answer = ask(partial(hangs_with_a_child, str(tmp_path / "pid")), limit=6)
    assert "no answer within 6 seconds" in answer.error
    assert time.monotonic() - begin < 60
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()
