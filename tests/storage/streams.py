"""Scenarios of streams and memory that changes hands, where ``staging.py`` alone can break them, not a backend.

As those of :mod:`monai_gds.testing.cuda`, they are functions that return whether the bytes were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from monai_gds import limits
from monai_gds.storage import Reads, Storage, staging
from monai_gds.testing.cuda import LONG, _fill, _load, _sleep, _stream
from monai_gds.testing.tools import bytes_of, content


def _make_every_slot(storage: Storage) -> None:
    """Makes every staging slot. Otherwise the host would wait for one whose copy is late, and no copy would be late."""
    pool = staging.staging_pool(storage.device)
    for slot in [pool.acquire() for _ in range(limits.STAGING_SLOTS)]:
        pool.release(slot)


def handed_over(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether a consumer sees what it loaded although the copies are late.

    Fails when ``staging.hand_off`` does not make the current stream wait for the copy stream.
    """
    nbytes = 9 << 20
    _make_every_slot(storage)
    _load(storage, path, (1000, nbytes), (2000, 100))  # other bytes where the next ones will go
    torch.cuda.synchronize(storage.device)
    with torch.cuda.stream(staging.copy_stream(storage.device)):
        _sleep(LONG)
    with torch.cuda.stream(consumer):
        seen = [t.clone() for t in _load(storage, path, (1, nbytes), (5, 100))]
        dest = torch.zeros(nbytes, dtype=torch.uint8, device=storage.device)
        _fill(storage, path, 2, dest)
        seen.append(dest.clone())
    torch.cuda.synchronize(storage.device)
    return [bytes_of(t) for t in seen] == [data[1 : 1 + nbytes], data[5:105], data[2 : 2 + nbytes]]


def handed_over_to_every_stream(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether each of several streams that wait for the same reads sees them, and keeps them after they are dropped.

    Fails when only the first stream that waits is made to, or only that one is recorded.
    """
    nbytes = 9 << 20
    streams = [consumer, *(_stream(storage) for _ in range(2))]
    seen = []
    for i in range(4):
        pending = storage.load(Reads.of(str(path), [(i, nbytes), (i + 1, nbytes)]))
        with torch.cuda.stream(staging.copy_stream(storage.device)):
            _sleep(LONG // 4)
        for stream in streams:
            with torch.cuda.stream(stream):
                tensors = pending.wait()
                _sleep(LONG // 8)
                seen += [(i + at, tensor.clone()) for at, tensor in enumerate(tensors)]
                del tensors
        del pending
    torch.cuda.synchronize(storage.device)
    return all(bytes_of(t) == data[offset : offset + nbytes] for offset, t in seen)


def many_slow_consumers_keep_their_data(storage: Storage, paths: Sequence[str], consumer: torch.cuda.Stream) -> bool:
    """Whether two streams that use many small files late, and free them at once, see them whole."""
    streams = (consumer, _stream(storage))
    reads = Reads.join([Reads.of(path, [(0, Path(path).stat().st_size)]) for path in paths])
    seen = []
    for _ in range(4):
        pending = storage.load(reads)
        with torch.cuda.stream(staging.copy_stream(storage.device)):
            _sleep(LONG // 8)
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                tensors = pending.wait()
                _sleep(LONG // 8)
                seen += [(i, tensors[i].clone()) for i in range(number, len(tensors), 2)]
                del tensors
        del pending
    torch.cuda.synchronize(storage.device)
    sizes = reads.nbytes.tolist()
    return all(bytes_of(t) == content(sizes[i], i) for i, t in seen)


def dropped_destination_is_not_reused(storage: Storage, path: Path, data: bytes, consumer: torch.cuda.Stream) -> bool:
    """Whether memory of a destination that nobody waited for stays unused until its copy is over.

    Fails when ``staging.adopt`` does not record the destinations on the copy stream.
    """
    nbytes = 20 << 20
    torch.cuda.synchronize(storage.device)
    torch.cuda.empty_cache()
    with torch.cuda.stream(consumer):
        dest = torch.empty(nbytes, dtype=torch.uint8, device=storage.device)
        with torch.cuda.stream(staging.copy_stream(storage.device)):
            _sleep(LONG)
        storage.fill(Reads.of(str(path), [(0, nbytes)]), [dest])
        del dest
        storage.close()  # every byte is read, and every copy queued
        fresh = torch.full((nbytes,), 7, dtype=torch.uint8, device=storage.device)
    torch.cuda.synchronize(storage.device)
    return bool((fresh == 7).all())
