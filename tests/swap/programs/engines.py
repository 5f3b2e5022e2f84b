"""Programs in which something else runs the loop: Ignite, Lightning, a bundle's configuration, Auto3DSeg, GANs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import monai.data as md
import monai.transforms as mt
import torch
from monai.bundle import ConfigParser, ConfigWorkflow
from monai.losses import DiceLoss

from tests.swap.programs.loops import KEYS, net, training, validation
from tests.swap.programs.table import Study, program


def _loaders(study: Study) -> tuple[Any, Any]:
    train = md.CacheDataset(study.items[:3], training(), progress=False)
    val = md.CacheDataset(study.items[3:], validation(), progress=False)
    return md.DataLoader(train, batch_size=1, shuffle=True), md.DataLoader(val)


@program("CacheDataset", "DataLoader", needs=("ignite",))
def ignite(study: Study) -> Iterator[Any]:
    """MONAI's engines on Ignite: `SupervisedTrainer`, `SupervisedEvaluator`, handlers."""
    from ignite.engine import Events
    from monai.engines import SupervisedEvaluator, SupervisedTrainer
    from monai.handlers import CheckpointSaver, MeanDice, ValidationHandler, from_engine

    train, val = _loaders(study)
    model, seen = net(), []
    post = mt.Compose([mt.AsDiscreted("pred", argmax=True, to_onehot=2), mt.AsDiscreted("label", to_onehot=2)])
    dice = MeanDice(include_background=False, output_transform=from_engine(["pred", "label"]))
    saver = CheckpointSaver(str(study.scratch), {"net": model}, save_key_metric=True)
    evaluator = SupervisedEvaluator(
        torch.device("cpu"), val, model, postprocessing=post, key_val_metric={"dice": dice}, val_handlers=[saver]
    )
    trainer = SupervisedTrainer(
        torch.device("cpu"), 2, train, model, torch.optim.Adam(model.parameters(), 1e-2),
        DiceLoss(to_onehot_y=True, softmax=True), train_handlers=[ValidationHandler(1, evaluator)],
    )  # fmt: skip
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output[0]["loss"]))
    trainer.run()
    yield seen
    yield evaluator.state.metrics
    yield list(model.state_dict().values())


@program("CacheDataset", "DataLoader", needs=("lightning",))
def lightning(study: Study) -> Iterator[Any]:
    """A `LightningModule` with its loaders, trained and validated."""
    import lightning as pl

    losses: list[Any] = []

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = net(), DiceLoss(to_onehot_y=True, softmax=True)

        def setup(self, stage: str) -> None:
            self.train_loader, self.val_loader = _loaders(study)

        def train_dataloader(self) -> Any:
            return self.train_loader

        def val_dataloader(self) -> Any:
            return self.val_loader

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

        def training_step(self, batch: Any, _: int) -> Any:
            value = self.loss(self.net(batch["image"]), batch["label"])
            losses.append(value.item())
            return value

        def validation_step(self, batch: Any, _: int) -> None:
            losses.append(self.loss(self.net(batch["image"]), batch["label"]).item())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet).fit(Net())
    yield losses


@program("CacheDataset", "DataLoader", needs=("ignite",))
def bundle(study: Study) -> Iterator[Any]:
    """A bundle's configuration, run by `ConfigParser`."""
    load = {"_target_": "LoadImaged", "keys": KEYS, "ensure_channel_first": True}
    crop = {"_target_": "RandSpatialCropd", "keys": KEYS, "roi_size": [16] * 3, "random_size": False}
    labels = {"_target_": "ThresholdIntensityd", "keys": "label", "threshold": 1, "above": False, "cval": 1}
    config = {
        "items": study.items,
        "net": {
            "_target_": "UNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": [4, 8],
            "strides": [2],
        },
        "train": {
            "preprocessing": {
                "_target_": "Compose",
                "transforms": [load, labels, {"_target_": "ScaleIntensityd", "keys": "image"}, crop],
            },
            "dataset": {
                "_target_": "CacheDataset", "data": "@items", "transform": "@train#preprocessing", "progress": False,
            },
            "loader": {"_target_": "DataLoader", "dataset": "@train#dataset", "batch_size": 2, "shuffle": True},
            "trainer": {
                "_target_": "SupervisedTrainer", "device": "$torch.device('cpu')", "max_epochs": 2,
                "train_data_loader": "@train#loader", "network": "@net",
                "optimizer": {"_target_": "torch.optim.Adam", "params": "$@net.parameters()", "lr": 0.01},
                "loss_function": {"_target_": "DiceLoss", "to_onehot_y": True, "softmax": True},
            },
        },
        "imports": ["$import torch"],
    }  # fmt: skip
    parser = ConfigParser(config)
    parser.parse()
    trainer = parser.get_parsed_content("train#trainer")
    trainer.run()
    yield trainer.state.output
    yield list(parser.get_parsed_content("net").state_dict().values())


@program("PersistentDataset", "DataLoader", needs=("ignite",))
def bundle_workflow(study: Study) -> Iterator[Any]:
    """A bundle's configuration in a file, run by `ConfigWorkflow`, with a cache on disk."""
    transforms = [
        {"_target_": "LoadImaged", "keys": KEYS, "ensure_channel_first": True},
        {"_target_": "ScaleIntensityd", "keys": KEYS},
        {"_target_": "RandSpatialCropd", "keys": KEYS, "roi_size": [16] * 3, "random_size": False},
    ]
    config = {
        "data": {
            "_target_": "PersistentDataset", "data": study.items, "cache_dir": str(study.scratch / "persistent"),
            "transform": {"_target_": "Compose", "transforms": transforms},
        },
        "net": {"_target_": "AutoEncoder", "spatial_dims": 3, "in_channels": 1, "out_channels": 1, "channels": [4],
                "strides": [2]},
        "trainer": {
            "_target_": "SupervisedTrainer", "device": "cpu", "max_epochs": 1, "network": "@net",
            "train_data_loader": {"_target_": "DataLoader", "dataset": "@data", "batch_size": 2, "shuffle": True},
            "optimizer": {"_target_": "torch.optim.Adam", "params": "$@net.parameters()"},
            "loss_function": {"_target_": "torch.nn.MSELoss"},
        },
        "initialize": ["$monai.utils.set_determinism(0)"],
        "run": ["$@trainer.run()", "$list(@net.state_dict().values())"],
        "imports": ["$import monai"],
    }  # fmt: skip
    (study.scratch / "train.json").write_text(json.dumps(config))
    workflow = ConfigWorkflow(str(study.scratch / "train.json"), workflow_type=None, logging_file=False)
    workflow.initialize()
    yield workflow.run()[1]


@program("CacheDataset", "DataLoader", needs=("ignite",))
def gan(study: Study) -> Iterator[Any]:
    """`GanTrainer`: a generator and a discriminator, in turns."""
    from monai.engines import GanTrainer
    from monai.networks.nets import Discriminator, Generator

    pipeline = mt.Compose([*training().transforms, mt.SelectItemsd("image")])
    data = md.CacheDataset(study.items, pipeline, progress=False)
    generator = Generator((4,), (4, 4, 4, 4), (4, 1), (2, 2), dropout=None)
    critic = Discriminator((1, 16, 16, 16), (4,), (2,))
    trainer = GanTrainer(
        torch.device("cpu"), 2, md.DataLoader(data, batch_size=2), generator,
        torch.optim.Adam(generator.parameters()), lambda fake: -critic(fake).mean(),
        critic, torch.optim.Adam(critic.parameters()),
        lambda fake, real: critic(fake.detach()).mean() - critic(real).mean(), latent_shape=4,
        d_prepare_batch=lambda batch, device, _: batch["image"].to(device),
    )  # fmt: skip
    trainer.run()
    yield [trainer.state.output[key] for key in ("reals", "g_loss", "d_loss")]
    yield [*generator.state_dict().values(), *critic.state_dict().values()]


@program("Dataset", "DataLoader", needs=("yaml",))
def data_analyzer(study: Study) -> Iterator[Any]:
    """Auto3DSeg's analysis of the data, `DataAnalyzer`."""
    from monai.apps.auto3dseg import DataAnalyzer

    found = DataAnalyzer(
        {"training": study.items}, str(study.data), str(study.scratch / "stats.yaml"), worker=0, device="cpu"
    )
    yield found.get_all_case_stats()


@program("CacheDataset", "DataLoader")
def summary(study: Study) -> Iterator[Any]:
    """Spacing and intensities of the data, with `DatasetSummary`."""
    data = md.CacheDataset(study.items, mt.Compose(validation().transforms[:1]), progress=False)
    found = md.DatasetSummary(data, num_workers=0)
    found.calculate_statistics()
    yield (found.get_target_spacing(), found.data_mean, found.data_std, found.data_max, found.data_min)


@program("CacheDataset", "DataLoader", needs=("ignite",))
def learning_rate(study: Study) -> Iterator[Any]:
    """A search for the learning rate, with `LearningRateFinder`."""
    from monai.optimizers import LearningRateFinder

    train, _ = _loaders(study)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    finder = LearningRateFinder(model, optimizer, DiceLoss(to_onehot_y=True, softmax=True), verbose=False)
    finder.range_test(train, end_lr=1.0, num_iter=5)
    yield finder.get_lrs_and_losses()
