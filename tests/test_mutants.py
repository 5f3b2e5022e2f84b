"""The list of mutants, which ``make mutants`` tries, fits the code of today."""

from __future__ import annotations

from tests.mutants import LIST, parse


def test_every_mutant_can_be_tried() -> None:
    mutants = list(parse(LIST.read_text()))
    assert len(mutants) >= 40
    assert not {str(mutant): mutant.fault for mutant in mutants if mutant.fault is not None}
