"""The digest of a key's parts. Imports no library: ``monai-gds cache`` must start fast."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any


def digest_of(parts: Any) -> str:
    """The digest of a key's parts, which names its record."""
    text = json.dumps(parts, separators=(",", ":"), ensure_ascii=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()
