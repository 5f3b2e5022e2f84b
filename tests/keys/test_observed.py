"""What a computation reads is seen, by whatever library and in whatever thread; what others read is not."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from monai_gds.keys.observed import observing


def seen_in(work: Callable[[], Any], named: list[str] | None = None, apart: tuple[str, ...] = ()) -> set[str]:
    """What is noted of a computation."""
    with observing() as seen:
        work()
    return set(seen.paths(named or [], apart))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "atlas.bin"
    path.write_bytes(bytes(64))
    return path


# By which call


READS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: open(path, "rb").close(),
    "open for reading and writing": lambda path: open(path, "r+b").close(),
    "Path.read_bytes": lambda path: path.read_bytes(),
    "bytes": lambda path: open(os.fsencode(path)).close(),
    "os.open": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "shutil.copyfile": lambda path: shutil.copyfile(path, path.with_name("copy")),
    "np.fromfile": lambda path: np.fromfile(path, np.uint8),
    "np.memmap": lambda path: np.memmap(path, mode="r").sum(),
    "np.memmap, private": lambda path: np.memmap(path, mode="c").sum(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_file_that_is_read(file: Path, read: Callable[[Path], Any]) -> None:
    assert seen_in(lambda: read(file)) == {str(file)}


def test_a_relative_path_counts_below_the_working_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert seen_in(lambda: open("./atlas.bin").close()) == {str(file)}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    def read() -> None:
        with pytest.raises(FileNotFoundError):
            (tmp_path / "mask").read_bytes()

    assert seen_in(read) == {str(tmp_path / "mask")}


def test_the_names_in_a_folder(file: Path) -> None:
    for listing in (os.listdir, os.scandir, lambda path: list(Path(path).iterdir()), lambda path: list(os.walk(path))):
        assert seen_in(lambda listing=listing: listing(file.parent)) == {f"{file.parent}/*"}


def test_a_module_that_is_imported_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "only_then.py"
    module.write_text("X = 1")
    for _ in range(2):  # the second time from its byte code
        sys.modules.pop("only_then", None)
        importlib.invalidate_caches()
        assert seen_in(lambda: importlib.import_module("only_then")) == {str(module)}
    del sys.modules["only_then"]


def test_a_database_and_what_is_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "cases.db"
    sqlite3.connect(path).close()
    path.touch()
    expected = {f"{path}{suffix}" for suffix in ("", "-wal", "-journal")}
    assert seen_in(lambda: sqlite3.connect(path).close()) == expected
    assert seen_in(lambda: sqlite3.connect(f"file:{path}?mode=ro", uri=True).close()) == expected
    assert seen_in(lambda: sqlite3.connect(":memory:").close()) == set()


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin" / "tool"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\n[ -z "$2" ] || cat "$1" > "$2"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


@pytest.mark.parametrize("shell", [False, True])
def test_a_program_and_the_files_on_its_command_line(tool: Path, file: Path, shell: bool) -> None:
    command = f"tool --in={file}"
    run = lambda: subprocess.run(command if shell else command.split(), shell=shell)  # noqa: E731
    assert seen_in(run) == {str(tool), str(file)}
    assert seen_in(lambda: os.system(command)) == {str(tool), str(file)}


def test_what_a_program_writes_is_its_output(tool: Path, file: Path) -> None:
    out = file.with_name("out")

    def run() -> None:
        subprocess.run(["tool", file, out], check=True)
        out.read_bytes()

    for _ in range(2):  # the second time the output is there before
        assert seen_in(run) == {str(tool), str(file)}


# By which library


def test_members_of_archives(tmp_path: Path, file: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as zipped:
        zipped.write(file, "x")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(file, "x")

    def read() -> None:
        with zipfile.ZipFile(tmp_path / "a.zip") as zipped, tarfile.open(tmp_path / "a.tar") as tar:
            zipped.read("x")
            tar.getmember("x")

    assert seen_in(read) == {str(tmp_path / "a.zip"), str(tmp_path / "a.tar")}


def test_nibabel(tmp_path: Path) -> None:
    path = str(tmp_path / "a.nii.gz")
    nib.save(nib.Nifti1Image(np.zeros((2, 2, 2)), np.eye(4)), path)
    assert seen_in(lambda: nib.load(path).get_fdata()) == {path}


def test_pillow(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    image.new("L", (4, 4)).save(tmp_path / "a.png")
    assert seen_in(lambda: image.open(tmp_path / "a.png").load()) == {str(tmp_path / "a.png")}


def test_tifffile(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 8, 8), np.uint8), photometric="minisblack")
    assert seen_in(lambda: tifffile.imread(tmp_path / "a.tif", key=3)) == {str(tmp_path / "a.tif")}


def test_fsspec(file: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    assert seen_in(lambda: fsspec.open(f"file://{file}").open().read()) == {str(file)}


def test_zarr_reads_in_a_loop_of_its_own(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")
    store = tmp_path / "a.zarr"
    zarr.create_array(store, shape=(8, 8), chunks=(4, 4), dtype="i2")[:] = 1
    for _ in range(2):  # the second time in threads that run already
        found = seen_in(lambda: zarr.open_array(store, mode="r")[:])
        assert {f"{store}/zarr.json", *(f"{store}/c/{i}/{j}" for i in range(2) for j in range(2))} <= found
        assert all(path.startswith(str(store)) for path in found)


def test_many_chunks_count_as_their_folder(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")
    store = tmp_path / "data" / "a.zarr"
    zarr.create_array(store, shape=(20, 20), chunks=(1, 1), dtype="i2")[:] = 1
    found = seen_in(lambda: zarr.open_array(store, mode="r")[:])
    assert f"{store}/c" in found
    assert len(found) < 30


def test_dask_with_its_pool(tmp_path: Path) -> None:
    dask = pytest.importorskip("dask", reason="dask is not installed")
    paths = [tmp_path / f"{i}.npy" for i in range(4)]
    for path in paths:
        np.save(path, np.zeros(3))
    for _ in range(2):
        work = [dask.delayed(np.load)(path) for path in paths]
        assert seen_in(lambda work=work: dask.compute(*work, scheduler="threads")) == set(map(str, paths))


def test_h5py_opens_in_c_and_is_not_seen(tmp_path: Path) -> None:  # names in items count: see Not covered in key.md
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3)
    assert seen_in(lambda: h5py.File(tmp_path / "a.h5")["x"][:]) == set()


# By which thread


@pytest.fixture
def reader(file: Path) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """A thread that was there before, and does what it is asked to at once."""
    asked, done = threading.Semaphore(0), threading.Semaphore(0)
    work: list[Callable[[], Any] | None] = []

    def serve() -> None:
        while asked.acquire() and (one := work.pop()) is not None:
            one()
            done.release()

    thread = threading.Thread(target=serve)
    thread.start()

    def ask(one: Callable[[], Any]) -> None:
        work.append(one)
        asked.release()
        assert done.acquire(timeout=10)

    yield ask
    work.append(None)
    asked.release()
    thread.join()


def test_a_thread_that_it_starts(file: Path) -> None:
    class Reader(threading.Thread):
        def run(self) -> None:
            file.read_bytes()

    for make in (Reader, lambda: threading.Thread(target=file.read_bytes)):

        def work(make: Callable[[], threading.Thread] = make) -> None:
            thread = make()
            thread.start()
            thread.join()

        assert seen_in(work) == {str(file)}


def test_a_pool_that_was_there_before(file: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert seen_in(lambda: pool.submit(file.read_bytes).result()) == {str(file)}
        assert seen_in(lambda: list(pool.map(Path.read_bytes, [file]))) == {str(file)}
        assert seen_in(int) == set()


def test_an_event_loop_that_was_there_before(file: Path) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def read() -> bytes:
        return await asyncio.to_thread(file.read_bytes)

    try:
        assert seen_in(lambda: asyncio.run_coroutine_threadsafe(read(), loop).result(10)) == {str(file)}
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_another_thread_does_not_count(file: Path, reader: Callable[[Callable[[], Any]], None]) -> None:
    assert seen_in(lambda: reader(file.read_bytes)) == set()


def test_two_computations_at_once_are_told_apart(file: Path, reader: Callable[[Callable[[], Any]], None]) -> None:
    other = file.with_name("other")
    other.touch()
    found: list[set[str]] = []

    def both() -> None:
        reader(lambda: found.append(seen_in(other.read_bytes)))
        file.read_bytes()

    assert seen_in(both) == {str(file)}
    assert found == [{str(other)}]


def test_what_a_thread_reads_after_the_computation_does_not_count(file: Path) -> None:
    go = threading.Event()

    def later() -> None:
        assert go.wait(10)
        file.read_bytes()

    thread = threading.Thread(target=later)
    with observing() as seen:
        thread.start()
    go.set()
    thread.join()
    assert seen.paths([], []) == []


def test_a_thread_runs_as_without_an_observation(file: Path) -> None:
    found: list[Any] = []
    with observing():
        thread = threading.Thread(target=lambda *a, **k: found.append((a, k)), args=(1,), kwargs={"x": 2})
        thread.start()
        thread.join()
    assert found == [((1,), {"x": 2})]
    assert "run" not in vars(thread)


def test_errors_of_a_pool_are_raised() -> None:
    with observing(), ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result()


# What does not count


def test_files_of_libraries_and_of_the_system() -> None:
    def read() -> None:
        Path(np.__file__).read_bytes()
        Path(os.__file__).read_bytes()
        Path("/proc/self/status").read_bytes()
        open("/dev/null").close()
        importlib.metadata.version("numpy")

    assert seen_in(read) == set()


def test_what_users_stage_in_memory_counts() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as staged:
        assert seen_in(Path(staged.name).read_bytes) == {staged.name}


def test_what_an_observation_within_another_sees(file: Path) -> None:
    def read() -> None:
        with observing():
            file.read_bytes()

    assert seen_in(read) == {str(file)}


def test_a_link_from_site_packages_counts(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "site-packages" / "helper"
    link.parent.mkdir()
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "table.txt").touch()
    link.symlink_to(tmp_path / "clone")
    (tmp_path / "site-packages" / "ordinary").touch()
    assert seen_in((link / "table.txt").read_bytes) == {str(link / "table.txt")}
    assert seen_in((tmp_path / "site-packages" / "ordinary").read_bytes) == set()


def test_what_the_computation_wrote_first(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "made" / "deep").mkdir(parents=True)
        for path in (tmp_path / "a", tmp_path / "made" / "deep" / "b"):
            path.write_bytes(b"x")
            path.rename(path.with_suffix(".done"))
            path.with_suffix(".done").read_bytes()
        os.listdir(tmp_path / "made")
        with pytest.raises(FileNotFoundError):
            (tmp_path / "result").read_bytes()  # looked for,
        (tmp_path / "result").touch()  # and made

    assert seen_in(work) == set()


def test_a_folder_that_was_there_is_not_made(file: Path) -> None:
    def work() -> None:
        os.makedirs(file.parent, exist_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.read_bytes()

    assert seen_in(work) == {str(file)}


def test_named_files_and_what_is_in_named_folders(tmp_path: Path, file: Path) -> None:
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "0.dcm").touch()
    (tmp_path / "link").symlink_to(file)

    def work() -> None:
        file.read_bytes()
        (tmp_path / "link").read_bytes()
        (tmp_path / "series" / "0.dcm").read_bytes()
        os.listdir(tmp_path / "series")

    assert seen_in(work, [str(file), str(tmp_path / "series")]) == set()
    assert seen_in(work, apart=(str(tmp_path),)) == set()


def test_code_that_is_read_for_a_message(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import warnings\ndef warn():\n    warnings.warn('careful')\n")
    names: dict[str, Any] = {}
    exec(compile(script.read_text(), script, "exec"), names)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert seen_in(names["warn"]) == set()


def test_looking_for_modules_lists_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert seen_in(lambda: importlib.util.find_spec("no_such_module_anywhere")) == set()


# Many files, and changes


def test_many_files_of_a_listed_folder_count_as_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "series" / "a"
    folder.mkdir(parents=True)
    for i in range(40):
        (folder / f"{i}.dcm").touch()

    def read(count: int) -> None:
        for path in sorted(folder.iterdir())[:count]:
            path.read_bytes()

    assert seen_in(lambda: read(40)) == {str(folder)}
    assert len(seen_in(lambda: read(20))) == 21


def _rewrite(file: Path) -> None:
    before = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == before:  # a tick of the clock
        file.write_bytes(bytes(64))
        time.sleep(0.001)


@pytest.mark.parametrize("change", [_rewrite, Path.unlink], ids=["written", "removed"])
def test_a_file_that_changes_while_it_is_read(
    file: Path, change: Callable[[Path], None], reader: Callable[[Callable[[], Any]], None]
) -> None:
    with observing() as seen:
        file.read_bytes()
        reader(lambda: change(file))
    seen.paths([], [])
    assert seen.changed() == f"{file} changed"


def test_nothing_has_changed(file: Path) -> None:
    with observing() as seen:
        file.read_bytes()
        os.listdir(file.parent)
    seen.paths([], [])
    assert seen.changed() == ""
