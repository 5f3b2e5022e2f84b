"""Text relative to a data root, so that what one machine wrote is read where the data lie elsewhere.

Used by the item tree. What is kept of ``/data/case/ct.nii`` below ``/data`` is ``/case/ct.nii``, and of the root itself
nothing. A reader puts its own root before it.
"""

from __future__ import annotations

__all__ = ["above", "below"]


def below(text: str, root: str) -> str | None:
    """What follows the root in a text that is the root or lies below it; None for any other text.

    Args:
        text: any text.
        root: an absolute path without a slash at its end, or ``"/"``, below which every absolute path lies.
    """
    if text == root:
        return ""
    prefix = root.rstrip("/")
    return text[len(prefix) :] if text.startswith(prefix + "/") else None


def above(rest: str, root: str) -> str:
    """The text again, below a root that may be another one."""
    return root.rstrip("/") + rest if rest else root
