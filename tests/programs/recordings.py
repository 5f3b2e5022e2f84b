"""Items of two volumes, and what a recording of their transforms gives beside MONAI's eager run."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import monai.transforms as mt
import numpy as np
import torch
from monai.data import MetaTensor

from monai_gds.pipeline.randomness import seed_everything, slots, states_at
from monai_gds.pipeline.split import Split
from monai_gds.programs.program import Asked, Program, Step
from monai_gds.programs.recorder import Recorded, Recorder
from monai_gds.programs.replay import GuardFailed, answered, replay
from tests.same import assert_same, strides

BOTH = ("image", "label")
SHAPE = (32, 30, 28)


class Where(NamedTuple):
    """Where programs are replayed, and what they are recorded for."""

    target: str
    device: str


#: Without a GPU, programs for one are replayed on the CPU: all but the last bits of what the GPU computes.
CPU, AS_CUDA, CUDA = Where("cpu", "cpu"), Where("cuda:0", "cpu"), Where("cuda:0", "cuda:0")


class Voxels:
    """A volume of which boxes were read: all else is garbage. Not to be written to."""

    def __init__(self, whole: torch.Tensor, boxes: Sequence[Any]) -> None:
        self.data = torch.empty_like(whole)
        self.data.view(torch.uint8).fill_(0x5A)
        for box in boxes:
            self.data[(..., *box)] = whole[(..., *box)]
        self.before = self.data.view(torch.uint8).clone()

    def place(self, offset: int) -> int:
        """As that of records."""
        return offset

    def changed(self) -> bool:
        return not torch.equal(self.data.view(torch.uint8), self.before)


def item(seed: int = 0, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Two volumes with metadata, and small values beside them."""
    generator = torch.Generator().manual_seed(seed)
    affine = torch.diag(torch.tensor([0.8, 0.9, 2.5, 1.0][: len(shape)] + [1.0] * (4 - len(shape))))[:4, :4]
    volumes = {
        "image": torch.rand(1, *shape, generator=generator).mul(9).to(dtype),
        "label": torch.randint(0, 4, (1, *shape), generator=generator).float(),
    }
    made: dict[str, Any] = {}
    for name, volume in volumes.items():
        made[name] = MetaTensor(volume, affine.double().clone(), meta={"filename_or_obj": f"{name}.nii", "n": [1, {}]})
    label = made["label"].numpy().ravel()
    made["fg"], made["bg"] = np.flatnonzero(label > 0), np.flatnonzero(label == 0)
    return {**made, "start": torch.tensor([3, 4, 5]), "age": 40, "notes": ["a", {"b": np.arange(3)}]}


def on(device: str, of: dict[str, Any]) -> dict[str, Any]:
    """An item with its tensors on a device, but not those of metadata."""
    out = dict(of)
    for name, value in of.items():
        if isinstance(value, torch.Tensor):
            out[name] = value.as_subclass(torch.Tensor).to(device).as_subclass(type(value))
            out[name].__dict__ = vars(value)
    return out


def seeded(make: Callable[[], Any], seed: int) -> Split:
    """A pipeline, made again, with all generators seeded."""
    made = make()
    split = Split(made if type(made) is mt.Compose and not made.lazy else mt.Compose([made]))
    seed_everything(split.steps(), seed)
    mt.Randomizable.R.seed(seed)
    torch.cuda.manual_seed_all(seed)  # does nothing without a GPU
    return split


def states(split: Split) -> Any:
    """The random states of transforms and of the process."""
    found = [states_at(slots(step)) for step in split.steps()]
    shared = mt.Randomizable.R.get_state()
    return found, random.getstate(), np.random.get_state(), torch.get_rng_state(), shared


class Outcome(NamedTuple):
    """What became of an item, which is what MONAI gives."""

    got: Any
    recorded: Recorded
    wrong: int  # guesses

    @property
    def program(self) -> Program:
        assert self.recorded.program is not None, self.recorded.refused
        return self.recorded.program

    @property
    def done(self) -> int | None:
        """How many transforms are in the program; None if all are."""
        if self.recorded.refused is None:
            return None
        return 0 if self.recorded.program is None else self.recorded.program.done

    @property
    def why(self) -> str:
        assert self.recorded.refused is not None, "everything was recorded"
        return self.recorded.refused.why


def record(
    split: Split, of: dict[str, Any], where: Where, guesses: Mapping[Asked, bool] | None = None,
    ask: Callable[[Program], bytes] | None = None, views_only: bool = False,
) -> Recorded:  # fmt: skip
    """Records the random half of a pipeline. By default, numbers of the target are computed where it is replayed."""
    forms = {name: (of[name].dtype, tuple(of[name].shape)) for name in BOTH}

    def make(ghosts: dict[str, torch.Tensor]) -> dict[str, Any]:
        made = copy.deepcopy(of)
        for name, ghost in ghosts.items():
            made[name] = ghost.as_subclass(type(of[name]))
            made[name].__dict__ = copy.deepcopy(vars(of[name]))
        return made

    ask = ask or partial(answered, device=torch.device(where.device))
    recorder = Recorder(forms, torch.device(where.target), guesses or {}, ask, views_only=views_only)
    return recorder.record(split.steps(), split.step, make)


def run(
    make: Callable[[], Any],
    where: Where = CPU,
    seed: int = 0,
    of: dict[str, Any] | None = None,
    eager: Callable[[], Any] | None = None,
    views_only: bool = False,
) -> Outcome:
    """Records a pipeline, replays it and runs the rest, and compares that with the eager run, bit for bit.

    Args:
        make: makes the pipeline.
        where: where it runs.
        seed: of its generators.
        of: the item.
        eager: makes the pipeline for the eager run, if another.
        views_only: whether only views of the volumes are recorded.
    """
    of = item(seed) if of is None else of
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = seeded(eager or make, seed)
        expected = plain.after(copy.deepcopy(on(where.device, of)))
        left = states(plain)
        guesses: dict[Asked, bool] = {}
        wrong = 0
        while True:
            split = seeded(make, seed)
            recorded = record(split, of, where, guesses, views_only=views_only)
            try:
                got = _replayed(recorded, of, where)
                break
            except GuardFailed as e:
                wrong += 1
                guesses.update(e.found)
        if recorded.refused is not None:
            if eager is not None:
                return Outcome(None, recorded, wrong)
            got = split.after(got, recorded.program.done if recorded.program is not None else 0)
        for value in (expected, got):
            mt.utils.reset_ops_id(value)
            _without_ids(value)
        assert_same(left, states(split))
        assert_same(expected, got)
        assert_same(strides(expected), strides(got))
        assert shared(expected) == shared(got)
    return Outcome(got, recorded, wrong)


def _replayed(recorded: Recorded, of: dict[str, Any], where: Where) -> Any:
    """The item after the program, on volumes that must stay as they are, also when others write into the item."""
    if recorded.program is None:
        return copy.deepcopy(on(where.device, of))
    sent = isinstance(recorded.program.item, bytes)
    program: Program = pickle.loads(pickle.dumps(recorded.program)) if sent else recorded.program
    voxels = {
        name: Voxels(of[name].as_subclass(torch.Tensor).to(where.device), boxes)
        for name, boxes in program.boxes().items()
    }
    for _ in range(2):  # step by step, then by functions
        got = replay(program, voxels, torch.device(where.device))
    if recorded.refused is not None:
        for tensor in tensors(copy.copy(got)):
            if tensor.numel():
                assert tensor.untyped_storage().data_ptr() not in {
                    volume.data.untyped_storage().data_ptr() for volume in voxels.values()
                }, "the eager rest may write into the record's memory"
    assert not any(volume.changed() for volume in voxels.values()), "the program writes into the record's memory"
    return got


def steps_of(program: Program) -> list[Step]:
    """The operations of a program, in their order."""
    return [step for piece in program.pieces for step in pickle.loads(piece.steps)]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a tree."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def shared(value: Any) -> list[tuple[int, int]]:
    """Which tensors of a tree share memory with an earlier one."""
    first: dict[int, int] = {}
    found = []
    for i, tensor in enumerate(tensors(value)):
        if tensor.numel():
            found.append((i, first.setdefault(tensor.untyped_storage().data_ptr(), i)))
    return found


def _without_ids(value: Any) -> Any:
    """Removes the identity of transforms everywhere, also in metadata."""
    if isinstance(value, MetaTensor):
        mt.utils.reset_ops_id(value)
        _without_ids(vars(value))
    elif isinstance(value, dict):
        value.pop("id", None)
        for part in value.values():
            _without_ids(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _without_ids(part)
    return value
