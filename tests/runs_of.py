"""Runs of a label that lie in memory, for tests."""

from __future__ import annotations

import numpy as np
import torch

from monai_gds.tiles.runs import Runs, RunTable, pack

__all__ = ["reading", "unpacking"]


def reading(label: torch.Tensor) -> Runs:
    """The runs of a label, packed and read as out of a record."""
    packed = pack(label)
    assert packed is not None
    table = RunTable(tuple(label.shape), label.dtype, packed.table.numpy(), len(packed.blocks))

    return unpacking(table, packed.blocks.numpy())


def unpacking(table: RunTable, blocks: np.ndarray) -> Runs:
    """Runs over blocks in memory."""

    def decoded(block: int) -> tuple[np.ndarray, np.ndarray]:
        begin, nbytes = table.range_of(block)
        assert 0 <= begin <= begin + nbytes <= len(blocks)
        return table.decode(block, blocks[begin : begin + nbytes])

    return Runs(table, decoded)
