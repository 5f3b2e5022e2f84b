"""On a GPU: every reader gives the bytes and pixels of fn.readers.file, none of them too early or too late."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.bench.made_up import jpeg
from monai_gds.errors import BackendUnavailable, BrokenImage
from monai_gds.imagenet import ImageNetDataset, ImageSource, dali_iterator
from tests.imagenet.conftest import COUNT, samples_of_dali
from tests.imagenet.test_no_images import no_images

pytestmark = pytest.mark.gpu

dali = pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")
fn = pytest.importorskip("nvidia.dali.fn")

READERS = ("auto", "posix", "kvikio", "deepnvme", "xnvme", "packed")

#: Cycles of torch.cuda._sleep, about 50 ms: long enough for any buffer to be filled again meanwhile.
LONG = 100_000_000


def dataset(folder: Path, packed: Path, reader: str, batch_size: int = 4, **kwargs: Any) -> ImageNetDataset:
    try:
        return ImageNetDataset(packed if reader == "packed" else folder, batch_size, reader, "cuda", **kwargs)
    except (BackendUnavailable, ValueError) as e:
        if isinstance(e, BackendUnavailable) or "is not known" in str(e):
            pytest.skip(f"{reader} does not work on this machine: {e}")
        raise


def samples(batches: Any) -> list[tuple[bytes, int]]:
    found = []
    for batch in batches:
        assert batch["label"].is_cuda
        assert batch["label"].dtype == torch.int64
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True):
            assert image.is_cuda
            found.append((image.cpu().numpy().tobytes(), label))
    return found


def reference(folder: Path) -> list[tuple[bytes, int]]:
    """The bytes of the files themselves."""
    classes = sorted(p.name for p in folder.iterdir())
    files = sorted(folder.glob("*/*"), key=lambda p: bytes(p))
    return [(p.read_bytes(), classes.index(p.parent.name)) for p in files]


@pytest.mark.parametrize("reader", READERS)
def test_the_bytes_of_the_files(folder: Path, packed: Path, reader: str) -> None:
    ours = dataset(folder, packed, reader, decode=False)
    for _ in range(3):
        assert samples(ours) == reference(folder)


@pytest.mark.filterwarnings("ignore:reader=")
@pytest.mark.parametrize("reader", READERS)
def test_the_pixels_of_dalis_reader(folder: Path, packed: Path, reader: str) -> None:
    expected = [(data, label) for data, _, label in samples_of_dali(folder, decode=True, device_id=0)]
    ours = dataset(folder, packed, reader)
    for _ in range(3):
        assert samples(ours) == expected


def test_a_gpu_readers_copy_back_is_counted_and_mentioned(folder: Path, packed: Path) -> None:
    pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine")
    with pytest.warns(UserWarning, match="copied back"):
        ours = ImageNetDataset(folder, 4, "kvikio", "cuda")
    list(ours)
    assert ours.copied_back == sum(len(data) for data, _ in reference(folder))
    other = dataset(folder, packed, "auto")
    list(other)
    assert other.copied_back == 0


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("reader", ["auto", "posix", "packed"])
def test_a_slow_consumer_reads_what_it_was_given(folder: Path, packed: Path, reader: str, decode: bool) -> None:
    """The consumer's kernels run long after its Python code let the batch go, while later batches are read."""
    expected = [sum(data) for data, _ in samples(dataset(folder, packed, reader, decode=decode))]
    ours = dataset(folder, packed, reader, 1, decode=decode)
    for _ in range(3):
        sums = []
        for batch in ours:
            torch.cuda._sleep(LONG // 4)
            sums.append(batch["image"][0].sum(dtype=torch.int64))
            del batch
        assert [int(s) for s in sums] == expected


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("reader", ["posix", "packed"])
def test_however_far_ahead_dali_works(folder: Path, packed: Path, reader: str, depth: int, dynamic: bool) -> None:
    """No buffer, pinned or DALI's own, is used again before the batch made of it is out. Batches are kept meanwhile."""
    expected = samples(dataset(folder, packed, reader))
    ours = dataset(folder, packed, reader, prefetch_queue_depth=depth, exec_dynamic=dynamic, num_threads=2)
    for _ in range(3):
        kept = []
        for batch in ours:
            torch.cuda._sleep(LONG // 10)
            kept.append(batch)
        assert samples(kept) == expected
    ours.close()


@pytest.mark.parametrize("decode", [False, True])
def test_on_a_stream_of_ones_own(folder: Path, packed: Path, decode: bool) -> None:
    ours = dataset(folder, packed, "auto", decode=decode)
    expected = samples(ours)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        kept = [{k: [t.clone() for t in v] if isinstance(v, list) else v.clone() for k, v in b.items()} for b in ours]
    stream.synchronize()
    assert samples(kept) == expected


def test_batches_kept_for_long_keep_their_bytes(folder: Path, packed: Path) -> None:
    for decode in (False, True):
        for reader in ("posix", "packed"):
            ours = dataset(folder, packed, reader, 2, decode=decode)
            assert samples(list(ours)) == samples(ours)


def test_memory_does_not_grow(folder: Path, packed: Path) -> None:
    for decode in (False, True):
        ours = dataset(folder, packed, "posix", decode=decode)
        list(ours)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            next(iter(ours))
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


def test_augmented_on_the_gpu(folder: Path, packed: Path) -> None:
    for reader in ("posix", "packed"):
        batches = list(dataset(folder, packed, reader, crop=(16, 24), flip=True, normalize=True))
        assert {tuple(b["image"].shape[1:]) for b in batches} == {(3, 16, 24)}
        assert sum(len(b["image"]) for b in batches) == COUNT
        assert all(b["image"].is_cuda and b["image"].dtype == torch.float32 for b in batches)


def luma(batches: Any) -> torch.Tensor:
    """The brightness of images. Decoders agree on it, while they scale subsampled colours up in different ways."""
    images = torch.cat([batch["image"] for batch in batches]).cpu().float()
    return images @ torch.tensor([0.299, 0.587, 0.114])


@pytest.mark.parametrize("load", [0.0, 0.9])
def test_crops_on_the_gpu_are_those_of_the_cpu(folder: Path, packed: Path, load: float) -> None:
    """Windows and flips are the same, and again after the pipeline is built a second time."""
    arguments: dict[str, Any] = {"crop": (16, 24), "flip": True, "seed": 3, "decoder": {"hw_decoder_load": load}}
    ours = dataset(folder, packed, "posix", **arguments)
    for _ in range(2):
        ours.set_epoch(2)
        found = luma(ours)
        ours.close()
        on_cpu = ImageNetDataset(folder, 4, "posix", "cpu", crop=(16, 24), flip=True, seed=3)
        on_cpu.set_epoch(2)
        assert (found - luma(on_cpu)).abs().mean() < 3


def test_the_middle_on_the_gpu_is_that_of_the_cpu(folder: Path, packed: Path) -> None:
    ours = dataset(folder, packed, "posix", crop=(24, 24), training=False)
    on_cpu = ImageNetDataset(folder, 4, "posix", "cpu", crop=(24, 24), training=False)
    assert (luma(ours) - luma(on_cpu)).abs().mean() < 3


@pytest.mark.parametrize("crop", [None, pytest.param((16, 16), marks=pytest.mark.long)])
def test_files_that_are_no_images_are_skipped_in_large_batches(tmp_path: Path, crop: tuple[int, int] | None) -> None:
    bad = dict(zip(range(3, 128, 9), no_images(), strict=False))
    random = np.random.default_rng(0)
    for i in range(128):
        (tmp_path / f"{i:03}.JPEG").write_bytes(bad.get(i) or jpeg(random, 40, 50))
    ours = ImageNetDataset(tmp_path, 64, device="cuda", crop=crop, skip_broken=True)
    assert sum(len(batch["label"]) for batch in ours) == 128
    assert set(ours.broken) == {f"{tmp_path}/{i:03}.JPEG" for i in bad}


def test_decoder_padding_is_passed_through(folder: Path, packed: Path) -> None:
    padding = {"device_memory_padding": 1 << 20, "host_memory_padding": 1 << 20}
    assert samples(dataset(folder, packed, "posix", decoder=padding)) == samples(dataset(folder, packed, "posix"))
    with pytest.raises(Exception, match="no_such_option"):
        list(dataset(folder, packed, "posix", decoder={"no_such_option": 1}))


@pytest.mark.parametrize("crop", [None, (12, 12)])
@pytest.mark.parametrize("load", [0.0, 0.9])
def test_the_hardware_decoders_share_is_passed_through(
    folder: Path, packed: Path, load: float, crop: tuple[int, int] | None
) -> None:
    ours = dataset(folder, packed, "posix", decoder={"hw_decoder_load": load}, crop=crop)
    assert [label for _, label in samples(ours)] == [label for _, label in reference(folder)]


def test_a_graph_over_encoded_bytes_on_the_gpu(folder: Path, packed: Path) -> None:
    ours = dataset(folder, packed, "posix", decode=False, graph=lambda jpegs, labels: (fn.pad(jpegs), labels))
    widest = [max(len(d) for d, _ in reference(folder)[i : i + 4]) for i in range(0, COUNT, 4)]
    assert [tuple(b["image"].shape[1:]) for b in ours] == [(w,) for w in widest]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_graph_that_hands_its_input_through_keeps_its_bytes(folder: Path, packed: Path, batch_size: int) -> None:
    """The reader's buffers are filled again; what came out must not be among them."""
    for reader in ("posix", "auto", "packed"):
        ours = dataset(folder, packed, reader, batch_size, decode=False, graph=lambda jpegs, labels: (jpegs, labels))
        assert samples(list(ours)) == reference(folder)


def test_a_broken_jpeg_is_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*/*"):
        (tmp_path / file.parent.name).mkdir(exist_ok=True)
        (tmp_path / file.parent.name / file.name).write_bytes(file.read_bytes())
    bad = sorted(tmp_path.glob("*/*"))[9]
    good = bad.read_bytes()
    bad.write_bytes(b"no image at all")
    ours = ImageNetDataset(tmp_path, 4, device="cuda")
    for _ in range(2):
        with pytest.raises(BrokenImage) as e:
            list(ours)
        assert e.value.path == str(bad)
    skipping = ImageNetDataset(tmp_path, 4, device="cuda", skip_broken=True)
    assert len(samples(skipping)) == COUNT
    assert list(skipping.broken) == [str(bad)]
    bad.write_bytes(good)
    assert len(samples(ImageNetDataset(tmp_path, 4, device="cuda"))) == COUNT


@pytest.mark.parametrize("no_copy", [False, True])
@pytest.mark.parametrize("reader", ["posix", "kvikio", "packed"])
def test_a_source_of_gpu_buffers_in_ones_own_pipeline(folder: Path, packed: Path, reader: str, no_copy: bool) -> None:
    try:
        source = ImageSource(packed if reader == "packed" else folder, 4, reader, "cuda")
    except BackendUnavailable as e:
        pytest.skip(f"{reader} does not work on this machine: {e}")

    @dali.pipeline_def(batch_size=4, num_threads=2, device_id=0)
    def pipeline():  # type: ignore[no-untyped-def]
        images, labels = fn.external_source(source, num_outputs=2, device="gpu", cycle="raise", no_copy=no_copy)
        return images, labels

    pipe = pipeline()
    for _ in range(3):
        found = []
        for _ in range(len(source)):
            images, labels = (out.as_cpu() for out in pipe.run())
            found += [(bytes(np.asarray(i)), int(np.asarray(n)[0])) for i, n in zip(images, labels, strict=True)]
        assert found == reference(folder)
        with pytest.raises(StopIteration):
            pipe.run()
        pipe.reset()
    source.close()


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("already_batched", [False, True])
def test_arrays_on_the_gpu_into_dali(kind: str, already_batched: bool) -> None:
    if kind == "cupy":
        module = pytest.importorskip("cupy", reason="CuPy is not installed on this machine")
        make = module.asarray
    else:

        def make(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).cuda()

    count = 10
    image = np.arange(count * 12, dtype=np.float32).reshape(count, 3, 4)
    label = np.arange(count, dtype=np.int32)
    if already_batched:
        items = [{"image": make(image[i : i + 4]), "label": make(label[i : i + 4])} for i in range(0, count, 4)]
    else:
        items = [{"image": make(image[i]), "label": make(label[i : i + 1])} for i in range(count)]
    ours = dali_iterator(items, 4, device="cuda", already_batched=already_batched)
    for _ in range(3):
        batches = list(ours)
        assert [len(b["image"]) for b in batches] == [4, 4, 2]
        assert all(b["image"].is_cuda for b in batches)
        assert np.array_equal(torch.cat([b["image"] for b in batches]).cpu().numpy(), image)
        assert torch.cat([b["label"].flatten() for b in batches]).tolist() == label.tolist()


def test_numpy_into_dali_on_the_gpu() -> None:
    items = [{"image": np.full((3, 4), i, dtype=np.float32), "label": i} for i in range(10)]
    batches = list(dali_iterator(items, 4, device="cuda"))
    assert all(b["image"].is_cuda and b["label"].is_cuda for b in batches)
    assert torch.cat([b["label"] for b in batches]).tolist() == list(range(10))
