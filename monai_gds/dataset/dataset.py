"""``GDSDataset``: MONAI's ``PersistentDataset`` whose cache moves at the speed of the drive and the link."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

import torch
from monai.data import PersistentDataset
from monai.transforms.utils import reset_ops_id as _reset_ops_id
from torch.serialization import DEFAULT_PROTOCOL

from monai_gds.dataset import words
from monai_gds.dataset.item_keys import HashTransform
from monai_gds.dataset.populate import check_room, fill, populate
from monai_gds.dataset.repeats import Repeats
from monai_gds.dataset.session import Runtime, Session
from monai_gds.dataset.settings import DEFAULTS, CacheOptions, Settings, check_data, check_transforms, refuse
from monai_gds.keys.hashing import canonical_hash
from monai_gds.keys.key import Key
from monai_gds.pipeline.settings import apply, capture_all
from monai_gds.records.compression import Codec


class _Pipeline:
    """The attribute ``transform``, which is hashed when it is assigned, even if it was changed in place."""

    def __get__(self, dataset: Any, kind: Any = None) -> Any:
        return self if dataset is None else vars(dataset)["transform"]

    def __set__(self, dataset: Any, transform: Any) -> None:
        vars(dataset)["transform"] = transform
        if "_runtime" in vars(dataset):  # not while the base class makes itself
            dataset._runtime.split = dataset._runtime.sent = None


class GDSDataset(PersistentDataset):  # type: ignore[misc]  # MONAI is untyped
    """Caches the results of the deterministic transforms and returns them as tensors on the target device.

    An item is computed once, up to the first random transform, and saved as one record: in the background of a loader
    (see :meth:`flush`), or before ``dataset[i]`` returns. Every later access reads the record straight to ``device``
    and runs the random transforms. A hit equals a miss in tree, types, values, metadata, applied operations and device,
    so ``Invert`` works on cached items. On a CPU target tensors and arrays are private mappings of the record: a crop
    reads only the pages it needs, and an in-place transform never changes the file. (``resize_`` cannot grow such a
    tensor.) Arrays inside metadata stay on the CPU. Where crops come first among the random transforms and a record is
    in tiles (see ``compression``), the crops are drawn before anything is read, and only the tiles that they touch are
    read, with the same results.

    Any number of processes, runs and experiments may share one ``cache_dir``. An item gets a new record when anything
    changes that it was computed from: the item itself, the transforms with their parameters and code, files that they
    name or read, settings of the process such as ``set_track_meta``, MONAI's version. Transforms are
    hashed when the dataset is made: after changing one in place, assign ``transform`` again or call
    :meth:`set_transform_hash`. A damaged record is reported, computed again and replaced. A full or read-only disk
    costs the cache and not the epoch. In forked processes, as are workers of a DataLoader, items come as CPU tensors.

    Args:
        data: items, usually dicts of file names; or a dataset that a hit does not read, if it is MONAI's ``Dataset`` or
            ``CacheDataset`` or a GDSDataset, with deterministic transforms only. Any other is read at each access.
        transform: a ``Compose`` or a sequence of transforms, deterministic ones first.
        cache_dir: folder of the records, made when it is missing. ``~`` is the home directory. None: nothing is cached.
        device: the target: an int, ``"cuda:N"``, ``"cpu"``, a ``torch.device``, or None for a GPU if there is one.
        hash_func: item -> hash as bytes. The default is stable from run to run; MONAI's ``pickle_hashing`` is not.
        hash_transform: transforms -> hash as bytes, a part of every key. None leaves transforms out of the key.
        reset_ops_id: removes the identity of transform objects from applied operations, so that other instances of the
            same transforms can invert cached items.
        pickle_module, pickle_protocol, weights_only: MONAI's, without effect: nothing is pickled.
        track_meta: False turns MetaTensors into plain tensors, on a miss and a hit alike.
        backend: how bytes are moved: ``"auto"``, or a name that :func:`monai_gds.available_backends` lists.
        backend_options: keyword arguments of the backend, see its class.
        root: a folder that keys and records are relative to, so that a cache still serves data that were moved. Paths
            below it, in items, transforms and metadata, are stored without it and come back below the reader's root.
        version: your own word for what the key cannot see, such as the release of a network that a transform asks over
            HTTP: any value with a stable hash. Another value means other records. None adds nothing.
        compression: the form of new records, which is not part of the key. ``"lz4"`` and ``"zstd"`` cut tensors of
            1 MiB and more into tiles and compress these without loss, if a tensor gets at least 15 % smaller.
            ``"bitcomp"`` is nvCOMP's, and readable on a CUDA device only. None stores tensors as they are. ``"auto"``
            takes ``"lz4"``, if Blosc2 is installed, where crops come first among the random transforms and where a CUDA
            device unpacks tiles; on a CPU target, tensors of up to 64 MiB stay whole unless crops follow a label.
        max_bytes: how much the records in ``cache_dir`` may occupy, such as ``"500GB"``. When a new one does not fit,
            others are deleted, the longest unused ones first: not those of pipelines that a dataset of a running
            process has, and not those that were made or first read since this dataset was made. If that gives too
            little room, items that do not fit are computed in every epoch, with one warning. Processes that save
            together may exceed it by up to 1 GiB each. None: no limit.
        local_dir: a folder on this machine's own drive, for a ``cache_dir`` that many machines share. Records that are
            read there are copied here for all processes of this machine. New records go to ``cache_dir``.
        populate: fills the cache now, as MONAI's ``CacheDataset`` does: with a worker per core and a progress bar, so
            that errors in the data show here. No rank waits for another. This process then looks at no source again
            (``sources="once"``): it may be gone.
        strict: whether a cache that cannot be written is an error now, and not a warning and an epoch of misses. Where
            there is a budget, the first missing record is made now; with ``populate``, there must be room for all.
        options: further settings, as :class:`CacheOptions` or a dict of them.

    Raises:
        TypeError: an argument is of the wrong type, or there is no such argument or option of the backend.
        ValueError: no such device, backend, folder or choice; choices that contradict each other.
        NotSaved: ``strict``, and nothing can be written to ``cache_dir``.
        BackendUnavailable, CodecMissing: the backend does not work here; the codec's library is not installed.
        HashingError: a transform, or on access an item, has no stable hash.
        UnsupportedType, PopulateError: on access, with ``unsupported="error"``; items failed, with ``populate``.

    Example:
        >>> import tempfile, numpy as np
        >>> from monai.transforms import Compose, EnsureTyped, RandFlipd, ScaleIntensityd
        >>> transform = Compose([EnsureTyped("image"), ScaleIntensityd("image"), RandFlipd("image", prob=0.5)])
        >>> items = [{"image": np.random.rand(1, 8, 8, 8)} for _ in range(3)]
        >>> with tempfile.TemporaryDirectory() as folder, GDSDataset(items, transform, folder, device="cpu") as dataset:
        ...     tuple(dataset[0]["image"].shape)
        (1, 8, 8, 8)
    """

    transform = _Pipeline()

    def __init__(
        self, data: Sequence[Any], transform: Sequence[Callable[..., Any]] | Callable[..., Any],
        cache_dir: Path | str | None, device: int | str | torch.device | None = None,
        hash_func: Callable[..., bytes] = canonical_hash, hash_transform: HashTransform = canonical_hash,
        reset_ops_id: bool = True, pickle_module: str = "pickle", pickle_protocol: int = DEFAULT_PROTOCOL,
        track_meta: bool = True, weights_only: bool = True, *,
        backend: str = "auto", backend_options: Mapping[str, Any] | None = None,
        root: str | os.PathLike[str] | None = None, version: Any = None,
        compression: Literal["auto"] | Codec | None = "auto", max_bytes: float | str | None = None,
        local_dir: Path | str | None = None, populate: bool = False, strict: bool = False,
        options: CacheOptions | Mapping[str, Any] = DEFAULTS, **others: Any,
    ) -> None:  # fmt: skip
        """Makes the dataset, and hashes its transforms. See the class for the arguments."""
        refuse(others, signature(GDSDataset).parameters)
        check_data(data, hash_func, hash_transform)
        # Without cache_dir: the base class would raise where ours only warns, and hash transforms its own way.
        PersistentDataset.__init__(  # not super(): a stand-in for another dataset of MONAI's derives from that, too
            self, data, transform, None, hash_func, pickle_module, pickle_protocol, reset_ops_id=reset_ops_id,
            track_meta=track_meta, weights_only=weights_only,
        )  # fmt: skip
        check_transforms(self.transform.transforms)
        self.hash_transform = hash_transform
        options = CacheOptions.of(options).once() if populate else options
        self.settings = Settings.of(
            device, backend, backend_options, root, version, compression, cache_dir, max_bytes, local_dir, options,
            track_meta, strict,
        )  # fmt: skip
        self.cache_dir, self.device = self.settings.cache_dir, self.settings.device
        self.backend, self.backend_reason = self.settings.backend, self.settings.backend_reason
        self._runtime = Runtime()
        self.session.split()
        if strict:
            self._check_room()
        if populate:
            fill(self)
        if type(self)._pre_transform is not GDSDataset._pre_transform:
            self._runtime.split = None  # the subclass may go on to set what it reads

    @property
    def session(self) -> Session:
        """What this dataset does in this process, for loaders and for filling the cache."""
        own_end = type(self)._post_transform is not GDSDataset._post_transform
        return Session(self, self.settings, self._runtime, own_end)

    def set_data(self, data: Sequence[Any]) -> None:
        """Takes new data. No record is deleted, since others may use it. Raises TypeError unless it is a sequence."""
        check_data(data)
        self.data = data
        self._runtime.misses.repeats = Repeats()  # items of other data

    def set_transform_hash(self, hash_xform_func: HashTransform) -> None:
        """Hashes the deterministic transforms and the settings of their ``Compose``. None leaves them out of the key.

        Raises:
            HashingError: a transform has no stable hash.
        """
        self.hash_transform, self._runtime.keys = hash_xform_func, None
        self.session.keys()

    def _pre_transform(self, item_transformed: Any) -> Any:
        out = self.session.split().before(item_transformed)
        if self.reset_ops_id:
            _reset_ops_id(out)
        return out

    def _post_transform(self, item_transformed: Any) -> Any:
        return self._runtime.loops.after(self.session.split(), item_transformed)

    def _transform(self, index: int) -> Any:
        if type(self)._cachecheck is not GDSDataset._cachecheck:  # a subclass's own way from an item to its transforms
            return super()._transform(index)
        with self._runtime.loops.here():
            return self.session.begin([index], alone=True)[0].end()

    def _cachecheck(self, item_transformed: Any) -> Any:
        return self.session.begin([None], [item_transformed], whole=True)[0].finish()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch for torch's and MONAI's loaders: all reads begin before the first is waited for."""
        if changes_items(type(self)):
            return [self[i] for i in indices]
        with self._runtime.loops.here():
            return [begun.end() for begun in self.session.begin(indices)]

    populate = populate  # a function of its own file, with this dataset as its first argument
    _check_room = check_room

    def is_cached(self, index: int) -> bool:
        """Whether an item has a record; only its header is read. Raises HashingError as :meth:`key` does."""
        session = self.session
        return session.caches and session.holds(session.key(index))

    def explain(self, index: int) -> str:
        """Whether an item is a hit, or how it differs from the most similar record, in words. Raises as :meth:`key`."""
        return words.explain(self.session, index)

    def __repr__(self) -> str:
        folder = None if self.cache_dir is None else str(self.cache_dir)
        kind, count = type(self).__name__, len(self.data)
        return f"{kind}({count} items, cache_dir={folder!r}, device='{self.device}', backend={self.backend!r})"

    def __str__(self) -> str:
        return words.describe(self.session)

    def key(self, index: int) -> Key:
        """The key of an item, made now. Raises HashingError if the item has no stable hash."""
        return self.session.key(index)

    def flush(self) -> None:
        """Waits until every item computed so far is saved, or a warning has given the reason why not.

        The ends of a ``with dataset:`` block and of the interpreter do the same.
        """
        self.session.flush()

    def tidy(self) -> None:
        """Removes the half-written files of killed processes from the cache directory."""
        self.settings.tidy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.flush()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runtime": (capture_all(), self._runtime.send())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            apply(state["_runtime"][0])  # a process that is just being spawned starts with the defaults
        self.__dict__.update(state, _runtime=Runtime())
        self._runtime.sent = state["_runtime"][1]


def changes_items(kind: type[GDSDataset]) -> bool:
    """Whether a subclass overrides a method that makes items, so that loaders must call it."""
    names = ("__getitem__", "__getitems__", "_transform", "_cachecheck")
    return any(getattr(kind, name) is not getattr(GDSDataset, name) for name in names)
