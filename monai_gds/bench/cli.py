"""The command ``monai-gds bench``: arguments and printing; the measuring is done in the modules beside this one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from monai_gds.bench.imagenet_cli import app as imagenet_app
from monai_gds.bench.tensor_cli import app as tensor_app
from monai_gds.terminal import DeviceOption, JsonOption, PlotOption, progress

app = typer.Typer(
    no_args_is_help=True,
    help="Measure, beside the peers, on this machine.",
    epilog="Example: monai-gds bench dataset --only volumes",
)
app.add_typer(imagenet_app)
app.add_typer(tensor_app, name="tensor")


@app.callback()
def options() -> None:
    """Measure, beside the peers, on this machine."""


@app.command("dataset", epilog="Example: monai-gds bench dataset --items 16 --side 210")
def dataset(
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder on the drive to measure; default: the system's temporary one.", exists=True, file_okay=False
        ),
    ] = None,
    device: DeviceOption = None,
    items: Annotated[int, typer.Option(min=1, help="How many items of two float32 volumes.")] = 6,
    side: Annotated[int, typer.Option(min=8, help="Voxels along each side of a volume.")] = 235,
    repeats: Annotated[int, typer.Option(min=1, help="Epochs of each peer that count.")] = 7,
    batch_size: Annotated[int, typer.Option(min=1, help="Items a batch.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="Of volumes, crops, hits, first: only these; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Cached epochs, hits and the first epoch: GDSDataset beside MONAI's datasets."""
    from monai_gds.bench import dataset as bench
    from monai_gds.bench.report import emit, machine
    from monai_gds.storage import resolve_device

    known = ("volumes", "crops", "hits", "first")
    wanted = only or list(known)
    for name in wanted:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--only")
    target = resolve_device(device)
    reports = []
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=cache_dir) as folder, progress() as bars:

        def settings(name: str, crops: int | None = None) -> bench.Settings:
            return bench.Settings(Path(folder) / name, target, items, side, repeats, batch_size, crops)

        if "volumes" in wanted:
            reports.append(bench.epochs(settings("volumes"), bars))
        if "crops" in wanted:
            reports.append(bench.epochs(settings("volumes", crops=min(96, side)), bars))
        if "hits" in wanted:
            reports += [bench.hits(settings("hits"), kind) for kind in ("plain", "nifti")]
        if "first" in wanted:
            reports.append(bench.first_epoch(settings("first")))
    emit(reports, as_json=as_json, plot=plot, about={**machine(target), "batch size": batch_size})


@app.command("blocks", epilog="Example: monai-gds bench blocks /nvme")
def blocks(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="On ext4 or XFS, on the disk to measure.")
    ],
    files: Annotated[int, typer.Option(min=1, help="How many.")] = 4000,
    nbytes: Annotated[int, typer.Option(min=1, help="Mean bytes of a file.")] = 116_000,
    batch: Annotated[int, typer.Option(min=1, help="Files read together.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Passes of each peer that count.")] = 5,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Many small files by their blocks: xnvme-block beside threads over O_DIRECT preads, and buffered reads."""
    from monai_gds.bench import blocks as bench
    from monai_gds.bench.report import emit, machine

    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=folder) as made:
        settings = bench.Settings(Path(made), files, nbytes, batch, repeats)
        report = bench.measure(settings)
        about = {**machine(), "map look-up": f"{bench.look_up(settings) * 1e6:.2f} µs"}
    emit([report], as_json=as_json, plot=plot, about=about)
