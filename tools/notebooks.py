#!/usr/bin/env python3
"""Executes the notebooks of tutorials/ in fresh kernels and saves their outputs in them.

    python tools/notebooks.py                      # all of them, in place
    python tools/notebooks.py block_map tensor_io  # these
    python tools/notebooks.py --output DIR         # writes copies to DIR and leaves tutorials/ unchanged

Each runs in an empty folder, with this Python, this checkout's package and ``tutorials/helpers.py``. Besides the needs
of the notebooks it requires ``pip install nbclient ipykernel``. A notebook that fails is saved up to the failure. The
others are still executed, and the exit code is 1.

The paragraph of the first cell that begins with "**Where its outputs came from.**" is written again at each execution.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import nbformat
    import torch
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, CellTimeoutError, DeadKernelError
except ModuleNotFoundError as e:
    sys.exit(f"{e.name} is missing: pip install nbclient ipykernel, or run `make notebooks`")

from monai_gds.base.file_systems import mounts
from monai_gds.bench.report import machine
from monai_gds.storage import resolve_device

__all__ = ["TUTORIALS", "execute", "main", "sign", "text_of"]

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "tutorials"

#: Seconds that one cell may take.
TIMEOUT = 600

#: Metadata of cells that are kept, for myst-nb: the alternative texts of pictures, and whether code is folded.
KEPT = ("mystnb", "tags")

#: The paragraph that tells where a notebook's outputs came from.
ORIGIN = re.compile(r"^\*\*Where its outputs came from\.\*\*.*$", re.MULTILINE)


def execute(notebook: Path, folder: Path) -> tuple[Any, str]:
    """Executes a notebook.

    Args:
        notebook: the file, which is not changed.
        folder: an empty folder: the working directory, and the place of temporary files.

    Returns:
        The notebook with its outputs, and the error, empty if there was none.
    """
    node = nbformat.read(notebook, as_version=4)
    path = os.pathsep.join(p for p in (str(ROOT), str(ROOT / "tutorials"), os.environ.get("PYTHONPATH")) if p)
    with tempfile.TemporaryDirectory() as private:  # for the kernel's sockets, IPython's history, torch's compiler
        # Without folders to search for kernels, only the kernel of this Python is left.
        specs = KernelSpecManager(kernel_dirs=[])
        client = NotebookClient(
            node,
            km=AsyncKernelManager(kernel_spec_manager=specs, transport="ipc", ip=f"{private}/kernel"),
            timeout=TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        client.owns_km = True  # so that it shuts the kernel down
        settings = {"PYTHONPATH": path, "TMPDIR": str(folder), "IPYTHONDIR": private}
        try:
            client.execute(env={"TORCHINDUCTOR_CACHE_DIR": private, **os.environ, **settings})
        except (CellControlSignal, CellTimeoutError, DeadKernelError) as e:
            return _tidy(node), str(e)
    return _tidy(node), ""


def _tidy(node: Any) -> Any:
    """Drops metadata that differs from machine to machine."""
    node.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in node.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key in KEPT}
    return node


def sign(node: Any) -> None:
    """Says in the first cell when and where the notebook was executed."""
    found = machine(resolve_device(None))
    if "gpu" in found:
        count = torch.cuda.device_count()
        where = f"a machine with {'an' if count == 1 else count} {found['gpu']} and {found['cores']} cores"
    else:
        where = f"a machine with {found['cores']} cores and no GPU, so on the CPU and with small data"
    told = f"executed on {found['date'][:10]} on {where} (Python {found['python']}, torch {found['torch']})."
    first = node.cells[0]
    first.source = ORIGIN.sub(f"**Where its outputs came from.** The notebook was {told}{_drive()}", first.source)


def _drive() -> str:
    """What MONAI_DATA_DIRECTORY lies on, in words; nothing if it is not set."""
    folder = os.environ.get("MONAI_DATA_DIRECTORY")
    if not folder:
        return ""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mount = next((mount for mount in mounts(Path("/proc")) if mount.number == number), None)
    if mount is None:
        return ""
    loop = ", a file behind a loop device" if mount.source.startswith("/dev/loop") else ""
    return f" Its data lay on {mount.kind} on {mount.source}{loop}."


def text_of(node: Any, name: str) -> str:
    """The text that an executed notebook wrote to a stream, ``stdout`` or ``stderr``."""
    outputs = [o for cell in node.cells for o in cell.get("outputs", ())]
    return "".join(o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == name)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--output", type=Path, help="folder for the executed notebooks (default: in place)")
    options = parser.parse_args(arguments)
    options.names = [name.removesuffix(".ipynb") for name in options.names] or known
    for name in options.names:
        if name not in known:
            parser.error(f"there is no notebook {name!r} in {TUTORIALS}; there are: {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes and saves. Returns the exit code."""
    options = parse(arguments)
    target = options.output or TUTORIALS
    target.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.names:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            node, error = execute(TUTORIALS / f"{name}.ipynb", Path(folder))
        sign(node)
        path = target / f"{name}.ipynb"
        nbformat.write(node, path)
        failed += bool(error)
        seconds, kb = time.monotonic() - start, path.stat().st_size / 1000
        print(f"{name}: {'FAILED' if error else 'done'} in {seconds:.0f} s, {kb:.0f} kB", flush=True)
        for text in (error, text_of(node, "stderr")):
            if text:
                print(text, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
