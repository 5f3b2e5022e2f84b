from __future__ import annotations

from tests.doctor.conftest import laid

__all__ = ["laid"]
