"""One test for each row of a file's table, and the interpreters in which rows run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.changes.rows import Interpreters


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rows = metafunc.module.TABLE.rows.items()
    metafunc.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * row.long) for name, row in rows])


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Interpreters]:
    """Those of this test process."""
    with closing(Interpreters()) as running:
        yield running
