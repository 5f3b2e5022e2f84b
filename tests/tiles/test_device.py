"""Tiles that are unpacked on a CUDA device; and on this machine's processor, by the same kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from monai.data import Dataset
from monai.transforms import Compose, EnsureTyped, RandFlipd, RandSpatialCropSamplesd

from monai_gds import GDSDataset, limits
from monai_gds.base.units import bytes_of
from monai_gds.errors import CacheWarning, DamagedRecord, MonaiGdsError
from monai_gds.tiles import device as device_tiles
from monai_gds.tiles import nvcomp, tiles
from monai_gds.tiles.tiles import Tiles
from tests.tiles import host_tiles

_needs_nvcomp = pytest.mark.skipif(
    torch.cuda.is_available() and device_tiles.why_not() is not None,
    reason=f"tiles cannot be unpacked on this machine's GPU: {device_tiles.why_not()}",
)

device_codecs = ("lz4", "zstd", "bitcomp")


_on_gpu = [pytest.mark.gpu, _needs_nvcomp]


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=_on_gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where tiles are unpacked."""
    if request.param == "cpu":
        host_tiles.install(monkeypatch)
    return torch.device(request.param)


def _volume(dtype: torch.dtype, shape: tuple[int, ...], values: int) -> torch.Tensor:
    """Smooth along the last axis; constant in one corner, and noise where there are many values."""
    generator = torch.Generator().manual_seed(values)
    steps = torch.randint(0, values, shape, generator=generator).sort(-1).values
    steps[..., : shape[-1] // 3] = 0
    if dtype.is_floating_point:
        return (steps.to(torch.float64) / 7 - 3).to(dtype)
    return steps.to(dtype)


def _on_device(packed: tiles.Packed, device: torch.device) -> tuple[Tiles, torch.Tensor]:
    found = Tiles(packed.layout, packed.table.numpy(), len(packed.streams))
    return found, packed.streams.to(device, copy=True)


def _unpack(found: Tiles, streams: torch.Tensor, ids: np.ndarray | None = None) -> torch.Tensor:
    out = torch.full(found.layout.shape, 99, dtype=found.layout.dtype, device=streams.device)
    starts = found.starts if ids is None else found.starts[ids]
    device_tiles.unpack([device_tiles.Part(found, streams, out, starts, ids)]).check()
    return out


@pytest.mark.parametrize("codec", device_codecs)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.float32, 200), (torch.float32, 3000), (torch.float32, 10**8), (torch.float64, 5000), (torch.int16, 30000),
     (torch.int16, 100), (torch.uint8, 5), (torch.int64, 10**9), (torch.bfloat16, 90), (torch.bool, 2)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("device", "shape"),
    [
        ("cpu", (2, 70, 33, 61)),
        ("cpu", (200_000,)),
        *(pytest.param("cuda:0", shape, marks=_on_gpu) for shape in [(2, 70, 33, 61), (1, 1, 300, 404), (200_000,)]),
    ],
    indirect=["device"],
)
def test_is_equal_to_the_cpu(
    codec: str, dtype: torch.dtype, values: int, shape: tuple[int, ...], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(limits, "TILED_BYTES", 1)
    monkeypatch.setattr(tiles, "_LEAST_GAIN", 0.1)
    volume = _volume(dtype, shape, values)
    packed = tiles.pack(volume, codec)
    assert packed is not None
    found, streams = _on_device(packed, device)
    assert torch.equal(_unpack(found, streams).cpu(), volume)


@pytest.mark.parametrize("codec", device_codecs)
def test_some_tiles_leave_the_rest_alone(codec: str, device: torch.device) -> None:
    volume = _volume(torch.float32, (1, 128, 128, 128), 900)
    packed = tiles.pack(volume, codec)
    assert packed is not None
    found, streams = _on_device(packed, device)
    ids = np.array([0, 21, 63], np.int32)
    out = _unpack(found, streams, ids).cpu()
    touched = torch.zeros(4, 4, 4, dtype=torch.bool)
    touched.view(-1)[torch.from_numpy(ids).long()] = True
    touched = touched.repeat_interleave(32, 0).repeat_interleave(32, 1).repeat_interleave(32, 2)[None]
    assert torch.equal(out[touched], volume[touched])
    assert bool((out[~touched] == 99).all())


@pytest.mark.parametrize("codec", device_codecs)
@pytest.mark.parametrize("values", [200, 3000, 10**8])
def test_every_kind_of_damage_is_found_and_harms_nothing_else(codec: str, values: int, device: torch.device) -> None:
    volume = _volume(torch.float32, (1, 96, 96, 96), values)
    packed = tiles.pack(volume, codec)
    assert packed is not None
    found, streams = _on_device(packed, device)
    rng = np.random.default_rng(values)
    live = (found.sizes > 0).nonzero()[0]
    for changed in [1, 1, 1, 1, 1, 1, 8, 8, 100, 1000]:
        bad = streams.clone()
        for tile in rng.choice(live, changed):
            bad[int(found.starts[tile] + rng.integers(found.sizes[tile]))] ^= int(rng.integers(1, 256))
        if not torch.equal(bad, streams):
            with pytest.raises(DamagedRecord, match="checksum"):
                _unpack(found, bad)
    with pytest.raises(DamagedRecord, match="checksum"):
        _unpack(found, torch.randint(0, 256, streams.shape, dtype=torch.uint8, device=device))
    assert torch.equal(_unpack(found, streams).cpu(), volume)


@pytest.mark.parametrize("codec", device_codecs)
def test_streams_with_right_checksums_that_are_not_what_was_compressed(codec: str, device: torch.device) -> None:
    volume = _volume(torch.float32, (1, 96, 96, 96), 3000)
    packed = tiles.pack(volume, codec)
    assert packed is not None
    found, streams = _on_device(packed, device)
    short = Tiles(packed.layout, packed.table.numpy(), len(packed.streams))
    swapped = short.starts.copy()
    live = ((short.sizes > 0) & (short.sizes < packed.layout.tile_bytes)).nonzero()[0][:2]
    swapped[live] = swapped[live[::-1]]  # each stream at the place of the other
    out = torch.empty(volume.shape, device=device)
    with pytest.raises(DamagedRecord):
        device_tiles.unpack([device_tiles.Part(found, streams, out, swapped)]).check()


def test_a_palette_that_is_too_short(device: torch.device) -> None:
    volume = _volume(torch.float32, (1, 96, 96, 96), 3000)
    packed = tiles.pack(volume, "lz4")
    assert packed is not None
    layout = tiles.Layout(**{**packed.layout.__dict__, "values": packed.layout.values - 5})
    found = Tiles(layout, packed.table.numpy()[: -5 * 4], len(packed.streams))
    with pytest.raises(DamagedRecord, match="palette"):
        _unpack(found, packed.streams.to(device, copy=True))


@pytest.mark.gpu
@_needs_nvcomp
@pytest.mark.parametrize("codec", device_codecs)
def test_more_than_65535_tiles_of_more_than_4_gib(codec: str) -> None:
    """One volume, its tiles again and again."""
    count = 70_000
    if torch.cuda.mem_get_info()[0] < 8 * count * (64 << 10):  # Zstd takes three times as much beside the tiles
        pytest.skip("the GPU has too little free memory")
    volume = _volume(torch.float32, (1, 64, 64, 64), 3000)
    packed = tiles.pack(volume, codec)
    assert packed is not None and packed.layout.tile_bytes == 64 << 10
    found, streams = _on_device(packed, torch.device("cuda:0"))
    ids = np.resize(np.arange(packed.layout.count, dtype=np.int32), count)
    assert torch.equal(_unpack(found, streams, ids).cpu(), volume)


def test_where_nvcomp_refuses_no_memory_is_lost_or_given_away_too_soon(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from it may be under way then, and kernels may be about to write to it."""

    def refuse(*_: object) -> None:
        raise MonaiGdsError("nvCOMP refused it: status 10")

    packed = tiles.pack(_volume(torch.float32, (1, 96, 96, 96), 3000), "lz4")
    assert packed is not None
    found, streams = _on_device(packed, device)
    _unpack(found, streams)
    if device.type == "cuda":
        torch.cuda.synchronize()
    free = device_tiles._free(device)
    before = len(free)
    with monkeypatch.context() as patch:
        patch.setattr(nvcomp, "decompress", refuse)
        for _ in range(3):
            with pytest.raises(MonaiGdsError, match="status 10"):
                _unpack(found, streams)
    assert len(free) >= before  # what was under way at first may have come back, too


def _dataset(folder: Path, compression: str | None = None, device_bytes: float | str = 0) -> GDSDataset:
    label = _volume(torch.uint8, (1, 128, 128, 128), 3)
    images = [_volume(torch.float32, (1, 96, 96, 96), 500 + n) for n in range(3)]
    items = [{"image": image, "label": label, "small": torch.arange(5)} for image in images]
    transform = Compose([EnsureTyped(("image", "label", "small"))])
    form: Any = compression
    options = {"arrays": "torch", "device_bytes": device_bytes}
    return GDSDataset(items, transform, folder, 0, compression=form, options=options)


@pytest.mark.gpu
@_needs_nvcomp
@pytest.mark.parametrize("codec", device_codecs)
def test_hits_are_equal_to_misses(tmp_path: Path, codec: str) -> None:
    with _dataset(tmp_path, codec) as dataset:
        missed = [dataset[n] for n in range(3)]
    again = _dataset(tmp_path, None)  # records are read in whatever form they lie
    for _ in range(2):
        for n in range(3):
            hit = again[n]
            for key, value in missed[n].items():
                assert type(hit[key]) is type(value)
                assert hit[key].device == value.device
                assert torch.equal(hit[key].as_tensor(), value.as_tensor())
    for a, b in zip(missed, again.__getitems__([0, 1, 2]), strict=True):
        assert torch.equal(a["image"], b["image"])


@pytest.mark.gpu
@_needs_nvcomp
@pytest.mark.parametrize("verify", ["first", "never"])
def test_a_damaged_tile_is_computed_anew(tmp_path: Path, verify: str) -> None:
    with _dataset(tmp_path, "zstd") as dataset:
        missed = dataset[0]
    record = Path(dataset.session.cache().record_path(dataset.key(0).digest))
    data = bytearray(record.read_bytes())
    data[len(data) // 2] ^= 0x40
    record.write_bytes(data)
    again = _dataset(tmp_path, "zstd")
    options = replace(again.settings.options, verify=verify)  # type: ignore[arg-type]
    again.settings = replace(again.settings, options=options)
    with pytest.warns(CacheWarning, match="computed again"):
        hit = again[0]
    assert torch.equal(hit["image"], missed["image"])
    assert torch.equal(hit["label"], missed["label"])


@pytest.mark.gpu
@_needs_nvcomp
@pytest.mark.parametrize("room", ["1GB", 1_000_000])
def test_records_that_stay_on_the_device(tmp_path: Path, room: float | str) -> None:
    with _dataset(tmp_path, "lz4") as dataset:
        missed = [dataset[n] for n in range(3)]
    again = _dataset(tmp_path, device_bytes=room)
    for _ in range(3):
        for n in range(3):
            hit = again[n]
            for key, value in missed[n].items():
                assert torch.equal(hit[key].as_tensor(), value.as_tensor())
                hit[key].as_tensor().fill_(1)  # what was handed out is the user's own
    cache = again.session.cache()
    assert cache is not None
    kept = cache._reader._kept
    assert kept is not None
    assert 0 < kept.nbytes <= bytes_of(room, "device_bytes")
    Path(again.session.cache().record_path(again.key(1).digest)).unlink()
    assert torch.equal(again[1]["image"], missed[1]["image"])  # computed again


@pytest.mark.gpu
@_needs_nvcomp
@pytest.mark.parametrize("codec", device_codecs)
@pytest.mark.parametrize("device_bytes", [0, "1GB"])
def test_crops_read_only_their_tiles(tmp_path: Path, codec: str, device_bytes: float | str) -> None:
    items = [{"image": _volume(torch.float32, (1, 96, 96, 96), 500 + n)} for n in range(3)]

    def pipeline() -> Compose:
        crop = RandSpatialCropSamplesd("image", (40, 40, 40), num_samples=2, random_size=False)
        return Compose([EnsureTyped("image"), crop, RandFlipd("image", prob=0.5)])

    expected = Dataset(items, pipeline().set_random_state(7))
    transform = pipeline()
    options, form = {"device_bytes": device_bytes}, cast(Any, codec)
    with GDSDataset(items, transform, tmp_path, 0, compression=form, options=options) as dataset:
        for n in range(3):
            dataset[n]
    transform.set_random_state(7)
    for n in [0, 1, 2, 0, 1, 2]:
        for ours, theirs in zip(dataset[n], expected[n], strict=True):
            assert ours["image"].is_cuda
            assert torch.equal(ours["image"].cpu().as_tensor(), theirs["image"].as_tensor())
            assert ours["image"].stride() == theirs["image"].stride()


@pytest.mark.gpu
@_needs_nvcomp
def test_bitcomp_is_for_gpus_only(tmp_path: Path) -> None:
    with _dataset(tmp_path, "bitcomp") as dataset:
        missed = dataset[0]
    record = Path(dataset.session.cache().record_path(dataset.key(0).digest))
    assert 3 * record.stat().st_size < sum(missed[key].nbytes for key in ("image", "label"))
    assert torch.equal(_dataset(tmp_path)[0]["image"], missed["image"])
    with pytest.raises(ValueError, match="bitcomp"):
        GDSDataset([1], [], tmp_path, "cpu", compression="bitcomp")
    before = record.read_bytes()
    on_cpu = GDSDataset(dataset.data, dataset.transform, tmp_path, "cpu", options={"arrays": "torch"})
    with pytest.warns(CacheWarning, match="without being replaced"):
        computed = on_cpu[0]
    on_cpu.flush()
    assert torch.equal(computed["image"].as_tensor(), missed["image"].cpu().as_tensor())
    assert record.read_bytes() == before


@pytest.mark.gpu
def test_without_nvcomp_the_cpu_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _dataset(tmp_path, "lz4") as dataset:
        missed = dataset[0]
    monkeypatch.setattr(device_tiles, "why_not", lambda: "nvCOMP is not here: pip install it")
    again = _dataset(tmp_path)
    with pytest.warns(CacheWarning, match="pip install it"):
        hit = again[0]
    assert torch.equal(hit["image"], missed["image"])
    assert hit["image"].is_cuda
