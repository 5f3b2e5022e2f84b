"""The checksum finds what disks do to data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from monai_gds.base.checksum import checksum, checksum_of_file, checksums

ROW = 8 * 4096
SIZES = [0, 1, 7, 8, 9, 4096, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, (2 << 20) + ROW, (2 << 20) + 17]


def _data(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def _by_definition(data: bytes) -> int:
    """The same sum in plain integers: columns of 4096 words, each row's sum weighted by the row's own weight."""
    mask = (1 << 64) - 1

    def weight(n: int) -> int:
        z = (n + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return (z ^ (z >> 31)) | 1

    total = len(data) * 0x9E3779B97F4A7C15
    padded = data + bytes(-len(data) % 8)
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little", signed=True)
        row, column = divmod(i // 8, 4096)
        total += (word + (word >> 32)) * weight(column) * weight(row + (1 << 32))
    return total & mask


@pytest.mark.parametrize("nbytes", [0, 1, 9, 4096, ROW + 24])
def test_is_the_sum_it_says(nbytes: int) -> None:
    data = _data(nbytes)
    assert checksum(data) == _by_definition(data.numpy().tobytes())


@pytest.mark.parametrize("nbytes", SIZES)
def test_same_bytes_same_sum_wherever_they_lie(nbytes: int) -> None:
    data = _data(nbytes)
    shifted = torch.empty(nbytes + 3, dtype=torch.uint8)[3:]
    shifted.copy_(data)
    assert checksum(data) == checksum(data.clone()) == checksum(shifted)
    assert 0 <= checksum(data) < 1 << 64


@pytest.mark.parametrize("nbytes", [1, 13, ROW, ROW + 11])
def test_every_single_bit_counts(nbytes: int) -> None:
    data = _data(nbytes)
    good = checksum(data)
    places = range(nbytes) if nbytes < 100 else [0, 1, 7, 8, 4095, nbytes // 2, nbytes - 2, nbytes - 1]
    for place in places:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(data) != good, f"bit {bit} of byte {place}"
            data[place] ^= 1 << bit
    assert checksum(data) == good


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d: d.bitwise_not_(), id="inverted"),
        pytest.param(lambda d: d[512:1024].bitwise_not_(), id="a sector inverted"),
        pytest.param(lambda d: d[4096:8192].fill_(0), id="a page of zeros"),
        pytest.param(lambda d: d[4096:8192].fill_(255), id="a page of ones"),
        pytest.param(lambda d: d[:8192].copy_(d[:8192].roll(4096)), id="two pages swapped"),
        pytest.param(lambda d: d[:16].copy_(d[:16].roll(8)), id="two words swapped"),
        pytest.param(lambda d: d.view(torch.int64)[::2].bitwise_xor_(-(2**63)), id="top bits of many words"),
        pytest.param(lambda d: d.copy_(d.roll(1)), id="shifted by a byte"),
        pytest.param(lambda d: d.copy_(d.roll(ROW)), id="shifted by a row"),
    ],
)
@pytest.mark.parametrize("start", ["random", "zeros"])
def test_what_disks_do_shows(change, start: str) -> None:
    data = _data(4 * ROW) if start == "random" else torch.zeros(4 * ROW, dtype=torch.uint8)
    before, good = data.clone(), checksum(data)
    change(data)
    if not torch.equal(before, data):
        assert checksum(data) != good


def test_length_counts() -> None:
    sums = [checksum(torch.zeros(n, dtype=torch.uint8)) for n in range(20)]
    assert len(set(sums)) == len(sums)


def test_of_several_is_that_of_each() -> None:
    several = [_data(n, n) for n in SIZES]
    assert checksums(several) == [checksum(data) for data in several]
    assert checksums([]) == []


@pytest.mark.gpu
def test_of_several_on_a_gpu() -> None:
    several = [_data(n, n) for n in SIZES]
    assert checksums([data.cuda() for data in several]) == checksums(several)


@pytest.mark.parametrize("nbytes", SIZES)
def test_of_a_file_is_that_of_its_bytes(nbytes: int, tmp_path: Path) -> None:
    data = _data(nbytes)
    (tmp_path / "file").write_bytes(data.numpy().tobytes() + b"more")
    with (tmp_path / "file").open("rb") as file:
        assert checksum_of_file(file.fileno(), nbytes) == checksum(data)
