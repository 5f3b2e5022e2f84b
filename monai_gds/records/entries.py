"""Reads the entries of a record and checks them: every byte that becomes part of an item comes through here, or was
compared with a checksum of its own on the way.

A hit reads through the storage (:func:`read_record`, then :func:`check` on what the backend brought). Whatever reads a
record outside of training reads it from an open file (:func:`read`, :func:`read_whole`).
"""

from __future__ import annotations

from io import BufferedReader

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.checksum import checksum
from monai_gds.errors import DamagedRecord
from monai_gds.items.tree import EncodedItem, tensor_of
from monai_gds.records import header
from monai_gds.records.header import ARRAYS, TABLE, Header, Tensor, check_holes, header_length, parse
from monai_gds.records.heads import check_codecs, tiles_of
from monai_gds.records.writing import check_name, without_tiles
from monai_gds.storage import FileId, Storage
from monai_gds.storage.files import check_identity
from monai_gds.tiles.unpacking import unpack


def check(name: str, expected: int, data: torch.Tensor) -> None:
    """Compares the bytes of an entry with its checksum.

    Raises:
        DamagedRecord: they differ.
    """
    if checksum(data) != expected:
        raise DamagedRecord(f"the bytes of {name!r} do not match their checksum")


def read_record(path: str, storage: Storage) -> tuple[Header, FileId, dict[str, bytes]]:
    """Reads and checks the front of a record.

    Returns:
        The header, the identity of the file, and by name the entries that follow the header: packed small arrays, and
        tables of tiles and runs.

    Raises:
        RecordError: damaged, or of a newer format.
        FileChanged: it was replaced meanwhile.
        OSError: the file cannot be read.
    """
    head, file = storage.head(path, limits.HEAD_READ_BYTES)
    needed = header_length(head, file.size)
    if file.size > limits.HOLES_BYTES:
        check_holes(path)
    if needed > len(head):
        head = _longer_head(path, file, needed, storage)
    record = parse(head, file.size)
    front = record.front()
    end = max((entry.offset + entry.nbytes for entry in front.values()), default=0)
    if end > len(head):
        head = _longer_head(path, file, end, storage)
    blocks = {}
    for name, entry in front.items():
        blocks[name] = head[entry.offset : entry.offset + entry.nbytes]
        if len(blocks[name]) != entry.nbytes:
            raise DamagedRecord("it was cut off while it was read")
        check(name, entry.checksum, torch.from_numpy(np.frombuffer(bytearray(blocks[name]), np.uint8)))
    return record, file, blocks


def _longer_head(path: str, file: FileId, nbytes: int, storage: Storage) -> bytes:
    head, again = storage.head(path, nbytes)
    check_identity(file, again, path)
    return head


def read(file: BufferedReader, name: str, entry: Tensor) -> torch.Tensor:
    """Reads an entry of an open record, 1-D uint8.

    Raises:
        DamagedRecord: its bytes do not match their checksum, or are not all there.
        OSError: it cannot be read.
    """
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    file.seek(entry.offset)
    if file.readinto(data.numpy().data) != entry.nbytes:
        raise DamagedRecord("it was cut off while it was read")
    check(name, entry.checksum, data)
    return data


def read_whole(path: str, digest: str | None = None) -> tuple[FileId, EncodedItem]:
    """Reads a record as it was before it was laid out: what :func:`monai_gds.records.writing.pack_record` was given.

    Args:
        path: the record.
        digest: the key that it must belong to, if any.

    Returns:
        The identity of its file, and the item taken apart, its tensors on the CPU.

    Raises:
        RecordError: it is damaged, of a newer version, or packed by a codec that is missing here.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        identity = FileId.of(file.fileno())
        record = header.read(file.fileno())
        if digest is not None:
            check_name(record, digest)
        check_codecs(record, on_gpu=False)
        front = {name: read(file, name, entry) for name, entry in record.front().items()}
        tensors = {}
        for name, entry in record.tensors.items():
            data = read(file, name, entry)
            if name in record.tiles:
                tensors[name] = unpack(tiles_of(record, name, front[TABLE + name].numpy()), data.numpy())
            else:
                tensors[name] = tensor_of(data, getattr(torch, entry.dtype), entry.shape)
    arrays = bytearray(front[ARRAYS].numpy()) if ARRAYS in front else bytearray()
    return identity, EncodedItem(without_tiles(record.tree), tensors, arrays)
