"""The command ``monai-gds bench loaders``: arguments and output. :mod:`monai_gds.bench.loaders` measures."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from monai_gds.base import cores
from monai_gds.base.console import progress_bar, stderr
from monai_gds.command.options import DeviceOption, HeapOption, JsonOption, one_of

if TYPE_CHECKING:
    from monai_gds.imagenet.dali.decoding import Decoding


DatadirOption = Annotated[
    Path | None,
    typer.Option(help="A folder of images, DATADIR/CLASS/FILE; with --make, where to make it.", file_okay=False),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Images in a batch.")]
_MakeOption = Annotated[int | None, typer.Option(min=1, help="First make this many JPEGs of ImageNet's size.")]
_PackedOption = Annotated[
    Path | None, typer.Option(help="The same images, packed; made where missing. Default: a temporary folder.")
]
_ReaderOption = Annotated[list[str] | None, typer.Option(help="Only this reader; may be repeated. Default: all.")]
_BatchesOption = Annotated[
    int | None, typer.Option(min=1, help="Batches in a measurement; default: the whole dataset, 64 at least.")
]
_DecodeOption = Annotated[
    bool | None,
    typer.Option("--decode/--no-decode", help="Decode the images, or only read their bytes; default: both, in turn."),
]
_CropOption = Annotated[
    int | None,
    typer.Option(min=1, help="Also decode random crops of this many pixels, mirror and normalise them, for training."),
]
_HardwareOption = Annotated[
    float | None, typer.Option(min=0, max=1, help="DALI's: the share of the images for the GPU's hardware decoder.")
]
_ThreadsOption = Annotated[
    list[int] | None,
    typer.Option(
        min=1, help="A number of threads to try; may be repeated, and the best one counts. Default: 1, 2, 4, 8, 16."
    ),
]
_RepeatsOption = Annotated[int, typer.Option(min=1, help="How many times each reader is timed.")]
_UriOption = Annotated[
    str | None, typer.Option(help="Block readers: the device, /dev/nvme0n1 or 0000:01:00.0 for example.")
]
_InterfaceOption = Annotated[
    str | None, typer.Option(help="Block readers: xNVMe's interface, io_uring or upcie for example.")
]
_NamespaceOption = Annotated[
    int | None, typer.Option(min=1, help="Block readers: the namespace of a drive in user space.")
]
_MemoryOption = Annotated[Literal["cpu", "gpu"] | None, typer.Option(help="Block readers: where their buffers are.")]
_MapOption = Annotated[
    Path | None,
    typer.Option(help="Block readers: a block map of DATADIR, or of a drive that is not mounted.", exists=True),
]


def loaders(
    datadir: DatadirOption = None,
    make: _MakeOption = None,
    packed: _PackedOption = None,
    reader: _ReaderOption = None,
    batchsize: BatchOption = 64,
    batches: _BatchesOption = None,
    decode: _DecodeOption = None,
    crop: _CropOption = None,
    hw_decoder_load: _HardwareOption = None,
    threads: _ThreadsOption = None,
    repeats: _RepeatsOption = 5,
    device: DeviceOption = None,
    uri: _UriOption = None,
    be: _InterfaceOption = None,
    nsid: _NamespaceOption = None,
    heap_bytes: HeapOption = None,
    mem: _MemoryOption = None,
    bmap: _MapOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure images per second through every reader, DALI's own, torchvision and plain Python."""
    from monai_gds.bench import loaders as bench
    from monai_gds.bench.report import emit, machine
    from monai_gds.storage import resolve_device
    from monai_gds.storage.blockmap.block_map import BlockMap

    target = resolve_device(device)
    given = {"uri": uri, "be": be, "nsid": nsid, "heap_bytes": heap_bytes, "mem": mem, "blockmap": bmap}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    by_blocks = [name for name in bench.PEERS if bench.options_for(name, options, target)]
    has_folder = datadir is not None or make is not None
    wanted = _readers(reader, by_blocks, options, has_folder)
    counts = threads or [t for t in (1, 2, 4, 8, 16) if t <= cores.usable()]
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-") as made:
        temporary = Path(made)
        folder = image_folder(datadir if has_folder else bmap, make, temporary)
        if bmap is not None:
            options["blockmap"] = BlockMap.load(bmap, parent=folder.absolute().parent if folder.is_dir() else None)
        settings = bench.LoaderSettings(
            folder, packed or temporary / "packed", target, batchsize, batches, threads=counts, repeats=repeats,
            options=options,
        )  # fmt: skip
        images, in_files = bench.list_images(folder), folder.is_dir()
        bench.warm(folder)
        with stderr.status("measuring…") as status:

            def tell(name: str, images: int, rate: float) -> None:
                status.update(f"{name}: {images} images, {rate:,.0f} images/s")

            reports = []
            try:
                for decoding in _decodings(decode, crop, hw_decoder_load):
                    reports.append(bench.compare(replace(settings, decoding=decoding), wanted, tell))
            except KeyboardInterrupt:  # show the tables that are complete
                if not reports:
                    raise
    emit(reports, as_json=as_json, about={
        **machine(target), "batch size": batchsize, "images": "made" if make else str(folder),
        "kB per image": round(images.sizes.mean() / 1e3), "page cache": "warm" if in_files else "not used",
    })  # fmt: skip


def image_folder(datadir: Path | None, make: int | None, temporary: Path) -> Path:
    """Returns the folder of images to measure with, and makes it if ``make`` is given."""
    from monai_gds.bench.made_up import write_image_folder

    datadir = datadir or temporary / "images"
    if make is not None:
        if datadir.exists():
            raise typer.BadParameter(f"{datadir} exists: leave --make out to use what is in it", param_hint="--datadir")
        with progress_bar("making JPEGs", make) as progress:
            write_image_folder(datadir, make, progress=progress)
    return datadir


def _readers(
    named: list[str] | None, by_blocks: Sequence[str], options: Mapping[str, Any], has_folder: bool
) -> list[str]:
    """The readers to compare: those named, or all that can run with these options. Raises BadParameter.

    Those ``by_blocks`` take the options, and can do with a block map where there is no folder of images.
    """
    from monai_gds.bench.loaders import PEERS

    wanted = named or [*PEERS]
    one_of(PEERS, wanted, "--reader")
    if options and not set(by_blocks).intersection(wanted):
        raise typer.BadParameter(
            "--uri, --be, --nsid, --heap-bytes, --mem and --bmap are for the block readers", param_hint="--reader"
        )
    if has_folder:
        return wanted
    if "blockmap" not in options:
        raise typer.BadParameter(
            "name a folder of images or, by --bmap, a map of one, or let --make N make one", param_hint="--datadir"
        )
    if named and (others := [name for name in wanted if name not in by_blocks]):
        raise typer.BadParameter(f"needed by {', '.join(others)}", param_hint="--datadir")
    return [name for name in wanted if name in by_blocks]


def _decodings(decode: bool | None, crop: int | None, hw_decoder_load: float | None) -> list[Decoding | None]:
    """What is done to the images, for each report; None only reads their bytes."""
    from monai_gds.imagenet.dali.decoding import Decoding

    decoder = {} if hw_decoder_load is None else {"hw_decoder_load": hw_decoder_load}
    decodings: list[Decoding | None] = [None] if decode is not True else []
    if decode is not False:
        decodings.append(Decoding(options=decoder))
    if crop is not None:
        decodings.append(Decoding((crop, crop), flip=True, normalize=True, options=decoder))
    return decodings
