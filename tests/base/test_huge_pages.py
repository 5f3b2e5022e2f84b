"""Huge pages, where the kernel has them."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import pytest
import torch

from monai_gds.base import huge_pages
from monai_gds.storage import Reads, open_storage
from monai_gds.storage.files import aligned_empty


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


def _huge_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor's memory lies on huge pages."""
    return sum(int(line.split()[1]) << 10 for line in _smaps(tensor) if line.startswith("AnonHugePages:"))


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


def test_memory_in_use_is_moved_onto_huge_pages() -> None:
    given = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(given, dtype=torch.uint8).fill_(7)
    before = _huge_bytes(memory)
    huge_pages.collapse(memory)
    after = _huge_bytes(memory)  # how much more depends on what else lives on the machine
    if after == before:
        with contextlib.suppress(OSError):
            given.madvise(25)  # MADV_COLLAPSE
        if _huge_bytes(memory) == before:
            pytest.skip("this kernel gives huge pages unasked, has none left, or is too old")
    assert after > before
    assert bool((memory == 7).all())
