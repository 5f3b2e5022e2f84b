"""What every test module shares: the ``gpu`` marker, hypothesis's profiles, Ctrl-C everywhere, and a budget of time."""

from __future__ import annotations

import gc
import os
import platform
import re
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.caches import cache, round_trip  # noqa: F401  fixtures of the tests of tiles, items, records and folders
from tests.fresh import Interpreter, settle, warm

# The profile sets how many examples a property test runs. `make test-long` loads the long one. Both run the same
# examples every time, so that a change is not blamed for what chance finds. --hypothesis-profile=random looks further.
SLOW_OR_LARGE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "quick", max_examples=50, deadline=None, derandomize=True, suppress_health_check=SLOW_OR_LARGE
)
settings.register_profile("long", settings.get_profile("quick"), max_examples=600)
settings.register_profile("random", settings.get_profile("long"), max_examples=2000, derandomize=False)
settings.load_profile("quick")


def pytest_configure() -> None:
    """Takes Ctrl-C, and has torch compute on one thread, here and in every process that a test starts.

    A shell has what a script starts in the background ignore Ctrl-C, and processes inherit that. Threads of OpenMP spin
    while they wait for one another: where all processors are busy, every operation on a volume takes milliseconds. And
    the last bits of some functions, such as powers, depend on where each thread's share of a volume ends.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.disable()  # until everything is imported, or it would go through that again and again


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a CUDA device where there is none; ``-m gpu`` brings it, skipped, with the reason."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if re.search(r"\bgpu\b", config.option.markexpr):
        reason = f"no CUDA device on this machine ({platform.node()}, torch {torch.__version__})"
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """Keeps the garbage collector off what was imported: many tests collect, and each pass would go through it all."""
    settle()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _left_alone() -> Iterator[None]:
    """Keeps it off what the tests of a module leave, such as caches: late in a run, a pass took two seconds."""
    yield
    gc.collect()
    gc.freeze()


#: Seconds that the tests of each folder may take in ``make test``, all processes together; ``.`` is for files outside
#: the folders. In all they are eight minutes of two quiet cores.
BUDGET = {
    "changes": 60, "base": 40, "bench": 35, "command": 45, "dataset": 70, "doctor": 20, "folder": 30, "imagenet": 35,
    "items": 8, "keys": 30, "loader": 130, "pipeline": 15, "programs": 60, "records": 35, "shared": 35, "soak": 20,
    "storage": 110, "swap": 85, "tiles": 20, "tools": 35, ".": 55,
}  # fmt: skip

_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up what each folder takes."""
    inside = report.nodeid.partition("::")[0].removeprefix("tests/").split("/")
    _seconds[inside[0] if len(inside) > 1 else "."] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which folders are over their budget. A busy machine is one reason, so that nothing fails."""
    over = [name for name in sorted(_seconds) if _seconds[name] > BUDGET.get(name, 0)]
    if terminalreporter.config.option.markexpr == "not long" and over:
        terminalreporter.section("over the budget of seconds (tests/conftest.py)")
        for name in over:
            terminalreporter.line(f"{name}: {_seconds[name]:.0f} s, of {BUDGET.get(name, 0)}")


@pytest.fixture(scope="session")
def interpreter() -> Interpreter:
    """Makes fresh processes at the price of a fork."""
    return warm()
