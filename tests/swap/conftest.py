"""Other files of tests import MONAI's datasets by their names: ``patch`` would warn of these in this process."""

from __future__ import annotations

import pytest

from monai_gds.swap import patching


@pytest.fixture(autouse=True)
def nothing_was_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_imported_already", lambda: "")
