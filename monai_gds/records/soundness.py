"""Checks every byte of a record, and that an item can be made of it. For ``monai-gds cache verify``.

It is not damage if this process lacks something to read a record: types that nobody registered here, named tuples of
modules that nobody imported, a codec's library. Everything else that :class:`monai_gds.records.reader.RecordReader`
refuses is refused here too.
"""

from __future__ import annotations

from contextlib import suppress
from io import BufferedReader

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from monai_gds.errors import DamagedRecord
from monai_gds.items.passthrough import ANYTHING
from monai_gds.items.tree import compile_tree, tensor_of
from monai_gds.items.types import UnknownHere
from monai_gds.records.entries import read
from monai_gds.records.header import ARRAYS, TABLE, Header, RunsKey
from monai_gds.records.heads import run_table_of, tiles_of
from monai_gds.tiles import blosc
from monai_gds.tiles.runs import RunTable, above
from monai_gds.tiles.tiles import Tiles
from monai_gds.tiles.unpacking import unpack, why_not


def check_record(file: BufferedReader, record: Header) -> None:
    """Checks an open record whose header was parsed.

    Raises:
        DamagedRecord: a checksum differs, what is packed cannot be unpacked, or no item can be made.
        NewerRecord: only a later version can make the item.
        OSError: it cannot be read.
    """
    front = {name: read(file, name, entry) for name, entry in record.front().items()}
    looked_at = {name for key in record.runs for name in key[:2]}
    whole: dict[str, torch.Tensor | None] = {}
    for name, entry in record.tensors.items():
        data = read(file, name, entry)
        if name in record.tiles:
            tensor = _unpacked(tiles_of(record, name, front[TABLE + name].numpy()), data)
        else:
            tensor = tensor_of(data, getattr(torch, entry.dtype), entry.shape)
        if name in looked_at:
            whole[name] = tensor
    for key, (_, at) in record.runs.items():
        table, blocks = key.entries
        found = run_table_of(record, key, front[table].numpy())
        _check_runs(key, found, read(file, blocks, at), whole[key.label], whole.get(key.image))
    _check_item(record, bytes(front[ARRAYS].numpy()) if ARRAYS in front else b"")
    try:
        with safe_open(f"/proc/self/fd/{file.fileno()}", "np"):  # by its name there may be another record by now
            pass
    except FileNotFoundError:  # a machine without /proc
        pass
    except SafetensorError as e:
        raise DamagedRecord(f"the safetensors library refuses it: {e}") from e


def _unpacked(tiles: Tiles, streams: torch.Tensor) -> torch.Tensor | None:
    """A tensor in tiles; None if it cannot be unpacked here, and only its checksums were compared."""
    tiles.check(streams.numpy(), tiles.starts, np.arange(len(tiles.sizes)))
    if why_not(tiles.layout.codec) is not None:
        return None
    return unpack(tiles, streams.numpy())


def _check_runs(
    key: RunsKey, table: RunTable, blocks: torch.Tensor, label: torch.Tensor | None, image: torch.Tensor | None
) -> None:
    """Checks that the runs of a label are those of its voxels, as far as label and image could be unpacked."""
    flags = above(image, key.threshold).reshape(-1).numpy() if image is not None and key.threshold else None
    if blosc.why_not() is not None:
        return
    kind = f"u{table.dtype.itemsize}"
    values, at = table.values.view(torch.uint8).numpy().view(kind), 0
    voxels = None if label is None else label.reshape(-1).view(torch.uint8).numpy().view(kind)
    for block in range(table.blocks):
        begin, nbytes = table.range_of(block)
        lengths, ids = table.decode(block, blocks.numpy()[begin : begin + nbytes])
        end = at + int(lengths.sum())
        wrong = voxels is not None and not np.array_equal(np.repeat(values[ids], lengths), voxels[at:end])
        if flags is not None and table.above is not None and not wrong:
            wrong = not np.array_equal(np.repeat(table.above.numpy()[ids], lengths), flags[at:end])
        if wrong:
            raise DamagedRecord(
                f"block {block} of {table.blocks} of its runs does not hold the voxels of {key.label!r:.40}"
            )
        at = end


def _check_item(record: Header, arrays: bytes) -> None:
    """Puts the item together from uninitialised tensors. Raises what that raises, except for types unknown here."""
    with suppress(UnknownHere):
        recipe = compile_tree(record.tree, arrays, record.tensors, numpy=True, root="/")
        tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
            for name, entry in record.tensors.items()
        }
        recipe(tensors, ANYTHING)
