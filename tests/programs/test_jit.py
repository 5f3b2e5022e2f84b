"""Pieces of programs that TorchScript runs: the values of the steps one by one, whatever is built."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import monai.transforms as mt
import pytest
import torch

from monai_gds import limits
from monai_gds.programs import jit
from monai_gds.programs.program import Program, Step, unpack
from monai_gds.programs.replay import GuardFailed, replay
from tests.programs.recordings import CPU, Voxels, item, record, seeded, steps_of
from tests.same import assert_same

KEYS = ("image", "label")


def affine(**changes: Any) -> mt.Compose:
    return mt.Compose(
        [
            mt.RandSpatialCropSamplesd(KEYS, (8, 8, 8), 3, random_size=False),
            mt.RandAffined(KEYS, prob=1, rotate_range=(0.3,) * 3, mode=("bilinear", "nearest"), **changes),
            mt.RandGaussianSmoothd("image", prob=1),
        ]
    )


@cache
def recorded(seed: int, make: Callable[[], Any] = affine) -> Program:
    found = record(seeded(make, seed), item(0), CPU)
    assert found.program is not None and found.refused is None, found.refused
    return found.program


def made(program: Program) -> Any:
    of = item(0)
    voxels = {name: Voxels(of[name].as_subclass(torch.Tensor), boxes) for name, boxes in program.boxes().items()}
    found = replay(program, voxels, torch.device("cpu"))
    assert not any(one.changed() for one in voxels.values())
    return found


@pytest.fixture(autouse=True)
def functions() -> Iterator[jit.Functions]:
    jit.functions_for.cache_clear()
    yield jit.functions_for(torch.device("cpu"))
    jit.functions_for.cache_clear()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many functions were run."""
    count = [0]
    build = jit._built

    def counting(*args: Any) -> Any:
        function = build(*args)

        def run(*given: Any) -> Any:
            count[0] += 1
            return function(*given)

        return run

    monkeypatch.setattr(jit, "_built", counting)
    return count


def test_pieces_with_other_numbers_share_a_function(functions: jit.Functions, ran: list[int]) -> None:
    first = recorded(1)
    by_steps = made(first)
    forms = {piece.form for piece in first.pieces if piece.form}
    assert len(forms) == 2, "one for all crops that are turned, and one for all that are smoothed"
    assert set(functions.ready(first.pieces)) == forms
    ran[0] = 0
    assert_same(by_steps, made(first))
    assert ran[0] == len([piece for piece in first.pieces if piece.form]) > 2

    second = recorded(2)
    ran[0] = 0
    by_functions = made(second)
    assert ran[0] == len([piece for piece in second.pieces if piece.form]), "nothing is built for it"
    jit.functions_for.cache_clear()
    assert_same(by_functions, made(second))


def test_a_function_gives_only_what_is_needed_later() -> None:
    pieces = [piece for piece in recorded(1).pieces if piece.form]
    assert [len(piece.results) for piece in pieces] == [1] * len(pieces), "all else would stay in the device's memory"


def test_a_function_that_gives_something_else_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = made(recorded(1))
    jit.functions_for.cache_clear()
    build = jit._built

    def wrong(*args: Any) -> Any:
        function = build(*args)

        def run(*given: Any) -> Any:
            found = function(*given)
            return found + 1e-6 if isinstance(found, torch.Tensor) else tuple(part + 1e-6 for part in found)

        return run

    monkeypatch.setattr(jit, "_built", wrong)
    for _ in range(3):
        assert_same(expected, made(recorded(1)))


@pytest.mark.parametrize("error", [RuntimeError("no such operation"), ValueError("no such type"), TypeError("neither")])
def test_where_nothing_can_be_built_steps_run_one_by_one(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    expected = made(recorded(1))
    jit.functions_for.cache_clear()

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(jit, "_built", fails)
    for _ in range(2):
        assert_same(expected, made(recorded(1)))


def test_an_error_in_a_function_is_that_of_the_step(functions: jit.Functions) -> None:
    program = recorded(1)
    expected = made(program)

    def fails(*_: Any) -> Any:
        raise RuntimeError("The following operation failed in the TorchScript interpreter")

    functions.keep(dict.fromkeys(functions.ready(program.pieces), fails))
    assert_same(expected, made(program))


def test_functions_are_bounded(functions: jit.Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SCRIPTED_FORMS", 1)
    program = recorded(1)
    expected = made(program)
    assert len(functions.ready(program.pieces)) == 1
    assert_same(expected, made(program))


class Stepwise(mt.RandomizableTransform):  # type: ignore[misc]  # MONAI is untyped
    """Operations in place, on lists, with several results, and with values that only later pieces need."""

    def __call__(self, of: Any) -> Any:
        image = of["image"].as_subclass(torch.Tensor) * self.R.uniform(1, 2)
        image.add_(1).clamp_(max=self.R.uniform(5, 9))
        halves = torch.cat([part.flip(1) for part in image.split(4, 2)], 2)
        values, places = halves.max(1, keepdim=True)
        image[:, :2] = values.to(torch.float64).mean((2, 3), keepdim=True).float()
        image[:, :1][places > 3] = self.R.uniform()
        stacked = torch.stack([*image.unbind(0), halves[0]]).to(torch.bfloat16)
        return {
            **of,
            "image": stacked,
            "places": places,
            "memory": image.contiguous(memory_format=torch.preserve_format),
        }


def test_writes_lists_and_several_results(functions: jit.Functions, ran: list[int]) -> None:
    def make() -> Any:
        return mt.Compose([mt.RandSpatialCropd(KEYS, (8, 8, 8), random_size=False), Stepwise(), Writing()])

    for seed in range(3):
        program = recorded(seed, make)
        jit.functions_for.cache_clear()
        expected = made(program)
        ran[0] = 0
        assert_same(expected, made(program))
        assert ran[0] > 0


class Writing(mt.RandomizableTransform):  # type: ignore[misc]
    """Writes into what the transform before made, and gives it away."""

    def __call__(self, of: Any) -> Any:
        memory = of["memory"]
        memory.mul_(self.R.uniform()).sub_(1).abs_().sqrt_().add_(of["places"])
        return {**of, "line": memory[:, 1:3], "mean": memory.mean()}


def test_an_unpacked_item_is_freed_with_its_last_reference() -> None:
    program = recorded(1)
    gc.collect()
    gc.disable()
    try:
        tensor = torch.zeros(3)
        freed = weakref.ref(tensor)
        found = unpack(program.item, [tensor] * len(program.holes))
        del tensor, found
        assert freed() is None, "an unpacker keeps it until Python's collector runs"
    finally:
        gc.enable()


def test_the_steps_of_a_waiting_program_are_nothing_to_the_collector() -> None:
    program = recorded(1)
    assert len(steps_of(program)) > 50
    objects: set[int] = set()
    todo: list[Any] = [program]
    while todo:
        one = todo.pop()
        if gc.is_tracked(one) and id(one) not in objects:
            objects.add(id(one))
            todo += gc.get_referents(one) if isinstance(one, (tuple, list, dict)) else []
    assert len(objects) < 50


class Weighted(mt.RandomizableTransform):  # type: ignore[misc]
    """Numbers by name, whose order in the operation is not that of the alphabet."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def __call__(self, of: Any) -> Any:
        image = of["image"].as_subclass(torch.Tensor)[0] * self.R.uniform(1, 2)
        return {**of, "image": torch.baddbmm(image, image, image, beta=2.0, alpha=self.alpha).abs().sqrt()}


def test_numbers_given_by_name_keep_their_places(functions: jit.Functions, ran: list[int]) -> None:
    def make(alpha: float) -> Any:
        return mt.Compose([mt.RandSpatialCropd(KEYS, (8, 8, 8), random_size=False), Weighted(alpha)])

    expected = made(recorded(1, lambda: make(3.0)))["image"]
    jit.functions_for.cache_clear()
    made(recorded(1, lambda: make(2.0)))  # as long as both are equal, nothing differs
    ran[0] = 0
    assert_same(expected, made(recorded(1, lambda: make(3.0)))["image"])
    assert ran[0] > 0


def little(*more: Any) -> mt.Compose:
    flips = [mt.RandFlipd(KEYS, prob=1, spatial_axis=axis) for axis in range(3)]
    return mt.Compose([mt.RandSpatialCropSamplesd(KEYS, (8, 8, 8), 3, random_size=False), *flips, *more])


def test_what_several_transforms_do_to_a_crop_is_one_function(functions: jit.Functions, ran: list[int]) -> None:
    program = recorded(1, lambda: little(mt.RandScaleIntensityd("image", 0.5, prob=1)))
    expected = made(program)
    assert len(program.pieces) == 6, "an image and a label for each of three crops"
    assert len(functions.ready(program.pieces)) == 2
    ran[0] = 0
    assert_same(expected, made(program))
    assert ran[0] == 6


def cropped(of_a_crop: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> Callable[[], mt.Compose]:
    def then(of: Any) -> Any:
        return of_a_crop(of["image"].as_subclass(torch.Tensor))

    return lambda: mt.Compose([mt.RandSpatialCropd(KEYS, (8, 8, 8), random_size=False), mt.Lambda(then)])


def test_writes_stay_in_their_order() -> None:
    """They reach what others read by views of their own."""

    def write(image: torch.Tensor) -> dict[str, torch.Tensor]:
        before = image[:, :4] * 2
        image[:, 2:].mul_(5)
        return {"before": before, "after": image[:, :4] * 2}

    program = recorded(1, cropped(write))
    for _ in range(2):
        found = made(program)
        assert torch.equal(found["before"][:, 2:] * 5, found["after"][:, 2:])
        assert torch.equal(found["before"][:, :2], found["after"][:, :2])


def test_a_value_that_pieces_share_lives_as_long_as_one_needs_it() -> None:
    """The order of the steps changes, and with it who uses a value last."""

    def share(image: torch.Tensor) -> dict[str, torch.Tensor]:
        one, other = image[:, :4], image[:, 4:]
        begun = other + 1
        return {"between": one.flip(2), "last": begun * one}

    program = recorded(1, cropped(share))
    expected = made(program)
    assert_same(expected, made(program))


class GoesBy(mt.RandomizableTransform):  # type: ignore[misc]
    """Asks for a value of each crop."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most

    def __call__(self, of: Any) -> Any:
        asked = of["image"].as_subclass(torch.Tensor).max() > self.most
        return {**of, "image": of["image"] * (2 if asked else 3)}


def test_what_each_crop_was_guessed_to_be_is_compared() -> None:
    """By functions, too, in which what is asked of one crop is not what is asked of another."""
    make = cache(lambda: little(mt.RandScaleIntensityd("image", 0.5, prob=1)))
    crops = made(recorded(1, make))
    maxima = [float(crop["image"].max()) for crop in crops]
    most = sorted(maxima)[1] - 1e-4
    truth = tuple(value > most for value in maxima)
    assert set(truth) == {False, True}

    def pipeline() -> mt.Compose:
        return mt.Compose([*make().transforms, GoesBy(most)])

    for guesses in itertools.product((False, True), repeat=3):
        places = {(5, n): guess for n, guess in enumerate(guesses)}
        program = record(seeded(pipeline, 1), item(0), CPU, places).program
        assert program is not None and [guard.guess for guard in program.guards] == list(guesses)
        for _ in range(3):
            if guesses == truth:
                made(program)
                continue
            with pytest.raises(GuardFailed) as failed:
                made(program)
            first = next(n for n in range(3) if guesses[n] != truth[n])
            assert failed.value.found == {(5, n): truth[n] for n in range(first + 1)}


def test_a_value_that_is_made_twice_is_the_second() -> None:
    """As where an operation records one within it, which gives the same."""
    steps = [
        Step(0, (None,), None, ((0, -1, 0),), (2,), ()),
        Step(0, (None,), None, ((0, -1, 1),), (3,), ()),
        Step(0, (None,), None, ((0, -1, 1),), (2,), ()),
    ]
    pieces = jit.cut(steps, ["aten::clone.default"], [0, 1, 2], {2, 3})
    made_by = [number for piece in pieces for number in piece.results]
    assert sorted(made_by) == [2, 3], "one piece makes it"
