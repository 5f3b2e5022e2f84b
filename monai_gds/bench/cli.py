"""The command ``monai-gds bench``: arguments and printing; the measuring is done in the modules beside this one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from monai_gds.bench.dataset_cli import app as dataset_app
from monai_gds.bench.imagenet_cli import app as imagenet_app
from monai_gds.bench.tensor_cli import app as tensor_app
from monai_gds.terminal import JsonOption, PlotOption

app = typer.Typer(
    no_args_is_help=True,
    help="Measure, beside the peers, on this machine.",
    epilog="Example: monai-gds bench dataset --only volumes",
)
app.add_typer(dataset_app)
app.add_typer(imagenet_app)
app.add_typer(tensor_app, name="tensor")


@app.callback()
def options() -> None:
    """Measure, beside the peers, on this machine."""


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
        about = {**machine(), **bench.block_map(settings)}
    emit([report], as_json=as_json, plot=plot, about=about)
