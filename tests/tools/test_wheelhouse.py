"""tools/wheelhouse.py: what it asks pip for, what it splits, and what it says. Without network: pip is recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools import load_tool

wheelhouse = load_tool("wheelhouse")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The calls of pip that were made; building makes a wheel of the project."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", "pip"]
        calls.append(command[3:])
        if command[3] == "wheel":
            (dest,) = (a.partition("=")[2] for a in command if a.startswith("--wheel-dir="))
            (Path(dest) / "monai_gds-9.9-py3-none-any.whl").write_bytes(b"w" * 3_000_000)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(wheelhouse.subprocess, "run", run)
    return calls


def test_platforms_are_all_that_the_machine_can_install() -> None:
    tags = wheelhouse.platforms("2.34")
    for name in ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17"):
        assert f"{name}_x86_64" in tags
    assert {"manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"} < set(tags)
    assert "manylinux_2_35_x86_64" not in tags
    assert tags[0] == "manylinux_2_34_x86_64"
    assert "manylinux_2_28_x86_64" not in wheelhouse.platforms("2.27")


def test_the_target_covers_every_abi() -> None:
    target = wheelhouse.pip_target("3.12", "2.28")
    assert {"--python-version=3.12", "--abi=cp312", "--abi=abi3", "--abi=none", "--only-binary=:all:"} <= set(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--python", "12"], "'12'"),
        (["--python", "3.x"], "'3.x'"),
        (["--glibc", "musl"], "'musl'"),
        (["--extra", "nonsense"], "'nonsense'; there are: bench, cuda12, cuda13"),
    ],
)
def test_what_makes_no_sense_is_named_and_nothing_is_made(
    arguments: list[str], message: str, tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert wheelhouse.main(["--dest", str(tmp_path / "house"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert pip == []
    assert not (tmp_path / "house").exists()


@pytest.mark.parametrize("arguments", [["--only", "x", "--cuda", "13"], ["--split", "0"], ["--cuda", "11"]])
def test_wrong_usage_ends_with_2(arguments: list[str], tmp_path: Path, pip: list[list[str]]) -> None:
    with pytest.raises(SystemExit) as caught:
        wheelhouse.main(["--dest", str(tmp_path), *arguments])
    assert caught.value.code == 2
    assert pip == []


def test_collects_the_project_with_its_extras_and_tries_it(
    tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "house"
    dest.mkdir()
    (dest / "monai_gds-0.0-py3-none-any.whl").write_bytes(b"of the last time")
    arguments = ["--python", "3.12", "--cuda", "13", "--dest", str(dest), "--extra", "test", "--constraint", "c.txt"]
    assert wheelhouse.main(arguments) == 0
    build, download, install = pip
    assert build[0] == "wheel"
    assert build[-1] == str(wheelhouse.ROOT)
    assert download[0] == "download"
    assert download[-1] == str(dest / "monai_gds-9.9-py3-none-any.whl") + "[cuda13,test]"
    assert {"--python-version=3.12", "--platform=manylinux_2_28_x86_64", "--constraint=c.txt"} <= set(download)
    assert {"--no-index", "--dry-run", f"--find-links={dest}"} <= set(install)
    assert "--no-index --find-links house 'monai_gds[cuda13,test]'" in capsys.readouterr().out


def test_only_brings_what_is_named(tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert wheelhouse.main(["--dest", str(tmp_path / "house"), "--only", "kvikio-cu13", "cupy-cuda13x==14.2"]) == 0
    (download,) = pip
    assert download[:2] == ["download", "--no-deps"]
    assert download[-2:] == ["kvikio-cu13", "cupy-cuda13x==14.2"]
    assert "--no-deps 'kvikio-cu13' 'cupy-cuda13x==14.2'" in capsys.readouterr().out


def test_a_failing_pip_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheelhouse.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit) as caught:
        wheelhouse.main(["--dest", str(tmp_path), "--only", "x"])
    assert caught.value.code == 1


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 2000, 3500, (1 << 20) + 7])
def test_parts_are_small_and_make_the_file(nbytes: int, tmp_path: Path) -> None:
    data = bytes(i * 7 % 251 for i in range(nbytes))
    path = tmp_path / "a.whl"
    path.write_bytes(data)
    parts = wheelhouse.split(path, 1000)
    assert all(part.stat().st_size <= 1000 for part in parts)
    assert b"".join(part.read_bytes() for part in parts) == data
    assert path.exists() == (nbytes <= 1000)
    assert len(parts) == max(1, -(-nbytes // 1000))


def test_parts_of_an_earlier_run_do_not_spoil_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    for limit in (10, 40):
        path.write_bytes(bytes(range(100)))
        wheelhouse.split(path, limit)
    assert b"".join(part.read_bytes() for part in sorted(tmp_path.iterdir())) == bytes(range(100))


def test_the_printed_command_puts_the_parts_together(
    tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "wheel house"
    dest.mkdir()
    (dest / "big-1-py3-none-any.whl").write_bytes(bytes(range(256)) * 10_000)
    (dest / "small-1-py3-none-any.whl").write_bytes(b"small")
    assert wheelhouse.main(["--dest", str(dest), "--split", "1"]) == 0
    assert len(list(dest.glob("big-*.part-*"))) == 3
    join, install = [line.strip() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert install.startswith("python -m pip install --no-index")
    _real_run(["sh", "-c", join], cwd=tmp_path, check=True)
    assert (dest / "big-1-py3-none-any.whl").read_bytes() == bytes(range(256)) * 10_000
    assert (dest / "monai_gds-9.9-py3-none-any.whl").stat().st_size == 3_000_000
    assert not list(dest.glob("*.part-*"))


_real_run: Callable[..., object] = subprocess.run
