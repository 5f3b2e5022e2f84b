"""What items have read without naming it: every part of the cache agrees, in every process, and hits cost no more."""

from __future__ import annotations

import functools
import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch

from monai_gds import CacheWarning, GDSDataset, PopulateError, limits
from monai_gds.folder.maintenance import Unwanted, prunable, survey
from monai_gds.keys import kept, source_memo
from monai_gds.keys import key as key_module
from monai_gds.keys.sources import Sources
from tests.commands import run


class AddAtlas(mt.Transform):
    """Adds up a file of a folder that the environment names, and counts its calls."""

    calls = 0

    def __cache_key__(self) -> tuple[str, ...]:
        return type(self).__name__, os.environ["ATLASES"]

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        AddAtlas.calls += 1
        return {"x": torch.full((4,), data["n"] + self.value())}

    def value(self) -> float:
        with open(os.path.join(os.environ["ATLASES"], "atlas.txt")) as file:
            return float(file.read())


@pytest.fixture
def atlas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "atlases" / "atlas.txt"
    path.parent.mkdir()
    path.write_text("10")
    monkeypatch.setenv("ATLASES", str(path.parent))
    monkeypatch.setattr(kept, "_all", {})  # what one test has read does not count for others
    monkeypatch.setattr(AddAtlas, "calls", 0)
    return path


def dataset(folder: Path, count: int = 3, transform: mt.Transform | None = None, **given: Any) -> GDSDataset:
    items = [{"n": n} for n in range(count)]
    return GDSDataset(items, [transform or AddAtlas()], folder / "cache", device="cpu", **given)


def values(data: GDSDataset) -> list[float]:
    found = [float(data[i]["x"][0]) for i in range(len(data))]
    data.flush()
    return found


def test_an_edit_is_a_miss_and_an_undone_edit_is_not(tmp_path: Path, atlas: Path) -> None:
    data = dataset(tmp_path)
    assert values(data) == [10, 11, 12]
    atlas.write_text("20")
    assert not any(data.is_cached(i) for i in range(3))
    assert values(dataset(tmp_path)) == [20, 21, 22]
    assert values(data) == [20, 21, 22]
    atlas.write_text("10")
    assert values(dataset(tmp_path)) == [10, 11, 12]
    assert AddAtlas.calls == 6


def test_the_name_stays_and_the_digest_is_of_what_was_read(tmp_path: Path, atlas: Path) -> None:
    data = dataset(tmp_path)
    before = data.key(0)
    assert before.digest == before.name
    values(data)
    after = data.key(0)
    assert after.name == before.name != after.digest
    assert list(after.sources) == [str(atlas)]
    atlas.write_text("20")
    assert data.key(0).name == after.name
    assert data.key(0).digest != after.digest


@pytest.mark.parametrize("workers", [0, 2])
def test_populate_notes_what_its_workers_read(tmp_path: Path, atlas: Path, workers: int) -> None:
    data = dataset(tmp_path)
    assert data.populate(num_workers=workers, progress=False).computed == 3
    assert values(data) == [10, 11, 12]
    assert data.populate(num_workers=workers, progress=False).cached == 3
    atlas.write_text("20")
    assert dataset(tmp_path).populate(num_workers=workers, progress=False).computed == 3


def test_explain_names_the_file(tmp_path: Path, atlas: Path) -> None:
    data = dataset(tmp_path)
    values(data)
    assert f"source {atlas}: 2 bytes" in data.explain(1)
    atlas.write_text("20")
    assert "atlas.txt content changed" in data.explain(1)
    atlas.unlink()
    assert f"source {atlas}: absent" in data.explain(1)


def test_lost_notes_cost_a_computation_and_serve_nothing_stale(tmp_path: Path, atlas: Path) -> None:
    values(dataset(tmp_path))
    for notes in (tmp_path / "cache" / ".index").glob("*.reads"):
        notes.unlink()
    atlas.write_text("20")
    assert values(dataset(tmp_path)) == [20, 21, 22]


def test_records_in_a_folder_of_this_machine(tmp_path: Path, atlas: Path) -> None:
    values(dataset(tmp_path))
    near = dataset(tmp_path, local_dir=tmp_path / "near")
    assert values(near) == values(near) == [10, 11, 12]
    atlas.write_text("20")
    assert values(near) == [20, 21, 22]


class Chooses(AddAtlas):
    """Reads another file as the first one says."""

    def value(self) -> float:
        chosen = open(os.path.join(os.environ["ATLASES"], "atlas.txt")).read()  # noqa: SIM115
        return float(Path(os.environ["ATLASES"], chosen).read_text())


def test_each_version_of_the_data_has_its_own_list(
    tmp_path: Path, atlas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("a", "1"), ("b", "2")):
        (atlas.parent / name).write_text(value)
    for chosen, expected in (("a", 1), ("b", 2), ("a", 1), ("b", 2)):
        atlas.write_text(chosen)
        monkeypatch.setattr(kept, "_all", {})  # as in another process
        assert values(dataset(tmp_path, 1, Chooses())) == [expected]
    assert AddAtlas.calls == 2
    (atlas.parent / "a").write_text("7")
    assert dataset(tmp_path, 1, Chooses()).is_cached(0)  # what it does not read
    (atlas.parent / "b").write_text("8")
    assert values(dataset(tmp_path, 1, Chooses())) == [8]


class Editor:
    """A thread that was there before, and edits the file when it is asked to."""

    def __init__(self, path: Path) -> None:
        self.asked, self.done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=lambda: self.asked.acquire() and path.write_text("20") and self.done.release()).start()

    def __cache_key__(self) -> str:
        return "editor"

    def edit(self) -> None:
        self.asked.release()
        assert self.done.acquire(timeout=10)


class Edited(AddAtlas):
    def __init__(self, editor: Editor) -> None:
        self.editor = editor

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        found = super().__call__(data)
        self.editor.edit()
        return found


def test_a_file_that_changes_meanwhile_is_not_saved(tmp_path: Path, atlas: Path) -> None:
    data = dataset(tmp_path, 1, Edited(Editor(atlas)))
    with pytest.warns(CacheWarning, match=r"not cached: while it was computed, .*atlas\.txt changed"):
        assert values(data) == [10]
    assert not data.is_cached(0)


class Keeps(AddAtlas):
    """Reads the file once, as a lazily loaded model."""

    def value(self) -> float:
        return self.kept

    @functools.cached_property
    def kept(self) -> float:
        return super().value()


class Fails(Keeps):
    """Fails once, after it has read the file."""

    failed = False

    def __call__(self, x: Any) -> Any:
        x = x + self.kept
        if not self.failed:
            self.failed = True
            raise ValueError("the first time")
        return x


def test_what_the_first_of_two_attempts_has_kept_counts(tmp_path: Path, atlas: Path) -> None:
    items = [
        {"x": torch.full((4,), n), "fold": 1} for n in range(2)
    ]  # the second column does not count, so it is tried
    data = GDSDataset(items, [mt.Lambdad("x", Fails())], tmp_path / "cache", device="cpu")
    assert values(data) == [10, 11]
    assert [list(data.key(i).sources) for i in range(2)] == [[str(atlas)]] * 2


def test_what_an_item_before_has_kept_is_not_saved_once_it_has_changed(tmp_path: Path, atlas: Path) -> None:
    data = dataset(tmp_path, transform=Keeps())
    assert float(data[0]["x"][0]) == 10
    atlas.write_text("20")
    with pytest.warns(CacheWarning, match=r"atlas\.txt changed after an item before had read it"):
        assert float(data[1]["x"][0]) == 11
    data.flush()
    assert not data.is_cached(1)
    with pytest.raises(PopulateError, match=r"had read it"):
        data.populate(num_workers=0, progress=False)


def test_what_is_computed_again_with_a_file_in_memory_is_found_again(
    tmp_path: Path, atlas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = Keeps()
    assert values(dataset(tmp_path, 1, transform)) == [10]
    for record in (tmp_path / "cache").glob("*.safetensors"):
        record.unlink()
    monkeypatch.setattr(kept, "_all", {})  # nothing tells that the transform has loaded it
    assert values(again := dataset(tmp_path, 1, transform)) == [10]
    assert again.is_cached(0)
    assert list(again.key(0).sources) == [str(atlas)]


@functools.cache
def loaded(path: str) -> float:
    return float(Path(path).read_text())


class Loads(mt.Transform):
    """Adds up a file that the process loads once."""

    def __init__(self, factor: int = 1, met: threading.Barrier | None = None) -> None:
        self.factor, self.met = factor, met

    def __cache_key__(self) -> Any:
        return self.factor, type(self).__call__  # not the barrier

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        value = loaded(os.path.join(os.environ["ATLASES"], data["atlas"] + ".txt"))
        if self.met is not None and data["n"] == 0:
            self.met.wait(10)  # the file is loaded,
            self.met.wait(10)  # and another item is done
        if data["n"] < 0:
            raise ValueError("a damaged image")
        return {"x": torch.full((4,), self.factor * data["n"] + value)}


def loading(folder: Path, items: list[dict[str, Any]], transform: Loads) -> GDSDataset:
    return GDSDataset(items, [transform], folder / "cache", device="cpu")


def test_what_another_pipeline_has_loaded_counts_if_they_have_code_in_common(tmp_path: Path, atlas: Path) -> None:
    items = [{"n": n, "atlas": "atlas"} for n in range(2)]
    train, val = loading(tmp_path, items, Loads()), loading(tmp_path, items, Loads(2))
    assert (values(train), values(val)) == ([10, 11], [10, 12])
    assert list(val.key(1).sources) == [str(atlas)]


def test_a_file_that_some_items_need_counts_for_each_of_them(tmp_path: Path, atlas: Path) -> None:
    for name in ("t1", "t2"):
        atlas.with_name(f"{name}.txt").write_text("1")
    items = [{"n": n, "atlas": f"t{n % 2 + 1}"} for n in range(5)]
    data = loading(tmp_path, items, Loads())
    values(data)
    named = [[Path(path).name for path in data.key(n).sources] for n in range(5)]
    assert named == [["t1.txt"], ["t2.txt"], ["t1.txt"], ["t2.txt"], ["t1.txt"]]


def test_what_an_item_has_loaded_that_is_not_done_counts(tmp_path: Path, atlas: Path) -> None:
    met = threading.Barrier(2)
    data = loading(tmp_path, [{"n": n, "atlas": "atlas"} for n in range(2)], Loads(met=met))
    first = threading.Thread(target=lambda: data[0])
    first.start()
    met.wait(10)
    assert float(data[1]["x"][0]) == 11
    met.wait(10)
    first.join()
    assert list(data.key(1).sources) == [str(atlas)]


def test_what_an_item_has_loaded_that_failed_counts(tmp_path: Path, atlas: Path) -> None:
    data = loading(tmp_path, [{"n": n, "atlas": "atlas"} for n in (-1, 1)], Loads())
    with pytest.raises(RuntimeError):
        data[0]
    assert float(data[1]["x"][0]) == 11
    data.flush()
    assert list(data.key(1).sources) == [str(atlas)]


def test_files_of_other_items_do_not_count(tmp_path: Path, atlas: Path) -> None:
    class PerCase(AddAtlas):
        def value(self) -> float:
            super().value()
            return float(Path(os.environ["ATLASES"], f"case_{self.n:03}_seg.txt").read_text())

        def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
            self.n = data["n"]
            return super().__call__(data)

    for n in range(3):
        (atlas.parent / f"case_{n:03}_seg.txt").write_text(str(n))
    data = dataset(tmp_path, transform=PerCase())
    values(data)
    assert set(data.key(2).sources) == {str(atlas), str(atlas.parent / "case_002_seg.txt")}


def test_of_many_files_those_that_all_items_need_go_on_counting(
    tmp_path: Path, atlas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PerCase(Keeps):
        def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
            found = super().__call__(data)
            return {"x": found["x"] + float(Path(os.environ["ATLASES"], f"case_{data['n']}_seg.txt").read_text())}

    monkeypatch.setattr(limits, "KEPT_READS", 2)
    for n in range(5):
        (atlas.parent / f"case_{n}_seg.txt").write_text("0")
    data = dataset(tmp_path, 5, transform=PerCase())
    assert values(data) == [10, 11, 12, 13, 14]
    assert [str(atlas) in data.key(n).sources for n in range(5)] == [True] * 5


# Settings


@pytest.mark.parametrize(
    ("policy", "again"),
    [("content", False), ("stat", True), ("once", False), (lambda path: "v1", False), (None, False)],
    ids=["content", "stat", "once", "function", "none"],
)
def test_how_a_file_is_compared(tmp_path: Path, atlas: Path, policy: Any, again: bool) -> None:
    values(dataset(tmp_path, options={"sources": policy}))
    os.utime(atlas, (1, 1))  # the content is the same
    values(dataset(tmp_path, options={"sources": policy}))
    assert AddAtlas.calls == (6 if again else 3)


def test_a_function_may_leave_a_file_out(tmp_path: Path, atlas: Path) -> None:
    version = {"": "1"}
    count: Callable[[str], str | None] = lambda path: version[""] if path.endswith("atlas.txt") else None  # noqa: E731
    values(dataset(tmp_path, options={"sources": count}))
    atlas.write_text("20")
    assert values(dataset(tmp_path, options={"sources": count})) == [10, 11, 12]
    version[""] = "2"
    assert values(dataset(tmp_path, options={"sources": count})) == [20, 21, 22]
    atlas.write_text("30")
    values(dataset(tmp_path / "other", options={"sources": lambda path: None}))
    assert not list((tmp_path / "other" / "cache" / ".index").glob("*.reads"))


# Many files


class AddsStore(AddAtlas):
    """Adds up the files of a store."""

    def value(self) -> float:
        store = Path(os.environ["ATLASES"], "store")
        return float(sum(len(path.read_text()) for path in store.rglob("*") if path.is_file()))


# Maintenance


def test_records_are_outdated_once_what_they_read_is(tmp_path: Path, atlas: Path) -> None:
    cache = tmp_path / "cache"
    values(dataset(tmp_path, 1))
    unwanted = Unwanted(identify=Sources("content", str(cache)).read)
    assert not list(prunable(cache, survey(cache), unwanted))
    atlas.write_text("20")
    (found,) = prunable(cache, survey(cache), unwanted)
    assert found.problem == f"superseded: its source {atlas} has changed"


class Looks(AddAtlas):
    """Lists a folder, and looks for a file that may not be there."""

    def value(self) -> float:
        folder = Path(os.environ["ATLASES"])
        try:
            mask = float((folder / "mask").read_text())
        except FileNotFoundError:
            mask = 0
        return mask + len(os.listdir(folder))


def test_names_in_folders_and_absent_files_in_maintenance(tmp_path: Path, atlas: Path) -> None:
    cache, folder = tmp_path / "cache", atlas.parent
    data = dataset(tmp_path, 1, Looks())
    assert values(data) == [1]
    assert set(data.key(0).sources) == {f"{folder}/*", f"{folder}/mask"}
    unwanted = Unwanted(identify=Sources("content", str(cache)).read, missing_sources=True)
    assert not list(prunable(cache, survey(cache), unwanted))
    assert run("cache", "verify", str(cache)).exit_code == 0
    listed = json.loads(run("cache", "ls", "--json", str(cache)).stdout)
    assert str(folder / "mask") in str(listed)
    (folder / "mask").write_text("5")
    (found,) = prunable(cache, survey(cache), unwanted)
    assert "mask was not there" in found.problem or f"{folder}/* has changed" in found.problem
    assert values(data) == [7]


def test_records_of_the_version_before_are_named_once(
    tmp_path: Path, atlas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(key_module, "FORMAT", "monai_gds 2")
        values(dataset(tmp_path))
    data = dataset(tmp_path)
    with pytest.warns(CacheWarning, match=r"another version of monai_gds.*filled once more") as said:
        values(data)
        values(data)
    assert len([one for one in said if "another version" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        values(dataset(tmp_path))


# Cost


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that the file system is asked for, in order."""
    found: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(f"{name} {path}")
            return function(path, *args, **kwargs)

        return call

    for name in ("stat", "lstat", "open", "listdir", "scandir"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return found


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are old at once."""
    monkeypatch.setattr(source_memo, "_TICK", 0)


@pytest.mark.usefixtures("aged")
def test_a_hit_makes_one_call_for_each_file_that_was_read(tmp_path: Path, atlas: Path, calls: list[str]) -> None:
    data = dataset(tmp_path, 1)
    values(data)
    values(data)
    calls.clear()
    data[0]
    assert [call for call in calls if str(tmp_path / "cache") not in call] == [f"stat {atlas}"]
    assert not [call for call in calls if ".index" in call]


@pytest.mark.usefixtures("aged")
def test_a_store_of_many_files_counts_as_its_folders(tmp_path: Path, atlas: Path) -> None:
    store = atlas.parent / "store"
    for i in range(500):
        (store / f"{i % 5}").mkdir(parents=True, exist_ok=True)
        (store / f"{i % 5}" / f"{i}").write_text("x")
    data = dataset(tmp_path, 1, AddsStore())
    assert values(data) == values(data) == [500]
    assert set(data.key(0).sources) == {f"{store}/*", *(f"{store}/{i}" for i in range(5))}
    (store / "4" / "499").unlink()
    assert values(data) == [499]
    (store / "4" / "494").write_text("y")
    assert not data.is_cached(0)
