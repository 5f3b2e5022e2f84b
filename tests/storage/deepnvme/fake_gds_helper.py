"""The helper process of deepnvme-gds with a stand-in for gds_handle, so that a machine without a GPU can run the rest.

The stand-in moves bytes with pread and pwrite between files and shared host memory, and like the real one ends its
process when it cannot.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from types import SimpleNamespace

import torch

from monai_gds.storage.deepnvme import build, gds_helper


class FakeHandle:
    """What the helper uses of a gds_handle."""

    def __init__(self, *settings: object) -> None:
        self._what: tuple[str, torch.Tensor, str, int] | None = None
        with open("local_cufile.json", "w") as f:  # the real one does that, too
            f.write("{}")

    def new_pinned_device_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(count, dtype=like.dtype).share_memory_()

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self._what = ("read", tensor, path, offset)
        return 0

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        self._what = ("write", tensor, path, offset)
        return 0

    def wait(self) -> int:
        assert self._what is not None
        verb, tensor, path, offset = self._what
        if os.path.basename(os.readlink(path)) == "hangs.bin":
            time.sleep(600)
        if os.path.basename(os.readlink(path)) == "prints.bin":
            ctypes.CDLL(None).printf(b"Cuda failure in the middle of it\n")
            os._exit(1)
        view = tensor.numpy().data
        try:
            if verb == "read":
                fd = os.open(path, os.O_RDONLY)
                os.preadv(fd, [view], offset)
            else:
                fd = os.open(path, os.O_WRONLY)
                os.pwritev(fd, [view], offset)
                os.fsync(fd)
            os.close(fd)
        except OSError as e:
            print(f"{verb} failed with cuFile error: {e}", file=sys.stderr, flush=True)
            os._exit(1)
        return 1


if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.cuda.set_device = lambda device: None
    build.load = lambda operator: SimpleNamespace(gds_handle=FakeHandle)
    _device, _nbytes, _settings, *_channels = sys.argv[1:]
    gds_helper.main(int(_device), int(_nbytes), json.loads(_settings), [int(c) for c in _channels])
