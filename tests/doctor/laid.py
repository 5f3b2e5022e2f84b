"""A machine laid out in a folder, and the answers of its libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monai_gds.doctor import Finding, findings
from monai_gds.doctor.isolation import Answer
from monai_gds.doctor.machine import Machine

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
H100 = {"name": "NVIDIA H100 80GB HBM3", "bytes": 85_000_000_000, "capability": "9.0", "pci": "0000:17:00.0"}


class Laid:
    """A machine laid out in a folder. Its cache directory is ``cache``, on the file system given to ``mount``."""

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

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def link(self, path: str, to: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / to)

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
        self.link(f"sys/dev/block/{number}", f"{whole}/{partition}")

    def over_iscsi(self) -> None:
        self.mount("ext4", "8:16", "/dev/sdb")
        self.file("sys/devices/platform/host3/session1/target3:0:0/3:0:0:1/block/sdb/queue/rotational", "1\n")
        link = self.root / "sys/dev/block/8:16"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / "sys/devices/platform/host3/session1/target3:0:0/3:0:0:1/block/sdb")

    def on_node(self, node: int, local: str) -> None:
        """Puts the GPU on a NUMA node with these cores."""
        self.file("sys/bus/pci/devices/0000:17:00.0/numa_node", f"{node}\n")
        self.file("sys/bus/pci/devices/0000:17:00.0/local_cpulist", f"{local}\n")

    def with_quota(self, cores: float) -> None:
        """Limits the control group of this process, as Docker does."""
        with (self.root / "proc/self/mountinfo").open("a") as table:
            table.write("30 22 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        self.file("proc/self/cgroup", "0::/\n")
        self.file("sys/fs/cgroup/cpu.max", f"{round(cores * 100_000)} 100000\n")

    def with_gpu(self, driver: str = OPEN_DRIVER) -> None:
        self.file("proc/driver/nvidia/version", driver)
        self.file("dev/nvidiactl")

    def with_nvidia_fs(self, *drivers: str) -> None:
        self.file("proc/driver/nvidia-fs/version", "version: 2.25.7\n")
        self.file("proc/driver/nvidia-fs/modules", "".join(f"{driver}: 1\n" for driver in drivers))
        self.file("dev/nvidia-fs0")

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


def answers(gpu: bool = True, **more: Answer) -> dict[str, Answer]:
    """The answers of a machine on which everything works; with ``gpu``, it has one H100."""
    values: dict[str, Any] = {"version": "2.11.0+cu130", "cuda": "13.0", "devices": [H100], "problem": ""}
    values |= {"target": "cuda:0"} if gpu else {"version": "2.13.0+cpu", "cuda": None, "devices": [], "target": "cpu"}
    default = Answer({"backend": "kvikio" if gpu else "posix", "reason": "auto: for a test"})
    kvikio = Answer({"ok": gpu, "of_use": gpu, "reason": "KvikIO 26.10 through cuFile", "remedy": ""})
    return {
        "torch": Answer(values),
        "backend kvikio": kvikio,
        "default": default,
        "tiles": Answer({"blosc2": "", "nvcomp": ""}),
        **more,
    }
