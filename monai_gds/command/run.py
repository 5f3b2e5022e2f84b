"""``monai-gds run``: somebody's training script, unchanged, with our datasets and loaders in the place of MONAI's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monai_gds.command.options import known_device

app = typer.Typer()


@app.command(
    epilog="Example: monai-gds run --cache-dir /nvme/cache train.py",
    context_settings={"allow_interspersed_args": False},  # what follows the script is its own
)
def run(
    command: Annotated[list[str], typer.Argument(help="A script, or with -m a module, and its own arguments.")],
    cache_dir: Annotated[Path, typer.Option(help="The folder of the records.", file_okay=False)],
    device: Annotated[
        str, typer.Option(help="Where items come: cpu, cuda:N, or cuda for the current device.", callback=known_device)
    ] = "cpu",
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
    loaders: Annotated[bool, typer.Option(help="Replace MONAI's loaders too.")] = True,
) -> None:
    """Run a script or a module with MONAI's datasets and loaders replaced by ones that cache in a folder."""
    target, *arguments = command
    if not module and not Path(target).is_file():
        raise typer.BadParameter(f"there is no script {target!r}: for a module, use -m", param_hint="COMMAND")
    from monai_gds.swap import script

    script.run(target, arguments, module, cache_dir=str(cache_dir.expanduser()), device=device, loaders=loaders)
