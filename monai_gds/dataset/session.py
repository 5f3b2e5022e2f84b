"""``Session``: what a dataset does in this process, for ``GDSDataset``, ``populate``, the loader and the command.

The arguments are in :class:`Settings`. Objects that each process makes on demand, such as its view of the cache
directory, are in :class:`Runtime`. A session joins these two with the dataset, which has the data, the transforms and
the methods that a subclass may override.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from monai.data import PersistentDataset, get_track_meta

from monai_gds import limits
from monai_gds.base import stages
from monai_gds.base.notices import Notice
from monai_gds.base.process import Owner
from monai_gds.base.workers import Workers
from monai_gds.dataset.inner import are_of, is_dataset, items_of, steps_of
from monai_gds.dataset.item_keys import ItemKeys
from monai_gds.dataset.making import Maker, Misses, Saved, changed_in_words, computing, is_the_users, look
from monai_gds.dataset.repeats import compare_ranks
from monai_gds.dataset.settings import Settings
from monai_gds.errors import NotSaved, UnsupportedType, WorkerDied, shorten, warn
from monai_gds.folder.budget import Budget
from monai_gds.folder.directory import CacheDirectory
from monai_gds.folder.index import Index
from monai_gds.folder.tiers import TwoTiers
from monai_gds.folder.uses import Uses
from monai_gds.folder.writer import process_writer
from monai_gds.keys.key import Key, Pipeline
from monai_gds.keys.reads import reads_of
from monai_gds.pipeline.ahead import drawn_ahead
from monai_gds.pipeline.global_draws import GlobalDraws
from monai_gds.pipeline.hidden import Hidden
from monai_gds.pipeline.loops import Loop, Loops
from monai_gds.pipeline.parts import name_of
from monai_gds.pipeline.randomness import shared, states_kept
from monai_gds.pipeline.split import Split, before_cuda, uncached
from monai_gds.pipeline.words import naming
from monai_gds.programs.draws import Draws, Turn
from monai_gds.programs.indices import lookup_of
from monai_gds.records.compression import Compression
from monai_gds.records.heads import Form
from monai_gds.records.pending import PendingItem
from monai_gds.shared.owner import this_process
from monai_gds.storage import open_storage

#: Where the methods are defined that a subclass may override.
GDS_DATASET = "monai_gds.dataset.dataset"


class Runtime:
    """What a dataset makes on demand in this process, and does not send to another.

    It has slots because MONAI's ``set_rnd`` walks every ``__dict__`` that it can reach from a dataset, and would seed
    the transforms that are reachable from here a second time.
    """

    __slots__ = (
        "alone", "cache", "cache_of", "data", "global_draws", "helper", "hidden", "keys", "loops", "misses",
        "on_values", "owner", "pipeline", "sent", "split", "uses",
    )  # fmt: skip

    def __init__(self) -> None:
        self.owner = Owner()
        self.split: Split | None = None
        self.data: Any = None  # the dataset that it was made for
        self.sent: tuple[str, str] | None = None  # by the process that this one has its dataset from
        self.keys: ItemKeys | None = None
        self.hidden: Hidden | None = None
        self.cache: CacheDirectory | None = None
        self.cache_of: tuple[int, Form] | None = None  # the process that opened it, and the form of items
        self.uses: tuple[Uses, ...] = ()
        self.pipeline: Pipeline | None = None  # whose use was noted last
        self.loops = Loops()
        # Whose it is, and what computes items that this process must not.
        self.helper: tuple[Owner, Workers[Saved]] | None = None
        self.on_values: dict[str, str] = {}  # transforms that could not be drawn first, and why
        self.global_draws = GlobalDraws()
        self.misses = Misses()
        self.alone = False  # whether only items draw in this process, so that a miss may leave no trace there

    def send(self) -> tuple[str, str] | None:
        """For another process: the hash of the transforms as they are, and the one in the keys of this process.

        A call may have set attributes since, such as a model that was loaded. Nothing else may differ there.
        """
        if self.split is not None and self.split.steady is not None and self.split.steady.moved_on():
            return None  # the keys of this process are of what the transforms were
        return self.sent if self.keys is None else self.keys.sent()

    @property
    def is_slow(self) -> bool:
        """Whether the cache is so slow to answer that many records should be begun at once."""
        return self.cache is not None and self.cache.storage.is_slow

    def may_write_later(self) -> bool:
        """Whether this process may write after it has gone on.

        A worker of a loader is killed soon after the epoch, and a forked process may end without waiting.
        """
        return torch.utils.data.get_worker_info() is None and self.owner.is_this_process()

    def queue(self, split: Split, device: torch.device) -> Draws:
        """The queue of this thread's loop; a new one when nothing is begun."""
        loop = self.loops.running()
        if loop is None:
            loop = Loop(self.loops)  # which is over when its items are dropped
            loop.enter()
        queue: Draws | None = loop.queue()
        if queue is None or queue.of is not split or queue.idle:
            queue = Draws(loop, loop.split(split), device, self.on_values)
            loop.queue = weakref.ref(queue)
        return queue


class Session(NamedTuple):
    """What a dataset does in this process. Making one costs nothing: a dataset makes one whenever it is asked.

    Attributes:
        dataset: has the data, the transforms, and the methods that a subclass may override.
        settings: its arguments.
        runtime: what it has made so far in this process.
        own_end: whether a subclass overrides how an item gets its random transforms.
    """

    dataset: PersistentDataset
    settings: Settings
    runtime: Runtime
    own_end: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return attrgetter("session"), (self.dataset,)

    def split(self) -> Split:
        """The pipeline in two halves: what is cached, and what runs in every epoch."""
        runtime, transform = self.runtime, self.dataset.transform
        if runtime.split is None or not runtime.split.is_of(transform) or not _of_data(self):
            # the first time, or it was replaced
            runtime.split, runtime.keys = _split(self.dataset), None
            runtime.data = self.dataset.data if is_dataset(self.dataset.data) else None
            runtime.on_values, runtime.global_draws = {}, GlobalDraws()  # of the transforms before
            runtime.helper = None
            try:
                keys = self.keys()
            except BaseException:
                runtime.split = None  # or the next access would use the key of the old transforms
                raise
            runtime.misses.of = self.settings.began, keys.hashed.digest
            why = uncached(runtime.split) if self.settings.cache_dir is not None else ""
            if why and Notice(why, self.settings.began).is_new():  # copies that fill the cache split, too
                warn(why)
            if self.caches:
                self.note_use(keys.pipeline())
            if runtime.cache is not None:
                runtime.cache.compression = self.record_form()
        return runtime.split

    @property
    def data(self) -> Sequence[Any]:
        """What the items are made of: the data, or those of another dataset whose items need not be read."""
        return items_of(self.dataset.data, self.split().inner)

    def keys(self) -> ItemKeys:
        """Makes the keys of items.

        Raises:
            HashingError: a transform has no stable hash.
        """
        split, runtime, dataset = self.split(), self.runtime, self.dataset
        steady, keys = split.steady, runtime.keys
        if keys is None or (steady is not None and steady.moved_on(runtime.loops.running())):
            if steady is not None:
                steady.mark()
            keys = ItemKeys(split, dataset, self.settings, _further(dataset), runtime.sent)
            dataset.transform_hash = keys.transform_hash
            runtime.hidden = Hidden(split, keys.hashed, str(self.settings.cache_dir))
            runtime.keys = keys
        return keys

    def key(self, index: int) -> Key:
        """The key of an item, made now."""
        return self.keys().now(self.data[index])

    @property
    def caches(self) -> bool:
        """Whether there is a cache directory, and a deterministic transform in front."""
        return self.settings.cache_dir is not None and bool(self.split().deterministic)

    def target(self) -> torch.device:
        """Where items come in this process: the device, or the CPU in a worker of a DataLoader or a forked process.

        CUDA does not work in a forked process. In a spawned worker it does, but MONAI cannot send a CUDA MetaTensor
        back ("sharing CUDA metatensor across processes not implemented", raised in a thread where it is lost).
        """
        device, runtime = self.settings.device, self.runtime
        worker = torch.utils.data.get_worker_info()
        if device.type == "cpu" or runtime.may_write_later():
            return device
        if (worker is None or worker.id == 0) and Notice("on the CPU", self.settings.began).is_new():
            warn(
                f"CUDA cannot be used in a worker or forked process: items come as CPU tensors instead of on {device}. "
                "Use num_workers=0 with ThreadDataLoader.",
                UserWarning,
            )
        return torch.device("cpu")

    def cache(self) -> CacheDirectory | None:
        """This process's view of the cache directory: threads, streams and pinned memory do not survive a fork."""
        runtime, wanted = self.runtime, (os.getpid(), _form(self))
        if self.settings.cache_dir is not None and runtime.cache_of != wanted:
            runtime.cache, runtime.cache_of = _opened(self), wanted
        return runtime.cache

    def begin(
        self, indices: Sequence[Any], items: Sequence[Any] | None = None, *, whole: bool = False, alone: bool = False
    ) -> list[Begun]:
        """Begins to read the items that are cached.

        Args:
            indices: which items.
            items: the items themselves; by default, ``data`` at these indices.
            whole: whether no random transforms follow.
            alone: whether this is one item that is ended at once.

        Returns:
            One object per index, whose ``end()`` is to be called in the same thread.
        """
        split, runtime = self.split(), self.runtime
        if items is None:
            data = items_of(self.dataset.data, split.inner)
            items = [data[index] for index in indices]
        cache = self.cache() if split.deterministic else None
        if split.steady is not None and split.steady.given_up:
            self.maker().hidden.tell()
            cache = None
        if cache is None:
            return [Begun(self, *one) for one in zip(items, indices, strict=True)]
        stages.enter("keys")
        keys = self.keys()(items)
        if keys and keys[0].pipeline is not runtime.pipeline:
            self.note_use(keys[0].pipeline)
        stages.enter("reading")
        digests = [key.digest for key in keys]
        # Not in inference mode, where writes into ghosts go unnoticed.
        draws = not (whole or self.own_end or torch.is_inference_mode_enabled()) and bool(drawn_ahead(split))
        draws = draws and (split.steady is None or not split.steady.watches)  # an item may change the ones after it
        started = cache.start(digests, "rest" if draws else "all")
        # An item without draws needs a turn only if later items are begun before it is finished.
        is_whole = alone and started[0] is not None and not started[0].later
        # A caller in the foreground may remove the folder next. Daemon threads are those of loaders.
        behind = runtime.may_write_later() and (not alone or threading.current_thread().daemon)
        queue = runtime.queue(split, self.target()) if draws and not is_whole else None
        found: list[Begun] = []
        for item, index, key, one in zip(items, indices, keys, started, strict=True):
            found.append(Begun(self, item, index, cache, key, one, queue, behind))
        if queue is not None:
            queue.begin(found)
        return found

    def maker(self) -> Maker:
        """Makes items up to their random transforms, and their records."""
        transform, bits = self.dataset._pre_transform, self.settings.options.mantissa_bits
        keys, misses, hidden = self.keys(), self.runtime.misses, self.runtime.hidden
        assert hidden is not None, "it is made with the keys"
        return Maker(transform, self.target(), _form(self), bits, misses, hidden, keys, self.settings.again)

    def fill(self, cache: CacheDirectory, key: Key, item: Any, index: Any, behind: bool) -> Any:
        """An item without a record, up to its random transforms; it is computed and saved, perhaps ``behind``."""
        options = self.settings.options
        behind = behind and not options.durable
        differ, asked_by = self.keys().differences(), self.settings.asked_by
        if is_the_users(differ, asked_by):
            return _helped(self, cache, key, item, index)
        maker, of = self.maker(), len(self.dataset.data)
        with computing(differ, asked_by), states_kept(shared() if self.runtime.alone else ()):
            return maker.fill(cache, key, item, index, of=of, unsupported=options.unsupported, behind=behind)

    def save(self, index: int, anyway: bool = False, item: Any = None) -> Saved:
        """Makes the record of an item, see :meth:`Maker.save`, which raises."""
        settings, cache = self.settings, self.cache()
        assert cache is not None, "the caller has checked that items are cached"
        with computing(self.keys().differences(), settings.asked_by):
            item = self.data[index] if item is None else item
            return self.maker().save(cache, item, index, anyway=anyway, convert=settings.converts)

    def read(self, index: int) -> Any:
        """An item up to its random transforms, as its record holds it; None if it has no usable record."""
        cache, item = self.cache(), self.data[index]
        found = None if cache is None else look(cache, self.key(index), item)
        return None if found is None else found[0]

    def holds(self, key: Key) -> bool:
        """Whether there is a record of a key; in a copy that converts, one that may stay as it is."""
        cache = self.cache()
        return cache is not None and cache.holds(key.digest, self.settings.converts)

    def record_form(self) -> Compression:
        """The form in which records are saved.

        Raises:
            ValueError: items come on the CPU in this process, and ``compression`` names a codec for GPUs.
            CodecMissing: the codec's library is not installed.
        """
        settings = self.settings
        if settings.saves_in is not None:
            return settings.saves_in
        crops = drawn_ahead(self.split())
        on_cuda, lookups = self.target().type == "cuda", [found for found in map(lookup_of, crops) if found]
        form = Compression.of(settings.compression, settings.options.tiles, on_cuda, bool(crops), lookups)
        if on_cuda and lookups and not (form.codec or form.named) and Notice("tiles", settings.began).is_new():
            warn(
                "crops that follow a label will read whole volumes and look for the label's voxels in every epoch, "
                f"so that a training can take several times as long: {form.reason}"
            )
        return form

    def pipeline_digest(self) -> str:
        """Hex digits that identify the deterministic transforms and the settings of this process; empty without a hash.

        ``monai-gds cache ls`` shows the first of them, and ``prune --pipeline`` takes them.
        """
        return self.keys().pipeline().digest

    def note_use(self, pipeline: Pipeline) -> None:
        """Notes for other processes what this one uses of the cache, so that they do not delete it."""
        for uses in _uses(self):
            uses.open(pipeline.digest)
        compare_ranks(self.settings, pipeline, len(self.dataset.data))
        self.runtime.pipeline = pipeline

    def flush(self) -> None:
        """Waits until every item computed so far is saved, or a warning has given the reason why not."""
        process_writer().flush()
        for uses in self.runtime.uses:
            uses.flush()

    def settle(self) -> None:
        """Waits a moment for what is being saved, if it is little. Errors are left to whoever saves next."""
        process_writer().settle(limits.SETTLE_SECONDS, limits.SETTLE_BYTES)

    def for_worker(self, *, convert: bool = False, loads: Literal["values", "programs"] | None = None) -> Session:
        """The session of a copy of the dataset, for another process whose items come on the CPU.

        Args:
            convert: whether records in another form than the one asked for count as missing, and are converted.
            loads: whether that process loads items too, up to the first transform that names a CUDA device, or records
                programs, up to the first that holds something there. Otherwise it only makes records.

        Raises:
            ValueError: values are to be loaded, and ``compression`` names a codec for GPUs; or the random transforms
                would have to be divided, and a subclass overrides how they run.
        """
        settings, view = self.settings, copy(self.dataset)
        if loads == "values":
            Compression.of(settings.compression, settings.options.tiles, False, crops=False)  # only to check
        if loads is not None:
            split = self.split()
            steps = split.steps()
            if (count := before_cuda(steps, names_too=loads == "values")) < len(steps):
                if self.own_end:
                    raise ValueError(
                        f"workers run the transforms up to {name_of(steps[count])}, which is on a CUDA device, and "
                        f"{type(self.dataset).__name__} has a _post_transform of its own, which cannot be divided: use "
                        "num_workers=0, or make what it does a transform"
                    )
                view.transform = split.first(count)
        view.settings = replace(
            settings.on_cpu(), saves_in=self.record_form(), converts=convert, asked_by=this_process()
        )
        session: Session = view.session
        return session


def _further(dataset: PersistentDataset) -> list[Any]:
    """What a subclass computes of an item before the transforms: its code, and the attributes that the code names."""
    ours = next(i for i, cls in enumerate(type(dataset).__mro__) if cls.__module__ == GDS_DATASET)
    kinds = type(dataset).__mro__[:ours]
    if not any("_pre_transform" in vars(cls) for cls in kinds):
        return []
    methods = [vars(cls)[name] for cls in kinds for name in vars(cls) if name != "__init__"]  # which sets attributes
    functions = [method for method in methods if isinstance(method, FunctionType)]
    names = {name for function in functions for name in reads_of(function.__code__).names} - _NOT_OF_SUBCLASSES
    return [*functions, {name: vars(dataset)[name] for name in sorted(vars(dataset).keys() & names)}]


#: What a dataset has that counts otherwise, or not at all.
_NOT_OF_SUBCLASSES = frozenset(
    ("data", "transform", "settings", "cache_dir", "device", "backend", "backend_reason", "hash_func", "hash_transform",
     "transform_hash", "reset_ops_id", "track_meta", "weights_only", "pickle_module", "pickle_protocol", "_runtime")
)  # fmt: skip


class Begun(Turn):
    """An item that :meth:`Session.begin` began. Hundreds are in flight."""

    __slots__ = ("_arrived", "_behind", "_cache", "_index", "_key", "_pending", "_session", "_since")

    def __init__(
        self, session: Session, item: Any, index: Any,
        cache: CacheDirectory | None = None, key: Key | None = None, reading: PendingItem | None = None,
        queue: Draws | None = None, behind: bool = True,
    ) -> None:  # fmt: skip
        lazy = reading if reading is not None and reading.later else None
        super().__init__(queue, lazy, item)
        self._pending = reading if lazy is None else None
        self._behind = behind  # whether what is written for it may be written in the background
        self._session, self._index, self._since = session, index, _changes(session)
        self._cache, self._key = cache, key
        self._arrived: tuple[Any, int] | None = None  # the item, and how many random transforms were run on it

    @property
    def nbytes(self) -> int:
        """As :attr:`Turn.nbytes`; of all that is read of a record that is not drawn."""
        return super().nbytes if self._pending is None else self._pending.nbytes

    def arrive(self) -> None:
        """Waits for the item, or computes it, up to its random transforms. If it fails, the item may be begun again."""
        drawn = None
        if self.queue is not None and self.queue.of is self._session.split():
            drawn = self.queue.take(self)
        if drawn is not None and self._cache is not None and self._key is not None:
            self._hit(self._cache, self._key)
        self._arrived = (self.finish(), 0) if drawn is None else drawn

    def end(self) -> Any:
        """The item on the device, after its random transforms. If it was not cached, it is computed and saved."""
        session = self._session
        try:
            item, done = self.taken()
            with naming(self._index, self.item):
                if session.own_end:
                    return session.dataset._post_transform(item)
                return session.runtime.loops.after(session.split(), item, done)
        except Exception as e:
            shorten(e)
            raise
        finally:
            if self.queue is not None:
                self.queue.go_on()

    def taken(self) -> tuple[Any, int]:
        """The item as it arrived, and how many random transforms were run on it."""
        if self._arrived is None:
            self.arrive()
        assert self._arrived is not None, "the line above has set it"
        arrived, self._arrived = self._arrived, None
        return arrived

    def finish(self) -> Any:
        """The item up to its random transforms. If it was not cached, it is computed here and saved."""
        cache, key = self._cache, self._key
        if cache is None or key is None:
            session = self._session
            differ = session.keys().differences() if session.split().deterministic else {}
            with computing(differ, session.settings.asked_by):
                return session.maker().make(self.item, self._index)
        if _changes(self._session) != self._since:
            return self._session.begin([self._index], [self.item], whole=True)[0].finish()
        pending = self._pending
        # Without a record so far, there may be one now: the item was begun twice, or another process was faster.
        found = look(cache, key, self.item) if pending is None else pending.wait(self.item)
        if found is None:
            return self._session.fill(cache, key, self.item, self._index, self._behind)
        self._hit(cache, key)
        return found[0]

    def _hit(self, cache: CacheDirectory, key: Key) -> None:
        if not self._behind:
            cache.settle(key.digest)
        self._session.runtime.misses.hit()


def _split(dataset: PersistentDataset) -> Split:
    """The pipeline of a dataset, after those of the datasets that it is made of."""
    steady = getattr(dataset, "recomputes", False)
    split = Split(dataset.transform, steady)
    inner = steps_of(dataset, split.deterministic)
    return Split(dataset.transform, steady, inner) if inner else split


def _of_data(session: Session) -> bool:
    """Whether the pipeline is that of the data which the dataset has now."""
    split, data = session.runtime.split, session.dataset.data
    if split is not None and split.inner:
        return are_of(data, split.inner)
    return data is session.runtime.data or not is_dataset(data)


def _changes(session: Session) -> int:
    """How often a call has changed a transform, where that counts."""
    split = session.runtime.split
    return 0 if split is None or split.steady is None else split.steady.changes


def _helped(session: Session, cache: CacheDirectory, key: Key, item: Any, index: Any) -> Any:
    """An item that a process of its own computes and saves, since the settings of this one are others now."""
    runtime, differ, why = session.runtime, session.keys().differences(), "a helper process could not save it"
    try:
        if runtime.helper is None or runtime.helper[1].broken or not runtime.helper[0].is_this_process():
            cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            start = "forkserver" if cuda else "fork"  # threads would not do
            runtime.helper = Owner(), Workers(partial(_save, session.for_worker()), 1, start)
        runtime.helper[1].submit((item, index)).result()
    except (ValueError, AssertionError, NotSaved, UnsupportedType, WorkerDied) as e:  # daemons may have no children
        raise RuntimeError(changed_in_words(differ, f"{why} ({e})")) from e
    found = look(cache, key, item)
    if found is None:
        raise RuntimeError(changed_in_words(differ, why))
    return found[0]


def _save(session: Session, what: tuple[Any, Any]) -> Saved:
    return session.save(what[1], anyway=True, item=what[0])


def _form(session: Session) -> Form:
    """The form of items now: ``CacheDataset`` copies one for its random half, which drops metadata without tracking."""
    form = session.settings.form
    if form.track_meta and not get_track_meta() and ("track_meta", "False") not in session.settings.held:
        return form._replace(track_meta=not session.split().rest)
    return form


def _uses(session: Session) -> tuple[Uses, ...]:
    """The notes of what this process uses, one per folder of the cache."""
    settings, runtime = session.settings, session.runtime
    runtime.uses = runtime.uses or tuple(
        Uses(folder, settings.began, settings.file_mode) for folder in settings.folders
    )
    return runtime.uses


def _opened(session: Session) -> CacheDirectory:
    """The cache directory as this process sees it."""
    settings, device = session.settings, session.target()
    options, here = settings.options, device == settings.device
    storage = open_storage(settings.backend if here else "auto", device, **(settings.backend_options if here else {}))
    folder, uses = settings.folders[0], _uses(session)

    def budget(which: int, nbytes: int | None, argument: str) -> Budget:
        of = str(settings.folders[which])
        return Budget(of, nbytes, uses[which], settings.began, settings.file_mode, argument)

    shared: dict[str, Any] = {
        "durable": options.durable, "verify": options.verify, "mmap": options.mmap, "form": _form(session),
        "compression": session.record_form(), "file_mode": settings.file_mode, "run": settings.began,
        "index": Index(folder, settings.file_mode), "unmade": settings.unmade, "uses": uses[:1],
        "budget": budget(0, settings.max_bytes, "max_bytes"),
    }  # fmt: skip
    kept = settings.device_bytes if device.type == "cuda" else 0
    if settings.local_dir is None:
        return CacheDirectory(folder, storage, device_bytes=kept, **shared)
    of_copies = {
        "index": None, "copies": True, "unmade": settings.local_unmade,
        "uses": uses,  # using a copy is using the shared record too
        "budget": budget(1, settings.local_bytes, "local_bytes"),
    }  # fmt: skip
    near = CacheDirectory(settings.local_dir, storage, device_bytes=kept, **{**shared, **of_copies})
    return TwoTiers(near, session.runtime.may_write_later(), folder, storage, **shared)
