"""``GDSDataLoader(stats=True)``: the seconds are where the work is, and nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch
from torch.utils.data import Sampler

from monai_gds import GDSDataLoader, GDSDataset
from monai_gds.base import stages
from monai_gds.loader.collate import collate
from monai_gds.loader.stats import Stats
from tests.same import assert_same

ITEMS = 6
SECONDS = 0.02


def slow() -> None:
    time.sleep(SECONDS)


class SlowLoading(mt.Transform):
    def __call__(self, item: Any) -> Any:
        slow()
        return item


class RandSlow(mt.RandomizableTransform):
    def __call__(self, item: Any) -> Any:
        slow()
        return item


class SlowSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(ITEMS):
            slow()
            yield index

    def __len__(self) -> int:
        return ITEMS


def slow_collate(items: Any) -> Any:
    slow()
    return collate(items)


def slow_hash(item: Any) -> bytes:
    slow()
    return str(item["n"]).encode()


Make = Callable[..., GDSDataset]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def dataset(*transforms: Any, side: int = 48, **settings: Any) -> GDSDataset:
        values = torch.arange(side).expand(ITEMS, 1, side, side, side) + torch.arange(ITEMS)[:, None, None, None, None]
        items = [{"image": volume.float(), "n": n} for n, volume in enumerate(values)]
        pipeline = mt.Compose([mt.EnsureTyped("image"), *transforms])
        return GDSDataset(items, pipeline, tmp_path / "cache", **{"device": "cpu", **settings})

    return dataset


def epoch(loader: GDSDataLoader, pause: float = 0.0) -> Stats:
    for _ in loader:
        time.sleep(pause)
    loader.dataset.flush()
    return loader.stats()


def stats_of(**changes: Any) -> Stats:
    plain: Mapping[str, Any] = {
        "seconds": 10.0, "waiting": 9.0, "stages": {"reading": 1.0}, "transforms": {}, "random_transforms": {},
        "saving_behind": 0.0, "batches": 5, "hits": 10, "computed": 0, "nbytes": 20_000_000_000,
    }  # fmt: skip
    return Stats(**{**plain, **changes})


# What is measured


@pytest.mark.parametrize(
    ("stage", "settings", "loading"),
    [
        ("sampling", {}, {"sampler": SlowSampler()}),
        ("keys", {"hash_func": slow_hash}, {}),
        ("collating", {}, {"collate_fn": slow_collate}),
    ],
)
def test_the_slow_stage_is_named(make: Make, stage: str, settings: Any, loading: Any) -> None:
    with make(**settings) as dataset:
        loader = GDSDataLoader(dataset, stats=True, **loading)
        epoch(loader)
        stats = epoch(loader)
    assert stats.stages[stage] >= SECONDS * (ITEMS - 1)  # the first index is drawn where the loop begins
    assert next(iter(stats.stages)) == stage
    assert stats.advice.lower().startswith(stage)


def test_random_transforms_are_named_one_by_one(make: Make) -> None:
    random = mt.Compose([RandSlow(), mt.RandFlipd("image", prob=1.0)])  # nested ones too
    with make(SlowLoading(), random) as dataset:
        first, second = (epoch(loader) for loader in [GDSDataLoader(dataset, stats=True)] * 2)
    assert (first.hits, first.computed, second.hits, second.computed) == (0, ITEMS, ITEMS, 0)
    assert first.transforms["SlowLoading"] >= SECONDS * ITEMS and first.saving_behind > 0
    assert set(first.transforms) == {"EnsureTyped", "SlowLoading"} and not second.transforms
    assert set(second.random_transforms) == {"RandSlow", "RandFlipd"}
    assert second.random_transforms["RandSlow"] >= SECONDS * ITEMS
    assert second.hit_rate == 1 and second.nbytes >= ITEMS * 4 * 48**3
    assert second.advice.startswith("Random transforms take") and "RandSlow alone" in second.advice


def test_the_stages_are_the_time_of_the_thread(make: Make) -> None:
    with make(SlowLoading(), RandSlow()) as dataset:
        stats = epoch(GDSDataLoader(dataset, stats=True))
    assert sum(stats.stages.values()) == pytest.approx(stats.seconds, rel=0.3)
    assert 0.8 * stats.seconds < stats.waiting <= stats.seconds


def test_a_slow_training_does_not_wait(make: Make) -> None:
    with make() as dataset:
        loader = GDSDataLoader(dataset, stats=True)
        epoch(loader)
        stats = epoch(loader, pause=0.1)
    assert stats.stages["waiting for the training"] > 0.2
    assert stats.waiting < 0.2 * stats.seconds


def test_crops_that_are_drawn_first_are_named(make: Make) -> None:
    pytest.importorskip("blosc2", reason="Blosc2 is not installed")
    crop = mt.RandSpatialCropSamplesd("image", (8, 8, 8), num_samples=2, random_size=False)
    with make(crop, RandSlow(), side=72, compression="lz4") as dataset:
        loader = GDSDataLoader(dataset, stats=True)
        epoch(loader)
        stats = epoch(loader)
    assert set(stats.random_transforms) == {"RandSpatialCropSamplesd", "RandSlow"}
    assert 0 < stats.nbytes < ITEMS * 4 * 72**3  # the tiles that the crops touch
    assert stats.stored >= sum(path.stat().st_size for path in Path(dataset.cache_dir).glob("*.safetensors"))


def test_workers_are_not_advised_twice(make: Make) -> None:
    with make(RandSlow()) as dataset:
        list(dataset)
        stats = epoch(GDSDataLoader(dataset, num_workers=1, stats=True))
    assert stats.in_workers and "more workers are faster" in stats.advice, stats.advice


def test_items_that_workers_of_a_cuda_target_compute_are_no_hits(make: Make) -> None:
    with make(SlowLoading()) as dataset:
        stats = epoch(GDSDataLoader(dataset, 2, stats=True, programs="check"))
    assert (stats.computed, stats.hits) == (ITEMS, 0)
    assert stats.stages["waiting for workers"] > SECONDS and stats.transforms["SlowLoading"] >= ITEMS * SECONDS


class RandSlowInNumpy(RandSlow):
    def __call__(self, item: Any) -> Any:
        return {**super().__call__(item), "image": torch.from_numpy(item["image"].numpy() + 1)}


def test_what_is_in_no_program_is_named(make: Make) -> None:
    with make(mt.RandFlipd("image", prob=0.5), RandSlowInNumpy()) as dataset:
        list(dataset)
        loader = GDSDataLoader(dataset, num_workers=1, stats=True, programs="check")
        for _ in range(2):  # in the second one it is not tried any more
            stats = epoch(loader)
        assert list(stats.on_values) == ["RandSlowInNumpy"]
        # Whatever a busy machine measured.
        taken = {"random transforms": 9.0}, {**stats.random_transforms, "RandSlowInNumpy": 8.0}
        slow = replace(stats, stages=taken[0], random_transforms=taken[1])
        assert "values of voxels" in slow.advice, slow.advice
        assert f"RandSlowInNumpy on: {stats.on_values['RandSlowInNumpy']}" in str(stats)
        assert stats.random_transforms["replay"] > 0
        assert f"on values: RandSlowInNumpy: {stats.on_values['RandSlowInNumpy']}" in dataset.explain(0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_served_the_bytes_is_told(make: Make, num_workers: int) -> None:
    with make() as dataset:
        list(dataset)
        dataset.flush()
        loader = GDSDataLoader(dataset, num_workers=num_workers, stats=True)
        first, second = epoch(loader), epoch(loader)
    volumes = ITEMS * 4 * 48**3
    assert (first.served["read into host memory"], second.served["mapped"]) == (volumes, volumes), "verified, and then"
    assert sum(second.served.values()) == second.nbytes
    assert f"bytes: {volumes / 1e9:.3f} GB mapped" in str(second)


def test_simulated_what_nvidia_fs_counted_meanwhile_stands_beside_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter([1 << 30, 3 << 30])
    monkeypatch.setattr(stages, "nvidia_fs_bytes", lambda: next(counted))
    with make() as dataset:
        list(dataset)
        stats = epoch(GDSDataLoader(dataset, stats=True))
    assert stats.nvidia_fs == 2 << 30
    assert stats.read_by.endswith("GB read into host memory, nvidia-fs counted 2.147 GB")


# Nothing else changes


@pytest.mark.parametrize("settings", [{}, {"compression": "lz4"}])
def test_batches_are_the_same(make: Make, settings: Any) -> None:
    if settings:
        pytest.importorskip("blosc2", reason="Blosc2 is not installed")
    crop = mt.RandSpatialCropSamplesd("image", (8, 8, 8), num_samples=2, random_size=False)
    random: list[Hashable] = [crop, mt.Compose([mt.RandFlipd("image", prob=0.5), mt.RandGaussianNoised("image")])]
    found = []
    for measures in (False, True):
        with make(*random, side=72, **settings) as dataset:
            for _ in range(2):  # misses, and hits
                torch.manual_seed(1)
                found.append(list(GDSDataLoader(dataset, shuffle=True, batch_size=2, stats=measures)))
                dataset.flush()
    for other in found[1:]:
        assert_same(found[0], other)


def test_lazy_pipelines_apply_their_operations_once(make: Make) -> None:
    random = [mt.RandRotated("image", range_x=0.4, prob=1.0), mt.RandFlipd("image", prob=1.0)]
    found = []
    for measures in (False, True):
        with make() as dataset:
            dataset.transform = mt.Compose([mt.EnsureTyped("image"), *random], lazy=True)
            torch.manual_seed(4)
            found.append([batch["image"].as_tensor() for batch in GDSDataLoader(dataset, stats=measures)])
    assert_same(*found)


def test_a_loop_that_is_left_ends_its_thread(make: Make) -> None:
    with make(RandSlow()) as dataset:
        loader = GDSDataLoader(dataset, stats=True)
        next(iter(loader))
        assert loader.stats().batches == 1
    assert not [t for t in threading.enumerate() if t.name == "monai-gds-loader"]
    assert not stages.watching()


def test_an_epoch_that_goes_on_is_measured(make: Make) -> None:
    with make(RandSlow()) as dataset:
        loader = GDSDataLoader(dataset, stats=True)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        batches.close()
        loader = GDSDataLoader(dataset, stats=True)
        loader.load_state_dict(state)
        assert epoch(loader).batches == ITEMS - 1
        assert loader.stats().random_transforms["RandSlow"] >= SECONDS * (ITEMS - 1)


@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("measures", [False, True])
def test_a_loader_that_lightning_makes_again_keeps_its_arguments(make: Make, in_hook: bool, measures: bool) -> None:
    lightning = pytest.importorskip("lightning", reason="this machine has no Lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.weight.square()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return loader()

    made = []

    def loader() -> GDSDataLoader:
        made.append(GDSDataLoader(dataset, stats=measures, repeats=3, buffer_size=4, prefetch=5, shuffle=True))
        return made[0]

    with make() as dataset:
        trainer = lightning.Trainer(
            max_epochs=1, overfit_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Model(), None if in_hook else loader())
        again = trainer.train_dataloader
        assert again is not made[0], "it has another sampler"
        assert (again.repeats, again.buffer_size, again.prefetch) == (3, 4, 5)
        if measures:
            assert again.stats().batches == 1, "which was given twice"
        else:
            with pytest.raises(RuntimeError, match="stats=True"):
                again.stats()


def test_nothing_is_measured_unless_asked(make: Make) -> None:
    with make() as dataset:
        loader = GDSDataLoader(dataset)
        list(loader)
        with pytest.raises(RuntimeError, match="stats=True"):
            loader.stats()
        with pytest.raises(RuntimeError, match="no epoch has begun"):
            GDSDataLoader(dataset, stats=True).stats()


# What is said


@pytest.mark.parametrize(
    ("cores", "gpu", "in_workers", "said"),
    [
        (2, False, False, "run them in workers (num_workers=2)."),
        (64, True, False, "run them in workers (num_workers=8), or run them on the GPU (device=None)."),
        (1, True, False, "run them on the GPU (device=None)."),
        (1, False, False, "this machine has one core and no GPU, so only fewer or cheaper ones take less time."),
        (2, False, True, "more workers are faster while processor cores are idle."),
    ],
)
def test_advice_is_of_what_this_machine_has(
    cores: int, gpu: bool, in_workers: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    stats = stats_of(
        waiting=1.0, stages={"random transforms": 1.0}, random_transforms={"RandSlow": 1.0}, in_workers=in_workers
    )
    assert stats.advice.partition(": ")[2] == said


@pytest.mark.parametrize(("found", "smaller"), [(object(), ", or smaller records: compression='zstd'."), (None, ".")])
def test_smaller_records_are_advised_where_they_can_be_made(
    found: object, smaller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monai_gds.loader.stats.find_spec", lambda _: found)
    advice = stats_of(waiting=1.0, stages={"reading": 1.0}).advice
    assert advice.endswith(f": a drive or folder that reads faster{smaller}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"waiting": 0.1}, "The training waits 1% of the epoch: a faster loader gains nothing."),
        ({"stages": {}}, "The training waits 90% of the epoch for MONAI's DataLoader, which is not measured."),
        (
            {"stages": {"reading": 3.0, "waiting for the training": 7.0}},
            "Reading takes 100% of the loader's time: a drive",
        ),
        ({"stages": {"keys": 3.0, "reading": 1.0}}, "Keys take 75% of the loader's time: CacheOptions(sources='once'"),
        (
            {"stages": {"random transforms": 8.0, "reading": 2.0}, "random_transforms": {"RandRotated": 6.0, "A": 2.0}},
            "Random transforms take 80% of the loader's time, RandRotated alone 60%: run them in workers",
        ),
        (  # in workers already
            {
                "stages": {"waiting for workers": 9.0, "random transforms": 8.0},
                "in_workers": True,
                "random_transforms": {"RandRotated": 8.0},
            },
            "Random transforms take 100% of the loader's and its workers' time, RandRotated alone 100%: more workers",
        ),
        (
            {
                "stages": {"random transforms": 8.0},
                "in_workers": True,
                "random_transforms": {"comparing": 6.0, "A": 2.0},
            },
            "Random transforms take 100% of the loader's and its workers' time, comparing alone 75%: only programs "
            "that are new are compared",
        ),
        (  # which cannot run there
            {
                "stages": {"random transforms": 8.0},
                "in_workers": True,
                "random_transforms": {"RandRotated": 8.0},
                "on_values": {"RandRotated": "it uses the values of voxels"},
            },
            "Random transforms take 100% of the loader's and its workers' time, RandRotated alone 100%: the loader's "
            "thread runs it, since it uses the values of voxels; programs='off' gives it to workers.",
        ),
    ],
)
def test_advice(changes: Any, said: str) -> None:
    assert stats_of(**changes).advice.startswith(said)


def test_a_table_and_json() -> None:
    stats = stats_of(
        stages={"random transforms": 8.0, "reading": 2.0}, random_transforms={"RandRotated": 6.0, "A": 2.0}
    )
    shown = str(stats)
    assert "10 hits and 0 computed items (100% hits), 20.000 GB read, 2.00 GB/s" in shown
    part = stats_of(stages={"reading": 2.0}, nbytes=10**9, stored=8 * 10**9, made={"RandAffined": 850 * 10**6})
    assert "1.000 of 8.000 GB read" in str(part)
    assert "RandAffined computes 85.0 MB per item on the CPU; given device=, it does so on the GPU" in str(part)
    assert [line.split()[0] for line in shown.splitlines()[2:6]] == ["random", "RandRotated", "A", "reading"]
    assert shown.endswith(stats.advice)
    assert stats.as_dict()["hit_rate"] == 1 and stats.as_dict()["stages"] == {"random transforms": 8.0, "reading": 2.0}
