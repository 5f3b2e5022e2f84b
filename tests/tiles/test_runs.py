"""Runs of a label: they find what NumPy finds in the label, and wrong ones are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monai_gds import limits
from monai_gds.errors import DamagedRecord
from monai_gds.tiles import blosc
from monai_gds.tiles import runs as module
from monai_gds.tiles.runs import Packed, RunTable, above, pack, threshold_of, threshold_text
from tests.runs_of import reading, unpacking

pytestmark = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn,
]  # fmt: skip


def organs(shape: tuple[int, ...] = (1, 70, 60, 50), values: int = 7) -> torch.Tensor:
    """A label of some boxes in background, float32."""
    generator = np.random.default_rng(0)
    label = torch.zeros(shape)
    for value in range(1, values):
        corner = [int(generator.integers(0, size - size // 3)) for size in shape[1:]]
        label[(0, *(slice(c, c + size // 3) for c, size in zip(corner, shape[1:], strict=True)))] = value
    return label


def packed_of(label: torch.Tensor) -> Packed:
    packed = pack(label)
    assert packed is not None
    return packed


def table_of(label: torch.Tensor, packed: Packed) -> RunTable:
    """As a reader makes it."""
    return RunTable(tuple(label.shape), label.dtype, packed.table.numpy(), len(packed.blocks))


def check(table: RunTable, blocks: np.ndarray) -> None:
    """Decodes every block, given the bytes of all."""
    for block in range(table.blocks):
        begin, nbytes = table.range_of(block)
        table.decode(block, blocks[begin : begin + nbytes])


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A row of bytes per element."""
    return tensor.reshape(-1, 1).view(torch.uint8).numpy().reshape(tensor.numel(), -1)


def same_everywhere(label: torch.Tensor, ks: int = 20) -> None:
    """Compares counts and single elements of each value, and of some sets of values, with NumPy's."""
    packed = packed_of(label)
    table = table_of(label, packed)
    check(table, packed.blocks.numpy())
    runs, values = reading(label), bits(table.values)
    of_element = np.full(label.numel(), -1)
    for i, value in enumerate(values):
        of_element[(bits(label) == value).all(1)] = i
    assert of_element.min() == 0
    generator = np.random.default_rng(0)
    singles = list(np.eye(len(values), dtype=bool))
    for chosen in [*singles, np.ones(len(values), bool), np.zeros(len(values), bool), ~singles[0]]:
        right = np.flatnonzero(chosen[of_element])
        assert runs.count(chosen) == len(right)
        if len(right):
            first_of_blocks = np.cumsum(table.counts[:, chosen].sum(1))[:ks].tolist()
            for k in {0, len(right) - 1, *first_of_blocks, *generator.integers(0, len(right), ks).tolist()}:
                assert k == len(right) or runs.find(chosen, k) == right[k]
        for outside in (-1, len(right)):
            with pytest.raises(IndexError):
                runs.find(chosen, outside)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    dtype=st.sampled_from(DTYPES),
    values=st.integers(1, 40),
    block=st.sampled_from([1, 3, 16, 4096]),
    shape=st.sampled_from([(-1,), (-1, 1), (1, -1, 1)]),
    seed=st.integers(0, 10),
)
def test_finds_what_numpy_finds(
    lengths: list[int], dtype: torch.dtype, values: int, block: int, shape: tuple[int, ...], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(0, 256, (values, dtype.itemsize), dtype=torch.uint8, generator=generator)
    some = some % 2 if dtype == torch.bool else some
    which = torch.randint(0, values, (len(lengths),), generator=generator)
    label = some[which.repeat_interleave(torch.tensor(lengths))].view(dtype).reshape(1, *shape)
    with pytest.MonkeyPatch.context() as patch:
        # Any label may have any number of blocks. Blosc2 takes no block of a few bytes.
        patch.setattr(module, "_BLOCK_RUNS", max(block, 200 // block))
        patch.setattr(module, "_LEAST_LENGTH", 1)
        patch.setattr(module, "_LEAST_ELEMENTS_PER_BYTE", 0)
        same_everywhere(label, ks=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_are_distinguished_by_their_bits(dtype: torch.dtype) -> None:
    odd = [0.0, -0.0, float("nan"), -float("inf"), float("inf"), -3.0, 2.5]
    label = torch.tensor(odd, dtype=dtype).repeat_interleave(5000).reshape(1, 7, -1)
    assert len(table_of(label, packed_of(label)).values) == 7
    same_everywhere(label)


def test_many_blocks_of_organs() -> None:
    label = torch.zeros(1, 64, 64, 256)
    label[..., 50:100] = torch.arange(4096).view(64, 64, 1) % 20 + 1
    label[..., 150:200] = torch.arange(4096).view(64, 64, 1) % 7 + 10
    assert table_of(label, packed_of(label)).blocks > 3
    same_everywhere(label)


def test_one_run() -> None:
    same_everywhere(torch.full((1, 10, 1000), 3))
    assert len(packed_of(torch.zeros(1, 500, 500)).blocks) < 100


def test_reading_takes_the_table_and_one_block() -> None:
    label = organs((1, 128, 128, 128), 40)
    packed, read = packed_of(label), []
    runs = reading(label)
    decoded = runs._read_block
    runs._read_block = lambda block: (read.append(block), decoded(block))[1]  # type: ignore[func-returns-value]
    foreground = (runs.values != 0).numpy()
    assert runs.count(foreground) == int((label != 0).sum())
    assert read == []
    runs.find(foreground, 100)
    assert len(read) == 1
    assert sum(len(part) for part in (packed.table, packed.blocks)) < label.numel() / 25


@pytest.mark.parametrize(
    "label",
    [
        torch.arange(1 << 18).view(1, 64, 64, 64) % 2,  # every element is a run
        torch.randint(0, 256, (1, 9, 9, 999), generator=torch.Generator().manual_seed(0)).repeat_interleave(17, 3),
        torch.arange(300).repeat_interleave(1000).view(1, -1, 50),  # more than 256 values
        organs().expand(2, -1, -1, -1).contiguous(),  # two channels, as of one-hot labels
        organs()[0],
        torch.zeros(1 << 18),
        torch.zeros(1, 1 << 18, dtype=torch.complex64),
        torch.zeros(1, 0, 5),
        torch.zeros(()),
    ],
    ids=lambda label: f"{tuple(label.shape)}",
)
def test_runs_that_do_not_pay_are_not_stored(label: torch.Tensor) -> None:
    assert pack(label) is None


def test_the_table_is_bounded_whatever_the_number_of_values() -> None:
    label = torch.zeros(1, 512, 512, 40, dtype=torch.uint8)
    label[..., 20:] = (torch.arange(512 * 512) % 255 + 1).view(512, 512, 1)
    packed, runs = packed_of(label), reading(label)
    assert len(packed.table) < 1.2 * limits.RUN_COUNTS_BYTES
    right = torch.nonzero(label.reshape(-1) == 200).squeeze(1)
    is_200 = (runs.values == 200).numpy()
    assert [runs.find(is_200, k) for k in (0, 5000, len(right) - 1)] == right[[0, 5000, -1]].tolist()


def test_every_flipped_byte_of_a_block_is_found() -> None:
    label = organs()
    packed = packed_of(label)
    runs, blocks = table_of(label, packed), packed.blocks.numpy()
    for place in range(len(blocks)):
        blocks[place] ^= 1
        with pytest.raises(DamagedRecord, match="checksum"):
            check(runs, blocks)
        blocks[place] ^= 1
    check(runs, blocks)


@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_wrong_table_is_refused_or_finds_elements_of_the_tensor(flips: list[tuple[int, int]]) -> None:
    label = organs()
    packed = packed_of(label)
    table = packed.table.numpy().copy()
    for place, change in flips:
        table[place % len(table)] ^= change
    try:
        found = RunTable(tuple(label.shape), label.dtype, table, len(packed.blocks))
        runs = unpacking(found, packed.blocks.numpy())
        everything = np.ones(len(found.values), bool)
        for k in range(0, runs.count(everything), 5000):
            assert 0 <= runs.find(everything, k) < label.numel()
    except DamagedRecord:
        pass


@pytest.mark.parametrize(
    "numbers",
    [(0, 4096, 7), (1, 0, 7), (1, 4096, 0), (1 << 31, 1, 7), ((1 << 32) - 1, (1 << 32) - 1, 256), (5, 1 << 20, 7)],
    ids=str,
)
def test_a_table_takes_no_memory_that_is_not_in_the_file(numbers: tuple[int, int, int]) -> None:
    label = organs()
    table = packed_of(label).table.numpy().copy()
    table[:12] = np.array(numbers, np.uint32).view(np.uint8)
    with pytest.raises(DamagedRecord):
        RunTable(tuple(label.shape), label.dtype, table, 1 << 20)


def test_a_block_that_contradicts_the_counts_of_its_table_is_refused() -> None:
    label = organs()
    packed = packed_of(label)
    table = packed.table.numpy().copy()
    blocks = table_of(label, packed).blocks
    counts = table[12 + 8 * blocks :][: 4 * 7].view(np.uint32)  # of the first block
    counts[:] = counts[::-1].copy()
    found = RunTable(tuple(label.shape), label.dtype, table, len(packed.blocks))
    with pytest.raises(DamagedRecord, match="counts"):
        unpacking(found, packed.blocks.numpy()).find(np.ones(7, bool), 0)


@pytest.mark.parametrize("nbytes", [0, 11, 12, 50])
def test_a_table_that_was_cut_is_refused(nbytes: int) -> None:
    label = organs()
    with pytest.raises(DamagedRecord):
        RunTable(tuple(label.shape), label.dtype, packed_of(label).table.numpy()[:nbytes], 1)


@pytest.mark.parametrize(
    "change", [{"shape": (1, 70, 60, 51)}, {"shape": (210_000,)}, {"dtype": torch.float64}], ids=str
)
def test_a_table_of_another_tensor_is_refused(change: dict[str, Any]) -> None:
    label = organs()
    packed = packed_of(label)
    found = {"shape": tuple(label.shape), "dtype": label.dtype, **change}
    assert math.prod(label.shape) == 210_000
    with pytest.raises(DamagedRecord):
        RunTable(found["shape"], found["dtype"], packed.table.numpy(), len(packed.blocks))


def test_a_default_device_does_not_matter() -> None:
    label = organs()
    torch.set_default_device("meta")
    try:
        packed = packed_of(label)
        table = table_of(label, packed)
        check(table, packed.blocks.numpy())
    finally:
        torch.set_default_device(None)
    assert torch.equal(table.values, torch.arange(7.0))


# ---------------------------------------------------------------------------------------------------------------------
# Joint runs


@given(
    of_label=st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    of_image=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    dtype=st.sampled_from(DTYPES),
    values=st.integers(1, 9),
    block=st.sampled_from([3, 4096]),
    threshold=st.sampled_from([0, 0.0, 0.5, -1.0, 2, math.nan]),
)
def test_joint_runs_find_what_numpy_finds(
    of_label: list[int], of_image: list[int], dtype: torch.dtype, values: int, block: int, threshold: float
) -> None:
    size = sum(of_label)
    generator = torch.Generator().manual_seed(size)
    which = torch.randint(0, values, (len(of_label),), generator=generator).repeat_interleave(torch.tensor(of_label))
    label = (which % 2 if dtype == torch.bool else which).to(dtype).reshape(1, 1, size)
    signs = torch.tensor([(-1.0) ** i for i in range(len(of_image))]).repeat_interleave(torch.tensor(of_image))
    image = torch.stack([signs.repeat(-(-size // len(signs)))[:size], label[0, 0].float()]).reshape(2, 1, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_RUNS", max(block, 200 // block))
        patch.setattr(module, "_LEAST_LENGTH", 1)
        patch.setattr(module, "_LEAST_JOINT_LENGTH", 1)
        patch.setattr(module, "_LEAST_JOINT_ELEMENTS_PER_BYTE", 0)
        runs = reading(label, image, threshold_text(threshold))
    is_above = (image > threshold).any(0).reshape(-1).numpy()
    assert runs.above is not None
    for i, (value, flag) in enumerate(zip(bits(runs.values), runs.above.numpy(), strict=True)):
        right = np.flatnonzero((bits(label) == value).all(1) & (is_above == flag))
        chosen = np.arange(len(runs.values)) == i
        assert 0 < len(right) == runs.count(chosen)
        for k in {0, len(right) // 2, len(right) - 1}:
            assert runs.find(chosen, k) == right[k]
    assert runs.count(np.ones(len(runs.values), bool)) == size


def test_joint_runs_have_at_most_256_pairs() -> None:
    label = torch.arange(200, dtype=torch.uint8).repeat_interleave(1000).view(1, 400, 500)
    half = torch.zeros(1, 400, 500)
    half[:, :, ::250] = half[:, :, :100] = 1
    assert pack(label) is not None and pack(label, above(half, "1")) is not None
    assert pack(label, above(half, "0")) is None


def test_joint_runs_with_noise_do_not_pay() -> None:
    noise = torch.randn((1, 70, 60, 50), generator=torch.Generator().manual_seed(0))
    assert pack(organs(), above(noise, "0")) is None
    assert pack(organs(), above(noise, "6.0")) is not None


@pytest.mark.parametrize("threshold", [0, -5, 0.0, -0.0, 1e-300, 0.1, math.inf, -math.inf, math.nan, (1 << 63) - 1])
def test_a_threshold_is_read_as_it_was_written(threshold: float) -> None:
    read = threshold_of(threshold_text(threshold))
    assert type(read) is type(threshold) and repr(read) == repr(threshold)


@pytest.mark.parametrize("threshold", [True, None, "0", np.float64(1), np.int64(1), 1 << 63, torch.tensor(1.0)])
def test_other_thresholds_are_not_written(threshold: Any) -> None:
    assert threshold_text(threshold) == ""


@pytest.mark.parametrize(
    "text",
    ["", "x", "00", "0.00", "1_0", " 1", "1e5", "+1", "-", "--1", "9" * 19, "9" * 5000, "٣"],
    ids=lambda text: ascii(text)[:9],
)
def test_what_no_writer_writes_is_no_threshold(text: str) -> None:
    with pytest.raises(DamagedRecord, match="threshold"):
        threshold_of(text)


def test_an_image_that_cannot_be_compared() -> None:
    with pytest.raises(DamagedRecord, match="complex64"):
        above(torch.zeros(1, 8, dtype=torch.complex64), "0.0")


def test_a_joint_table_is_of_its_image() -> None:
    label, image = organs(), organs(values=3)
    packed = pack(label, above(image, "1"))
    assert packed is not None
    table, nbytes = packed.table.numpy(), len(packed.blocks)
    shape = tuple(label.shape)
    found = RunTable(shape, label.dtype, table, nbytes, (image.dtype, (2, *shape[1:])))
    assert found.above is not None and len(found.above) == len(found.values) > len(found.values.unique())
    for other in (None, (image.dtype, (1, 70, 60, 51)), (image.dtype, ())):
        with pytest.raises(DamagedRecord, match="size"):
            RunTable(shape, label.dtype, table, nbytes, other)
    for flags, says in ((0, "twice"), (2, "twice")):
        wrong = table.copy()
        wrong[-len(found.values) :] = flags
        with pytest.raises(DamagedRecord, match=says):
            RunTable(shape, label.dtype, wrong, nbytes, (image.dtype, shape))
