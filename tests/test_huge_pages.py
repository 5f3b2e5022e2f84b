"""Memory that is used again: given out once at a time, and not without bounds. (tests/storage has the pages' size.)"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from monai_gds import huge_pages
from monai_gds.huge_pages import HUGE, used_before


@pytest.fixture(autouse=True)
def none_kept() -> Iterator[None]:
    huge_pages._kept.clear()
    yield
    huge_pages._kept.clear()


@pytest.mark.parametrize("nbytes", [1, HUGE - 1, HUGE, 5 * HUGE + 3])
def test_as_many_bytes_as_asked_for(nbytes: int) -> None:
    memory = used_before(nbytes)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((nbytes,), torch.uint8, True)
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes


def test_memory_comes_back_with_the_last_that_shares_it() -> None:
    memory = used_before(3 * HUGE)
    address = memory.data_ptr()
    floats = memory.view(torch.float32).view(3, -1)
    array = floats[1].numpy()
    del memory
    floats.fill_(1.5)
    del floats
    others = [used_before(3 * HUGE).fill_(0xFF) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    assert (array == 1.5).all()
    del others, array
    again = [used_before(3 * HUGE) for _ in range(4)]
    assert address in [memory.data_ptr() for memory in again]


def test_a_block_serves_its_own_size_only() -> None:
    address = used_before(4 * HUGE).data_ptr()
    small, same = used_before(HUGE), used_before(4 * HUGE - 5)
    assert same.data_ptr() == address
    assert not address <= small.data_ptr() < address + 4 * HUGE


def test_what_is_kept_has_bounds() -> None:
    kept = [used_before(size * HUGE) for size in (3, 8, 16, 9, 30)]
    del kept[:]
    assert sum(block.memory.nbytes for block in huge_pages._kept) <= 64 << 20
    del kept
    used_before((64 << 20) + 1)
    assert all(block.memory.nbytes <= 64 << 20 for block in huge_pages._kept)


def test_threads_never_get_the_same() -> None:
    def work(seed: int) -> bool:
        fine = True
        for _ in range(200):
            mine = [used_before(HUGE).fill_(seed) for _ in range(3)]
            fine &= all(bool((memory == seed).all()) for memory in mine)
        return fine

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
