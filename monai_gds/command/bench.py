"""The commands ``monai-gds bench …``: arguments and output. The modules of :mod:`monai_gds.bench` measure."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from monai_gds.base import cores
from monai_gds.base.console import progress, say, stderr
from monai_gds.command import options
from monai_gds.command.bench_loaders import loaders
from monai_gds.command.bench_tensor import app as tensor_app
from monai_gds.command.options import DatasetArguments, JsonOption, dataset_from

app = options.app("Measure this machine and your pipeline.", "bench dataset --function training:make_dataset")
app.command("loaders", epilog="Example: monai-gds bench loaders --make 4000 --crop 224")(loaders)
app.add_typer(tensor_app, name="tensor")

_ShapeOption = Annotated[
    tuple[int, int, int] | None,
    typer.Option(help="Voxels of each volume; default: 256 256 192, and on a CPU 96 96 64.", show_default=False),
]


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
    empty caches. CacheDataset keeps its items in memory, and PersistentDataset
    "+ meta" (track_meta=True, weights_only=False) their metadata. The datasets
    take turns, epoch by epoch. Every batch is counted and copied to the device;
    every byte is compared once with the result of the transforms. With --cold,
    a column shows whose files were in the page cache anyway.
    """
    own = dataset_from(function, arguments or [])
    from monai_gds.bench.comparison import busy
    from monai_gds.bench.own_pipeline import beside_others
    from monai_gds.bench.report import emit, machine

    drive, warning = cache_dir or own.cache_dir, busy()  # now: these epochs are work, too
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=drive) as folder, progress() as bars:
        report = beside_others(own, Path(folder), items, batch_size, repeats, cold, bars)
    if warning:
        say(warning, stderr)
    emit([report], as_json=as_json, about={**machine(own.device), "batch size": batch_size})


@app.command("training", epilog="Example: monai-gds bench training --heavy --json heavy.json")
def training(
    volumes: Annotated[int | None, typer.Option(min=2, help="Made-up volumes; default: 48, on a CPU 8.")] = None,
    shape: _ShapeOption = None,
    heavy: Annotated[bool, typer.Option("--heavy", help="Rotate, scale and smooth each crop, too.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Train with whole volumes instead of crops.")] = False,
    numpy: Annotated[bool, typer.Option("--numpy", help="Let the pipeline end with a transform in NumPy.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop each peer's files from the page cache before each of its epochs.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, though there is a GPU.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: 8, or one per core.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each peer after its first.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Only the peers whose names hold this text; may be repeated.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="For volumes, which stay, and caches; default: a temporary folder.", file_okay=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write JSON into this file.", dir_okay=False)
    ] = None,
) -> None:
    """Train MONAI's UNet with made-up volumes, fed in every way.

    A first epoch fills each peer's cache. The peers then take turns, epoch by
    epoch. Each epoch is divided by one of the same training that never waits,
    because it gets one batch again and again.
    """
    from monai_gds.bench import training as job
    from monai_gds.bench.feeds import PEERS
    from monai_gds.bench.made_up import write_volumes
    from monai_gds.bench.report import emit, machine
    from monai_gds.bench.segmentation import Training
    from monai_gds.storage import resolve_device

    device = resolve_device("cpu" if cpu else None)
    on_gpu = device.type == "cuda"
    size = shape or ((256, 256, 192) if on_gpu else (96, 96, 64))
    if any(side < 32 or side % 8 for side in size):
        raise typer.BadParameter("each side takes a multiple of 8 voxels, and 32 or more", param_hint="--shape")
    names = [name for name in PEERS if not only or any(text.lower() in name.lower() for text in only)]
    if missing := [text for text in only or () if not any(text.lower() in name.lower() for name in PEERS)]:
        raise typer.BadParameter(f"{missing[0]!r} is in none of: {'; '.join(PEERS)}", param_hint="--only")
    count, used = volumes or (48 if on_gpu else 8), workers or min(8, cores.usable())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # After Ctrl-C a peer's worker may still be writing.
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=folder, ignore_cleanup_errors=True) as temporary:
        with stderr.status(f"writing {count} volumes…"):
            items = write_volumes((folder or Path(temporary)) / "x".join(map(str, size)), count, size)
        what = Training(items, size, device, used, heavy, whole, numpy)
        with progress() as bars:
            report = job.compare(what, Path(temporary), names, epochs, cold, bars)
    emit([report], as_json=json_file or False, about={**machine(device), "workers": used})
