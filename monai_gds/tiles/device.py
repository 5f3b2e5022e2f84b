"""Tiles on a CUDA device: nvCOMP decompresses their streams there, and one kernel puts each tensor together.

Used by :mod:`monai_gds.records.reader`. The counterpart on the CPU is :mod:`monai_gds.tiles.tiles`.

    streams, on the device ────────┐
    table, on the host ─▶ prepare ─┴▶ CRC-32 ─▶ check ─▶ nvCOMP ─▶ scratch ─▶ place: planes, palette, tiles ─▶ tensor

Everything is queued on the current stream, and the host waits for nothing. No Python runs per tile: the tables cross in
one copy, and a kernel makes the arrays of addresses that nvCOMP takes. A stream whose CRC-32 differs is replaced by a
sound one before nvCOMP gets it, since its Zstd and Bitcomp work on valid data only. If something goes wrong, a kernel
writes it into pinned memory, where :class:`Outcome` finds it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from monai_gds import limits
from monai_gds.base.process import PerProcess
from monai_gds.errors import CodecMissing, DamagedRecord, MonaiGdsError
from monai_gds.storage import staging
from monai_gds.tiles import nvcomp
from monai_gds.tiles.codecs import CODECS
from monai_gds.tiles.tiles import Layout, Tiles

#: Tiles in scratch memory, and the arrays in a block of pinned memory, begin at multiples of this.
_ALIGNMENT = 16

#: Threads per block of ``prepare`` and ``check``, and of ``place``, where a block makes a tile.
_THREADS, _PLACE_THREADS = 128, 256

#: ``struct Part`` there is what :func:`_upload` passes for each part.
_KERNELS = Path(__file__).with_name("tiles.cu").read_text()


class Part(NamedTuple):
    """Tiles of one tensor, all or some.

    Attributes:
        tiles: the tensor's tiles.
        streams: 1-D uint8 CUDA tensor at a multiple of 16.
        out: contiguous CUDA tensor of the layout's dtype and shape.
        starts: where the stream of each tile begins in ``streams``, int64; anything for a tile without one.
        ids: which tiles these are, int32; None for all.
    """

    tiles: Tiles
    streams: torch.Tensor
    out: torch.Tensor
    starts: np.ndarray
    ids: np.ndarray | None = None


class Outcome:
    """Whether unpacking went well, known once the device has done it."""

    __slots__ = ("_host",)

    def __init__(self, host: _Host) -> None:
        self._host = host

    def check(self) -> None:
        """Waits until the device has unpacked.

        Raises:
            DamagedRecord: a stream does not match its CRC-32, is not what was compressed, or refers to values that are
                not in its palette.
        """
        self._host.event.synchronize()
        if self._host.failed[0]:
            raise DamagedRecord("a tile does not match its checksum, or refers to a value that is not in its palette")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._host.give_back()


class Unpacking:
    """A step that follows reads (``Pending.then``) and unpacks the streams among what was read.

    Args:
        wanted: for each tensor that is read, None, or its tiles, where the stream of each begins in what is read, and
            which tiles these are (None for all); see :class:`Part`.
        keep: called with what was read once it is known to be sound, to keep it; or None.
        kept: what was read belongs to somebody who keeps it. Tensors that are not unpacked are copied.
        only: the indices of the tensors to return; None for all.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Tiles, np.ndarray, np.ndarray | None] | None],
        *,
        keep: Callable[[Sequence[torch.Tensor]], None] | None = None,
        kept: bool = False,
        only: Sequence[int] | None = None,
    ) -> None:
        self._wanted, self._keep, self._only = wanted, keep, only
        self._copies = kept or keep is not None
        self._raw: Sequence[torch.Tensor] = ()
        self._outcomes: list[Outcome] = []

    def __call__(self, raw: list[torch.Tensor], errors: Mapping[int, Exception]) -> list[torch.Tensor]:
        """Returns what was read, with whole tensors of their own dtypes and shapes in place of streams.

        Raises:
            CodecMissing: nvCOMP refuses.
        """
        if errors:
            return raw
        parts, done = [], list(raw)
        only = range(len(raw)) if self._only is None else self._only
        for i in only:
            wanted = self._wanted[i] if i < len(self._wanted) else None
            if wanted is not None:
                tiles, starts, ids = wanted
                done[i] = staging.empty_for_side_stream(tiles.layout.shape, tiles.layout.dtype, raw[i].device)
                parts.append(Part(tiles, raw[i], done[i], starts, ids))
            elif self._copies:
                done[i] = raw[i].clone()
        for together in {_together(part) for part in parts}:
            try:
                self._outcomes.append(unpack([part for part in parts if _together(part) == together]))
            except MonaiGdsError as e:  # the record may be sound: it must not be replaced
                raise CodecMissing(f"its tiles could not be unpacked on {parts[0].out.device}: {e}") from e
        if self._keep is not None:
            self._raw = raw
        return [done[i] for i in only]

    def check(self) -> None:
        """Waits for the device.

        Raises:
            DamagedRecord: see :meth:`Outcome.check`.
        """
        for outcome in self._outcomes:
            outcome.check()
        if self._keep is not None and self._raw:
            self._keep(self._raw)
            self._raw = ()


def _together(part: Part) -> tuple[str, torch.dtype | None]:
    """Parts for which this is equal may be unpacked in one call."""
    layout = part.tiles.layout
    return layout.codec, None if CODECS[layout.codec].sound else layout.packed_dtype


@functools.cache
def why_not() -> str | None:
    """Why tiles cannot be unpacked on a device here; None if they can."""
    try:
        import cupy  # noqa: F401
    except ImportError as e:
        return (
            f"tiles are put together on a GPU by CuPy, which cannot be imported ({e}): pip install "
            "'monai_gds[tiles-cuda13]' (or tiles-cuda12)"
        )
    return nvcomp.why_not()


def warm(device: torch.device) -> None:
    """Loads what the first unpacking on a device loads, which takes seconds: CuPy, the kernels and nvCOMP."""
    if why_not() is None:
        for name in ("prepare", "check", "place"):
            staging.compiled(_KERNELS, name, device.index)


def unpack(parts: Sequence[Part]) -> Outcome:
    """Fills the tensors of parts with their tiles, on the current stream.

    Args:
        parts: all of one device, and of what :func:`_together` tells apart. Their tensors must be ready for
            the current stream.

    Raises:
        MonaiGdsError: nvCOMP or CuPy is missing or refuses.
    """
    device, layout = parts[0].out.device, parts[0].tiles.layout
    most = max(part.tiles.layout.tile_bytes for part in parts)
    sound = _sound_stream(layout.codec, layout.packed_dtype, most, device)
    stream = staging.raw_current_stream(device)
    work = _Workspace(parts, most, device)
    host = _upload(parts, work, device, stream)
    outcome = Outcome(host)  # where nvCOMP refuses too, nobody gets this memory before its copy is over
    try:
        _queue(parts, work, most, sound, host, stream)
    finally:
        host.event.record(torch.cuda.current_stream(device))
    return outcome


def _queue(parts: Sequence[Part], work: _Workspace, most: int, sound: torch.Tensor, host: _Host, stream: int) -> None:
    """Queues the kernels and nvCOMP's work. Kernels note in the host's memory what goes wrong."""
    total, failed, device = work.total, host.memory.data_ptr(), host.device
    tiles = (work.tables, len(parts), total, work.columns)
    stub = (sound.data_ptr(), len(sound))
    _launch("prepare", device, -(-total // _THREADS), _THREADS, (*tiles, *stub), stream)
    sizes_of = (part.tiles.sizes if part.ids is None else part.tiles.sizes[part.ids] for part in parts)
    if any(sizes.max() > 0 for sizes in sizes_of):
        streams, sizes, addresses, squeezed, outs, out_sizes = (work.columns + 8 * total * n for n in range(6))
        nvcomp.crc32(total, streams, sizes, most, work.crcs, stream)
        _launch("check", device, -(-total // _THREADS), _THREADS, (*tiles, *stub, work.crcs, failed), stream)
        blocks = nvcomp.Blocks(total, addresses, squeezed, outs, out_sizes, most, work.scratch_bytes)
        codec = parts[0].tiles.layout.codec
        nvcomp.decompress(codec, blocks, work.temp, work.temp_bytes, work.statuses, work.got, stream)
    _launch("place", device, total, _PLACE_THREADS, (*tiles, work.statuses, work.got, failed), stream)


class _Workspace:
    """One piece of memory on the device for everything that a call needs, since each allocation is slow.

    What the kernels and nvCOMP use are addresses: ``tables`` of the parts' descriptors and what they refer to,
    ``columns``, ``crcs``, ``statuses``, ``got``, ``temp``, and ``scratch`` for the decompressed tiles. The memory is
    freed with this object, for later work on the current stream.
    """

    def __init__(self, parts: Sequence[Part], most: int, device: torch.device) -> None:
        self.total = sum(len(part.starts) for part in parts)
        self.table_bytes = _aligned(len(parts) * 8 * _FIELDS)
        self.scratch_bytes = 0
        for part in parts:
            self.scratch_bytes += len(part.starts) * _aligned(part.tiles.layout.tile_bytes)
            self.table_bytes += _aligned(part.tiles.table.nbytes) + _aligned(part.starts.nbytes)
            self.table_bytes += 0 if part.ids is None else _aligned(part.ids.nbytes)
        codec = parts[0].tiles.layout.codec
        self.temp_bytes = _aligned(nvcomp.temp_bytes(codec, self.total, most, self.scratch_bytes))
        words, longs = 4 * self.total, 8 * self.total
        sizes = (self.table_bytes, 7 * longs, words, words, longs, self.temp_bytes, self.scratch_bytes)
        begins = list(itertools.accumulate(map(_aligned, sizes), initial=0))
        self._memory = torch.empty(begins[-1], dtype=torch.uint8, device=device)
        addresses = [self._memory.data_ptr() + begin for begin in begins[:-1]]
        self.tables, self.columns, self.crcs, self.statuses, self.got, self.temp, self.scratch = addresses


class _Host:
    """Pinned memory for the result of one call, which kernels write, and its tables; and an event after its work."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(_ALIGNMENT + nbytes, dtype=torch.uint8, pin_memory=True)
        self.failed = self.memory.numpy()[:4].view(np.int32)
        self.tables = self.memory.numpy()[_ALIGNMENT:]
        self.event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @classmethod
    def take(cls, nbytes: int, device: torch.device) -> _Host:
        """Pinned memory that no copy uses any more, kept or new. Nobody need have waited for its last outcome."""
        free = _free(device)
        with contextlib.suppress(IndexError):  # nothing is kept, or another thread took the last one
            host = free.popleft()
            if len(host.tables) >= nbytes and host.event.query():  # type: ignore[no-untyped-call]
                return host
            host.give_back()
        return cls(max(nbytes, limits.TABLES_BYTES), device)

    def give_back(self) -> None:
        """Keeps this for later calls, or waits for its copies so that it can be freed."""
        free = _free(self.device)
        if len(free) < limits.TABLES_KEPT:
            free.append(self)
        else:
            self.event.synchronize()


#: Pinned memory that is not in use.
_free: Callable[[torch.device], deque[_Host]] = PerProcess(lambda _: deque())


def _upload(parts: Sequence[Part], work: _Workspace, device: torch.device, stream: int) -> _Host:
    """Copies tables and descriptors to the workspace, in one piece."""
    host = _Host.take(work.table_bytes, device)
    at = _aligned(len(parts) * 8 * _FIELDS)

    def put(piece: np.ndarray) -> int:
        nonlocal at
        begin, at = at, at + _aligned(piece.nbytes)
        host.tables[begin : begin + piece.nbytes] = piece.view(np.uint8)
        return work.tables + begin

    numbers: list[int] = []
    first, scratch = 0, work.scratch
    for part in parts:
        layout, out, count = part.tiles.layout, part.out, len(part.starts)
        table, starts, ids = put(part.tiles.table), put(part.starts), 0 if part.ids is None else put(part.ids)
        stride = _aligned(layout.tile_bytes)
        by_fours = out.data_ptr() % (4 * out.element_size()) == 0 and layout.shape[-1] % 4 == 0
        numbers += (
            table, table + 4 * layout.count, table + 8 * layout.count, ids, starts, part.streams.data_ptr(), scratch,
            out.data_ptr(), first, stride, *_form(layout), by_fours,
        )  # fmt: skip
        first, scratch = first + count, scratch + count * stride
    host.tables[: 8 * len(numbers)] = np.array(numbers, np.int64).view(np.uint8)
    host.failed[0] = 0
    staging.copy_to_device(work.tables, host.memory.data_ptr() + _ALIGNMENT, at, stream)
    return host


#: Numbers of a part's descriptor, each of eight bytes.
_FIELDS = 26


@functools.lru_cache(maxsize=256)
def _form(layout: Layout) -> tuple[int, ...]:
    """The fields of a part's descriptor that depend on its layout only."""
    _, *grid = layout.grid
    shuffled = CODECS[layout.codec].filter == "shuffle"
    step = 4 if layout.tile[2] % 4 == 0 else 1  # elements that a thread handles at once
    return (
        layout.tile_bytes, layout.values, *(1, 1, 1, *layout.shape)[-3:], *layout.tile, *grid,
        layout.packed_dtype.itemsize, layout.dtype.itemsize, int(shuffled), step,
    )  # fmt: skip


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _launch(name: str, device: torch.device, blocks: int, threads: int, arguments: Sequence[int], stream: int) -> None:
    staging.launch(staging.compiled(_KERNELS, name, device.index), blocks, threads, arguments, stream)


@functools.cache
def _sound_stream(codec: str, dtype: torch.dtype, tile_bytes: int, device: torch.device) -> torch.Tensor:
    """A stream that is sound, and decompresses to at most the bytes of a tile."""
    known = CODECS[codec].sound
    if known:
        sound = torch.frombuffer(bytearray(known), dtype=torch.uint8).to(device)
    else:
        streams, sizes = nvcomp.compress(torch.zeros(1, tile_bytes // dtype.itemsize, dtype=dtype, device=device))
        sound = streams[0, : int(sizes[0])].clone()
    torch.cuda.synchronize(device)  # once per form: other streams use it from now on
    return sound
