"""``monai-gds doctor``: what this machine can do for a cache directory, and what to do about the rest.

:func:`examine` puts the parts together, :mod:`~monai_gds.doctor.cli` shows what it returns:

* :mod:`~monai_gds.doctor.machine` reads what the kernel tells, below a root that tests replace;
* :mod:`~monai_gds.doctor.asking` has :mod:`~monai_gds.doctor.probes` ask the libraries, in a process of their own;
* :mod:`~monai_gds.doctor.findings` says what it means.

Nothing here imports torch: a machine on which that fails is what a doctor is for.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from monai_gds.doctor.asking import LIMIT, Answer, Request, ask
from monai_gds.doctor.findings import Finding, Status, collect
from monai_gds.doctor.machine import Machine, Place

__all__ = ["Finding", "NoSuchDevice", "Report", "Status", "examine"]

_LOG_LINES = 20
_MEASURE_LIMIT = 900.0


class NoSuchDevice(ValueError):
    """The device asked about is not on this machine."""


@dataclass(frozen=True)
class Report:
    """What :func:`examine` found.

    Args:
        place: the cache directory.
        target: the device that was asked about, ``cuda:0`` for instance; empty where torch does not work.
        findings: in the order of the screen.
    """

    place: Place
    target: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether ``backend="auto"`` writes and reads files in this directory."""
        return all(finding.status is not Status.FAILED for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON types. The keys are part of the public API."""
        by_name = {finding.name: finding for finding in self.findings}
        default = by_name["default"].details
        return {
            "monai_gds": version("monai_gds"),
            "directory": str(self.place.asked),
            "device": self.target or None,
            "works": self.works,
            "default": default.get("backend"),
            "findings": {
                name: {
                    "status": str(finding.status),
                    "found": finding.found,
                    "remedy": finding.remedy,
                    "details": dict(finding.details),
                }
                for name, finding in by_name.items()
            },
        }


def examine(
    directory: Path, *, device: str | None = None, measure: bool = False, machine: Machine | None = None
) -> Report:
    """Looks at this machine, for a cache directory.

    Files are written to a temporary folder in the directory (or in the nearest one above it that exists) and removed.

    Args:
        directory: of the cache; it need not exist yet.
        device: the target, ``cpu`` or ``cuda:N``; None for a GPU if there is one.
        measure: also measure the drive's speed, with a file of up to 512 MiB.
        machine: another one than this, for tests.

    Raises:
        NotADirectoryError: the directory is a file.
        NoSuchDevice: torch works, and does not see ``device``.
    """
    machine = machine or Machine()
    place = machine.place(directory)
    with _folder(place) as (folder, unwritable):
        request = Request(str(place.folder), folder, device)
        answers = ask(request)
        torch = answers.get("torch")
        if torch and torch.values.get("refused"):
            raise NoSuchDevice(torch.values["refused"])
        if folder is not None and torch and answers.get("backend kvikio", Answer({})).values.get("ok"):
            answers["cufile"] = _try_cufile(request, Path(folder))
        if measure and folder is not None and answers.get("default"):
            only = Request(str(place.folder), folder, device, only=("speed",))
            answers |= ask(only, limit=_MEASURE_LIMIT)
        elif measure:
            answers["speed"] = Answer({}, "the default backend does not work here")
    target = str(torch.values["target"]) if torch else ""
    return Report(place, target, tuple(collect(machine, place, unwritable, answers)))


@contextlib.contextmanager
def _folder(place: Place) -> Iterator[tuple[str | None, str]]:
    """A folder for files on the drive in question, or None and why there cannot be one."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=".monai-gds-doctor-", dir=place.folder, ignore_cleanup_errors=True)
    except OSError as e:
        yield None, e.strerror or str(e)
        return
    with folder as path:
        yield path, ""


def _try_cufile(request: Request, folder: Path) -> Answer:
    """Has libcufile itself take a file, whatever KvikIO would rather do, and reads what it logs."""
    log = folder / "cufile.log"
    environment = {
        "KVIKIO_COMPAT_MODE": "OFF", "CUFILE_LOGFILE_PATH": str(log), "CUFILE_LOGGING_LEVEL": "NOTICE",
    }  # fmt: skip
    only = Request(request.directory, request.folder, request.device, only=("cufile",))
    answers = ask(only, environment, limit=LIMIT)
    answer = answers.get("cufile", answers.get("start", Answer({}, "it was not asked")))
    logged = log.read_text(errors="replace").splitlines() if log.exists() else []
    return Answer({**answer.values, "log": [line.strip() for line in logged[-_LOG_LINES:]]}, answer.error)
