"""The command ``monai-gds bench``: arguments and output. The other modules of this folder measure."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from monai_gds.bench.dataset_cli import app as dataset_app
from monai_gds.bench.imagenet_cli import app as imagenet_app
from monai_gds.bench.tensor_cli import app as tensor_app
from monai_gds.command.options import JsonOption, PlotOption

app = typer.Typer(
    no_args_is_help=True,
    help="Compare with the alternatives on this machine.",
    epilog="Example: monai-gds bench dataset --only volumes",
)
app.add_typer(dataset_app)
app.add_typer(imagenet_app)
app.add_typer(tensor_app, name="tensor")


@app.command("blocks", epilog="Example: monai-gds bench blocks /nvme")
def blocks(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="A folder on the disk to measure; ext4 or XFS.")
    ],
    files: Annotated[int, typer.Option(min=1, help="Number of files.")] = 4000,
    nbytes: Annotated[int, typer.Option(min=1, help="Mean size of a file, in bytes.")] = 116_000,
    batch: Annotated[int, typer.Option(min=1, help="Files read together.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each method.")] = 5,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Read many small files by their blocks: xnvme-block against threads with O_DIRECT, and buffered reads."""
    from monai_gds.bench.report import emit, machine
    from monai_gds.bench.small_files import SmallFiles, describe_block_map, measure

    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=folder) as made:
        report = measure(SmallFiles(Path(made), files, nbytes, batch, repeats))
        about = {**machine(), **describe_block_map(Path(made))}
    emit([report], as_json=as_json, plot=plot, about=about)
