"""The command ``monai-gds bench tensor``: arguments and output. :mod:`monai_gds.bench.tensor` measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monai_gds.command import options
from monai_gds.command.options import JsonOption, known_device, one_of

if TYPE_CHECKING:
    import torch

    from monai_gds.bench.report import Report
    from monai_gds.bench.tensor import Tensors

app = options.app(
    "Measure one tensor to and from one file, by each method.", "bench tensor store --nvme-folder /mnt/nvme"
)

_MethodOption = Annotated[
    list[str] | None, typer.Option("--method", help="Only this method; may be repeated. Default: all of them.")
]
_DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda:N; default: the CPU, and a GPU if there is one.", callback=known_device)
]
FolderOption = Annotated[
    Path, typer.Option(exists=True, file_okay=False, writable=True, help="A folder on the drive to measure.")
]
LoopOption = Annotated[int, typer.Option(min=1, help="Timed repetitions of each method.")]
_ValidateOption = Annotated[bool, typer.Option("--validate", help="Compare with what plain Python reads or wrote.")]
_BlockOption = Annotated[int | None, typer.Option(help="DeepNVMe: bytes per transfer.")]
_DepthOption = Annotated[int | None, typer.Option(help="DeepNVMe: transfers in flight per thread.")]
_TunedOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="DeepNVMe: a file with the output of ds_nvme_tune.")
]


@app.command("load", epilog="Example: monai-gds bench tensor load --input-file big.bin --loop 3 --validate")
def load_command(
    input_file: Annotated[Path, typer.Option(exists=True, dir_okay=False, readable=True, help="The file to load.")],
    loop: LoopOption = 3,
    validate: _ValidateOption = False,
    method: _MethodOption = None,
    device: _DeviceOption = None,
    block_size: _BlockOption = None,
    queue_depth: _DepthOption = None,
    tuned: _TunedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a file into a tensor: plain Python, DeepNVMe's bounce buffer and GPUDirect, and the other backends."""
    from monai_gds.bench.tensor import LOADS, load

    if not input_file.is_file():
        raise typer.BadParameter(f"{input_file} is not a regular file", param_hint="--input-file")
    if input_file.stat().st_size == 0:
        raise typer.BadParameter(f"{input_file} is empty", param_hint="--input-file")
    settings = _settings([*LOADS], method, loop, validate, block_size, queue_depth, tuned)
    _run(lambda target: load(input_file, target, settings), device, as_json)


@app.command("store", epilog="Example: monai-gds bench tensor store --nvme-folder /mnt/nvme --mb-size 1024")
def store_command(
    nvme_folder: FolderOption,
    mb_size: Annotated[int, typer.Option(min=1, help="Size of the tensor, in MiB.")] = 1024,
    loop: LoopOption = 3,
    validate: _ValidateOption = False,
    method: _MethodOption = None,
    device: _DeviceOption = None,
    block_size: _BlockOption = None,
    queue_depth: _DepthOption = None,
    tuned: _TunedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a tensor in a file: plain Python, DeepNVMe's bounce buffer and GPUDirect, and the other backends."""
    from monai_gds.bench.tensor import STORES, store

    settings = _settings([*STORES], method, loop, validate, block_size, queue_depth, tuned)
    _run(lambda target: store(nvme_folder, mb_size << 20, target, settings), device, as_json)


def _settings(
    own: list[str], methods: list[str] | None, loop: int, validate: bool, block_size: int | None,
    queue_depth: int | None, tuned: Path | None,
) -> Tensors:  # fmt: skip
    from monai_gds.bench.tensor import Tensors
    from monai_gds.storage.deepnvme import Settings
    from monai_gds.storage.registry import backend_names

    known = [*own, *backend_names()]
    one_of(known, methods or [], "--method")
    given = {"block_size": block_size, "queue_depth": queue_depth}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        Settings.chosen(tuned, chosen)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    return Tensors(methods or known, loop, validate, chosen if tuned is None else {**chosen, "tuned": tuned})


def _run(measure: Callable[[torch.device], Report], device: str | None, as_json: bool) -> None:
    from monai_gds.bench.report import emit, machine
    from monai_gds.storage import resolve_device

    devices = {device} if device is not None else {"cpu", None}
    targets = sorted({resolve_device(name) for name in devices}, key=str)
    reports = [measure(target) for target in targets]
    emit(reports, as_json=as_json, about=machine(targets[-1]))
