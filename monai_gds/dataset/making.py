"""Making items that have no record: on a miss, and ahead of training. Used by the dataset.

An item is taken apart after its deterministic transforms and put together by the code that a hit uses, which is why
hits and misses cannot differ. The warnings about misses are here too.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from monai_gds.base import stages
from monai_gds.base.notices import Notice
from monai_gds.dataset.broken import of_own_code, unreadable
from monai_gds.dataset.item_keys import ItemKeys
from monai_gds.dataset.repeats import Repeats
from monai_gds.errors import FileChanged, NotSaved, UnsupportedType, warn
from monai_gds.folder.budget import OverBudget
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.explain import Nearest, nearest
from monai_gds.folder.index import Index
from monai_gds.folder.maintenance import format_of
from monai_gds.items.rounding import rounded
from monai_gds.items.tree import EncodedItem, compile_tree, copy_item, encode_item
from monai_gds.keys.hashing import hash_item
from monai_gds.keys.key import FORMAT, Key
from monai_gds.pipeline.hidden import Hidden
from monai_gds.pipeline.settings import apply, of_process
from monai_gds.pipeline.words import naming
from monai_gds.records.heads import Form
from monai_gds.records.problems import with_advice
from monai_gds.shared.leases import Leases, pace, take_turn
from monai_gds.shared.owner import this_process


class Misses:
    """Counts the misses of one dataset in one process.

    It has slots because MONAI's ``set_rnd`` walks every ``__dict__`` that it can reach from a dataset.

    Attributes:
        of: the dataset and its transforms, for all processes of the run: they do not repeat one another's warnings.
    """

    __slots__ = ("_count", "_why", "of", "repeats")

    def __init__(self) -> None:
        self._count = 0
        self._why: list[str] = []  # what differs from the nearest record, while every item misses
        self.of: tuple[Any, ...] = ()
        self.repeats = Repeats()

    def hit(self) -> None:
        self._why = []  # not every item is missed
        stages.count("hits")

    def miss(self, cache: CacheDirectory, key: Callable[[], Key], items: int) -> None:
        """Warns once, and why, when all ``items`` have missed though the folder has records of a similar pipeline."""
        self._count += 1
        if self._count == 1:
            self._why = why_missed(cache, key())
        worker = torch.utils.data.get_worker_info()
        if self._why and self._count * (1 if worker is None else worker.num_workers) >= items:
            if Notice("missed", self.of).is_new():
                warn(misses_in_words(cache.path, self._why))
            self._why = []

    def warn_once(self, kind: type[Exception], message: str) -> None:
        """Warns that an item is not cached, once for each kind of reason, in whatever process of this run."""
        if Notice("not cached", self.of, kind.__name__).is_new():
            warn(message)


def misses_in_words(cache_dir: str, why: Sequence[str]) -> str:
    return (
        f"every item was computed again, though {cache_dir} holds records of a similar pipeline. What differs: "
        f"{'; '.join(why)}. See dataset.explain(index)"
    )


def why_missed(cache: CacheDirectory, key: Key) -> list[str]:
    """How a key differs from the nearest record; empty if no record is near. Call it before this run saves records.

    Empty too if the key has a record: why that is not used is reported when it is read.
    """
    exists = os.path.exists(cache.record_path(key.digest))
    # a new index, whose memory is free afterwards: 1 kB per record
    near = None if cache.index is None or exists else nearest_record(Index(cache.index.directory), key)
    if near is None or near.entry is None:
        return []
    if format_of(cache.record_path(near.entry.digest)) not in ("", FORMAT):
        return ["the records are of another version of monai_gds, which made other keys: the cache is filled once more"]
    return near.differences


def nearest_record(index: Index, key: Key) -> Nearest:
    """The record that is most similar to a key, and how it differs."""
    return nearest(index, key.item, key.pipeline.digest, key.sources, key.pipeline.describe())


class Saved(NamedTuple):
    """What became of an item that should have a record.

    Attributes:
        how: ``"cached"``: its record existed; ``"computed"``: it was made; ``"converted"``: it was rewritten in the
            form asked for; ``"left_out"``: it does not fit into the budget; ``"busy"``: another process computes it.
        name: of the item's key, if there is one.
        seconds: how long computing it took.
        why: the reason it was left out, where this process found it.
    """

    how: Literal["cached", "computed", "converted", "left_out", "busy"]
    name: str = ""
    seconds: float = 0.0
    why: str = ""

    def note(self) -> None:
        """Notes in this process how long a worker took to compute an item: leases wait accordingly."""
        if self.how == "computed":
            pace.note(self.seconds)


class Maker(NamedTuple):
    """Makes items up to their random transforms, put together as a hit would, and their records.

    Attributes:
        transform: the deterministic transforms, which may write into the item.
        device: where tensors come.
        form: the form in which items come.
        mantissa_bits: how many bits of mantissa large tensors keep; None: all.
        misses: who warns of items that no record can hold.
        hidden: who warns of randomness that a record would freeze.
        keys: makes their keys.
        again: when an item without a record is computed, in words.
    """

    transform: Callable[[Any], Any]
    device: torch.device
    form: Form
    mantissa_bits: int | None
    misses: Misses
    hidden: Hidden
    keys: ItemKeys
    again: str

    def make(self, item: Any, index: Any) -> Any:
        """An item that is not to be saved."""
        encoded, _ = self.compute(item, index, "pass")
        return self.assemble(encoded, item)

    def compute(self, item: Any, index: Any, unsupported: Literal["error", "warn", "pass"]) -> tuple[EncodedItem, bool]:
        """Computes an item and takes it apart. Errors name the item.

        Returns:
            The item taken apart, and whether a record can hold it. If not, ``"error"`` raises and ``"warn"`` warns.
        """
        began = time.perf_counter()
        with naming(index, item):
            states = self.hidden.states()
            mine, given = copy_item(item, hash_item)
            try:
                computed = self.transform(mine)
            except RuntimeError as e:
                if (broken := unreadable(e, item)) is None:
                    raise
                raise broken from of_own_code(e)
            stages.enter("encoding")
            try:
                encoded, storable = encode_item(computed, root=self.form.root, given=given), True
            except UnsupportedType as e:
                if unsupported == "error":
                    raise
                if unsupported == "warn":
                    self.misses.warn_once(UnsupportedType, f"computed {self.again}, since it cannot be cached: {e}")
                encoded, storable = encode_item(computed, strict=False), False
        if (bits := self.mantissa_bits) is not None:
            encoded.tensors = {name: rounded(tensor, bits) for name, tensor in encoded.tensors.items()}
        pace.note(time.perf_counter() - began)
        stages.count("computed")
        if storable and unsupported != "pass" and (why := self.hidden.look(states, item, computed)):
            storable = False
            if unsupported == "error":
                raise UnsupportedType(f"it is not cached, but computed at every access: {why}")
        return encoded, storable

    def assemble(self, encoded: EncodedItem, item: Any) -> Any:
        """Puts together an item that was just computed, exactly as if it had been read."""
        stages.enter("decoding")
        tensors = {name: t.to(self.device) for name, t in encoded.tensors.items()}
        return compile_tree(encoded.tree, encoded.arrays, tensors, **self.form._asdict())(tensors, item)

    def fill(
        self, cache: CacheDirectory, key: Key, item: Any, index: Any, *,
        of: int, unsupported: Literal["error", "warn"], behind: bool,
    ) -> Any:  # fmt: skip
        """The item of a key that has no record, for a loop that goes on with it.

        Waits a while if another process computes it. Otherwise it is computed and saved, perhaps ``behind``, in the
        background, unless that fails, of which the user is warned. ``of`` is how many items the dataset has.
        """
        stages.enter("waiting for other processes")
        lease, found = take_turn(cache.path, key.name, lambda: look(cache, self.keys.now(item), item))
        if found is not None:
            return found[0]
        with lease:
            self.misses.miss(cache, lambda: self.keys([item])[0], of)
            made, key, changed = self.keys.compute(item, partial(self.compute, index=index, unsupported=unsupported))
            encoded, storable = made
            if storable:
                self.misses.repeats.note(index, key)
            # A source or setting that changed meanwhile may have been read before or after: the item fits neither key.
            if storable and changed:
                self.misses.warn_once(FileChanged, f"an item is not cached: while it was computed, {changed}")
            elif storable:
                stages.enter("saving")
                if behind:
                    cache.publish_behind(key, encoded, lease.hand_over())
                else:
                    cache.publish(key, encoded)
        return self.assemble(encoded, item)

    def save(self, cache: CacheDirectory, item: Any, index: int, *, anyway: bool, convert: bool) -> Saved:
        """Makes the record of an item, unless there is one or, without ``anyway``, another process is computing it.

        With ``convert``, a record in another form than the one asked for counts as missing, and is converted.

        Raises:
            NotSaved: the record cannot be written.
            FileChanged: a file that the item names changed while it was computed.
            Exception: whatever the transforms raise.
        """
        key = self.keys.now(item)
        if cache.holds(key.digest, convert):
            return Saved("cached", key.name)
        if cache.full:
            return Saved("left_out", key.name)
        leases = Leases(cache.path)
        lease = leases.take(key.name)
        if lease is None and not anyway:
            return Saved("busy")
        with lease or leases.none():
            key = self.keys.now(item)
            if cache.holds(key.digest, convert):  # the lease's last holder may have just finished
                return Saved("cached", key.name)
            began = time.perf_counter()
            if convert and (how := _converted(cache, key)):
                return Saved(how, key.name, time.perf_counter() - began)
            (encoded, _), key, changed = self.keys.compute(
                item, partial(self.compute, index=index, unsupported="error")
            )
            seconds = time.perf_counter() - began
            if changed:
                raise FileChanged(f"while item {index} was computed, {changed}. Populate again")
            try:
                cache.save(key, encoded)
            except OverBudget as e:
                return Saved("left_out", key.name, seconds, str(e))
            except OSError as e:
                raise NotSaved(f"nothing more can be cached in {cache.path}: {with_advice(e)}") from e
            return Saved("computed", key.name, seconds)


def _converted(cache: CacheDirectory, key: Key) -> Literal["converted", "cached"] | None:
    try:
        return cache.convert(key)
    except OverBudget:
        return "cached"
    except OSError as e:
        raise NotSaved(
            f"records in {cache.path} cannot be converted: {with_advice(e)}. They serve as they are: without "
            "convert=True (cache warm --no-convert) they are left alone"
        ) from e


def look(cache: CacheDirectory, key: Key, item: Any) -> Any:
    """The item in a tuple if it has a record by now, else None."""
    (pending,) = cache.start([key.digest])
    return None if pending is None else pending.wait(item)


# ---------------------------------------------------------------------------------------------------------------------
# The settings that held when a dataset was made, under which its items are computed for as long as it lives
#
# A user may call set_track_meta(False) before the training, as MONAI's tutorials do: with CacheDataset, which computes
# at once, that concerns the random half alone. Settings of a thread are switched around a computation. Those of the
# whole process never are where threads of the user's run: a helper process computes there.


def is_the_users(differ: dict[str, tuple[str, str]], asked_by: str | None) -> bool:
    """Whether settings of the whole process differ, which may be the user's. See :func:`computing`."""
    if not of_process(differ):
        return False
    if asked_by is not None:
        return asked_by == this_process()
    # A worker of torch's loader works for another process; those of MONAI's may be threads of this one.
    return torch.utils.data.get_worker_info() is None or not multiprocessing.current_process().daemon


@contextmanager
def computing(differ: dict[str, tuple[str, str]], asked_by: str | None) -> Iterator[None]:
    """Where an item is computed, under the settings that held.

    Args:
        differ: how the present settings differ from them.
        asked_by: the process for which this one may be working.

    Raises:
        RuntimeError: those of the whole process differ, and it may be the user's.
    """
    if is_the_users(differ, asked_by):
        raise RuntimeError(changed_in_words(differ, "it cannot be computed in this process"))
    # The consumer's inference mode is for random transforms.
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with inference, apply(tuple((name, held) for name, (held, _) in differ.items()), only=True):
        yield


def changed_in_words(differ: dict[str, tuple[str, str]], why: str) -> str:
    """An error's message that names both settings."""
    named = [f"{name} was {held} and is now {now}" for name, (held, now) in of_process(differ).items()]
    return (
        f"an item has to be computed under the settings that held when the dataset was made, and {why}: "
        f"{', '.join(named)}. Change settings before the dataset is made, or call dataset.populate() before the change"
    )
