"""Last batches, shards and shuffling beside DALI's own iterator over its own reader: equal, or different for a reason.

All combinations of shards, sizes, shuffling, policies, ``pad_last_batch`` and ``stick_to_shard`` are run with DALI in
``make test-long``, and some, in which each two values meet, in ``make test``. DALI has other ways to end an epoch than
we do, since its reader runs on into the next one:

* With ``pad_last_batch=True, stick_to_shard=True``, which is what ranks that stay in step need, all epochs are equal.
* Without ``stick_to_shard``, DALI's default, the shards move on by one with each epoch. Ours stay: the files of a rank
  remain in the page cache of its host. ``shuffle=True`` deals the images out again.
* With ``DROP``, DALI's second epoch begins with the padding that the first one left. Ours is like the first.
* Without ``pad_last_batch``, DALI fills a batch with images of the next shard, which that shard then misses. Ours
  repeats the last image.
* DALI's ``random_shuffle`` draws from a buffer, within one shard; ours, like ``shuffle_after_epoch``, draws one order
  of all images, of which each shard has its part. Which images are drawn cannot be equal; how many of them is.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import pytest

from monai_gds.imagenet import ImageNetDataset, ImageSource, dali_iterator

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")

#: Batches of labels, by epoch.
Epochs = list[list[list[int]]]
Shuffling = Literal["none", "random_shuffle", "shuffle_after_epoch"]

EPOCHS = 3
COMBINATIONS = list(
    itertools.product(
        (1, 2, 3, 4), ((10, 3), (11, 4)), ("none", "random_shuffle", "shuffle_after_epoch"),
        ("FILL", "DROP", "PARTIAL"), (True, False), (True, False),
    )
)  # fmt: skip


def pairs(combination: tuple[Any, ...]) -> set[Any]:
    """Every two values of a combination, with their places."""
    return set(itertools.combinations(enumerate(combination), 2))


def covering_every_pair() -> list[tuple[Any, ...]]:
    """A few of the combinations, in which each two values of two arguments meet."""
    left = set().union(*map(pairs, COMBINATIONS))
    chosen = []
    while left:
        chosen.append(max(COMBINATIONS, key=lambda combination: len(pairs(combination) & left)))
        left -= pairs(chosen[-1])
    return chosen


QUICK = covering_every_pair()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    for i in range(11):
        (folder / f"{i}.jpg").write_bytes(bytes([i]))
    return [str(folder / f"{i}.jpg") for i in range(11)]


def dalis(
    files: list[str], batch: int, shard: int, shards: int, shuffling: Shuffling, policy: str, **how: Any
) -> Epochs:
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    how |= {} if shuffling == "none" else {shuffling: True}

    @pipeline_def(batch_size=batch, num_threads=1, device_id=None, seed=1)
    def labels() -> Any:
        return fn.readers.file(files=files, name="files", shard_id=shard, num_shards=shards, **how)[1]

    epochs = DALIGenericIterator(labels(), ["label"], reader_name="files", last_batch_policy=LastBatchPolicy[policy])
    found = []
    for _ in range(EPOCHS):
        found.append([of_batch[0]["label"].flatten().tolist() for of_batch in epochs])
        epochs.reset()
    return found


def ours(files: list[str], batch: int, shard: int, shards: int, shuffling: Shuffling, policy: str) -> Epochs:
    dataset = ImageNetDataset(
        files=files, batch_size=batch, device="cpu", reader="posix", decode=False, shard_id=shard,
        num_shards=shards, shuffle=shuffling != "none", last_batch_policy=policy,
    )  # fmt: skip
    return [[of_batch["label"].tolist() for of_batch in dataset] for _ in range(EPOCHS)]


def flat(epoch: list[list[int]]) -> list[int]:
    return [label for batch in epoch for label in batch]


def test_there_are_288_combinations_of_which_some_are_quick() -> None:
    assert len(COMBINATIONS) == 288
    assert len(QUICK) <= 24


@pytest.mark.parametrize(
    ("shards", "sizes", "shuffling", "policy", "pad", "stick"),
    [given if given in QUICK else pytest.param(*given, marks=pytest.mark.long) for given in COMBINATIONS],
)
def test_beside_dalis_iterator(
    files: list[str], shards: int, sizes: tuple[int, int], shuffling: Shuffling, policy: str, pad: bool, stick: bool
) -> None:
    count, batch = sizes
    arguments = files[:count], batch
    if policy == "DROP" and count // shards < batch:
        for run in (dalis, ours):
            with pytest.raises((RuntimeError, ValueError), match=r"no data in the pipeline|leaves nothing"):
                run(*arguments, 0, shards, shuffling, policy)
        return
    mine = [ours(*arguments, shard, shards, shuffling, policy) for shard in range(shards)]
    if shuffling == "shuffle_after_epoch" and stick:
        with pytest.raises(RuntimeError, match="stick_to_shard"):
            dalis(*arguments, 0, shards, shuffling, policy, pad_last_batch=pad, stick_to_shard=stick)
        return
    how = {"pad_last_batch": pad, "stick_to_shard": stick}
    theirs = [dalis(*arguments, shard, shards, shuffling, policy, **how) for shard in range(shards)]

    for shard in range(shards):  # the first epoch
        first, reference = mine[shard][0], theirs[shard][0]
        assert list(map(len, first)) == list(map(len, reference))
        if shuffling == "none":
            own = count * (shard + 1) // shards - count * shard // shards  # what comes after these fills a batch
            assert first == reference or (policy == "FILL" and not pad)
            assert flat(first)[:own] == flat(reference)[:own]
    if shuffling == "none" and pad and policy != "DROP":  # and all others
        for shard, epoch in itertools.product(range(shards), range(EPOCHS)):
            assert theirs[shard][epoch] == mine[shard if stick else (shard + epoch) % shards][epoch]
    for epoch in range(EPOCHS):  # together the shards have each image
        seen = [label for shard in mine for label in flat(shard[epoch])]
        if policy == "PARTIAL":
            assert sorted(seen) == list(range(count))
            if pad:
                assert sorted(label for shard in theirs for label in flat(shard[epoch])) == sorted(seen)
        elif policy == "FILL":
            assert set(seen) == set(range(count))
        else:
            assert len(set(seen)) == len(seen) == shards * batch * (count // shards // batch)


def test_an_evaluation_counts_each_image_once(folder: Path) -> None:
    """Also where a shard has a batch less than the others: it ends with an empty one, in the form of the others."""

    def seen(**how: Any) -> list[list[int]]:
        ends = []
        labels: list[int] = []
        for shard in range(3):
            files = sorted(map(str, folder.glob("*/*")))[:10]
            dataset = ImageNetDataset(
                files=files, batch_size=3, device="cpu", shard_id=shard, num_shards=3, crop=(8, 9), normalize=True,
                **how,
            )  # fmt: skip
            batches = list(dataset)
            assert len(batches) == len(dataset) == 2
            labels += [label for batch in batches for label in batch["label"].tolist()]
            ends.append([batches[-1]["image"].shape[0], len(batches[-1]["label"])])
            assert batches[-1]["image"].shape[1:] == (3, 8, 9)
            assert batches[-1]["image"].dtype == batches[0]["image"].dtype
            assert batches[-1]["label"].dtype == batches[0]["label"].dtype
        return [sorted(labels), *ends]

    for exact in ({"last_batch": "exact"}, {"last_batch_policy": "PARTIAL"}):
        assert seen(**exact) == [list(range(10)), [0, 0], [0, 0], [1, 1]]
    assert seen() == seen(last_batch="partial") == [sorted([*range(10), 2, 5]), [1, 1], [1, 1], [1, 1]]


def test_an_empty_batch_of_images_of_many_sizes_is_an_empty_list(folder: Path) -> None:
    files = sorted(map(str, folder.glob("*/*")))[:10]
    dataset = ImageNetDataset(files=files, batch_size=3, device="cpu", shard_id=0, num_shards=3, last_batch="exact")
    for _ in range(2):
        first, last = dataset
        assert len(first["image"]) == 3
        assert last["image"] == []
        assert last["label"].tolist() == []
    source = ImageSource(files=files, batch_size=3, shard_id=0, num_shards=3, last_batch="exact")
    assert len(source) == len(list(source)) == 1  # DALI cannot be fed with none


def test_dalis_policy_is_taken_as_such_or_by_name_but_not_beside_ours(folder: Path) -> None:
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy

    for policy, batches in zip(LastBatchPolicy, ([4] * 6, [4] * 5, [4] * 5 + [3]), strict=True):
        for given in (policy, policy.name):
            dataset = ImageNetDataset(folder, 4, device="cpu", decode=False, last_batch_policy=given)
            assert [len(batch["label"]) for batch in dataset] == batches
    with pytest.raises(ValueError, match="give one of them"):
        ImageNetDataset(folder, 4, device="cpu", last_batch="drop", last_batch_policy="DROP")
    with pytest.raises(ValueError, match="'partial' must be one of FILL, DROP, PARTIAL"):
        ImageNetDataset(folder, 4, device="cpu", last_batch_policy="partial")


@pytest.mark.parametrize(
    ("policy", "last"), [(None, [8, 9]), ("PARTIAL", [8, 9]), ("FILL", [8, 9, 9, 9]), ("DROP", None)]
)
def test_the_last_samples_of_any_iterable(policy: str | None, last: list[int] | None) -> None:
    loader = dali_iterator([{"x": i} for i in range(10)], 4, device="cpu", last_batch_policy=policy)
    for _ in range(2):
        expected = [[0, 1, 2, 3], [4, 5, 6, 7], *([last] if last else [])]
        assert [batch["x"].flatten().tolist() for batch in loader] == expected
    with pytest.raises(ValueError, match="a source of batches has already made its last batch"):
        dali_iterator([], 4, device="cpu", already_batched=True, last_batch_policy="FILL")
