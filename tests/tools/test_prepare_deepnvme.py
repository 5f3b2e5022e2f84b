"""tools/prepare_deepnvme.py: installs what it may, says what it may not, and never fails. apt-get is stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from monai_gds.errors import BackendUnavailable
from monai_gds.storage import Availability
from tests.tools import load_tool

prepare = load_tool("prepare_deepnvme")


class Machine:
    """A Debian machine that lacks packages; which one comes next shows when the one before is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lacks: list[str], *, root: bool = True) -> None:
        self.lacks = lacks
        self.known = True
        self.commands: list[list[str]] = []
        self.built = 0
        monkeypatch.setattr(prepare.os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(prepare.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(prepare.subprocess, "run", self.run)
        monkeypatch.setattr(prepare.build, "probe", self.probe)
        monkeypatch.setattr(prepare.build, "build_ahead", self.build)

    def probe(self, operator: str) -> Availability:
        return Availability(not self.lacks, f"there is no tool (Debian: {self.lacks[0]})" if self.lacks else "")

    def run(self, command: list[str], **_: object) -> SimpleNamespace:
        self.commands.append(command)
        if command[1] == "update":
            self.known = True
        elif self.known:
            self.lacks = [p for p in self.lacks if p not in command]
        return SimpleNamespace(returncode=0 if self.known else 100)

    def build(self, say: object) -> None:
        self.built += 1


def test_installs_what_is_missing_and_builds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(monkeypatch, ["g++", "libaio-dev"])
    prepare.main()
    assert [c[-1] for c in machine.commands] == ["g++", "libaio-dev"]
    assert machine.built == 1
    assert "installing g++" in capsys.readouterr().out


def test_fetches_the_list_of_packages_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, ["g++"])
    machine.known = False
    prepare.main()
    assert [c[1] for c in machine.commands] == ["install", "update", "install"]
    assert machine.built == 1


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(monkeypatch, ["g++"], root=False)
    prepare.main()
    assert machine.commands == []
    assert machine.built == 0
    assert "as root, `apt-get install g++`" in capsys.readouterr().out


def test_a_package_that_does_not_help_is_not_asked_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, ["g++"])
    monkeypatch.setattr(machine, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr(prepare.subprocess, "run", machine.run)
    prepare.main()
    assert machine.built == 0


def test_a_failed_build_is_shown_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(say: object) -> None:
        raise BackendUnavailable("the compiler's last lines")

    Machine(monkeypatch, [])
    monkeypatch.setattr(prepare.build, "build_ahead", fail)
    prepare.main()
    assert "last lines" in capsys.readouterr().out
