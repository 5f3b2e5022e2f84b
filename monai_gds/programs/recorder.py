"""Records the random transforms of an item in a process that has neither its voxels nor a GPU.

The user's own, unchanged transforms run on ghosts: MetaTensors that have shape, strides and metadata, and no values.
What they do to tensors is written down (:mod:`monai_gds.programs.recording`) and becomes a program, which is replayed
on the voxels, on the target. Everything that is no tensor comes from the run on ghosts.

The leading crops of an item are recorded where it is used, too (:mod:`monai_gds.programs.draws`): as views only.

What cannot be recorded is refused, and the program ends before that transform. The run is then made once more up to
there, with random states as they were, so that nothing of the transform is left, whatever it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from monai_gds.errors import causes
from monai_gds.pipeline.parts import parts
from monai_gds.pipeline.randomness import States
from monai_gds.pipeline.split import Split
from monai_gds.programs import kept
from monai_gds.programs.emission import emit
from monai_gds.programs.ghostly import Refused, is_ghost, plainly
from monai_gds.programs.indices import lookup_of, standing_in
from monai_gds.programs.log import place_of
from monai_gds.programs.modes import beyond_modes
from monai_gds.programs.program import Asked, Program, outer_tensors, replaced, tensors_in
from monai_gds.programs.recording import Recording
from monai_gds.programs.replay import answered

if TYPE_CHECKING:
    from monai_gds.records.pending import PendingItem
    from monai_gds.tiles.runs import Runs

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
        views_only: whether the transforms are crops and pads of MONAI's own. They are refused if they give anything but
            views of ghosts, so no mode of torch is needed, which would cost half as much again. Nothing is changed that
            threads share, such as random states of the process. Other tensors of the item stay as they are, on any
            device. The program is for this process and one replay.
    """

    def __init__(
        self,
        forms: Forms,
        target: torch.device,
        guesses: Mapping[Asked, bool] | None = None,
        ask: Callable[[Program], bytes] | None = None,
        *,
        views_only: bool = False,
    ) -> None:
        self._begin = partial(Recording, forms, target, ask=ask or partial(answered, device=target))
        self._guesses, self._views_only = guesses or {}, views_only
        self._recording: Recording  # the last one

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
        steps = steps[:count]
        guesses, program = dict(self._guesses), None
        with kept.in_attributes(steps):
            before = States(steps) if self._views_only else kept.Before(steps)
            while count:
                self._recording = self._begin(guesses=guesses)
                run = _Run(self._recording, steps[:count], apply, self._views_only)
                program = run.program(make(dict(run.recording.ghosts)), whole=refused is None)
                if program is not None:
                    break
                # If all ran, the item was refused, probably for what one of the last has put there.
                done = min(len(run.marks), count - 1)
                before.put_back()
                # A transform may have been refused on the way of a wrong guess, such as that there is no foreground.
                bools = [g.place for g in run.recording.guards if g.place[0] == done and not g.guess]
                if open_guesses := [place for place in bools if place not in guesses]:
                    guesses[open_guesses[-1]] = True
                    continue
                refused = Refusal(done, type(steps[done]).__name__, run.recording.refused)
                count = done
        return Recorded(program, refused)


class RecordGone(Exception):
    """The record turned out to be unusable, which has been reported, or was deleted."""


def record_item(
    recorder: Recorder, split: Split, lazy: PendingItem, item: Any, most: int | None = None,
    run: Callable[[Callable[..., Any], Any], Any] | None = None,
) -> Recorded:  # fmt: skip
    """Records the random transforms of an item whose record may have indices of its labels.

    Args:
        recorder: of the record's tensors.
        split: the pipeline.
        lazy: the record.
        item: the dataset's own item.
        most: how many transforms to record at most.
        run: runs one of the transforms on an item; by default, the split does.

    Raises:
        RecordGone: the record cannot be used.
        BaseException: see :meth:`Recorder.record`.
    """

    def name_of(tensor: Tensor) -> str | None:
        return recorder.name_of(tensor) or lazy.name_of(tensor)

    def runs_of(label: Tensor, image: Tensor | None = None, threshold: str = "", /) -> Runs | None:
        of_label, of_image = name_of(label), "" if image is None else name_of(image)
        return None if of_label is None or of_image is None else lazy.runs.get((of_label, of_image, threshold))

    def apply(step: Callable[..., Any], item: Any) -> Any:
        with standing_in(step, item, runs_of):
            return (run or split.step)(step, item)

    def make(ghosts: Mapping[str, Tensor]) -> Any:
        found = lazy.wait(item, ghosts)
        if found is None:
            raise RecordGone
        return found[0]

    steps = split.steps()
    program, refused = recorder.record(steps, apply, make, most)
    if refused is not None and not lazy.runs and lookup_of(steps[refused.step]):
        refused = refused._replace(why="it looks for the voxels of a label, which only records in tiles list")
    return Recorded(program, refused)


class _Run:
    """One run of transforms on ghosts."""

    def __init__(
        self,
        recording: Recording,
        steps: Sequence[Callable[..., Any]],
        apply: Callable[[Any, Any], Any],
        views_only: bool,
    ) -> None:
        self.recording, self._steps, self._apply, self._views_only = recording, steps, apply, views_only
        self.marks: list[int] = []  # operations after each transform

    def program(self, item: Any, whole: bool) -> Program | None:
        """The program; None if something was refused."""
        recording = self.recording
        try:
            if self._views_only:
                self._check_places(item)
            elif recording.target.type != "cpu":
                item = _lifted(item, recording.lifted)
            for recording.transform, step in enumerate(self._steps):
                with ExitStack() as modes:  # the one place in which transforms see ghosts
                    if not self._views_only:
                        modes.enter_context(beyond_modes(recording))
                        modes.enter_context(recording)
                    item = self._apply(step, item)
                self._check(step, item)
                self.marks.append(len(recording.operations))
            return emit(recording, item, self.marks, whole, recording.guards, self._views_only)
        except Refused:
            return None
        except Exception as e:
            recording.remember(_reason(e))
            return None

    def _check_places(self, item: Any) -> None:
        """Refuses an item in which tensors of the record are where nothing can replace them."""
        with plainly():
            seen = {t.untyped_storage()._cdata for t, hidden in tensors_in(item) if not hidden and t.is_meta}
        missing = {name for memory, name in self.recording.names.items() if memory not in seen}
        if missing:
            self.recording.refuse(f"the tensor {min(missing)!r} of the record is not within dicts and lists")

    def _check(self, step: Callable[..., Any], item: Any) -> None:
        """Refuses a transform that hid a refusal, keeps a ghost, or gives one that did not come from operations."""
        recording = self.recording
        if recording.refused:
            recording.refuse(recording.refused)
        held = list(parts(step))
        kept.give_back(held, recording.value)
        if kept.in_containers(held):
            recording.refuse("it keeps tensors of the item")
        recording.check_writes()
        for tensor in outer_tensors(item):  # others are met when it is pickled
            if tensor.requires_grad:
                recording.refuse("its result requires a gradient")
            if is_ghost(tensor):
                if self._views_only:
                    self._check_view(tensor)
                else:
                    recording.number_of(tensor)

    def _check_view(self, tensor: Tensor) -> None:
        """Refuses a ghost that is no view of a tensor of the record as it lies there."""
        with plainly():
            if not self.recording.is_leaf(place_of(tensor)):
                self.recording.refuse("it makes a tensor of its own")
            if tensor._version:
                self.recording.refuse("it writes in place")


def _lifted(item: Any, lift: Callable[[Tensor], Tensor]) -> Any:
    """An item with ghosts in place of its real tensors. Changes dicts and lists in place."""
    known: dict[int, Tensor] = {}

    def lifted(tensor: Tensor) -> Tensor:
        if is_ghost(tensor):
            return tensor
        if id(tensor) not in known:
            with plainly():
                known[id(tensor)] = lift(tensor.as_subclass(Tensor)).as_subclass(type(tensor))
            known[id(tensor)].__dict__ = tensor.__dict__
        return known[id(tensor)]

    return replaced(item, lifted)


def _reason(error: BaseException) -> str:
    """An error in one line, without MONAI's wrapping."""
    *_, error = causes(error)
    return f"it raised {type(error).__name__}: {error}"
