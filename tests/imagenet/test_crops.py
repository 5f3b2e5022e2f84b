"""Crops and flips of an image depend on the seed and the epoch only, and a run that ended is continued bit for bit."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from monai_gds.bench.made_up import jpeg
from monai_gds.imagenet import ImageNetDataset
from tests.imagenet.conftest import COUNT

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 images in a flat folder: their labels tell them apart."""
    root, random = tmp_path_factory.mktemp("flat"), np.random.default_rng(3)
    for i in range(COUNT):
        (root / f"{i:02}.jpg").write_bytes(jpeg(random, *random.integers(20, 60, 2).tolist()))
    return root


def dataset(root: Path, batch_size: int = 4, **kwargs: Any) -> ImageNetDataset:
    arguments = {"device": "cpu", "shuffle": True, "crop": (16, 16), "flip": True, "seed": 5, **kwargs}
    return ImageNetDataset(root, batch_size, **arguments)


def crops(batches: Iterable[dict[str, Any]]) -> dict[int, bytes]:
    """The pixels of each image, by its label."""
    return {
        label: image.numpy().tobytes()
        for batch in batches
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True)
    }


def in_order(batches: Iterable[dict[str, Any]]) -> list[tuple[bytes, list[int]]]:
    return [(batch["image"].numpy().tobytes(), batch["label"].tolist()) for batch in batches]


def test_no_epoch_has_the_crops_of_another(flat: Path) -> None:
    ours = dataset(flat)
    first, second = crops(ours), crops(ours)
    assert len(first) == len(second) == COUNT
    assert all(first[label] != second[label] for label in first)
    assert all(pixels != first[label] for label, pixels in crops(dataset(flat, seed=6)).items())


def test_crops_are_those_of_the_epoch_however_it_is_reached(flat: Path) -> None:
    """In other batches, in another process's share, after a rebuild of DALI's pipeline, unshuffled, from epoch 2 on."""
    whole = dataset(flat)
    expected = [crops(whole) for _ in range(3)]
    for epoch in (2, 0):
        for changes in ({}, {"batch_size": 7}, {"shuffle": False}, {"exec_dynamic": False}):
            ours = dataset(flat, **changes)
            ours.set_epoch(epoch)
            assert crops(ours) == expected[epoch]
            ours.close()
            ours.set_epoch(1)
            assert crops(ours) == expected[1]
        shards = [dataset(flat, shard_id=i, num_shards=3) for i in range(3)]
        for shard in shards:
            shard.set_epoch(epoch)
        assert {label: pixels for shard in shards for label, pixels in crops(shard).items()} == expected[epoch]


@pytest.mark.parametrize("training", [True, False])
def test_an_image_that_is_replaced_by_another_one_of_as_many_bytes(tmp_path: Path, training: bool) -> None:
    """Its old shape counts no more. In batches of 32 and more, windows outside of images crash DALI 2.4's decoders."""

    def write(height: int, width: int) -> None:
        for i in range(4):
            image, file = Image.fromarray(np.tile(np.arange(width, dtype=np.uint8), (height, 1)) + i), io.BytesIO()
            image.save(file, "JPEG")
            (tmp_path / f"{i}.jpg").write_bytes(file.getvalue().ljust(10_000, b"\0"))

    write(50, 200)
    ours, again = (dataset(tmp_path, flip=False, training=training) for _ in range(2))
    list(ours)
    write(200, 50)
    again.set_epoch(1)
    assert in_order(ours) == in_order(again)


@pytest.mark.parametrize("cut", [True, False])
def test_an_image_that_is_broken_changes_no_other_crop(flat: Path, tmp_path: Path, cut: bool) -> None:
    whole = dataset(flat)
    expected = [crops(whole) for _ in range(2)]
    for file in flat.iterdir():
        data = file.read_bytes()
        bad = data[: data.index(b"\xff\xda") + 20] if cut else b"no image at all"  # cut after its headers
        (tmp_path / file.name).write_bytes(bad if file.name in ("03.jpg", "11.jpg") else data)
    ours = dataset(tmp_path, skip_broken=True)
    for epoch in range(2):
        assert crops(ours) == {label: c for label, c in expected[epoch].items() if label not in (3, 11)}
    assert len(ours.broken) == 2


def test_half_of_the_images_are_mirrored(flat: Path) -> None:
    plain = dataset(flat, crop=None, flip=False, batch_size=1)
    mirrored = 0
    for epoch in range(8):
        ours = dataset(flat, crop=None, batch_size=1)
        ours.set_epoch(epoch)
        plain.set_epoch(epoch)
        for one, other in zip(ours, plain, strict=True):
            if not torch.equal(one["image"], other["image"]):
                assert torch.equal(one["image"], other["image"].flip(2))
                mirrored += 1
    assert 60 < mirrored < 124  # of 184; less likely than one in 100,000


# Resuming.


@pytest.mark.parametrize(
    ("taken", "last_batch"),
    [
        (2, "partial"),
        (4, "exact"),
        *(pytest.param(n, last, marks=pytest.mark.long) for n in (0, 1, 5, 6) for last in ("partial", "exact")),
    ],
)
def test_a_run_that_ended_goes_on_bit_for_bit(flat: Path, taken: int, last_batch: Any) -> None:
    """In the middle of an epoch, between two, and before an empty last batch."""
    shards = {"shard_id": 0, "num_shards": 5, "batch_size": 1, "last_batch": "exact"} if last_batch == "exact" else {}
    whole = dataset(flat, **shards)
    expected = [in_order(whole) for _ in range(3)]
    taken = min(taken, len(whole))

    ours = dataset(flat, **shards)
    list(ours)
    for number, _ in enumerate(ours, 1):
        if number == taken:
            break
    ours.reset()
    state = ours.state_dict() if taken else {"epoch": 1, "batches": 0}
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)

    other = dataset(flat, **shards)
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert other.state_dict() == (state if taken < len(whole) else {"epoch": 2, "batches": 0})
    if taken < len(whole):
        assert in_order(other) == expected[1][taken:]
    assert in_order(other) == expected[2]


def test_the_state_follows_the_consumer(flat: Path) -> None:
    ours = dataset(flat)
    assert ours.state_dict() == {"epoch": 0, "batches": 0}
    for number, _ in enumerate(ours, 1):  # DALI is two batches ahead, and the reader more
        assert ours.state_dict() == {"epoch": 0, "batches": number}
    assert ours.state_dict() == {"epoch": 1, "batches": 0}
    ours.set_epoch(7)
    assert ours.state_dict() == {"epoch": 7, "batches": 0}


def test_a_trainer_may_name_the_epoch_that_goes_on(flat: Path) -> None:
    whole = dataset(flat)
    whole.set_epoch(3)
    expected = in_order(whole)
    for named, rest in ((3, expected[2:]), (4, in_order(whole))):
        ours = dataset(flat)
        ours.load_state_dict({"epoch": 3, "batches": 2})
        ours.set_epoch(named)
        assert in_order(ours) == rest


def test_a_state_of_another_loader_is_refused(flat: Path) -> None:
    with pytest.raises(ValueError, match=r"not a state of ImageNetDataset.state_dict\(\)"):
        dataset(flat).load_state_dict({"batches": 3, "order": {}})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_goes_on_in_the_middle_of_an_epoch(flat: Path) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed on this machine")
    whole = dataset(flat)
    expected = [in_order(whole) for _ in range(3)]

    ours = module.StatefulDataLoader(dataset(flat), batch_size=None)
    list(ours)
    batches = iter(ours)
    assert in_order(next(batches) for _ in range(2)) == expected[1][:2]
    other = module.StatefulDataLoader(dataset(flat), batch_size=None)
    other.load_state_dict(ours.state_dict())
    assert in_order(other) == expected[1][2:]
    assert in_order(other) == expected[2]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_in_the_middle_of_an_epoch(flat: Path, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = torch.nn.Linear(3 * 16 * 16, 4)
            self.seen: list[Any] = []

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.seen.append((batch["label"].tolist(), batch["image"].sum().item()))
            return self.network(batch["image"].flatten(1)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-6)

    def fit(resume: Path | None = None, **how: Any) -> list[Any]:
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, **how
        )
        trainer.fit(module, dataset(flat, normalize=True), ckpt_path=resume)
        return module.seen

    save = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=8, save_last=True)
    begun = fit(max_steps=8, callbacks=[save])
    rest = fit(tmp_path / "last.ckpt", max_epochs=3, enable_checkpointing=False)
    assert len(begun) == 8
    assert begun + rest == fit(max_epochs=3, enable_checkpointing=False)
