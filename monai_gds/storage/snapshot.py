"""Host copies of tensors, taken in the background, for the cache's writer to save later.

Copies out of a CUDA device go through a separate stream into pinned memory, so that neither the host nor the copies
to the device wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from monai_gds.base.process import PerProcess
from monai_gds.storage.memory import prefer_huge_pages
from monai_gds.storage.staging import new_stream

_stream = PerProcess(new_stream)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on huge pages: 100 MB take 10 ms, and 29 with ``clone``, which spends its time on page faults.

    NumPy makes it, in this thread. torch divides it among threads, which wait for one another while the cores are busy
    with transforms and with saving earlier items (41 ms on two busy cores, and 15 in one thread).
    """
    copy = torch.empty_like(tensor, requires_grad=False)
    prefer_huge_pages(copy)
    if tensor.nbytes:
        np.copyto(_bytes(copy), _bytes(tensor.detach()))
    return copy


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def snapshot(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Copies tensors to the host, as they are after the work that is queued on the current stream.

    When it returns, the originals may be changed: copies of CPU tensors are complete, and work that is queued on a
    device's current stream from then on runs after the copy.

    Args:
        tensors: contiguous, on the CPU or on CUDA devices.

    Returns:
        A function that blocks until every copy has arrived, and returns them in the same order; those of CUDA tensors
        are pinned.

    Raises:
        RuntimeError: there is no memory for the copies.
    """
    copies = []
    devices = {t.device for t in tensors if t.is_cuda}
    for device in devices:
        _stream(device).wait_stream(torch.cuda.current_stream(device))
    for tensor in tensors:
        if not tensor.is_cuda:
            copies.append(_copy(tensor))
            continue
        with torch.cuda.stream(_stream(tensor.device)):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            tensor.record_stream(_stream(tensor.device))
        copies.append(copy)
    events = [_stream(device).record_event() for device in devices]
    for device, event in zip(devices, events, strict=True):
        torch.cuda.current_stream(device).wait_event(event)

    def wait() -> list[torch.Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return wait
