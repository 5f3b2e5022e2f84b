"""The command ``monai-gds bench training``: arguments and output. :mod:`monai_gds.bench.training` measures."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from monai_gds.base import cores
from monai_gds.base.console import progress, stderr

_ShapeOption = Annotated[
    tuple[int, int, int] | None,
    typer.Option(help="Voxels of each volume; default: 256 256 192, and on a CPU 96 96 64.", show_default=False),
]


def training(
    volumes: Annotated[int | None, typer.Option(min=2, help="Made-up volumes; default: 48, on a CPU 8.")] = None,
    shape: _ShapeOption = None,
    heavy: Annotated[bool, typer.Option("--heavy", help="Rotate, scale and smooth each crop, too.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Train with whole volumes instead of crops.")] = False,
    numpy: Annotated[bool, typer.Option("--numpy", help="Let the pipeline end with a transform in NumPy.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop each peer's files from the page cache before each of its epochs.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU, though there is a GPU.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: 8, or one per core.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each peer after its first.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Only the peers whose names hold this text; may be repeated.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="For volumes, which stay, and caches; default: a temporary folder.", file_okay=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write JSON into this file.", dir_okay=False)
    ] = None,
) -> None:
    """Train MONAI's UNet with made-up volumes, fed in every way.

    A first epoch fills each peer's cache. The peers then take turns, epoch by
    epoch. Each epoch is divided by one of the same training that never waits,
    because it gets one batch again and again.
    """
    from monai_gds.bench import training as job
    from monai_gds.bench.feeds import PEERS
    from monai_gds.bench.made_up import write_volumes
    from monai_gds.bench.report import emit, machine
    from monai_gds.bench.segmentation import Training
    from monai_gds.storage import resolve_device

    device = resolve_device("cpu" if cpu else None)
    on_gpu = device.type == "cuda"
    size = shape or ((256, 256, 192) if on_gpu else (96, 96, 64))
    if any(side < 32 or side % 8 for side in size):
        raise typer.BadParameter("each side takes a multiple of 8 voxels, and 32 or more", param_hint="--shape")
    names = [name for name in PEERS if not only or any(text.lower() in name.lower() for text in only)]
    if missing := [text for text in only or () if not any(text.lower() in name.lower() for name in PEERS)]:
        raise typer.BadParameter(f"{missing[0]!r} is in none of: {'; '.join(PEERS)}", param_hint="--only")
    count, used = volumes or (48 if on_gpu else 8), workers or min(8, cores.usable())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # After Ctrl-C a peer's worker may still be writing.
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=folder, ignore_cleanup_errors=True) as temporary:
        with stderr.status(f"writing {count} volumes…"):
            items = write_volumes((folder or Path(temporary)) / "x".join(map(str, size)), count, size)
        what = Training(items, size, device, used, heavy, whole, numpy)
        with progress() as bars:
            report = job.compare(what, Path(temporary), names, epochs, cold, bars)
    emit([report], as_json=json_file or False, about={**machine(device), "workers": used})
