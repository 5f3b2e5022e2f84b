"""Items that cannot be made: their error on one screen, their list in the cache, and what takes their places."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import PersistentDataset

from monai_gds.errors import BrokenItem, FailedItem, causes
from monai_gds.pipeline.words import NOTE, in_words, own_line, path_of, paths_of
from monai_gds.shared.notes import FOLDER

#: The share of a dataset's items that may be broken: beyond it, something else is wrong.
SHARE = 0.05

#: How MONAI begins the error of a transform that loads files.
_LOADS = re.compile(r"applying transform \S*?\b(Load\w*)\b")

#: Items that a warning names.
_NAMED = 10

#: Characters of a reason that are shown.
_WORDS = 300

# ---------------------------------------------------------------------------------------------------------------------
# One item


def is_of_memory(error: BaseException | None) -> bool:
    """Whether this error, or the one that caused it, says that a device had no memory."""
    return any(isinstance(one, torch.OutOfMemoryError) for one in causes(error))


def unreadable(error: Exception, item: Any) -> BrokenItem | None:
    """The error of a file that cannot be loaded, in place of MONAI's; None if the error is another one."""
    loads, cause = None, error.__cause__
    for one in causes(error):  # nested pipelines
        loads, cause = _LOADS.match(str(one)), one.__cause__
        if loads is not None or not isinstance(cause, RuntimeError):
            break
    if loads is None or cause is None or is_of_memory(cause):
        return None
    path = _path_at(cause, item) or next((path for _, path in paths_of(item)), "")
    if not path:
        return None
    *_, cause = causes(cause)
    why = " ".join(str(cause).split())
    return BrokenItem(f"{path}: {loads[1]} cannot load it: {type(cause).__name__}: {why[:_WORDS]}")


def of_own_code(error: BaseException) -> BaseException | None:
    """The first cause, if code of the user's own led to it, such as a loader. Else its message says as much.

    The frames of MONAI, of the library that loads, and of this package take more than a screen.
    """
    *_, cause = causes(error)
    return cause if own_line(cause) else None


def _path_at(cause: BaseException, item: Any) -> str | None:
    """The file under the key that the transform had come to."""
    step, found = cause.__traceback__, None
    while step is not None:
        key = step.tb_frame.f_locals.get("key")
        if isinstance(item, Mapping) and isinstance(key, str) and key in item and "self" in step.tb_frame.f_locals:
            found = next((path for _, path in paths_of(item[key])), found)
        step = step.tb_next
    return found


def where_and_why(failed: FailedItem) -> tuple[str, str]:
    """A file of an item that failed, and the reason, without the note that names the item's files once more.

    The error of a file that cannot be loaded begins with its path.
    """
    why = failed.error.partition(f" ({NOTE}")[0]
    if why.startswith(kind := f"{BrokenItem.__name__}: "):
        path, _, reason = why.removeprefix(kind).partition(": ")
        return path, reason
    return failed.path, why


def list_of(cache_dir: Path, pipeline: str) -> Path:
    """The file in a cache that lists what cannot be made with a pipeline."""
    return cache_dir / FOLDER / f"{pipeline[:8]}.broken.json"


def write_list(path: Path, failed: Sequence[FailedItem]) -> None:
    """Writes the list of broken items, if possible, or removes it if there are none."""
    with suppress(OSError):  # full, read-only: the error names the first of them
        if not failed:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(exist_ok=True)
        items = [{"index": one.index, "path": one.path, "error": one.error} for one in failed]
        path.write_text(json.dumps(items, indent=1))


# ---------------------------------------------------------------------------------------------------------------------
# Others in their places

#: A dataset, and the index of one of its items.
Place = tuple[PersistentDataset, int]


class Skipping:
    """What takes the places of an epoch's broken items: others of the same epoch and rank.

    Which ones follows from the epoch's seed and the position, whoever makes the items, and after resuming too.

    Args:
        items: how many the dataset has.

    Attributes:
        batches: how many the epoch has, or a sampler without an end calls one. Beyond these, only items that have come
            so far take places.
    """

    def __init__(self, items: int, batches: int) -> None:
        self._items, self.batches = items, batches
        self._come = 0  # batches
        self._broken: dict[Place, FailedItem] = {}
        self._pool: dict[Place, None] = {}
        self._left: Iterator[Any] = iter(())
        self._drawn: list[Any] = []  # batches that were drawn before their time

    @property
    def failed(self) -> tuple[FailedItem, ...]:
        """The broken items of the epoch, in the order in which they came."""
        return tuple(self._broken.values())

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an epoch, which begins; their ``places`` are a sequence of :data:`Place`."""
        self._broken, self._pool, self._drawn, self._left, self._come = {}, {}, [], iter(batches), 0
        while True:
            batch = self._drawn.pop(0) if self._drawn else self._next()
            if batch is None:
                return
            yield batch

    def _next(self) -> Any:
        batch = next(self._left, None)
        if batch is not None:
            self._come += 1
            self._pool.update(dict.fromkeys(batch.places))
        return batch

    def instead(self, place: Place, seed: tuple[int, int], why: Exception | str) -> Place:
        """Another item for the place of one that cannot be made.

        Raises:
            BrokenItem: too many cannot be made, or there is no other.
        """
        dataset, index = place
        words = why if isinstance(why, str) else in_words(why)
        self._broken[place] = FailedItem(index, path_of(dataset.data, index), words)
        cause = why if isinstance(why, Exception) else None
        if len(self._broken) > SHARE * self._items:
            raise BrokenItem(
                f"{len(self._broken)} of {self._items} items cannot be made, which is more than {SHARE:.0%}: "
                f"{self._named()}"
            ) from cause
        while self._come < self.batches and (batch := self._next()) is not None:
            self._drawn.append(batch)
        pool = list(self._pool)
        for at in np.random.default_rng(seed).permutation(len(pool)):
            if pool[at] not in self._broken:
                found: Place = pool[at]
                return found
        raise BrokenItem(f"no item is left to take the place of {self._named()}") from cause

    def warning(self) -> str:
        """What is to be said at the end of an epoch in which items were skipped; empty if none was."""
        if not self._broken:
            return ""
        count = len(self._broken)
        what = "1 item was" if count == 1 else f"{count} items were"
        return f"{what} skipped in this epoch, and others took the places: {self._named()}"

    def _named(self) -> str:
        told = ((one.index, *where_and_why(one)) for one in self.failed[:_NAMED])
        named = [f"item {index} ({path}): {why[:_WORDS]}" for index, path, why in told]
        more = len(self._broken) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")
