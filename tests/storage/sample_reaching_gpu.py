"""A blocking backend that fills GPU memory by itself, past the copy stream, as one over GPUDirect Storage does."""

from __future__ import annotations

from io import FileIO

import torch

from tests.storage.sample_blocking_backend import SampleBackend


class SampleReachingGpu(SampleBackend):
    """Reads to the host and copies on a stream of its own; returns when the bytes have arrived."""

    reaches_gpu = True

    def _read_into(self, handle: FileIO, offset: int, dest: torch.Tensor) -> int:
        if not dest.is_cuda:
            return super()._read_into(handle, offset, dest)
        host = torch.empty(dest.numel(), dtype=torch.uint8)
        count = super()._read_into(handle, offset, host)
        stream = torch.cuda.Stream(dest.device)
        with torch.cuda.stream(stream):
            dest[:count].copy_(host[:count], non_blocking=True)
        stream.synchronize()
        return count
