"""Reads a record whole, as it was before it was laid out, so that it can be written anew in another form.

Used by :class:`monai_gds.folder.directory.CacheDirectory` for ``monai-gds cache warm``. No transform runs and no item
is
assembled: the result is what :func:`monai_gds.records.writing.pack_record` was given. Everything read is checked.
"""

from __future__ import annotations

from io import BufferedReader

import torch

from monai_gds.errors import DamagedRecord
from monai_gds.items.tree import EncodedItem, tensor_of
from monai_gds.records import header
from monai_gds.records.header import ARRAYS, TABLE
from monai_gds.records.heads import check_codecs
from monai_gds.records.pending_item import check_entry
from monai_gds.records.writing import check_name, without_tiles
from monai_gds.storage import FileId
from monai_gds.tiles.tiles import Layout, Tiles
from monai_gds.tiles.unpacking import unpack

__all__ = ["read_entry", "read_whole"]


def read_whole(path: str, digest: str) -> tuple[FileId, EncodedItem]:
    """Reads the record of a key.

    Returns:
        The identity of its file, and the item taken apart, its tensors on the CPU.

    Raises:
        RecordError: it is damaged, of a newer version, or packed by a codec that is missing here.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        identity = FileId.of(file.fileno())
        record = header.read(file.fileno())
        check_name(record, digest)
        check_codecs(record, on_gpu=False)
        front = {name: _checked(file, name, entry) for name, entry in record.front().items()}
        tensors = {}
        for name, entry in record.tensors.items():
            data = _checked(file, name, entry)
            if name in record.tiles:
                table = front[TABLE + name].numpy()
                tiles = Tiles(Layout.of_node(record.tiles[name].layout), table, entry.nbytes)
                tensors[name] = unpack(tiles, data.numpy())
            else:
                tensors[name] = tensor_of(data, getattr(torch, entry.dtype), entry.shape)
    arrays = bytearray(front[ARRAYS].numpy()) if ARRAYS in front else bytearray()
    return identity, EncodedItem(without_tiles(record.tree), tensors, arrays)


def _checked(file: BufferedReader, name: str, entry: header.Tensor) -> torch.Tensor:
    data = read_entry(file, entry)
    check_entry(name, entry.checksum, data)
    return data


def read_entry(file: BufferedReader, entry: header.Tensor) -> torch.Tensor:
    """The bytes of an entry, 1-D uint8. Raises DamagedRecord if they are not all there."""
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    file.seek(entry.offset)
    if file.readinto(data.numpy().data) != entry.nbytes:
        raise DamagedRecord("it was cut off while it was read")
    return data
