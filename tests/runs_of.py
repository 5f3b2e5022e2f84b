"""Runs of a label that lie in memory, for tests."""

from __future__ import annotations

import numpy as np
import torch

from monai_gds.tiles.runs import Runs, RunTable, above, pack

__all__ = ["reading", "unpacking"]


def reading(label: torch.Tensor, image: torch.Tensor | None = None, threshold: str = "") -> Runs:
    """The runs of a label, or joint ones, packed and read as out of a record."""
    packed = pack(label, None if image is None else above(image, threshold))
    assert packed is not None
    form = None if image is None else (image.dtype, tuple(image.shape))
    table = RunTable(tuple(label.shape), label.dtype, packed.table.numpy(), len(packed.blocks), form)
    return unpacking(table, packed.blocks.numpy())


def unpacking(table: RunTable, blocks: np.ndarray) -> Runs:
    """Runs over blocks in memory."""

    def decoded(block: int) -> tuple[np.ndarray, np.ndarray]:
        begin, nbytes = table.range_of(block)
        assert 0 <= begin <= begin + nbytes <= len(blocks)
        return table.decode(block, blocks[begin : begin + nbytes])

    return Runs(table, decoded)
