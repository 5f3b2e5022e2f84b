"""Turns the answers of machine and libraries into findings, each with a remedy. Nothing here touches the machine."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from monai_gds.base import cores
from monai_gds.doctor.isolation import Answer
from monai_gds.doctor.machine import Access, Machine, Place
from monai_gds.storage.plain import cufile as of_cufile
from monai_gds.storage.plain.cufile import GUIDE, UDEV_PROPERTIES, Condition

#: File systems that lose their files, or that are on another machine.
_IN_MEMORY = ("tmpfs", "ramfs")
_OF_CONTAINERS = ("overlay", "aufs")
_NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "fuse", "fuse.sshfs", "fuse.s3fs")

#: File systems on a local drive whose files cuFile accepts.
_OF_CUFILE = ("ext4", "xfs")


class Status(StrEnum):
    """OK: it works. NOTE: it works, but could be better. MISSING: not there, and the default would use it. OPTIONAL:
    not there, and only those who ask for it need it. FAILED: the default does not work because of it. UNUSED: it would
    not help on this machine.
    """

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"
    OPTIONAL = "optional"
    FAILED = "failed"
    UNUSED = "unused"


@dataclass(frozen=True)
class Finding:
    """One row."""

    name: str  # its key in JSON and its row on the screen
    status: Status
    found: str  # in words
    remedy: str = ""  # empty if nothing needs doing
    details: Mapping[str, Any] = field(default_factory=dict)  # what was found, for programs, as JSON types


Answers = Mapping[str, Answer]

_NOT_ASKED = Answer({}, "not tried")


def collect(machine: Machine, place: Place, unwritable: str, answers: Answers) -> list[Finding]:
    """All findings, in the order of the screen.

    ``unwritable`` says why no file can be made in the cache directory; it is empty if one can.
    """
    return [
        gpu(machine, answers),
        torch(answers),
        usable_cores(machine, answers),
        directory(place, unwritable),
        sharing(place),
        *_direct_storage(machine, place, answers),
        io_uring(machine, answers),
        libxnvme(answers),
        blocks(answers),
        *backends(answers),
        tiles(answers),
        dali(answers),
        *([speed(answers["speed"])] if "speed" in answers else []),
        container(machine, place, answers),
        default(answers, unwritable),
    ]


def _devices(answers: Answers) -> list[Mapping[str, Any]]:
    return list(answers["torch"].values.get("devices", []))


def gpu(machine: Machine, answers: Answers) -> Finding:
    """The GPUs that torch sees, and their driver."""
    driver = machine.driver
    kind = f"driver {driver.version}{', open kernel modules' if driver.is_open else ''}" if driver else ""
    devices = _devices(answers)
    details = {
        "driver": driver.version if driver else None,
        "open_modules": bool(driver and driver.is_open),
        "devices": devices,
    }
    if devices:
        counted = Counter((gpu["name"], gpu["bytes"], gpu["capability"]) for gpu in devices)
        names = [
            f"{f'{count} of ' if count > 1 else ''}{name}, {nbytes / 2**30:.0f} GiB, compute capability {capability}"
            for (name, nbytes, capability), count in counted.items()
        ]
        return Finding("gpu", Status.OK, "; ".join([*names, *([kind] if kind else [])]), details=details)
    if driver is None:
        return Finding("gpu", Status.MISSING, "no NVIDIA driver is loaded: everything runs on the CPU", "", details)
    return Finding("gpu", Status.NOTE, f"{kind}, but torch sees no GPU", _why_no_gpu(machine, answers), details)


def _why_no_gpu(machine: Machine, answers: Answers) -> str:
    values = answers["torch"].values
    if not values:
        return "see torch below"
    if values["cuda"] is None:
        return f"torch {values['version']} is built without CUDA: install one that is built with it"
    if machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all of them: unset it"
    if not machine.exists("/dev/nvidiactl"):
        return "/dev has no nvidiactl" + (": start the container with --gpus=all" if machine.container else "")
    return f"torch reports: {values['problem'] or 'nothing'}"


def torch(answers: Answers) -> Finding:
    """torch and its CUDA."""
    answer = answers["torch"]
    if not answer:
        return Finding("torch", Status.FAILED, answer.error, "pip install --force-reinstall torch")
    values = answer.values
    built = f"built for CUDA {values['cuda']}" if values["cuda"] else "built without CUDA"
    details = {"version": values["version"], "cuda": values["cuda"]}
    return Finding("torch", Status.OK, f"{values['version']}, {built}", details=details)


def usable_cores(machine: Machine, answers: Answers) -> Finding:
    """How many cores there are for threads and workers, why no more, and which of them are near the GPU."""
    allowed, quota = cores.allowed(), cores.quota(machine.root)
    usable, total = math.ceil(min(len(allowed), quota)), os.cpu_count() or 1
    words = [f"{usable} of {total} may be used"]
    if quota < len(allowed):
        words.append(f"the quota of the control group is {quota:g}")
    elif usable < total:
        words.append("the affinity of the process allows no others")
    details = {"usable": usable, "allowed": len(allowed), "quota": None if math.isinf(quota) else quota}
    target = answers["torch"].values.get("target", "")
    if target.startswith("cuda:"):
        node, on_node = machine.node_of(_devices(answers)[int(target.removeprefix("cuda:"))].get("pci", ""))
        near = allowed & on_node
        details |= {"node": node, "near": len(near)}
        words += [f"{target} is on NUMA node {node}"] if node >= 0 else []
        if on_node and not near:
            words[-1] += ", of whose cores none may be used"
            remedy = f"use those of the GPU's node: numactl --cpunodebind={node} --preferred={node} python …"
            return Finding("cores", Status.NOTE, "; ".join(words), remedy, details)
        if near and near != allowed:
            words[-1] += f", and up to {len(near)} threads that read for it stay there"
    return Finding("cores", Status.OK, "; ".join(words), details=details)


def directory(place: Place, unwritable: str) -> Finding:
    """The cache directory's file system, and whether files can be created there."""
    mount, drive = place.mount, place.drive
    words = [f"{place.folder}: unknown"]
    if mount is not None:
        over = f"in another machine: {drive.over}" if drive and drive.over else ""
        about = ", ".join(filter(None, [drive.model, over])) if drive else ""
        kind = f"{mount.kind} on {mount.source}{f' ({about})' if about else ''}"
        words = [f"{place.folder}: {kind}, mounted at {mount.point}"]
    unit, size = ("GB", 1e9) if place.nbytes >= 1e9 else ("MB", 1e6)
    words.append(f"{place.free_bytes / size:.1f} of {place.nbytes / size:.1f} {unit} free")
    if drive is not None and drive.errors:
        words.append("the drive counts " + ", ".join(f"{count} {what}" for what, count in drive.errors.items()))
    if place.asked.absolute() != place.folder:
        hidden = f"cannot be seen, since you may not enter {place.folder}"
        words.insert(0, f"{place.asked} {hidden if place.access.is_hidden else 'does not exist yet'}")
    details = {
        "asked": str(place.asked),
        "looked_at": str(place.folder),
        "free_bytes": place.free_bytes,
        "bytes": place.nbytes,
        "file_system": mount.kind if mount else None,
        "source": mount.source if mount else None,
        "mount_point": mount.point if mount else None,
        "options": mount.options if mount else None,
        "drive": drive.name if drive else None,
        "nvme": bool(drive and drive.is_nvme),
        "over": drive.over if drive else "",
        "errors": dict(drive.errors) if drive else {},
        "number": place.number or None,
        "writable": not unwritable,
    }
    if unwritable:
        words.append(f"no file can be made: {unwritable}")
        advice = "name a directory that can be written to; records that are there can still be read"
        if place.no_inodes:
            advice = "the file system has no room for more files (df -i): delete some, or name another directory"
        if place.access.is_hidden:
            advice = f"have its owner change the permissions of {place.folder}, or name another directory"
        return Finding("directory", Status.FAILED, "; ".join(words), advice, details)
    advice = _advice_on(place)
    return Finding("directory", Status.NOTE if advice else Status.OK, "; ".join(words), advice, details)


def _advice_on(place: Place) -> str:
    kind = place.mount.kind if place.mount else ""
    if kind in _IN_MEMORY:
        return "it is in memory: records are lost at a reboot, and take memory from the training"
    if kind in _OF_CONTAINERS:
        return "it is part of the container and deleted with it: mount a drive of the host, --volume /nvme/cache:/cache"
    if kind in _NETWORKED:
        return "it is on another machine: a local drive serves cached epochs better"
    if place.drive is not None and place.drive.errors:
        return (
            "on a CPU target, a page of a mapped record that cannot be read ends the process (SIGBUS): give "
            "CacheOptions(mmap=False), with which such a record is computed again, and replace the drive if it fails"
        )
    if place.drive is not None and place.drive.over:
        return "what is not in the page cache comes from another machine: a local drive serves cached epochs better"
    if place.drive is not None and place.drive.rotates:
        return "it is on a spinning disk: records that do not fit into the page cache are read slowly"
    if place.free_bytes < 1 << 30:
        return "it is nearly full: items that do not fit are computed again each time"
    return ""


def sharing(place: Place) -> Finding:
    """Who can read the records of the cache directory, and who can add them: its own mode decides for all in it."""
    access = place.access
    if access.is_hidden:
        return Finding("sharing", Status.UNUSED, "see directory")
    mode = stat.S_IMODE(access.mode)
    can_read, can_add = _who(access, mode >> 2 & mode), _who(access, mode >> 1 & mode)
    words = [f"{can_read} can read records, {can_add} can add them"]
    if can_add == can_read:
        words = [f"{can_read} can read and add records"]
    if mode & stat.S_ISVTX and mode & 0o022:
        words.append("only a record's owner can delete or replace it (sticky bit)")
    if not access.is_there:
        words.append("your umask would create it like this")
    details = {"owner": access.owner, "group": access.group, "mode": f"{mode:04o}", "exists": access.is_there}
    if not access.narrower:
        return Finding("sharing", Status.OK, "; ".join(words), details=details)
    folders = " ".join(access.narrower)
    words.append(f"but fewer can write to {folders}, where records are written first: the others save nothing")
    remedy = f"as its owner: chmod {mode:o} {folders}"
    return Finding("sharing", Status.NOTE, "; ".join(words), remedy, {**details, "narrower": list(access.narrower)})


def _who(access: Access, bits: int) -> str:
    """The users that have a permission. ``bits`` has it at the places of the x bits of a mode."""
    if bits & 0o001:
        return "everybody"
    return f"{access.owner} and the group {access.group}" if bits & 0o010 else f"{access.owner} alone"


def _direct_storage(machine: Machine, place: Place, answers: Answers) -> Iterator[Finding]:
    """cuFile, what decides how it reads, and how files of the directory are read."""
    if not _devices(answers):
        for name in ("nvidia-fs", "p2pdma", "udev", "cufile", "direct"):
            yield Finding(name, Status.UNUSED, "useful only with a GPU")
        return
    yield nvidia_fs(machine)
    yield p2pdma(machine, place)
    entry = udev(machine, place)
    yield entry
    yield cufile(answers.get("cufile"), machine, place, entry)
    yield direct(answers.get("kvikio", _NOT_ASKED), machine, place)


def _goes_straight(machine: Machine, place: Place) -> bool:
    """Whether cuFile can bypass host memory. If not, it is useless here."""
    return of_cufile.nvidia_fs(machine.root) is not None or not _lacks_for_p2pdma(machine, place)


def _lacks_for_p2pdma(machine: Machine, place: Place) -> list[tuple[str, str]]:
    on_nvme = place.drive is not None and place.drive.is_nvme
    return list(of_cufile.lacks_for_p2pdma(machine.root, machine.environment, on_nvme))


def nvidia_fs(machine: Machine) -> Finding:
    """The kernel module that lets cuFile write straight into GPU memory."""
    version, nodes = of_cufile.nvidia_fs(machine.root), of_cufile.nvidia_fs_nodes(machine.root)
    details = {"version": version, "nodes": nodes}
    if version is None:
        remedy = f"install NVIDIA's package nvidia-gds{' on the host' if machine.container else ''}: {GUIDE}"
        return Finding("nvidia-fs", Status.MISSING, "the kernel module is not loaded", remedy, details)
    if not nodes:
        remedy = "modprobe -r nvidia_fs && modprobe nvidia_fs"
        if machine.container:
            remedy = "start it with --env NVIDIA_GDS=enabled or --device=/dev/nvidia-fs0 and so on"
        return Finding("nvidia-fs", Status.NOTE, "loaded, but there is no /dev/nvidia-fs0", remedy, details)
    return Finding("nvidia-fs", Status.OK, f"the kernel module is loaded, version {version}", "", details)


def p2pdma(machine: Machine, place: Place) -> Finding:
    """cuFile's way to the GPU without nvidia-fs."""
    lacking = _lacks_for_p2pdma(machine, place)
    details = {"lacks": [{"what": what, "remedy": remedy} for what, remedy in lacking]}
    if not lacking:
        return Finding("p2pdma", Status.OK, "nothing that NVIDIA's guide asks for is missing", "", details)
    what = "missing: " + ", ".join(what for what, _ in lacking)
    return Finding("p2pdma", Status.MISSING, what, "; ".join(remedy for _, remedy in lacking), details)


def udev(machine: Machine, place: Place) -> Finding:
    """udev's entry for the drive, without which libcufile refuses its files."""
    if not place.number:
        kind = place.mount.kind if place.mount else "this file system"
        advice = "put the cache on ext4 or XFS on a local drive"
        return Finding("udev", Status.MISSING, f"{kind} has no block device, and cuFile wants one", advice)
    entry = of_cufile.udev_entry(place.number, machine.root)
    details = {"number": place.number, "properties": entry}
    if entry is not None and all(name in entry for name in UDEV_PROPERTIES):
        return Finding("udev", Status.OK, f"its database lists {place.number} as {entry['ID_FS_TYPE']}", "", details)
    missing = "no /run/udev" if entry is None else f"udev does not name the file system on {place.number}"
    lines = rf"I:1\nE:ID_FS_TYPE={place.mount.kind if place.mount else 'ext4'}\nE:ID_FS_USAGE=filesystem\n"
    remedy = f"as root: mkdir -p /run/udev/data && printf '{lines}' > /run/udev/data/b{place.number}"
    if machine.container:
        remedy = f"start it with --volume /run/udev:/run/udev:ro; or {remedy}"
    if not _goes_straight(machine, place):
        remedy = f"useful once there is nvidia-fs or P2PDMA: {remedy}"
    return Finding("udev", Status.MISSING, f"{missing}, so cuFile refuses files there", remedy, details)


def cufile(answer: Answer | None, machine: Machine, place: Place, entry: Finding) -> Finding:
    """Whether cuFile accepts files in this directory."""
    if answer is None or (answer and not answer.values.get("tried", True)):
        return Finding("cufile", Status.MISSING, "not tried: that needs KvikIO, and a directory that can be written to")
    log = list(answer.values.get("log", []))
    details = {"takes_files": bool(answer), "log": log}
    if not answer:
        last = next((line for line in reversed(log) if "ERROR" in line), "")
        error = f"{answer.error}{f'; its log ends with: {last}' if last else ''}"
        if entry.status is not Status.OK:
            remedy = "see udev above"
        elif place.mount is not None and place.mount.kind not in _OF_CUFILE:
            remedy = "put the cache on ext4 or XFS on a local drive"
        else:
            remedy = f"look through {GUIDE}"
        return Finding("cufile", Status.MISSING, f"it refuses files here: {error}", remedy, details)
    details["compatibility_mode"] = any("compat" in line.lower() for line in log)
    if details["compatibility_mode"]:
        found = "it accepts files here, but in its compatibility mode, through host memory"
        return Finding("cufile", Status.NOTE, found, "to bypass it: nvidia-fs or P2PDMA, see above", details)
    found = "it accepts files here, and logs no compatibility mode"
    return Finding("cufile", Status.OK, found, "", details)


def direct(kvikio: Answer, machine: Machine, place: Place) -> Finding:
    """Whether ``kvikio`` has cuFile read the files of the directory into GPU memory, and each reason."""
    found = of_cufile.conditions(place.folder, machine.root, machine.environment)
    if not kvikio:
        found.insert(0, Condition(False, f"KvikIO does not answer: {kvikio.error}", "see kvikio below"))
    elif kvikio.values["use"] == "never":
        why = (
            "KvikIO is in its compatibility mode: KVIKIO_COMPAT_MODE asks for it, or there is no libcufile or /run/udev"
        )
        found.insert(0, Condition(False, why, "unset KVIKIO_COMPAT_MODE, install libcufile, see udev above"))
    holds = all(one.holds for one in found)
    details = {"direct": holds, "reasons": [one._asdict() for one in found]}
    good = "; ".join(one.what for one in found if one.holds)
    if holds:
        return Finding("direct", Status.OK, f"cuFile reads files here into GPU memory: {good}", "", details)
    words = "; ".join(one.what for one in found if not one.holds) + (f" (as it should be: {good})" if good else "")
    how = "through its compatibility mode" if kvikio and kvikio.values["use"] == "always" else "through pinned memory"
    remedy = "; ".join(dict.fromkeys(one.remedy for one in found if one.remedy))
    return Finding("direct", Status.MISSING, f"files here are read {how}: {words}", remedy, details)


def io_uring(machine: Machine, answers: Answers) -> Finding:
    """Whether many small files are read with one system call."""
    answer = answers.get("io_uring", _NOT_ASKED)
    if answer:
        found = f"small files are read {answer.values['files']} per system call"
        return Finding("io_uring", Status.OK, found, "", answer.values)
    if switched_off := machine.io_uring_disabled:
        remedy = "as root: sysctl kernel.io_uring_disabled=0"
    elif machine.container:
        remedy = "allow io_uring in the container's seccomp profile (--security-opt seccomp=PROFILE)"
    else:
        remedy = "use Linux 5.17 or later"
    found = f"small files are read by threads, one system call each: {answer.error}"
    return Finding("io_uring", Status.MISSING, found, remedy, {"switched_off": switched_off})


def libxnvme(answers: Answers) -> Finding:
    """The library below the xNVMe backends."""
    answer = answers.get("libxnvme", _NOT_ASKED)
    values = answer.values
    if "found" not in values:
        problem = answer.error or str(values["problem"])
        return Finding("libxnvme", Status.OPTIONAL, problem, str(values.get("remedy", "")))
    built = f"; built with {', '.join(values['drivers'])}" if values["drivers"] else ""
    if values["sharing"]:
        built += f"; several processes can read one drive by {', '.join(values['sharing'])}"
    return Finding("libxnvme", Status.OK, f"{values['version']} at {values['found']}{built}", "", values)


def blocks(answers: Answers) -> Finding:
    """Whether the directory's files can be read by their blocks, straight from the device."""
    answer = answers.get("blocks", _NOT_ASKED)
    values = answer.values
    if "found" not in answers.get("libxnvme", _NOT_ASKED).values:
        return Finding("blocks", Status.UNUSED, "useful only with libxnvme", details=values)
    if not answer:
        return Finding("blocks", Status.MISSING, f"files here cannot be read by their blocks: {answer.error}")
    if not values["readable"]:
        found = f"blocks of {values['disk']} cannot be read: {values['problem']}"
        return Finding("blocks", Status.MISSING, found, values["remedy"], values)
    return Finding("blocks", Status.OK, f"files here can be read by their blocks from {values['disk']}", "", values)


def backends(answers: Answers) -> Iterator[Finding]:
    """One finding per storage backend."""
    for step, answer in answers.items():
        prefix, _, name = step.partition(" ")
        if prefix != "backend":
            continue
        if not answer:
            yield Finding(name, Status.MISSING, f"its probe failed: {answer.error}", details={"ok": False})
            continue
        values = answer.values
        status = Status.OK if values["ok"] else Status.UNUSED
        if values["of_use"] and not values["ok"]:
            status = Status.MISSING if values["by_default"] else Status.OPTIONAL
        yield Finding(name, status, values["reason"], values["remedy"], {"ok": values["ok"]})


def tiles(answers: Answers) -> Finding:
    """Compressed records in tiles, and on a GPU what unpacks them there."""
    answer = answers.get("tiles", _NOT_ASKED)
    if not answer:
        return Finding("tiles", Status.MISSING, answer.error)
    devices = _devices(answers)
    lacking = answer.values["blosc2"] or (answer.values["nvcomp"] if devices else "")
    if not lacking:
        return Finding(
            "tiles", Status.OK, f"crops read parts of records, which {'the GPU' if devices else 'Blosc2'} unpacks"
        )
    found, _, remedy = lacking.partition(": pip install ")
    if not devices:
        return Finding("tiles", Status.OPTIONAL, found, f"pip install {remedy}")
    extra = f"tiles-cuda{str(answers['torch'].values['cuda']).partition('.')[0]}"
    found += ", so a training waits longer for its crops"
    return Finding("tiles", Status.NOTE, found, f"pip install 'monai_gds[{extra}]'")


def dali(answers: Answers) -> Finding:
    """NVIDIA DALI, for images."""
    answer = answers.get("dali", _NOT_ASKED)
    if not answer:
        found, _, remedy = answer.error.partition(": pip install ")
        if not remedy:
            return Finding("dali", Status.MISSING, found)
        return Finding("dali", Status.OPTIONAL, found, f"pip install {remedy}")
    return Finding("dali", Status.OK, f"NVIDIA DALI {answer.values['version']}", "", answer.values)


def speed(answer: Answer) -> Finding:
    """The figures of ``--measure``."""
    if not answer:
        return Finding("speed", Status.NOTE, f"not measured: {answer.error}")
    values = answer.values
    words = [f"written {values['write']:.2f} GB/s (fsync included)"]
    for name, how in (("cold", "from the drive (O_DIRECT)"), ("warm", f"from the page cache by {values['backend']}")):
        figure = values[name]
        words.append(f"{how} {figure:.2f} GB/s" if figure else f"{how}: not measured, {values[f'{name}_problem']}")
    return Finding("speed", Status.OK, f"{values['bytes'] / 2**20:.0f} MiB: " + ", ".join(words), "", values)


def container(machine: Machine, place: Place, answers: Answers) -> Finding:
    """The container, and options that it should have been started with."""
    if machine.container is None:
        return Finding("container", Status.UNUSED, "this is not a container")
    flags = list(_missing_options(machine, place, bool(_devices(answers))))
    remedy = f"start it with {' '.join(flags)}" if flags else ""
    status = Status.NOTE if flags else Status.OK
    return Finding("container", status, machine.container, remedy, {"kind": machine.container, "options": flags})


def _missing_options(machine: Machine, place: Place, has_gpu: bool) -> Iterable[str]:
    if not has_gpu and machine.driver:
        yield "--gpus=all"
    if has_gpu and _goes_straight(machine, place) and of_cufile.udev_entry("", machine.root) is None:
        yield "--volume /run/udev:/run/udev:ro"
    if of_cufile.nvidia_fs(machine.root) and not of_cufile.nvidia_fs_nodes(machine.root):
        yield "--env NVIDIA_GDS=enabled"
    if has_gpu and machine.locked_memory_is_limited:
        yield "--ulimit memlock=-1"
    if machine.shared_memory_is_small:
        yield "--ipc=host"
    if place.mount is not None and place.mount.kind in _OF_CONTAINERS:
        yield "--volume /nvme/cache:/cache"


def default(answers: Answers, unwritable: str) -> Finding:
    """The backend that ``auto`` chooses, and whether it works."""
    answer = answers.get("default", _NOT_ASKED)
    values = {**answer.values, "works": bool(answer) and not unwritable}
    if not answer:
        full = any(os.strerror(code) in answer.error for code in (errno.ENOSPC, errno.EDQUOT))
        remedy = "free some space there, or name another directory" if full else ""
        return Finding("default", Status.FAILED, f"it does not work: {answer.error}", remedy, values)
    found = f"{values['backend']} ({values['reason']})"
    if unwritable:
        return Finding("default", Status.FAILED, f"{found}, not tried: no file can be made", "see directory", values)
    served = f" ({values['served']})" if values.get("served") else ""
    return Finding("default", Status.OK, f"{found}: wrote a file here and read it back{served}", "", values)
