from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings move fewer bytes than they need for good figures."""
    monkeypatch.setattr("tools.bench.ceilings._LEAST_BYTES", 16 << 20)
    monkeypatch.setattr("tools.bench.ceilings._MEMORY", 8 << 20)
