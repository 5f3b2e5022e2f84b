"""``monai-gds doctor``: what it says of machines laid out in a folder, of broken libraries, and of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds import doctor as doctor_package
from monai_gds.doctor import Finding, Report, Status, examine, findings, probes
from monai_gds.doctor.asking import Answer, Request, ask
from monai_gds.doctor.machine import Machine
from monai_gds.errors import BackendUnavailable
from monai_gds.storage import deepnvme_build
from tests import commands
from tests.commands import Done, on_a_terminal
from tests.loopdisk import loop_disk, not_permitted
from tests.machines import ROOT, mounted_tmpfs, read_only

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
H100 = {"name": "NVIDIA H100 80GB HBM3", "bytes": 85_000_000_000, "capability": "9.0"}


class Laid:
    """A machine laid out in a folder. Its cache directory is ``cache``, on whatever ``mount`` says."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.environment: dict[str, str] = {}
        self.file("proc/self/mountinfo", "22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n")

    def file(self, path: str, text: str = "") -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def mount(self, kind: str, number: str, source: str = "/dev/nvme0n1p1", options: str = "rw") -> None:
        point = os.path.realpath(self.cache)
        with (self.root / "proc/self/mountinfo").open("a") as table:
            table.write(f"40 22 {number} / {point} rw,relatime shared:1 - {kind} {source} {options}\n")

    def drive(self, number: str, name: str, *, partition: str = "", rotates: bool = False, model: str = "") -> None:
        whole = f"sys/devices/pci0/{name}"
        self.file(f"{whole}/queue/rotational", f"{int(rotates)}\n")
        self.file(f"{whole}/device/model", f"{model}\n")
        if partition:
            self.file(f"{whole}/{partition}/partition", "1\n")
        link = self.root / "sys/dev/block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / whole / partition)

    def with_gpu(self, driver: str = OPEN_DRIVER) -> None:
        self.file("proc/driver/nvidia/version", driver)
        self.file("dev/nvidiactl")

    def on_nvme(self) -> None:
        self.mount("ext4", "259:3", options="rw,data=ordered")
        self.drive("259:3", "nvme0n1", partition="nvme0n1p1", model="Fast Drive 9000")

    def ready_for_p2pdma(self) -> None:
        self.file("proc/kallsyms", "0000000000000000 d p2pdma_pgmap_ops\n")
        self.file("proc/driver/nvidia/params", 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n')
        self.file("sys/module/nvme_core/parameters/multipath", "N\n")
        self.file("etc/cufile.json", '{ // NVIDIA\'s comments\n "properties": {\n "use_pci_p2pdma": true\n }\n}\n')

    @property
    def machine(self) -> Machine:
        return Machine(self.root, self.environment)

    def findings(self, answers: Mapping[str, Answer], unwritable: str = "") -> dict[str, Finding]:
        machine = self.machine
        collected = findings.collect(machine, machine.place(self.cache), unwritable, answers)
        return {finding.name: finding for finding in collected}


@pytest.fixture
def laid(tmp_path: Path) -> Laid:
    return Laid(tmp_path)


def answers(gpu: bool = True, **more: Answer) -> dict[str, Answer]:
    """What the libraries of a machine in order say; with ``gpu``, one H100."""
    values: dict[str, Any] = {"version": "2.11.0+cu130", "cuda": "13.0", "devices": [H100], "problem": ""}
    values |= {"target": "cuda:0"} if gpu else {"version": "2.13.0+cpu", "cuda": None, "devices": [], "target": "cpu"}
    default = Answer({"backend": "kvikio" if gpu else "posix", "reason": "auto: for a test"})
    kvikio = Answer({"ok": gpu, "of_use": gpu, "reason": "KvikIO 26.10 through cuFile", "remedy": ""})
    return {"torch": Answer(values), "backend kvikio": kvikio, "default": default, **more}


# What the kernel tells.


def test_a_directory_that_does_not_exist_yet_is_looked_at_through_what_is_above_it(laid: Laid) -> None:
    laid.on_nvme()
    place = laid.machine.place(laid.cache / "run 7" / "records")
    assert place.folder == laid.cache
    assert place.mount is not None
    assert (place.mount.kind, place.number) == ("ext4", "259:3")
    assert place.drive is not None
    assert (place.drive.name, place.drive.is_nvme, place.drive.model) == ("nvme0n1", True, "Fast Drive 9000")
    words = findings.directory(place, "").found
    assert "does not exist yet" in words
    assert "Fast Drive 9000" in words


def test_a_file_is_no_cache_directory(laid: Laid) -> None:
    (laid.cache / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(NotADirectoryError, match="file is not a directory"):
            laid.machine.place(laid.cache / path)


def test_of_two_mounts_at_one_place_the_later_one_is_seen(laid: Laid) -> None:
    laid.mount("ext4", "259:3")
    laid.mount("xfs", "259:4")
    mount = laid.machine.place(laid.cache).mount
    assert mount is not None
    assert mount.kind == "xfs"


@pytest.mark.parametrize(
    ("kind", "number", "advice"),
    [
        ("tmpfs", "0:40", "memory"),
        ("overlay", "0:41", "--volume"),
        ("nfs4", "0:42", "another machine"),
        ("ext4", "259:3", ""),
    ],
)
def test_file_systems_that_do_not_suit_a_cache(laid: Laid, kind: str, number: str, advice: str) -> None:
    laid.mount(kind, number)
    found = laid.findings(answers())["directory"]
    assert advice in found.remedy
    assert found.status is (Status.NOTE if advice else Status.OK)


@pytest.mark.parametrize(("name", "advice"), [("sda", "spinning"), ("vda", "")])
def test_a_spinning_disk_is_told_and_a_virtual_one_is_not_believed(laid: Laid, name: str, advice: str) -> None:
    laid.mount("ext4", "8:0", f"/dev/{name}")
    laid.drive("8:0", name, rotates=True)
    assert advice in laid.findings(answers())["directory"].remedy
    assert bool(laid.findings(answers())["directory"].remedy) == bool(advice)


@pytest.mark.parametrize(
    ("text", "version", "is_open"), [(OPEN_DRIVER, "580.65.06", True), (CLOSED_DRIVER, "535.183.01", False)]
)
def test_the_driver(laid: Laid, text: str, version: str, is_open: bool) -> None:
    laid.with_gpu(text)
    driver = laid.machine.driver
    assert driver is not None
    assert (driver.version, driver.is_open) == (version, is_open)


@pytest.mark.parametrize(
    ("prepare", "kind"),
    [
        (lambda laid: None, None),
        (lambda laid: laid.file(".dockerenv"), "docker"),
        (lambda laid: laid.file("run/.containerenv"), "podman"),
        (lambda laid: laid.environment.update(KUBERNETES_SERVICE_HOST="10.0.0.1"), "kubernetes"),
        (lambda laid: laid.environment.update(container="lxc"), "lxc"),
    ],
)
def test_containers(laid: Laid, prepare: Any, kind: str | None) -> None:
    prepare(laid)
    assert laid.machine.container == kind


# The GPU.


def test_a_gpu_with_its_driver(laid: Laid) -> None:
    laid.with_gpu()
    found = laid.findings(answers())["gpu"]
    assert found.status is Status.OK
    for words in ("H100", "79 GiB", "580.65.06", "open kernel modules"):
        assert words in found.found


def test_without_a_driver_nothing_is_wrong(laid: Laid) -> None:
    found = laid.findings(answers(gpu=False))
    assert (found["gpu"].status, found["gpu"].remedy) == (Status.MISSING, "")
    for name in ("nvidia-fs", "p2pdma", "udev", "cufile", "kvikio"):
        assert found[name].status is Status.UNUSED, name
    assert Report(laid.machine.place(laid.cache), "cpu", tuple(found.values())).works


@pytest.mark.parametrize(
    ("values", "environment", "remedy"),
    [
        ({"cuda": None, "version": "2.13.0+cpu"}, {}, "built without CUDA"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "unset"),
        ({"problem": "CUDA driver version is insufficient"}, {}, "insufficient"),
    ],
)
def test_why_torch_sees_no_gpu(laid: Laid, values: dict[str, Any], environment: dict[str, str], remedy: str) -> None:
    laid.with_gpu()
    laid.environment |= environment
    told = answers()
    told["torch"] = Answer({**told["torch"].values, "devices": [], "target": "cpu", **values})
    found = laid.findings(told)["gpu"]
    assert found.status is Status.NOTE
    assert remedy in found.remedy


# cuFile.


def test_udev_knows_the_drive(laid: Laid) -> None:
    laid.with_gpu()
    laid.on_nvme()
    laid.file("run/udev/data/b259:3", "I:1\nE:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\nS:disk/by-id/x\n")
    assert laid.findings(answers())["udev"].status is Status.OK


def test_without_udev_its_entry_can_be_made_as_the_remedy_says(laid: Laid) -> None:
    laid.with_gpu()
    laid.on_nvme()
    found = laid.findings(answers())["udev"]
    assert found.status is Status.MISSING
    assert "refuses" in found.found
    assert found.remedy.startswith("of use once there is nvidia-fs or P2PDMA: as root: ")
    laid.file("proc/driver/nvidia-fs/version", "version: 2.25.7\n")
    remedy = laid.findings(answers())["udev"].remedy
    command = remedy.removeprefix("as root: ").replace("/run/udev", f"{laid.root}/run/udev")
    subprocess.run(command, shell=True, check=True)
    assert laid.findings(answers())["udev"].status is Status.OK


def test_an_entry_without_a_file_system_is_not_enough(laid: Laid) -> None:
    """As of a partitioned drive, or of one that was formatted behind udev's back."""
    laid.with_gpu()
    laid.on_nvme()
    laid.file("run/udev/data/b259:3", "E:ID_PART_TABLE_TYPE=gpt\n")
    found = laid.findings(answers())["udev"]
    assert found.status is Status.MISSING
    assert "259:3" in found.found


def test_a_file_system_without_a_device_is_nothing_for_cufile(laid: Laid) -> None:
    laid.with_gpu()
    laid.mount("tmpfs", "0:40", "tmpfs")
    found = laid.findings(answers())["udev"]
    assert found.status is Status.MISSING
    assert "XFS" in found.remedy


def test_a_container_is_told_what_to_be_started_with(laid: Laid) -> None:
    laid.with_gpu()
    laid.file(".dockerenv")
    laid.mount("overlay", "0:41", "overlay")
    laid.mount("tmpfs", "0:42", "shm", "rw,size=65536k")
    shm = (laid.root / "proc/self/mountinfo").read_text().splitlines()[-1].replace(str(laid.cache), "/dev/shm")
    laid.file("proc/self/mountinfo", f"40 22 0:41 / / rw - overlay overlay rw\n{shm}\n")
    laid.file("proc/self/limits", "Max locked memory         8388608              8388608              bytes     \n")
    laid.file("proc/driver/nvidia-fs/version", "version: 2.25.7\n")
    remedy = laid.findings(answers())["container"].remedy
    for option in ("/run/udev:/run/udev:ro", "memlock=-1", "--ipc=host", "NVIDIA_GDS=enabled", "/cache"):
        assert option in remedy
    assert "--gpus" not in remedy
    assert "--gpus=all" in laid.findings(answers(gpu=False))["container"].remedy


def test_a_container_in_order_needs_nothing(laid: Laid) -> None:
    laid.with_gpu()
    laid.file(".dockerenv")
    laid.on_nvme()
    laid.file("run/udev/data/b259:3", "E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n")
    laid.file("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes     \n")
    found = laid.findings(answers())["container"]
    assert (found.status, found.remedy) == (Status.OK, "")


def test_nvidia_fs(laid: Laid) -> None:
    laid.with_gpu()
    assert laid.findings(answers())["nvidia-fs"].status is Status.MISSING
    laid.file("proc/modules", "nvidia_fs 258048 0 - Live 0x0000000000000000 (OE)\n")
    found = laid.findings(answers())["nvidia-fs"]
    assert found.status is Status.NOTE
    assert "modprobe" in found.remedy
    laid.file("dev/nvidia-fs0")
    laid.file("proc/driver/nvidia-fs/version", "version: 2.25.7\n")
    found = laid.findings(answers())["nvidia-fs"]
    assert (found.status, found.details["version"]) == (Status.OK, "2.25.7")


def test_p2pdma_says_each_thing_that_is_missing(laid: Laid) -> None:
    laid.with_gpu(CLOSED_DRIVER)
    found = laid.findings(answers())["p2pdma"]
    assert found.status is Status.MISSING
    for missing in ("an NVMe drive", "in the kernel", "open kernel modules", "cuFile's setting"):
        assert missing in found.found
    laid.with_gpu()
    laid.on_nvme()
    laid.ready_for_p2pdma()
    assert laid.findings(answers())["p2pdma"].status is Status.OK
    laid.file("etc/cufile.json", '{"properties": {\n // "use_pci_p2pdma": true\n}}')
    assert "use_pci_p2pdma" in laid.findings(answers())["p2pdma"].remedy
    laid.environment["CUFILE_USE_PCIP2PDMA"] = "true"
    found = laid.findings(answers())["p2pdma"]
    assert found.status is Status.OK
    assert "KVIKIO_COMPAT_MODE=OFF" in found.remedy
    laid.environment["KVIKIO_COMPAT_MODE"] = "off"
    assert laid.findings(answers())["p2pdma"].remedy == ""


def test_what_cufile_did_when_it_was_tried(laid: Laid) -> None:
    laid.with_gpu()
    laid.on_nvme()
    laid.file("run/udev/data/b259:3", "E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n")
    assert laid.findings(answers())["cufile"].status is Status.MISSING

    log = "NOTICE  cufio:293 cuFileHandleRegister GDS not supported, using cuFile posix read/write with compat mode"
    found = laid.findings(answers(cufile=Answer({"log": [log]})))["cufile"]
    assert (found.status, found.details["compatibility_mode"]) == (Status.NOTE, True)
    found = laid.findings(answers(cufile=Answer({"log": []})))["cufile"]
    assert (found.status, found.details["compatibility_mode"]) == (Status.OK, False)

    refused = Answer(
        {"log": ["NOTICE  x", "ERROR  cufio-udev:67 udev property not found: ID_FS_USAGE vda"]}, "not registered"
    )
    found = laid.findings(answers(cufile=refused))["cufile"]
    assert found.status is Status.MISSING
    assert "not registered" in found.found
    assert "ID_FS_USAGE" in found.found


def test_cufile_is_tried_without_kvikio_s_own_ways_and_its_log_is_read(
    laid: Laid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(request: Request, environment: Mapping[str, str] | None = None, **_: Any) -> dict[str, Answer]:
        if request.only != ("cufile",):
            return answers()
        assert environment is not None
        assert environment["KVIKIO_COMPAT_MODE"] == "OFF"
        Path(environment["CUFILE_LOGFILE_PATH"]).write_text("ERROR  cufio-udev:67 udev property not found\n")
        return {"cufile": Answer({}, "file descriptor is not registered")}

    laid.with_gpu()
    monkeypatch.setattr(doctor_package, "ask", ask)
    report = examine(laid.cache, machine=laid.machine)
    found = {finding.name: finding for finding in report.findings}["cufile"]
    assert "file descriptor is not registered" in found.found
    assert found.details["log"] == ["ERROR  cufio-udev:67 udev property not found"]
    assert report.works
    assert list(laid.cache.iterdir()) == []


# The other rows.


def test_a_backend_says_its_reason_and_remedy(laid: Laid) -> None:
    told = {"ok": False, "of_use": True, "reason": "no compiler", "remedy": "install g++"}
    found = laid.findings(answers(**{"backend deepnvme": Answer(told)}))["deepnvme"]
    assert (found.status, found.found, found.remedy) == (Status.MISSING, "no compiler", "install g++")


def test_a_directory_that_takes_no_files_is_a_failure(laid: Laid) -> None:
    found = laid.findings(answers(), unwritable="Read-only file system")
    assert found["directory"].status is Status.FAILED
    assert "Read-only file system" in found["directory"].found
    assert found["default"].status is Status.FAILED


def test_a_default_that_does_not_work_is_a_failure(laid: Laid) -> None:
    found = laid.findings(answers(default=Answer({}, "no space left")))["default"]
    assert found.status is Status.FAILED
    assert "no space left" in found.found


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_device_that_is_not_here_is_wrong_usage(form: list[str], tmp_path: Path) -> None:
    result = doctor(tmp_path, "--device", "cuda:99", *form)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "device='cuda:99', but" in result.output
    assert "ValueError" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_system_is_not_one_of_zero_gigabytes(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 30 << 20) as small:
        found = findings.directory(Machine().place(small), "").found
    assert "of 31.5 MB free" in found


def test_what_to_install_for_dali_is_a_remedy(laid: Laid) -> None:
    told = Answer({}, "NVIDIA DALI cannot be imported (No module named 'nvidia'): pip install 'monai_gds[dali-cuda12]'")
    found = laid.findings(answers(dali=told))["dali"]
    assert found.found == "NVIDIA DALI cannot be imported (No module named 'nvidia')"
    assert found.remedy == "pip install 'monai_gds[dali-cuda12]'"


def test_io_uring(laid: Laid) -> None:
    assert laid.findings(answers(io_uring=Answer({"files": 64})))["io_uring"].status is Status.OK
    refused = answers(io_uring=Answer({}, "[Errno 1] Operation not permitted"))
    found = laid.findings(refused)["io_uring"]
    assert found.status is Status.MISSING
    assert "Operation not permitted" in found.found
    laid.file(".dockerenv")
    assert "seccomp" in laid.findings(refused)["io_uring"].remedy
    laid.file("proc/sys/kernel/io_uring_disabled", "2\n")
    assert "sysctl" in laid.findings(refused)["io_uring"].remedy


def test_a_disk_that_may_not_be_read_says_how_it_may(laid: Laid) -> None:
    library = Answer({"version": "0.7.5", "drivers": [], "found": "/lib/libxnvme.so"})
    told = {"kind": "ext4", "disk": "/dev/vda", "readable": False, "problem": "Operation not permitted"}
    found = laid.findings(answers(libxnvme=library, blocks=Answer(told)))["blocks"]
    assert (found.status, found.found) == (Status.MISSING, "xnvme-block cannot read /dev/vda: Operation not permitted")
    for remedy in ("root", "the group disk", "--device=/dev/vda:r"):
        assert remedy in found.remedy
    readable = {**told, "readable": True, "problem": ""}
    assert laid.findings(answers(libxnvme=library, blocks=Answer(readable)))["blocks"].status is Status.OK


def test_whether_a_disk_may_be_read_is_found_out_by_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's device rules refuse root what the mode of the device node allows."""
    with loop_disk(tmp_path) as disk:
        told = probes._blocks(str(disk.folder))
        assert (told["disk"], told["readable"], told["problem"]) == (disk.device, True, "")
        not_permitted(disk.device, monkeypatch)
        told = probes._blocks(str(disk.folder))
    assert (told["disk"], told["readable"], told["problem"]) == (disk.device, False, "Operation not permitted")


@pytest.mark.parametrize("step", ["torch", "start"])
def test_a_torch_that_does_not_answer_is_a_failure(laid: Laid, step: str) -> None:
    found = laid.findings({step: Answer({}, "no answer within 120 seconds")})
    assert found["torch"].status is Status.FAILED
    assert "no answer" in found["torch"].found


def test_speed(laid: Laid) -> None:
    told = {"bytes": 1 << 29, "write": 1.2, "backend": "posix", "cold": None, "cold_problem": "Invalid argument",
            "warm": 12.0, "warm_problem": ""}  # fmt: skip
    words = laid.findings(answers(speed=Answer(told)))["speed"].found
    assert "512 MiB" in words
    assert "not measured, Invalid argument" in words
    assert "12.00 GB/s" in words


# Asking.


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: str, limit: float = 120) -> dict[str, Answer]:
    """Asks a stand-in for the probes; ``steps`` is the body of its ``steps(request)``."""
    folder.mkdir(exist_ok=True)
    code = (
        "import json, os, sys, time\n"
        "from monai_gds.doctor import probes\n"
        "from monai_gds.doctor.asking import Request\n"
        "def die(): os.abort()\n"
        "def raises(): raise RuntimeError('broken wheel')\n"
        f"def steps(request):\n    {steps}\n"
        "probes.steps = steps\n"
        "probes.main(Request(**json.loads(sys.argv[1])))\n"
    )
    (folder / "stand_in.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    return ask(Request("/"), module="stand_in", limit=limit)


def test_steps_that_raise_die_or_print_spoil_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (
        "yield from [('a', lambda: {'x': 1}), ('b', raises), ('c', lambda: print('{\"noise\": 1}') or {}), "
        "('d', die), ('e', lambda: sys.exit(3)), ('f', lambda: {'x': 2})]"
    )
    told = stand_in(tmp_path / "code", monkeypatch, steps)
    assert list(told) == ["a", "b", "c", "d", "e", "f"]
    assert told["a"].values == {"x": 1}
    assert told["b"].error == "RuntimeError: broken wheel"
    assert told["c"]
    assert "SIGABRT" in told["d"].error
    assert "exit status 3" in told["e"].error
    assert told["f"].values == {"x": 2}


def test_a_step_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    steps = "yield from [('a', lambda: time.sleep(600)), ('b', lambda: {})]"
    told = stand_in(tmp_path / "code", monkeypatch, steps, limit=10)  # long enough for a process to begin
    assert "no answer within 10 seconds" in told["a"].error
    assert told["b"]
    assert time.monotonic() - begin < 100


def test_last_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = "yield 'a', lambda: (print('libfoo.so: version mismatch', file=sys.stderr, flush=True), os._exit(127))"
    told = stand_in(tmp_path / "code", monkeypatch, steps)
    assert "libfoo.so: version mismatch" in told["a"].error


def test_what_cannot_begin_says_so(tmp_path: Path) -> None:
    told = ask(Request("/"), module="monai_gds_no_such_module", limit=30)
    assert "No module named" in told["start"].error


# This machine.


def doctor(*arguments: object) -> Done:
    return commands.run("doctor", *arguments)


def as_json(result: Done) -> dict[str, Any]:
    told = json.loads(result.stdout)
    assert isinstance(told, dict)
    return told


def test_json_is_all_that_is_printed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monai_gds", "doctor", str(tmp_path), "--json", "--device", "cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert set(told) == {"monai_gds", "directory", "device", "works", "default", "findings"}
    assert (told["directory"], told["device"], told["works"], told["default"]) == (str(tmp_path), "cpu", True, "posix")
    known = "gpu torch directory nvidia-fs p2pdma udev cufile io_uring libxnvme blocks dali container default"
    known += " posix kvikio xnvme xnvme-block deepnvme deepnvme-gds"
    assert set(told["findings"]) >= set(known.split())
    assert told["findings"]["posix"]["status"] == "ok"
    assert told["findings"]["torch"]["details"]["version"] == str(torch.__version__)
    assert list(tmp_path.iterdir()) == []


def test_measure_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 200 << 20) as small:
        result = doctor(small, "--measure", "--json", "--device", "cpu")
        speed = as_json(result)["findings"]["speed"]
        assert list(small.iterdir()) == []
    assert speed["details"]["bytes"] <= 20 << 20
    assert speed["details"]["write"] > 0
    assert speed["details"]["warm"] > 0


def test_a_read_only_directory_fails(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 20 << 20) as small:
        read_only(small)
        result = doctor(small, "--device", "cpu")
    assert result.exit_code == 1
    assert "Read-only file system" in result.stdout


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

    monkeypatch.setattr(deepnvme_build, "build_ahead", build_ahead)
    assert json.loads(doctor("--build", "deepnvme", "--json").stdout) == {"built": [str(tmp_path / "aio")]}
    assert doctor("--build", "deepnvme").stdout == f"{tmp_path / 'aio'}\n"


def test_a_build_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_ahead(say: Any) -> list[Path]:
        raise BackendUnavailable("the package deepspeed is not installed")

    monkeypatch.setattr(deepnvme_build, "build_ahead", build_ahead)
    result = doctor("--build", "deepnvme")
    assert (result.exit_code, result.stderr) == (1, "monai-gds: the package deepspeed is not installed\n")


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
