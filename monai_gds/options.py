"""Options that several commands share, checked while the command line is parsed.

Neither torch nor MONAI is imported before an option is used: ``--help`` and the shell's completion wait for imports.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BackendOption", "DeviceOption", "JsonOption", "PlotOption", "known_device", "one_of"]


def known_device(name: str | None) -> str | None:
    """Refuses a device that this machine does not have."""
    if name is not None:
        from monai_gds.storage import resolve_device

        try:
            resolve_device(int(name) if name.isdecimal() else name)
        except ValueError as e:
            raise typer.BadParameter(str(e)) from None
    return name


def one_of(known: Collection[str], names: Iterable[str], option: str | None = None) -> None:
    """Refuses names that are not known."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint=option)


def _known_backend(name: str) -> str:
    """Checks that the backend exists. Whether it works here shows when it is opened."""
    if name != "auto":
        from monai_gds.storage.registry import backend_names

        one_of(["auto", *backend_names()], [name])
    return name


def _plot(path: Path | None) -> Path | None:
    """Checks that the plot can be drawn and saved, before minutes of measuring."""
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a plot needs matplotlib: pip install 'monai_gds[bench]'")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a folder")
    if not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"cannot write to {path.parent}")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in ("", *formats):
        raise typer.BadParameter(f"{path.name} must end in one of {', '.join(formats)}")
    return path


DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda:N; default: a GPU if there is one.", callback=known_device)
]
BackendOption = Annotated[
    str, typer.Option(help="The storage backend: auto, or one that `monai-gds doctor` lists.", callback=_known_backend)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlotOption = Annotated[Path | None, typer.Option(help="Draw a bar chart into this file.", callback=_plot)]
