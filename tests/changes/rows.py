"""What must give a new item, and what must not: one change between two runs of a study, in fresh processes.

A row of the table has what is before and after a change (:func:`row`), or is a generator. A generator sets the study
up; the study runs at every ``yield``, and once more at the end of a row with only one; what comes between is the
change. The last run must compute the item (:func:`misses`) or must not (:func:`hits`), and either way must give what
MONAI computes without a cache in that process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

from tests.fresh import Process, warm
from tests.machines import shared_folder
from tests.same import same
from tests.studies import Outcome, Study, run, run_among_others, run_on

Change = Generator[None, None, None]
Changes = Callable[[Study], Change]


class Row(NamedTuple):
    """One change and what it must lead to.

    Attributes:
        change: the generator.
        miss: whether the item must be computed.
        one_process: whether all runs are accesses of one dataset in one process, rather than each in a fresh one.
        other_item: whether the change must show in the item, too; a row that must miss and does not show it would
            be about nothing. None: it may or may not.
        long: whether it runs only in ``make test-long``.
    """

    change: Changes
    miss: bool
    one_process: bool
    other_item: bool | None
    long: bool = False


#: What a row of a table must lead to.
MISS, HIT = True, False


class Table:
    """The rows of one test file; its ``test`` runs each as one test."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def misses(
        self, *, one_process: bool = False, either: bool = False, other_item: bool | None = True, long: bool = False
    ) -> Callable[[Changes], Changes]:
        """Registers a row that must miss: in fresh processes, in one process, or either."""
        return self._register(True, one_process, either, other_item, long)

    def hits(
        self, *, one_process: bool = False, either: bool = False, other_item: bool | None = None, long: bool = False
    ) -> Callable[[Changes], Changes]:
        """Registers a row that must hit."""
        return self._register(False, one_process, either, other_item, long)

    def _register(
        self, miss: bool, one_process: bool, either: bool, other_item: bool | None, long: bool
    ) -> Callable[[Changes], Changes]:
        def register(change: Changes) -> Changes:
            name = f"{'miss' if miss else 'hit'}-{change.__name__}"
            assert name not in self.rows, f"two rows are called {name}"
            if not one_process:
                self.rows[name] = Row(change, miss, False, other_item, long)
            if one_process or either:
                self.rows[f"{name}-in_one_process"] = Row(change, miss, True, other_item, long)
            return change

        return register

    def row(
        self,
        miss: bool,
        name: str,
        *,
        script: tuple[str, str] | None = None,
        settings: tuple[dict[str, Any], dict[str, Any]] | None = None,
        code: tuple[str, str] = ("", ""),
        define: str = "",
        item: str = "",
        array: str = "",
        add: str | tuple[str, ...] = (),
        edit: tuple[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Registers a row in which one thing is as in the first of a pair, and then as in the second.

        Args:
            miss: :data:`MISS` or :data:`HIT`.
            name: what changes.
            script: a part of the script.
            settings: arguments of ``GDSDataset``.
            code: what the process runs first.
            define: added to the script before the first run, as by :meth:`Study.define`.
            item: likewise, as by :meth:`Study.item`.
            array: likewise, an expression, as by :func:`with_array`.
            add: likewise, as by :meth:`Study.add`, one transform or several.
            edit: likewise, as by :meth:`Study.edit`, after the others.
            options: see :func:`misses`.
        """

        def change(s: Study) -> Change:
            if define:
                s.define(define)
            if item:
                s.item(item)
            if array:
                with_array(s, array)
            for transform in (add,) if isinstance(add, str) else add:
                s.add(transform)
            if edit is not None:
                s.edit(*edit)
            before, after = settings or ({}, {})
            s.settings, s.code = before, code[0]
            yield
            s.settings, s.code = after, code[1]
            if script is not None:
                s.edit(*script)

        change.__name__ = name
        (self.misses if miss else self.hits)(**options)(change)

    @property
    def test(self) -> Callable[[str, Interpreters], None]:
        """The test of a row, for the file's name space: pytest gives it every name (``conftest.py``)."""

        def test_change(name: str, interpreters: Interpreters) -> None:
            check(self.rows[name], interpreters)

        return test_change


def with_array(s: Study, values: str) -> None:
    """Adds an array to every item, and a transform that passes it on."""
    s.item(f'"weights": {values}')
    s.add('mt.EnsureTyped("weights", dtype=torch.float64)')


class Interpreters:
    """Where rows run, by PYTHONHASHSEED."""

    #: How many studies run in a process that they share.
    _MOST_TOGETHER = 10

    def __init__(self) -> None:
        self._shared: dict[bool, tuple[Process, int]] = {}  # for first runs and for later ones, with the studies so far

    def run(self, study: Study, *, miss: bool, later: bool) -> Outcome:
        """Runs a study in a fresh process.

        One that must hit may have run others, if they leave no trace: first runs with first runs, later with later
        ones, so that no process has seen the study before.
        """
        if miss or study.changes_its_process:
            return cast(Outcome, warm(study.hash_seed).call(run, study))
        process, count = self._shared.pop(later, (None, 0))
        if process is None:
            process = warm().process()
        found = process.call(run_among_others, study)
        if count + 1 < self._MOST_TOGETHER:
            self._shared[later] = process, count + 1
        else:
            process.close()
        return cast(Outcome, found)

    def close(self) -> None:
        """Ends the processes that they share."""
        for process, _ in self._shared.values():
            process.close()


def run_row(row: Row, interpreters: Interpreters) -> list[Outcome]:
    """Runs a study at every ``yield`` of a row, and once more if there is only one."""
    with shared_folder() as folder, ExitStack() as stack:
        study = Study(folder)
        changes = row.change(study)
        stack.callback(changes.close)  # a row that has mounted something takes it away
        process = stack.enter_context(warm().process()) if row.one_process else None
        found: list[Outcome] = []
        while next(changes, study) is not study or len(found) < 2:
            if process is not None:
                found.append(process.call(run_on if found else run, study))
            else:
                found.append(interpreters.run(study, miss=row.miss, later=bool(found)))
    return found


def check(row: Row, interpreters: Interpreters) -> None:
    """Runs a row, and fails if the last run misses or hits against it, or gives a wrong item."""
    first, *_, last = run_row(row, interpreters)
    assert not first.wrong, f"before the change, {first.wrong}"
    if row.other_item is not None:
        assert same(first.item, last.item) != row.other_item, "the change does what the row says to the item"
    missed, right = last.computed > 0, last.wrong or "the item is right"
    assert missed == row.miss, f"the last run {'missed' if missed else 'hit'}; {right}"
    assert not last.wrong, last.wrong
