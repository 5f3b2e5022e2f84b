"""The commands ``monai-gds bench …``: arguments and output. The modules of :mod:`monai_gds.bench` measure."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from monai_gds.base.console import progress
from monai_gds.command import options
from monai_gds.command.bench_loaders import loaders
from monai_gds.command.bench_tensor import app as tensor_app
from monai_gds.command.bench_training import training
from monai_gds.command.options import DatasetArguments, JsonOption, dataset_from

app = options.app("Measure this machine and your pipeline.", "bench dataset --function training:make_dataset")
app.command("loaders", epilog="Example: monai-gds bench loaders --make 4000 --crop 224")(loaders)
app.command("training", epilog="Example: monai-gds bench training --heavy --json heavy.json")(training)
app.add_typer(tensor_app, name="tensor")


@app.command("dataset", epilog="Example: monai-gds bench dataset --function training:make_dataset fold=3 --items 16")
def dataset(
    function: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Your function, which returns a GDSDataset.")
    ],
    arguments: DatasetArguments = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder on the drive to measure; default: your dataset's cache_dir, or the temporary folder.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Measure the first items of the dataset, this many.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Timed epochs of each dataset.")] = 7,
    batch_size: Annotated[int, typer.Option(min=1, help="Items in a batch.")] = 1,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop each dataset's files from the page cache before each of its epochs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare cached epochs over your pipeline with those of MONAI's datasets.

    GDSDataset has the settings of your dataset, and all of them start with
    empty caches. CacheDataset keeps its items in memory. The datasets take
    turns, epoch by epoch. Every batch is counted and copied to the device;
    every byte is compared once with the result of the transforms. With --cold,
    a column shows whose files were in the page cache anyway.
    """
    own = dataset_from(function, arguments or [])
    from monai_gds.bench.own_pipeline import beside_others
    from monai_gds.bench.report import emit, machine

    drive = cache_dir or own.cache_dir
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=drive) as folder, progress() as bars:
        report = beside_others(own, Path(folder), items, batch_size, repeats, cold, bars)
    emit([report], as_json=as_json, about={**machine(own.device), "batch size": batch_size})
