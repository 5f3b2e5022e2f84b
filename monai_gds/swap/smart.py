"""``SmartCacheDataset``: MONAI's, which trains on a part of the data and replaces a share of it in every epoch."""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from monai.data import SmartCacheDataset as Theirs

from monai_gds.dataset.dataset import GDSDataset
from monai_gds.dataset.inner import Picked
from monai_gds.dataset.populate import Populated
from monai_gds.swap.cached import Cached, CachedItems


class _Replaced(CachedItems):
    """The items of the window. MONAI's code replaces items in this list, of which it has the positions among all."""

    def __delitem__(self, which: Any) -> None:
        del self._dataset._positions[which]

    def extend(self, positions: Any) -> None:
        self._dataset._positions.extend(positions)


class SmartCacheDataset(Cached, Theirs):  # type: ignore[misc]  # MONAI is untyped
    """MONAI's ``SmartCacheDataset`` over records: each epoch trains on ``cache_num`` items, and a share is replaced.

    The order of the items, and :meth:`start`, :meth:`update_cache` and :meth:`shutdown`, are MONAI's own. Replaced
    items keep their records, so they are computed once and not in every round. The items that come next are computed by
    threads in the background, as in MONAI; one that fails there raises when it is read.

    Args:
        data: all items, usually dicts of file names.
        transform: a ``Compose`` or a sequence of transforms, deterministic ones first.
        replace_rate: the share of the ``cache_num`` items that is replaced in each epoch, more than 0.
        cache_num, cache_rate: how many items an epoch has: the lesser of a number, and a share of all.
        num_init_workers: how many processes compute the first items; 1, as MONAI's default, and None: one per core.
        num_replace_workers: how many threads compute the items that come next; None: one per core.
        progress: shows a bar while the first items are computed.
        shuffle: whether a copy of ``data`` is shuffled first.
        seed: of that shuffling.
        copy_cache, as_contiguous: without effect: each access has a copy of its own, which is contiguous.
        runtime_cache: False, as in MONAI.
        options: arguments of :class:`~monai_gds.GDSDataset`: ``cache_dir``, ``device``, ``compression``…

    Raises:
        ValueError: ``replace_rate`` is not positive; or as :class:`~monai_gds.GDSDataset` does.
        NotImplementedError: ``runtime_cache`` is not False.
        PopulateError: some of the first items failed.

    Example:
        >>> import tempfile
        >>> from monai.transforms import Compose, EnsureType
        >>> from monai_gds import SmartCacheDataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = {"cache_dir": folder, "device": "cpu"}
        ...     dataset = SmartCacheDataset(
        ...         [1, 2, 3, 4], Compose([EnsureType()]), 0.5, cache_num=2, shuffle=False, **options
        ...     )
        ...     first = [int(item) for item in dataset]
        ...     dataset.update_cache()
        ...     second = [int(item) for item in dataset]
        ...     dataset.shutdown()
        >>> first, second
        ([1, 2], [2, 3])
    """

    _theirs = Theirs
    _is_last = False  # whether no round comes after this one

    def __init__(
        self,
        data: Sequence[Any],
        transform: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        replace_rate: float = 0.1,
        cache_num: int = sys.maxsize,
        cache_rate: float = 1.0,
        num_init_workers: int | None = 1,
        num_replace_workers: int | None = 1,
        progress: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        copy_cache: bool = True,
        as_contiguous: bool = True,
        runtime_cache: Any = False,
        **options: Any,
    ) -> None:
        self._replace_rate = replace_rate
        super().__init__(
            data, transform, replace_rate, cache_num, cache_rate, num_init_workers, num_replace_workers, progress,
            shuffle, seed, copy_cache, as_contiguous, runtime_cache, **options,
        )  # fmt: skip

    @property
    def data(self) -> Sequence[Any]:
        """The items of this epoch."""
        return Picked(self._all, self._positions) if "_positions" in vars(self) else self._all

    @data.setter
    def data(self, data: Sequence[Any]) -> None:
        self._all = data
        self.__dict__.pop("_positions", None)

    @property
    def _cached(self) -> Sequence[int]:  # type: ignore[override]  # it follows from others
        return range(len(self._positions))

    @property
    def _cache(self) -> Any:
        return _Replaced(self)

    @_cache.setter
    def _cache(self, positions: Any) -> None:
        self._positions = positions

    def set_data(self, data: Sequence[Any]) -> None:
        """Takes new data, of which it shuffles a copy if ``shuffle``, and computes the first items."""
        Theirs.set_data(self, data)  # calls _fill_cache
        if "_total_num" in vars(self):
            self._total_num = len(data)
            self._replace_num: int = min(math.ceil(self.cache_num * self._replace_rate), len(data) - self.cache_num)
            self._replacements, self._replace_data_idx = [None] * self._replace_num, list(range(self._replace_num))
            self._compute_data_idx()

    def populate(self, *args: Any, **kwargs: Any) -> Populated:
        """As :meth:`GDSDataset.populate`, for all items, and not only those of this epoch."""
        every = copy(self)
        every.data = self._all
        return GDSDataset.populate(every, *args, **kwargs)

    def _fill_cache(self, indices: Sequence[int] | None = None) -> list[int]:
        wanted = self._take(self._all)
        positions = list(range(self.cache_num) if indices is None else indices)
        self._fill(wanted or positions)
        return positions

    def _restart(self) -> None:
        _started.add(self)
        super()._restart()

    def _load_cache_item(self, idx: int) -> int:
        """Makes the record of an item. MONAI's threads call this."""
        if self._is_last:
            return idx
        with suppress(Exception):  # whoever reads the item computes it, and raises
            self.session.for_worker().save(idx, anyway=True, item=self._all[idx])
        return idx

    def __getstate__(self) -> dict[str, Any]:
        """A copy, here or in another process, has the same items and replaces none until it is started."""
        own = {"_update_lock": None, "_replace_mgr": None, "_round": 1, "_replace_done": False}
        lists = ("_positions", "_replacements", "_replace_data_idx")  # which MONAI's code changes in place
        state = super().__getstate__()
        return {**state, **own, **{name: list(state[name]) for name in lists if name in state}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_update_lock": threading.Lock()})


#: Those whose threads may run.
_started: weakref.WeakSet[SmartCacheDataset] = weakref.WeakSet()


@atexit.register  # runs before the writer's handler, which saves what these threads computed last
def _shut_down() -> None:
    """Ends what a script did not shut down: a thread that is in torch while the interpreter ends would abort it."""
    for dataset in list(_started):
        dataset._is_last = True
        while dataset.is_started() and not dataset._try_shutdown():  # shutdown() waits for ever if the thread failed
            time.sleep(0.01)
        if dataset._replace_mgr is not None:
            dataset._replace_mgr.join()
