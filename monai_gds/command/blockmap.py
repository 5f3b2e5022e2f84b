"""The command ``monai-gds blockmap``: arguments and output. The work is done in :class:`~monai_gds.BlockMap`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monai_gds.base.console import progress_bar, say
from monai_gds.command import options
from monai_gds.storage.blockmap.block_map import BlockMap

app = options.app(
    "Map the files of a folder to the disk blocks that they occupy.",
    "blockmap build /data/imagenet/train --output train.json",
)


@app.command("build", epilog="Example: monai-gds blockmap build /data/imagenet/train --output train.json --checksums")
def build(
    root: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A folder on ext4 or XFS.")],
    output: Annotated[Path, typer.Option(help="The file to write the map to.")],
    plain: Annotated[
        bool, typer.Option("--plain", help="Write only startblock and endblock, in sectors of 512 bytes.")
    ] = False,
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums",
            help="Store a checksum of every file, which drivers in user space compare; reads every byte of the files.",
        ),
    ] = False,
) -> None:
    """Map every file below a folder. If files cannot be mapped, they are listed and the exit code is 1."""
    if plain and checksums:
        raise typer.BadParameter("a plain map cannot hold them: leave --plain out", param_hint="--checksums")
    if not output.absolute().parent.is_dir():  # said before every byte has been read
        raise typer.BadParameter(f"{output.parent} is not a folder", param_hint="--output")
    with progress_bar("mapping") as progress:
        blocks = BlockMap.build(root, progress, checksums=checksums)
    assert blocks.origin is not None, "built from a file system"
    disk = blocks.origin.disk.path
    if plain:
        blocks = blocks.plain()
    blocks.save(output)
    for path, (_, why) in blocks.unmapped.items():
        say(f"{path}: {why}")
    missing = f", {len(blocks.unmapped)} could not be mapped" * bool(blocks.unmapped)
    say(f"{len(blocks)} files on {disk}{missing}: {output}")
    raise typer.Exit(1 if blocks.unmapped else 0)


@app.command("verify", epilog="Example: monai-gds blockmap verify train.json --data")
def verify(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A saved block map.")],
    data: Annotated[
        bool,
        typer.Option(
            "--data", help="Also compare every byte, read through the device and through the file; needs root."
        ),
    ] = False,
    parent: Annotated[
        Path | None,
        typer.Option(help="The folder that the map's paths are relative to; default: the one it was made in."),
    ] = None,
) -> None:
    """Compare a map with the files as they are now; exit code 1 if a file is not where the map says."""
    blocks = BlockMap.load(file, parent)
    with progress_bar("verifying") as progress:
        wrong = blocks.verify(data=data, progress=progress)
    for path, problem in wrong.items():
        say(f"{path}: {problem}")
    say(f"{len(blocks)} files, {len(wrong)} of them not as mapped")
    raise typer.Exit(1 if wrong else 0)
