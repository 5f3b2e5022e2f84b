"""``monai-gds doctor``: what this machine can do for a cache directory, and how to improve it.

Nothing here imports torch: a machine on which torch cannot be imported needs a doctor most.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from monai_gds.doctor import probes
from monai_gds.doctor.findings import Finding, Status, collect
from monai_gds.doctor.isolation import Answer, ask
from monai_gds.doctor.machine import Machine, Place

__all__ = ["Diagnosis", "Finding", "NoSuchDevice", "Status", "examine"]


class NoSuchDevice(ValueError):
    """This machine does not have the device."""


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`examine` found; the findings are in the order of the screen.

    ``target`` is the device, ``cuda:0`` for instance; empty if torch does not work.
    """

    place: Place
    target: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether ``backend="auto"`` writes and reads files in this directory."""
        return all(finding.status is not Status.FAILED for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types. The keys are part of the public API."""
        findings = {finding.name: asdict(finding) for finding in self.findings}
        for finding in findings.values():
            del finding["name"]
        return {
            "monai_gds": version("monai_gds"),
            "directory": str(self.place.asked),
            "device": self.target or None,
            "works": self.works,
            "default": findings["default"]["details"].get("backend"),
            "findings": findings,
        }


def examine(
    directory: Path, *, device: str | None = None, measure: bool = False, machine: Machine | None = None
) -> Diagnosis:
    """Examines this machine for a cache directory.

    Files are written to a temporary folder in the directory, or in its nearest existing parent, and removed. Libraries
    are imported in other processes.

    Args:
        directory: the cache directory; it need not exist yet.
        device: the target, ``cpu`` or ``cuda:N``; None for a GPU if there is one.
        measure: also measure the drive's speed, with a file of up to 512 MiB.
        machine: another machine, for tests.

    Raises:
        NotADirectoryError: the directory is a file.
        NoSuchDevice: torch works, but does not see ``device``.
    """
    machine = machine or Machine()
    place = machine.place(directory)
    with _folder(place) as (folder, unwritable):
        answers = ask({"torch": partial(probes.torch, device)})
        target = answers["torch"].values.get("target", "")
        if refused := answers["torch"].values.get("refused"):
            raise NoSuchDevice(refused)
        if answers["torch"]:  # everything else needs it
            answers |= _ask_all(place, folder, device, answers["torch"].values.get("backends", ()))
        if measure and folder is not None and answers.get("default"):
            answers |= ask({"speed": partial(probes.speed, device, folder)}, limit=900)
        elif measure:
            answers["speed"] = Answer({}, "the default backend does not work here")
    return Diagnosis(place, target, tuple(collect(machine, place, unwritable, answers)))


def _ask_all(place: Place, folder: str | None, device: str | None, backends: Sequence[str]) -> dict[str, Answer]:
    answers = ask(
        {
            "io_uring": probes.io_uring,
            "libxnvme": probes.libxnvme,
            "blocks": partial(probes.disk, str(place.folder)),
            **{f"backend {name}": partial(probes.backend, name, device) for name in backends},
            "default": partial(probes.default, device, folder),
            "tiles": probes.tiles,
            "dali": probes.dali,
            "kvikio": probes.kvikio,
        }
    )
    if folder is not None:
        answers["cufile"] = _try_cufile(device, Path(folder))
    return answers


@contextlib.contextmanager
def _folder(place: Place) -> Iterator[tuple[str | None, str]]:
    """A folder for files on the drive in question; or None, and the reason why it cannot be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=".monai-gds-doctor-", dir=place.folder, ignore_cleanup_errors=True)
    except OSError as e:
        yield None, e.strerror or str(e)
        return
    with folder as path:
        yield path, ""


def _try_cufile(device: str | None, folder: Path) -> Answer:
    """Writes and reads a file through libcufile, whatever KvikIO would prefer, and returns its log too."""
    log = folder / "cufile.log"
    environment = {
        "KVIKIO_COMPAT_MODE": "OFF", "CUFILE_LOGFILE_PATH": str(log), "CUFILE_LOGGING_LEVEL": "NOTICE",
    }  # fmt: skip
    answer = ask({"cufile": partial(probes.cufile, device, str(folder))}, environment)["cufile"]
    last_lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
    return Answer({**answer.values, "log": [line.strip() for line in last_lines]}, answer.error)
