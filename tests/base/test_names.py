"""Text below a data root comes back unchanged, and below another root with that root in front."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.base.names import above, below

_parts = st.lists(st.text("ab /", min_size=1, max_size=3).map(lambda t: t.strip("/") or "c"), min_size=1, max_size=3)
_roots = _parts.map(lambda parts: "/" + "/".join(parts)) | st.just("/")


@given(root=_roots, text=st.text("ab /", max_size=12))
def test_what_is_below_comes_back(root: str, text: str) -> None:
    rest = below(text, root)
    assert (rest is not None) == (text == root or text.startswith(root.rstrip("/") + "/"))
    if rest is not None:
        assert above(rest, root) == text


@given(root=_roots, other=_roots, parts=_parts)
def test_it_moves_with_the_root(root: str, other: str, parts: list[str]) -> None:
    rest = below("/".join([root.rstrip("/"), *parts]), root)
    assert rest is not None
    assert above(rest, other) == "/".join([other.rstrip("/"), *parts])
    assert above(below(root, root) or "", other) == other


@pytest.mark.parametrize("text", ["/database", "/dat", "data/x", "x/data/y", "", " /data"])
def test_a_neighbour_is_not_below(text: str) -> None:
    assert below(text, "/data") is None
