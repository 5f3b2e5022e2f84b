"""The command ``monai-gds blockmap``: arguments and output. The work is done in :class:`~monai_gds.BlockMap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from monai_gds import limits
from monai_gds.base.console import progress_bar, say, show
from monai_gds.base.units import in_groups
from monai_gds.command import options
from monai_gds.command.options import HeapOption
from monai_gds.storage.blockmap.block_map import BlockMap

app = options.app(
    "Map the files of a folder to the disk blocks that they occupy.",
    "blockmap build /data/imagenet/train --output train.json",
)

MapFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A saved block map.")]


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
    if plain:
        blocks = blocks.plain_part()
    blocks.save(output, plain=plain)
    assert blocks.origin is not None, "built from a file system"
    for path, (_, why) in blocks.unmapped.items():
        say(f"{path}: {why}")
    missing = f", {len(blocks.unmapped)} could not be mapped" * bool(blocks.unmapped)
    say(f"{len(blocks)} files on {blocks.origin.disk.path}{missing}: {output}")
    raise typer.Exit(1 if blocks.unmapped else 0)


@app.command("verify", epilog="Example: monai-gds blockmap verify train.json --data")
def verify(
    file: MapFile,
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
    be: Annotated[
        str | None,
        typer.Option(
            help="Read the files through xNVMe's driver in user space, upcie for example; nothing is mounted."
        ),
    ] = None,
    uri: Annotated[
        str | None, typer.Option(help="With --be: the drive's PCI address, 0000:01:00.0 for example.")
    ] = None,
    nsid: Annotated[
        int | None, typer.Option(min=1, help="With --be: the drive's namespace; default: the first.")
    ] = None,
    heap_bytes: HeapOption = None,
) -> None:
    """Compare a map with the files as they are now; exit code 1 if a file is not where the map says."""
    blocks = BlockMap.load(file)
    if be is None and (uri, nsid, heap_bytes) != (None, None, None):
        raise typer.BadParameter("name the driver too", param_hint="--be")
    if be is not None and (data or parent is not None or uri is None or uri.startswith("/")):
        raise typer.BadParameter(
            "give the drive's PCI address in --uri, and leave --data and --parent out: while a driver in user space "
            "has the drive, it is not mounted",
            param_hint="--be",
        )
    if be is not None and blocks.origin is None:
        raise typer.BadParameter(
            "a plain map holds nothing to compare: verify it with --parent, mounted", param_hint="--be"
        )
    with progress_bar("verifying") as progress:
        if be is None:
            wrong = blocks.verify(parent, data=data, progress=progress)
        else:
            wrong = _verify_through(blocks, {"be": be, "uri": uri, "nsid": nsid, "heap_bytes": heap_bytes}, progress)
    for path, problem in wrong.items():
        say(f"{path}: {problem}")
    say(f"{len(blocks)} files, {len(wrong)} of them not as mapped")
    raise typer.Exit(1 if wrong else 0)


def _verify_through(blocks: BlockMap, drive: Mapping[str, Any], progress: Callable[[int, int], None]) -> dict[str, str]:
    """Reads the files whole through a driver in user space. Returns what is wrong with them, by path."""
    from monai_gds.storage import Reads, open_storage

    wrong: dict[str, str] = {}
    done = 0
    with closing(open_storage("xnvme-block", "cpu", blockmap=blocks, **drive)) as storage:
        for group in in_groups(blocks.items(), lambda file: file[1].size, limits.RING_FILES, limits.SLOT_BYTES):
            try:
                errors = storage.load(Reads.join([Reads.of(path, [(0, entry.size)]) for path, entry in group])).errors
            except (MemoryError, RuntimeError) as e:  # torch's, for a file larger than memory
                errors = dict.fromkeys(range(len(group)), e)
            wrong.update((group[file][0], str(error)) for file, error in errors.items())
            done += len(group)
            progress(done, len(blocks))
    return wrong


@app.command("show", epilog="Example: monai-gds blockmap show train.json train/n01491361/n01491361_8657.JPEG")
def show_map(
    file: MapFile,
    path: Annotated[str | None, typer.Argument(help="A file in the map; default: a summary of the map.")] = None,
) -> None:
    """Show a summary of a map, or the blocks of one file."""
    blocks = BlockMap.load(file)
    if path is not None:
        _show_file(blocks, path)
        return
    table = Table(show_header=False)
    origin = blocks.origin
    if origin is not None:
        table.add_row("made in", escape(origin.parent))
        table.add_row("file system", escape(f"{origin.kind}, UUID {origin.uuid}, from byte {origin.start} of the disk"))
        table.add_row("disk", escape(f"{origin.disk.path}, {origin.disk.number}, {origin.disk.nbytes / 1e9:.1f} GB"))
        if (array := origin.disk.array) is not None:
            drives = ", ".join(disk.path for disk in origin.disk.members)
            table.add_row("its drives", escape(f"{drives}, in turns of {array.chunk} bytes"))
    else:
        table.add_row("format", "plain: without sizes, disk and file system")
    table.add_row("block", f"{blocks.block_size} bytes")
    table.add_row("files", f"{len(blocks)}, {sum(b.size for b in blocks.values()) / 1e6:.1f} MB")
    table.add_row("extents", f"{sum(len(b.extents) for b in blocks.values())}")
    table.add_row("checksums", "yes" if blocks.has_checksums else "no")
    for name, (_, why) in blocks.unmapped.items():
        table.add_row("not mapped", escape(f"{name}: {why}"))
    show(table)


def _show_file(blocks: BlockMap, path: str) -> None:
    try:
        entry = blocks[path]
    except KeyError as e:
        raise typer.BadParameter(str(e.args[0]), param_hint="PATH") from None
    extents = Table("byte of the file", "first block", "last block", "bytes", title=f"{entry.size} bytes")
    for extent in entry.extents:
        first, count = extent.start // blocks.block_size, extent.nbytes // blocks.block_size
        extents.add_row(str(extent.offset), str(first), str(first + count - 1), str(extent.nbytes))
    show(extents)
