"""Records the random transforms of an item in a process that has neither its voxels nor a GPU.

The user's own, unchanged transforms run on ghosts: MetaTensors that have shape, strides and metadata, and no values.
What they do to tensors is written down (:mod:`monai_gds.programs.recording`) and becomes a program, which is replayed
on the voxels, on the target. Everything that is no tensor comes from the run on ghosts.

What cannot be recorded is refused, and the program ends before that transform. The run is then made once more up to
there, with random states as they were, so that nothing of the transform is left, whatever it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from monai_gds.programs import kept
from monai_gds.programs.emission import emit
from monai_gds.programs.ghostly import Refused, is_ghost, plainly
from monai_gds.programs.modes import beyond_modes
from monai_gds.programs.program import Asked, Program
from monai_gds.programs.recording import Recording
from monai_gds.programs.replay import answered

#: Dtype and shape of tensors, by their names in the record.
Forms: TypeAlias = "Mapping[str, tuple[torch.dtype, tuple[int, ...]]]"


class Refusal(NamedTuple):
    """Why a program ends before the last transform.

    Attributes:
        step: the number of the transform.
        name: the name of its type.
        why: what it does, as the end of a sentence.
    """

    step: int
    name: str
    why: str


class Recorded(NamedTuple):
    """The outcome of a recording.

    Attributes:
        program: what the first transforms do; None if that is none of them.
        refused: why it is not all of them; None if it is.
    """

    program: Program | None
    refused: Refusal | None


class Recorder:
    """Records one item.

    Args:
        forms: dtype and shape of the record's tensors that ghosts stand for, by name.
        target: where the program will run: a CUDA device with its index, or the CPU. It need not exist here.
        guesses: :attr:`GuardFailed.found` of this item or others.
        ask: returns the values that a program gives on the target; None: this process can run it there.
    """

    def __init__(
        self,
        forms: Forms,
        target: torch.device,
        guesses: Mapping[Asked, bool] | None = None,
        ask: Callable[[Program], bytes] | None = None,
    ) -> None:
        self._begin = partial(Recording, forms, target, ask=ask or partial(answered, device=target))
        self._guesses = guesses or {}
        self._recording = self._begin(guesses=self._guesses)

    def name_of(self, tensor: Tensor) -> str | None:
        """The name in the record of the tensor that this is a view of; None if it is none, or was written to."""
        with plainly():
            if not tensor.is_meta:
                return None
            memory = tensor.untyped_storage()._cdata
            return None if memory in self._recording.written else self._recording.names.get(memory)

    def record(
        self,
        steps: Sequence[Callable[..., Any]],
        apply: Callable[[Any, Any], Any],
        make: Callable[[dict[str, Tensor]], Any],
        most: int | None = None,
    ) -> Recorded:
        """Runs the transforms on ghosts.

        Afterwards the random states, those of the process included, and the attributes of the transforms are as the
        transforms in the program leave them.

        Args:
            steps: the transforms.
            apply: runs one of them on an item, and returns the result.
            make: returns the item with the given ghosts in it, and shares nothing with other calls. Its other tensors
                are real and on the CPU here, and count as being on the target.
            most: how many transforms to record at most. Give the number of one that is always refused: recording an
                item up to a refusal takes twice the time.

        Raises:
            BaseException: what ``make`` raises, and what transforms raise that is no Exception. An Exception of theirs
                counts as a refusal, since the eager run raises it again if it has nothing to do with ghosts.
        """
        count = len(steps) if most is None else min(most, len(steps))
        refused = None if count == len(steps) else Refusal(count, type(steps[count]).__name__, "it is not recorded")
        with kept.in_attributes(steps):
            return self._recorded(steps, apply, make, count, refused)

    def _recorded(
        self,
        steps: Sequence[Callable[..., Any]],
        apply: Callable[[Any, Any], Any],
        make: Callable[[dict[str, Tensor]], Any],
        count: int,
        refused: Refusal | None,
    ) -> Recorded:
        before, guesses = kept.Before(steps), dict(self._guesses)
        while True:
            run = _Run(self._begin(guesses=guesses), steps[:count], apply)
            self._recording = run.recording
            program = run.program(make(dict(run.recording.ghosts)), whole=refused is None) if count else None
            if program is not None or not count:
                return Recorded(program, refused)
            done = len(run.marks) if len(run.marks) < count else 0  # at the end the item itself was refused
            before.put_back()
            # A transform may have been refused on the way of a wrong guess, such as that a volume has no foreground.
            bools = [g.place for g in run.recording.guards if g.place[0] == done and not g.guess]
            open_guesses = [place for place in bools if place not in guesses]
            if open_guesses:
                guesses[open_guesses[-1]] = True
                continue
            refused = Refusal(done, type(steps[done]).__name__, run.recording.refused)
            count = done


class _Run:
    """One run of transforms on ghosts."""

    def __init__(
        self, recording: Recording, steps: Sequence[Callable[..., Any]], apply: Callable[[Any, Any], Any]
    ) -> None:
        self.recording, self._steps, self._apply = recording, steps, apply
        self.marks: list[int] = []  # operations after each transform

    def program(self, item: Any, whole: bool) -> Program | None:
        """The program; None if something was refused."""
        recording = self.recording
        try:
            if recording.target.type != "cpu":
                item = _lifted(item, recording.lifted, {})
            for recording.transform, step in enumerate(self._steps):
                with beyond_modes(recording), recording:  # the one place in which transforms see ghosts
                    item = self._apply(step, item)
                self._check(step, item)
                self.marks.append(len(recording.operations))
            return emit(recording, item, self.marks, whole, recording.guards)
        except Refused:
            return None
        except Exception as e:
            recording.remember(_reason(e))
            return None

    def _check(self, step: Callable[..., Any], item: Any) -> None:
        """Refuses a transform that hid a refusal, keeps a ghost, or gives one that did not come from operations."""
        recording = self.recording
        if recording.refused:
            recording.refuse(recording.refused)
        kept.give_back(step, recording.value)
        if kept.in_containers(step):
            recording.refuse("it keeps tensors of the item")
        recording.check_writes()
        for tensor in _tensors(item):
            if tensor.requires_grad:
                recording.refuse("its result requires a gradient")
            if is_ghost(tensor):
                recording.number_of(tensor)


def _tensors(item: Any) -> Iterator[Tensor]:
    """The tensors of an item within dicts, lists and tuples. Others are met when the item is pickled."""
    todo = [item]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)


def _lifted(value: Any, lift: Callable[[Tensor], Tensor], known: dict[int, Tensor]) -> Any:
    """An item with ghosts in place of its real tensors. Changes dicts and lists in place, which keeps their types."""
    if isinstance(value, Tensor):
        if is_ghost(value):
            return value
        if id(value) not in known:
            with plainly():
                known[id(value)] = lift(value.as_subclass(Tensor)).as_subclass(type(value))
            known[id(value)].__dict__ = value.__dict__
        return known[id(value)]
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = _lifted(part, lift, known)
    elif isinstance(value, list):
        value[:] = [_lifted(part, lift, known) for part in value]
    elif type(value) is tuple:
        return tuple(_lifted(part, lift, known) for part in value)
    return value


def _reason(error: BaseException) -> str:
    """An error in one line, without MONAI's wrapping."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"it raised {type(error).__name__}: {error}"
