"""The command ``monai-gds``: parses arguments, prints, sets the exit code. The work is done elsewhere.

Exit codes: 0 done, 1 the work failed or found damage, 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import monai_gds
from monai_gds.bench.cli import app as bench_app
from monai_gds.blockmap_cli import app as blockmap_app
from monai_gds.doctor.cli import app as doctor_app
from monai_gds.errors import MonaiGdsError
from monai_gds.pack_cli import app as pack_app
from monai_gds.terminal import BackendOption, DeviceOption, console, errors, in_words, progress_bar, say

if TYPE_CHECKING:
    from monai_gds.cache.upkeep import Found
    from monai_gds.dataset import GDSDataset


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
cache_app = typer.Typer(
    no_args_is_help=True,
    help="List, verify, prune and fill cache directories.",
    epilog="Example: monai-gds cache ls /nvme/cache",
)

CacheDirectory = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The cache directory.")]

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


@cache_app.command("ls", epilog="Example: monai-gds cache ls /nvme/cache")
def cache_ls(directory: CacheDirectory) -> None:
    """List the records of a cache directory: the pipeline that made each, when, its size, tensors and sources.

    At the end there is one line for each pipeline. `prune --pipeline` deletes the records of one that you gave up.
    """
    from monai_gds.cache import upkeep

    # Lines and no table: a table would cut or fold the names where the terminal is narrow.
    line = "{:<44}  {:<8}  {:<16} {:>7}  {}".format
    say(line("record", "pipeline", "made", "MB", "tensors from sources"))
    pipelines: dict[str, list[Found]] = {}
    for found in upkeep.survey(directory):
        pipeline = "?" if found.problem else found.pipeline[: upkeep.SHOWN] or "-"
        pipelines.setdefault(pipeline, []).append(found)
        tensors = ", ".join(f"{name} {tuple(e.shape)} {str(e.dtype)[6:]}" for name, e in found.tensors.items())
        names = ", ".join(Path(path).name for path in found.sources)
        content = found.problem or tensors + (f" from {names}" if names else "")
        say(line(found.path.name, pipeline, _time(found), f"{found.nbytes / 1e6:.1f}", content))
    for pipeline, records in sorted(pipelines.items()):
        latest = _time(max(records, key=lambda found: found.mtime_ns))
        say(f"pipeline {pipeline}: {len(records)} records, {_megabytes(records)} MB, the latest made {latest}")
    all_of_them = [found for records in pipelines.values() for found in records]
    damaged = sum(found.damaged for found in all_of_them)
    say(_summary(directory, f"{len(all_of_them)} records of {_megabytes(all_of_them)} MB, {damaged} damaged"))


def _time(found: Found) -> str:
    return f"{datetime.fromtimestamp(found.mtime_ns / 1e9):%Y-%m-%d %H:%M}"


def _megabytes(files: Sequence[Found]) -> str:
    return f"{sum(found.nbytes for found in files) / 1e6:.1f}"


@cache_app.command("verify", epilog="Example: monai-gds cache verify /nvme/cache")
def cache_verify(directory: CacheDirectory) -> None:
    """Check every byte of every record; exit code 1 when one is damaged or cannot be read."""
    from monai_gds.cache import upkeep

    checked, damaged, unread = 0, 0, 0
    for found in _checked(upkeep.record_files(directory)):
        checked += 1
        damaged += found.damaged
        unread += bool(found.problem) and not found.damaged
        if found.problem:
            say(f"{found.path}: {found.problem}")
    not_checked = f", {unread} that cannot be checked" if unread else ""
    say(_summary(directory, f"{checked} records, {damaged} damaged{not_checked}"))
    if damaged:
        say(
            "Damaged records are computed again when they are next used. "
            f"To delete them now: monai-gds cache prune --damaged {directory}"
        )
    raise typer.Exit(1 if damaged or unread else 0)


def _checked(paths: Sequence[Path]) -> Iterator[Found]:
    """Checks every byte of records, which takes long, and shows how far it is."""
    from monai_gds.cache import upkeep

    with progress_bar("checking", len(paths)) as progress:
        for done, path in enumerate(paths, 1):
            found = upkeep.check(path)
            progress(done)
            if found is not None:
                yield found


def _summary(directory: Path, records: str) -> str:
    """The last line of a listing; files that are not ours are counted apart."""
    from monai_gds.cache import upkeep

    others = len(upkeep.other_files(directory))
    return f"{records}; {others} other files" if others else records


@cache_app.command("prune", epilog="Example: monai-gds cache prune --dry-run /nvme/cache")
def cache_prune(
    directory: CacheDirectory,
    pipeline: Annotated[
        str | None,
        typer.Option(
            "--pipeline",
            metavar="HASH",
            help="Also delete the records of this pipeline; `ls` shows the hashes, 4 digits do.",
        ),
    ] = None,
    missing_sources: Annotated[
        bool, typer.Option("--missing-sources", help="Also delete records whose source files are gone.")
    ] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Also delete records that verify calls damaged: reads every byte.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete temporary files of killed writers, unreadable records, and records that newer ones superseded.

    The records of a pipeline that you changed or gave up stay, since another run may use them, until you name it with
    --pipeline. Files that others put there are left alone.
    """
    from monai_gds.cache import upkeep

    records = list(upkeep.survey(directory))
    try:
        unwanted = upkeep.pipeline_of(records, pipeline) if pipeline is not None else ""
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint="--pipeline") from None
    doomed = list(upkeep.prunable(directory, records, missing_sources=missing_sources, pipeline=unwanted))
    if damaged:
        gone = {found.path for found in doomed}
        doomed += [found for found in _checked([r.path for r in records if r.path not in gone]) if found.damaged]
    deleted = []
    for found in doomed:
        if dry_run or upkeep.remove(found):
            deleted.append(found)
            say(f"{found.path}: {found.problem}")
        else:
            say(f"{found.path}: left alone, since it was replaced or removed meanwhile")
    gone = {found.path for found in doomed}
    unknown = sum(found.has_relative_sources and found.path not in gone for found in records)
    if unknown:
        say(f"{unknown} records name sources by relative paths: whether those changed cannot be told; they are kept")
    verb = "to delete" if dry_run else "deleted"
    say(f"{len(deleted)} files, {_megabytes(deleted)} MB {verb}")


@cache_app.command("warm", epilog="Example: monai-gds cache warm training:make_dataset --num-workers 8")
def cache_warm(
    function: Annotated[
        str, typer.Argument(help="module:function. The function takes no arguments and returns a GDSDataset.")
    ],
    num_workers: Annotated[int, typer.Option(min=0, help="Processes that compute items; 0: this one alone.")] = 0,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
) -> None:
    """Compute every item of a dataset that is not cached yet; started again after a kill, it goes on where it was.

    Modules are looked for in the working directory first. Exit code 1 when items failed; they are named.
    """
    from monai_gds.cache import upkeep

    dataset = _dataset_from(function)
    try:
        done = dataset.populate(num_workers, progress)
    except KeyboardInterrupt:
        held = len(upkeep.record_files(dataset.cache_dir)) if dataset.cache_dir else 0
        raise KeyboardInterrupt(f"{dataset.cache_dir} holds {held} records now, start it again to go on") from None
    say(f"{done.computed} items computed, {done.cached} were cached already")


def _dataset_from(function: str) -> GDSDataset:
    """Imports ``module:function``, calls it, and checks what it returns."""
    module, colon, name = function.partition(":")
    if not (module and colon and name):
        raise typer.BadParameter(f"{function!r} is not of the form module:function", param_hint="FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # the module is there, and imports one that is not
        raise typer.BadParameter(f"no module {e.name!r} in {os.getcwd()} or installed", param_hint="FUNCTION") from None
    if not callable(make):
        raise typer.BadParameter(f"the module {module!r} has no function {name!r}", param_hint="FUNCTION")
    try:
        inspect.signature(make).bind()
    except TypeError as e:
        raise typer.BadParameter(f"{function} is called without arguments: {e}", param_hint="FUNCTION") from None
    dataset = make()
    from monai_gds.dataset import GDSDataset

    if not isinstance(dataset, GDSDataset):
        kind = type(dataset).__name__
        raise typer.BadParameter(f"{function} returned a {kind}, not a GDSDataset", param_hint="FUNCTION")
    return dataset


def main() -> None:
    """Entry point: errors of this package and of the system end as one line and exit code 1, not as a traceback."""
    try:
        app(prog_name="monai-gds")  # also when it is run as python -m monai_gds
    except (MonaiGdsError, OSError, ValueError, ImportError) as e:
        say(f"monai-gds: {in_words(e)}", errors)
        sys.exit(1)
