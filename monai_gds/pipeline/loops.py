"""Loops over one dataset, in this process: whose turn it is to draw from MONAI's own random transforms.

A transform keeps what it drew until all keys of its item are transformed, so of two loops that share it one would crop
an image at one place and its label at another. The first loop that draws has MONAI's objects until it is over. One
that begins meanwhile gets a copy, with the generators in the states of that moment. Nobody waits: there is a chain of
weak references in place of a lock. A loop is a batch or an item in a thread, or an iterator of the loader to its end.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from monai.transforms.utils import reset_ops_id

from monai_gds.base.process import Owner
from monai_gds.pipeline.randomness import States
from monai_gds.pipeline.split import Split

#: A loop that has MONAI's objects while it runs, and the claim after it.
Claim = tuple["weakref.ref[Loop]", dict[None, Any]]


class Loop:
    """One loop over a dataset.

    Attributes:
        of: the pipeline as the dataset has it; None until the loop begins to draw.
        queue: returns the queue of draws, if there is one.
    """

    __slots__ = ("__weakref__", "_loops", "_over", "_owner", "_since", "_split", "of", "queue")

    def __init__(self, loops: Loops) -> None:
        self._loops, self._owner, self._over = loops, Owner(), False
        self._split: Split | None = None  # the same, or a copy
        self._since: States | None = None  # of MONAI's objects when they were copied
        self.of: Split | None = None
        self.queue: Callable[[], Any] = lambda: None  # a weak reference, since the queue has this loop

    @property
    def runs(self) -> bool:
        """Whether it is not over. A forked child has none of its parent's loops."""
        return not self._over and self._owner.is_this_process()

    def enter(self) -> None:
        """Has this thread be in this loop, while somebody has the object."""
        self._loops.local.loop = weakref.ref(self)

    def split(self, split: Split) -> Split:
        """What this loop draws from: the pipeline that the dataset has now, or a copy of it."""
        if self.of is not split or self._split is None:
            self._split, self._since = (split, None) if self._loops.claim(self) else self._loops.copied(split)
            self.of = split
        return self._split

    def end(self) -> None:
        """Ends this loop: whoever begins to draw now has MONAI's objects."""
        was_over, self._over = self._over, True
        if not was_over and self._since is not None:
            self._loops.spare.append((self.of, self._split, self._since))


class Loops:
    """The loops over one dataset. It has slots because MONAI's ``set_rnd`` seeds what it finds in a ``__dict__``.

    Attributes:
        local: the loop that each thread is in; a weak reference.
        spare: the copy of the loop that ended last. The next one goes on with it if MONAI's objects have not moved, or
            all loops beside one that nobody ends would draw the same.
    """

    __slots__ = ("_claim", "local", "spare")

    def __init__(self) -> None:
        self._claim: Claim = weakref.ref(Loop(self)), {}  # the last one, or one before it
        self.local = threading.local()
        self.spare: deque[Any] = deque(maxlen=1)

    def running(self) -> Loop | None:
        """The loop that this thread is in."""
        loop: Loop | None = getattr(self.local, "loop", lambda: None)()
        return loop if loop is not None and loop.runs else None

    @contextmanager
    def here(self) -> Iterator[Loop]:
        """The loop that this thread is in, or one for this block."""
        outer = self.running()
        loop = outer or Loop(self)
        loop.enter()
        try:
            yield loop
        finally:
            if outer is None:
                loop.end()

    def after(self, split: Split, item: Any, done: int = 0) -> Any:
        """Runs what is random on an item, without the first ``done`` steps, as this thread's loop may draw from it."""
        if not split.rest:
            return item
        with self.here() as loop:
            mine = loop.split(split)
            item = mine.after(item, done)
        if mine is not split:
            reset_ops_id(item)  # the user's own transforms must be able to invert the item
        return item

    def claim(self, loop: Loop) -> bool:
        """Whether MONAI's objects are this loop's, now if nobody else has them."""
        mine, claim = (weakref.ref(loop), dict[None, Any]()), self._claim
        while (holder := claim[0]()) is None or not holder.runs:
            claim = claim[1].setdefault(None, mine)  # one step, in which one of several threads succeeds
            if claim is mine:
                self._claim = mine  # perhaps after a later one: then the next walk is longer
                return True
        return holder is loop

    def copied(self, split: Split) -> tuple[Split, States]:
        """A copy of the random half, and the states of MONAI's objects when it was made."""
        now = States(split.rest)
        with suppress(IndexError):
            of, copied, since = self.spare.pop()
            if of is split and now.are_those_of(since):
                return copied, since
        return split.copied(), now
