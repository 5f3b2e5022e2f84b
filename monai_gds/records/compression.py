"""The form in which new records are written: a codec and an edge of tiles, or whole tensors; what ``auto`` chooses.

Used by the dataset, which knows no codec's library, and by cache directories, which compare the form asked for with a
record's own. Any form of a record is a hit: only misses and conversions write the form asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from monai_gds import limits
from monai_gds.errors import CodecMissing
from monai_gds.records.header import Header, bytes_of
from monai_gds.tiles import blosc
from monai_gds.tiles.codecs import AUTO, CODECS, ON_CPU
from monai_gds.tiles.device import why_not as why_not_on_gpu
from monai_gds.tiles.tiles import EDGE

#: How a crop looks up the voxels of a label: the item's keys of the label and of the image, and the threshold that the
#: image must be above, as :func:`monai_gds.tiles.runs.threshold_text` gives it; both empty where no image is used.
Lookup: TypeAlias = tuple[str, str, str]

Codec = Literal["lz4", "zstd", "bitcomp"]  # for type checkers: the codecs of monai_gds.tiles.codecs

#: Edges that tiles may have. A tile of 128³ would be larger than records may have (:data:`limits.TILE_BYTES`), and the
#: table of tiles of 8³ about as large as what is gained.
EDGES = (16, 32, 64)


def why_not(codec: str) -> str | None:
    """Why nothing can be compressed by a codec here; None if it can."""
    return blosc.why_not() if codec in ON_CPU else why_not_on_gpu()


@dataclass(frozen=True)
class Compression:
    """The form in which new records are written.

    Attributes:
        codec: compresses tensors in tiles, if they get smaller. None leaves all tensors whole.
        edge: voxels along each edge of a tile.
        named: whether the user named this form, rather than ``auto`` having chosen it.
        above: tensors of at most this many bytes stay whole, and so do those below :data:`limits.TILED_BYTES`.
        reason: why this form, in words.
        joint: the lookups with an image, for which records get joint runs.
    """

    codec: str | None = None
    edge: int = EDGE
    named: bool = True
    above: int = 0
    reason: str = field(default="", compare=False)
    joint: tuple[Lookup, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls,
        compression: str | None,
        tiles: str | int | None,
        on_gpu: bool,
        crops: bool,
        lookups: Collection[Lookup] = (),
    ) -> Compression:
        """The form that the arguments ``compression`` and ``tiles`` of a dataset ask for.

        Args:
            compression: ``"auto"``, one of :data:`monai_gds.tiles.codecs.CODECS`, or None.
            tiles: ``"auto"``, one of :data:`EDGES`, or None for whole tensors.
            on_gpu: whether items come on a CUDA device.
            crops: whether crops come first, which can be drawn before anything is read.
            lookups: where these crops look up the voxels of a label, which only records in tiles list.

        Raises:
            ValueError: there is no such choice, or the two contradict each other or the target.
            CodecMissing: the codec that was named does not work here.
        """
        _check(compression, tiles)
        joint = tuple(dict.fromkeys(lookup for lookup in lookups if lookup[2]))
        edge = tiles if isinstance(tiles, int) else EDGE
        if compression is None or tiles is None:
            return cls(reason="compression=None" if compression is None else "tiles=None")
        if compression == "auto":
            above = 0 if on_gpu or lookups or tiles != "auto" else limits.CROPPED_BYTES
            return replace(cls._chosen(edge, on_gpu, crops, above), joint=joint)
        if compression not in ON_CPU and not on_gpu:
            raise ValueError(
                f"compression={compression!r} is unpacked by GPUs only, and items come on the CPU here (device='cpu', "
                "a worker that returns items, or a forked process): use "
                f"{' or '.join(map(repr, ON_CPU))}, or a CUDA device without such workers"
            )
        if why := why_not(compression):
            raise CodecMissing(f"compression={compression!r}: {why}")
        return cls(compression, edge, reason=f"compression={compression!r}", joint=joint)

    @classmethod
    def _chosen(cls, edge: int, on_gpu: bool, crops: bool, above: int) -> Compression:
        """The form that ``auto`` chooses: tiles if a crop reads only some of them, or if a GPU unpacks them."""
        no_gpu = why_not_on_gpu() if on_gpu else "items come on the CPU, which maps whole tensors faster"
        if no_gpu and not crops:
            return cls(named=False, reason=no_gpu)
        reason = "crops come first" if crops else "the GPU unpacks them"
        if why := why_not(AUTO):
            more = " (for a GPU: tiles-cuda13 or tiles-cuda12)" if on_gpu else ""
            return cls(named=False, reason=f"tiles would suit, since {reason}, but {why}{more}")
        return cls(AUTO, edge, False, above, reason)

    @property
    def text(self) -> str:
        """The form as records note it, such as ``"lz4 32"``; empty for whole tensors."""
        return f"{self.codec} {self.edge}" if self.codec else ""

    def __str__(self) -> str:
        form = f"{self.codec}, in tiles of {self.edge}³" if self.codec else "whole tensors"
        if self.codec and self.above:
            form += f", for tensors above {self.above >> 20} MiB"
        return f"{form} ({self.reason})" if self.reason else form

    def cuts(self, nbytes: int) -> bool:
        """Whether a tensor of this many bytes is large enough to be cut into tiles."""
        return self.codec is not None and nbytes >= limits.TILED_BYTES and nbytes > self.above

    def suits(self, record: Header) -> bool:
        """Whether a record need not be converted.

        A form that the user named must be the record's. A form that ``auto`` chose only replaces whole tensors that
        nobody has tried to compress. So machines on which ``auto`` chooses differently never undo each other's work.
        """
        if self.codec is None:
            return not self.named or not record.tiles
        if not any(map(self.cuts, map(bytes_of, record.tensors.values()))):
            return True
        return record.form == self.text or (not self.named and bool(record.form or record.tiles))


#: All tensors whole.
WHOLE = Compression()


def _check(compression: str | None, tiles: str | int | None) -> None:
    if compression not in ("auto", *CODECS, None):
        raise ValueError(f"compression={compression!r}: use 'auto', {', '.join(map(repr, CODECS))} or None")
    if not (tiles is None or tiles == "auto" or (type(tiles) is int and tiles in EDGES)):
        raise ValueError(
            f"tiles={tiles!r}: use 'auto', None for whole tensors, or the edge of a tile in voxels, "
            f"{', '.join(map(str, EDGES[:-1]))} or {EDGES[-1]}"
        )
    if tiles is None and compression in CODECS:
        raise ValueError(
            f"compression={compression!r} packs tiles, and tiles=None asks for whole tensors: leave one of them out"
        )
    if compression is None and isinstance(tiles, int):
        raise ValueError(
            f"tiles={tiles} are compressed, and compression=None asks for no compression: leave one of them out"
        )
