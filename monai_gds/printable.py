"""Text that cannot drive a terminal. Anyone may have named a file, so control characters in names are escaped.

:mod:`monai_gds.console` applies it to all that the command prints, :mod:`monai_gds.errors` to the text of every error
and warning, and ``dataset.explain`` to what it returns.
"""

from __future__ import annotations

import re

__all__ = ["printable"]

#: Control characters other than tab and newline, line separators, bidirectional overrides, lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escapes control characters, which could drive the terminal, as ``\x1b``. Tabs and newlines stay.

    Lone surrogates, which names of files that are not UTF-8 contain, are escaped too: they cannot be encoded.

    Example:
        >>> print(printable("\x1b[2Jct.nii"))
        \x1b[2Jct.nii
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
