"""The command ``monai-gds cache``: arguments and output. The work is done by :mod:`monai_gds.folder` and the dataset.

Neither ``ls`` nor anything imported here imports torch or MONAI, which would take seconds.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

import typer

from monai_gds.base.console import broken, progress_bar, say, say_lines, stderr, stdout
from monai_gds.base.units import bytes_of, seconds_of, shown
from monai_gds.command import options
from monai_gds.command.options import DatasetArguments, DatasetFunction, JsonOption, dataset_from, parsed
from monai_gds.errors import NotSaved
from monai_gds.folder import budget, maintenance
from monai_gds.folder.budget import KNOWN_SECONDS
from monai_gds.folder.index import Index
from monai_gds.folder.maintenance import SHOWN, Found, Unwanted, used_since, without
from monai_gds.folder.uses import Uses
from monai_gds.records.header import VERSION

if TYPE_CHECKING:
    from monai_gds.dataset.dataset import GDSDataset

app = options.app("List, verify, prune, fill and explain cache directories.", "cache ls /nvme/cache")

CacheDirectory = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The cache directory.")]


#: The orders in which ``ls`` can list records.
Order: TypeAlias = Literal["name", "made", "size", "pipeline", "source"]

_ORDERS: dict[Order, Callable[[Found], Any]] = {
    "name": lambda found: found.name,
    "made": lambda found: found.mtime_ns,
    "size": lambda found: found.nbytes,
    "pipeline": lambda found: found.pipeline,
    "source": lambda found: sorted(found.sources),
}


@app.command("ls", epilog="Example: monai-gds cache ls --sort size /nvme/cache")
def list_records(
    directory: CacheDirectory,
    sort: Annotated[Order, typer.Option(help="Sort by this. The newest and the largest come last.")] = "name",
    summary: Annotated[bool, typer.Option("--summary", help="Print only the pipelines and the totals.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the records of a cache directory with their pipeline, time, size, tensors and sources.

    "÷ 5.2 (lz4, 32³)" marks a record that is 5.2 times smaller than its
    tensors, by LZ4 in tiles of that size.

    The last lines sum up each pipeline. `prune --pipeline` deletes the records
    of one that you no longer need.
    """
    records = sorted(maintenance.survey(directory, Index(directory)), key=_ORDERS[sort])
    if as_json:
        shown = {} if summary else {"records": [_as_json(found) for found in records]}
        pipelines = _pipelines_as_json(records)
        _print_json({"directory": str(directory), **shown, "pipelines": pipelines, **_totals(directory, records)})
        return
    lines = [] if summary else _lines(records)
    for pipeline, made in _grouped(records, _pipeline):
        latest = _time(max(found.mtime_ns for found in made))
        lines.append(f"pipeline {pipeline}: {len(made)} records, {_megabytes(made)} MB, the newest from {latest}")
    damaged = sum(found.damaged for found in records)
    lines.append(_summary(directory, f"{len(records)} records of {_megabytes(records)} MB, {damaged} damaged"))
    say_lines(lines)


def _lines(records: Sequence[Found]) -> list[str]:
    """One line per record; on a terminal, its tensors and sources below it. A table would cut or wrap the names."""
    line = "{:<47} {:<8} {:<16} {:>6}{}".format  # 80 columns
    lines = [line("record", "pipeline", "made", "MB", _content("tensors from sources"))]
    for found in records:
        names = ", ".join(dict.fromkeys(os.path.basename(path) or path for path in found.sources))
        smaller = f" {found.packed}" if found.packed else ""
        content = found.problem or _tensors(found.tensors) + smaller + (f" from {names}" if names else "")
        megabytes = f"{found.nbytes / 1e6:.1f}"
        lines.append(line(found.name, _pipeline(found), _time(found.mtime_ns), megabytes, _content(content)))
    return lines


def _content(text: str) -> str:
    """What ends the line of a record."""
    text = text.replace("\n", "\\n")
    return f"\n{broken(text, indent='    ')}" if stdout.is_terminal else f" {text}"


@lru_cache(maxsize=1024)
def _tensors(tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, dtype, shape in tensors)


def _pipeline(found: Found) -> str:
    return "?" if found.problem else found.pipeline[:SHOWN] or "-"


def _grouped(records: Sequence[Found], by: Callable[[Found], str]) -> list[tuple[str, list[Found]]]:
    return [(name, list(found)) for name, found in groupby(sorted(records, key=by), by)]


def _time(ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ns // 1_000_000_000):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # some file systems store times beyond the year 9999
        return "?"


def _megabytes(files: Sequence[Found]) -> str:
    return f"{sum(found.nbytes for found in files) / 1e6:.1f}"


def _as_json(found: Found) -> dict[str, Any]:
    return {
        "name": found.name,
        "bytes": found.nbytes,
        "mtime_ns": found.mtime_ns,
        "version": 0 if found.problem else VERSION,
        "pipeline": found.pipeline,
        "item": found.item,
        "ratio": round(found.ratio, 3),
        "form": found.form,
        "tensors": [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in found.tensors],
        "sources": found.sources,
        "problem": found.problem,
        "damaged": found.damaged,
    }


def _pipelines_as_json(records: Sequence[Found]) -> list[dict[str, Any]]:
    sound = [found for found in records if not found.problem]
    return [
        {
            "pipeline": pipeline,
            "records": len(made),
            "bytes": sum(found.nbytes for found in made),
            "latest_mtime_ns": max(found.mtime_ns for found in made),
        }
        for pipeline, made in _grouped(sound, lambda found: found.pipeline)
    ]


def _totals(directory: Path, records: Sequence[Found]) -> dict[str, int]:
    return {
        "count": len(records),
        "bytes": sum(found.nbytes for found in records),
        "damaged": sum(found.damaged for found in records),
        "unreadable": sum(bool(found.problem) and not found.damaged for found in records),
        "other_files": len(maintenance.other_files(directory)),
    }


def _print_json(document: dict[str, Any]) -> None:
    """Prints JSON on one line and in ASCII, so that any name can be printed and any tool can read it."""
    say_lines([json.dumps(document)])


def _summary(directory: Path, records: str) -> str:
    """The last line of a listing: ``records``, and the number of files that are not records."""
    others = len(maintenance.other_files(directory))
    return f"{records}; {others} other files" if others else records


@app.command("verify", epilog="Example: monai-gds cache verify /nvme/cache")
def verify(
    directory: CacheDirectory,
    summary: Annotated[bool, typer.Option("--summary", help="Print only the totals.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of every record; exit code 1 if one is damaged or cannot be read.

    A record under another record's name counts as damaged. In a folder that
    `monai-gds pack` wrote, the files of packed images are checked.
    """
    if not maintenance.record_files(directory) and maintenance.other_files(directory):
        from monai_gds.imagenet.files.packed import is_packed

        if is_packed(directory):
            _verify_packed(directory, summary, as_json)
    records = []
    for found in _checked(maintenance.record_files(directory)):
        records.append(found)
        if found.problem and not summary and not as_json:
            say(f"{found.file}: {found.problem}")
    damaged = sum(found.damaged for found in records)
    unread = sum(bool(found.problem) and not found.damaged for found in records)
    if as_json:
        problems = {} if summary else {"problems": [_as_json(found) for found in records if found.problem]}
        _print_json({"directory": str(directory), **problems, **_totals(directory, records)})
    else:
        not_checked = f", {unread} that cannot be checked" if unread else ""
        say(_summary(directory, f"{len(records)} records, {damaged} damaged{not_checked}"))
        if damaged:
            say(
                "Damaged records are computed again when they are next used. "
                f"To delete them now: monai-gds cache prune --damaged {shlex.quote(str(directory))}"
            )
    raise typer.Exit(1 if damaged or unread else 0)


def _verify_packed(directory: Path, summary: bool, as_json: bool) -> None:
    """Checks the files of packed images, and ends the command."""
    from monai_gds.imagenet.files.packed import packed_files, verify_packed

    files = packed_files(directory)
    with progress_bar("checking", len(files)) as progress:
        wrong = verify_packed(directory, progress)
    if as_json:
        problems = [{"path": path, "problem": problem} for path, problem in wrong.items()]
        found = {} if summary else {"problems": problems}
        _print_json({"directory": str(directory), **found, "packed_files": len(files), "damaged": len(wrong)})
    else:
        say_lines([] if summary else (f"{path}: {problem}" for path, problem in wrong.items()))
        say(f"{len(files)} files of packed images, {len(wrong)} damaged")
    raise typer.Exit(1 if wrong else 0)


def _checked(paths: Sequence[str | Path]) -> Iterator[Found]:
    """Checks every byte of records, with a progress bar."""
    with progress_bar("checking", len(paths)) as progress:
        for done, path in enumerate(paths, 1):
            found = maintenance.check(path)
            progress(done)
            if found is not None:
                yield found


PipelineOption = Annotated[
    str | None,
    typer.Option(
        "--pipeline",
        metavar="HASH",
        help="Also delete the records of this pipeline, given by 4 or more digits of its hash from `ls`.",
    ),
]
MaxSizeOption = Annotated[
    str | None,
    typer.Option(
        "--max-size",
        metavar="SIZE",
        help="Also delete the least recently used records until the rest has this size: 400GB, 2TiB.",
    ),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="module:function",
        help="Protect the records of this dataset's pipeline from these three options; may be repeated. The function "
        "may have arguments: --keep 'training:make_dataset fold=3'.",
    ),
]


@app.command("prune", epilog="Example: monai-gds cache prune --dry-run /nvme/cache")
def prune(
    directory: CacheDirectory,
    pipeline: PipelineOption = None,
    missing_sources: Annotated[
        bool, typer.Option("--missing-sources", help="Also delete records whose source files are gone.")
    ] = False,
    check_sources: Annotated[
        bool,
        typer.Option(
            "--check-sources", help="Also compare the contents of source files, not only their sizes: reads them all."
        ),
    ] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Also delete records that `verify` reports as damaged: reads every byte.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="SPAN", help="Also delete records made longer ago: 36h, 30d, 8w."),
    ] = None,
    unused_for: Annotated[
        str | None, typer.Option("--unused-for", metavar="SPAN", help="Also delete records not used for this long.")
    ] = None,
    max_size: MaxSizeOption = None,
    keep: KeepOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Print only the totals.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete temporary files of killed writers, unreadable records, and superseded records.

    Records of a pipeline that you changed or no longer need are kept, since
    another run may use them, until you name the pipeline with --pipeline, or
    all that are old, unused or too many with --older-than, --unused-for or
    --max-size. These three leave alone what a running process uses. Other files
    are left alone. Exit code 1 if a file cannot be deleted, or if the records
    that are left are larger than --max-size.
    """
    from monai_gds.keys.sources import Sources

    kept = {_dataset_to_keep(words).session.pipeline_digest(): words for words in keep or []}
    unwanted = Unwanted(
        missing_sources=missing_sources,
        identify=Sources("content", str(directory)).read if check_sources else None,
        older_than=parsed(seconds_of, older_than, math.inf, "--older-than"),
        unused_for=parsed(seconds_of, unused_for, math.inf, "--unused-for"),
        max_size=parsed(partial(bytes_of, argument="--max-size"), max_size, math.inf, "--max-size"),
        keep=kept,
    )
    records = maintenance.survey(directory)
    for missing in kept.keys() - {found.pipeline for found in records}:
        say(f"--keep: no record here is of the pipeline of {kept[missing]} ({missing[:SHOWN]})", stderr)
    named = parsed(partial(maintenance.pipeline_of, records), pipeline, "", "--pipeline")
    uses, began = Uses(directory), time.time()
    useless, idle = maintenance.choose(
        directory, records, replace(unwanted, pipeline=named), uses.look(), _checked if damaged else None
    )
    quiet = summary or as_json
    if dry_run:
        deleted, refused = [*useless, *idle], 0
        say_lines([] if quiet else (f"{found.file}: {found.problem}" for found in deleted))
    else:
        deleted, refused = _delete(
            useless, idle, lambda found: used_since(found, uses.look(KNOWN_SECONDS), began), quiet
        )
        Index(directory).tidy()
    left = without(deleted, records)
    _end(directory, deleted, refused, left, unwanted.max_size, dry_run=dry_run, summary=summary, as_json=as_json)


def _dataset_to_keep(text: str) -> GDSDataset:
    """The dataset of ``"module:function fold=3"``."""
    words: list[str] = parsed(lambda line: shlex.split(line), text, [], "--keep")
    function, *arguments = words or [""]
    try:
        return dataset_from(function, arguments)
    except typer.BadParameter as e:
        e.param_hint = "--keep"  # there is no argument FUNCTION here
        raise


def _delete(
    useless: Sequence[Found], idle: Sequence[Found], used_meanwhile: Callable[[Found], bool], quiet: bool
) -> tuple[list[Found], int]:
    """Deletes files, idle ones only if still idle; prints each, so that an interrupted run shows what it deleted.

    Returns those deleted, and how many the system refused to delete, such as another user's in a shared folder.
    """
    deleted, refused = [], 0
    for found, is_idle in [*((found, False) for found in useless), *((found, True) for found in idle)]:
        outcome = found.problem
        try:
            if is_idle and used_meanwhile(found):
                outcome = "kept, since it has been used meanwhile"
            elif maintenance.remove(found):
                deleted.append(found)
            else:
                outcome = "kept, since it was replaced or removed meanwhile"
        except OSError as e:
            refused += 1
            outcome = f"cannot be deleted: {e.strerror or e}"
        if not quiet:
            say(f"{found.file}: {outcome}")
    return deleted, refused


def _end(
    directory: Path, deleted: Sequence[Found], refused: int, left: Sequence[Found], most: float, *, dry_run: bool,
    summary: bool, as_json: bool,
) -> NoReturn:  # fmt: skip
    """Reports what was deleted and what is left, and ends the command."""
    bytes_left = sum(found.nbytes for found in left)
    if as_json:
        files = [{"path": found.file, "bytes": found.nbytes, "problem": found.problem} for found in deleted]
        _print_json({
            "directory": str(directory),
            "dry_run": dry_run,
            **({} if summary else {"files": files}),
            "count": len(deleted),
            "bytes": sum(found.nbytes for found in deleted),
            "refused": refused,
            "left": len(left),
            "bytes_left": bytes_left,
        })  # fmt: skip
    else:
        refusals = f", {refused} that cannot be deleted" if refused else ""
        say(f"{len(deleted)} files, {_megabytes(deleted)} MB {'to delete' if dry_run else 'deleted'}{refusals}")
        if bytes_left > most:
            why = "they are in use, kept, or cannot be deleted"
            say(f"{_megabytes(left)} MB are left, more than --max-size: {why}")
    raise typer.Exit(1 if refused or bytes_left > most else 0)


@app.command("warm", epilog="Example: monai-gds cache warm training:make_dataset fold=3 --num-workers 8")
def warm(
    function: DatasetFunction,
    arguments: DatasetArguments = None,
    num_workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that compute items; 0: this one alone. Default: one per core, 8 at most."),
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Compute items in the workers of the Dask scheduler at this address, such as tcp://host:8786. They "
            "must see the cache directory and the data under the same paths, and be able to import the module.",
        ),
    ] = None,
    convert: Annotated[
        bool,
        typer.Option(
            help="Also rewrite records that are in another form than the dataset's compression= and tiles= ask for, "
            "without computing their items."
        ),
    ] = True,
    rank: Annotated[int | None, typer.Option(min=0, help="Compute this share of the items, of --world-size.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="How many shares there are.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on a terminal.")] = True,
) -> None:
    """Compute every item of a dataset that is not cached yet. Started again after a kill, it goes on where it was.

    Records in another form than the dataset asks for are converted (see
    --convert): with compression="auto", its default, only records of whole
    tensors, where tiles suit the dataset better. A record that cannot be
    unpacked here stays as it is.

    Off a terminal, a line tells every ten seconds how far it is. Modules are
    looked for in the working directory first. Exit code 1 when items failed;
    they are named.
    """
    if dask is not None and num_workers:
        raise typer.BadParameter("it takes the place of --num-workers: give one of them", param_hint="--dask")
    if (rank is None) != (world_size is None):
        raise typer.BadParameter("--rank and --world-size go together: give both", param_hint="--rank")
    if rank is not None and world_size is not None and rank >= world_size:
        what = f"{rank}: with --world-size {world_size} the last one is {world_size - 1}; ranks begin at 0"
        raise typer.BadParameter(what, param_hint="--rank")
    dataset = dataset_from(function, arguments or [])
    if dataset.cache_dir is None:
        raise typer.BadParameter(f"{function} returned a dataset with cache_dir=None", param_hint="FUNCTION")
    session = dataset.session
    pipeline = f", pipeline {session.pipeline_digest()[:SHOWN]}" if session.caches else ""
    whose = f"{'' if rank is None else f'rank {rank} of {world_size}, '}{dataset.cache_dir}{pipeline}"
    try:
        with _logged(whose), _dask_executor(dask) as executor:
            done = dataset.populate(
                num_workers, progress, executor=executor, convert=convert, rank=rank, world_size=world_size
            )
    except KeyboardInterrupt:
        held = len(maintenance.record_files(dataset.cache_dir))
        raise KeyboardInterrupt(f"{dataset.cache_dir} holds {held} records now, start it again to go on") from None
    converted = f", {done.converted} converted to {dataset.session.record_form()}" if done.converted else ""
    left_out = f", {done.left_out} left out by the budget" if done.left_out else ""
    say(f"{done.computed} items computed, {done.cached} were cached already{converted}{left_out}")


@contextmanager
def _logged(whose: str) -> Iterator[None]:
    """Prints how far populating is, every ten seconds where no bar is shown: a task that is killed leaves a log."""
    log, handler = logging.getLogger("monai_gds.dataset.populate"), logging.Handler(logging.INFO)
    handler.emit = lambda record: say(f"{record.getMessage()} ({whose})", stderr)  # type: ignore[method-assign]
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
        say(f"done ({whose})", stderr)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def _dask_executor(address: str | None) -> Iterator[Executor | None]:
    if address is None:
        yield None
        return
    if importlib.util.find_spec("distributed") is None:
        raise ImportError("--dask needs Dask: pip install 'monai_gds[dask]'")
    from distributed import Client

    with Client(address) as client:
        yield client.get_executor()


@app.command("budget", epilog="Example: monai-gds cache budget /nvme/cache 500GB")
def set_budget(
    directory: CacheDirectory,
    size: Annotated[
        str | None, typer.Argument(help='Such as 500GB, or "none". Without it, the budget is shown.')
    ] = None,
) -> None:
    """Write how much the records of a cache directory may occupy, for all processes that use it.

    The argument max_bytes of a dataset may only lower it. Records that are in
    use stay, so a budget may be exceeded at first; then its users are named.
    """
    if size is not None:
        nbytes = None if size == "none" else parsed(partial(bytes_of, argument="SIZE"), size, math.inf, "SIZE")
        try:
            budget.write(directory, None if nbytes is None else int(nbytes))
        except OSError as e:
            from monai_gds.records.problems import with_advice  # which imports torch

            raise NotSaved(f"the budget of {directory} cannot be written: {with_advice(e, 'the cache')}") from e
    limit, held = budget.written(directory), budget.total(directory)
    say(f"{directory} holds {shown(held)}, and {'has no budget' if limit is None else f'may hold {shown(limit)}'}")
    if limit is not None and held > limit:
        users = ", ".join(Uses(directory).users()) or "no running process"
        say(
            f"that is more than its budget; it is used by {users}. `monai-gds cache prune --max-size` makes room",
            stderr,
        )


@app.command("explain", epilog="Example: monai-gds cache explain training:make_dataset fold=3 0 7")
def explain(
    function: DatasetFunction,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="The function's arguments, such as fold=3, and the items to explain. Without items, the dataset is "
            "explained.",
            metavar="KEY=VALUE|I",
        ),
    ] = None,
) -> None:
    """Print whether items are cached, and for one that is not, what differs from the most similar record.

    Without an item: which part of the dataset is cached and which is computed
    in every epoch. Modules are looked for in the working directory first.
    """
    indices = [int(argument) for argument in arguments or [] if argument.isdecimal()]
    dataset: Any = dataset_from(function, [argument for argument in arguments or [] if not argument.isdecimal()])
    for index in indices:
        if index >= len(dataset):
            raise typer.BadParameter(f"{index}: the dataset has {len(dataset)} items", param_hint="I")
    say_lines([dataset.explain(index) for index in indices] if indices else [str(dataset)])
