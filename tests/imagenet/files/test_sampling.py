"""Orders of visiting: each image once, in step over shards, as DALI's own policies have it."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monai_gds.imagenet.files.sampling import LastBatch, Sampler


@st.composite
def samplers(draw: st.DrawFn) -> list[Sampler]:
    """All shards of a run."""
    shards = draw(st.integers(1, 5))
    count = draw(st.integers(shards, 60))
    policy = draw(st.sampled_from(get_args(LastBatch)))
    most = count // shards if policy == "drop" else 70
    bounds = None
    if draw(st.booleans()):
        cuts = draw(st.sets(st.integers(1, count - 1), max_size=6)) if count > 1 else set()
        bounds = np.asarray([0, *sorted(cuts), count])
    arguments: dict[str, Any] = {
        "batch_size": draw(st.integers(1, most)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
        "last_batch": policy,
        "bounds": bounds,
        "window": draw(st.integers(1, 3) | st.none()),
    }
    return [Sampler(count, shard_id=i, num_shards=shards, **arguments) for i in range(shards)]


@given(samplers(), st.integers(0, 3))
def test_every_shard_has_as_many_batches_as_it_says(shards: list[Sampler], epoch: int) -> None:
    assert len({len(s) for s in shards}) == 1
    for s in shards:
        batches = s.epoch(epoch)
        assert len(batches) == len(s) > 0
        assert all(len(b) == s.batch_size for b in batches[:-1])
        least = {"partial": 1, "exact": 0}.get(s.last_batch, s.batch_size)
        assert least <= len(batches[-1]) <= s.batch_size
        assert s.ends_empty == (not len(batches[-1]))


@given(samplers(), st.integers(0, 3))
def test_together_they_see_each_image_once(shards: list[Sampler], epoch: int) -> None:
    seen = Counter(int(i) for s in shards for b in s.epoch(epoch) for i in b)
    s = shards[0]
    assert set(seen) <= set(range(s.count))
    if s.last_batch == "drop":
        assert max(seen.values()) == 1
        assert len(seen) == len(shards) * len(s) * s.batch_size
    else:
        assert len(seen) == s.count
        if s.last_batch == "exact":
            assert set(seen.values()) == {1}
        if s.last_batch == "partial":  # at most one repeated, by a shard that would have a batch fewer
            assert sum(seen.values()) - s.count < len(shards)
            assert len(shards) > 1 or sum(seen.values()) == s.count


@given(samplers(), st.integers(0, 3))
def test_unshuffled_is_the_order_of_the_list(shards: list[Sampler], epoch: int) -> None:
    for s in shards:
        if not s.shuffle:
            flat = np.concatenate(s.epoch(epoch)).tolist()
            start = s.count * s.shard_id // s.num_shards
            stop = s.count * (s.shard_id + 1) // s.num_shards
            assert flat[: stop - start] == list(range(start, stop))[: len(flat)]
            assert set(flat[stop - start :]) <= {stop - 1}


def test_orders_depend_on_seed_and_epoch_only() -> None:
    def order(**changes: Any) -> list[int]:
        epoch = changes.pop("epoch", 0)
        return np.concatenate(Sampler(500, 10, shuffle=True, **changes).epoch(epoch)).tolist()  # type: ignore[no-any-return]

    assert order() == order()
    assert order() != order(seed=1)
    assert order() != order(epoch=1)
    bounds = np.arange(0, 501, 20)
    assert order(bounds=bounds, window=8) != order(bounds=bounds, window=8, epoch=1)
    assert order(bounds=bounds) == order()


def test_a_window_holds_few_files_and_mixes_them() -> None:
    bounds = np.arange(0, 1001, 50)
    batches = Sampler(1000, 20, shuffle=True, bounds=bounds, window=4).epoch(0)
    for start in range(0, 50, 10):  # ten batches are a window of four files
        files = np.concatenate(batches[start : start + 10]) // 50
        assert len(set(files.tolist())) == 4
        assert len(set((batches[start] // 50).tolist())) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "8"}, "batch_size must be an int, not '8'"),
        ({"batch_size": 2.0}, "batch_size must be an int, not 2.0"),
        ({"batch_size": True}, "batch_size must be an int, not True"),
        ({"num_shards": "1"}, "num_shards must be an int"),
        ({"shard_id": 2, "num_shards": 2}, "shard_id=2"),
        ({"shard_id": -1, "num_shards": 2}, "shard_id=-1"),
        ({"num_shards": 0}, "num_shards=0"),
        ({"count": 2, "num_shards": 3}, "cannot be spread"),
        ({"last_batch": "pad"}, "last_batch='pad'"),
        ({"batch_size": 11, "last_batch": "drop"}, "larger than a shard of 10 images"),
        ({"window": 0}, "window=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**{"count": 10, "batch_size": 2, **changes})


def test_an_integer_of_numpy_is_one() -> None:
    assert len(Sampler(10, np.int64(2), seed=np.uint32(1))) == 5  # type: ignore[arg-type]


def test_a_shard_with_one_batch_fewer_ends_empty() -> None:
    shards = [Sampler(10, 3, shard_id=i, num_shards=3, last_batch="exact") for i in range(3)]
    assert [[len(batch) for batch in s.epoch(0)] for s in shards] == [[3, 0], [3, 0], [3, 1]]
    assert [s.ends_empty for s in shards] == [True, True, False]
