"""The ``deepnvme-gds`` backend: DeepSpeed's ``gds_handle``, cuFile straight into GPU memory. CUDA targets only.

``gds_handle`` ends its process whenever cuFile refuses a file or fails to read, so it runs in a helper process
(:mod:`.gds_helper`). The helper owns a few pinned device tensors, which this process opens by CUDA IPC. The bytes that
cuFile reads into them are verified (:mod:`.verified`) and copied to their destination on the device. The helper
receives the file as an open descriptor. When the helper ends, the operation fails with the helper's last lines, and the
next one starts another helper.

cuFile itself decides how it reads: peer-to-peer from the drive with ``nvidia-fs``, or without it in its compatibility
mode, through host memory. :meth:`DeepNvmeGdsBackend.describe` reports which of them is possible here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch

from monai_gds.base import stages
from monai_gds.errors import StorageError
from monai_gds.storage.backend import Availability
from monai_gds.storage.deepnvme import build
from monai_gds.storage.deepnvme.gds_helper import MESSAGE_BYTES
from monai_gds.storage.deepnvme.lanes import Lane, Verb
from monai_gds.storage.deepnvme.settings import Settings
from monai_gds.storage.deepnvme.verified import VerifiedBackend
from monai_gds.storage.files import Expected

_NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")
_LAST_LINES = 12
_START_SECONDS = 300  # importing torch from a shared file system takes minutes
_ANSWER_SECONDS = 60  # for 16 MiB


class _Helper:
    """A helper process with one socket per lane. It ends with the last of them, or by itself when gds_handle fails.

    It has one handle and one device tensor of ``nbytes`` per lane.
    """

    module: ClassVar[str] = "monai_gds.storage.deepnvme.gds_helper"

    def __init__(self, device: torch.device, nbytes: int, settings: Settings, lanes: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes)]
        theirs = [pair[1].fileno() for pair in pairs]
        self.channels = [pair[0] for pair in pairs]
        self._folder = tempfile.mkdtemp(prefix="monai-gds-")
        self._log = Path(self._folder) / "log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            environment.pop(name, None)  # expandable segments cannot be shared between processes
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", self.module, str(device.index or 0), str(nbytes),
                    json.dumps(asdict(settings)), *map(str, theirs),
                ],
                cwd=self._folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=theirs,
            )  # fmt: skip
        for _, their in pairs:
            their.close()

    def last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:]) or "it printed nothing"

    def kill(self, why: str) -> None:
        """Ends a process that hangs, and appends the reason to its output."""
        with open(self._log, "a") as log:
            print(why, file=log)
        self.process.kill()

    def close(self, channel: socket.socket) -> None:
        """Closes a socket. With the last one the process ends, and its folder is removed."""
        channel.close()
        if any(other.fileno() >= 0 for other in self.channels):
            return
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class _GdsLane(Lane):
    """One of the helper's sockets, and the device tensor on the other side of it."""

    def __init__(self, helper: _Helper, channel: socket.socket) -> None:
        self._helper = helper
        self._channel = channel
        self._buffer: torch.Tensor | None = None

    @property
    def dead(self) -> bool:
        return self._helper.process.poll() is not None

    @property
    def buffer(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = pickle.loads(self._answer("start", _START_SECONDS))
        return self._buffer

    def transfer(self, verb: Verb, fd: int, offset: int, memory: torch.Tensor) -> None:
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()  # marks and data are there before the helper looks
        message = {"do": verb, "offset": offset, "nbytes": memory.numel()}
        with contextlib.suppress(OSError):  # then no answer comes
            socket.send_fds(self._channel, [json.dumps(message).encode()], [fd])
        self._answer(verb, _ANSWER_SECONDS)

    def _answer(self, what: str, seconds: float) -> bytes:
        self._channel.settimeout(seconds)
        with contextlib.suppress(OSError):
            try:
                answer = self._channel.recv(MESSAGE_BYTES)
                if answer:
                    return answer
            except TimeoutError:
                self._helper.kill(f"it did not answer for {seconds:g} s and was ended")
        code, lines = self._helper.process.wait(), self._helper.last_lines()
        raise StorageError(
            errno.EIO, f"gds_handle could not {what} and ended its process (exit status {code}): {lines}"
        )

    def close(self) -> None:
        self._helper.close(self._channel)


class DeepNvmeGdsBackend(VerifiedBackend):
    """Reads and writes CUDA tensors with DeepSpeed's ``gds_handle``; see the module's docstring.

    Opening it compiles DeepSpeed's operator unless this machine has it (minutes, with a warning first).
    The first read starts the helper process, which has its own CUDA context.

    Args:
        device: a CUDA device.
        threads: handles in use at once, each with a device tensor of 16 MiB.
        settings: fields of :class:`Settings` by name, and ``tuned``; see :class:`VerifiedBackend`.

    Raises:
        BackendUnavailable: deepspeed, CUDA's toolkit or libcufile is missing, or compiling failed.
        ValueError: a setting that DeepNVMe does not work with.
    """

    needs_cuda = True
    reaches_gpu = True
    transfer_bytes = VerifiedBackend.piece_bytes  # one cuFile call per piece

    def open(self) -> None:
        build.build("gds")

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        found = build.probe("gds")
        return Availability(True, f"{_how()}: {found.reason}") if found else found

    def _new_lanes(self) -> Sequence[Lane]:
        helper = _Helper(self.device, self.lane_bytes, self.settings, self.threads)
        return [_GdsLane(helper, channel) for channel in helper.channels]

    def served_by(self, path: str, expected: Expected) -> str:
        return stages.DIRECT if _NVIDIA_FS.exists() else stages.COMPATIBLE

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "cufile": _how(), "device_bytes": self.threads * self.lane_bytes}


def _how() -> str:
    if _NVIDIA_FS.exists():
        return "cuFile with nvidia-fs"
    return "cuFile in its compatibility mode, through host memory (this machine has no nvidia-fs)"
