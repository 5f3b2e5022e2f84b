"""The form of new records: what the arguments mean, what `auto` chooses, and which records need no conversion."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from monai_gds import limits
from monai_gds.errors import CodecMissing
from monai_gds.items.tree import encode_item
from monai_gds.records import compression
from monai_gds.records.compression import EDGES, WHOLE, Compression
from monai_gds.records.header import Header, parse
from monai_gds.records.writing import pack_record
from monai_gds.tiles import blosc
from monai_gds.tiles.codecs import CODECS

needs_blosc2 = pytest.mark.skipif(bool(blosc.why_not()), reason="blosc2 is not installed")


@pytest.fixture
def with_nvcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "why_not_on_gpu", lambda: None)


@pytest.fixture
def without_nvcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "why_not_on_gpu", lambda: "nvCOMP is not installed: pip install it")


@pytest.fixture
def with_blosc2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blosc, "why_not", lambda: None)


@pytest.fixture
def without_blosc2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blosc, "why_not", lambda: "Blosc2 is not installed: pip install it")


def form(compression: Any = "auto", tiles: Any = "auto", gpu: bool = False, crops: bool = False) -> str:
    return Compression.of(compression, tiles, gpu, crops).text


@pytest.mark.usefixtures("with_blosc2", "with_nvcomp")
def test_auto_chooses_tiles_for_crops_and_for_gpus() -> None:
    assert form() == ""
    assert form(crops=True) == form(gpu=True) == form(gpu=True, crops=True) == "lz4 32"
    assert form(tiles=16, crops=True) == "lz4 16"
    assert form(tiles=16) == form(tiles=None, crops=True) == ""


@pytest.mark.usefixtures("with_blosc2", "with_nvcomp")
def test_auto_leaves_small_volumes_whole_for_crops_on_a_cpu() -> None:
    """Where the user named neither the codec nor the edge."""
    volume = limits.CROPPED_BYTES
    asked = Compression.of("auto", "auto", False, True)
    assert (asked.cuts(volume + 1), asked.cuts(volume)) == (True, False)
    assert f"for tensors above {volume >> 20} MiB (crops come first)" in str(asked)


@pytest.mark.usefixtures("with_blosc2", "with_nvcomp")
@pytest.mark.parametrize(
    "asked",
    [("auto", "auto", True, True), ("lz4", "auto", False, True), ("auto", 16, False, True),
     ("auto", "auto", False, True, [("label", "", "")])],
    ids=["GPU", "a codec", "an edge", "crops by label"],
)  # fmt: skip
def test_all_large_tensors_are_cut_otherwise(asked: Any) -> None:
    form = Compression.of(*asked)
    assert (form.cuts(limits.TILED_BYTES), form.cuts(limits.TILED_BYTES - 1)) == (True, False)


@needs_blosc2
def test_a_record_of_volumes_that_auto_leaves_whole_suits_it() -> None:
    asked = Compression("lz4", named=False, above=2 << 20)
    for elements, suits in ((1 << 19, True), (1 << 20, False)):
        tensor = torch.zeros(elements)
        assert asked.suits(record(tensor, WHOLE)) is suits
        written = record(tensor, asked)
        assert bool(written.tiles) is not suits
        assert asked.suits(written)


@pytest.mark.usefixtures("with_blosc2", "without_nvcomp")
def test_auto_leaves_tensors_whole_for_a_gpu_that_cannot_unpack_them() -> None:
    assert form(gpu=True) == ""
    assert "nvCOMP is not installed" in str(Compression.of("auto", "auto", True, False))
    assert form(gpu=True, crops=True) == "lz4 32"


@pytest.mark.usefixtures("without_blosc2", "with_nvcomp")
def test_auto_without_a_library_writes_whole_tensors_and_can_say_why() -> None:
    assert form(crops=True) == form(gpu=True) == ""
    assert "Blosc2 is not installed" in str(Compression.of("auto", "auto", False, True))


@pytest.mark.usefixtures("with_blosc2", "with_nvcomp")
def test_what_is_named_is_what_is_written() -> None:
    assert form("zstd") == form("zstd", crops=True) == "zstd 32"
    assert [form("lz4", edge) for edge in EDGES] == ["lz4 16", "lz4 32", "lz4 64"]
    assert form(None) == form(None, None) == form(None, gpu=True, crops=True) == ""
    assert form("bitcomp", gpu=True) == "bitcomp 32"


def test_type_checkers_know_the_codecs_of_the_table() -> None:
    assert get_args(compression.Codec) == tuple(CODECS)


@pytest.mark.usefixtures("without_blosc2", "without_nvcomp")
@pytest.mark.parametrize("codec", CODECS)
def test_a_named_codec_without_its_library_is_an_error(codec: str) -> None:
    with pytest.raises(CodecMissing, match=f"compression='{codec}': .* is not installed: pip install it"):
        Compression.of(codec, "auto", True, False)


@pytest.mark.parametrize("tiles", [0, 8, 24, 128, 32.0, True, "32", np.int64(16), (32, 32, 32)])
def test_an_edge_that_tiles_cannot_have_names_those_they_can(tiles: Any) -> None:
    with pytest.raises(ValueError, match=r"tiles=.*use 'auto', None for whole tensors, .* 16, 32 or 64"):
        Compression.of("auto", tiles, False, False)


@pytest.mark.usefixtures("with_blosc2")
@pytest.mark.parametrize("edge", EDGES)
def test_the_largest_tiles_fit_a_record(edge: int) -> None:
    from monai_gds.tiles.tiles import Layout, tile_shape

    layout = Layout(torch.float64, (1, 200, 200, 200), tile_shape((1, 200, 200, 200), edge), "lz4", 0)
    assert Layout.of_node(layout.to_node()) == layout


# ---------------------------------------------------------------------------------------------------------------------
# Which records suit

AUTO = Compression("lz4", 32, named=False)


def record(tensor: torch.Tensor, form: Compression) -> Header:
    buffers = pack_record(encode_item({"a": tensor}), {}, form)
    return parse(bytes(buffers[0]), sum(len(b) for b in buffers))


@needs_blosc2
@pytest.mark.parametrize("gains", [True, False])
def test_a_named_form_suits_records_of_that_form_alone(gains: bool) -> None:
    tensor = torch.zeros(1 << 18) if gains else torch.randn(1 << 18)
    forms = [WHOLE, Compression("lz4"), Compression("lz4", 16), Compression("zstd")]
    for asked in forms:
        suits = [asked.suits(record(tensor, written)) for written in forms]
        # What would not get smaller is whole in any form, and is not tried twice.
        assert suits == [asked == written or (asked == WHOLE and not gains) for written in forms]


@needs_blosc2
@pytest.mark.parametrize("gains", [True, False])
def test_auto_only_replaces_whole_tensors_that_were_never_tried(gains: bool) -> None:
    tensor = torch.zeros(1 << 18) if gains else torch.randn(1 << 18)
    forms = [WHOLE, Compression("lz4"), Compression("lz4", 16), Compression("zstd")]
    assert [AUTO.suits(record(tensor, written)) for written in forms] == [False, True, True, True]
    nothing = Compression(named=False)
    assert all(nothing.suits(record(tensor, written)) for written in forms)


@needs_blosc2
def test_small_tensors_suit_every_form() -> None:
    small = record(torch.zeros((1 << 18) - 1), WHOLE)
    assert all(asked.suits(small) for asked in (WHOLE, AUTO, Compression("zstd"), Compression("lz4", 16)))
