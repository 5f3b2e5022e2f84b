"""Trust in programs: what is compared and remembered is bounded, and what differs is not recorded any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from monai_gds import CacheWarning, limits
from monai_gds.programs.program import Program
from monai_gds.programs.recorder import Refusal
from monai_gds.programs.trust import Trust, same

STEPS = [mt.RandFlipd("image"), mt.RandZoomd("image")]


def program(*form: str) -> Program:
    return Program({}, (), frozenset(), (), b"", 0, (), (), 0, (), (), b"", len(form), form)


def compare(trust: Trust, of: Program, made: Any, eagerly: Any) -> Any:
    return trust.compared(made, of, STEPS, lambda n: eagerly, lambda n: made if n == of.done else eagerly)


def test_each_form_is_compared_once_up_to_a_bound() -> None:
    trust = Trust()
    assert trust.is_due(program("a", "b"))
    assert compare(trust, program("a", "b"), (3, "s"), (3, "s")) == 3
    assert not trust.is_due(program("a", "b")) and not trust.is_due(program("a"))
    assert trust.is_due(program("b"))
    for n in range(limits.CHECKED_FORMS):
        compare(trust, program(f"{n}"), (3, "s"), (3, "s"))
    assert not trust.is_due(program("new"))


def test_what_checks_all_remembers_nothing() -> None:
    trust = Trust(checks_all=True)
    for n in range(2 * limits.CHECKED_FORMS):
        compare(trust, program(f"{n}"), (3, "s"), (3, "s"))
    assert trust.is_due(program("1")) and not trust._met


@pytest.mark.parametrize(
    ("eagerly", "what"), [((4, "s"), "RandZoomd gives other values"), ((3, "other"), "RandZoomd draws other numbers")]
)
def test_a_difference_ends_recording_before_the_transform(eagerly: Any, what: str) -> None:
    trust = Trust()
    with pytest.warns(CacheWarning, match=what):
        assert compare(trust, program("a", "b"), (3, "s"), eagerly) == eagerly[0]
    assert trust.most == 1 and trust.covers(1) and not trust.covers(2)


def test_a_transform_that_is_refused_now_and_then_is_recorded() -> None:
    trust = Trust()
    refused = Refusal(1, "RandZoomd", "it asks for a number")
    for _ in range(limits.REFUSALS):
        for _ in range(limits.REFUSALS - 1):
            trust.note(program("a"), refused)
        trust.note(program("a", "b"), None)
    assert trust.most is None
    for _ in range(limits.REFUSALS):
        trust.note(program("a"), refused)
    assert trust.most == 1


def test_guesses_are_bounded() -> None:
    """What asks for too many bools is not recorded, whoever asks for a few still is."""
    trust = Trust()
    trust.learn({(0, 0): True, (1, 0): False, (3, 0): True})
    trust.learn({(1, 0): True})
    assert trust.guesses == {(0, 0): True, (1, 0): True, (3, 0): True} and trust.most is None
    trust.learn({(1, n): True for n in range(limits.GUESSES)})
    assert trust.guesses == {(0, 0): True} and trust.most == 1


def test_metadata_counts() -> None:
    image = MetaTensor(torch.zeros(2), meta={"name": "a", "spacing": [1.0, float("nan")]})
    assert same({"image": image}, {"image": image.clone()})
    other = image.clone()
    other.meta["name"] = "b"
    assert not same({"image": image}, {"image": other})
    assert not same({"image": image}, {"image": image.as_tensor()})
    assert not same({"image": image}, {"image": image.half()})
    assert not same([torch.tensor(0.0)], [torch.tensor(-0.0)])


@dataclass
class Study:
    """What a user's own transform may put into an item."""

    spacing: np.ndarray
    image: torch.Tensor


class Table:
    """Compares cell by cell, as those of pandas do."""

    def __eq__(self, other: object) -> Any:
        return np.arange(3) == np.arange(3)

    __hash__ = None  # type: ignore[assignment]


def test_values_of_any_kind_are_compared() -> None:
    for make in (
        lambda: np.float32("nan"),
        lambda: np.datetime64("NaT"),
        lambda: complex("nan"),
        lambda: Study(np.arange(3), torch.ones(2)),
        Table,
        lambda: Study,  # the class itself, whose fields have no values
        object,
    ):
        assert same({"x": make()}, {"x": make()})
    turned, again = (mt.Flip(0)(MetaTensor(torch.ones(1, 2, 2))) for _ in range(2))  # by two objects, of other ids
    again.applied_operations[0]["id"] = 3
    assert same(Study(np.arange(3), turned), Study(np.arange(3), again))
    assert not same(np.float32(1), np.float32(2))
    assert not same(Study(np.arange(3), torch.ones(2)), Study(np.arange(3), torch.zeros(2)))
    assert not same(Study(np.arange(3), torch.ones(2)), Study(np.ones(3), torch.ones(2)))
