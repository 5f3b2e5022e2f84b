"""An image of a disk in a file, made by hand: no file system is mounted, and only a block map shows where files lie."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Mapping
from pathlib import Path

from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk, Extent
from monai_gds.storage.blockmap.saved import FileBlocks, Origin

#: Where the file system begins on the image, as in a partition.
_START = 1 << 20


def make_image(path: Path, files: Mapping[str, bytes], *, parent: Path, block: int = 512, pieces: int = 3) -> BlockMap:
    """Writes files to an image, cut into pieces that lie in any order, with other bytes between them.

    Args:
        path: the image, a new file.
        files: by their paths below ``parent``.
        parent: where they are said to have been mounted.
        block: bytes per block.
        pieces: extents per file, or fewer for a small one.
    """
    dice = random.Random(0)
    cut: list[tuple[str, int, bytes]] = []
    for name, data in files.items():
        blocks = -(-len(data) // block)
        edges = sorted({0, blocks, *(dice.randint(0, blocks) for _ in range(pieces - 1))})
        cut += [(name, a * block, data[a * block : b * block]) for a, b in itertools.pairwise(edges)]
    dice.shuffle(cut)
    found: dict[str, list[Extent]] = {name: [] for name in files}
    name_of_it = uuid.UUID(int=dice.getrandbits(128))
    at = _START + 8192
    with path.open("xb") as image:
        image.seek(_START + 1080)
        image.write(b"\x53\xef")
        image.seek(_START + 1128)
        image.write(name_of_it.bytes)
        for name, offset, data in cut:
            image.seek(at)
            nbytes = -(-len(data) // block) * block
            image.write(data + dice.randbytes(nbytes - len(data) + block))
            found[name].append(Extent(offset, at, nbytes))
            at += nbytes + block
        end = image.tell()
    disk = Disk("image", "0:0", block, end, 1 << 20)
    entries = {
        name: FileBlocks(len(data), tuple(sorted(found[name])), inode, 1)
        for inode, (name, data) in enumerate(files.items(), 1)
    }
    return BlockMap(entries, Origin(str(parent), "ext4", str(name_of_it), _START, disk))
