"""``monai-gds doctor`` on this machine, with broken libraries, and with wrong usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.command.doctor import show
from monai_gds.doctor import Diagnosis, Finding, Status, examine, probes
from monai_gds.doctor.machine import Machine
from monai_gds.errors import BackendUnavailable
from monai_gds.storage.deepnvme import build
from tests import commands
from tests.commands import Done, on_a_terminal
from tests.fresh import warm
from tests.loopdisk import loop_disk, not_permitted
from tests.machines import ROOT, mounted_tmpfs, read_only
from tests.storage.blockmap.striped import ARRAYS, striped


def doctor(*arguments: object) -> Done:
    return commands.run("doctor", *arguments)


def as_json(result: Done) -> dict[str, Any]:
    told = json.loads(result.stdout)
    assert isinstance(told, dict)
    return told


def test_json_is_all_that_is_printed_and_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 200 << 20) as small:
        done = warm().run("-m", "monai_gds", "doctor", small, "--json", "--measure", "--device", "cpu")
        left = list(small.iterdir())
    assert done.returncode == 0, done.stderr
    assert (done.stderr, left) == ("", [])
    told = json.loads(done.stdout)
    assert set(told) == {"monai_gds", "directory", "device", "works", "default", "findings"}
    assert (told["directory"], told["device"], told["works"], told["default"]) == (str(small), "cpu", True, "posix")
    known = "gpu torch cores directory nvidia-fs p2pdma udev cufile direct io_uring libxnvme blocks tiles dali"
    known += " container default posix kvikio xnvme xnvme-block xnvme-bam deepnvme deepnvme-gds"
    assert set(told["findings"]) >= set(known.split())
    assert told["findings"]["posix"]["status"] == "ok"
    assert told["findings"]["torch"]["details"]["version"] == str(torch.__version__)
    speed = told["findings"]["speed"]
    assert speed["details"]["bytes"] <= 20 << 20
    assert speed["details"]["write"] > 0
    assert speed["details"]["warm"] > 0


def test_a_few_kilobytes_are_no_measurement(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 4 << 20) as small, pytest.raises(OSError, match="less than 1 MiB"):
        probes.speed("cpu", str(small))


def test_a_read_only_directory_fails(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 20 << 20) as small:
        read_only(small)
        result = doctor(small, "--device", "cpu")
    assert result.exit_code == 1
    assert "Read-only file system" in result.stdout


@pytest.mark.long
def test_a_full_drive_fails(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 1 << 20) as small:
        (small / "fill").write_bytes(bytes((1 << 20) - (64 << 10)))
        result = doctor(small, "--device", "cpu", "--json")
        assert sorted(path.name for path in small.iterdir()) == ["fill"]
    assert result.exit_code == 1
    assert "No space left" in as_json(result)["findings"]["default"]["found"]


def package(folder: Path, name: str, code: str) -> Path:
    target = folder / name.replace(".", "/")
    target.mkdir(parents=True)
    (target / "__init__.py").write_text(code)
    return folder


def test_a_library_that_kills_the_process_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package(tmp_path / "fake", "nvidia.dali", "import os\nos.abort()\n"))
    (tmp_path / "fake/nvidia/__init__.py").touch()
    report = examine(tmp_path, device="cpu")
    dali = next(finding for finding in report.findings if finding.name == "dali")
    assert dali.status is Status.MISSING
    assert "SIGABRT" in dali.found
    assert report.works


def test_what_nobody_needs_here_is_not_to_be_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = (
        Finding("dali", Status.OPTIONAL, "no DALI", "pip install dali"),
        Finding("io_uring", Status.MISSING, "no io_uring", "as root: sysctl"),
    )
    show(Diagnosis(Machine().place(tmp_path), "cpu", findings))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "dali: optional: no DALI; to have it: pip install dali",
        "io_uring: missing: no io_uring",
        "io_uring: to do: as root: sysctl",
    ]


def test_a_broken_torch_is_a_row_and_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(
        package(tmp_path / "fake", "torch", "raise ImportError('libcudart.so.13: not found')\n")
    )
    report = examine(tmp_path, device="cpu")
    found = {finding.name: finding for finding in report.findings}
    assert found["torch"].status is Status.FAILED
    assert "libcudart.so.13: not found" in found["torch"].found
    assert found["default"].status is Status.FAILED
    assert not report.works


@pytest.mark.parametrize(
    "arguments", [["--device", "tpu"], ["--build", "everything"], ["--no-such-option"], [__file__]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert doctor(*arguments).exit_code == 2


def test_build_says_what_it_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_ahead(say: Any) -> list[Path]:
        say("compiling")
        return [tmp_path / "aio"]

    monkeypatch.setattr(build, "build_ahead", build_ahead)
    assert json.loads(doctor("--build", "deepnvme", "--json").stdout) == {"built": [str(tmp_path / "aio")]}
    assert doctor("--build", "deepnvme").stdout == f"{tmp_path / 'aio'}\n"


def test_a_build_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_ahead(say: Any) -> list[Path]:
        raise BackendUnavailable("the package deepspeed is not installed")

    monkeypatch.setattr(build, "build_ahead", build_ahead)
    result = doctor("--build", "deepnvme")
    assert (result.exit_code, result.stderr) == (1, "monai-gds: the package deepspeed is not installed\n")


@pytest.mark.long
def test_piped_it_is_one_line_a_finding_and_on_a_terminal_a_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "monai_gds", "doctor", str(tmp_path), "--device", "cpu"]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert piped.returncode == 0
    assert "posix: ok: threads over preadv" in piped.stdout
    assert "\x1b" not in piped.stdout + piped.stderr
    assert "\r" not in piped.stdout + piped.stderr
    shown = on_a_terminal(command)
    assert "\x1b[32mok" in shown
    assert "looking around" in shown


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    told = as_json(doctor(tmp_path, "--json", "--measure"))
    found = told["findings"]
    assert told["works"]
    assert told["device"].startswith("cuda:")
    assert found["gpu"]["status"] == "ok"
    assert found["gpu"]["details"]["devices"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["speed"]["details"]["write"] > 0
    if found["kvikio"]["status"] == "ok":
        assert told["default"] == "kvikio"
        # libcufile takes files exactly where it finds the drive in udev's database.
        assert found["cufile"]["details"]["takes_files"] == (found["udev"]["status"] == "ok"), found["cufile"]
    if found["nvidia-fs"]["status"] != "ok" and found["p2pdma"]["status"] != "ok":
        assert found["cufile"]["status"] != "ok", "it cannot go straight to the GPU here"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_device_that_is_not_here_is_wrong_usage(form: list[str], tmp_path: Path) -> None:
    result = doctor(tmp_path, "--device", "cuda:99", *form)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "device='cuda:99', but" in result.output
    assert "ValueError" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_whether_a_disk_may_be_read_is_found_out_by_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's device rules refuse root what the mode of the device node allows."""
    with loop_disk(tmp_path) as disk:
        told = probes.disk(str(disk.folder))
        assert (told["disk"], told["readable"], told["problem"]) == (disk.device, True, "")
        not_permitted(disk.device, monkeypatch)
        told = probes.disk(str(disk.folder))
    assert (told["disk"], told["readable"], told["problem"]) == (disk.device, False, "Operation not permitted")
    for remedy in ("root", "the group disk", f"--device={disk.device}:r"):
        assert remedy in told["remedy"]


def test_an_array_can_be_read_where_all_of_its_drives_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated one."""
    with striped(tmp_path, *ARRAYS["equal"], Path.exists, monkeypatch) as array:
        told = probes.disk(str(array.disk.folder))
        assert (told["disk"], told["readable"]) == (f"/dev/md0, which lies on {', '.join(array.members)}", True)
        not_permitted(array.members[1], monkeypatch)
        told = probes.disk(str(array.disk.folder))
    assert (told["readable"], told["problem"]) == (False, "Operation not permitted")
    assert f"--device={array.members[1]}:r" in told["remedy"]
