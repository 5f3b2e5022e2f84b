"""The ``deepnvme-gds`` backend: DeepSpeed's ``gds_handle``, cuFile straight into GPU memory. CUDA targets only.

``gds_handle`` ends its process whenever cuFile refuses a file or fails to read, so it runs in a helper process
(:mod:`monai_gds.storage.deepnvme_gds_helper`). The helper owns a few pinned device tensors that this process opens by
CUDA IPC; what cuFile has put there is verified (:mod:`monai_gds.storage.checked`) and copied to its destination on the
device. The file reaches the helper as an open descriptor. When the helper ends, the operation is an error with its
last lines, and the next one starts another helper.

cuFile itself decides how it reads: peer-to-peer from the drive with ``nvidia-fs``, or in its compatibility mode through
host memory without. :meth:`DeepNvmeGdsStorage.describe` says which can be the case here.
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
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch

from monai_gds.errors import StorageError
from monai_gds.storage import deepnvme_build, staging
from monai_gds.storage.base import CUDA_ONLY, Availability
from monai_gds.storage.checked import CheckedStorage, Lane, OpenFile
from monai_gds.storage.deepnvme import Settings
from monai_gds.storage.deepnvme_gds_helper import MESSAGE_BYTES
from monai_gds.storage.posix import pread_into

__all__ = ["DeepNvmeGdsStorage"]

_NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")
_LAST_LINES = 12
_START_SECONDS = 300  # importing torch from a shared file system takes minutes
_ANSWER_SECONDS = 60  # for 16 MiB


class _Helper:
    """A helper process with one socket a lane. Ends with the last of them, or by itself when gds_handle fails.

    Attributes:
        unused: sockets that no lane has taken yet.
    """

    module: ClassVar[str] = "monai_gds.storage.deepnvme_gds_helper"

    def __init__(self, device: torch.device, nbytes: int, settings: Settings, lanes: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes)]
        theirs = [pair[1].fileno() for pair in pairs]
        self.unused = [pair[0] for pair in pairs]
        self._open = lanes
        self._lock = threading.Lock()
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

    def last_words(self) -> str:
        """The last lines that the helper printed."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(lines[-_LAST_LINES:]) or "it said nothing"

    def give_up(self, why: str) -> None:
        """Ends a process that hangs; whoever waits for it is told why."""
        with contextlib.suppress(OSError), open(self._log, "a") as log:
            print(why, file=log)
        self.process.kill()

    def give_back(self, channel: socket.socket) -> None:
        """Closes a socket. With the last one the process ends, and its folder is removed."""
        channel.close()
        with self._lock:
            self._open -= 1
            if self._open:
                return
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def retire(self) -> None:
        """Gives back the sockets that no lane has; the process lives on until the lanes have given back theirs."""
        unused, self.unused = self.unused, []
        for channel in unused:
            self.give_back(channel)


class _GdsLane(Lane):
    """One of the helper's sockets, and the device tensor on the other side of it."""

    def __init__(self, helper: _Helper, channel: socket.socket) -> None:
        self._helper = helper
        self._channel = channel
        self._failed = False
        try:
            self._buffer: torch.Tensor = pickle.loads(self._answer("start", _START_SECONDS))
        except BaseException:
            self.close()
            raise

    @property
    def dead(self) -> bool:
        return self._failed or self._helper.process.poll() is not None

    @property
    def buffer(self) -> torch.Tensor:
        return self._buffer

    def read(self, file: OpenFile, offset: int, dest: torch.Tensor) -> None:
        self._ask("read", file, offset, dest)

    def write(self, file: OpenFile, offset: int, source: torch.Tensor) -> None:
        self._ask("write", file, offset, source)

    def _ask(self, verb: str, file: OpenFile, offset: int, memory: torch.Tensor) -> None:
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()  # marks and data are there before the helper looks
        message = {"do": verb, "offset": offset, "nbytes": memory.numel()}
        with contextlib.suppress(OSError):  # the answer will be missing
            socket.send_fds(self._channel, [json.dumps(message).encode()], [file.fd])
        # The helper's first write imports deepspeed, which is a start of its own.
        self._answer(f"{verb} {file.path}", _ANSWER_SECONDS if verb == "read" else _START_SECONDS)

    def _answer(self, what: str, seconds: float) -> bytes:
        self._channel.settimeout(seconds)
        try:
            answer = self._channel.recv(MESSAGE_BYTES)
        except TimeoutError:
            answer = b""
            self._helper.give_up(f"it did not answer for {seconds:g} s and was ended")
        except OSError:
            answer = b""
        if not answer:
            self._failed = True
            code = self._helper.process.wait()
            raise StorageError(
                errno.EIO,
                f"gds_handle could not {what} and ended its process (exit status {code}): {self._helper.last_words()}",
            )
        return answer

    def close(self) -> None:
        self._helper.give_back(self._channel)


class DeepNvmeGdsStorage(CheckedStorage):
    """Reads and writes CUDA tensors with DeepSpeed's ``gds_handle``; see the module's docstring.

    Making one compiles DeepSpeed's operator when that has not been done on this machine (it says so first); the first
    read starts the helper process, with a CUDA context of its own.

    Args:
        device: a CUDA device.
        threads: handles in use at once, each with a device tensor of 16 MiB.
        tuned: what ``ds_nvme_tune`` found, see :meth:`Settings.tuned`.
        settings: fields of :class:`monai_gds.storage.deepnvme.Settings` by name; they win over ``tuned``.

    Raises:
        BackendUnavailable: deepspeed, CUDA's toolkit or libcufile is missing, or compiling failed.
        ValueError: a setting that DeepNVMe does not work with.
    """

    name = "deepnvme-gds"
    reaches_gpu = True

    def __init__(
        self,
        device: torch.device,
        threads: int | None = None,
        *,
        tuned: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(device, threads)
        self.settings = Settings.chosen(tuned, settings)
        self.transfer_bytes = self.piece_bytes  # one cuFile call a piece
        self._helper: _Helper | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()
        deepnvme_build.build_for_use("gds")

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        if device.type != "cuda":
            return Availability(False, CUDA_ONLY, 'use backend="deepnvme" for a CPU target')
        found = deepnvme_build.probe("gds")
        return Availability(True, f"{_how()}: {found.reason}") if found else found

    def _new_lane(self) -> Lane:
        if os.getpid() != self._process:
            raise StorageError(errno.EPERM, "a storage belongs to the process that opened it: use open_storage() here")
        with self._starting:
            helper = self._helper
            if helper is None or helper.process.poll() is not None or not helper.unused:
                if helper is not None:
                    helper.retire()
                helper = self._helper = _Helper(self.device, self.lane_bytes, self.settings, self.threads)
            channel = helper.unused.pop()
        return _GdsLane(helper, channel)

    def _read_rest(self, file: OpenFile, offset: int, dest: torch.Tensor) -> None:
        if not dest.is_cuda:
            super()._read_rest(file, offset, dest)
            return
        pool = staging.staging_pool(self.device)
        slot = pool.acquire()
        try:
            pread_into(file.fd, offset, slot.view[: dest.numel()], file.path)
        except BaseException:
            pool.release(slot)
            raise
        pool.upload(slot, dest)
        staging.copy_stream(self.device).synchronize()

    def close(self) -> None:
        super().close()
        with self._starting:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.retire()

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            **asdict(self.settings),
            "cufile": _how(),
            "device_bytes": self.threads * self.lane_bytes,
        }


def _how() -> str:
    if _NVIDIA_FS.exists():
        return "cuFile with nvidia-fs"
    return "cuFile in its compatibility mode, through host memory (this machine has no nvidia-fs)"
