"""Every reader of bytes from a disk, as the fuzzer calls it: a function of bytes that raises only what nobody expects.

Checksums are made right before the bytes are read, so that the fuzzer need not guess them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from monai_gds.base.names import digest_of
from monai_gds.bench.made_up import write_image_folder
from monai_gds.errors import BlockMapError, CacheWarning, ImageListError, MonaiGdsError
from monai_gds.folder.index import Index
from monai_gds.folder.maintenance import Unwanted, check, prunable, survey
from monai_gds.folder.uses import Uses
from monai_gds.imagenet.files.listing import UNFINISHED, ImageList
from monai_gds.imagenet.files.named_files import read_file_list
from monai_gds.imagenet.files.packed import INDEX
from monai_gds.imagenet.files.packing import pack_folder
from monai_gds.imagenet.source import open_images
from monai_gds.keys.source_memo import SourceMemo
from monai_gds.records.header import CRC, SUFFIX, TABLE
from monai_gds.shared.leases import Leases
from monai_gds.shared.notes import FOLDER, line
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.inodes import inode_table
from tests.soak.grammar import Parts, sound
from tests.soak.hostile import WAYS, use_packed
from tests.soak.made import enter, packed

__all__ = ["READERS", "Made", "Read", "reader_of"]

#: Reads bytes as a reader would. Raises what nobody expects.
Read = Callable[[bytes], None]

#: A reader, and what the fuzzer begins with.
Made = tuple[Read, list[bytes]]

#: A process that has ended, in the names of its files of notes.
_ENDED = "00000000-1.1.1.0"


def record_of(data: bytes, key: object = None) -> bytes:
    """A record with a right header checksum and, where they can be made, right checksums of its entries."""
    text, _, rest = data.partition(b"\0")
    with contextlib.suppress(Exception):
        header = json.loads(text)
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        parts, at = {}, 0
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            parts[name], at = rest[at : at + end - begin].ljust(min(end - begin, 1 << 20), b"\0"), at + end - begin
        metadata = {"format": "monai_gds", "version": "2", "checksum": "wsum64", **header["__metadata__"]}
        key = {"parts": [], "sources": {}, "item": "", "pipeline": "00"} if key is None else key
        made = Parts({**metadata, "checksums": {}, "key": key}, entries, parts)
        sound(made)
        return made.to_bytes()
    whole = bytearray(text + b" " * (-(8 + len(text)) % 4096))
    whole[CRC] = b"00000000"
    whole[CRC] = b"%08x" % zlib.crc32(whole)
    return len(whole).to_bytes(8, "little") + bytes(whole) + rest


# ---------------------------------------------------------------------------------------------------------------------
# Records, and what lies beside them


def _records(folder: Path) -> Made:
    """Header, tree, and the description of tiles of a record, read in every way."""
    path = folder / f"{digest_of([])}{SUFFIX}"

    def read(data: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(record_of(data))
        for way in WAYS.values():
            way(path)

    return read, _record_seeds()


def _tiles(folder: Path) -> Made:
    """The tables and streams of packed tensors: tiles, palettes, runs. The header is a sound one."""
    path = folder / f"{digest_of([])}{SUFFIX}"
    parts = Parts.of(packed())
    names = [name for name in parts.data if name.startswith("__") and not name.startswith(("__pad.", "__arrays"))]
    names += [name.removeprefix(TABLE) for name in names if name.startswith(TABLE)]

    def read(data: bytes) -> None:
        changed, at = copy.deepcopy(parts), 0
        for name in names:
            nbytes = len(parts.data[name])
            changed.data[name], at = data[at : at + nbytes].ljust(nbytes, b"\0"), at + nbytes
        sound(changed)
        path.unlink(missing_ok=True)
        path.write_bytes(changed.to_bytes())
        for way in WAYS.values():
            way(path)

    return read, [b"".join(parts.data[name] for name in names)]


def _keys(folder: Path) -> Made:
    """The key of a record, as `cache ls`, `verify` and `prune` use it."""
    sound = _record_seeds()[0]

    def read(data: bytes) -> None:
        key: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            key = json.loads(data)
        for path in folder.glob(f"*{SUFFIX}"):
            path.unlink()
        parts = key.get("parts") if isinstance(key, dict) else None
        path = folder / f"{digest_of(parts)}{SUFFIX}"
        with contextlib.suppress(ValueError):  # a lone surrogate, which no header can hold
            path.write_bytes(record_of(sound, key))
            check(path)
            list(prunable(folder, survey(folder), Unwanted(missing_sources=True, identify=lambda path: None)))
            for found in survey(folder, Index(folder)):
                assert found.ratio >= 0
                assert isinstance(found.packed, str)
            Index(folder).entries()

    return read, [b'{"parts":[1,"i"],"item":"i","pipeline":"00","sources":{"/x":[1,"stat:1"]}}']


def _notes(folder: Path) -> Made:
    """The notes of other processes: facts, uses, hashes of sources, descriptions of pipelines. Also merges them."""
    notes = folder / FOLDER
    (notes / "pipelines").mkdir(parents=True)
    facts, uses, sources = (notes / f"{_ENDED}.{kind}" for kind in ("facts", "uses", "sources"))

    def read(data: bytes) -> None:
        texts = [
            *data.split(b"\n"),
            *(data[i : i + 32].ljust(32, b"\0").hex().encode() for i in range(0, len(data), 32)),
        ]
        lines = b"".join(map(line, texts))
        facts.write_bytes(lines + data)
        uses.write_bytes(lines + data)
        sources.write_bytes(lines + data)
        (notes / "pipelines/00000000.json").write_bytes(data)
        index, memo, used = Index(folder), SourceMemo(str(folder)), Uses(folder)
        for entry in index.entries().values():
            index._merged([texts])
            index.count(entry.pipeline)
        index.pipeline("00000000")
        survey(folder, index)
        memo.get(data[:16].ljust(16, b"\0"))
        assert all(map(np.isfinite, used.look().last.values()))
        used._merged([texts, [data]])
        for tidy in (index.tidy, memo.tidy, used.tidy):
            tidy()

    return read, _note_seeds()


def _leases(folder: Path) -> Made:
    """The content of a lease."""
    (folder / ".tmp").mkdir(parents=True)
    digest, leases = "0" * 32, Leases(folder)

    def read(data: bytes) -> None:
        (folder / f".tmp/{digest}.lease").write_bytes(data)
        leases.held_elsewhere(digest)
        leases.sweep()
        lease = leases.take(digest)
        if lease is not None:
            lease.release()

    return read, [_ENDED.encode()]


# ---------------------------------------------------------------------------------------------------------------------
# Images


def _packed_images(folder: Path) -> Made:
    """The index of a packed folder, and what it leads to."""
    pack_folder(_some_images(folder), folder / "packed", file_bytes=4096)
    seed = _seed(Parts.of((folder / "packed" / INDEX).read_bytes()))

    def read(data: bytes) -> None:
        (folder / "packed" / INDEX).write_bytes(record_of(data))
        with contextlib.suppress(MonaiGdsError, OSError):
            use_packed(folder / "packed")

    return read, [seed]


def _packing(folder: Path) -> Made:
    """The notes of packing that was interrupted."""
    images, out = _some_images(folder), folder / "out"
    out.mkdir()

    def read(data: bytes) -> None:
        for path in out.iterdir():
            path.unlink()
        (out / UNFINISHED).write_bytes(data)
        with contextlib.suppress(ImageListError):
            pack_folder(images, out)

    return read, [b'{"root": "/x", "of": [1, 2, 3]}']


def _some_images(folder: Path) -> ImageList:
    images = open_images(write_image_folder(folder / "images", 6))
    assert isinstance(images, ImageList)
    return images


def _file_lists(folder: Path) -> Made:
    """A text file of files and labels."""
    (folder / "a.jpg").write_bytes(b"x")
    path = folder / "list.txt"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(ImageListError):
            found = read_file_list(path)
            assert len(found.names) == len(found.labels) == len(found.sizes)

    return read, [b"a.jpg 1\n\na.jpg  2\r\n"]


# ---------------------------------------------------------------------------------------------------------------------
# Disks


def _maps(folder: Path) -> Made:
    """A block map, which is used if it was accepted."""
    path = folder / "map.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(BlockMapError):
            found = BlockMap.load(path)
            found.save(folder / "again.json")
            BlockMap.load(path, parent=folder).verify()
        with contextlib.suppress(MonaiGdsError):
            open_images(path)

    return read, [b'{"train/a/1.JPEG":{"startblock":2048,"endblock":2055}}']


def _inodes(folder: Path, kind: str = "ext4") -> Made:
    """The superblock, descriptors and inodes of a file system. What lies beyond the bytes is zeros, up to 1 GiB."""

    def read(data: bytes) -> None:
        def read_disk(offset: int, nbytes: int) -> bytes:
            if offset < 0 or nbytes < 0 or offset + nbytes > 1 << 30:
                raise OSError(f"{offset} and {nbytes} bytes are not on the disk")
            return data[offset : offset + nbytes].ljust(nbytes, b"\0")

        with contextlib.suppress(OSError):
            table = inode_table(kind, read_disk)
            for number in (0, 1, 2, 12, 128, 1 << 20, (1 << 32) - 1, (1 << 63) - 1) if table else ():
                at = table.place(number)  # type: ignore[union-attr]
                if at is not None:
                    assert at >= 0
                    table.parse(read_disk(at, table.nbytes))  # type: ignore[union-attr]

    return read, [_ext4_seed() if kind == "ext4" else _xfs_seed()]


# ---------------------------------------------------------------------------------------------------------------------
# What the fuzzer begins with


def _record_seeds() -> list[bytes]:
    tree = {"image": {"$tensor": {"name": "image"}}, "a": {"$array": ["<f4", [2], 0]}, "b": {"$tuple": [1, "x"]}}
    entries = {
        "__arrays": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "image": {"dtype": "U8", "shape": [32], "data_offsets": [8, 40]},
    }
    small = Parts({"tree": tree}, entries, {"__arrays": bytes(8), "image": bytes(32)})
    return [_seed(small), _seed(Parts.of(packed()))]


def _seed(parts: Parts) -> bytes:
    """A record in the form that :func:`record_of` takes."""
    entries, blob = {}, b""
    for name, data in parts.data.items():
        entries[name] = {**parts.entries[name], "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    return json.dumps({"__metadata__": {"tree": parts.metadata["tree"]}, **entries}).encode() + b"\0" + blob


def _note_seeds() -> list[bytes]:
    tensors = '[["image","float32",[1,2]]]'
    fact = ["record", "0" * 32, "item", "00000000", 4096, 1, tensors, {"/x": [1, "stat:1"]}, "lz4 32"]
    uses = [["open", 1.5, "00", 0], ["read", 2, "0" * 64, 0], ["end", 3, "", 0]]
    return [*(json.dumps(one).encode() for one in (fact, *uses, {"transforms[0] A": "code 1"})), bytes(range(96))]


def _ext4_seed() -> bytes:
    disk = bytearray(12288)
    fields = [(0, 32, 4), (0x14, 1, 4), (0x28, 32, 4), (0x58, 256, 2), (0x60, 0x80, 4), (0xFE, 64, 2)]
    for at, value, nbytes in fields:
        disk[1024 + at : 1024 + at + nbytes] = value.to_bytes(nbytes, "little")
    disk[2048 + 8] = 4  # the inodes begin in block 4
    disk[4096 + 11 * 256 : 4096 + 11 * 256 + 2] = (0o100644).to_bytes(2, "little")
    return bytes(disk)


def _xfs_seed() -> bytes:
    disk = bytearray(12288)
    for at, value, nbytes in [(4, 4096, 4), (84, 16, 4), (88, 2, 4), (104, 512, 2), (123, 3, 1), (124, 4, 1)]:
        disk[at : at + nbytes] = value.to_bytes(nbytes, "big")
    disk[8192 : 8192 + 5] = b"IN" + (0o100644).to_bytes(2, "big") + b"\3"
    return bytes(disk)


#: By name: what makes them, with their files in a folder.
READERS: dict[str, Callable[[Path], Made]] = {
    "record": _records,
    "tiles": _tiles,
    "key": _keys,
    "packed": _packed_images,
    "map": _maps,
    "notes": _notes,
    "list": _file_lists,
    "ext4": _inodes,
    "xfs": functools.partial(_inodes, kind="xfs"),
    "packing": _packing,
    "lease": _leases,
}


def reader_of(name: str, folder: Path) -> Made:
    """A reader, whose files are put into this folder."""
    enter()
    warnings.simplefilter("ignore", CacheWarning)
    folder.mkdir(parents=True, exist_ok=True)
    return READERS[name](folder)
