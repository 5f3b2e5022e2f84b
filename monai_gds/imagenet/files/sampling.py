"""The order of images in an epoch: shuffling, shards of a distributed run, the last batch."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from monai_gds.base.checksum import mix

LastBatch: TypeAlias = Literal["fill", "drop", "partial", "exact"]

#: The policy for each name of DALI's LastBatchPolicy.
_DALIS: dict[str, LastBatch] = {"FILL": "fill", "DROP": "drop", "PARTIAL": "exact"}


def policy_named(last_batch: LastBatch | None, last_batch_policy: Any) -> LastBatch:
    """The policy that a user chose, by our name or DALI's; ``"partial"`` if neither is given.

    Args:
        last_batch: one of ours.
        last_batch_policy: one of ``nvidia.dali.plugin.base_iterator.LastBatchPolicy``, or its name.

    Raises:
        ValueError: both are given, or DALI has no such policy.
    """
    if last_batch_policy is None:
        return last_batch or "partial"
    if last_batch is not None:
        raise ValueError(
            "last_batch and last_batch_policy both choose what becomes of the last batch: give one of them"
        )
    name = getattr(last_batch_policy, "name", last_batch_policy)
    if name not in _DALIS:
        raise ValueError(f"last_batch_policy={last_batch_policy!r} must be one of {', '.join(_DALIS)}")
    return _DALIS[name]


def check_int(name: str, value: object, least: int) -> None:
    """Raises a ValueError that names the argument unless it is an integer, possibly NumPy's, and not too small."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{name}={value}: it must be at least {least}")


def uniform(seed: int, epoch: int, images: np.ndarray, count: int) -> np.ndarray:
    """Random numbers of images, from 0 to below 1, float32 (images, count).

    They depend on the seed, the epoch and the index of an image: not on its batch, its shard, or what was drawn before.
    """
    start = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    number = images.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
    return (mix(start + number) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


@dataclass(frozen=True)
class Sampler:
    """Which images each batch of an epoch holds.

    A shard is images ``count * shard_id // num_shards`` to ``count * (shard_id + 1) // num_shards`` of the epoch's
    order, as in DALI. Every shard has the same number of batches, so that the ranks of a distributed run stay in step.
    Where shards are uneven, and one would have one batch fewer than another, the policies differ. Of 10 images over 3
    shards, in batches of 3, the first shard sees

    ============= ========================= ======================================
    ``last_batch`` batches of the first shard images seen by all shards
    ============= ========================= ======================================
    ``"partial"`` ``[0, 1, 2], [2]``        12: two of them twice
    ``"exact"``   ``[0, 1, 2], []``         10: each once, as an evaluation counts
    ``"fill"``    ``[0, 1, 2], [2, 2, 2]``  18
    ``"drop"``    ``[0, 1, 2]``             9
    ============= ========================= ======================================

    Args:
        count: images in all.
        batch_size: images per batch.
        shuffle: a new order every epoch; otherwise the order of the list.
        seed: seeds the order, 0 or more. The shards of a run must use the same.
        shard_id, num_shards: this shard, and how many there are.
        last_batch: ``"fill"`` repeats the shard's last image until the last batch is full; ``"drop"`` drops an
            incomplete last batch; ``"partial"`` makes the last batch smaller, and repeats one image if this shard would
            otherwise have one batch fewer than another; ``"exact"`` repeats none, so that the last batch may be empty.
        bounds: where the files of a packed folder begin and end, (files + 1,); None for single images.
        window: with ``bounds``, files are shuffled, and then images within this many files at a time. None: all images.

    Raises:
        ValueError: an argument is not an int or out of range, or there would be no batch.
    """

    count: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    shard_id: int = 0
    num_shards: int = 1
    last_batch: LastBatch = "partial"
    bounds: np.ndarray | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seed", 0), ("shard_id", 0), ("num_shards", 1)):
            check_int(name, getattr(self, name), least)
        check_int("window", 1 if self.window is None else self.window, 1)
        if self.shard_id >= self.num_shards:
            raise ValueError(f"shard_id={self.shard_id} must be below num_shards={self.num_shards}")
        if self.last_batch not in get_args(LastBatch):
            raise ValueError(f"last_batch={self.last_batch!r} must be one of {', '.join(get_args(LastBatch))}")
        if self.count < self.num_shards:
            raise ValueError(f"{self.count} images cannot be spread over num_shards={self.num_shards}")
        if len(self) == 0:
            raise ValueError(
                f"batch_size={self.batch_size} is larger than a shard of {self.count // self.num_shards} images, and "
                'last_batch="drop" leaves nothing: choose a smaller batch, "partial" or "fill"'
            )

    def __len__(self) -> int:
        """Batches per epoch, the same for every shard."""
        if self.last_batch == "drop":
            return self.count // self.num_shards // self.batch_size
        return -(-self.count // (self.num_shards * self.batch_size))

    @property
    def ends_empty(self) -> bool:
        """Whether this shard's last batch is empty, because another shard has one batch more."""
        images = self._share.stop - self._share.start
        return self.last_batch == "exact" and images <= (len(self) - 1) * self.batch_size

    @property
    def _share(self) -> slice:
        start, stop = (self.count * shard // self.num_shards for shard in (self.shard_id, self.shard_id + 1))
        return slice(start, stop)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The image indices of each batch of an epoch, int64."""
        order = self._order(epoch)[self._share]
        if self.shuffle and self.bounds is not None and self.window:
            # within windows of whole files, whose images are adjacent
            random = np.random.default_rng([self.seed, epoch, self.shard_id])
            file = np.searchsorted(self.bounds, order, side="right")
            nth_file = np.concatenate([[0], np.cumsum(file[1:] != file[:-1])])
            order = order[np.lexsort((random.random(len(order)), nth_file // self.window))]
        missing = len(self) * self.batch_size - len(order)
        if self.last_batch == "partial":
            missing = max(0, missing - self.batch_size + 1)
        elif self.last_batch == "exact":
            missing = 0
        if missing > 0:
            order = np.concatenate([order, np.full(missing, order[-1])])
        return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.count)
        random = np.random.default_rng([self.seed, epoch])
        if self.bounds is None or not self.window:
            return random.permutation(self.count)
        files = random.permutation(len(self.bounds) - 1)
        return np.concatenate([np.arange(self.bounds[f], self.bounds[f + 1]) for f in files])
