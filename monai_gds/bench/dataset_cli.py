"""The command ``monai-gds bench dataset``: arguments and output. The other modules of this folder measure."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monai_gds.base.console import progress
from monai_gds.command.options import DatasetArguments, DeviceOption, JsonOption, PlotOption, dataset_from, one_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from monai_gds.bench.report import Report
    from monai_gds.bench.workloads import Workload

__all__ = ["app"]

app = typer.Typer()

#: The values of ``--only``, in the order they run: populate forks, so it must precede any use of CUDA.
_WORKLOADS = ("populate", "volumes", "crops", "tiles", "hits", "small", "augment", "first", "memory", "busy")

#: The default of ``--only``.
_USUAL = ("volumes", "crops", "hits", "first")


@app.command("dataset", epilog="Example: monai-gds bench dataset --items 16 --side 210 --loader --plot epochs.png")
def dataset(
    arguments: DatasetArguments = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder on the drive to measure; default: the temporary folder, or your dataset's cache_dir.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    device: DeviceOption = None,
    items: Annotated[int, typer.Option(min=1, help="Number of items, of two float32 volumes each.")] = 6,
    side: Annotated[int, typer.Option(min=8, help="Voxels along each side of a volume.")] = 235,
    records: Annotated[int, typer.Option(min=1, help="Number of small records.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Timed epochs of each dataset.")] = 7,
    batch_size: Annotated[int, typer.Option(min=1, help="Items in a batch; `small` always takes 256.")] = 1,
    loader: Annotated[bool, typer.Option("--loader", help="Also measure GDSDataset through GDSDataLoader.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop each dataset's files from the page cache before each of its epochs.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_WORKLOADS)}; may be repeated. Default: {', '.join(_USUAL)}."),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Measure the first --items of the GDSDataset that your function returns, in place of made-up volumes.",
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Compare GDSDataset with MONAI's datasets: cached epochs, hits, the first epoch, filling, memory.

    \b
    volumes   epochs over whole volumes
    crops     epochs over 4 random crops of 96³ from each volume
    tiles     compressed records of CT, MRI and noise: epochs over whole volumes
              and over 4 random crops of 96³, also as nnU-Net does it
    hits      items of 64 kB, one by one, without a loader
    small     many records of 64 kB, batch 256: plain, and NIfTI MetaTensors
    augment   epochs with random transforms that keep processors busy, in
              worker processes, against PersistentDataset with as many
    first     the epoch that fills the cache, and what saving adds to it
    populate  filling the cache ahead, with one process and more
    memory    20 epochs through GDSDataLoader, in a separate process
    busy      epochs over 8 items of 2 MB, while other processes use the
              processors, too

    With --function, GDSDataset has the settings of your dataset, and all of
    them start with empty caches. CacheDataset keeps its items in memory.

    The datasets take turns, epoch by epoch, and so do the machine's limits:
    copy to the device, page cache, disk. Every batch is counted and copied to
    the device; every byte is compared once with the result of the transforms.
    With --cold, a column shows whose files were in the page cache anyway; with
    --cold and --loader, GDSDataset also reads past the page cache.
    """
    one_of(_WORKLOADS, only or [], "--only")
    if function is None and arguments:
        raise typer.BadParameter("these are arguments of --function: name it", param_hint="KEY=VALUE")
    if function is not None and (only or device):
        raise typer.BadParameter("goes without --only and --device: the function decides", param_hint="--function")
    own = None if function is None else dataset_from(function, arguments or [])
    from monai_gds.bench.own_pipeline import beside_others
    from monai_gds.bench.report import emit, machine
    from monai_gds.bench.workloads import Workload
    from monai_gds.storage import resolve_device

    target = resolve_device(device) if own is None else own.device
    drive = cache_dir or (None if own is None else own.cache_dir)
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=drive) as folder, progress() as bars:
        work = Workload(Path(folder), target, items, side, repeats, batch_size, records, loader, cold)
        if own is None:
            measure = _measurements(work, bars)
            reports = [report for name in _WORKLOADS if name in (only or _USUAL) for report in measure[name]()]
        else:
            reports = [beside_others(own, Path(folder), items, batch_size, repeats, cold, bars)]
    emit(reports, as_json=as_json, plot=plot, about={**machine(target), "batch size": batch_size})


def _measurements(work: Workload, bars: Progress) -> dict[str, Callable[[], list[Report]]]:
    from monai_gds.bench import first_epoch, memory, tiles, workloads

    return {
        "populate": lambda: [first_epoch.filling(work, bars)],
        "volumes": lambda: [workloads.epochs(work, None, bars)],
        "crops": lambda: [workloads.epochs(work, min(96, work.side), bars)],
        "tiles": lambda: tiles.tiles(work, bars),
        "hits": lambda: [workloads.hits(work, nifti, bars) for nifti in (False, True)],
        "small": lambda: [workloads.small(work, nifti, bars) for nifti in (False, True)],
        "augment": lambda: [
            workloads.augmentation(work, seconds, crop, bars)
            for seconds, crop in ((0.1, True), (0.01, True), (0.01, False))
        ],
        "first": lambda: [first_epoch.medium_items(work, bars), first_epoch.large_items(work, bars)],
        "memory": lambda: memory.memory(work),
        "busy": lambda: [workloads.busy(work, bars)],
    }
