"""An error that is raised while an item is computed names the item, through every loader."""

from __future__ import annotations

import pickle
import re
import threading
import traceback
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
from monai.data import DataLoader, ThreadDataLoader
from torch.utils.data import Subset

from monai_gds import GDSDataLoader, GDSDataset, PopulateError
from monai_gds.base.workers import Workers
from monai_gds.pipeline.words import naming
from tests.fixtures_nifti import pipeline, write_volumes


def note_of(index: Any, item: Any) -> str:
    """What is added to an error."""
    with pytest.raises(ZeroDivisionError) as caught, naming(index, item):
        _ = 1 // 0
    return caught.value.__notes__[-1]


@pytest.mark.parametrize(
    ("index", "item", "expected"),
    [
        (3, {"image": "/data/ct.nii.gz", "age": 40}, "item 3 of the dataset: image=/data/ct.nii.gz"),
        (np.int64(3), "ct.nii.gz", "item 3 of the dataset: ct.nii.gz"),
        (None, {"image": Path("/data/ct")}, "an item of the dataset: image=/data/ct"),
        (0, {"split": "train", "n": 2}, "item 0 of the dataset"),
        (0, {"age": "40.5 years", "text": "a/b\nc"}, "item 0 of the dataset"),
        (0, {"scans": ["a/1", {"t2": "b/2"}]}, "item 0 of the dataset: scans=a/1, scans.t2=b/2"),
        (0, [f"/{n}" for n in range(9)], "item 0 of the dataset: /0, /1, /2, /3, and 5 more"),
        ("x", {"image": "/data"}, "an item of the dataset"),
    ],
)
def test_what_a_note_says(index: Any, item: Any, expected: str) -> None:
    assert note_of(index, item) == f"monai_gds: while computing {expected}"


class Sloppy(mt.Transform):  # type: ignore[misc]
    """Raises an error from itself."""

    def __call__(self, data: Any) -> Any:
        try:
            raise ValueError("no good")
        except ValueError as e:
            raise e from e


@pytest.mark.parametrize(
    "take",
    [
        lambda dataset: dataset[0],
        lambda dataset: dataset.populate(0, progress=False),
        lambda dataset: list(GDSDataLoader(dataset, on_error="skip")),
    ],
    ids=["index", "populate", "skip"],
)
def test_an_error_that_is_its_own_cause(take: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        take(GDSDataset([1, 2], mt.Compose([Sloppy()]), tmp_path, "cpu"))
    assert "no good" in "".join(traceback.format_exception(caught.value))


def test_a_long_path_keeps_its_end(tmp_path: Path) -> None:
    note = note_of(1, {"image": "/data/" + "x" * 5000 + "/ct_3.nii.gz"})
    assert len(note) < 300
    assert note.endswith("x/ct_3.nii.gz")
    assert "image=…" in note


def test_an_item_that_cannot_be_looked_at_hides_no_error() -> None:
    class Strange(dict[Any, Any]):
        def items(self) -> Any:
            raise OSError("no")

    assert note_of(1, Strange()) == "monai_gds: while computing an item of the dataset"


def test_a_note_is_added_once_and_ctrl_c_gets_none() -> None:
    with pytest.raises(ZeroDivisionError) as caught, naming(1, "/a"), naming(1, "/a"):
        _ = 1 // 0
    assert len(caught.value.__notes__) == 1
    with pytest.raises(KeyboardInterrupt) as interrupt, naming(1, "/a"):
        raise KeyboardInterrupt
    assert not hasattr(interrupt.value, "__notes__")


# ---------------------------------------------------------------------------------------------------------------------
# A volume that is broken


@pytest.fixture
def broken(tmp_path: Path) -> GDSDataset:
    """Four items; the label of number 2 is not a volume."""
    items = write_volumes(tmp_path, 4, (12, 12, 12))
    Path(items[2]["label"]).write_bytes(b"not a volume")
    return GDSDataset(items, pipeline(), tmp_path / "cache", device="cpu")


def expected(dataset: GDSDataset) -> str:
    item = dataset.data[2]
    return f"monai_gds: while computing item 2 of the dataset: image={item['image']}, label={item['label']}"


def raised(work: Any) -> str:
    """The traceback that a user sees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work()
        except Exception as e:
            text = "".join(traceback.format_exception(e)).rstrip()
            traceback.clear_frames(e.__traceback__)  # a loader's workers end here, not in a later test
            return text
    pytest.fail("no error")


@pytest.mark.parametrize(
    "load",
    [
        lambda d: d[2],
        lambda d: d[-2],
        lambda d: d[1:][1],
        lambda d: d.__getitems__([0, 2]),
        lambda d: list(DataLoader(d, batch_size=1, num_workers=0)),
        lambda d: list(DataLoader(d, batch_size=1, num_workers=2)),
        # Only the broken item: a spawned worker that ends while torch still pickles a tensor in it may abort.
        pytest.param(
            lambda d: list(DataLoader(Subset(d, [2]), batch_size=1, num_workers=1, multiprocessing_context="spawn")),
            marks=pytest.mark.long,
        ),
        lambda d: list(GDSDataLoader(d, batch_size=1)),
        lambda d: list(GDSDataLoader(Subset(d, [3, 2]), batch_size=1)),
        lambda d: list(GDSDataLoader(d, batch_size=1, num_workers=2)),
    ],
    ids=["index", "negative", "slice", "together", "loader", "fork", "spawn", "ahead", "subset", "workers"],
)
@pytest.mark.parametrize("cached", [True, False])
def test_a_traceback_ends_with_the_item(broken: GDSDataset, load: Any, cached: bool, request: Any) -> None:
    if not cached:
        broken = GDSDataset(broken.data, broken.transform, None, device="cpu")
    text = raised(lambda: load(broken))
    note = expected(broken)
    assert text.endswith(note if "negative" not in request.node.callspec.id else note.replace("item 2", "item -2"))
    assert text.count("while computing") == (2 if "_RemoteTraceback" in text else 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fails", [mt.Lambdad, mt.RandLambdad])
def test_a_traceback_ends_with_the_cause_of_a_transforms_error_once(tmp_path: Path, fails: Any, workers: int) -> None:
    steps = mt.Compose([*pipeline().transforms, mt.Compose([fails("image", lambda image: image.nothing)])])
    dataset = GDSDataset(write_volumes(tmp_path, 1, (12, 12, 12)), steps, tmp_path / "cache", device="cpu")
    lines = raised(lambda: list(GDSDataLoader(dataset, workers))).splitlines()
    assert re.match("because of AttributeError: .* no attribute 'nothing'", lines[-2])
    assert lines[-1].startswith("monai_gds: while computing item 0")
    assert sum("while computing" in line for line in lines) == 1, "the worker's traceback ends with the cause"


class OwnEnd(GDSDataset):
    def _post_transform(self, item_transformed: Any) -> Any:
        return super()._post_transform(item_transformed)  # of the user


def too_bright(image: Any) -> Any:
    raise ArithmeticError("too bright")


@pytest.mark.parametrize("fails", [mt.Lambdad, mt.RandLambdad])
@pytest.mark.parametrize(
    "load",
    [lambda d: d[0], *(lambda d, n=n: list(GDSDataLoader(d, n)) for n in (0, 2))],
    ids=["index", "ahead", "workers"],
)
def test_a_transforms_error_fits_on_a_screen_with_the_users_frames(tmp_path: Path, fails: Any, load: Any) -> None:
    steps = mt.Compose([*pipeline().transforms, fails("image", too_bright), mt.RandFlipd("image")])
    items = write_volumes(tmp_path, 1, (12, 12, 12))
    text = raised(lambda: load(OwnEnd(items, steps, tmp_path / "cache", device="cpu")))
    assert len(text.splitlines()) <= 45
    assert "in too_bright\n" in text
    assert ("# of the user\n" in text) == (fails is mt.RandLambdad)
    assert ", in <lambda>\n" in text, "the line with the loop"
    assert text.count("while computing") == text.count("\nRuntimeError: ")


def test_an_error_that_no_transform_raised_keeps_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = GDSDataset(write_volumes(tmp_path, 1, (12, 12, 12)), pipeline(), tmp_path / "cache", device="cpu")
    monkeypatch.setattr("monai_gds.dataset.making.encode_item", lambda *a, **b: [][0])
    text = raised(lambda: list(GDSDataLoader(dataset, 2)))
    assert "dataset/making.py" in text and "loader/crew/worker.py" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_populate_names_the_cause_once(tmp_path: Path, workers: int) -> None:
    steps = mt.Compose([*pipeline().transforms[:1], mt.Lambdad("image", lambda image: image.nothing)])
    dataset = GDSDataset(write_volumes(tmp_path, 1, (12, 12, 12)), steps, tmp_path / "cache", device="cpu")
    with pytest.raises(PopulateError) as caught:
        dataset.populate(workers)
    assert str(caught.value).count("AttributeError") == 1


def test_saving_names_it(broken: GDSDataset) -> None:
    assert raised(lambda: broken.session.save(2)).endswith(expected(broken))


@pytest.mark.parametrize("programs", ["off", "check"])
def test_a_worker_of_the_loader_names_it_too(broken: GDSDataset, programs: str) -> None:
    assert raised(lambda: list(GDSDataLoader(broken, 1, programs=programs))).endswith(expected(broken))


@pytest.mark.parametrize("workers", [0, 2])
def test_populate_names_it(broken: GDSDataset, workers: int) -> None:
    with pytest.raises(PopulateError) as caught:
        broken.populate(workers)
    label = broken.data[2]["label"]
    assert str(caught.value).splitlines()[-2].startswith(f"  2: {label}: LoadImaged cannot load it: ")
    assert caught.value.failures[0].error.endswith(f"({expected(broken)})")


def test_a_thread_of_monais_prints_it(broken: GDSDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda a: seen.append("".join(traceback.format_exception(a[1]))))
    list(ThreadDataLoader(broken, batch_size=1, num_workers=0))
    assert [text.rstrip().endswith(expected(broken)) for text in seen] == [True]


class Odd(Exception):
    """Survives pickling, and loses its notes by it."""

    def __reduce__(self) -> Any:
        return Odd, self.args


def fail(index: int) -> None:
    with naming(index, "/data/a"):
        raise Odd("odd")


def test_a_worker_does_not_lose_notes() -> None:
    assert not hasattr(pickle.loads(pickle.dumps(Odd("x"))), "__notes__")
    with closing(Workers(fail, 1)) as workers:
        text = raised(workers.submit(7).result)
    assert "Odd: odd" in text
    assert text.endswith("monai_gds: while computing item 7 of the dataset: /data/a")


def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    transform = mt.Compose([mt.Lambda(lambda d: {"x": object()})])
    dataset = GDSDataset(
        [{"file": "/data/a"}], transform, tmp_path / "cache", device="cpu", options={"unsupported": "error"}
    )
    assert raised(lambda: dataset[0]).endswith("item 0 of the dataset: file=/data/a")
