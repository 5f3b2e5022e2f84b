"""GDSDataLoader.state_dict: an epoch that is continued gives the batches of one that was never interrupted."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.data import DataLoader, Dataset
from monai.utils import set_determinism
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from monai_gds import GDSDataLoader, GDSDataset, limits
from monai_gds.loader.resume import Place
from monai_gds.programs import draws
from tests.fresh import Interpreter
from tests.machines import in_child
from tests.same import assert_same

COUNT = 5
Settings = Callable[[Any], dict[str, Any]]


def items() -> list[dict[str, Any]]:
    """Volumes of few values, so that they get smaller when they are packed."""
    values = np.random.default_rng(0).integers(0, 9, (COUNT, 1, 12, 11, 10)).astype(np.float32)
    return [{"image": value, "number": i} for i, value in enumerate(values)]


class OwnGenerator(mt.RandomizableTransform):  # type: ignore[misc]
    """Draws from generators of other kinds than MONAI's, and keeps them in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.torch = np.random.default_rng(4), torch.Generator().manual_seed(4)

    def __call__(self, data: Any) -> Any:
        return {**data, "drawn": (float(self.numpy.normal()), float(torch.rand((), generator=self.torch)))}


def on_values() -> list[Any]:
    """Odd numbers of normal draws, of which NumPy keeps every other; crops of no use in front; nested."""
    noise = mt.RandLambdad("image", _shifted, prob=1.0)
    return [
        mt.RandFlipd("image", prob=0.5),
        _Normal(),
        mt.Compose([noise, OwnGenerator()]),
        mt.RandSpatialCropd("image", 6),
    ]


def in_tiles() -> list[Any]:
    """Crops that are drawn before anything is read."""
    return [mt.RandSpatialCropSamplesd("image", (6, 6, 6), 2), mt.RandFlipd("image", prob=0.5), _Normal()]


def _shifted(value: Any) -> Any:
    return value + 1


class _Normal(mt.RandomizableTransform):  # type: ignore[misc]
    def __call__(self, data: Any) -> Any:
        return {**data, "normal": float(self.R.normal())}


PIPELINES = {"values": on_values, "tiles": in_tiles}


@pytest.fixture(autouse=True)
def _small_volumes_in_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(limits, "TILED_BYTES", 1000)
    yield
    set_determinism(None)


def dataset(folder: Path, make: Callable[[], list[Any]] = on_values) -> GDSDataset:
    return GDSDataset(items(), mt.Compose([mt.EnsureTyped("image"), *make()]), folder, "cpu", compression="lz4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of all items."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "TILED_BYTES", 1000)
        dataset(path).populate(progress=False)
    return path


def saved(state: Any) -> Any:
    """A state as it comes from a file that cannot run code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Numbers:
    """A sampler of one's own, over an older one, that draws in another way in each epoch."""

    def __init__(self, inner: Any) -> None:
        self.sampler, self.generator, self.epoch = inner, np.random.default_rng(7), 0

    def __iter__(self) -> Iterator[int]:
        turn = self.epoch + int(self.generator.integers(COUNT))
        return ((i + turn) % COUNT for i in self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


SETTINGS: dict[str, Settings] = {
    "in order": lambda d: {"batch_size": 2},
    "shuffled": lambda d: {"batch_size": 2, "shuffle": True},
    "dropped": lambda d: {"batch_size": 2, "shuffle": True, "drop_last": True},
    "one by one": lambda d: {"batch_size": None, "shuffle": True},
    "one record ahead": lambda d: {"batch_size": 2, "shuffle": True, "prefetch": 1},
    "its generator": lambda d: {"batch_size": 2, "shuffle": True, "generator": torch.Generator().manual_seed(9)},
    "weighted": lambda d: {"batch_size": 3, "sampler": WeightedRandomSampler([1.0, 2, 3, 4, 5], 8)},
    "drawn in pieces": lambda d: {
        "batch_size": 14,
        "sampler": RandomSampler(d, True, 34, generator=torch.Generator().manual_seed(2)),
    },
    "a subset": lambda d: {"batch_size": 2, "sampler": SubsetRandomSampler([4, 1, 3, 2])},
    "one of two ranks": lambda d: {"batch_size": 2, "sampler": DistributedSampler(d, 2, 1, seed=5)},
    "batches": lambda d: {"batch_sampler": [[0, 1, 2], [3], [4, 0]]},
    "drawn batches": lambda d: {
        "batch_sampler": BatchSampler(RandomSampler(d, generator=torch.Generator().manual_seed(2)), 3, False)
    },
    "one's own": lambda d: {"batch_size": 2, "sampler": Numbers(RandomSampler(d))},
}


def items_of(batch: Any) -> Any:
    """What is collated, without the identities of transforms, which no two pipelines share."""
    mt.utils.reset_ops_id(batch)
    return batch


def loader(data: Any, settings: Settings, seed: int) -> GDSDataLoader:
    set_determinism(seed)
    return GDSDataLoader(data, collate_fn=items_of, **settings(data))


def epoch(of: GDSDataLoader, number: int) -> Iterator[Any]:
    """The batches of an epoch, as a training script takes them."""
    for sampler in (of.sampler, of.batch_sampler):
        getattr(sampler, "set_epoch", lambda number: None)(number)
    return iter(of)


@pytest.mark.parametrize(
    ("pipeline", "settings"),
    [
        *(("values", name) for name in SETTINGS),
        *(("tiles", name) for name in ("shuffled", "one record ahead", "weighted")),
    ],
)
def test_every_batch_is_that_of_an_epoch_without_a_pause(
    pipeline: str, settings: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[Any] = []
    record = draws.record_item
    monkeypatch.setattr(draws, "record_item", lambda *args: ahead.append(args) or record(*args))

    def fresh(seed: int) -> GDSDataLoader:
        return loader(dataset(folder, PIPELINES[pipeline]), SETTINGS[settings], seed)

    whole = fresh(3)
    epochs = [list(epoch(whole, number)) for number in range(3)]
    length = len(epochs[1])
    assert length == len(whole)
    for taken in range(length + 1):
        first = fresh(3)
        list(epoch(first, 0))
        loop = epoch(first, 1)
        assert_same(list(islice(loop, taken)), epochs[1][:taken])
        state = saved(first.state_dict())
        del loop
        again = fresh(99)
        again.load_state_dict(state)
        assert len(again) == length
        if taken < length:
            assert_same(list(epoch(again, 1)), epochs[1][taken:])
        assert_same(list(epoch(again, 2)), epochs[2])
    assert bool(ahead) == (pipeline == "tiles")


def _rest(folder: Path, state: Any) -> list[Any]:
    limits.TILED_BYTES = 1000
    continued = loader(dataset(folder, in_tiles), SETTINGS["shuffled"], 1)
    continued.load_state_dict(torch.load(state, weights_only=True))
    return [list(continued), list(continued)]


def test_another_process_continues_the_epoch(folder: Path, tmp_path: Path, interpreter: Interpreter) -> None:
    whole = loader(dataset(folder, in_tiles), SETTINGS["shuffled"], 3)
    expected = [list(whole), list(whole)]
    first = loader(dataset(folder, in_tiles), SETTINGS["shuffled"], 3)
    next(iter(first))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    with interpreter.process() as process:
        got = process.call(_rest, folder, tmp_path / "state.pt")
    assert_same(got, [expected[0][1:], expected[1]])


def test_a_batch_that_ctrl_c_lost_counts_as_taken_once_the_loop_has_gone_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(loader(dataset(folder), SETTINGS["shuffled"], 3))
    first = loader(dataset(folder), SETTINGS["shuffled"], 3)
    loop = iter(first)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Place, "taken", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(loop)
    assert_same(next(loop), expected[1])
    again = loader(dataset(folder), SETTINGS["shuffled"], 99)
    again.load_state_dict(saved(first.state_dict()))
    assert_same(list(again), expected[2:])


def test_an_epoch_that_was_continued_can_be_continued_again(folder: Path) -> None:
    expected = list(loader(dataset(folder), SETTINGS["shuffled"], 3))
    got: list[Any] = []
    state = loader(dataset(folder), SETTINGS["shuffled"], 3).state_dict()
    for _ in expected:
        part = loader(dataset(folder), SETTINGS["shuffled"], 50)
        part.load_state_dict(saved(state))
        assert_same(part.state_dict(), state)
        loop = iter(part)
        assert_same(part.state_dict(), state)
        got.append(next(loop))
        state = part.state_dict()
        del loop
    assert_same(got, expected)


def test_what_training_draws_itself_goes_on_too(folder: Path) -> None:
    def train(of: GDSDataLoader, most: int | None = None) -> list[Any]:
        return [(batch, float(torch.rand(())), float(np.random.rand())) for batch in islice(of, most)]

    whole = loader(dataset(folder), SETTINGS["shuffled"], 3)
    expected = [train(whole), train(whole)]
    first = loader(dataset(folder), SETTINGS["shuffled"], 3)
    train(first, 2)
    state = first.state_dict()
    again = loader(dataset(folder), SETTINGS["shuffled"], 99)
    again.load_state_dict(saved(state))
    assert_same([train(again), train(again)], [expected[0][2:], expected[1]])


def test_a_sampler_need_not_be_told_its_epoch_again(folder: Path) -> None:
    first = loader(dataset(folder), SETTINGS["one of two ranks"], 3)
    expected = list(epoch(first, 4))
    loop = epoch(first, 4)
    next(loop)
    again = loader(dataset(folder), SETTINGS["one of two ranks"], 99)
    again.load_state_dict(first.state_dict())
    numbers = [[item["number"] for item in batch] for batch in again]
    assert numbers == [[item["number"] for item in batch] for batch in expected[1:]]
    assert again.sampler.epoch == 0, "which is the caller's"


def test_datasets_in_one_another(folder: Path) -> None:
    def fresh(seed: int) -> GDSDataLoader:
        one, other = dataset(folder), dataset(folder, in_tiles)
        return loader(ConcatDataset([one, Subset(other, [4, 2]), Subset(one, [1])]), SETTINGS["shuffled"], seed)

    expected = list(fresh(3))
    first = fresh(3)
    loop = iter(first)
    next(loop), next(loop)
    again = fresh(99)
    again.load_state_dict(saved(first.state_dict()))
    assert_same(list(again), expected[2:])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("of_monai", [False, True])
def test_loops_that_are_monais_are_continued_too(num_workers: int, of_monai: bool, folder: Path) -> None:
    def fresh(seed: int) -> GDSDataLoader:
        mine = dataset(folder)
        settings: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
        set_determinism(seed)
        return GDSDataLoader(
            Dataset(mine.data, mine.transform) if of_monai else mine,
            num_workers,
            shuffle=True,
            batch_size=2,
            collate_fn=items_of,
            **settings,
        )

    whole = fresh(3)
    expected = [list(whole), list(whole)]
    for taken in (0, 1, len(expected[0])):
        first = fresh(3)
        loop = iter(first)
        list(islice(loop, taken))
        state = saved(first.state_dict())
        del loop
        again = fresh(99)
        again.load_state_dict(state)
        if taken < len(expected[0]):
            assert_same(list(again), expected[0][taken:])
        assert_same(list(again), expected[1])


class _OfNumPy(mt.RandomizableTransform):  # type: ignore[misc]
    def __call__(self, n: int) -> tuple[int, float]:
        return n, np.random.rand()


def test_a_loop_of_monais_does_not_draw_from_numpy_twice() -> None:
    def loop() -> GDSDataLoader:
        return GDSDataLoader(Dataset(list(range(6)), _OfNumPy()), batch_size=1, collate_fn=list)

    np.random.seed(3)
    expected = list(loop())
    np.random.seed(3)
    begun = loop()
    batches = iter(begun)
    taken = [next(batches) for _ in range(2)]
    again = loop()
    again.load_state_dict(saved(begun.state_dict()))
    np.random.seed(99)
    assert taken + list(again) == expected


def test_a_loop_that_could_not_begin_does_not_lose_its_place(folder: Path) -> None:
    begun = GDSDataLoader(dataset(folder), batch_size=1)
    batches = iter(begun)
    next(batches), next(batches)
    lock = threading.Lock()  # which no pickle takes
    again = GDSDataLoader(
        dataset(folder),
        num_workers=1,
        multiprocessing_context="spawn",
        batch_size=1,
        collate_fn=lambda items: items.append(lock),
    )
    again.load_state_dict(begun.state_dict())
    with pytest.raises(ValueError, match="collate_fn"):
        next(iter(again))
    again.collate_fn = list
    again.multiprocessing_context = "fork"  # which starts at once
    assert len(list(again)) == COUNT - 2


def test_randomness_that_has_no_state(tmp_path: Path) -> None:
    class Drawn(mt.RandomizableTransform):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.system = random.SystemRandom()
            self.replaced: Any = random.Random(0)

        def __call__(self, data: Any) -> Any:
            self.replaced = "not a generator"
            return {**data, "drawn": self.system.random()}

    data = GDSDataset(items(), mt.Compose([mt.EnsureTyped("image"), Drawn()]), tmp_path / "cache", "cpu")
    first = GDSDataLoader(data, batch_size=1)
    loop = iter(first)
    next(loop)
    first.load_state_dict(saved(first.state_dict()))
    assert [int(batch["number"]) for batch in first] == [1, 2, 3, 4]


def test_a_dataset_without_transforms() -> None:
    def fresh(seed: int) -> GDSDataLoader:
        return loader(TensorDataset(torch.arange(9)), SETTINGS["shuffled"], seed)

    expected = list(fresh(3))
    first = fresh(3)
    list(islice(iter(first), 2))
    state = first.state_dict()
    again = fresh(99)
    again.load_state_dict(saved(state))
    assert_same(list(again), expected[2:])


def seen_by_lightning(
    shown: Callable[[Any], Any], checkpoints: Path, given: dict[str, Any], *callbacks: Any, **settings: Any
) -> tuple[list[Any], Any]:
    """What its training shows of its batches, and its trainer, which saves a checkpoint after each step."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Seen(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.seen: list[Any] = []

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen.append(shown(batch))
            return self.weight.square()

        def validation_step(self, batch: Any, index: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Seen()
    steps = ModelCheckpoint(checkpoints, "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, steps], **settings,
    )  # fmt: skip
    trainer.fit(model, weights_only=True, **given)
    return model.seen, trainer


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_lightning_continues_an_epoch(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="this machine has no Lightning")

    def shown(batch: Any) -> Any:
        return [(item["number"], item["normal"]) for item in batch]

    def fit(settings: str, seed: int, validates: bool, **given: Any) -> list[Any]:
        if validates:
            given["val_dataloaders"] = loader(dataset(folder), SETTINGS["shuffled"], seed)
        given["train_dataloaders"] = loader(dataset(folder), SETTINGS[settings], seed)
        return seen_by_lightning(shown, tmp_path / f"{settings} {seed}", given, max_epochs=3)[0]

    for settings, validates in (("shuffled", False), ("its generator", True), ("one of two ranks", False)):
        expected = fit(settings, 3, validates)
        batches = len(expected)
        assert batches in (6, 9)
        for step in range(batches // 3 - 1, batches):  # among them the last one of each epoch
            got = fit(settings, 50 + step, validates, ckpt_path=tmp_path / f"{settings} 3" / f"step={step}.ckpt")
            assert got == expected[step:]


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_lightning_continues_from_a_state_that_its_loader_was_given_before(folder: Path, tmp_path: Path) -> None:
    """Under DDP it makes another loader, with a sampler of its own. The state is used once."""
    pytest.importorskip("lightning", reason="this machine has no Lightning")

    def fit(of: GDSDataLoader, part: str) -> tuple[list[Any], Any]:
        given = {"train_dataloaders": of}
        return seen_by_lightning(
            lambda batch: [(item["number"], item["normal"]) for item in batch], tmp_path / part, given,
            max_epochs=1, strategy="ddp", devices=1,
        )  # fmt: skip

    def compare() -> None:
        expected, _ = fit(loader(dataset(folder), SETTINGS["shuffled"], 3), "whole")
        path = tmp_path / "whole" / "step=1.ckpt"
        (state,) = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        again = loader(dataset(folder), SETTINGS["shuffled"], 9)
        again.load_state_dict(state)
        rest, trainer = fit(again, "rest")
        assert trainer.train_dataloader is not again
        assert rest == expected[1:]
        assert len(fit(again, "another")[0]) == len(expected)

    in_child(compare)  # Lightning leaves a process group and variables of the environment


# Leaving early


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("prefetch", [1, 8])
def test_a_loop_that_is_left_leaves_what_one_without_reading_ahead_does(
    pipeline: str, prefetch: int, folder: Path
) -> None:
    for taken in range(4):
        set_determinism(3)
        plain = dataset(folder, PIPELINES[pipeline])
        theirs = DataLoader(Dataset(plain.data, plain.transform), batch_size=2, collate_fn=items_of)
        expected = list(islice(iter(theirs), taken)) + list(theirs)
        mine = loader(dataset(folder, PIPELINES[pipeline]), lambda d: {"batch_size": 2, "prefetch": prefetch}, 3)
        loop = iter(mine)
        got = list(islice(loop, taken))
        del loop
        got += list(mine)
        assert_same(got, expected)


def wait_for_the_thread() -> None:
    """Until the loop under way has made all that it makes ahead, and its thread has ended."""
    for thread in threading.enumerate():
        if thread.name == "monai-gds-loader":
            thread.join(20)


def test_leaving_behind_an_error_that_nobody_saw(folder: Path) -> None:
    class Fails(mt.RandomizableTransform):  # type: ignore[misc]
        def __call__(self, data: Any) -> Any:
            if data["number"] == 3 and self.R.rand() >= 0:
                raise OSError("no good")
            return data

    of = dataset(folder, lambda: [_Normal(), Fails()])
    mine = loader(of, lambda d: {"batch_size": 1}, 3)
    expected = [item["normal"] for (item,) in islice(iter(mine), 3)]
    for _ in range(2):
        of.transform.set_random_state(8)
        loop = iter(mine)
        seen = [next(loop)[0]["normal"] for _ in range(2)]
        wait_for_the_thread()  # it has failed
        del loop
        seen.append(next(iter(mine))[0]["normal"])
    of.transform.set_random_state(8)
    loop = iter(mine)
    assert [next(loop)[0]["normal"] for _ in range(3)] == seen != expected


def test_what_somebody_else_has_drawn_meanwhile_is_not_undone(folder: Path) -> None:
    of = dataset(folder, lambda: [_Normal()])
    mine = loader(of, lambda d: {"batch_size": 1, "sampler": [0, 1]}, 3)
    loop = iter(mine)
    next(loop)
    wait_for_the_thread()  # it has drawn for the second batch
    of.transform.set_random_state(8)
    expected = [of[0]["normal"] for _ in range(3)]
    of.transform.set_random_state(8)
    del loop
    assert [of[0]["normal"] for _ in range(3)] == expected


# What cannot be continued


def test_what_is_not_a_state_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"not a state of GDSDataLoader.state_dict\(\)"):
        loader(dataset(folder), SETTINGS["shuffled"], 3).load_state_dict({"_num_yielded": 3})


def test_the_state_of_another_pipeline_gives_the_items_and_a_warning(folder: Path) -> None:
    first = loader(dataset(folder), SETTINGS["shuffled"], 3)
    expected = [item["number"] for batch in first for item in batch]
    first = loader(dataset(folder), SETTINGS["shuffled"], 3)
    loop = iter(first)
    next(loop)
    again = loader(dataset(folder, in_tiles), SETTINGS["shuffled"], 9)
    again.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match=r"another pipeline: only one of the two has transforms\.\d") as told:
        found = [item["number"] for batch in again for item, _ in batch]
    assert [one.filename for one in told] == [__file__]
    assert found == expected[2:]
