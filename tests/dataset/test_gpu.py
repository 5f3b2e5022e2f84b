"""GDSDataset on a CUDA device: the same items as on the CPU, in worker processes, and under slow consumers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch
from monai.data import DataLoader, MetaTensor, ThreadDataLoader

from monai_gds import GDSDataset, available_backends
from tests.fixtures_nifti import KEYS, pipeline, write_volumes
from tests.machines import in_child
from tests.same import assert_same, mutable_parts

pytestmark = pytest.mark.gpu

Make = Callable[..., GDSDataset]


@pytest.fixture(params=["kvikio", "posix"])
def backend(request: pytest.FixtureRequest) -> str:
    found = available_backends("cuda:0")[request.param]
    if not found:
        pytest.skip(f"backend {request.param} does not work on this machine: {found.reason}")
    return str(request.param)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_volumes(tmp_path_factory.mktemp("volumes"), shape=(64, 60, 56))


@pytest.fixture
def make(volumes: list[dict[str, Any]], tmp_path: Path, backend: str) -> Make:
    def make_dataset(transform: Any = None, data: Any = None, **settings: Any) -> GDSDataset:
        chosen = pipeline() if transform is None else transform
        settings = {"device": 0, "backend": backend, **settings}
        return GDSDataset(copy.deepcopy(volumes) if data is None else data, chosen, tmp_path / "cache", **settings)

    return make_dataset


def on_cpu(value: Any) -> Any:
    """The same tree with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {k: on_cpu(v) for k, v in value.items()}
    return [on_cpu(v) for v in value] if isinstance(value, list) else value


def _only(batch: list[Any]) -> Any:
    return batch[0]


@pytest.mark.parametrize("track_meta", [True, False])
@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_hit_is_miss(make: Make, volumes: list[dict[str, Any]], track_meta: bool, verify: Any) -> None:
    dataset = make(track_meta=track_meta, options={"verify": verify})
    missed = [dataset[i] for i in range(len(volumes))]
    for again in (dataset, make(track_meta=track_meta, options={"verify": verify})):
        for _ in range(3):
            for i, expected in enumerate(missed):
                assert_same(expected, again[i])
            assert_same(missed, again.__getitems__(list(range(len(volumes)))))
    image = missed[0]["image"]
    assert image.device == missed[0]["weights"].device == torch.device("cuda:0")
    if track_meta:
        assert image.affine.device == torch.device("cpu")
        assert type(image) is MetaTensor


def test_a_record_has_no_device(make: Make, backend: str) -> None:
    """What one device filled, another and the CPU read."""
    expected = make()[0]
    assert_same(on_cpu(expected), make(device="cpu", backend="posix", options={"arrays": "torch"})[0])


def test_items_made_on_the_gpu_are_cached(make: Make) -> None:
    def mixed() -> mt.Compose:
        on_gpu = [mt.EnsureTyped("image", device="cuda:0"), mt.GaussianSmoothd("image", 1.0)]
        return mt.Compose([*pipeline().transforms, *on_gpu])  # the label stays on the CPU until the split

    missed = make(mixed())[0]
    for _ in range(2):
        assert_same(missed, make(mixed())[0])
    assert missed["label"].is_cuda
    assert missed["image"].affine.device.type == "cpu"


def test_hits_share_nothing_and_writing_into_one_spoils_none(make: Make) -> None:
    dataset = make()
    expected = on_cpu(dataset[0])
    held = [dataset[0] for _ in range(4)]
    for i, a in enumerate(held):
        for b in held[i + 1 :]:
            assert not set(mutable_parts(a)) & set(mutable_parts(b))
    held[0]["image"].fill_(-1)
    for item in (*held[1:], dataset[0]):
        assert_same(expected, on_cpu(item))


def test_a_small_tensor_owns_its_storage(make: Make) -> None:
    dataset = make(mt.Compose([mt.Lambda(lambda d: {"image": torch.zeros(1 << 20), "label": torch.ones(10)})]), [{}])
    for _ in range(3):
        label = dataset[0]["label"]
        assert label.untyped_storage().nbytes() < 10_000


def test_invertd_on_the_gpu(make: Make) -> None:
    for _ in range(2):
        item = make()[0]
        item["pred"] = MetaTensor(item["label"].clone(), meta=item["label"].meta)
        back = mt.Invertd("pred", pipeline(), "label", nearest_interp=True)(item)["pred"]
        assert tuple(back.shape[1:]) == (64, 60, 56)


def test_forked_workers_say_so_once_and_give_cpu_tensors(make: Make, volumes: list[dict[str, Any]]) -> None:
    dataset = make()
    expected = [on_cpu(dataset[i]) for i in range(len(volumes))]
    loader = DataLoader(dataset, batch_size=1, num_workers=2, multiprocessing_context="fork", collate_fn=_only)
    for item, wanted in zip(loader, expected, strict=True):
        assert_same(wanted, item)


def _first_of_worker(dataset: GDSDataset) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _ = [dataset[i] for i in range(3)]
    return [str(w.message) for w in caught if "CUDA cannot be used" in str(w.message)]


def test_forked_process_warns_once(make: Make) -> None:
    dataset = make()
    _ = dataset[0]
    said = in_child(lambda: _first_of_worker(dataset))
    assert len(said) == 1
    assert "cuda:0" in said[0]
    assert "ThreadDataLoader" in said[0]


def test_spawned_workers_give_cpu_tensors_too(make: Make, volumes: list[dict[str, Any]]) -> None:
    """CUDA would work there, but MONAI cannot send a CUDA MetaTensor from a worker: the epoch would hang."""
    dataset = make()
    expected = [on_cpu(dataset[i]) for i in range(len(volumes))]
    loader = DataLoader(
        make(), batch_size=1, num_workers=1, multiprocessing_context="spawn", collate_fn=_only, persistent_workers=True
    )
    for _ in range(2):
        for item, wanted in zip(loader, expected, strict=True):
            assert_same(wanted, item)


def test_thread_data_loader(make: Make, volumes: list[dict[str, Any]]) -> None:
    fit = mt.ResizeWithPadOrCropd([*KEYS, "mask"], (16, 16, 16))
    loader = ThreadDataLoader(make(mt.Compose([*pipeline().transforms, fit])), batch_size=1)
    for _ in range(2):
        batches = list(loader)
        assert [b["name"][0] for b in batches] == [v["name"] for v in volumes]
        assert all(b["image"].device == torch.device("cuda:0") for b in batches)


@pytest.mark.parametrize("device", ["cuda:99", 99])
def test_a_device_that_is_not_there(tmp_path: Path, device: Any) -> None:
    with pytest.raises(ValueError, match=r"device='?(cuda:)?99'?, but this machine has CUDA devices 0 to"):
        GDSDataset([], pipeline(), tmp_path, device=device)


def test_default_device_is_the_current_one(tmp_path: Path) -> None:
    assert GDSDataset([], pipeline(), tmp_path).device == torch.device("cuda", torch.cuda.current_device())


def test_damage_is_found_on_the_gpu(make: Make, tmp_path: Path) -> None:
    with make() as dataset:
        expected = dataset[0]
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.warns(match="cannot be used and is computed again"):
        assert_same(expected, make()[0])
    assert_same(expected, make()[0])


def test_slow_consumers_on_a_side_stream_see_their_own_item(make: Make) -> None:
    """A hit that is dropped while a side stream still reads it must not be overwritten by the next hits."""
    count, size = 8, 4 << 20
    transform = mt.Compose([mt.Lambda(lambda d: {"x": torch.full((size,), float(d["n"]))})])
    dataset = make(transform, [{"n": i} for i in range(count)])
    for i in range(count):
        _ = dataset[i], dataset[i]
    side, results = torch.cuda.Stream(), []
    for round_ in range(5):
        for i in range(count):
            x = dataset[i]["x"]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)  # about 10 ms: the copies of the next hits get ahead
                results.append((round_, i, x.min(), x.max()))
            x.record_stream(side)  # what torch asks of whoever uses a tensor on a stream of their own
            del x
    torch.cuda.synchronize()
    for round_, i, low, high in results:
        assert (float(low), float(high)) == (i, i), f"round {round_}, item {i}"


def test_hits_that_are_used_on_the_stream_they_were_taken_on(make: Make) -> None:
    """Taken and used on a side stream, without any synchronisation by the user."""
    count, size = 8, 4 << 20
    transform = mt.Compose([mt.Lambda(lambda d: {"x": torch.full((size,), float(d["n"]))})])
    dataset = make(transform, [{"n": i} for i in range(count)])
    for i in range(count):
        _ = dataset[i], dataset[i]
    sums = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            for i in range(count):
                x = dataset[i]["x"]
                torch.cuda._sleep(5_000_000)
                sums.append((i, x.double().mean()))
                del x
    torch.cuda.synchronize()
    for i, mean in sums:
        assert float(mean) == i
