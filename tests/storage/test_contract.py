"""The contract notices what it is there for: over a backend that breaks one promise, a test fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from monai_gds.storage import Storage
from monai_gds.testing import BackendContract, WriteContract
from tests.machines import ROOT
from tests.storage import broken_backends
from tests.storage.broken_backends import ALONE, WritesOverFiles
from tests.storage.full_contract import FullContract
from tests.storage.sample_blocking_backend import SampleBackend


class _Outcomes:
    """Which test of which class failed."""

    def __init__(self) -> None:
        self.failed: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, name, test = report.nodeid.split("::")
        failed = self.failed.setdefault(name.removeprefix("Test"), set())
        if report.failed:
            failed.add(test.partition("[")[0])


def failed(*names: str) -> dict[str, set[str]]:
    """By the names of broken backends, which tests fail over them."""
    outcomes = _Outcomes()
    options = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    tests = [f"{broken_backends.__file__}::Test{name}" for name in names]
    pytest.main([*options, "-p", "no:timeout", "--tb=no", "--assert=plain", *tests], plugins=[outcomes])
    return outcomes.failed


def test_every_broken_promise_is_noticed() -> None:
    broken = {**broken_backends.GROSS, **broken_backends.SUBTLE}
    found = failed(*(f"{backend.__name__}::{test}" for backend, (_, test) in broken.items()))
    assert found == {backend.__name__: {test.partition("[")[0]} for backend, (_, test) in broken.items()}


def in_contract(contract: type) -> set[str]:
    return {name for name in dir(contract) if name.startswith("test_")}


def test_every_test_is_there_for_a_broken_promise() -> None:
    assert ALONE.keys() == in_contract(FullContract) | in_contract(WriteContract)


@pytest.mark.long
@pytest.mark.parametrize("test", ALONE)
def test_that_no_other_test_notices(test: str) -> None:
    name = ALONE[test].__name__
    assert failed(name) == {name: {test}}


def test_a_backend_that_writes_is_to_be_held_to_what_writers_promise() -> None:
    """The class that tests it fails when it lacks WriteContract."""
    contract = BackendContract()
    storage = Storage(WritesOverFiles(torch.device("cpu")))
    with pytest.raises(AssertionError, match="derive from WriteContract"):
        contract.test_describes_itself(storage)
    contract.test_describes_itself(Storage(SampleBackend(torch.device("cpu"))))


def test_what_is_missing_is_named_with_its_extra() -> None:
    script = "import sys; sys.modules['hypothesis'] = None; import monai_gds.testing"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "monai_gds.testing needs hypothesis: pip install 'monai_gds[testing]'" in done.stderr
