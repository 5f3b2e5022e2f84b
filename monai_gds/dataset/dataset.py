"""``GDSDataset``: MONAI's ``PersistentDataset`` whose cache moves at the speed of the drive and the link."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from monai.data import PersistentDataset
from monai.transforms.utils import reset_ops_id as _reset_ops_id
from torch.serialization import DEFAULT_PROTOCOL

from monai_gds.base import stages
from monai_gds.base.process import Owner
from monai_gds.base.units import bytes_of, shown
from monai_gds.dataset.describe import describe, explain_item, uncached
from monai_gds.dataset.item_keys import HashTransform, ItemKeys, MonaiVersion
from monai_gds.dataset.making import ItemMaker, RecordMaker, Saved, look
from monai_gds.dataset.misses import Misses, warn_of_misses, why_missed
from monai_gds.dataset.populate import Populated, populate
from monai_gds.dataset.ranks import Ranks
from monai_gds.dataset.settings import (
    Folders,
    OfCacheDataset,
    check_choices,
    check_data,
    check_hash,
    check_transforms,
    check_unused,
    mode_given,
    root_given,
)
from monai_gds.errors import CacheWarning
from monai_gds.folder.budget import Budget
from monai_gds.folder.directory import CacheDirectory, prepare, tidy
from monai_gds.folder.index import Index
from monai_gds.folder.tiers import TwoTiers
from monai_gds.folder.uses import Uses
from monai_gds.folder.writer import process_writer
from monai_gds.items.rounding import check_bits
from monai_gds.keys.hashing import canonical_hash
from monai_gds.keys.key import Key, Pipeline
from monai_gds.keys.sources import Policy, Sources
from monai_gds.pipeline.settings import State, applied, apply, capture_all
from monai_gds.pipeline.split import Split, before_cuda
from monai_gds.pipeline.words import naming
from monai_gds.programs.draws import Draws, Turn
from monai_gds.programs.indices import takes_runs
from monai_gds.records.compression import Codec, Compression
from monai_gds.records.heads import Form
from monai_gds.records.pending import PendingItem
from monai_gds.records.reader import Mmap, Verify
from monai_gds.storage import choose_backend, open_storage, resolve_device
from monai_gds.storage.registry import check_options

__all__ = ["GDSDataset"]

_log = logging.getLogger("monai_gds")

#: Methods through which an item is made. A subclass that overrides one of them changes its items.
_ITEM_METHODS = ("__getitem__", "__getitems__", "_transform", "_cachecheck")


class Begun:
    """An item that :meth:`GDSDataset.begin` began. Hundreds are in flight."""

    __slots__ = ("_arrived", "_cache", "_dataset", "_index", "_item", "_key", "_pending", "_turn")

    def __init__(
        self, dataset: GDSDataset, item: Any, index: Any,
        cache: CacheDirectory | None = None, key: Key | None = None, pending: PendingItem | None = None,
        turn: Turn | None = None,
    ) -> None:  # fmt: skip
        self._dataset, self._item, self._index = dataset, item, index
        self._cache, self._key, self._pending, self._turn = cache, key, pending, turn
        self._arrived: tuple[Any, int] | None = None  # the item, and how many random transforms were run on it

    @property
    def cached(self) -> bool:
        """Whether the item has a record."""
        return self._pending is not None or (self._turn is not None and self._turn.lazy is not None)

    @property
    def nbytes(self) -> int:
        """Size of what is being read, and of what is unpacked from it; 0 if there is no record.

        While the item :attr:`waits` to be drawn, this is the size of all its tensors.
        """
        if self._pending is not None:
            return self._pending.nbytes
        return 0 if self._turn is None else self._turn.nbytes

    @property
    def waits(self) -> bool:
        """Whether the item is still to be drawn. Afterwards ``nbytes`` may be less."""
        return self._turn is not None and self._turn.waits

    def arrive(self) -> None:
        """Waits for the item, or computes it, up to its random transforms. If it fails, the item may be begun again."""
        turn, drawn = self._turn, None
        if turn is not None and turn.queue.split is self._dataset.split():
            drawn = turn.queue.take(turn)
        if drawn is not None:
            self._dataset._state.misses.hit()
        self._arrived = (self.finish(), 0) if drawn is None else drawn

    def end(self) -> Any:
        """The item after its random transforms."""
        turn = self._turn
        try:
            if self._arrived is None:
                self.arrive()
            assert self._arrived is not None, "the line above has set it"
            (item, done), self._arrived = self._arrived, None
            with naming(self._index, self._item):
                return self._dataset._post_transform(item) if turn is None else self._dataset.split().after(item, done)
        finally:
            if turn is not None:
                turn.queue.go_on()

    def finish(self) -> Any:
        """The item up to its random transforms. If it was not cached, it is computed here and saved."""
        cache, key = self._cache, self._key
        if cache is None or key is None:
            return self._dataset._items().make(self._item, self._index)
        pending = self._pending
        # Without a record so far, there may be one now: the item was begun twice, or another process was faster.
        found = look(cache, key, self._item) if pending is None else pending.wait(self._item)
        if found is None:
            return self._dataset._fill(cache, key, self._item, self._index)
        self._dataset._state.misses.hit()
        return found[0]


class GDSDataset(PersistentDataset):  # type: ignore[misc]  # MONAI is untyped
    """Caches the results of the deterministic transforms and returns them as tensors on the target device.

    An item is computed once, up to the first random transform, and saved as one record in the background (see
    :meth:`flush`). Every later access reads the record straight to ``device`` and runs the random transforms. A hit
    equals a miss in tree, types, dtypes, shapes, values, metadata, applied operations and device, so ``Invert`` works
    on cached items. On a CPU target tensors and arrays are private mappings of the record (see ``mmap``): a crop reads
    only the pages it needs, and an in-place transform never changes the file. (``resize_`` cannot grow such a tensor.)
    Arrays inside metadata keep their type and stay on the CPU, and string arrays stay NumPy.

    Where crops come first among the random transforms and a record is in tiles (see ``compression``), the crops are
    drawn before anything is read, and only the tiles that they touch are read. Items and random states stay the same.

    Any number of processes, runs and experiments may share one ``cache_dir``. An item gets a new record when anything
    changes that it was computed from: the item itself, the transforms with their parameters and code, files that the
    item or the transforms name, settings of the process such as ``set_track_meta``, MONAI's version. Transforms are
    hashed when the dataset is made: after changing one in place, assign ``transform`` anew or call
    :meth:`set_transform_hash`. ``print(dataset)`` shows what is cached and where the split is. A damaged record is
    reported, computed anew and replaced. A full or read-only disk costs the cache and not the epoch.

    In the workers of a DataLoader (``num_workers > 0``) and in forked processes, items come as CPU tensors.

    Args:
        data: items, usually dicts of file names.
        transform: a ``Compose`` or a sequence of transforms, deterministic ones first.
        cache_dir: folder of the records, made when it is missing. ``~`` is the home directory. None: nothing is cached.
        device: the target: an int or ``"cuda:N"``, ``"cpu"``, a ``torch.device``, or None for the current CUDA device,
            or the CPU if there is none.
        hash_func: item -> hash as bytes. The default is stable from run to run; MONAI's ``pickle_hashing`` is not.
        hash_transform: transforms -> hash as bytes, which is part of every key, so changed transforms are never served
            stale. None leaves transforms out of the key.
        reset_ops_id: removes the identity of transform objects from applied operations, so that other instances of the
            same transforms can invert cached items.
        pickle_module: accepted for compatibility with MONAI, without effect: nothing is pickled.
        pickle_protocol: without effect.
        track_meta: False turns MetaTensors into plain tensors, on a miss and a hit alike.
        weights_only: without effect: reading a record cannot run code.
        backend: how bytes are moved. ``"auto"`` takes the first that works for the device. A name means that backend
            or an error. See :func:`monai_gds.available_backends`.
        backend_options: keyword arguments of the backend, see its class.
        sources: how the identity of files that an item or a transform names is determined. A string of an item names
            a file if a transform whose name begins with ``Load`` reads its key, or if it looks like a path, and a
            folder with everything in it only if its path is absolute or has a separator. ``"content"``: by size and
            content, which is remembered in ``cache_dir`` while inode and times stay the same. ``"once"``: the same,
            but each file is looked at once per process. ``"stat"``: by size and mtime, which misses a file that was
            replaced with its mtime kept. A function path -> str, bytes or None (not a source). None: files do not
            count.
        root: a folder that keys and records are relative to, so that a cache still serves data that were moved or
            copied. Paths below it, in items, transforms, metadata and applied operations, are stored without it and
            come back below the root of the reader.
        monai_version: how much of MONAI's version is part of the key: ``"exact"``, ``"minor"`` or None.
        arrays: how numeric arrays of items are returned: ``"numpy"`` (CPU targets only), ``"torch"``, or ``"auto"``,
            which is ``"numpy"`` on a CPU target.
        unsupported: what happens to an item with a value that a record cannot store: ``"warn"`` computes it in
            every epoch, with one warning; ``"error"`` raises UnsupportedType.
        verify: when checksums are compared: ``"first"`` (once per file and process; at every read with a backend that
            bypasses the file system), ``"always"`` or ``"never"``.
        mmap: whether tensors of 64 KiB and more are mappings of the record, on a CPU target and once their checksums
            are compared. A page that cannot be read, because the disk fails or another program cut the file, then ends
            the process with a bus error. False reads the tensors into memory instead, and
            an error costs one record. ``"auto"`` maps them if ``cache_dir`` is on a local file system, and reads them
            if it is on any other, such as NFS, SMB, Lustre or anything over FUSE.
        compression: how new records are compressed. ``"lz4"`` and ``"zstd"`` cut tensors of 1 MiB and more into tiles
            and compress these without loss, if the tensor gets at least 15 % smaller. Images on their native grid and
            labels hold few different values and get several times smaller, resampled images less. ``"bitcomp"`` is
            nvCOMP's, and readable on a CUDA device only. None stores tensors as they are. ``"auto"`` takes ``"lz4"``
            where MONAI's own crops come first among the random transforms, and where a CUDA device unpacks tiles, if
            Blosc2 is installed; otherwise tensors stay whole, and a CPU maps them without reading them. On a CPU
            target, tensors of up to 64 MiB stay whole too, unless crops follow a label. None of this is part of the
            key: a record is read in whatever form it has, and only ``populate(convert=True)`` and
            ``monai-gds cache warm`` write an existing one anew.
        tiles: voxels along each edge of a tile: 16, 32 or 64. With smaller tiles a crop reads fewer bytes, and records
            compress less. ``"auto"`` is 32. None is for whole tensors, and goes with ``compression="auto"`` or None.
        mantissa_bits: rounds the values of float32 and float64 tensors of 1 MiB and more to this many bits of mantissa,
            1 to 22, so that they compress better. This is lossy: the relative error is at most ``2 ** -(bits + 1)``, so
            13 bits keep about four decimal digits. It is part of the key, holds for hits, misses and items that are not
            cached, and does not depend on ``compression``. NaN, infinities, integers, smaller tensors and all metadata,
            such as affines, stay as they are.
        device_bytes: how much memory of the CUDA device compressed records may occupy, such as ``20e9`` or ``"20GB"``.
            The first ones that are read stay there, still compressed, and a hit on one of them only unpacks it, once
            the file's identity is compared. 0 keeps none.
        max_bytes: how much the records in ``cache_dir`` may occupy, such as ``"500GB"``. When a new one does not fit,
            others are deleted, the longest unused ones first: not those of pipelines that a dataset of a running
            process has, and not those that were made or first read since this dataset was made. If that gives too
            little room, what does not fit is computed in every epoch, with one warning. Processes that save together
            may exceed it by up to 1 GiB each. None: no limit.
        local_dir: a folder on this machine's own drive, for a ``cache_dir`` that many machines share over NFS or
            Lustre. Records that are read from there are copied here, in the background except in a loader's worker. All
            processes of this machine then read the copy. New records go to ``cache_dir``.
        local_bytes: as ``max_bytes``, for the records in ``local_dir``. What does not fit is read from ``cache_dir``.
        durable: whether a record survives a power cut from the moment its item is returned. It is then written before
            that, and fsync takes about 0.2 ms. Otherwise a record torn by a power cut is found by its checksum and
            computed anew.
        file_mode: the most permissions that records may have, such as ``0o600`` for yourself alone. By default they
            have the group and mode of ``cache_dir``, so that a folder shared by a group is a shared cache:
            ``mkdir /nvme/cache; chgrp lab /nvme/cache; chmod 2775 /nvme/cache``.
        of_cache_dataset: arguments of MONAI's ``CacheDataset``, such as ``cache_rate``. They have no effect, and one
            warning is given.

    Raises:
        TypeError: ``data`` is not a sequence; a transform cannot be called; ``cache_dir`` is not a path; the backend
            takes no such option.
        ValueError: no such device, backend or choice; choices that contradict each other; a value of
            ``backend_options`` that cannot work; ``cache_dir`` is a file, empty, or holds a variable of the shell;
            ``root`` is not a folder.
        BackendUnavailable: the backend named does not work here.
        CodecMissing: the library of the codec that ``compression`` names is not installed.
        HashingError: a transform, or on access an item, has no stable hash.
        UnsupportedType: on access, with ``unsupported="error"``.

    Example:
        >>> import tempfile, numpy as np
        >>> from monai.transforms import Compose, EnsureTyped, RandFlipd, ScaleIntensityd
        >>> transform = Compose([EnsureTyped("image"), ScaleIntensityd("image"), RandFlipd("image", prob=0.5)])
        >>> items = [{"image": np.random.rand(1, 8, 8, 8)} for _ in range(3)]
        >>> with tempfile.TemporaryDirectory() as folder, GDSDataset(items, transform, folder, device="cpu") as dataset:
        ...     tuple(dataset[0]["image"].shape)
        (1, 8, 8, 8)
    """

    def __init__(
        self,
        data: Sequence[Any],
        transform: Sequence[Callable[..., Any]] | Callable[..., Any],
        cache_dir: Path | str | None,
        device: int | str | torch.device | None = None,
        hash_func: Callable[..., bytes] = canonical_hash,
        hash_transform: HashTransform = canonical_hash,
        reset_ops_id: bool = True,
        pickle_module: str = "pickle",
        pickle_protocol: int = DEFAULT_PROTOCOL,
        track_meta: bool = True,
        weights_only: bool = True,
        *,
        backend: str = "auto",
        backend_options: Mapping[str, Any] | None = None,
        sources: Policy = "content",
        root: str | os.PathLike[str] | None = None,
        monai_version: MonaiVersion = "exact",
        arrays: Literal["auto", "numpy", "torch"] = "auto",
        unsupported: Literal["warn", "error"] = "warn",
        verify: Verify = "first",
        mmap: Mmap = "auto",
        compression: Literal["auto"] | Codec | None = "auto",
        tiles: Literal["auto"] | int | None = "auto",
        mantissa_bits: int | None = None,
        device_bytes: float | str = 0,
        max_bytes: float | str | None = None,
        local_dir: Path | str | None = None,
        local_bytes: float | str | None = None,
        durable: bool = False,
        file_mode: int | None = None,
        **of_cache_dataset: Unpack[OfCacheDataset],
    ) -> None:
        """Makes the dataset, and hashes its transforms. See the class for the arguments."""
        check_unused(of_cache_dataset)
        check_choices(verify=verify, mmap=mmap, monai_version=monai_version, arrays=arrays, unsupported=unsupported)
        if not callable(sources):
            check_choices(sources=sources)
        check_bits(mantissa_bits)
        check_hash("hash_func", hash_func)
        if hash_transform is not None:
            check_hash("hash_transform", hash_transform)
        check_data(data)
        # Without cache_dir: the base class would raise where ours only warns, and hash transforms its own way.
        super().__init__(
            data=data,
            transform=transform,
            cache_dir=None,
            hash_func=hash_func,
            pickle_module=pickle_module,
            pickle_protocol=pickle_protocol,
            reset_ops_id=reset_ops_id,
            track_meta=track_meta,
            weights_only=weights_only,
        )
        check_transforms(self.transform.transforms)
        self.device = resolve_device(device)
        self.backend, self.backend_reason = choose_backend(backend, self.device)
        if not isinstance(backend_options, Mapping | None):
            raise TypeError(f"backend_options={backend_options!r}: give a dict of them by name, as {{'threads': 8}}")
        self.backend_options = dict(backend_options or {})
        check_options(self.backend, self.backend_options, self.device)
        self.hash_transform = hash_transform
        self.sources: Policy = sources
        self.root = root_given(root)
        self.monai_version: MonaiVersion = monai_version
        self.arrays, self.unsupported = arrays, unsupported
        self.verify: Verify = verify
        self.mmap: Mmap = mmap
        self.compression, self.tiles, self.mantissa_bits = compression, tiles, mantissa_bits
        self.device_bytes = bytes_of(device_bytes, "device_bytes")
        self.durable, self.file_mode = durable, mode_given(file_mode)
        self._check_device()
        self._take_folders(Folders.given(cache_dir, max_bytes, local_dir, local_bytes))
        self._began = time.time()
        self._saves_in: Compression | None = None  # of a copy that makes records for another process
        self._converts = False
        self._computes_under: State | None = None  # of a copy that computes in another process
        self._state = _Runtime()
        self.split()
        _log.info("GDSDataset on %s uses backend %s (%s)", self.device, self.backend, self.backend_reason)

    def _check_device(self) -> None:
        """Raises ValueError or CodecMissing for arguments that contradict each other or the device."""
        Compression.of(self.compression, self.tiles, self.device.type == "cuda", crops=False)  # only to check
        if self.arrays == "numpy" and self.device.type != "cpu":
            raise ValueError(f"arrays='numpy' needs device='cpu': on {self.device} use 'auto' or 'torch'")
        if self.device_bytes and self.device.type != "cuda":
            raise ValueError(
                f"device_bytes={self.device_bytes} is memory of a CUDA device, and items come on {self.device}"
            )

    def _take_folders(self, folders: Folders) -> None:
        self.cache_dir, self.max_bytes, self.local_dir, self.local_bytes = folders
        self._unmade = self.cache_dir is not None and not prepare(self.cache_dir)
        self._local_unmade = self.local_dir is not None and not prepare(self.local_dir, "local_dir")

    # What MONAI's datasets offer

    def set_data(self, data: Sequence[Any]) -> None:
        """Takes new data. No record is deleted, since others may use it.

        Raises:
            TypeError: ``data`` is not a sequence.
        """
        check_data(data)
        self.data = data

    def set_transform_hash(self, hash_xform_func: HashTransform) -> None:
        """Hashes the deterministic transforms and the settings of their ``Compose``. None leaves them out of the key.

        Raises:
            HashingError: a transform has no stable hash.
        """
        self.hash_transform = hash_xform_func
        split = self._state.split
        if split is None:
            return
        sources = Sources(self.sources, None if self.cache_dir is None else os.fspath(self.cache_dir))
        self._state.keys = ItemKeys(
            split, self.hash_func, hash_xform_func, sources, self.root, self.monai_version, self.reset_ops_id,
            self.mantissa_bits,
        )  # fmt: skip
        self.transform_hash = self._state.keys.transform_hash

    def _pre_transform(self, item_transformed: Any) -> Any:
        out = self.split().before(item_transformed)
        if self.reset_ops_id:
            _reset_ops_id(out)
        return out

    def _post_transform(self, item_transformed: Any) -> Any:
        return self.split().after(item_transformed)

    def _transform(self, index: int) -> Any:
        if type(self)._cachecheck is not GDSDataset._cachecheck:  # a subclass's own way from an item to its transforms
            return super()._transform(index)
        return self._begin([self.data[index]], [index], alone=True)[0].end()

    def _cachecheck(self, item_transformed: Any) -> Any:
        return self._begin([item_transformed], [None], whole=True)[0].finish()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch for torch's and MONAI's loaders: all reads begin before the first is waited for."""
        if self.changes_items():
            return [self[i] for i in indices]
        return [self.end(begun) for begun in self.begin(indices)]

    @classmethod
    def changes_items(cls) -> bool:
        """Whether a subclass overrides a method that makes items, so that loaders must call it."""
        return any(getattr(cls, name) is not getattr(GDSDataset, name) for name in _ITEM_METHODS)

    # For loaders that read ahead

    def begin(self, indices: Sequence[int]) -> list[Begun]:
        """Begins to read the items that are cached: one object per index, for :meth:`end` in the same thread."""
        return self._begin([self.data[i] for i in indices], indices)

    def end(self, begun: Begun) -> Any:
        """The item on the device, after its random transforms. If it was not cached, it is computed and saved."""
        return begun.end()

    @property
    def caches(self) -> bool:
        """Whether there is a cache directory, and a deterministic transform in front."""
        return self.cache_dir is not None and bool(self.split().deterministic)

    # Filling the cache ahead of training

    def populate(
        self,
        num_workers: int | None = None,
        progress: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        executor: Executor | None = None,
        convert: bool = False,
    ) -> Populated:
        """Runs the deterministic transforms over every item that is not cached yet.

        Records are published one by one, so after a kill another call continues where the first one stopped. An item
        that fails, or kills the workers that compute it, does not stop the others: it is reported at the end.

        Workers are forked from this process while CUDA is not initialised, and from a fork server afterwards. If the
        dataset cannot be pickled for that, they are threads, with a warning. Transforms that use CUDA themselves need
        ``num_workers=0`` or an initialised CUDA.

        An executor may have its workers on other hosts, such as Dask's ``client.get_executor()``, mpi4py's
        ``MPIPoolExecutor`` or :class:`monai_gds.dataset.engines.RayExecutor`. They must see ``cache_dir`` and the
        source files under the same paths, and be able to import what the dataset is made of.

        Under torch.distributed every rank must call this. The ranks share the items, each waits until all have done
        theirs, however long that takes, and a failure on one rank is raised on all. For cache directories that are
        local to a node, give its local rank and world size.

        Args:
            num_workers: processes that compute items; 0 computes in this one. Default: one per core, 8 at most, where
                they can be forked; an item that fails in them is tried once more in this process.
            progress: shows a bar on rank 0, where there is a terminal or a notebook.
            rank: the rank of this process; default: torch.distributed's if it is initialised, else 0.
            world_size: how many processes share the items; default: torch.distributed's if it is initialised, else 1.
                With 1 the process waits for no other.
            executor: computes the items in place of ``num_workers``. It is not shut down.
            convert: writes records anew that are in another form than ``compression`` and ``tiles`` ask for, from their
                own bytes. With ``compression="auto"`` only records of whole tensors that nobody has tried to compress
                are converted, so machines that share a cache do not undo each other's work. A damaged record is
                computed; one that cannot be unpacked here stays as it is.

        Returns:
            How many items were cached already, how many were computed and how many converted, on all ranks together.

        Raises:
            PopulateError: items failed, another rank did, or the workers of ``executor`` cannot do the work; all items
                that did not fail are cached.
            NotSaved: nothing more can be written to the cache directory.
            WorkerDied: a worker of ``executor`` died and took it along, or all workers die; what was finished is
                cached.
            ValueError: an argument is out of range, or the dataset cannot be pickled for the workers of ``executor``.
        """
        ranks = Ranks(rank, world_size)
        if not self.caches:
            return Populated(0, 0)  # by cache_dir=None, or the user has been warned of it
        why = self._why_to_populate() if ranks.rank == 0 else []  # before records of this run are in the index
        try:
            done = populate(self.for_saving(convert), num_workers, executor, progress, ranks)
        finally:
            self.tidy()
        if not done.cached and not done.converted:
            warn_of_misses(str(self.cache_dir), why, stacklevel=3)
        if done.left_out and ranks.rank == 0:
            warnings.warn(
                f"{done.left_out} items are computed in every epoch: the {shown(self.max_bytes or 0)} of max_bytes "
                f"leave no room beside the records in {self.cache_dir} that are in use, or were since this run began",
                CacheWarning,
                stacklevel=2,
            )
        return done

    def tidy(self) -> None:
        """Removes the half-written files of killed processes from the cache directory."""
        for folder in (self.cache_dir, self.local_dir):
            if folder is not None:
                tidy(folder)

    def for_saving(self, convert: bool = False) -> GDSDataset:
        """A copy for a process that only makes records, in the form that this dataset asks for.

        With ``convert``, records in another form count as missing, and are converted.
        """
        view = copy(self)
        view._computes_under = self._keys().capture()
        view._saves_in, view._converts = self.record_form(), convert
        if self.device.type != "cpu":
            view.device, view.backend, view.backend_options = torch.device("cpu"), "auto", {}
        return view

    def for_loading(self) -> GDSDataset:
        """A copy for a process that loads items on the CPU, up to the first transform that names a CUDA device.

        Raises:
            ValueError: ``compression`` names a codec for GPUs.
        """
        view = copy(self)
        split = self.split()
        steps = split.steps()
        if (count := before_cuda(steps)) < len(steps):
            view.transform = split.first(count)
        if self.device.type != "cpu":
            Compression.of(self.compression, self.tiles, False, crops=False)  # only to check
            view._saves_in = self.record_form()
            view.device, view.backend, view.backend_options = torch.device("cpu"), "auto", {}
            view.arrays = "torch" if self.arrays == "auto" else self.arrays
        return view

    def is_cached(self, index: int) -> bool:
        """Whether an item has a record; only its header is read.

        Raises:
            HashingError: the item has no stable hash.
        """
        return self.caches and self.holds(self.key(index))

    def explain(self, index: int) -> str:
        """Whether an item is a hit or a miss, and for a miss how it differs from the most similar record, in words.

        Raises:
            HashingError: the item has no stable hash.
        """
        return explain_item(self, index)

    def __str__(self) -> str:
        return describe(self)

    def key(self, index: int) -> Key:
        """The key of an item, made now.

        Raises:
            HashingError: the item has no stable hash.
        """
        return self._key(self.data[index])

    def _key(self, item: Any) -> Key:
        return self._keys()([item])[0]

    def _keys(self) -> ItemKeys:
        self.split()
        assert self._state.keys is not None, "made with the split"
        return self._state.keys

    def holds(self, key: Key) -> bool:
        """Whether there is a record of a key; in a copy that converts, one that may stay as it is."""
        cache = self._cache()
        return cache is not None and cache.holds(key.digest, self._converts)

    def why_unusable(self, key: Key) -> str | None:
        """Why the record of a key cannot be used here; None if it can, as far as its header shows."""
        cache = self._cache()
        return None if cache is None else cache.why_unusable(key.digest)

    def pipeline_digest(self) -> str:
        """Hex digits that identify the deterministic transforms and the settings of this process; empty without a hash.

        ``monai-gds cache ls`` shows the first of them, and ``prune --pipeline`` takes them.
        """
        return self._keys().pipeline().digest

    def record_form(self) -> Compression:
        """The form in which records are saved.

        Raises:
            ValueError: items come on the CPU in this process, and ``compression`` names a codec for GPUs.
            CodecMissing: the codec's library is not installed.
        """
        if self._saves_in is not None:
            return self._saves_in
        crops = self.split().drawable
        by_label = any(map(takes_runs, crops))
        return Compression.of(self.compression, self.tiles, self.target().type == "cuda", bool(crops), by_label)

    def read(self, index: int) -> Any:
        """An item up to its random transforms, as its record holds it; None if it has no usable record."""
        cache, item = self._cache(), self.data[index]
        found = None if cache is None else look(cache, self._key(item), item)
        return None if found is None else found[0]

    @property
    def on_values(self) -> Mapping[str, str]:
        """The random transforms that could not be drawn before anything was read, by name, and why."""
        return self._state.on_values

    def record_path(self, key: Key) -> str:
        """The path of a key's record, which need not exist; empty without a cache."""
        cache = self._cache()
        return "" if cache is None else cache.record_path(key.digest)

    def save(self, index: int, anyway: bool = False) -> Saved:
        """Makes the record of an item, unless there is one or, without ``anyway``, another process is computing it.

        Raises:
            NotSaved: the record cannot be written.
            FileChanged: a file that the item names changed while it was computed.
            Exception: whatever the transforms raise.
        """
        with nullcontext() if self._computes_under is None else applied(self._computes_under):
            cache = self._cache()
            assert cache is not None, "the caller has checked that items are cached"
            maker = RecordMaker(self._items(), self._keys(), cache)
            return maker.save(self.data[index], index, anyway=anyway, convert=self._converts)

    # The cache

    def _begin(
        self, items: Sequence[Any], indices: Sequence[Any], whole: bool = False, alone: bool = False
    ) -> list[Begun]:
        """Begins items: ``whole`` if no random transforms follow, ``alone`` if it is one item that is ended at once."""
        split = self.split()
        cache = self._cache() if split.deterministic else None
        if cache is None or self._state.keys is None:
            return [Begun(self, *one) for one in zip(items, indices, strict=True)]
        stages.enter("keys")
        keys = self._state.keys(items)
        if keys and (
            keys[0].pipeline is not self._state.pipeline or time.monotonic() >= min(u.due for u in self._state.uses)
        ):
            self._note_use(keys[0].pipeline)
        stages.enter("reading")
        if split.drawable and not whole and self._may_draw():
            return self._begin_draws(cache, split, items, indices, keys, alone)
        pendings = cache.start([key.digest for key in keys])
        return [
            Begun(self, item, index, cache, key, pending)
            for item, index, key, pending in zip(items, indices, keys, pendings, strict=True)
        ]

    def _begin_draws(
        self, cache: CacheDirectory, split: Split, items: Sequence[Any], indices: Sequence[Any], keys: Sequence[Key],
        alone: bool,
    ) -> list[Begun]:  # fmt: skip
        reading = cache.start([key.digest for key in keys], lazily=True)
        # An item without draws needs a turn only if later items are begun before it is finished.
        queue = None if alone and reading[0] is not None and not reading[0].tiled else self._queue(split)
        found: list[Begun] = []
        for item, index, key, started in zip(items, indices, keys, reading, strict=True):
            pending, lazy = (None, started) if started is not None and started.tiled else (started, None)
            turn = None if queue is None else Turn(queue, lazy, item)
            found.append(Begun(self, item, index, cache, key, pending, turn))
        if queue is not None:
            queue.begin([begun._turn for begun in found if begun._turn is not None])
        return found

    def _note_use(self, pipeline: Pipeline) -> None:
        """Notes for other processes what this one uses of the cache, so that they do not delete it."""
        for uses in self._uses():
            uses.open(pipeline.digest)
            if time.monotonic() >= uses.due:
                uses.flush()
        self._state.pipeline = pipeline

    def _uses(self) -> tuple[Uses, ...]:
        if self.cache_dir is not None and not self._state.uses:
            folders = [folder for folder in (self.cache_dir, self.local_dir) if folder is not None]
            self._state.uses = tuple(Uses(folder, self._began, self.file_mode) for folder in folders)
        return self._state.uses

    def _may_draw(self) -> bool:
        """Whether random transforms may run on ghosts. Not in inference mode, where writes into them go unnoticed."""
        return not torch.is_inference_mode_enabled() and type(self)._post_transform is GDSDataset._post_transform

    def _queue(self, split: Split) -> Draws:
        """The queue of this thread's loop. A loop ends when nothing is begun; a loader's has a thread of its own."""
        local = self._state.local
        queue: Draws | None = getattr(local, "queue", None)
        if queue is None or queue.split is not split or queue.idle:
            queue = local.queue = Draws(split, self.target(), self._state.on_values)
        return queue

    def _items(self) -> ItemMaker:
        return ItemMaker(self._pre_transform, self.target(), self._form(), self.mantissa_bits, self._state.misses)

    def _fill(self, cache: CacheDirectory, key: Key, item: Any, index: Any) -> Any:
        maker = RecordMaker(self._items(), self._keys(), cache)
        behind = self._saves_behind() and not self.durable
        return maker.fill(key, item, index, of=len(self.data), unsupported=self.unsupported, behind=behind)

    def _form(self) -> Form:
        numpy = self.arrays == "numpy" or (self.arrays == "auto" and self.device.type == "cpu")
        return Form(self.track_meta, numpy, self.root)

    def _why_to_populate(self) -> list[str]:
        """Why the first item has no record; empty if it has one."""
        try:
            key, cache = self.key(0), self._cache()
            return [] if cache is None else why_missed(cache, key)
        except Exception:  # populating raises it again, and notes it
            return []

    def flush(self) -> None:
        """Waits until every item computed so far is saved, or a warning has given the reason why not.

        The end of a ``with dataset:`` block does the same, and so does the end of the interpreter.
        """
        process_writer().flush()
        for uses in self._state.uses:
            uses.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.flush()

    def _cache(self) -> CacheDirectory | None:
        """This process's view of the cache directory: threads, streams and pinned memory do not survive a fork."""
        if self.cache_dir is None:
            return None
        state = self._state
        if state.cache is None or not state.cache_owner.is_this_process():
            device = self.target()
            backend = self.backend if device == self.device else "auto"
            options = self.backend_options if device == self.device else {}
            storage = open_storage(backend, device, **options)
            device_bytes = self.device_bytes if device.type == "cuda" else 0
            settings: dict[str, Any] = {
                "durable": self.durable,
                "verify": self.verify,
                "mmap": self.mmap,
                "form": self._form(),
                "index": Index(self.cache_dir, self.file_mode),
                "compression": self.record_form(),
                "file_mode": self.file_mode,
                "unmade": self._unmade,
                "run": self._began,
                **self._limited(0, self.cache_dir, self.max_bytes),
            }
            if self.local_dir is None:
                state.cache = CacheDirectory(self.cache_dir, storage, device_bytes=device_bytes, **settings)
            else:
                of_copies = {
                    "index": None,
                    "copies": True,
                    "unmade": self._local_unmade,
                    **self._limited(1, self.local_dir, self.local_bytes, "local_bytes"),
                }
                near = CacheDirectory(self.local_dir, storage, device_bytes=device_bytes, **{**settings, **of_copies})
                state.cache = TwoTiers(near, self._saves_behind(), self.cache_dir, storage, **settings)
            state.cache_owner = Owner()
        return state.cache

    def _limited(self, which: int, folder: Path, nbytes: int | None, argument: str = "max_bytes") -> dict[str, Any]:
        """A directory's settings ``uses`` and ``budget``. Using a copy is noted as using the shared record too."""
        uses = self._uses()[: which + 1]
        budget = None
        if nbytes is not None:
            budget = Budget(str(folder), nbytes, uses[which], self._began, self.file_mode, argument)
        return {"uses": uses, "budget": budget}

    def _saves_behind(self) -> bool:
        """Whether this process may write after it has gone on.

        A worker of a loader is killed soon after the epoch, and a forked process may end without waiting.
        """
        return torch.utils.data.get_worker_info() is None and self._state.owner.is_this_process()

    def target(self) -> torch.device:
        """Where items come in this process: the device, or the CPU in a worker of a DataLoader or a forked process.

        CUDA does not work in a forked process. In a spawned worker it does, but MONAI cannot send a CUDA MetaTensor
        back ("sharing CUDA metatensor across processes not implemented", raised in a thread where it is lost).
        """
        worker = torch.utils.data.get_worker_info()
        if self.device.type == "cpu" or (worker is None and self._state.owner.is_this_process()):
            return self.device
        if not self._state.warned_of_cpu and (worker is None or worker.id == 0):
            warnings.warn(
                f"CUDA cannot be used in a worker or forked process: items come as CPU tensors instead of on "
                f"{self.device}. Use num_workers=0 with ThreadDataLoader.",
                stacklevel=2,
            )
        self._state.warned_of_cpu = True
        return torch.device("cpu")

    def split(self) -> Split:
        """The pipeline in two halves: what is cached, and what runs in every epoch."""
        state = self._state
        if state.split is None or state.split.compose is not self.transform:  # the first time, or it was replaced
            state.split = Split(self.transform)
            state.on_values = {}  # of the transforms before
            state.misses.warn_anew()
            try:
                self.set_transform_hash(self.hash_transform)
            except BaseException:
                state.split = None  # or the next access would use the key of the old transforms
                raise
            if self.cache_dir is not None and (why := uncached(state.split)):
                warnings.warn(why, CacheWarning, stacklevel=3)
            if self.caches:
                self._note_use(self._keys().pipeline())
            if state.cache is not None:
                state.cache.compression = self.record_form()
        return state.split

    # Going to another process

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": None, "_settings": capture_all()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = state.pop("_settings")
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            apply(settings)  # a process that is just being spawned starts with the defaults
        self.__dict__.update(state)
        self._state = _Runtime()


class _Runtime:
    """What a dataset makes on demand, and does not send to another process.

    It has slots because MONAI's ``set_rnd`` walks every ``__dict__`` that it can reach from a dataset, and would seed
    the transforms that are reachable from here a second time.
    """

    __slots__ = (
        "cache", "cache_owner", "keys", "local", "misses", "on_values", "owner", "pipeline", "split", "uses",
        "warned_of_cpu",
    )  # fmt: skip

    def __init__(self) -> None:
        self.owner = self.cache_owner = Owner()
        self.split: Split | None = None
        self.keys: ItemKeys | None = None
        self.cache: CacheDirectory | None = None
        self.uses: tuple[Uses, ...] = ()
        self.pipeline: Pipeline | None = None  # whose use was noted last
        self.local = threading.local()
        self.on_values: dict[str, str] = {}  # transforms that could not be drawn first, and why
        self.misses = Misses()
        self.warned_of_cpu = False
