"""Items that are computed again and again, and why: within one process, and by the ranks of one job.

An item that names a log, an output or a checkpoint of the run has another key in every epoch, as has a pipeline that is
made again with the run's name or the time in it. No epoch hits, and records pile up. Likewise a rank in what the
transforms hold gives each rank keys of its own, and each computes all items. So each process of a job notes in the
cache directory which pipelines it uses, and then reads the notes of the other ranks:

    <directory>/.index/<process>.<n>.ranks    [job, rank, what, pipeline] by lines (monai_gds.shared.notes)

Nobody waits. Whoever comes later finds the notes of those before, and of ranks that come at the same time at least one
finds the other's, since each writes before it reads. Two pipelines of the same transforms by name, over equally many
items, are meant to be the same, unless the other rank has this one too: then it has both, as for two trainings.

Notes of processes that have ended do not count: a job may be started again under its old name.
Used by the dataset.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import socket
from typing import Any

import torch.distributed as dist

from monai_gds import limits
from monai_gds.base.names import digest_of
from monai_gds.base.notices import Notice
from monai_gds.dataset.settings import Settings
from monai_gds.errors import warn
from monai_gds.folder.explain import pipeline_differences, source_differences, steps_of
from monai_gds.folder.index import Index
from monai_gds.keys.key import Key, Pipeline
from monai_gds.shared.notes import Notes

#: What launchers tell a process of its place in a job, and of the job.
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_JOB = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
)  # fmt: skip

#: Differences that a warning names.
NAMED = 3


#: What a note is about that tells a rank's random states.
_SEEDS = "seeds"


class Repeats:
    """The keys of one dataset's items that were computed in this process: the first two of each, by the item's index.

    The third tells: one may be a deliberate change, such as ``dataset.transform = …``.
    """

    __slots__ = ("_keys", "_warned")

    def __init__(self) -> None:
        self._keys: dict[int, tuple[Key, ...]] = {}
        self._warned = False

    def note(self, index: Any, key: Key) -> None:
        """Notes that an item is computed under a key, and warns once if it is the item's third."""
        try:
            place = operator.index(index)
        except TypeError:  # an item of its own, without an index
            return
        known = self._keys.get(place, ())
        if self._warned or any(one.digest == key.digest for one in known):
            return
        if len(known) == 2:
            self._warned = True
            self._keys.clear()
            _warn(place, known[-1], key)
        elif known or len(self._keys) < limits.REPEATED_ITEMS:
            self._keys[place] = (*known, key)


def _warn(index: int, before: Key, now: Key) -> None:
    found = source_differences(before.sources, now.sources)
    old, new = before.pipeline, now.pipeline
    if old.digest != new.digest:
        found += pipeline_differences(old.digest, new.digest, old.describe(), new.describe())
    if not found:
        found = ["the item itself, as the data hold it"]
    warn(
        f"item {index} gets its third record in this process, so no epoch finds the last one. What differs: "
        f"{'; '.join(found[:NAMED])}. What the run itself writes or sets, such as a log, a checkpoint or its name, "
        "should not count: leave it out of the item, or out of the key by the transform's __cache_key__ or a function "
        "for sources=; version= is for what should count now and then"
    )


def compare_ranks(settings: Settings, pipeline: Pipeline, items: int) -> None:
    """Notes that this rank uses a pipeline, and warns once if another rank of the job has another in its place.

    Does nothing in a process that has no rank, or without a cache. ``items`` is how many items the dataset has.
    """
    rank, folder = _rank(), settings.cache_dir
    if not rank or not pipeline.digest or folder is None:
        return
    job, description, index = _job(), pipeline.describe(), Index(folder, settings.file_mode)
    index.describe_pipeline(pipeline.digest, description)
    notes = Notes(folder, "ranks", settings.file_mode)
    mine, others = _told(notes, job, rank, digest_of([items, *steps_of(description)]), pipeline.digest)
    for other, theirs in others.items():
        different = theirs - mine
        if different and pipeline.digest not in theirs and Notice("ranks differ", os.fspath(folder), job).is_new():
            before = min(different)
            found = pipeline_differences(before, pipeline.digest, index.pipeline(before), description)
            warn(
                f"ranks {other} and {rank} of this job have different keys for the same transforms, so each computes "
                f"every item for itself. What differs: {'; '.join(found[:NAMED])}. Leave what belongs to one rank or "
                "run out of the transforms and the functions in them, or out of the key by __cache_key__"
            )


def compare_seeds(settings: Settings, states: Any) -> None:
    """Notes what this rank's random transforms draw from, and warns once if another rank draws the same.

    Does nothing in a process that has no rank, or without a cache.
    """
    rank, folder = _rank(), settings.cache_dir
    if not rank or folder is None:
        return
    job, drawn_from = _job(), digest_of(repr(states))
    _, others = _told(Notes(folder, "ranks", settings.file_mode), job, rank, _SEEDS, drawn_from)
    same = [other for other, theirs in others.items() if drawn_from in theirs]
    if same and Notice("equal seeds", os.fspath(folder), job).is_new():
        warn(
            f"ranks {same[0]} and {rank} of this job have the same seed, so their random transforms draw the same "
            "numbers: seed each rank otherwise, such as with set_determinism(seed + rank), or give the loader "
            "num_workers, which draw by rank"
        )


def _rank() -> str:
    """The rank of this process; empty if it has none."""
    if dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return next((os.environ[name] for name in _RANK if name in os.environ), "")


def _job() -> str:
    told = {name: os.environ[name] for name in _JOB if name in os.environ}
    return digest_of(told or [socket.gethostname(), os.getppid()])


def _told(notes: Notes, job: str, rank: str, what: str, mine: str) -> tuple[set[str], dict[str, set[str]]]:
    """Notes what this rank has for something, and returns all that it had and what the others have, by rank."""
    notes.tidy(lambda files: [])  # none is needed any more
    notes.append([json.dumps([job, rank, what, mine]).encode()])
    running, found = notes.running(), dict[str, set[str]]()
    for name, texts in notes.added().items():
        for text in texts if name in running else ():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                entry: list[Any] = json.loads(text)
                its_job, its_rank, its_what, theirs = map(str, entry)
                if (its_job, its_what) == (job, what) and its_rank.isdigit():
                    found.setdefault(its_rank, set()).add(theirs)
    return found.pop(rank, set()), found
