"""The contract notices what it is there for: over a backend that breaks one promise, a test fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from monai_gds.storage import Storage
from monai_gds.testing import BackendContract
from tests.machines import ROOT
from tests.storage import broken_backends
from tests.storage.broken_backends import BROKEN, WritesOverFiles
from tests.storage.sample_blocking_backend import SampleBackend


class _Outcomes:
    """Which test of which class failed."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.split("::")[1]
        self.ran.add(name)
        if report.failed:
            self.failed.add(name)


def test_every_broken_promise_is_noticed() -> None:
    names = [f"{broken_backends.__file__}::Test{backend.__name__}::{test}" for backend, (_, test) in BROKEN.items()]
    outcomes = _Outcomes()
    options = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    pytest.main([*options, "-p", "no:timeout", "--tb=native", *names], plugins=[outcomes])
    assert outcomes.ran == {f"Test{backend.__name__}" for backend in BROKEN}
    assert outcomes.ran - outcomes.failed == set()


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
