"""Text relative to a data root, so that a record can be read where the data lie elsewhere.

Used by the item tree and by keys. Relative to ``/data``, ``/data/case/ct.nii`` is ``/case/ct.nii`` and the root itself
is empty. A reader prepends its own root.
"""

from __future__ import annotations


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
