"""Host memory: on huge pages where the kernel has them; pooled, returned once, given out once at a time, bounded."""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from monai_gds import limits
from monai_gds.storage import Reads, open_storage
from monai_gds.storage import memory as pools
from monai_gds.storage.files import aligned_empty
from monai_gds.storage.memory import HUGE, collapse_to_huge_pages, pooled_empty, pooled_volume, tensor_at
from tests.fresh import warm


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    pools._pool.blocks.clear()
    yield
    pools._pool.blocks.clear()


@pytest.mark.parametrize("nbytes", [1, HUGE - 1, HUGE, 5 * HUGE + 3])
def test_as_many_bytes_as_asked_for(nbytes: int) -> None:
    memory = pooled_empty(nbytes)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((nbytes,), torch.uint8, True)
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes


@pytest.mark.parametrize("nbytes", [1, HUGE - 1, HUGE + 1])
def test_nothing_of_what_was_there_before_is_saved_along(nbytes: int) -> None:
    pooled_empty(nbytes + -nbytes % HUGE).fill_(0xAB)
    saved = io.BytesIO()
    torch.save(pooled_empty(nbytes).fill_(7), saved)
    assert bytes([0xAB] * 16) not in saved.getvalue()
    assert len(saved.getvalue()) < nbytes + 4096


def test_memory_comes_back_with_the_last_that_shares_it() -> None:
    memory = pooled_empty(3 * HUGE)
    address = memory.data_ptr()
    floats = memory.view(torch.float32).view(3, -1)
    array = floats[1].numpy()
    del memory
    floats.fill_(1.5)
    del floats
    others = [pooled_empty(3 * HUGE).fill_(0xFF) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    assert (array == 1.5).all()
    del others, array
    again = [pooled_empty(3 * HUGE) for _ in range(4)]
    assert address in [memory.data_ptr() for memory in again]


def test_a_block_serves_its_own_size_only() -> None:
    address = pooled_empty(4 * HUGE).data_ptr()
    small, same = pooled_empty(HUGE), pooled_empty(4 * HUGE - 5)
    assert same.data_ptr() == address
    assert not address <= small.data_ptr() < address + 4 * HUGE


def test_the_pool_has_bounds() -> None:
    kept = [pooled_empty(size * HUGE) for size in (3, 8, 16, 9, 30)]
    del kept[:]
    assert sum(block.nbytes for block in pools._pool.blocks) <= 32 << 20
    del kept
    pooled_empty((32 << 20) + 1)
    assert all(block.nbytes <= 32 << 20 for block in pools._pool.blocks)


def test_threads_never_get_the_same() -> None:
    def work(seed: int) -> bool:
        fine = True
        for _ in range(60):
            mine = [pooled_empty(HUGE).fill_(seed) for _ in range(3)]
            fine &= all(bool((memory == seed).all()) for memory in mine)
        return fine

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_the_collector_may_come_by_while_memory_is_asked_for() -> None:
    """It may run within any allocation, and gives back what lay in a cycle. In a process of its own: it crashed."""
    script = """
import gc
from monai_gds.storage.memory import HUGE, _pool, pooled_empty

class Cycle:
    def __init__(self):
        self.itself, self.memory = self, pooled_empty(HUGE)

gc.disable()
for _ in range(30):
    gc.collect()
    del _pool.blocks[:]
    some = [pooled_empty(HUGE) for _ in range(4)]
    cycles = [Cycle() for _ in range(12)]
    del some, cycles
    taken = [tuple([None] * 4) for _ in range(2200)]  # of the interpreter's store of such tuples, so that it allocates
    gc.set_threshold(1)
    gc.enable()
    pooled_empty(3 * HUGE)
    gc.disable()
print(len(_pool.blocks) * HUGE <= 32 << 20)
"""
    done = warm().run("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_it_comes_back_when_the_last_over_it_is_gone() -> None:
    memory = torch.arange(200, dtype=torch.uint8)
    back: list[str] = []
    tensor = tensor_at(memory.data_ptr(), 100, lambda: back.append("back"))
    assert (tensor.numel(), tensor.untyped_storage().nbytes(), tensor.data_ptr()) == (100, 100, memory.data_ptr())
    row, array = tensor.view(10, 10)[3], tensor.numpy()
    del tensor
    assert row.tolist() == list(range(30, 40))
    del row
    gc.collect()
    assert back == []
    del array
    assert back == ["back"]


def test_the_memory_lives_as_long_as_the_tensor() -> None:
    memory = torch.full((5 << 20,), 7, dtype=torch.uint8)
    tensor = tensor_at(memory.data_ptr(), 5 << 20, partial(list, memory[:0]))
    del memory
    others = [torch.zeros(5 << 20, dtype=torch.uint8) for _ in range(3)]
    assert bool((tensor == 7).all())
    assert not any(other.any() for other in others)
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.resize_(6 << 20)


@pytest.fixture
def empty_volumes() -> Iterator[list[object]]:
    pools._volumes.blocks.clear()
    yield pools._volumes.blocks
    pools._volumes.blocks.clear()


def test_volumes_of_similar_sizes_share_memory(empty_volumes: list[object]) -> None:
    first = pooled_volume(33 * HUGE)
    address = first.data_ptr()
    del first
    for nbytes in (60 * HUGE + 5, 33 * HUGE, 40 * HUGE):
        again = pooled_volume(nbytes)
        assert (again.data_ptr(), again.shape) == (address, (nbytes,))
        del again
    assert pooled_volume(3 * HUGE).data_ptr() != address  # else the next large one would find none


def test_the_volumes_kept_are_bounded_and_leave_batches_alone(empty_volumes: list[object]) -> None:
    batch = pooled_empty(3 * HUGE)
    address = batch.data_ptr()
    del batch
    held = [pooled_volume(limits.VOLUME_POOL_BYTES // 2) for _ in range(4)]
    large = pooled_volume(limits.VOLUME_POOL_BYTES + 1)
    assert large.numel() == limits.VOLUME_POOL_BYTES + 1
    del held, large
    assert len(empty_volumes) == 2
    assert pooled_empty(3 * HUGE).data_ptr() == address


def _smaps(tensor: torch.Tensor) -> list[str]:
    """The kernel's description of the mappings that a tensor's memory lies in."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, _, end = first.partition("-")
            inside = int(begin, 16) < tensor.data_ptr() + tensor.nbytes and int(end, 16) > tensor.data_ptr()
        elif inside:
            found.append(line)
    return found


def _huge_bytes(tensor: torch.Tensor, kind: str = "AnonHugePages:") -> int:
    """How much of a tensor's memory lies on huge pages."""
    return sum(int(line.split()[1]) << 10 for line in _smaps(tensor) if line.startswith(kind))


def test_the_kernel_is_asked_for_huge_pages() -> None:
    memory = aligned_empty(64 << 20).fill_(7)
    flags = [line.split()[1:] for line in _smaps(memory) if line.startswith("VmFlags:")]
    if not flags or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this machine's kernel has no huge pages, or does not tell")
    assert any("hg" in of_one for of_one in flags)
    assert bool((memory == 7).all())


@pytest.mark.parametrize(("nbytes", "asked"), [(3 << 20, True), (65 << 20, False)])
def test_mappings_of_records_are_on_huge_pages_unless_crops_would_read_too_much(
    tmp_path: Path, nbytes: int, asked: bool
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(4096 + nbytes))
    with contextlib.closing(open_storage("posix", "cpu")) as storage:
        mapped = storage.map(Reads.of(str(path), [(4096, nbytes)])).wait()
        flags = [line.split()[1:] for line in _smaps(mapped[0]) if line.startswith("VmFlags:")]
        if not flags or not Path("/sys/kernel/mm/transparent_hugepage").exists():
            pytest.skip("this machine's kernel has no huge pages, or does not tell")
        assert ["hg" in of_one for of_one in flags] == [asked]  # all of it, wherever it lies, as one mapping
        assert not mapped[0].any()


def test_a_volume_that_was_just_saved_is_mapped_on_huge_pages(tmp_path: Path) -> None:
    """But for its end, wherever in the record it begins: a fault for each small page takes longer than the copy."""
    path, nbytes, begin = tmp_path / "record", 5 << 20, 4 * 4096
    volumes = [torch.full((nbytes,), value, dtype=torch.uint8) for value in (1, 2)]
    with contextlib.closing(open_storage("posix", "cpu")) as storage:
        storage.write(str(path), [bytes(begin), *volumes], mode=0o600)
        mapped = storage.map(Reads.of(str(path), [(begin, nbytes), (begin + nbytes, nbytes)])).wait()
        assert all(map(torch.equal, mapped, volumes))  # touches them
        huge = [_huge_bytes(tensor, "FilePmdMapped:") for tensor in mapped]
        if not any(huge):
            pytest.skip("this machine's page cache has no huge pages, or its kernel does not tell")
        assert min(huge) >= nbytes


def test_memory_in_use_is_moved_onto_huge_pages() -> None:
    given = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(given, dtype=torch.uint8).fill_(7)
    before = _huge_bytes(memory)
    collapse_to_huge_pages(memory)
    after = _huge_bytes(memory)  # how much more depends on what else lives on the machine
    if after == before:
        with contextlib.suppress(OSError):
            given.madvise(25)  # MADV_COLLAPSE
        if _huge_bytes(memory) == before:
            pytest.skip("this kernel gives huge pages unasked, has none left, or is too old")
    assert after > before
    assert bool((memory == 7).all())
