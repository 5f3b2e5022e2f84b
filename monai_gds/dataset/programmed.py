"""Items by programs: what a worker process draws and records, and what this process reads and replays for it.

Used by the loader. In a worker, :func:`draw` computes and saves an item that is not cached, seeds its random
transforms, and records what they would do to the tensors on the target. Here, :class:`Programmed` reads the boxes that
the program touches, replays it, and runs the transforms that could not be recorded. What cannot be replayed is run
eagerly, with the same seeds, so an item does not depend on which way it was made, unless a transform draws from a
generator of the whole process.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from inspect import signature
from typing import Any, NamedTuple

import torch
from monai.transforms import GridDistortion, GridDistortiond, RandGridDistortion, RandGridDistortiond
from monai.transforms.utils import reset_ops_id

from monai_gds.base import stages
from monai_gds.dataset.making import Saved
from monai_gds.dataset.session import Begun, Session
from monai_gds.errors import FileChanged, NotSaved, UnsupportedType
from monai_gds.pipeline.global_draws import process_states
from monai_gds.pipeline.randomness import put_back, seed_everything, seed_transforms, slots, states_at
from monai_gds.pipeline.split import Split
from monai_gds.pipeline.words import naming
from monai_gds.programs.ghostly import is_ghost
from monai_gds.programs.program import Asked, Program, tensors_in
from monai_gds.programs.recorder import Recorded, Recorder, RecordGone, Refusal, record_item
from monai_gds.programs.recording import without_dynamo
from monai_gds.programs.replay import GuardFailed, answered, replay
from monai_gds.programs.trust import Made, Trust
from monai_gds.records.pending import PendingItem, Volumes

#: Transforms that make their grids on the CPU whatever ``device`` they are given.
_ON_CPU = GridDistortion, GridDistortiond, RandGridDistortion, RandGridDistortiond

#: Seeds of an item: that of its epoch, and its position there.
Seed = tuple[int, int]


class Answer(NamedTuple):
    """What a worker did for an item.

    Attributes:
        saved: what became of its record.
        digest: of the record's key; empty if there is no record.
        program: what its first random transforms do; None if that must be found out on its voxels.
        refused: why not all of them are in the program.
        states: the states of the generators of the other transforms, by their place in the pipeline.
        drawn: a digest of the states of those in the program, after it.
        drew_globally: the numbers of the transforms that drew from generators of the whole process.
        plain: whether it is certain that the item has no tensors of the target but those in dicts and lists.
        rounded: whether the worker computed numbers that are the target's to compute.
    """

    saved: Saved
    digest: str = ""
    program: Program | None = None
    refused: Refusal | None = None
    states: Mapping[str, Any] | None = None
    drawn: str = ""
    drew_globally: tuple[int, ...] = ()
    plain: bool = False
    rounded: bool = False


# ---------------------------------------------------------------------------------------------------------------------
# In a worker


def draw(
    session: Session,
    index: int,
    seed: Seed,
    target: torch.device,
    most: int | None,
    guesses: Mapping[Asked, bool],
    ask: Callable[[Program], bytes] | None,
) -> Answer:
    """Makes the record of an item if it has none, and records its random transforms.

    Args:
        session: of a copy of the dataset, for this process.
        index: the item.
        seed: what its generators are seeded with.
        target: where the program will be replayed.
        most: how many transforms to record at most.
        guesses: see :class:`Recorder`.
        ask: see there; None: this process computes the values, on the CPU, whose last bits may differ.

    Raises:
        Exception: whatever the deterministic transforms raise.
    """
    try:
        saved = session.save(index)
    except (NotSaved, FileChanged, UnsupportedType):  # then the loader's process computes it, and warns or raises
        return Answer(Saved("busy"))
    cache = session.cache()
    assert cache is not None, "the caller has checked that items are cached"
    key = session.key(index)
    (lazy,) = cache.start([key.digest], "head")
    if lazy is None:
        return Answer(saved)
    split = session.split()
    without_dynamo()
    seed_everything(split.steps(), *seed)
    stages.enter("random transforms", "recording")
    drew: set[int] = set()
    rounded: list[Program] = []

    def here(program: Program) -> bytes:
        rounded.append(program)
        return answered(program, torch.device("cpu"))

    try:
        recorder = Recorder(lazy.later, target, guesses, ask or here)
        recorded, plain = _recorded(recorder, split, lazy, session.data[index], most, drew)
    except RecordGone:
        return Answer(saved)
    done = 0 if recorded.program is None else recorded.program.done
    later, drawn = states_at(_slots(split, done)), _digest(split, done)
    return Answer(saved, key.digest, *recorded, later, drawn, tuple(sorted(drew)), plain, bool(rounded))


def _recorded(
    recorder: Recorder, split: Split, lazy: PendingItem, item: Any, most: int | None, drew: set[int] | None = None
) -> tuple[Recorded, bool]:
    """What the transforms do, and whether the last one left no tensor of the target in metadata.

    Those that draw from generators of the whole process are added to ``drew``, by their numbers.
    """
    steps, plain = split.steps(), False

    def run(step: Callable[..., Any], item: Any) -> Any:
        nonlocal plain
        before = None if drew is None else process_states()
        try:
            item = split.step(step, item)
        finally:  # a transform that is refused may have drawn before
            if drew is not None and process_states() != before:
                drew.add(next(i for i, one in enumerate(steps) if one is step))
        if step is steps[-1]:  # here, where nobody waits
            reset_ops_id(item)
            plain = not any(hidden and is_ghost(tensor) for tensor, hidden in tensors_in(item))
        return item

    recorded = record_item(recorder, split, lazy, item, most, run)
    return recorded, plain and recorded.refused is None


def _slots(split: Split, begin: int, end: int | None = None) -> dict[str, Any]:
    """The generators of some steps, by their places."""
    steps = split.steps()
    return {f"{i}.{name}": slot for i in range(len(steps))[begin:end] for name, slot in slots(steps[i]).items()}


def _digest(split: Split, done: int) -> str:
    """A digest of the random states of the first ``done`` steps. Those that share a generator with others have it."""
    return blake2b(marshal.dumps(states_at(_slots(split, 0, done)), 0), digest_size=16).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# In the loader's process


class Programmed:
    """An item that a worker drew, from the beginning of its reads to its end.

    Args:
        session: of the dataset.
        split: the pipeline; its random half is this loop's own.
        index: the item.
        answer: the worker's.
        seed: what the worker seeded the generators with.
        trust: which programs are compared with an eager run.

    Attributes:
        plain: whether it is certain, once the item has ended, that it has no tensors of the device but those in dicts
            and lists.
    """

    waits = False

    __slots__ = (
        "_answer", "_index", "_lazy", "_made", "_seed", "_session", "_split", "_trust", "_values", "_volumes", "_whole",
        "plain",
    )  # fmt: skip

    def __init__(self, session: Session, split: Split, index: int, answer: Answer, seed: Seed, trust: Trust) -> None:
        self._session, self._split, self._index = session, split, index
        self._answer, self._seed, self._trust = answer, seed, trust
        self.plain = False
        self._lazy: PendingItem | None = None
        self._volumes: Volumes | None = None
        self._values: Mapping[str, Any] | None = None
        self._made: Any = None  # what the program gave, if it was replayed before the item's epoch began
        self._whole: Begun | None = None
        program, cache = answer.program, session.cache()
        assert cache is not None, "the caller has checked that items are cached"
        if answer.saved.why:
            cache.report_full(answer.saved.why)
        if program is not None and trust.covers(program.done):
            (self._lazy,) = cache.start([answer.digest], "head")
        if self._lazy is None or program is None:
            self._begin_whole()
        else:
            self._volumes = self._lazy.read(program.boxes())

    @property
    def nbytes(self) -> int:
        """Bytes that are being read, and of the memory that they are unpacked into; 0 if there is no record."""
        if self._whole is not None:
            return self._whole.nbytes
        return 0 if self._lazy is None else self._lazy.nbytes

    @property
    def made_bytes(self) -> int:
        """Bytes of the tensors that the program gave."""
        memory = [tensor.untyped_storage() for tensor, _ in tensors_in(self._made)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())

    def arrive(self) -> None:
        """Waits for the voxels. If it fails, the item may be begun again."""
        if self._volumes is not None:
            self._values, self._volumes = self._volumes.wait(), None
        if self._values is None and self._made is None:
            self._begin_whole().arrive()

    def replayed(self) -> bool:
        """Replays the program. The item may be ended in a later epoch then; False if there is nothing to replay."""
        if self._whole is None:
            self.arrive()
            self._made = self._replay()
            self._values = None  # which needs memory
        return self._made is not None

    def holds(self, trust: Trust) -> bool:
        """Whether an item that was replayed in an epoch before is what would be replayed now: its sources are the same,
        and the program is still trusted.
        """
        program = self._answer.program
        fresh = self._answer.digest == self._session.key(self._index).digest
        return fresh and self._trust is trust and program is not None and trust.covers(program.done)

    def end(self) -> Any:
        """The item on the device, after its random transforms."""
        with naming(self._index, self._session.data[self._index]):
            item, done = self._first()
            if self._answer.saved.how == "computed":
                stages.count("hits", -1)  # it was only read here
            item = self._rest(item, done)
        return item

    def _first(self) -> tuple[Any, int]:
        """The item after the transforms in its program, and how many these are."""
        program = self._answer.program
        item, self._made = self._made, None
        if item is None:
            item = self._replay()
        if program is None or item is None:
            return self._begin_whole().taken()[0], 0
        self._session.runtime.misses.hit()
        self.plain = self._answer.plain
        if self._trust.is_due(program) and not any(step < program.done for step in self._answer.drew_globally):
            self.plain = False
            made = self._again(program.done) if self._answer.rounded else (item, self._answer.drawn)
            if made is not None:
                with suppress(RecordGone), stages.all_in("random transforms", "comparing"):
                    item = self._trust.compared(made, program, self._split.steps(), self._eagerly, self._again)
        return item, program.done

    def _replay(self) -> Any:
        """What the program gives; None if the item must be made eagerly."""
        program, values = self._answer.program, self._values
        if program is None or values is None:
            return None
        stages.enter("random transforms", "replay")
        kinds = [type(step) for step in self._split.steps()] if stages.watching() else []
        for step, count in program.counts if kinds else ():
            stages.count(stages.STEPS + kinds[step].__name__, count)
        for step, nbytes in program.made if kinds else ():
            if _can_make_it_there(kinds[step]):
                stages.count(stages.MADE + kinds[step].__name__, nbytes)
        try:
            return replay(program, values, self._session.target())
        except GuardFailed as e:
            self._trust.learn(e.found)
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
        return None  # if it is a transform's error, it comes again

    def _rest(self, item: Any, done: int) -> Any:
        """Runs the transforms after the first ``done``."""
        split = self._split
        if done < len(split.steps()):
            self.plain = False
            seed_transforms(split.steps(), *self._seed)
            if done:
                put_back(_slots(split, done), self._answer.states or {})
            item = self._session.runtime.global_draws.after(split, item, done)
            reset_ops_id(item)  # the user's own transforms must be able to invert the item
        return item

    def _begin_whole(self) -> Begun:
        """Begins to read all of the item, or to compute it."""
        if self._whole is None:
            (self._whole,) = self._session.begin([self._index], whole=True)
        return self._whole

    def _eagerly(self, count: int) -> Made:
        """The item after the first ``count`` transforms, which run on its voxels."""
        seed_transforms(self._split.steps(), *self._seed)
        item = self._session.read(self._index)
        if item is None:
            raise RecordGone
        for step in self._split.steps()[:count]:
            item = self._split.step(step, item)
        return item, _digest(self._split, count)

    def _again(self, count: int) -> Made | None:
        """The item after its first ``count`` transforms, recorded and replayed here; None if the record is gone."""
        session, split = self._session, self._split
        cache = session.cache()
        (lazy,) = [None] if cache is None else cache.start([self._answer.digest], "head")
        if lazy is None:
            return None
        seed_transforms(split.steps(), *self._seed)
        item = session.data[self._index]
        with suppress(RecordGone, GuardFailed):
            recorder = Recorder(lazy.later, session.target(), self._trust.guesses)
            program = _recorded(recorder, split, lazy, item, count)[0].program
            values = None if program is None else lazy.read(program.boxes()).wait()
            if program is not None and values is not None:
                return replay(program, values, session.target()), _digest(split, count)
        return None


def _can_make_it_there(kind: type) -> bool:
    """Whether a transform makes its grids on the device that it is given."""
    with suppress(ValueError):  # the class of a partial, for one, has no signature
        return "device" in signature(kind).parameters and not issubclass(kind, _ON_CPU)
    return False
