from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.laid import Laid


@pytest.fixture
def laid(tmp_path: Path) -> Laid:
    return Laid(tmp_path)
