"""The doctor's findings on machines laid out in a folder."""

from __future__ import annotations

import ctypes
import fcntl
import grp
import os
import pwd
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from monai_gds import doctor as doctor_package
from monai_gds.doctor import Diagnosis, Status, examine, findings, probes
from monai_gds.doctor.isolation import Answer
from monai_gds.doctor.machine import Machine
from tests.doctor.laid import CLOSED_DRIVER, Laid, answers
from tests.machines import in_child, mounted_tmpfs, shared_folder
from tests.storage.xnvme import libraries


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
    ("file", "text", "found"),
    [
        ("sys/devices/pci0/sda/device/ioerr_cnt", "0x1f\n", "31 failed commands"),
        ("sys/devices/pci0/sda/device/iotmo_cnt", "0x2\n", "2 commands that timed out"),
        ("sys/fs/ext4/sda1/errors_count", "4\n", "4 errors of the file system"),
        ("sys/fs/ext4/sda/errors_count", "4\n", ""),
        ("sys/devices/pci0/sda/device/ioerr_cnt", "0x0\n", ""),
    ],
)
def test_a_drive_that_counts_errors_is_told_with_what_survives_them(
    laid: Laid, file: str, text: str, found: str
) -> None:
    laid.mount("ext4", "8:1", "/dev/sda1")
    laid.drive("8:1", "sda", partition="sda1")
    laid.file(file, text)
    row = laid.findings(answers())["directory"]
    assert found in row.found
    assert row.status is (Status.NOTE if found else Status.OK)
    assert ("CacheOptions(mmap=False)" in row.remedy) == ("SIGBUS" in row.remedy) == bool(found)
    assert bool(row.details["errors"]) == bool(found)


def test_an_nvme_drive_is_asked_for_its_errors(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: what linux/nvme_ioctl.h asks for, and where the NVMe specification has the answer."""
    laid.on_nvme()
    laid.file("dev/nvme0n1")
    assert laid.findings(answers())["directory"].status is Status.OK, "not a device: it does not answer"

    def answer(fd: int, request: int, command: bytes) -> None:
        opcode, nsid, address, nbytes, page = struct.unpack("=B3xI8x8xQ4xII28x", command)
        assert (request, opcode, nsid, nbytes, page) == (0xC0484E41, 2, 0xFFFFFFFF, 512, 0x007F0002)
        ctypes.memmove(address + 160, (7).to_bytes(16, "little"), 16)

    monkeypatch.setattr(fcntl, "ioctl", answer)
    row = laid.findings(answers())["directory"]
    assert "the drive counts 7 unreadable blocks" in row.found
    assert row.details["errors"] == {"unreadable blocks": 7}


# Sharing.


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (0o700, "OWNER alone can read and add records"),
        (0o755, "everybody can read records, OWNER alone can add them"),
        (0o750, "OWNER and the group GROUP can read records, OWNER alone can add them"),
        (0o2770, "OWNER and the group GROUP can read and add records"),
        (0o2775, "everybody can read records, OWNER and the group GROUP can add them"),
        (0o777, "everybody can read and add records"),
        (0o1777, "everybody can read and add records; only a record's owner can delete or replace it (sticky bit)"),
        (0o1755, "everybody can read records, OWNER alone can add them"),  # nobody else could delete anything anyway
        (0o764, "OWNER alone can read and add records"),  # who may not enter a folder opens nothing in it
    ],
)
def test_who_can_read_and_who_can_add(laid: Laid, mode: int, found: str) -> None:
    laid.cache.chmod(mode)
    row = laid.findings(answers())["sharing"]
    st = laid.cache.stat()
    owner, group = pwd.getpwuid(st.st_uid).pw_name, grp.getgrgid(st.st_gid).gr_name
    assert row.found == found.replace("OWNER", owner).replace("GROUP", group)
    assert (row.status, row.remedy, row.details["mode"]) == (Status.OK, "", f"{mode:04o}")


def test_a_folder_inside_that_fewer_can_write_to_is_named_with_the_remedy(laid: Laid) -> None:
    laid.cache.chmod(0o2775)
    (laid.cache / ".tmp").mkdir()
    (laid.cache / ".tmp").chmod(0o755)
    row = laid.findings(answers())["sharing"]
    assert row.status is Status.NOTE
    assert f"fewer can write to {laid.cache}/.tmp" in row.found
    assert row.remedy == f"as its owner: chmod 2775 {laid.cache}/.tmp"
    (laid.cache / ".tmp").chmod(0o2775)
    assert laid.findings(answers())["sharing"].remedy == ""


@pytest.mark.parametrize(
    ("umask", "found"), [("0077", "alone can read and add"), ("0022", "everybody can read records")]
)
def test_who_will_be_able_to_once_it_is_made(laid: Laid, umask: str, found: str) -> None:
    laid.file("proc/self/status", f"Name:\tpython\nUmask:\t{umask}\n")
    laid.cache = laid.cache / "not yet"
    row = laid.findings(answers())["sharing"]
    assert found in row.found
    assert row.found.endswith("your umask would create it like this")


def test_a_disk_without_room_for_more_files_is_told_from_a_full_one(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 8 << 20, "nr_inodes=2") as small:
        told = [findings.directory(Machine().place(small), "No space left on device").remedy]
        (small / "file").touch()
        told.append(findings.directory(Machine().place(small), "No space left on device").remedy)
    assert ["(df -i)" in remedy for remedy in told] == [False, True]


def test_a_folder_that_one_may_not_enter_is_not_said_to_be_missing() -> None:
    with shared_folder() as folder:
        (folder / "private" / "cache").mkdir(parents=True)
        (folder / "private").chmod(0o700)
        place = in_child(lambda: Machine().place(folder / "private" / "cache"), nobody=True)
    row = findings.directory(place, "Permission denied")
    assert row.found.startswith(f"{folder}/private/cache cannot be seen, since you may not enter {folder}/private; ")
    assert row.remedy.startswith(f"have its owner change the permissions of {folder}/private, ")
    assert findings.sharing(place).found == "see directory"


def test_users_without_a_name_here_are_told_by_their_numbers(laid: Laid) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving files to others needs root, which this process is not")
    os.chown(laid.cache, 61001, 61100)
    laid.cache.chmod(0o770)
    assert laid.findings(answers())["sharing"].found == "61001 and the group 61100 can read and add records"


def test_simulated_a_drive_of_another_machine_is_told_and_is_no_local_nvme_drive(laid: Laid) -> None:
    """An NVMe drive over TCP looks like a local one by its name."""
    laid.with_gpu()
    laid.on_nvme()
    laid.ready_for_p2pdma()
    laid.file("sys/devices/pci0/nvme0n1/device/transport", "pcie\n")
    row = laid.findings(answers())["directory"]
    assert (row.status, row.details["over"], row.details["nvme"]) == (Status.OK, "", True)
    assert "another machine" not in row.found
    laid.file("sys/devices/pci0/nvme0n1/device/transport", "tcp\n")
    found = laid.findings(answers())
    row = found["directory"]
    assert (row.status, row.details["over"], row.details["nvme"]) == (Status.NOTE, "NVMe over TCP", False)
    assert "(Fast Drive 9000, in another machine: NVMe over TCP)" in row.found
    assert "a local drive" in row.remedy
    assert "an NVMe drive" in found["p2pdma"].found, "only local drives reach the GPU by themselves"


def test_simulated_a_volume_over_iscsi_is_in_another_machine_before_it_is_a_spinning_disk(laid: Laid) -> None:
    laid.over_iscsi()
    row = laid.findings(answers())["directory"]
    assert "ext4 on /dev/sdb (in another machine: iSCSI)" in row.found
    assert "another machine" in row.remedy


# The cores.


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use cores 0 to 15 of 32."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 32)


@pytest.mark.parametrize(
    ("quota", "found", "usable"),
    [
        (None, "16 of 32 may be used; the affinity of the process allows no others", 16),
        (3.5, "4 of 32 may be used; the quota of the control group is 3.5", 4),
        (20, "16 of 32 may be used; the affinity of the process allows no others", 16),
    ],
)
def test_simulated_cores_and_why_there_are_no_more(
    laid: Laid, allowed: None, quota: float | None, found: str, usable: int
) -> None:
    if quota is not None:
        laid.with_quota(quota)
    row = laid.findings(answers(gpu=False))["cores"]
    assert (row.status, row.found, row.details["usable"]) == (Status.OK, found, usable)
    assert row.details["quota"] == quota


@pytest.mark.parametrize(
    ("node", "local", "found", "remedy"),
    [
        (0, "0-31", "; cuda:0 is on NUMA node 0", ""),  # the only one
        (1, "8-15,24-31", "; cuda:0 is on NUMA node 1, and up to 8 threads that read for it stay there", ""),
        (1, "16-31", "; cuda:0 is on NUMA node 1, of whose cores none may be used", "numactl --cpunodebind=1"),
        (-1, "0-31", "allows no others", ""),
    ],
)
def test_simulated_the_node_of_the_gpu(
    laid: Laid, allowed: None, node: int, local: str, found: str, remedy: str
) -> None:
    laid.with_gpu()
    laid.on_node(node, local)
    row = laid.findings(answers())["cores"]
    assert row.found.endswith(found)
    assert remedy in row.remedy
    assert row.status is (Status.NOTE if remedy else Status.OK)


def test_a_gpu_of_which_no_node_is_known(laid: Laid, allowed: None) -> None:
    laid.with_gpu()
    assert "NUMA" not in laid.findings(answers())["cores"].found


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
    for name in ("nvidia-fs", "p2pdma", "udev", "cufile", "direct", "kvikio"):
        assert found[name].status is Status.UNUSED, name
    assert Diagnosis(laid.machine.place(laid.cache), "cpu", tuple(found.values())).works


@pytest.mark.parametrize(
    ("values", "environment", "remedy"),
    [
        ({"cuda": None, "version": "2.13.0+cpu"}, {}, "built without CUDA"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "unset"),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1"}, "unset"),
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
    assert found.remedy.startswith("useful once there is nvidia-fs or P2PDMA: as root: ")
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
    assert laid.findings(answers())["p2pdma"].status is Status.OK


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


@pytest.mark.parametrize(
    ("use", "fs", "status", "words", "remedy"),
    [
        (
            "by folder",
            "nvme",
            Status.OK,
            "cuFile reads files here into GPU memory: nvidia-fs 2.25.7 with nvme; ext4",
            "",
        ),
        ("by folder", "lnet", Status.MISSING, "through pinned memory: nvme is not registered", "before nvidia-fs"),
        ("always", "lnet", Status.MISSING, "through its compatibility mode: nvme is not registered", "NVIDIA patched"),
        ("never", "nvme", Status.MISSING, "through pinned memory: KvikIO is in its compatibility mode", "unset KVIKIO"),
    ],
)
def test_simulated_how_files_here_are_read_and_each_reason(
    laid: Laid, use: str, fs: str, status: Status, words: str, remedy: str
) -> None:
    laid.with_gpu()
    laid.on_nvme()
    laid.with_nvidia_fs(fs)
    laid.file("run/udev/data/b259:3", "E:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n")
    found = laid.findings(answers(kvikio=Answer({"use": use})))["direct"]
    assert found.status is status
    for each in (words, "ext4 with data=ordered", "nvme0n1: NVMe", "udev lists 259:3"):
        assert each in found.found
    assert remedy in found.remedy
    assert found.details["direct"] is (status is Status.OK)
    assert {"what": "nvme0n1: NVMe", "holds": True, "remedy": ""} in found.details["reasons"]


def test_simulated_without_kvikio_no_file_is_read_directly(laid: Laid) -> None:
    laid.with_gpu()
    found = laid.findings(answers(kvikio=Answer({}, "No module named 'kvikio'")))["direct"]
    assert (found.status, "No module named 'kvikio'" in found.found) == (Status.MISSING, True)


def test_cufile_is_tried_without_kvikio_s_own_ways_and_its_log_is_read(
    laid: Laid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(asked: Mapping[str, Any], environment: Mapping[str, str] | None = None, **_: Any) -> dict[str, Answer]:
        if "cufile" in asked:
            assert environment is not None
            assert environment["KVIKIO_COMPAT_MODE"] == "OFF"
            Path(environment["CUFILE_LOGFILE_PATH"]).write_text("ERROR  cufio-udev:67 udev property not found\n")
            return {"cufile": Answer({}, "file descriptor is not registered")}
        return {name: answers().get(name, Answer({}, "not here")) for name in asked}

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
    for by_default, status in ((False, Status.OPTIONAL), (True, Status.MISSING)):
        told = {
            "ok": False, "of_use": True, "by_default": by_default, "reason": "no compiler", "remedy": "install g++",
        }  # fmt: skip
        found = laid.findings(answers(**{"backend deepnvme": Answer(told)}))["deepnvme"]
        assert (found.status, found.found, found.remedy) == (status, "no compiler", "install g++")


def test_a_directory_that_takes_no_files_is_a_failure(laid: Laid) -> None:
    found = laid.findings(answers(), unwritable="Read-only file system")
    assert found["directory"].status is Status.FAILED
    assert "Read-only file system" in found["directory"].found
    assert found["default"].status is Status.FAILED


def test_a_default_that_does_not_work_is_a_failure(laid: Laid) -> None:
    found = laid.findings(answers(default=Answer({}, "some error")))["default"]
    assert (found.status, found.remedy) == (Status.FAILED, "")
    assert "some error" in found.found


def test_a_full_drive_has_a_remedy(laid: Laid) -> None:
    found = laid.findings(answers(default=Answer({}, "[Errno 28] No space left on device: '/cache/trial.bin'")))[
        "default"
    ]
    assert (found.status, found.remedy.startswith("free some space")) == (Status.FAILED, True)


def test_a_small_file_system_is_not_one_of_zero_gigabytes(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", 30 << 20) as small:
        found = findings.directory(Machine().place(small), "").found
    assert "of 31.5 MB free" in found


def test_what_to_install_for_dali_is_a_remedy(laid: Laid) -> None:
    told = Answer({}, "NVIDIA DALI cannot be imported (No module named 'nvidia'): pip install 'monai_gds[dali-cuda12]'")
    found = laid.findings(answers(dali=told))["dali"]
    assert found.found == "NVIDIA DALI cannot be imported (No module named 'nvidia')"
    assert (found.status, found.remedy) == (Status.OPTIONAL, "pip install 'monai_gds[dali-cuda12]'")


def test_tiles_on_a_gpu_want_blosc2_and_nvcomp(laid: Laid) -> None:
    lacks = {
        "blosc2": "Blosc2 is missing: pip install 'monai_gds[tiles]'",
        "nvcomp": "nvCOMP is missing: pip install x",
    }
    for gpu, told, status, remedy in (
        (False, {"blosc2": "", "nvcomp": "nvCOMP is missing"}, Status.OK, ""),
        (False, lacks, Status.OPTIONAL, "pip install 'monai_gds[tiles]'"),
        (True, {"blosc2": "", "nvcomp": ""}, Status.OK, ""),
        (True, lacks, Status.NOTE, "pip install 'monai_gds[tiles-cuda13]'"),
        (True, {**lacks, "blosc2": ""}, Status.NOTE, "pip install 'monai_gds[tiles-cuda13]'"),
    ):
        found = laid.findings(answers(gpu, tiles=Answer(told)))["tiles"]
        assert (found.status, found.remedy) == (status, remedy)
        assert ("is missing" in found.found) == bool(remedy)


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


def test_a_disk_that_cannot_be_read_shows_its_remedy(laid: Laid) -> None:
    library = Answer({"version": "0.7.5", "drivers": [], "sharing": [], "found": "/lib/libxnvme.so"})
    told = {"kind": "ext4", "disk": "/dev/vda", "readable": False, "problem": "Operation not permitted",
            "remedy": "run as root"}  # fmt: skip
    found = laid.findings(answers(libxnvme=library, blocks=Answer(told)))["blocks"]
    assert (found.status, found.found) == (Status.MISSING, "blocks of /dev/vda cannot be read: Operation not permitted")
    assert found.remedy == "run as root"
    readable = {**told, "readable": True, "problem": ""}
    assert laid.findings(answers(libxnvme=library, blocks=Answer(readable)))["blocks"].status is Status.OK


def test_the_drivers_by_which_processes_share_a_drive(laid: Laid) -> None:
    with libraries.using("double next"):
        found = laid.findings(answers(libxnvme=Answer(probes.libxnvme())))["libxnvme"].found
    assert found.endswith("; several processes can read one drive by upcie")


def test_a_torch_that_does_not_answer_is_a_failure(laid: Laid) -> None:
    found = laid.findings({"torch": Answer({}, "no answer within 120 seconds")})
    assert found["torch"].status is Status.FAILED
    assert "no answer" in found["torch"].found


def test_speed(laid: Laid) -> None:
    told = {"bytes": 1 << 29, "write": 1.2, "backend": "posix", "cold": None, "cold_problem": "Invalid argument",
            "warm": 12.0, "warm_problem": ""}  # fmt: skip
    words = laid.findings(answers(speed=Answer(told)))["speed"].found
    assert "512 MiB" in words
    assert "not measured, Invalid argument" in words
    assert "12.00 GB/s" in words
