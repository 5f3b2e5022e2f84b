"""Crops that are drawn before anything is read: which item is drawn when, and what is read for it.

Used by the dataset. An item whose record has tensors in tiles gets a :class:`Turn` in the queue of a loop, in the order
in which items are begun. It is drawn as soon as all items before it are drawn or finished: its leading crops
(:mod:`monai_gds.pipeline.ahead`) are recorded, and the voxels that their program touches are read. When its turn comes,
the program is replayed on these voxels, and the other transforms run on the values, one item after the other.

Drawing ahead assumes that nothing else draws from the same generators before the item's turn. So after each draw the
random states are put back to those of the last finished item. When a turn comes, they are compared with those that the
draw began with. If they are equal, the states move to where the draw left them; if not, the draw is discarded and the
item is drawn again. So the random states are always those of a loop that reads nothing ahead, also for a transform that
shares a generator, after a loop that was left early, and after a seed that was set in between. After a draw that had to
be discarded, the loop draws no more items ahead.

The generators of Python, NumPy and torch are neither read nor put back here: the training draws from them meanwhile.
None of the leading crops does.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from monai_gds.pipeline.ahead import drawn_ahead, why_not_now
from monai_gds.pipeline.loops import Loop
from monai_gds.pipeline.randomness import States, states_kept
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
        queue: of draws; None if nothing is drawn ahead.
        lazy: its record; None if the item is not drawn ahead, since it must be computed or has nothing in tiles.
        item: the dataset's own item.
        volumes: what is being read; None until that is certain.
    """

    __slots__ = ("__weakref__", "come", "drawn", "item", "lazy", "queue", "volumes")

    def __init__(self, queue: Draws | None, lazy: PendingItem | None, item: Any) -> None:
        self.queue, self.lazy, self.item = queue, lazy, item
        self.drawn: _Drawn | None = None
        self.volumes: Volumes | None = None
        self.come: int | None = None  # bytes, once the turn has come

    @property
    def waits(self) -> bool:
        """Whether it is not certain yet what is read."""
        return self.lazy is not None and self.volumes is None

    @property
    def nbytes(self) -> int:
        """Bytes that are being read, and of the memory that they are unpacked into; of whole tensors until drawn."""
        if self.lazy is None:
            return self.come or 0
        later = self.lazy.later.values() if self.volumes is None else ()
        return self.lazy.nbytes + sum(dtype.itemsize * prod(shape) for dtype, shape in later)


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
        self._ahead = True  # whether items are drawn before their turn comes
        self._turns: list[weakref.ref[Turn]] = []

    @property
    def idle(self) -> bool:
        """Whether nothing is begun, so that the next item begins a new loop."""
        return not self._live()

    def begin(self, turns: Sequence[Turn]) -> None:
        """Puts turns at the end of the queue, and draws what can be."""
        self._turns.extend(map(weakref.ref, turns))
        self.go_on()

    def go_on(self) -> None:
        """Draws the items that can be drawn now, and begins to read them. After one that cannot be, none is drawn."""
        last: States | None = None
        for turn in self._live():
            lazy = turn.lazy if turn.volumes is None else None
            if lazy is not None and (not self._on_ghosts or (self._ahead and lazy.ready)):
                try:
                    self._draw(turn, last)
                except Exception as e:  # it concerns another item than the one wanted now, and is raised at its turn
                    _log.debug("an item is not drawn ahead: %r", e)
            if turn.drawn is not None:
                last = turn.drawn.after
            elif self._on_ghosts:
                return

    def take(self, turn: Turn) -> tuple[Any, int] | None:
        """The item of a turn that has come.

        Returns:
            The item on its device, and how many steps it has been through; None if it must be read or computed some
            other way, with the random states as they were.
        """
        turn.come = 0
        if turn.drawn is not None and not States(self._steps).are_those_of(turn.drawn.before):
            self._ahead = False
            for other in (turn, *self._live()):
                if other.drawn is not None:
                    other.drawn = other.volumes = None
        if turn.waits:
            self._draw(turn, None)
        lazy, drawn, reading = turn.lazy, turn.drawn, turn.volumes
        turn.come = turn.nbytes
        turn.lazy = turn.drawn = turn.volumes = None  # the memory belongs to the item now
        volumes = None if reading is None else reading.wait()
        if lazy is None or volumes is None:
            return None
        if drawn is None:
            found = lazy.wait(turn.item, {name: volume.whole() for name, volume in volumes.items()})
            return None if found is None else (found[0], 0)
        item = replay(drawn.program, volumes, self._device, shared=False)
        drawn.after.put_back(drawn.before)  # the user may have set something while it was read
        return item, drawn.program.done

    def _draw(self, turn: Turn, since: States | None) -> None:
        """Records the first steps of an item and begins to read what they touch. Random states stay as they are.

        Sets ``volumes`` of the turn, and ``drawn`` unless all values are needed; or its ``lazy`` becomes None, if the
        record is of no use. ``since`` are the states to draw from; None: the present ones.
        """
        lazy, drawn = turn.lazy, None
        assert lazy is not None, "the caller has checked"
        on_ghosts = enumerate(self._steps[: self._on_ghosts])
        changed = next(((i, why) for i, step in on_ghosts if (why := why_not_now(step))), None)
        if changed is not None:
            self._give_up(*changed)
        if self._on_ghosts:
            visible = States(self._steps)
            before = visible if since is None else since
            with states_kept(before.generators):  # which the transforms need not have any more
                try:
                    before.put_back()
                    program = self._program(lazy, turn.item)
                    drawn = None if program is None else _Drawn(program, before, States(self._steps))
                except RecordGone:
                    turn.lazy = None
                    return
                finally:
                    visible.put_back()
        whole = {name: [whole_box(shape)] for name, (_, shape) in lazy.later.items()}
        turn.volumes, turn.drawn = lazy.read(whole if drawn is None else drawn.program.boxes()), drawn

    def _program(self, lazy: PendingItem, item: Any) -> Program | None:
        """What the first steps do to an item; None if they need its values."""
        recorder = Recorder(lazy.later, self._device, views_only=True)
        program, refused = record_item(recorder, self.split, lazy, item, self._on_ghosts)
        if refused is not None and refused.step < self._on_ghosts:
            self._give_up(refused.step, refused.why)
        return program

    def _give_up(self, step: int, why: str) -> None:
        """Has a step, and those after it, run on values in this loop."""
        self._notes[type(self._steps[step]).__name__] = why
        self._on_ghosts = step

    def _live(self) -> list[Turn]:
        """The turns that have not come yet, without those of items that were dropped."""
        turns = [turn for ref in self._turns if (turn := ref()) is not None and turn.come is None]
        self._turns = list(map(weakref.ref, turns))
        return turns
