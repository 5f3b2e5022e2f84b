"""Names that are the same on every machine: digests of keys, and text relative to a data root. Imports no library,
since ``monai-gds cache`` must start fast.

A record can be read where the data lie elsewhere. Relative to ``/data``, ``/data/case/ct.nii`` is ``/case/ct.nii`` and
the root itself is empty. A reader prepends its own root.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any


def digest_of(parts: Any) -> str:
    """The digest of a key's parts, which names its record."""
    text = json.dumps(parts, separators=(",", ":"), ensure_ascii=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def below(text: str, root: str) -> str | None:
    """The part of a text after the root; None if the text is neither the root nor below it.

    The root is an absolute path without a trailing slash, or ``"/"``, below which every absolute path lies.
    """
    if text == root:
        return ""
    prefix = root.rstrip("/")
    return text[len(prefix) :] if text.startswith(prefix + "/") else None


def above(rest: str, root: str) -> str:
    """The text below a root, which may differ from the one it was made relative to."""
    return root.rstrip("/") + rest if rest else root
