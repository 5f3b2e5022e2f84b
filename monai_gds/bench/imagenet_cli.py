"""``monai-gds bench loaders`` and ``monai-gds bench dali``: arguments and printing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monai_gds.base.console import progress_bar, stderr
from monai_gds.command.options import DeviceOption, HeapOption, JsonOption, PlotOption, one_of

if TYPE_CHECKING:
    from monai_gds.imagenet.dali.decoding import Decoding

__all__ = ["app"]

app = typer.Typer()


class Memory(StrEnum):
    """Where readers that take ``--mem`` have their buffers."""

    CPU = "cpu"
    GPU = "gpu"


_DatadirOption = Annotated[
    Path | None,
    typer.Option(help="A folder of images, DATADIR/CLASS/FILE; with --make, where to make it.", file_okay=False),
]

#: Images that ``bench dali`` makes by default.
_IMAGES = 1000


def _image_folder(datadir: Path | None, make: int | None, temporary: Path) -> Path:
    """Returns the folder of images to measure with, and makes it if ``make`` is given."""
    from monai_gds.bench.jpegs import write_image_folder

    datadir = datadir or temporary / "images"
    if make is not None:
        if datadir.exists():
            raise typer.BadParameter(f"{datadir} exists: leave --make out to use what is in it", param_hint="--datadir")
        with progress_bar("making JPEGs", make) as progress:
            write_image_folder(datadir, make, progress=progress)
    return datadir


@app.command("loaders", epilog="Example: monai-gds bench loaders --make 4000 --plot loaders.png")
def loaders(
    datadir: _DatadirOption = None,
    make: Annotated[int | None, typer.Option(min=1, help="First make this many JPEGs of ImageNet's size.")] = None,
    packed: Annotated[
        Path | None, typer.Option(help="The same images, packed; made where missing. Default: a temporary folder.")
    ] = None,
    reader: Annotated[list[str] | None, typer.Option(help="Only this reader; may be repeated. Default: all.")] = None,
    batchsize: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Batches in a measurement; default: the whole dataset.")
    ] = None,
    decode: Annotated[
        bool | None,
        typer.Option(
            "--decode/--no-decode", help="Decode the images, or only read their bytes; default: both, in turn."
        ),
    ] = None,
    crop: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also decode random crops of this many pixels, mirror and normalise them, for training."
        ),
    ] = None,
    hw_decoder_load: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="DALI's: the share of the images for the GPU's hardware decoder."),
    ] = None,
    max_side: Annotated[
        int | None,
        typer.Option(min=1, help="Also read the images packed and made smaller: at most this many pixels per side."),
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="Quality of these smaller JPEGs.")] = 90,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="A number of threads to try; may be repeated, and the best one counts. Default: 1, 2, 4, 8, 16."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How many times each reader is timed.")] = 5,
    device: DeviceOption = None,
    uri: Annotated[
        str | None, typer.Option(help="Block readers: the device, /dev/nvme0n1 or 0000:01:00.0 for example.")
    ] = None,
    be: Annotated[
        str | None, typer.Option(help="Block readers: xNVMe's interface, io_uring or upcie for example.")
    ] = None,
    nsid: Annotated[
        int | None, typer.Option(min=1, help="Block readers: the namespace of a drive in user space.")
    ] = None,
    heap_bytes: HeapOption = None,
    mem: Annotated[Memory | None, typer.Option(help="Block readers: where their buffers are.")] = None,
    bmap: Annotated[
        Path | None,
        typer.Option(help="Block readers: a block map of DATADIR, or of a drive that is not mounted.", exists=True),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Measure images per second through every reader, DALI's own, torchvision and plain Python."""
    from monai_gds.bench import loaders as bench
    from monai_gds.bench.report import emit, machine
    from monai_gds.storage import resolve_device
    from monai_gds.storage.blockmap.block_map import BlockMap

    target = resolve_device(device)
    options: dict[str, Any] = {
        "uri": uri, "be": be, "nsid": nsid, "heap_bytes": heap_bytes, "mem": mem and mem.value, "blockmap": bmap,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    by_blocks = [name for name in bench.PEERS if bench.options_for(name, options, target)]
    has_folder = datadir is not None or make is not None
    wanted = _readers(reader, by_blocks, options, max_side is not None, has_folder)
    if not has_folder:
        datadir = bmap
    cores = os.cpu_count() or 1
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monai-gds-bench-")))
        datadir = _image_folder(datadir, make, temporary)
        if bmap is not None:
            options["blockmap"] = BlockMap.load(bmap, parent=datadir.absolute().parent if datadir.is_dir() else None)
        images = bench.list_images(datadir)
        settings = bench.LoaderSettings(
            datadir, packed or temporary / "packed", target, batchsize, batches, threads=threads or
            [t for t in (1, 2, 4, 8, 16) if t <= cores], repeats=repeats, options=options,
            resized=temporary / "resized", max_side=max_side, quality=quality,
        )  # fmt: skip
        bench.warm(datadir)
        with stderr.status("measuring…") as status:

            def tell(name: str, images: int, rate: float) -> None:
                status.update(f"{name}: {images} images, {rate:,.0f} images/s")

            decodings = _decodings(decode, crop, hw_decoder_load)
            reports = [bench.compare(replace(settings, decoding=d), wanted, tell) for d in decodings]
        about = {
            **machine(target), "batch size": batchsize, "images": "made" if make else str(datadir),
            "kB per image": round(images.sizes.mean() / 1e3), "page cache": "warm" if datadir.is_dir() else "not used",
        }  # fmt: skip
    emit(reports, as_json=as_json, plot=plot, about=about)


def _readers(
    named: list[str] | None, by_blocks: Sequence[str], options: Mapping[str, Any], resizes: bool, has_folder: bool
) -> list[str]:
    """The readers to compare: those named, or all that can run with these options. Raises BadParameter.

    Args:
        named: the readers that the user named, if any.
        by_blocks: the readers that take ``options``.
        options: of the block readers, as the user gave them.
        resizes: whether images are made smaller.
        has_folder: whether there is a folder of images. Block readers can do with a block map.
    """
    from monai_gds.bench.loaders import PEERS

    wanted = named or [name for name in PEERS if name != "packed-resized" or resizes]
    one_of(PEERS, wanted, "--reader")
    if "packed-resized" in wanted and not resizes:
        raise typer.BadParameter("packed-resized reads images of --max-side pixels", param_hint="--reader")
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


@app.command("dali", epilog="Example: monai-gds bench dali --make 2000 --plot dali.png")
def dali(
    store: Annotated[
        Path | None,
        typer.Option(
            help="A Messagepack store, as `monai-gds pack --format squirrel` writes it.", exists=True, file_okay=False
        ),
    ] = None,
    datadir: _DatadirOption = None,
    make: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"First make this many JPEGs; default without --store and --datadir: {_IMAGES}.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="One of batching, threads, torch; may be repeated. Default: all.")
    ] = None,
    batchsize: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="DALI's threads, except where their numbers are compared.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timed epochs of each row.")] = 5,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Measure feeding DALI from arrays in memory and from a Squirrel store.

    Each from both: batching, NumPy or CuPy; threads; DALI against torch.
    """
    from monai_gds.bench import dali as bench
    from monai_gds.bench.report import emit, machine
    from monai_gds.imagenet.dali.squirrel import write_store
    from monai_gds.imagenet.files.listing import list_folder
    from monai_gds.storage import resolve_device

    questions = only or list(bench.QUESTIONS)
    one_of(bench.QUESTIONS, questions, "--only")
    if store is not None and not (datadir is None and make is None):
        raise typer.BadParameter("it holds its own images: leave --datadir and --make out", param_hint="--store")
    target = resolve_device(device)
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-") as temporary:
        if store is None:
            store = Path(temporary) / "store"
            make = _IMAGES if datadir is None and make is None else make
            images = list_folder(_image_folder(datadir, make, Path(temporary)))
            with progress_bar("storing them", len(images)) as progress:
                write_store(images, store, progress=progress)
        settings = bench.DaliSettings(store, target, batchsize, threads, repeats)
        with stderr.status("measuring…"):
            reports = bench.measure(settings, questions)
    emit(reports, as_json=as_json, plot=plot, about={**machine(target), "batch size": batchsize})
