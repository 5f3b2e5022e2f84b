"""The command ``monai-gds profile``: arguments and output. ``bench/own_pipeline.py`` measures."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from monai_gds.base.console import say, say_lines, stdout
from monai_gds.command.options import DatasetArguments, DatasetFunction, JsonOption, dataset_from

app = typer.Typer()


@app.command("profile", epilog="Example: monai-gds profile training:make_dataset fold=3 --batch-size 2")
def profile(
    function: DatasetFunction,
    arguments: DatasetArguments = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Items in a batch.")] = 1,
    num_workers: Annotated[int, typer.Option(min=0, help="As for GDSDataLoader.")] = 0,
    programs: Annotated[
        Literal["auto", "fast", "check", "off"], typer.Option(help="As for GDSDataLoader; with --num-workers.")
    ] = "auto",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs, one after the other.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of your epochs goes: keys, reading, decoding, each transform, collation; and what to do.

    Items that are not cached are computed and saved, so the first epoch shows
    what filling the cache takes. The next one compares checksums, which later
    ones do not. The epochs do nothing but load. `GDSDataLoader(stats=True)`
    measures the same beside your training. The last line is the drive's speed,
    measured with a file in the cache directory, as `doctor --measure` does.
    """
    dataset = dataset_from(function, arguments or [])
    from monai_gds.bench.own_pipeline import profile as measure
    from monai_gds.doctor.findings import speed

    with stdout.status("running epochs…"):
        stats, drive = measure(dataset, batch_size, num_workers, epochs, programs)
    if as_json:
        say_lines([json.dumps({"epochs": [one.as_dict() for one in stats], "limits": dict(drive.values)})])
        return
    for number, one in enumerate(stats, 1):
        say(f"epoch {number}: {one}\n")
    say(f"This machine: {speed(drive).found}")
