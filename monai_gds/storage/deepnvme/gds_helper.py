"""The process in which ``gds_handle`` runs; see ``gds.py``, which starts it.

For each socket that it is given, it makes one handle and one pinned device tensor, and sends a CUDA IPC handle of that
tensor to the other process. Then it carries out messages until the sockets are closed. Any error ends it.

It runs in its own directory, because ``gds_handle`` writes ``local_cufile.json`` into the working directory.

The handle's thread drops an operation's tensor a moment after it has reported that the operation is done. If that was
the last reference, freeing it takes the interpreter's lock, which this process keeps while it waits for the next
operation: the two would wait for each other for ever. So a tensor is kept until that thread has done another operation.

A message is JSON with one descriptor beside it: ``{"do": "read" or "write", "offset": N, "nbytes": N}`` moves that
range of the descriptor's file to or from the start of the socket's tensor. The answer, when that is done, is one byte.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import selectors
import socket
import sys
from dataclasses import astuple
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from monai_gds.base.process import end_with_parent
from monai_gds.storage.deepnvme import build
from monai_gds.storage.deepnvme.settings import Settings

#: No message is longer.
MESSAGE_BYTES = 64 << 10


class _Slot:
    """One handle, its tensor, and its operation under way."""

    def __init__(self, handle: Any, nbytes: int, channel: socket.socket) -> None:
        self._handle = handle
        self._channel = channel
        self._fd = -1
        self._kept: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
        self._buffer = handle.new_pinned_device_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        with contextlib.suppress(BrokenPipeError):  # the other side has closed it, which start() notices
            channel.send(bytes(ForkingPickler.dumps(self._buffer)))

    def start(self) -> bool:
        """Starts what the next message asks for; False when the other side is gone."""
        try:
            message, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except ConnectionResetError:
            return False
        if not message:
            return False
        asked = json.loads(message)
        (self._fd,) = fds
        part = self._buffer[: asked["nbytes"]]
        self._kept.append(part)
        move = self._handle.async_pread if asked["do"] == "read" else self._handle.async_pwrite
        if move(part, f"/proc/self/fd/{self._fd}", asked["offset"]) != 0:
            sys.exit(f"gds_handle refused to {asked['do']} {asked['nbytes']} bytes at {asked['offset']}")
        return True

    def finish(self) -> None:
        self._handle.wait()
        os.close(self._fd)
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(b"\0")


def main(device: int, nbytes: int, settings: dict[str, Any], channels: list[int]) -> None:
    """Serves until the sockets are closed or the parent is gone (its forked children may still hold the sockets)."""
    end_with_parent()
    libc = ctypes.CDLL(None)  # gds_handle ends this process without flushing what it has printed
    libc.setlinebuf(ctypes.c_void_p.in_dll(libc, "stdout"))
    for descriptor in channels:
        os.set_inheritable(descriptor, False)  # a child of this process that held one would keep the other side waiting
    torch.cuda.set_device(device)
    module = build.load("gds")
    selector = selectors.DefaultSelector()
    for descriptor in channels:
        handle = module.gds_handle(*astuple(Settings(**settings)))
        channel = socket.socket(fileno=descriptor)
        selector.register(channel, selectors.EVENT_READ, _Slot(handle, nbytes, channel))
    running: collections.deque[_Slot] = collections.deque()
    while True:
        # Waiting for an operation keeps the interpreter's lock, so whatever can be started is started before.
        for key, _ in selector.select(0 if running else None):
            if key.data.start():
                running.append(key.data)
            else:
                selector.unregister(key.fileobj)
        if not selector.get_map():
            os._exit(0)
        if running:
            running.popleft().finish()


if __name__ == "__main__":
    _device, _nbytes, _settings, *_channels = sys.argv[1:]
    main(int(_device), int(_nbytes), json.loads(_settings), [int(channel) for channel in _channels])
