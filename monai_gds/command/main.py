"""The command ``monai-gds``: arguments, output, exit codes. The work is done in the layers below.

Exit codes: 0 done, 1 the work failed or found damage, 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import monai_gds
from monai_gds.base.console import say, say_traceback, sentence, stderr, stdout
from monai_gds.command.bench import app as bench_app
from monai_gds.command.blockmap import app as blockmap_app
from monai_gds.command.cache import app as cache_app
from monai_gds.command.doctor import app as doctor_app
from monai_gds.command.options import PACKAGE, BackendOption, DeviceOption, UsersError
from monai_gds.command.pack import app as pack_app
from monai_gds.command.profile import app as profile_app
from monai_gds.command.run import app as run_app
from monai_gds.errors import MonaiGdsError, causes

#: Where the frames between the command line and the work come from.
_AROUND = (*(str(Path(one).parent) for one in (__file__, typer.__file__, importlib.__file__)), "<frozen importlib")


class _Stoppable(TyperGroup):
    """Prints a line when Ctrl-C stops it, which Typer does not, with the arguments of the KeyboardInterrupt.

    Where a command of a group is called without the group, the error names both. Typer corrects misspelt names.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        found = [f"'{group} {name}'" for group, one in self.commands.items() if name in getattr(one, "commands", ())]
        if found and name not in self.commands:
            ctx.fail(f"No such command {name!r}. Did you mean {' or '.join(found)}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as e:
            say(": ".join(["monai-gds: stopped", *map(str, e.args)]), stderr)
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
app.add_typer(profile_app)
app.add_typer(run_app)


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
    """Options that come before a command."""


def _voxels(size: tuple[int, int, int]) -> tuple[int, int, int]:
    if min(size) < 1:
        raise typer.BadParameter(f"{size[0]} x {size[1]} x {size[2]} is not a volume: each side takes 1 voxel or more")
    return size


@app.command(epilog="Example: monai-gds demo --volumes 8 --size 192 192 128")
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with imagesTr/ and labelsTr/ instead of made-up volumes.", exists=True, file_okay=False
        ),
    ] = None,
    volumes: Annotated[int, typer.Option(min=1, help="Number of volumes to make, or to take from --data.")] = 6,
    size: Annotated[
        tuple[int, int, int], typer.Option(help="Size of a made-up volume, in voxels.", callback=_voxels)
    ] = (160, 160, 96),
    crop: Annotated[
        tuple[int, int, int], typer.Option(help="Size at the end of the pipeline, in voxels.", callback=_voxels)
    ] = (128, 128, 96),
    epochs: Annotated[
        int, typer.Option(min=2, help="Epochs with rotation and zoom; the first one fills the caches.")
    ] = 6,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
    keep: Annotated[Path | None, typer.Option(help="Keep volumes and caches in this folder.", file_okay=False)] = None,
) -> None:
    """Make volumes, run epochs over them with GDSDataset and MONAI's datasets, and compare times and volumes.

    The datasets take turns, epoch by epoch, under the same random numbers.
    PersistentDataset "+ meta" (track_meta=True, weights_only=False) is the one
    that keeps metadata, as GDSDataset does. To limit memory takes root, so that
    is `python -m tools.bench memory`, in a clone.
    """
    from monai_gds.bench import demo as job
    from monai_gds.bench.made_up import find_pairs, write_volumes

    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monai-gds-demo-")))
        folder.mkdir(parents=True, exist_ok=True)
        if data is not None:
            items = find_pairs(data)[:volumes]
        else:
            with stdout.status(f"writing {volumes} volumes of {size[0]} x {size[1]} x {size[2]} voxels…"):
                items = write_volumes(folder / "volumes", volumes, size)
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cache-", dir=folder)))
        job.run(items, cache, size=crop, epochs=epochs, device=device, backend=backend)


def main() -> None:
    """Entry point. Expected errors become one line and exit code 1, those of the user's code a short traceback."""
    try:
        app(prog_name="monai-gds")  # also for python -m monai_gds
    except (MonaiGdsError, OSError, ValueError, ImportError) as e:
        say(f"monai-gds: {sentence(e)}", stderr)
        sys.exit(1)
    except Exception as e:
        error = (isinstance(e, UsersError) and e.__cause__) or e
        say_traceback(error, (*_AROUND, PACKAGE) if _by_a_transform(error) else _AROUND)
        sys.exit(1)


def _by_a_transform(error: BaseException) -> bool:
    """Whether a transform raised the error, or its cause. The frames of this package tell its author nothing then."""
    frames = [frame for one in causes(error, contexts=True) for frame in traceback.extract_tb(one.__traceback__)]
    return any("/monai/transforms/" in frame.filename for frame in frames)
