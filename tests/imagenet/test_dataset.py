"""ImageNetDataset on the CPU: every reader yields what fn.readers.file does, epochs, and images that are broken."""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.errors import BackendUnavailable, BrokenImage, FileChanged, ImageListError
from monai_gds.imagenet import ImageNetDataset, ImageSource, open_images, pack_folder
from monai_gds.imagenet import dataset as imagenet_dataset
from monai_gds.imagenet.dali.pipeline import PipelineFailed
from monai_gds.testing.disks import small_disk
from tests.fresh import Interpreter, warm
from tests.imagenet.conftest import COUNT, as_dali_reads, samples_of_dali
from tests.polls import until

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")

#: Readers of single files that work on any machine.
READERS = ("posix", "auto")
DEEPNVME = pytest.param("deepnvme", marks=pytest.mark.long)


def dataset(root: Path, batch_size: int = 4, *args: Any, **kwargs: Any) -> ImageNetDataset:
    return ImageNetDataset(root, batch_size, *args, **{"device": "cpu", **kwargs})


def samples(batches: Any) -> list[tuple[bytes, tuple[int, ...], int]]:
    """(bytes, shape, label) of every image."""
    found = []
    for batch in batches:
        assert len(batch["image"]) == len(batch["label"])
        assert batch["label"].dtype == torch.int64
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True):
            assert image.dtype == torch.uint8
            found.append((image.numpy().tobytes(), tuple(image.shape), label))
    return found


# The same images with the same labels.


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_the_same_as_dalis_reader(folder: Path, reader: str, decode: bool) -> None:
    expected = samples_of_dali(folder, decode=decode)
    assert len(expected) == COUNT
    ours = dataset(folder, reader=reader, decode=decode)
    assert samples(ours) == expected
    assert samples(ours) == expected  # and in the next epoch


@pytest.mark.parametrize("by", [-1, 1, 5000])
@pytest.mark.parametrize("reader", [*READERS, DEEPNVME, "xnvme", "xnvme-block"])
def test_an_image_that_changed_its_size_since_it_was_listed(tmp_path: Path, folder: Path, reader: str, by: int) -> None:
    """Never the wrong bytes: it is refused by name."""
    with small_disk(tmp_path, 64 << 20) if reader == "xnvme-block" else nullcontext(tmp_path) as where:
        root = where / "train"
        shutil.copytree(folder, root)
        os.sync()
        try:
            ours = dataset(root, reader=reader, decode=False)
        except BackendUnavailable as e:
            pytest.skip(f"{reader} does not work on this machine: {e}")
        image = Path(ours.images.path(5))
        before = image.read_bytes()
        now = before[:by] if by < 0 else before + bytes(by)
        image.write_bytes(now)
        os.sync()
        with pytest.raises(FileChanged, match=f"{image.name} has {len(now)} bytes.*list the files again"):
            list(ours)
        again = dataset(root, reader=reader, decode=False)
        assert samples(again)[5][0] == now
        image.write_bytes(before)
        os.sync()
        assert samples(ours)[5][0] == before  # the dataset is as good as it was
        ours.close()
        again.close()


def test_a_packed_file_that_changed_its_size(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "packed")
    ours = dataset(tmp_path / "packed", decode=False)
    with open(tmp_path / "packed" / "images-00002.safetensors", "ab") as f:
        f.write(bytes(4096))
    with pytest.raises(FileChanged, match=r"images-00002.* was replaced or changed"):
        list(ours)


def same_over(reader: str, folder: Path, packed: Path) -> None:
    for decode in (False, True):
        expected = samples_of_dali(folder, decode=decode)
        for root in (folder, packed):
            try:
                ours = dataset(root, reader=reader, decode=decode)
            except (BackendUnavailable, ValueError) as e:
                if isinstance(e, BackendUnavailable) or "is not known" in str(e):
                    pytest.skip(f"{reader} does not work on this machine: {e}")
                raise
            for _ in range(2):
                assert samples(ours) == expected


@pytest.mark.parametrize("reader", [DEEPNVME, "xnvme"])
def test_the_same_over_other_backends(folder: Path, packed: Path, reader: str) -> None:
    same_over(reader, folder, packed)


def test_the_same_from_the_blocks_of_a_device(folder: Path, packed: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path, 64 << 20) as disk:
        shutil.copytree(folder, disk / "train")
        shutil.copytree(packed, disk / "packed")
        os.sync()
        same_over("xnvme-block", disk / "train", disk / "packed")


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("reader", ["packed", "auto", "posix"])
def test_a_packed_folder_is_the_same_too(folder: Path, packed: Path, reader: str, decode: bool) -> None:
    expected = samples_of_dali(folder, decode=decode)
    assert samples(dataset(packed, reader=reader, decode=decode)) == expected


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fill", "drop", "partial"])
def test_shards_and_last_batches_are_dalis(folder: Path, packed: Path, policy: Any, shards: int) -> None:
    for shard in range(shards):
        arguments = {"decode": False, "shard_id": shard, "num_shards": shards, "last_batch": policy}
        theirs = as_dali_reads(folder, 4, shard_id=shard, num_shards=shards)
        for ours in (dataset(folder, 4, **arguments), dataset(packed, 4, **arguments)):
            for _ in range(2):
                batches = [samples([batch]) for batch in ours]
                assert len(batches) == len(ours) == (len(theirs) if policy != "drop" else COUNT // shards // 4)
                assert batches == [full[: len(batch)] for full, batch in zip(theirs, batches, strict=False)]
                assert policy == "partial" or {len(batch) for batch in batches} == {4}


def test_the_policies_are_those_of_dalis_iterator(folder: Path) -> None:
    """Against DALIGenericIterator itself, with padding."""
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def pipeline() -> Any:
        return fn.readers.file(file_root=str(folder), name="files", pad_last_batch=True)[1]

    for policy, name in zip(LastBatchPolicy, ("fill", "drop", "partial"), strict=True):
        theirs = DALIGenericIterator(pipeline(), ["label"], reader_name="files", last_batch_policy=policy)
        expected = [batch[0]["label"].flatten().tolist() for batch in theirs]
        ours = dataset(folder, decode=False, last_batch=name)
        assert [batch["label"].tolist() for batch in ours] == expected


@pytest.mark.parametrize("reader", ["posix", "packed"])
def test_a_shuffled_epoch_has_each_image_once(folder: Path, packed: Path, reader: str) -> None:
    expected = sorted(samples(dataset(folder, decode=False)))
    ours = dataset(packed if reader == "packed" else folder, 4, reader, decode=False, shuffle=True, seed=1, window=2)
    first, second = samples(ours), samples(ours)
    assert sorted(first) == sorted(second) == expected
    assert first != second
    assert first != expected


def test_equal_seeds_give_equal_orders_whatever_the_reader(folder: Path, packed: Path) -> None:
    roots = {"posix": folder, "packed": packed}
    first, second = (dataset(root, 4, reader, shuffle=True, seed=3) for reader, root in roots.items())
    assert samples(first) == samples(second)
    first.set_epoch(7)
    second.set_epoch(7)
    assert samples(first) == samples(second)


def test_shards_of_one_epoch_see_each_image_once(folder: Path, packed: Path) -> None:
    for root in (folder, packed):
        shards = [dataset(root, 3, decode=False, shuffle=True, shard_id=i, num_shards=2) for i in range(2)]
        seen = [s for shard in shards for s in samples(shard)]
        assert set(seen) == set(samples(dataset(folder, decode=False)))
        assert len(seen) - COUNT <= 1


def test_paths_with_any_bytes(folder: Path, tmp_path: Path) -> None:
    source = next(folder.glob("*/*")).read_bytes()
    top = os.fsencode(tmp_path) + b"/\xff\xfe root"
    for name in (b"\x80", b"new\nline", b"a\\b", "é".encode()):
        os.makedirs(top + b"/" + name)
        with open(top + b"/" + name + b"/\xc3(" + name + b".jpg", "wb") as f:
            f.write(source)
    root = os.fsdecode(top)
    pack_folder(open_images(root), root + " packed")
    assert len(samples(dataset(Path(root)))) == 4
    assert samples(dataset(Path(root))) == samples(dataset(Path(root + " packed")))
    assert list(open_images(root).classes) == list(open_images(root + " packed").classes)


# What comes out.


def test_images_of_one_size_are_one_tensor(folder: Path) -> None:
    for batch in dataset(folder, crop=(24, 32), flip=True):
        assert batch["image"].shape == (len(batch["label"]), 24, 32, 3)
        assert batch["image"].dtype == torch.uint8
    for batch in dataset(folder, crop=(24, 32), normalize=True):
        assert batch["image"].shape == (len(batch["label"]), 3, 24, 32)
        assert batch["image"].dtype == torch.float32


def test_an_evaluation_sees_the_same_middle_of_an_image_in_every_epoch(folder: Path) -> None:
    ours = dataset(folder, crop=(24, 32), training=False)
    first, second = samples(ours), samples(ours)
    assert first == second
    assert {shape for _, shape, _ in first} == {(24, 32, 3)}


@pytest.mark.parametrize("kind", [tuple, list])  # a config has lists
def test_normalisation_is_what_it_says(folder: Path, kind: Callable[[Any], Any]) -> None:
    plain = next(iter(dataset(folder, 1)))["image"][0].float()
    mean, std = (10.0, 20.0, 30.0), (2.0, 4.0, 8.0)
    normal = next(iter(dataset(folder, 1, normalize=kind([kind(mean), kind(std)]))))["image"][0]
    torch.testing.assert_close(normal, ((plain - torch.tensor(mean)) / torch.tensor(std)).permute(2, 0, 1))


@pytest.mark.parametrize("given", [224, "224", (0, 224), (224, 224, 3), (224.0, 224), (224,)])
def test_a_crop_that_is_no_size_is_refused_at_once(folder: Path, given: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"crop={given!r}: give (height, width) in pixels")):
        dataset(folder, crop=given)


@pytest.mark.parametrize(
    "given",
    [
        {"random_area": 0.5}, {"random_area": (0.5, 0.1)}, {"random_area": (-0.1, 0.5)}, {"random_area": "ab"},
        {"random_aspect_ratio": (0, 1)}, {"random_aspect_ratio": (1, 2, 3)},
    ],
)  # fmt: skip
def test_a_range_of_crops_that_cannot_be_is_an_error_at_once(folder: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"decoder={given!r}: give two numbers, the smaller one first")):
        dataset(folder, crop=(8, 8), decoder=given)


@pytest.mark.parametrize("given", [(1.0, 2.0), ([1.0],), ("mean", "std")])
def test_a_normalisation_that_cannot_be_is_an_error_at_once(folder: Path, given: Any) -> None:
    with pytest.raises(ValueError, match=r"normalize=.*: use True, or \(mean, std\)"):
        dataset(folder, normalize=given)


def test_an_option_that_the_backend_does_not_take_is_named_with_those_it_takes(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"backend 'posix' has no option 'thread': it takes .*threads"):
        dataset(folder, storage_options={"thread": 3})


def test_flips_are_random_and_follow_the_seed(folder: Path) -> None:
    plain, flipped, again = (samples(dataset(folder, flip=flip, seed=5)) for flip in (False, True, True))
    assert flipped == again
    assert 0 < sum(a != b for a, b in zip(plain, flipped, strict=True)) < COUNT


def test_each_shard_flips_in_its_own_way(folder: Path, tmp_path: Path) -> None:
    """Ranks that drew the same random numbers would all mirror the same places of a batch."""
    (tmp_path / "n0").mkdir()
    for i in range(32):
        shutil.copy(next(folder.glob("*/*")), tmp_path / "n0" / f"{i}.jpg")
    first, second = (samples(dataset(tmp_path, 16, flip=True, shard_id=i, num_shards=2)) for i in range(2))
    assert first != second


@pytest.mark.parametrize("decode", [False, True])
def test_a_graph_of_ones_own(folder: Path, decode: bool) -> None:
    from nvidia.dali import fn

    def graph(images: Any, labels: Any) -> Any:
        return (fn.resize(images, size=(10, 12)) if decode else fn.pad(images)), labels + 100

    batches = list(dataset(folder, decode=decode, graph=graph))
    for batch in batches:
        assert batch["image"].shape[1:] == (10, 12, 3) if decode else batch["image"].dim() == 2
    assert min(int(b["label"].min()) for b in batches) == 100


def test_a_graph_may_give_two_views_and_no_label(folder: Path) -> None:
    from nvidia.dali import fn

    def views(images: Any, _: Any) -> Any:
        return fn.resize(images, size=(10, 12)), fn.resize(images, size=(5, 6))

    batches = list(dataset(folder, 4, graph=views))
    assert sum(len(batch["image"]) for batch in batches) == COUNT
    for batch in batches:
        assert batch["image"].shape[1:] == (10, 12, 3)
        assert batch["label"].shape == (len(batch["image"]), 5, 6, 3)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_graph_that_hands_its_input_through_keeps_its_bytes(folder: Path, batch_size: int) -> None:
    """The reader's buffers are filled again; what came out must not be among them."""
    batches = list(dataset(folder, batch_size, decode=False, graph=lambda images, labels: (images, labels)))
    assert samples(batches) == samples(dataset(folder, decode=False))


@pytest.mark.parametrize("decode", [False, True])
def test_batches_kept_for_long_keep_their_bytes(folder: Path, packed: Path, decode: bool) -> None:
    for root in (folder, packed):
        assert samples(list(dataset(root, 2, decode=decode))) == samples(dataset(folder, 2, decode=decode))


def test_encoded_bytes_need_no_dali(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvidia.dali", None)
    assert len(samples(dataset(folder, decode=False))) == COUNT
    with pytest.raises(BackendUnavailable, match=r"pip install 'monai_gds\[dali-cuda1"):
        dataset(folder)


# Epochs.


@pytest.mark.parametrize("reader", ["posix", "packed"])
@pytest.mark.parametrize("decode", [False, True])
def test_leaving_a_loop_starts_a_new_epoch_next_time(folder: Path, packed: Path, reader: str, decode: bool) -> None:
    ours = dataset(packed if reader == "packed" else folder, 2, reader, decode=decode)
    expected = samples(ours)
    for count in (0, 1, 3):
        for number, _ in enumerate(ours):
            if number == count:
                break
        assert samples(ours) == expected


def test_a_new_iterator_ends_the_one_before(folder: Path) -> None:
    ours = dataset(folder, 2)
    first = iter(ours)
    next(first)
    second = iter(ours)
    assert list(first) == []
    assert samples(second) == samples(dataset(folder, 2))
    ours.reset()


def test_an_iterator_that_is_not_used_takes_no_epoch(folder: Path) -> None:
    ours, expected = (dataset(folder, 4, decode=False, shuffle=True) for _ in range(2))
    for _ in range(2):
        iter(ours)
    assert samples(ours) == samples(expected)
    source, other = (ImageSource(folder, 4, shuffle=True) for _ in range(2))
    iter(source)
    assert [labels.tolist() for _, labels in source] == [labels.tolist() for _, labels in other]


def test_the_epoch_may_be_set_until_its_first_batch(folder: Path) -> None:
    ours, expected = (dataset(folder, 4, decode=False, shuffle=True) for _ in range(2))
    batches = iter(ours)
    for each in (ours, expected):
        each.set_epoch(3)
    assert [b["label"].tolist() for b in batches] == [b["label"].tolist() for b in expected]


def test_dropped_half_way_nothing_stays(folder: Path, packed: Path) -> None:
    def use() -> None:
        for root in (folder, packed):
            for decode in (False, True):
                ours = dataset(root, 2, decode=decode)
                next(iter(ours))
                del ours
                gc.collect()

    use()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        use()
    until(lambda: threading.active_count() <= threads)
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_dropped_dataset_is_gone_at_once(folder: Path) -> None:
    """Its pipeline may hold much of a GPU's memory: not until the garbage collector comes by."""
    gc.disable()
    try:
        ours = dataset(folder, 2)
        next(iter(ours))
        gone = weakref.ref(ours)
        pipe = weakref.ref(ours._pipe)
        del ours
        assert gone() is None
        assert pipe() is None
    finally:
        gc.enable()


def test_dropping_waits_for_nobody(folder: Path) -> None:
    """The garbage collector may drop it in a thread that holds a lock which the reader's threads need to end."""
    ours = dataset(folder, 2)
    reader = ours._reader
    may_close, closed = threading.Event(), threading.Event()

    class Slow:
        def close(self) -> None:
            may_close.wait(20)
            closed.set()

    reader._storage = Slow()  # type: ignore[union-attr]
    del reader, ours
    gc.collect()
    assert not closed.is_set()
    may_close.set()
    assert closed.wait(20)


@pytest.mark.parametrize("when", [pytest.param("", marks=pytest.mark.long), "late.append(batches)"])
def test_a_script_that_ends_within_an_epoch_ends_in_silence(folder: Path, when: str) -> None:
    """DALI shuts its pipelines down at exit, before what is left of the script is cleared away.

    In between the collector may come by, here a function that was registered earlier than DALI's own.
    """
    script = (
        "import atexit\n"
        "late = []\n"
        "atexit.register(lambda: [one.close() for one in late])\n"
        "from monai_gds import ImageNetDataset\n"
        f"batches = iter(ImageNetDataset({str(folder)!r}, 4, device='cpu'))\n"
        "print(len(next(batches)['label']))\n"
        f"{when}\n"
    )
    done = warm().run("-c", script, env={**os.environ, "PYTHONWARNINGS": "ignore"}, whole=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_closing_frees_and_it_can_be_used_again(folder: Path) -> None:
    ours = dataset(folder, 2)
    expected = samples(ours)
    ours.close()
    assert samples(ours) == expected


def test_a_batch_larger_than_the_dataset(folder: Path) -> None:
    assert [len(b["image"]) for b in dataset(folder, 100)] == [COUNT]
    assert [len(b["image"]) for b in dataset(folder, 100, last_batch="fill")] == [100]
    with pytest.raises(ValueError, match="batch_size=100 is larger than a shard of 23 images"):
        dataset(folder, 100, last_batch="drop")


# Other people's loops.


def test_in_a_data_loader(folder: Path) -> None:
    loader = torch.utils.data.DataLoader(dataset(folder, crop=(8, 8)), batch_size=None)
    assert [tuple(b["image"].shape) for b in loader][:2] == [(4, 8, 8, 3)] * 2


def test_workers_would_give_every_image_again(folder: Path) -> None:
    loader = torch.utils.data.DataLoader(dataset(folder, decode=False), batch_size=None, num_workers=2)
    with pytest.raises(RuntimeError, match="num_workers=0 and batch_size=None"):
        list(loader)


def test_in_monais_trainer(folder: Path) -> None:
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    from monai.engines import SupervisedTrainer

    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4))
    before = network[1].weight.detach().clone()
    SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=2,
        train_data_loader=dataset(folder, crop=(8, 8), normalize=True),
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), 0.1),
        loss_function=torch.nn.CrossEntropyLoss(),
    ).run()
    assert not torch.equal(before, network[1].weight)


def test_in_lightnings_trainer(folder: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Linear(3 * 8 * 8, 4)
            self.seen = 0

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.seen += len(batch["label"])
            return torch.nn.functional.cross_entropy(self.network(batch["image"].flatten(1)), batch["label"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, dataset(folder, crop=(8, 8), normalize=True))
    assert module.seen == 2 * COUNT


def _rank(rank: int, root: str, store: str) -> tuple[int, Any]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", world_size=2, rank=rank)
    ours = ImageNetDataset(root, 4, device="cpu", shuffle=True)
    found = len(ours), samples(ours)
    torch.distributed.destroy_process_group()
    return found


def test_under_torch_distributed(folder: Path, tmp_path: Path, interpreter: Interpreter) -> None:
    with interpreter.process() as first, interpreter.process() as second:
        for rank, process in enumerate((first, second)):
            process.start(_rank, rank, str(folder), str(tmp_path / "store"))
        (count, one), (other_count, other) = first.result(), second.result()
    assert count == other_count == 3
    assert set(one) | set(other) == set(samples(dataset(folder)))
    assert len(one) + len(other) <= COUNT + 1


# Bad input.


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_a_broken_jpeg_is_named_and_the_dataset_stays_usable(
    copy_of: Callable[[], Path], reader: str, shuffle: bool
) -> None:
    root = copy_of()
    bad = sorted(root.glob("*/*"))[9]
    good = bad.read_bytes()
    bad.write_bytes(good[: len(good) // 20] + bytes(len(good) - len(good) // 20))
    ours = dataset(root, 4, reader, shuffle=shuffle)
    for _ in range(2):
        with pytest.raises(BrokenImage, match="cannot be decoded") as e:
            list(ours)
        assert e.value.path == str(bad)
    bad.write_bytes(good)
    assert sorted(samples(ours)) == sorted(samples(dataset(root)))


@pytest.mark.parametrize("reader", READERS)
def test_what_a_graph_of_ones_own_cannot_decode_is_named(copy_of: Callable[[], Path], reader: str) -> None:
    from nvidia.dali import fn

    def graph(jpegs: Any, labels: Any) -> Any:
        return fn.resize(fn.decoders.image(jpegs, device="cpu"), size=(8, 8)), labels

    root = copy_of()
    bad = sorted(root.glob("*/*"))[9]
    bad.write_bytes(b"no image at all")
    with pytest.raises(BrokenImage, match="cannot be decoded") as e:
        list(dataset(root, 4, reader, decode=False, graph=graph))
    assert e.value.path == str(bad)
    skipping = dataset(root, 4, reader, decode=False, graph=graph, skip_broken=True)
    assert len(samples(skipping)) == COUNT
    assert list(skipping.broken) == [str(bad)]


def test_what_came_before_a_broken_image_is_given(copy_of: Callable[[], Path]) -> None:
    root = copy_of()
    sorted(root.glob("*/*"))[-1].write_bytes(b"no image at all")
    seen: list[Any] = []  # what came before the error
    with pytest.raises(BrokenImage):
        seen.extend(dataset(root, 4))
    assert samples(seen) == samples(dataset(root, 4, skip_broken=True))[: 5 * 4]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_skip_broken_replaces_and_counts(copy_of: Callable[[], Path], batch_size: int) -> None:
    root = copy_of()
    files = sorted(root.glob("*/*"))
    bad = [files[1], files[2], files[9], files[22]]
    bad[0].write_bytes(b"")
    for file in bad[1:]:
        file.write_bytes(b"no image at all")
    ours = dataset(root, batch_size, skip_broken=True)
    for _ in range(2):
        found = samples(ours)
        assert len(found) == COUNT
        assert set(ours.broken) == {str(file) for file in bad}
    for file in bad:
        file.unlink()
    assert set(found) == set(samples(dataset(root)))


def test_with_nothing_but_broken_images_skipping_ends(copy_of: Callable[[], Path]) -> None:
    root = copy_of()
    for file in root.glob("*/*"):
        file.write_bytes(b"no image at all")
    ours = dataset(root, skip_broken=True)
    with pytest.raises(BrokenImage, match="so is every other image"):
        list(ours)
    assert len(ours.broken) == COUNT


@pytest.mark.parametrize("decode", [False, True])
def test_an_empty_file_is_named(copy_of: Callable[[], Path], decode: bool) -> None:
    root = copy_of()
    bad = sorted(root.glob("*/*"))[9]
    bad.write_bytes(b"")
    for reader in READERS:
        seen: list[Any] = []  # what came before the error
        with pytest.raises(BrokenImage, match="empty") as e:
            seen.extend(dataset(root, 4, reader, decode=decode))
        assert e.value.path == str(bad)
        assert len(seen) == 2


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_deleted_after_listing_is_named(copy_of: Callable[[], Path], reader: str, decode: bool) -> None:
    root = copy_of()
    gone = sorted(root.glob("*/*"))[9]
    ours = dataset(root, 4, reader, decode=decode)
    data = gone.read_bytes()
    gone.unlink()
    seen: list[Any] = []  # what came before the error
    with pytest.raises(FileNotFoundError) as e:
        seen.extend(ours)
    assert e.value.filename == str(gone)
    assert len(seen) == 2
    gone.write_bytes(data)
    assert samples(ours) == samples(dataset(root, decode=decode))


def test_a_file_cut_after_listing_is_an_error(copy_of: Callable[[], Path]) -> None:
    root = copy_of()
    cut = sorted(root.glob("*/*"))[3]
    for reader in READERS:
        data = cut.read_bytes()
        ours = dataset(root, 4, reader)
        cut.write_bytes(data[:-1])
        with pytest.raises(OSError, match=cut.name):
            list(ours)
        cut.write_bytes(data)


def test_an_error_of_the_graph_is_no_broken_image(folder: Path) -> None:
    from nvidia.dali import fn

    ours = dataset(folder, graph=lambda images, labels: (fn.crop(images, crop=(1000, 1000)), labels))
    with pytest.raises(PipelineFailed, match=r"[Cc]rop"):
        list(ours)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reader": "nvme"}, ValueError, "reader='nvme' is not known; there are: auto, posix, .*xnvme-block"),
        ({"reader": "dali"}, ValueError, "reader='dali' is not known; there are: auto, posix"),
        ({"reader": "kvikio", "decode": False}, BackendUnavailable, "kvikio.*serves CUDA targets only"),
        ({"reader": "packed"}, ValueError, "is not packed: run `monai-gds pack"),
        ({"device": "cuda:9"}, ValueError, "cuda:9"),
        ({"crop": (8, 8), "graph": lambda i, n: (i, n)}, ValueError, "one or the other"),
        ({"crop": (8, 8), "decode": False}, ValueError, "need decode=True"),
        ({"training": False, "decode": False}, ValueError, "need decode=True"),
        ({"crop": (8, 8), "training": False, "flip": True}, ValueError, "flip=True mirrors at random"),
        ({"shard_id": 0}, ValueError, "both shard_id and num_shards"),
    ],
)
def test_arguments_that_make_no_sense(
    folder: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dataset(folder, **arguments)


def test_an_argument_that_is_spelt_wrong_is_named_with_the_right_one(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"no argument 'suffle': did you mean 'shuffle'\?"):
        dataset(folder, suffle=True)
    with pytest.raises(TypeError, match=r"no argument 'xyzzy'$"):
        dataset(folder, xyzzy=1)


def test_what_it_is_printed_as(folder: Path, packed: Path) -> None:
    assert repr(dataset(folder, 4, shard_id=1, num_shards=2)) == (
        f"<ImageNetDataset: 23 images of {folder}, in order, in batches of 4; reader='auto', shard 1 of 2, cpu>"
    )
    assert f"{folder}, shuffled as a whole, in" in repr(dataset(folder, shuffle=True, window=8))
    assert f"{packed}, shuffled as a whole, in" in repr(dataset(packed, shuffle=True))
    assert f"{packed}, shuffled within windows of 8 files, in" in repr(dataset(packed, shuffle=True, window=8))


def test_a_root_that_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ImageListError, match="not a folder"):
        dataset(tmp_path / "absent")
    (tmp_path / "n0").mkdir()
    with pytest.raises(ImageListError, match="no image"):
        dataset(tmp_path)


def test_pixels_are_those_of_another_decoder(folder: Path) -> None:
    module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    ours = dataset(folder, 1)
    theirs = np.asarray(module.open(ours.images.path(0)).convert("RGB")).astype(int)
    assert np.abs(next(iter(ours))["image"][0].numpy().astype(int) - theirs).mean() < 2


@pytest.mark.parametrize("host", [True, False])
def test_decoders_get_host_memory_where_the_reader_can_fill_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    """Whatever the reader is called: one that serves GPUs only is copied back, with a warning."""
    asked = []

    def open_reader(name: str, images: Any, device: torch.device, **_: Any) -> Any:
        asked.append(device.type)
        if device.type == "cpu" and not host:
            raise BackendUnavailable("it serves CUDA targets only")
        return SimpleNamespace(device=device, close=lambda: None)

    monkeypatch.setattr(imagenet_dataset, "open_reader", open_reader)
    monkeypatch.setattr(imagenet_dataset, "resolve_device", lambda _: torch.device("cuda", 0))
    with (
        nullcontext()
        if host
        else pytest.warns(UserWarning, match="serves CUDA targets only.*every batch is copied back")
    ):
        dataset(folder)
    assert asked == (["cpu"] if host else ["cpu", "cuda"])
    asked.clear()
    dataset(folder, decode=False)
    assert asked == ["cuda"]
