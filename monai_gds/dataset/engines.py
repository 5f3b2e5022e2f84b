"""Where :mod:`monai_gds.dataset.populate` has items computed: here, in workers of its own, or over an executor.

An engine's ``submit(index, anyway)`` has the record of an item made, with ``anyway`` even while another process makes
it. It returns a future of the item's outcome and the worker's name. The future raises NotSaved or PopulateError if
there is no point in going on, and any other error if a worker died.

The workers of an executor share the cache directory with this process, whatever host they are on. They read the pickled
dataset from a temporary file there. Engines such as Dask give the item of a worker that died to the next worker, and
the next. So a worker creates another file before it begins with a submission, and removes it at the end: if the file
already exists, that submission has killed a worker.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from monai_gds import limits
from monai_gds.base import cores
from monai_gds.base.workers import Workers
from monai_gds.dataset.making import Saved
from monai_gds.dataset.session import Session
from monai_gds.errors import FailedItem, NotSaved, PopulateError, WorkerDied
from monai_gds.pipeline.words import in_words, path_of
from monai_gds.shared.owner import this_process
from monai_gds.shared.temporary import JOB, create, opened, read

#: Items that each worker is given ahead. More would only be lost when a worker is killed.
AHEAD = 2

#: How many workers an executor is assumed to have until more have answered: executors do not report it.
_AT_LEAST = 4

#: What became of an item, or how it failed; and which worker computed it (thread, process and host).
Answer = tuple[Saved | FailedItem, str]


class Here:
    """Computes each item in this process, within ``submit``."""

    kind = "in this process"
    window = 1

    def __init__(self, session: Session) -> None:
        self._session = session

    def submit(self, index: int, anyway: bool) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_result(_attempt(self._session, (index, anyway)))
        return future

    def close(self) -> None:
        pass


class InWorkers:
    """Computes items in :class:`Workers`, which start with the first item, and again after one of them died."""

    def __init__(self, session: Session, num_workers: int) -> None:
        self.kind = self._name = f"{num_workers} workers"
        self.window = AHEAD * num_workers
        self._start = partial(Workers[Answer], partial(_attempt, session), num_workers)
        self._workers: Workers[Answer] | None = None

    def submit(self, index: int, anyway: bool) -> Future[Answer]:
        if self._workers is not None and self._workers.broken:
            self.close()
        if self._workers is None:
            self._workers = self._start()
            self.kind = f"{self._name} ({self._workers.kind})"
        return self._workers.submit((index, anyway))

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._workers = None


def default_workers(items: int) -> int:
    """How many workers compute items by default: as many as this process has cores, within limits.

    0 if they cannot be forked. A spawned worker imports torch and MONAI for seconds, and runs the user's script again
    unless that guards its main part.
    """
    if items < 2 or torch.cuda.is_initialized() or multiprocessing.current_process().daemon:  # type: ignore[no-untyped-call]
        return 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: they share the cores
    share = cores.usable() // max(ranks, 1)
    return min(share, items, limits.POPULATE_WORKERS) if share > 1 else 0


class OverExecutor:
    """Computes items over a ``concurrent.futures.Executor``, which stays the user's."""

    window = AHEAD * _AT_LEAST

    def __init__(self, session: Session, executor: Executor) -> None:
        self.kind = type(executor).__name__
        self._session, self._executor, self._directory = session, executor, str(session.settings.cache_dir)
        self._numbers = itertools.count(1)
        self._sent: _Sent | None = None

    def submit(self, index: int, anyway: bool) -> Future[Answer]:
        if isinstance(self._executor, ThreadPoolExecutor):  # needs no pickle
            return self._executor.submit(_attempt, self._session, (index, anyway))
        sent = self._sent or self._send()
        # The number is new each time, since some engines remember results by their arguments.
        return self._executor.submit(_run, sent, next(self._numbers), (index, anyway))

    def _send(self) -> _Sent:
        # Engines that come with cloudpickle, which also sends what is defined in a notebook, have imported it.
        dumps: Callable[[Any], bytes] = getattr(sys.modules.get("cloudpickle"), "dumps", pickle.dumps)
        try:
            pickled = dumps(self._session)
        except Exception as e:
            raise ValueError(f"{self.kind} cannot send the dataset to its workers: {in_words(e)}") from e
        name = f"{JOB}{uuid.uuid4().hex}.{this_process()}"
        # Noted before the file is created, so that close() removes it after an interrupt too.
        self._sent = sent = _Sent(self._directory, name, hashlib.sha256(pickled).hexdigest())
        try:
            with opened(self._directory, make=True) as folder:
                create(folder, f"{name}.0", pickled, self._session.settings.file_mode)
        except OSError as e:
            raise NotSaved(f"nothing can be cached in {self._directory}: {e}") from e
        return sent

    def close(self) -> None:
        if self._sent is None:
            return
        with suppress(OSError), opened(self._directory) as folder:
            for name in os.listdir(folder):
                if name.startswith(self._sent.name):
                    os.unlink(name, dir_fd=folder)


Engine = Here | InWorkers | OverExecutor


# ---------------------------------------------------------------------------------------------------------------------
# What workers run


class _Sent(NamedTuple):
    """A dataset in a temporary file of a cache directory."""

    directory: str
    name: str  # of the files of this job, up to a number; the dataset has number 0
    digest: str  # SHA-256 of the dataset's file: others may write to the directory, and unpickling runs code


def _run(sent: _Sent, number: int, what: tuple[int, bool]) -> Answer:
    session = _received(sent)
    with _begun(sent, number):
        return _attempt(session, what)


@functools.lru_cache(maxsize=2)
def _received(sent: _Sent) -> Session:
    try:
        with opened(sent.directory) as folder:
            pickled, _ = read(folder, f"{sent.name}.0", sys.maxsize)
        if hashlib.sha256(pickled).hexdigest() != sent.digest:
            raise OSError("it was replaced")
    except OSError as e:
        raise PopulateError(
            f"{_me()} does not find the dataset in {sent.directory}: cache_dir must be a folder that all workers share "
            f"with the process that fills it ({e})"
        ) from None
    try:
        session: Session = pickle.loads(pickled)
    except Exception as e:
        raise PopulateError(
            f"{_me()} cannot load the dataset: {in_words(e)}. It must be able to import all that the dataset uses"
        ) from None
    with suppress(Exception):  # each item reports it
        session.split()  # before other threads of this worker get it
    return session


@contextmanager
def _begun(sent: _Sent, number: int) -> Iterator[None]:
    """Leaves a file behind if this process dies in the block, and raises WorkerDied if another one did."""
    name = f"{sent.name}.{number}"
    with opened(sent.directory) as folder:
        try:
            create(folder, name)
        except FileExistsError:
            raise WorkerDied("the worker that was computing the item died") from None
        except OSError:  # such as a full disk, which saving the record will report
            pass
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _attempt(session: Session, what: tuple[int, bool]) -> Answer:
    index, anyway = what
    try:
        return session.save(index, anyway), _me()
    except NotSaved:
        raise
    except Exception as e:
        return FailedItem(index, path_of(session.data, index), in_words(e)), _me()


def _me() -> str:
    return f"worker {os.getpid()}/{threading.get_ident()} on {socket.gethostname()}"
