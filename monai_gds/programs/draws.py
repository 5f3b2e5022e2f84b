"""Crops that are drawn before anything is read: which item is drawn when, and what is read for it.

Used by the dataset. An item whose record has tensors in tiles gets a :class:`Turn` in the queue of a loop, in the order
in which items are begun. It is drawn as soon as all items before it are drawn or finished: its leading crops
(:mod:`monai_gds.pipeline.ahead`) are recorded, and the voxels that their program touches are read. When its turn comes,
the program is replayed on these voxels, and the other transforms run on the values, one item after the other.

Drawing ahead assumes that nothing else draws from the same generators before the item's turn. So after each draw the
random states are put back to those of the last finished item. When a turn comes, they are compared with those that the
draw began with. If they are equal, the states move to where the draw left them; if not, the draw is discarded and the
item is drawn again. So the random states are always those of a loop that reads nothing ahead, also for a transform that
shares a generator, after a loop that was left early, and after a seed that was set in between.

The generators of Python, NumPy and torch are neither read nor put back here: the training draws from them meanwhile.
None of the leading crops does.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from monai_gds.pipeline.ahead import drawn_ahead, why_not_now
from monai_gds.pipeline.loops import Loop
from monai_gds.pipeline.randomness import States, generators
from monai_gds.pipeline.split import Split
from monai_gds.programs.program import Program
from monai_gds.programs.recorder import Recorder, RecordGone, record_item
from monai_gds.programs.replay import replay
from monai_gds.tiles.boxes import whole_box

if TYPE_CHECKING:
    from monai_gds.records.pending import PendingItem, Volumes

_log = logging.getLogger("monai_gds")


class _Drawn(NamedTuple):
    """An item after its first steps."""

    program: Program
    before: States  # the random states before the draw
    after: States  # the random states after it


class Turn:
    """An item's place in the queue of a loop.

    Attributes:
        lazy: its record; None if the item is not drawn ahead, since it must be computed or has nothing in tiles.
        item: the dataset's own item.
        volumes: what is being read; None until that is certain.
    """

    __slots__ = ("__weakref__", "drawn", "item", "lazy", "queue", "taken", "volumes")

    def __init__(self, queue: Draws, lazy: PendingItem | None, item: Any) -> None:
        self.queue, self.lazy, self.item = queue, lazy, item
        self.drawn: _Drawn | None = None
        self.volumes: Volumes | None = None
        self.taken = 0  # bytes, once the turn has come

    @property
    def waits(self) -> bool:
        """Whether it is not certain yet what is read."""
        return self.lazy is not None and self.volumes is None

    @property
    def nbytes(self) -> int:
        """Bytes that are being read, and of the memory that they are unpacked into; of whole tensors until drawn."""
        if self.lazy is None:
            return self.taken
        if self.volumes is not None:
            return self.lazy.nbytes
        return self.lazy.nbytes + sum(dtype.itemsize * prod(shape) for dtype, shape in self.lazy.later.values())


class Draws:
    """The queue of draws of one loop over one dataset. Belongs to the thread that begins and ends the items.

    The loop goes on while somebody has one of its turns. Transforms that cannot run on ghosts are added to ``notes``:
    their names, and why.
    """

    def __init__(self, loop: Loop, split: Split, device: torch.device, notes: dict[str, str]) -> None:
        self.loop, self.of, self.split = loop, loop.of, split
        self._device, self._notes = device, notes
        self._steps = drawn_ahead(split)
        self._on_ghosts = len(self._steps)  # how many steps run on ghosts in this loop
        self._never_ahead = False  # a draw ahead was wrong: items are drawn when their turn comes
        self._turns: deque[weakref.ref[Turn]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nothing is begun, so that the next item begins a new loop."""
        return next(self._live(), None) is None

    def begin(self, turns: Sequence[Turn]) -> None:
        """Puts turns at the end of the queue, and draws what can be."""
        self._turns.extend(map(weakref.ref, turns))
        self.go_on()

    def go_on(self) -> None:
        """Draws the items that can be drawn now, and begins to read them."""
        last: States | None = None
        for turn in self._live():
            if turn.volumes is None and not self._go_on_with(turn, last):
                return
            if turn.drawn is not None:
                last = turn.drawn.after

    def take(self, turn: Turn) -> tuple[Any, int] | None:
        """The item of a turn that has come.

        Returns:
            The item on its device, and how many steps it has been through; None if it must be read or computed some
            other way, with the random states as they were.
        """
        self._remove(turn)
        if turn.drawn is not None and not States(self._steps).are_those_of(turn.drawn.before):
            self._discard(turn)
        if turn.lazy is not None and turn.volumes is None:
            self._draw(turn, self._on_ghosts, at_turn=True)
        lazy, drawn, reading = turn.lazy, turn.drawn, turn.volumes
        turn.taken = turn.nbytes
        turn.lazy = turn.drawn = turn.volumes = None  # the memory belongs to the item now
        volumes = None if reading is None else reading.wait()
        if lazy is None or volumes is None:
            return None
        if drawn is None:
            found = lazy.wait(turn.item, {name: volume.whole() for name, volume in volumes.items()})
            return None if found is None else (found[0], 0)
        item = replay(drawn.program, volumes, self._device, shared=False)
        drawn.after.follow(drawn.before)
        return item, drawn.program.done

    @property
    def _ahead(self) -> int:
        """How many steps may be drawn ahead."""
        return 0 if self._never_ahead else min(self._on_ghosts, self._shared)

    @cached_property
    def _shared(self) -> int:
        """How many steps come before the first that shares a generator with a transform after all of them."""
        later = generators(self.split.steps()[len(self._steps) :])
        return next((i for i, step in enumerate(self._steps) if later & generators([step])), len(self._steps))

    def _go_on_with(self, turn: Turn, last: States | None) -> bool:
        """Begins to read what an item needs, as far as that is certain. Returns whether the next item may be drawn."""
        try:
            if not self._on_ghosts:
                if turn.lazy is not None:
                    self._read_whole(turn)
                return True
            if turn.lazy is None or not self._ahead or not turn.lazy.ready:
                return False
            self._draw(turn, self._ahead, last)
        except Exception as e:  # it concerns another item than the one wanted now, and is raised again at its turn
            _log.debug("an item is not drawn ahead: %r", e)
            return False
        return turn.volumes is not None

    def _draw(self, turn: Turn, count: int, since: States | None = None, at_turn: bool = False) -> None:
        """Records the first steps of an item and begins to read what they touch. Random states stay as they are.

        Args:
            turn: the item. Its ``volumes`` are set, or its ``lazy`` becomes None if the record is of no use.
            count: how many steps to run, fewer if one of them needs values.
            since: the states to draw from, if not the present ones.
            at_turn: whether all items before it are finished.
        """
        visible = States(self._steps)
        try:
            if since is not None:
                since.put_back()
            drawn = self._drawn(turn, count, visible if since is None else since)
            if drawn is not None and not at_turn and drawn.after.moved_unseeded(drawn.before):
                self._never_ahead = True
                return
        finally:
            visible.put_back()
        if turn.lazy is None:
            return
        if drawn is None:
            self._read_whole(turn)
            return
        turn.volumes, turn.drawn = turn.lazy.read(drawn.program.boxes()), drawn

    def _drawn(self, turn: Turn, count: int, before: States) -> _Drawn | None:
        """An item after its first steps; None if all of its values are needed, or the record is of no use."""
        assert turn.lazy is not None, "the caller has checked"
        changed = next(((i, why) for i, step in enumerate(self._steps[:count]) if (why := why_not_now(step))), None)
        if changed is not None:
            count = self._give_up(*changed)
        recorder = Recorder(turn.lazy.later, self._device, views_only=True)
        try:
            program, refused = record_item(recorder, self.split, turn.lazy, turn.item, count)
        except RecordGone:
            turn.lazy = None
            return None
        if refused is not None and refused.step < count:
            self._give_up(refused.step, refused.why)
        return None if program is None else _Drawn(program, before, States(self._steps))

    def _give_up(self, step: int, why: str) -> int:
        """Has a step, and those after it, run on values in this loop. Returns its number."""
        self._notes[type(self._steps[step]).__name__] = why
        self._on_ghosts = min(step, self._on_ghosts)
        return step

    def _read_whole(self, turn: Turn) -> None:
        assert turn.lazy is not None, "the caller has checked"
        turn.volumes = turn.lazy.read({name: [whole_box(shape)] for name, (_, shape) in turn.lazy.later.items()})

    def _discard(self, turn: Turn) -> None:
        """Discards all draws, since that of this turn was wrong."""
        self._never_ahead = True
        for other in (turn, *self._live()):
            if other.drawn is not None:
                other.drawn = other.volumes = None

    def _live(self) -> Iterator[Turn]:
        """The turns that have not come yet, without those of items that were dropped."""
        turns = [turn for ref in self._turns if (turn := ref()) is not None]
        if len(turns) < len(self._turns):
            self._turns = deque(map(weakref.ref, turns))
        return iter(turns)

    def _remove(self, turn: Turn) -> None:
        self._turns = deque(ref for ref in self._turns if ref() is not turn)
