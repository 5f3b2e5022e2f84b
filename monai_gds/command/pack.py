"""The command ``monai-gds pack``: arguments and output. The work is done in :mod:`monai_gds.imagenet`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from monai_gds.base import cores
from monai_gds.base.console import progress_bar, say

app = typer.Typer()


@app.command(epilog="Example: monai-gds pack /data/imagenet/train /data/imagenet/train-packed")
def pack(
    root: Annotated[
        Path, typer.Argument(help="A folder of images, ROOT/CLASS/FILE or ROOT/FILE.", exists=True, file_okay=False)
    ],
    out: Annotated[Path, typer.Argument(help="An empty folder, one that does not exist yet, or an unfinished one.")],
    file_mb: Annotated[int, typer.Option(min=1, help="MiB of images in each file.")] = 32,
    max_side: Annotated[
        int | None, typer.Option(min=1, help="Shrink images that have more pixels in height or width, as JPEGs.")
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="Quality of the JPEGs that --max-side makes.")] = 90,
    num_workers: Annotated[
        int | None, typer.Option(min=1, help="Files packed at the same time. Default: one per core, at most 8.")
    ] = None,
) -> None:
    """Pack a folder of images into a few large files, which ImageNetDataset reads like the folder itself.

    After an interruption, the same command goes on with what is left. If
    nothing is left to do, it says so.
    """
    from monai_gds.imagenet.files.listing import list_folder
    from monai_gds.imagenet.files.packed import is_packed
    from monai_gds.imagenet.files.packing import pack_folder

    if out.resolve().is_relative_to(root.resolve()):
        raise typer.BadParameter(f"{out} is inside {root}, where it would count as a class", param_hint="OUT")
    images, done = list_folder(root), is_packed(out)
    workers = ThreadPoolExecutor(num_workers or min(8, cores.usable()))
    with progress_bar("packing", len(images)) as progress, workers as executor:
        pack_folder(
            images, out, file_bytes=file_mb << 20, max_side=max_side, quality=quality, executor=executor,
            progress=progress,
        )  # fmt: skip
    files = [file for file in out.iterdir() if file.is_file()]
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    counts = (len(images), "image", "s"), (len(images.classes), "class", "es"), (len(files), "file", "s")
    found, classes, written = (f"{count} {what}{plural * (count != 1)}" for count, what, plural in counts)
    say(f"{'packed already: ' * done}{found} of {classes} in {written}, {megabytes:.1f} MB: {out}")
