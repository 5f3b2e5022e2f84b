"""The command ``python -m tools.bench``: arguments and output. The other modules of this folder measure."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monai_gds.base.console import progress, progress_bar, say_lines, stderr
from monai_gds.command.bench import training
from monai_gds.command.bench_loaders import BatchOption, DatadirOption, image_folder, loaders
from monai_gds.command.bench_tensor import FolderOption, LoopOption
from monai_gds.command.options import DeviceOption, JsonOption, known_device, one_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from monai_gds.bench.report import Report
    from tools.bench.workloads import Workload

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Compare with the alternatives on this machine.",
    epilog="Example: python -m tools.bench dataset --only volumes",
)

#: The values of ``--only``, in the order they run: populate forks, so it must precede any use of CUDA.
_WORKLOADS = ("populate", "volumes", "loaders", "crops", "tiles", "hits", "small", "augment", "first", "memory", "busy")

#: The default of ``--only``.
_USUAL = ("volumes", "crops", "hits", "first")

#: Images that ``dali`` makes by default.
_IMAGES = 1000


@app.command("dataset", epilog="Example: python -m tools.bench dataset --items 16 --side 210 --loader")
def dataset(
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder on the drive to measure; default: the temporary folder.", exists=True, file_okay=False
        ),
    ] = None,
    device: DeviceOption = None,
    items: Annotated[int, typer.Option(min=1, help="Number of items, of two float32 volumes each.")] = 6,
    side: Annotated[int, typer.Option(min=8, help="Voxels along each side of a volume.")] = 235,
    records: Annotated[int, typer.Option(min=1, help="Number of small records.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Timed epochs of each dataset.")] = 7,
    batch_size: Annotated[int, typer.Option(min=1, help="Items in a batch; `small` always takes 256.")] = 1,
    loader: Annotated[bool, typer.Option("--loader", help="Also measure GDSDataset through GDSDataLoader.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop each dataset's files from the page cache before each of its epochs.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_WORKLOADS)}; may be repeated. Default: {', '.join(_USUAL)}."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare GDSDataset with MONAI's datasets, over made-up volumes.

    \b
    volumes   epochs over whole volumes
    loaders   epochs over whole volumes out of files, as the spleen tutorial
              prepares them, through a thread, two workers and GDSDataLoader,
              with metadata and without
    crops     epochs over 4 random crops of 96³ from each volume
    tiles     compressed records of CT, MRI and noise: epochs over whole volumes
              and over 4 random crops of 96³, also as nnU-Net does it
    hits      items of 64 kB, one by one, without a loader
    small     many records of 64 kB, batch 256: plain, and NIfTI MetaTensors
    augment   epochs with random transforms that keep processors busy, in
              worker processes, against PersistentDataset with as many
    first     the epoch that fills the cache, and what saving adds to it
    populate  filling the cache ahead, with one process and more
    memory    20 epochs through GDSDataLoader, in a separate process
    busy      epochs over 8 items of 2 MB, while other processes use the
              processors, too

    The datasets take turns, epoch by epoch, and so do the machine's limits:
    copy to the device, page cache, disk. Every batch is counted and copied to
    the device; every byte is compared once with the result of the transforms.
    With --cold, a column shows whose files were in the page cache anyway; with
    --cold and --loader, GDSDataset also reads past the page cache.
    """
    one_of(_WORKLOADS, only or [], "--only")
    from monai_gds.bench.report import emit, machine
    from monai_gds.storage import resolve_device
    from tools.bench.workloads import Workload

    target = resolve_device(device)
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=cache_dir) as folder, progress() as bars:
        work = Workload(Path(folder), target, items, side, repeats, batch_size, records, loader, cold)
        measure = _measurements(work, bars)
        reports = [report for name in _WORKLOADS if name in (only or _USUAL) for report in measure[name]()]
    emit(reports, as_json=as_json, about={**machine(target), "batch size": batch_size})


def _measurements(work: Workload, bars: Progress) -> dict[str, Callable[[], list[Report]]]:
    from tools.bench import first_epoch, memory, tiles, workloads

    return {
        "populate": lambda: [first_epoch.filling(work, bars)],
        "volumes": lambda: [workloads.epochs(work, None, bars)],
        "loaders": lambda: [workloads.loaders(work, track_meta, bars) for track_meta in (True, False)],
        "crops": lambda: [workloads.epochs(work, min(96, work.side), bars)],
        "tiles": lambda: tiles.tiles(work, bars),
        "hits": lambda: [workloads.hits(work, nifti, bars) for nifti in (False, True)],
        "small": lambda: [workloads.small(work, nifti, bars) for nifti in (False, True)],
        "augment": lambda: [
            workloads.augmentation(work, seconds, crop, bars)
            for seconds, crop in ((0.1, True), (0.01, True), (0.01, False))
        ],
        "first": lambda: [first_epoch.medium_items(work, bars), first_epoch.large_items(work, bars)],
        "memory": lambda: memory.memory(work),
        "busy": lambda: [workloads.busy(work, bars)],
    }


@app.command("dali", epilog="Example: python -m tools.bench dali --make 2000")
def dali(
    store: Annotated[
        Path | None,
        typer.Option(
            help="A Messagepack store, as tools/bench/squirrel_store.py writes it.", exists=True, file_okay=False
        ),
    ] = None,
    datadir: DatadirOption = None,
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
    batchsize: BatchOption = 64,
    threads: Annotated[int, typer.Option(min=1, help="DALI's threads, except where their numbers are compared.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timed epochs of each row.")] = 5,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure feeding DALI from arrays in memory and from a Squirrel store.

    Each from both: batching, NumPy or CuPy; threads; DALI against torch.
    """
    from monai_gds.bench.report import emit, machine
    from monai_gds.imagenet.files.listing import list_folder
    from monai_gds.storage import resolve_device
    from tools.bench import dali as bench
    from tools.bench.squirrel_store import write_store

    questions = only or list(bench.QUESTIONS)
    one_of(bench.QUESTIONS, questions, "--only")
    if store is not None and not (datadir is None and make is None):
        raise typer.BadParameter("it holds its own images: leave --datadir and --make out", param_hint="--store")
    target = resolve_device(device)
    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-") as temporary:
        if store is None:
            store = Path(temporary) / "store"
            make = _IMAGES if datadir is None and make is None else make
            images = list_folder(image_folder(datadir, make, Path(temporary)))
            with progress_bar("storing them", len(images)) as progress:
                write_store(images, store, progress=progress)
        settings = bench.DaliSettings(store, target, batchsize, threads, repeats)
        with stderr.status("measuring…"):
            reports = bench.measure(settings, questions)
    emit(reports, as_json=as_json, about={**machine(target), "batch size": batchsize})


@app.command("shuffling", epilog="Example: python -m tools.bench shuffling --make 4000")
def shuffling(
    datadir: DatadirOption = None,
    make: Annotated[
        int | None, typer.Option(min=1, help=f"First make this many JPEGs; default without --datadir: {_IMAGES}.")
    ] = None,
    batchsize: BatchOption = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed epochs of each way.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Read a packed folder shuffled as a whole and within a window, beside a folder of files."""
    from monai_gds.bench.report import emit, machine
    from monai_gds.imagenet import pack_folder
    from monai_gds.imagenet.files.listing import list_folder
    from tools.bench.shuffling import measure

    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-") as temporary:
        images = image_folder(datadir, _IMAGES if datadir is None and make is None else make, Path(temporary))
        packed = Path(temporary) / "packed"
        pack_folder(list_folder(images), packed)
        with progress_bar("measuring", 6 * repeats) as progress:
            reports = measure(images, packed, batchsize, repeats, progress)
    emit(reports, as_json=as_json, about={**machine(), "batch size": batchsize})


@app.command("tune", epilog="Example: python -m tools.bench tune --nvme-folder /mnt/nvme > tuned.json")
def tune_command(
    nvme_folder: FolderOption,
    mb_size: Annotated[int, typer.Option(min=1, help="Size of the tensor, in MiB.")] = 256,
    loop: LoopOption = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.", callback=known_device)] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Find DeepNVMe's best settings for a drive; the last line is input for --tuned, as that of ds_nvme_tune."""
    from monai_gds.bench.report import emit, machine
    from monai_gds.storage import resolve_device
    from tools.bench.tune import tune

    target = resolve_device(device)
    with progress_bar("tuning") as progress:
        reports, best = tune(nvme_folder, mb_size << 20, target, loop, progress)
    emit(reports, as_json=as_json, about={**machine(target), **({"best": best} if as_json else {})})
    if not as_json:
        say_lines([json.dumps({"aio": best})])


@app.command("blocks", epilog="Example: python -m tools.bench blocks /nvme")
def blocks(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="A folder on the disk to measure; ext4 or XFS.")
    ],
    files: Annotated[int, typer.Option(min=1, help="Number of files.")] = 4000,
    nbytes: Annotated[int, typer.Option(min=1, help="Mean size of a file, in bytes.")] = 116_000,
    batch: Annotated[int, typer.Option(min=1, help="Files read together.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each method.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Read many small files by their blocks: xnvme-block against threads with O_DIRECT, and buffered reads."""
    from monai_gds.bench.report import emit, machine
    from tools.bench.small_files import SmallFiles, describe_block_map, measure

    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=folder) as made:
        report = measure(SmallFiles(Path(made), files, nbytes, batch, repeats))
        about = {**machine(), **describe_block_map(Path(made))}
    emit([report], as_json=as_json, about=about)


@app.command("memory", epilog="Example: python -m tools.bench memory --gigabytes 0.9 --size 128 128 128")
def memory(
    gigabytes: Annotated[float, typer.Option(min=0.5, help="Memory of each dataset's process.")] = 1.1,
    volumes: Annotated[int, typer.Option(min=1, help="Made-up volumes, each with a label of the same size.")] = 40,
    size: Annotated[tuple[int, int, int], typer.Option(help="Voxels of each.")] = (160, 160, 128),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each dataset.")] = 3,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="A folder on the drive; default: the temporary folder.", exists=True, file_okay=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count what epochs read from the drive where memory is short.

    Each dataset runs in a process of its own, in a control group with that
    much memory, which its part of the page cache is counted to. The kernel
    kills what needs more. Each epoch cuts two crops around labels out of each
    volume. Linux lets root make control groups, and others where they were
    given one.
    """
    from monai_gds.bench.report import emit, machine
    from tools.bench import short_memory

    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-", dir=cache_dir) as folder, progress() as bars:
        report = short_memory.memory(Path(folder), volumes, size, int(gigabytes * 1e9), epochs, bars)
    emit([report], as_json=as_json, about=machine())


@app.command("training", epilog="Example: python -m tools.bench training --heavy --json heavy.json")
@functools.wraps(training)
def with_code_by_hand(**arguments: Any) -> None:
    from monai_gds.bench.feeds import PEERS
    from tools.bench.by_hand import BY_HAND, by_hand

    PEERS[BY_HAND] = by_hand
    training(**arguments)


@app.command("loaders", epilog="Example: python -m tools.bench loaders --make 4000 --reader dali-webdataset")
@functools.wraps(loaders)
def with_a_tar_file(**arguments: Any) -> None:
    from monai_gds.bench.loaders import PEERS
    from tools.bench.webdataset import NAME, dali_webdataset

    PEERS[NAME] = dali_webdataset
    loaders(**arguments)


@app.command("latency", epilog="Example: python -m tools.bench latency --delay 10")
def latency(
    files: Annotated[int, typer.Option(min=1, help="Number of files.")] = 1024,
    delay: Annotated[
        list[float] | None, typer.Option(min=0, help="Milliseconds per open; may be repeated. Default: 0, 1, 10, 50.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each method.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Read many small files where every open takes long, against 64 threads with pread. Mounts a folder by FUSE."""
    from monai_gds.bench.report import emit, machine
    from tools.bench.latency import Settings, measure
    from tools.slow_disk import NoSlowDisk

    with tempfile.TemporaryDirectory(prefix="monai-gds-bench-") as made:
        try:
            reports = measure(Settings(Path(made), files, delay or (0, 1, 10, 50), repeats))
        except NoSlowDisk as e:
            raise typer.BadParameter(str(e)) from e
    emit(reports, as_json=as_json, about={**machine(), "disk": "simulated: FUSE, a delay per open"})


if __name__ == "__main__":
    app(prog_name="python -m tools.bench")
