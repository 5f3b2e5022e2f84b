"""dali_iterator: every sample of every epoch, whatever the iterable; and Squirrel's drivers as such."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monai_gds.errors import BackendUnavailable, BrokenImage, ImageListError
from monai_gds.imagenet import dali_iterator, open_images, squirrel_source
from monai_gds.imagenet.dali.pipeline import PipelineFailed
from tests.imagenet.conftest import COUNT
from tools.bench.squirrel_store import write_store

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")


def sample(i: int) -> dict[str, Any]:
    return {"image": np.full((2, 3), i, dtype=np.float32), "label": i}


def loader(source: Any, batch_size: int = 4, *args: Any, **kwargs: Any) -> Any:
    return dali_iterator(source, batch_size, *args, **{"device": "cpu", **kwargs})


def labels(batches: Any) -> list[list[int]]:
    return [batch["label"].flatten().tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [label for batch in labels(batches) for label in batch]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 10, 100])
def test_all_samples_of_every_epoch(count: int) -> None:
    ours = loader([sample(i) for i in range(count)])
    for _ in range(3):
        batches = list(ours)
        assert flat(batches) == list(range(count))
        for batch in batches:
            assert batch["image"].shape[1:] == (2, 3)
            assert batch["image"].dtype == torch.float32
            assert batch["image"][:, 0, 0].tolist() == batch["label"].tolist()


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda a: a.tolist()])
def test_any_kind_of_array(make: Any) -> None:
    items = [{"image": make(np.full((2, 3), i, dtype=np.float64)), "label": make(np.asarray([i]))} for i in range(6)]
    assert flat(loader(items)) == list(range(6))


@pytest.mark.parametrize("already_batched", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.astype(">f4"),
        lambda a: np.asfortranarray(a),
        lambda a: a[::-1, ::2],
        lambda a: torch.from_numpy(a).T,
        lambda a: np.broadcast_to(a[:1], a.shape),
    ],
)
def test_arrays_as_they_lie_in_memory(change: Any, already_batched: bool) -> None:
    """In another byte order, transposed, with gaps: the values are what they were."""
    arrays = [change(np.arange(i, i + 12, dtype=np.float32).reshape(3, 4)) for i in range(4)]
    batched = {"image": np.stack(arrays).astype(arrays[0].dtype) if isinstance(arrays[0], np.ndarray) else arrays}
    (batch,) = loader([batched] if already_batched else [{"image": a} for a in arrays], already_batched=already_batched)
    for ours, theirs in zip(batch["image"], arrays, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_tuples_with_names() -> None:
    items = [(np.full(3, i, dtype=np.uint8), i) for i in range(6)]
    assert labels(loader(items, keys=("image", "label"))) == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match="2 elements: name them all with keys="):
        list(loader(items))


@pytest.mark.parametrize("as_list", [False, True])
def test_batches_as_they_come(as_list: bool) -> None:
    def batches() -> Iterator[dict[str, Any]]:
        for size in (3, 1, 4):
            image = np.arange(size * 5, dtype=np.int32).reshape(size, 5)
            yield {"image": list(image) if as_list else image, "label": np.full(size, size, dtype=np.int32)}

    ours = loader(batches, already_batched=True)
    for _ in range(2):
        assert labels(ours) == [[3] * 3, [1], [4] * 4]
    with pytest.raises(ValueError, match="a batch of 4 'image' is larger than batch_size=3"):
        list(loader(batches, 3, already_batched=True))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": np.zeros((4, 2)), "label": np.zeros((3, 1))}, "'image': 4, 'label': 3"),
        ({"image": [np.zeros(2)] * 4, "label": [np.zeros(2)] * 3}, "'image': 4, 'label': 3"),
        ({"image": np.zeros((0, 2))}, "at least one sample.*'image': 0"),
        ({"image": []}, "at least one sample.*'image': 0"),
        ({"image": np.zeros((4, 2)), "label": 3}, "'image': 4, 'label': 0"),
    ],
)
def test_batches_that_are_none(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(loader([batch], already_batched=True))


@pytest.mark.parametrize("already_batched", [False, True])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.zeros((2, 3), np.float64), "'image' was float32 with 2 axes on the cpu and is now float64 with 2 axes"),
        (np.zeros((2, 3, 1), np.float32), "'image' was float32 with 2 axes on the cpu and is now float32 with 3 axes"),
    ],
)
def test_a_sample_unlike_the_first_is_named(other: np.ndarray, message: str, already_batched: bool) -> None:
    images = [np.zeros((2, 3), np.float32)] * 13 + [other] * 3
    items: list[Any] = [{"image": image} for image in images]
    if already_batched:
        items = [{"image": images[i : i + 4]} for i in range(0, 16, 4)]
    seen: list[Any] = []  # what came before the error
    with pytest.raises(ValueError, match=message):
        seen.extend(loader(items, already_batched=already_batched))
    assert len(seen) == 3


def test_a_graph_may_rename_and_drop() -> None:
    from nvidia.dali import fn

    def graph(nodes: dict[str, Any]) -> dict[str, Any]:
        return {"large": fn.resize(nodes["image"], size=(4, 6)), "label": nodes["label"] + 1}

    items = [{"image": np.full((2, 3, 3), i, dtype=np.uint8), "label": np.int32(i)} for i in range(5)]
    batches = list(loader(items, 4, graph, layouts={"image": "HWC"}))
    assert [tuple(batch) for batch in batches] == [("large", "label")] * 2
    assert batches[0]["large"].shape == (4, 4, 6, 3)
    assert labels(batches) == [[1, 2, 3, 4], [5]]
    for dynamic in (True, False):
        for key in ("image", "label"):
            (first, last) = loader(items, 4, lambda nodes, key=key: {"only": nodes[key]}, exec_dynamic=dynamic)
            assert [tuple(first), len(first["only"]), len(last["only"])] == [("only",), 4, 1]


def test_ragged_samples_come_as_a_list() -> None:
    batches = list(loader([{"image": np.full(i + 1, i, dtype=np.uint8)} for i in range(6)]))
    assert [t.tolist() for t in batches[1]["image"]] == [[4] * 5, [5] * 6]


def test_results_kept_for_long_keep_their_values() -> None:
    batches = list(loader([sample(i) for i in range(200)], 2))
    assert [b["image"][:, 1, 2].tolist() for b in batches] == [[i, i + 1] for i in range(0, 200, 2)]


def test_leaving_a_loop_starts_anew() -> None:
    ours = loader([sample(i) for i in range(40)])
    for batch in ours:
        assert batch["label"].tolist() == [0, 1, 2, 3]
        break
    assert flat(ours) == list(range(40))


def test_a_dropped_one_is_gone_at_once() -> None:
    gc.disable()
    try:
        ours = loader([sample(i) for i in range(40)])
        next(iter(ours))
        gone = weakref.ref(ours)
        del ours
        assert gone() is None
    finally:
        gc.enable()


def test_what_can_be_iterated_once_says_so() -> None:
    ours = loader(sample(i) for i in range(5))
    assert flat(ours) == list(range(5))
    with pytest.raises(RuntimeError, match=r"nothing left for another epoch: give a function"):
        list(ours)
    again = loader(lambda: (sample(i) for i in range(5)))
    assert labels(again) == labels(again)
    assert list(loader([])) == []


@pytest.mark.parametrize("already_batched", [False, True])
def test_an_iterator_that_begins_anew_after_its_end(already_batched: bool) -> None:
    """As those in DALI's documentation do."""

    class Again:
        number = 0

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return self

        def __next__(self) -> dict[str, Any]:
            if self.number == 5:
                self.number = 0
                raise StopIteration
            self.number += 1
            return {"label": [self.number] if already_batched else self.number}

    ours = loader(Again(), 2, already_batched=already_batched)
    for _ in range(2):
        assert flat(islice(ours, 9)) == [1, 2, 3, 4, 5]


def test_an_error_of_the_source_comes_after_what_was_before_it() -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield from (sample(i) for i in range(8))
        raise KeyError("broken source")

    seen: list[Any] = []
    ours = loader(source)
    for _ in range(2):
        with pytest.raises(KeyError, match="broken source"):
            seen.extend(ours)
    assert labels(seen) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_an_error_of_the_graph_leaves_it_usable() -> None:
    from nvidia.dali import fn

    items = [{"image": np.zeros((2, 2, 3), dtype=np.uint8)} for _ in range(8)]
    ours = loader(items, 4, lambda n: {"image": fn.crop(n["image"], crop=(5, 5))}, layouts={"image": "HWC"})
    for _ in range(2):
        with pytest.raises(PipelineFailed):
            list(ours)


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([{"image": np.zeros(2), "name": "x"}], TypeError, "'name' holds str"),
        ([{"image": torch.zeros(2, dtype=torch.bfloat16)}], TypeError, "'image' holds Tensor.*BFloat16"),
        ([{"image": torch.eye(2).to_sparse()}], TypeError, "'image' holds Tensor"),
        ([{"image": [[1], [2, 3]]}], TypeError, "'image' holds list"),
        ([{"image": np.zeros(2, np.longdouble)}], TypeError, "'image' holds ndarray"),
        ([5], TypeError, "dicts or tuples of arrays, not int"),
        ([{"image": 1}, {"picture": 1}], ValueError, "different keys"),
        ([{"image": 1}] * 4 + [{"picture": 1}], ValueError, r"no \['image'\]"),
    ],
)
def test_items_that_cannot_be_used_are_named(items: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(loader(items))


def test_some_keys_only() -> None:
    assert [list(batch) for batch in loader([{"image": np.zeros(2), "name": "x"}], keys=["image"])] == [["image"]]
    assert [list(batch) for batch in loader([{"image": np.zeros(2), "name": "x"}], keys="image")] == [["image"]]


@pytest.mark.parametrize(("size", "message"), [(0, "batch_size=0"), ("8", "batch_size must be an int, not '8'")])
def test_a_batch_size_that_makes_no_sense_is_refused(size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader([], size)


# Squirrel.


@pytest.fixture
def driver(folder: Path, tmp_path: Path) -> Any:
    module = pytest.importorskip("squirrel.driver", reason="squirrel-core is not installed")
    write_store(open_images(folder), tmp_path / "store", size=20, shard_size=5)  # type: ignore[arg-type]
    return module.MessagepackDriver(str(tmp_path / "store"))


def test_a_messagepack_store_of_images(driver: Any, folder: Path) -> None:
    ours = loader(squirrel_source(driver), layouts={"image": "CHW"})
    expected = sorted(open_images(folder).labels.tolist())  # type: ignore[union-attr]
    for _ in range(2):
        batches = list(ours)
        assert sorted(flat(batches)) == expected
        assert {tuple(b["image"].shape[1:]) for b in batches} == {(3, 20, 20)}
        assert batches[0]["image"].dtype == torch.uint8


def test_a_store_holds_the_pictures_of_the_folder(driver: Any, folder: Path) -> None:
    module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    images = open_images(folder)
    stored = sorted(driver.get_iter().collect(), key=lambda s: s["label"])
    assert len(stored) == COUNT
    mean = dict.fromkeys(range(4), 0.0)
    for i in range(COUNT):
        mean[int(images.labels[i])] += np.asarray(module.open(images.path(i)).convert("RGB")).mean()  # type: ignore[union-attr]
    for s in stored:
        mean[s["label"]] -= s["image"].mean()
    assert all(abs(difference) < 60 for difference in mean.values())  # the middle is not quite the whole


def test_a_composable_and_a_function_that_makes_it(driver: Any) -> None:
    def stream() -> Any:
        return driver.get_iter().map(lambda s: {"label": s["label"] + 100})

    again = loader(squirrel_source(stream))
    assert len(flat(again)) == len(flat(again)) == COUNT
    again = loader(squirrel_source(stream()))
    assert len(flat(again)) == len(flat(again)) == COUNT


def test_a_stream_that_is_used_up_says_so() -> None:
    iterstream = pytest.importorskip("squirrel.iterstream", reason="squirrel-core is not installed")
    once = loader(squirrel_source(iterstream.IterableSource(sample(i) for i in range(5))))
    assert flat(once) == list(range(5))
    with pytest.raises(RuntimeError, match="nothing left for another epoch: give a function"):
        list(once)


def test_options_reach_the_driver(driver: Any) -> None:
    assert sum(map(len, labels(loader(squirrel_source(driver, shuffle_key_buffer=5, max_workers=1))))) == COUNT
    with pytest.raises(TypeError, match="only a driver takes options"):
        squirrel_source([], max_workers=1)


class Attack:
    """What runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("options", [{}, {"max_workers": 1}, {"get_kwargs": {"unpacker_kwargs": {"use_list": True}}}])
def test_a_store_runs_no_code(tmp_path: Path, options: dict[str, Any]) -> None:
    """Squirrel itself unpickles arrays of objects."""
    module = pytest.importorskip("squirrel.driver", reason="squirrel-core is not installed")
    driver = module.MessagepackDriver(str(tmp_path / "store"))
    proof = tmp_path / "proof"
    driver.store.set([{"image": np.array([Attack(proof)], dtype=object)}], key="0")
    with pytest.raises(ImageListError, match=r"store holds an array of Python objects.*write the store again"):
        list(loader(squirrel_source(driver, **options)))
    assert not proof.exists()
    with pytest.raises(TypeError, match="not an array of numbers"):
        list(loader(squirrel_source(driver.get_iter)))
    assert proof.exists(), "the attack works where nothing refuses it"


@pytest.mark.parametrize("kind", [b"", b"V"])
def test_addresses_in_a_store_are_not_taken_for_objects(tmp_path: Path, kind: bytes) -> None:
    """NumPy makes an array of objects over any bytes: touching one would read any memory."""
    module = pytest.importorskip("squirrel.driver", reason="squirrel-core is not installed")
    driver = module.MessagepackDriver(str(tmp_path / "store"))
    dtype: Any = [("a", "O")] if kind else "O"
    array = {b"nd": True, b"type": dtype, b"kind": kind, b"shape": [1], b"data": b"\x01" * 8}
    driver.store.set([{"image": array}], key="0")
    with pytest.raises(ImageListError, match="an array of Python objects"):
        list(loader(squirrel_source(driver)))


def test_other_drivers_and_structured_arrays_are_read_as_before(tmp_path: Path) -> None:
    module = pytest.importorskip("squirrel.driver", reason="squirrel-core is not installed")
    driver = module.MessagepackDriver(str(tmp_path / "store"))
    structured = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    driver.store.set([{"plain": np.arange(3), "number": np.float32(2), "structured": structured, "text": "O"}], key="0")
    (found,) = squirrel_source(driver)()  # type: ignore[operator, misc]
    assert found["plain"].tolist() == [0, 1, 2]
    assert (found["number"], found["text"]) == (2, "O")
    assert found["structured"].tobytes() == structured.tobytes()
    jsonl = module.JsonlDriver(str(tmp_path / "lines"))
    jsonl.store.set([{"label": 3}], key="0")
    assert list(squirrel_source(jsonl)()) == [{"label": 3}]  # type: ignore[operator]


def test_a_store_needs_an_empty_folder_and_whole_images(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("squirrel", reason="squirrel-core is not installed")
    with pytest.raises(ImageListError, match="not empty"):
        write_store(open_images(folder), folder)  # type: ignore[arg-type]
    (tmp_path / "in" / "n0").mkdir(parents=True)
    for number, bad in enumerate((b"no image", b"P6 9 9 2x5 ")):  # Pillow's errors: OSError, ValueError
        (tmp_path / "in" / "n0" / "bad.ppm").write_bytes(bad)
        with pytest.raises(BrokenImage, match=r"bad\.ppm: it cannot be decoded"):
            write_store(open_images(tmp_path / "in"), tmp_path / f"out{number}")  # type: ignore[arg-type]


def test_a_store_holds_pictures_turned_as_their_exif_data_tell(tmp_path: Path) -> None:
    module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    driver = pytest.importorskip("squirrel.driver", reason="squirrel-core is not installed")
    picture = module.new("L", (40, 40))
    picture.paste(255, (0, 0, 20, 40))  # white on the left
    exif = module.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees: white above
    picture.save(tmp_path / "a.jpg", exif=exif)
    write_store(open_images(tmp_path), tmp_path / "store", size=40)  # type: ignore[arg-type]
    (found,) = driver.MessagepackDriver(str(tmp_path / "store")).get_iter().collect()
    assert found["image"][:, :10].min() > 200
    assert found["image"][:, 30:].max() < 50


def test_without_squirrel_the_extra_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "squirrel.store", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'monai_gds\[squirrel\]'"):
        write_store(open_images(folder), tmp_path / "out")  # type: ignore[arg-type]
