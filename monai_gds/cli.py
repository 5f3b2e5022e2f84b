"""The command ``monai-gds``: parses arguments, prints, sets the exit code. The work is done elsewhere.

Exit codes: 0 done, 1 the work failed or found damage, 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import monai_gds
from monai_gds.bench.cli import app as bench_app
from monai_gds.blockmap_cli import app as blockmap_app
from monai_gds.cache_cli import app as cache_app
from monai_gds.doctor.cli import app as doctor_app
from monai_gds.errors import MonaiGdsError
from monai_gds.pack_cli import app as pack_app
from monai_gds.terminal import BackendOption, DeviceOption, console, errors, in_words, say


class _Stoppable(TyperGroup):
    """Says that it was stopped: Typer ends on Ctrl-C without a word. What a KeyboardInterrupt says itself is added."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as e:
            say(": ".join(["monai-gds: stopped", *map(str, e.args)]), errors)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Stoppable,
    no_args_is_help=True,
    help="Cached MONAI datasets at the speed of the drive and the link.",
    epilog="Example: monai-gds doctor",
)
app.add_typer(doctor_app)
app.add_typer(cache_app, name="cache")
app.add_typer(blockmap_app, name="blockmap")
app.add_typer(bench_app, name="bench")
app.add_typer(pack_app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"monai-gds {monai_gds.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Takes the options that come before a command."""


def _voxels(size: tuple[int, int, int]) -> tuple[int, int, int]:
    if min(size) < 1:
        raise typer.BadParameter(f"{size[0]} x {size[1]} x {size[2]} is not a volume: each side takes 1 voxel or more")
    return size


@app.command(epilog="Example: monai-gds demo --volumes 8 --size 192 192 128")
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with imagesTr/ and labelsTr/ in place of made-up volumes.", exists=True, file_okay=False
        ),
    ] = None,
    volumes: Annotated[int, typer.Option(min=1, help="How many volumes to make, or to take from --data.")] = 6,
    size: Annotated[tuple[int, int, int], typer.Option(help="Voxels of a made-up volume.", callback=_voxels)] = (
        160,
        160,
        96,
    ),
    crop: Annotated[tuple[int, int, int], typer.Option(help="Voxels at the end of the pipeline.", callback=_voxels)] = (
        128,
        128,
        96,
    ),
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of each dataset; the first one fills its cache.")] = 4,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
    keep: Annotated[
        Path | None, typer.Option(help="A folder for volumes and caches, kept afterwards.", file_okay=False)
    ] = None,
) -> None:
    """Make volumes, run epochs over them with GDSDataset and PersistentDataset, and compare times and volumes."""
    from monai_gds import demo as job
    from monai_gds.synthetic import find_pairs, write_volumes

    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monai-gds-demo-")))
        folder.mkdir(parents=True, exist_ok=True)
        if data is not None:
            items = find_pairs(data)[:volumes]
        else:
            with console.status(f"writing {volumes} volumes of {size[0]} x {size[1]} x {size[2]} voxels…"):
                items = write_volumes(folder / "volumes", volumes, size)
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cache-", dir=folder)))
        same = job.run(items, cache, size=crop, epochs=epochs, device=device, backend=backend, console=console)
    raise typer.Exit(0 if same else 1)


def main() -> None:
    """Entry point: errors of this package and of the system end as one line and exit code 1, not as a traceback."""
    try:
        app(prog_name="monai-gds")  # also when it is run as python -m monai_gds
    except (MonaiGdsError, OSError, ValueError, ImportError) as e:
        say(f"monai-gds: {in_words(e)}", errors)
        sys.exit(1)
