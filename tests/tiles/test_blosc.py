"""Blocks compressed by Blosc2's library: they come back, other decoders read them, and damaged streams are refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.errors import DamagedRecord, MonaiGdsError
from monai_gds.tiles import blosc
from monai_gds.tiles.blosc import Blocks
from monai_gds.tiles.codecs import ON_CPU

pytestmark = pytest.mark.skipif(importlib.util.find_spec("blosc2") is None, reason="blosc2 is not installed")

BLOCK = 32_768
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.int64]


def example(dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """Blocks of every kind: zeros, equal bytes, noise, two that compress."""
    rng = np.random.default_rng(0)
    rows = [np.zeros(BLOCK), np.full(BLOCK, 200), rng.integers(0, 256, BLOCK), *rng.integers(0, 3, (2, BLOCK))]
    return torch.from_numpy(np.stack(rows).astype(np.uint8)).view(dtype)


def gather(blocks: Blocks, chosen: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A buffer with the streams of some blocks, in that order, as decompress takes it."""
    parts, starts, at = [], [], blosc.head_bytes(len(chosen))
    for i in chosen:
        start, size = blocks.starts[i], max(0, blocks.sizes[i])
        parts += [np.full(4, 77, np.uint8), blocks.data[start : start + size]]
        starts.append(at + 4)
        at += 4 + size
    head = np.full(blosc.head_bytes(len(chosen)), 77, np.uint8)
    return np.concatenate([head, *parts]), np.array(starts), blocks.sizes[chosen]


@pytest.mark.parametrize("codec", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(chosen=st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_any_selection_in_any_order_comes_back(codec: str, dtype: torch.dtype, chosen: list[int]) -> None:
    blocks = example(dtype)
    out = torch.empty(len(chosen), blocks.shape[1], dtype=dtype)
    buffer, starts, sizes = gather(blosc.compress(blocks, codec), chosen)
    blosc.decompress(buffer, starts, sizes, codec, out)
    assert torch.equal(out.view(torch.uint8), blocks[chosen].view(torch.uint8))


@pytest.mark.parametrize("codec", ON_CPU)
def test_blocks_of_equal_bytes_take_no_room_and_noise_is_stored(codec: str) -> None:
    found = blosc.compress(example(), codec)
    assert found.sizes[:3].tolist() == [0, -200, BLOCK]
    assert 0 < found.sizes[3:].max() < BLOCK
    assert blosc.compress(torch.zeros(3, 1000, dtype=torch.int16), codec).sizes.tolist() == [0, 0, 0]


def test_streams_are_plain_lz4_blocks_and_zstd_frames_of_shuffled_bytes() -> None:
    """What a decoder on a GPU relies on."""
    lz4, zstandard = pytest.importorskip("lz4.block"), pytest.importorskip("zstandard")
    decoders = {
        "lz4": lambda stream: lz4.decompress(stream, uncompressed_size=BLOCK),
        "zstd": lambda stream: zstandard.ZstdDecompressor().decompress(stream, max_output_size=BLOCK),
    }
    for codec, decode in decoders.items():
        blocks = example()
        found = blosc.compress(blocks, codec)
        for i in (2, 3, 4):
            stream = found.data[found.starts[i] : found.starts[i] + found.sizes[i]].tobytes()
            planes = stream if found.sizes[i] == BLOCK else decode(stream)
            shuffled = blocks[i].view(torch.uint8).view(-1, 2).t().contiguous()
            assert planes == shuffled.numpy().tobytes()


@pytest.mark.parametrize("codec", ON_CPU)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=8))
def test_a_damaged_stream_raises_or_gives_other_bytes(codec: str, flips: list[tuple[int, int]]) -> None:
    """And writes nowhere else: what lies after the output stays."""
    blocks = example()
    buffer, starts, sizes = gather(blosc.compress(blocks, codec), [3, 4, 2])
    for at, by in flips:
        buffer[starts[0] + at % (len(buffer) - starts[0])] ^= by
    memory = torch.full((4, blocks.shape[1]), 77, dtype=torch.int16)
    try:
        blosc.decompress(buffer, starts, sizes, codec, memory[:3])
    except DamagedRecord as e:
        assert codec in str(e)
    assert (memory[3] == 77).all()


@pytest.mark.parametrize(
    ("change", "by"),
    [("starts", 1 << 20), ("starts", -(1 << 20)), ("sizes", BLOCK), ("sizes", -BLOCK)],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_decoded(change: str, by: int) -> None:
    buffer, starts, sizes = gather(blosc.compress(example(), "lz4"), [3, 4])
    (starts if change == "starts" else sizes)[1] += by
    with pytest.raises(DamagedRecord, match="do not fit"):
        blosc.decompress(buffer, starts, sizes, "lz4", torch.empty(2, BLOCK // 2, dtype=torch.int16))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    blosc._library.cache_clear()
    try:
        with pytest.raises(MonaiGdsError, match=r"pip install 'monai_gds\[tiles\]'"):
            blosc.compress(example(), "lz4")
        assert "not installed" in (blosc.why_not() or "")
    finally:
        blosc._library.cache_clear()
    monkeypatch.undo()
    assert blosc.why_not() is None


def test_the_python_package_is_not_imported() -> None:
    code = "import sys; from monai_gds.tiles import blosc; print(blosc.why_not(), 'blosc2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "None False\n"
