"""What must give a new item, and what must not: one change between two runs of a study, in fresh processes.

A row of the table has what is before and after a change (:func:`row`), or is a generator. A generator sets the study
up; the study runs at every ``yield``, and once more at the end of a row with only one; what comes between is the
change. The last run must compute the item (:func:`misses`) or must not (:func:`hits`), and either way must give what
MONAI computes without a cache in that process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tarfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from tests.fresh import Interpreter, Process
from tests.loopdisk import loop_disk, needs_root
from tests.machines import NOBODY, shared_folder
from tests.same import same
from tests.studies import TIME, Outcome, Study, run, run_among_others, run_on, version_beside, write_volume

Change = Generator[None, None, None]
Changes = Callable[[Study], Change]


class Row(NamedTuple):
    """One change and what it must lead to.

    Attributes:
        change: the generator.
        miss: whether the item must be computed.
        one_process: whether all runs are accesses of one dataset in one process, rather than each in a fresh one.
        other_item: whether the change must show in the item, too; a row that must miss and does not show it would
            be about nothing. None: it may or may not.
    """

    change: Changes
    miss: bool
    one_process: bool
    other_item: bool | None


ROWS: dict[str, Row] = {}


def misses(
    *, one_process: bool = False, either: bool = False, other_item: bool | None = True
) -> Callable[[Changes], Changes]:
    """Registers a row that must miss: in fresh processes, in one process, or either."""
    return _register(True, one_process, either, other_item)


def hits(
    *, one_process: bool = False, either: bool = False, other_item: bool | None = None
) -> Callable[[Changes], Changes]:
    """Registers a row that must hit."""
    return _register(False, one_process, either, other_item)


def _register(miss: bool, one_process: bool, either: bool, other_item: bool | None) -> Callable[[Changes], Changes]:
    def register(change: Changes) -> Changes:
        name = f"{'miss' if miss else 'hit'}-{change.__name__}"
        if not one_process:
            ROWS[name] = Row(change, miss, False, other_item)
        if one_process or either:
            ROWS[f"{name}-in_one_process"] = Row(change, miss, True, other_item)
        return change

    return register


#: What a row of the table must lead to.
MISS, HIT = True, False


def row(
    miss: bool,
    name: str,
    *,
    script: tuple[str, str] | None = None,
    settings: tuple[dict[str, Any], dict[str, Any]] | None = None,
    code: tuple[str, str] = ("", ""),
    define: str = "",
    item: str = "",
    array: str = "",
    add: str | tuple[str, ...] = (),
    edit: tuple[str, str] | None = None,
    **options: Any,
) -> None:
    """Registers a row in which one thing is as in the first of a pair, and then as in the second.

    Args:
        miss: :data:`MISS` or :data:`HIT`.
        name: what changes.
        script: a part of the script.
        settings: arguments of ``GDSDataset``.
        code: what the process runs first.
        define: added to the script before the first run, as by :meth:`Study.define`.
        item: likewise, as by :meth:`Study.item`.
        array: likewise, an expression, as by :func:`with_array`.
        add: likewise, as by :meth:`Study.add`, one transform or several.
        edit: likewise, as by :meth:`Study.edit`, after the others.
        options: see :func:`misses`.
    """

    def change(s: Study) -> Change:
        if define:
            s.define(define)
        if item:
            s.item(item)
        if array:
            with_array(s, array)
        for transform in (add,) if isinstance(add, str) else add:
            s.add(transform)
        if edit is not None:
            s.edit(*edit)
        before, after = settings or ({}, {})
        s.settings, s.code = before, code[0]
        yield
        s.settings, s.code = after, code[1]
        if script is not None:
            s.edit(*script)

    change.__name__ = name
    (misses if miss else hits)(**options)(change)


class Interpreters:
    """Interpreters by PYTHONHASHSEED, started when they are needed."""

    #: How many studies run in a process that they share.
    _MOST_TOGETHER = 10

    def __init__(self) -> None:
        self._running: dict[str, Interpreter] = {}
        self._shared: dict[bool, tuple[Process, int]] = {}  # for first runs and for later ones, with the studies so far

    def __getitem__(self, hash_seed: str) -> Interpreter:
        if hash_seed not in self._running:
            self._running[hash_seed] = Interpreter("tests.studies", hash_seed=hash_seed)
        return self._running[hash_seed]

    def run(self, study: Study, *, miss: bool, later: bool) -> Outcome:
        """Runs a study in a fresh process.

        One that must hit may have run others, if they leave no trace: first runs with first runs, later with later
        ones, so that no process has seen the study before.
        """
        if miss or study.changes_its_process:
            return cast(Outcome, self[study.hash_seed].call(run, study))
        process, count = self._shared.pop(later, (None, 0))
        if process is None:
            process = self["0"].process()
        found = process.call(run_among_others, study)
        if count + 1 < self._MOST_TOGETHER:
            self._shared[later] = process, count + 1
        else:
            process.close()
        return cast(Outcome, found)

    def close(self) -> None:
        """Ends them."""
        for process, _ in self._shared.values():
            process.close()
        for interpreter in self._running.values():
            interpreter.close()


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Interpreters]:
    with closing(Interpreters()) as running:
        yield running


def run_row(row: Row, interpreters: Interpreters) -> list[Outcome]:
    """Runs a study at every ``yield`` of a row, and once more if there is only one."""
    with shared_folder() as folder, ExitStack() as stack:
        study = Study(folder)
        changes = row.change(study)
        stack.callback(changes.close)  # a row that has mounted something takes it away
        process = stack.enter_context(interpreters["0"].process()) if row.one_process else None
        found: list[Outcome] = []
        while next(changes, study) is not study or len(found) < 2:
            if process is not None:
                found.append(process.call(run_on if found else run, study))
            else:
                found.append(interpreters.run(study, miss=row.miss, later=bool(found)))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each row of the table."""
    metafunc.parametrize("name", ROWS)


def test_change(name: str, interpreters: Interpreters) -> None:
    row = ROWS[name]
    first, *_, last = run_row(row, interpreters)
    assert not first.wrong, f"before the change, {first.wrong}"
    if row.other_item is not None:
        assert same(first.item, last.item) != row.other_item, "the change does what the row says to the item"
    missed, right = last.computed > 0, last.wrong or "the item is right"
    assert missed == row.miss, f"the last run {'missed' if missed else 'hit'}; {right}"
    assert not last.wrong, last.wrong


# ---------------------------------------------------------------------------------------------------------------------
# Items


row(MISS, "a_value_of_the_item", script=("40 + i", "41 + i"))
row(MISS, "the_type_of_a_value", script=("40 + i", "40.0 + i"))
row(MISS, "a_key_of_the_item", script=('"age": 40', '"years": 40'))


@misses()
def another_entry(s: Study) -> Change:
    yield
    s.item('"site": "a"')


def with_array(s: Study, values: str) -> None:
    s.item(f'"weights": {values}')
    s.add('mt.EnsureTyped("weights", dtype=torch.float64)')


row(MISS, "one_element_of_an_array", script=("2.0, 3.0", "2.0, 3.5"), array="np.array([1.0, 2.0, 3.0])")


row(
    MISS,
    "one_element_of_a_large_array",
    script=("700_001", "700_002"),
    array="np.where(np.arange(1 << 20) == 700_001, 1.0, 0.0)",
)


row(
    MISS,
    "the_dtype_of_an_array",
    script=("np.int32", "np.int64"),
    item='"weights": np.array([1, 2], np.int32)',
    add='mt.EnsureTyped("weights")',
)


row(MISS, "the_shape_of_an_array", script=("(2, 3)", "(3, 2)"), array="np.ones((2, 3))")


row(MISS, "an_element_of_a_tensor", script=("[1.0, 2.0]", "[1.0, 2.5]"), item='"weights": torch.tensor([1.0, 2.0])')
row(MISS, "a_tuple_in_place_of_a_list", script=("[1.0, 2.0]", "(1.0, 2.0)"), item='"spacing": [1.0, 2.0]')
row(
    MISS,
    "a_path_in_place_of_a_string",
    script=('"report": "report"', '"report": Path("report")'),
    item='"report": "report"',
)
row(
    MISS, "a_scalar_of_numpy_in_place_of_a_float", script=('"dose": 1.5', '"dose": np.float64(1.5)'), item='"dose": 1.5'
)
row(MISS, "the_sign_of_zero", script=('"dose": 0.0', '"dose": -0.0'), item='"dose": 0.0')


@misses(one_process=True)
def an_array_changed_in_place(s: Study) -> Change:
    with_array(s, "np.zeros((1 << 17,))")
    yield
    s.code = "dataset.data[0]['weights'][70_000] = 1.0"


row(
    MISS,
    "a_tensor_changed_in_place",
    code=("", "dataset.data[0]['weights'][70_000] = 1.0"),
    item='"weights": torch.zeros(1 << 17)',
    one_process=True,
)
# which its version counter does not see
row(
    MISS,
    "a_tensor_changed_through_numpy",
    code=("", "dataset.data[0]['weights'].numpy()[70_000] = 1.0"),
    item='"weights": torch.zeros(1 << 17)',
    one_process=True,
)


@misses(one_process=True)
def an_array_changed_through_another_view(s: Study) -> Change:  # it is read-only, what it shows is not
    s.define("BASE = np.zeros((1 << 17,))\nVIEW = BASE.view()\nVIEW.flags.writeable = False")
    with_array(s, "VIEW")
    yield
    s.code = "import sys; sys.modules['study'].BASE[70_000] = 1.0"


@misses(either=True)
def an_array_mapped_from_a_file(s: Study) -> Change:
    path = s.data / "weights.npy"
    np.save(path, np.zeros(1 << 17))
    with_array(s, f"np.load({str(path)!r}, mmap_mode='r')")
    yield
    raw = bytearray(path.read_bytes())
    raw[-100] = 1
    with path.open("r+b") as f:
        f.write(raw)
    os.utime(path, (TIME, TIME))


row(MISS, "an_item_changed_in_place", code=("", "dataset.data[0]['age'] = 7"), one_process=True)


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def other_content(s: Study, name: str = "ct_0.nii") -> Path:
    """A file beside the data with other bytes of the same size and time."""
    path = s.folder / f"other_{name}"
    write_volume(path, seed=99)
    return path


def overwritten(path: Path, raw: bytes) -> None:
    """Writes into a file and puts its times back."""
    before = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@misses(either=True)
def other_bytes_of_the_same_size_and_time(s: Study) -> Change:
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_0.nii", other)


@misses(either=True)
def one_byte_in_the_middle(s: Study) -> Change:
    path = s.data / "ct_0.nii"
    yield
    raw = bytearray(path.read_bytes())
    raw[500] ^= 1
    overwritten(path, bytes(raw))


@misses(either=True)
def copied_over_with_its_times(s: Study) -> Change:  # cp -p
    other = other_content(s)
    yield
    subprocess.run(["cp", "-p", other, s.data / "ct_0.nii"], check=True)


@misses(either=True)
def replaced_by_a_rename_with_its_times(s: Study) -> Change:  # rsync -t
    other = other_content(s)
    yield
    other.replace(s.data / "ct_0.nii")


@misses(either=True)
def unpacked_over_it(s: Study) -> Change:
    with tarfile.open(s.folder / "new.tar", "w") as tar:
        tar.add(other_content(s), "ct_0.nii")
    yield
    with tarfile.open(s.folder / "new.tar") as tar:
        tar.extractall(s.data, filter="data")
    assert (s.data / "ct_0.nii").stat().st_mtime == TIME


@misses(either=True)
def edited_within_a_tick_of_the_clock(s: Study) -> Change:
    other = other_content(s).read_bytes()
    with loop_disk(s.folder, make=("-I", "128")) as disk:  # such inodes hold times of whole seconds
        shutil.copytree(s.data, disk.folder / "data")
        s.data = disk.folder / "data"
        path = s.data / "ct_0.nii"
        for _ in range(10):
            time.sleep(1 - time.time() % 1)
            path.write_bytes(path.read_bytes())
            before = path.stat()
            yield
            path.write_bytes(other)
            after = path.stat()
            if (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns):
                break
        else:
            pytest.skip("this machine is too slow to run the study within a second")
        yield


@misses(either=True)
def two_sources_swapped_by_renaming(s: Study) -> Change:
    a, b, c = (s.data / name for name in ("ct_0.nii", "ct_1.nii", "c"))
    yield
    a.rename(c)
    b.rename(a)
    c.rename(b)


@misses(either=True)
def the_folder_above_replaced(s: Study) -> Change:  # which leaves even the files' ctimes alone
    other = s.folder / "other"
    other.mkdir()
    for i in range(2):
        write_volume(other / f"ct_{i}.nii", seed=50 + i)
    yield
    s.data.rename(s.folder / "old")
    other.rename(s.data)


@misses(either=True)
def a_link_that_leads_elsewhere(s: Study) -> Change:
    path = s.data / "ct_0.nii"
    path.rename(s.data / "version1.nii")
    path.symlink_to("version1.nii")
    write_volume(s.data / "version2.nii", seed=2)
    yield
    path.unlink()
    path.symlink_to("version2.nii")


@misses(either=True)
def a_source_of_another_size(s: Study) -> Change:
    yield
    write_volume(s.data / "ct_0.nii", size=7)


def reads_if_there(s: Study) -> Path:
    """Adds a transform that takes a file when it is there."""
    path = s.data / "mask.npy"
    s.item(f'"mask": {str(path)!r}')
    s.define(
        'def mask(d):\n    there = Path(d["mask"]).exists()\n'
        '    return {**d, "found": float(np.load(d["mask"]).sum()) if there else None}'
    )
    s.add("mt.Lambda(mask)")
    return path


@misses(either=True)
def a_source_that_appears(s: Study) -> Change:
    path = reads_if_there(s)
    yield
    np.save(path, np.ones(3))


@misses(either=True)
def a_source_that_goes(s: Study) -> Change:
    path = reads_if_there(s)
    np.save(path, np.ones(3))
    yield
    path.unlink()


def with_folder(s: Study, *files: str) -> Path:
    """Adds a folder to the item, and a transform that sums up the bytes below it."""
    folder = s.data / "store"
    for i, name in enumerate(files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i] * 64))
        os.utime(path, (TIME, TIME))
    s.item(f'"store": {str(folder)!r}')
    s.define(
        'def total(d):\n    files = sorted(p for p in Path(d["store"]).rglob("*") if p.is_file())\n'
        '    d["total"] = [(p.name, sum(p.read_bytes())) for p in files]\n    return d'
    )
    s.add("mt.Lambda(total)")
    return folder


@misses(either=True)
def a_chunk_of_zarr(s: Study) -> Change:
    folder = with_folder(s, "zarr.json", "c/0/0/0", "c/0/0/1", "c/1/0/0")
    yield
    overwritten(folder / "c/0/0/1", bytes([9] * 64))


@misses(either=True)
def a_slice_of_a_study(s: Study) -> Change:
    folder = with_folder(s, *(f"series{i}/{j}.dcm" for i in range(2) for j in range(3)))
    yield
    (folder / "series1/1.dcm").write_bytes(bytes([77] * 64))


@misses(either=True)
def a_new_slice_of_a_study(s: Study) -> Change:
    folder = with_folder(s, *(f"series{i}/{j}.dcm" for i in range(2) for j in range(3)))
    yield
    (folder / "series1/3.dcm").write_bytes(bytes([77] * 64))


@misses(either=True)
def two_slices_swapped(s: Study) -> Change:
    folder = with_folder(s, "series/0.dcm", "series/1.dcm")
    yield
    a, b = (folder / f"series/{i}.dcm" for i in range(2))
    a.rename(folder / "series/c")
    b.rename(a)
    (folder / "series/c").rename(b)


@misses()
def another_folder_with_equal_names_sizes_and_times(s: Study) -> Change:
    s.edit('str(DATA / f"ct_{i}.nii")', 'f"ct_{i}.nii"')
    other = s.folder / "site_b"
    other.mkdir()
    for i in range(2):
        write_volume(other / f"ct_{i}.nii", seed=50 + i)
    s.cwd = s.data
    yield
    s.cwd = other


@misses()
def relative_names_from_another_folder(s: Study) -> Change:
    s.edit('str(DATA / f"ct_{i}.nii")', 'f"ct_{i}.nii"')
    other = s.folder / "site_b"
    other.mkdir()
    for i in range(2):
        write_volume(other / f"ct_{i}.nii", seed=50 + i, size=8, mtime=TIME + 5)
    s.cwd = s.data
    yield
    s.cwd = other


@misses(one_process=True)
def the_working_folder_with_relative_names(s: Study) -> Change:
    s.edit('str(DATA / f"ct_{i}.nii")', 'f"ct_{i}.nii"')
    other = s.folder / "site_b"
    other.mkdir()
    for i in range(2):
        write_volume(other / f"ct_{i}.nii", seed=50 + i)
    s.cwd = s.data
    yield
    s.code = f"import os; os.chdir({str(other)!r})"


@misses(either=True)
def one_source_of_several(s: Study) -> Change:
    s.item('"parts": {"all": [str(DATA / f"ct_{k}.nii") for k in range(2)]}')
    s.define('def sizes(d):\n    d["sums"] = [sum(Path(p).read_bytes()) for p in d["parts"]["all"]]\n    return d')
    s.add("mt.Lambda(sizes)")
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_1.nii", other)


@misses(either=True)
def a_source_given_as_a_path(s: Study) -> Change:
    s.edit('str(DATA / f"ct_{i}.nii")', 'DATA / f"ct_{i}.nii"')
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_0.nii", other)


@misses(either=True)
def a_source_without_a_suffix(s: Study) -> Change:  # a source since a Load transform reads its key
    raw, other = s.data / "scan", s.folder / "other"
    for path, value in ((raw, 1.0), (other, -1.0)):
        with path.open("wb") as f:
            np.save(f, value * np.arange(8.0).reshape(1, 2, 2, 2) ** 2)
        os.utime(path, (TIME, TIME))
    s.edit('str(DATA / f"ct_{i}.nii")', '"scan"')
    s.edit('"NibabelReader", ensure_channel_first=True', '"NumpyReader"')
    s.cwd = s.data
    yield
    overwritten(raw, other.read_bytes())


@misses(either=True)
def a_source_below_the_home_folder(s: Study) -> Change:  # LoadImage expands ~
    s.edit('str(DATA / f"ct_{i}.nii")', 'f"~/ct_{i}.nii"')
    s.environment = {"HOME": str(s.data)}
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_0.nii", other)


@misses()
def another_home_folder(s: Study) -> Change:
    s.edit('str(DATA / f"ct_{i}.nii")', 'f"~/ct_{i}.nii"')
    other = s.folder / "other"
    other.mkdir()
    for i in range(2):
        write_volume(other / f"ct_{i}.nii", seed=50 + i)
    s.environment = {"HOME": str(s.data)}
    yield
    s.environment = {"HOME": str(other)}


@misses(either=True)
def items_that_are_names(s: Study) -> Change:
    s.edit('{"image": str(DATA / f"ct_{i}.nii"), "age": 40 + i}', 'str(DATA / f"ct_{i}.nii")')
    s.edit('mt.LoadImaged("image", ', "mt.LoadImage(")
    s.edit('mt.ScaleIntensityd("image", ', "mt.ScaleIntensity(")
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_0.nii", other)


def changes_voxels(s: Study, header: str, voxels: str) -> Change:
    """A study whose items name the header of a pair, of which the voxels then change."""
    import nibabel as nib

    for name in ("ct", "new"):
        values = np.random.default_rng(len(name)).integers(0, 99, (6, 6, 6), dtype=np.int16)
        nib.save(nib.Nifti1Pair(values, np.eye(4)), s.data / f"{name}.img")
    (s.data / "ct.hdr").rename(s.data / header)
    (s.data / "ct.img").rename(s.data / voxels)
    os.utime(s.data / voxels, (TIME, TIME))
    s.edit('f"ct_{i}.nii"', repr(header))
    yield
    overwritten(s.data / voxels, (s.data / "new.img").read_bytes())


@misses(either=True)
def the_other_file_of_a_pair(s: Study) -> Change:
    yield from changes_voxels(s, "ct.hdr", "ct.img")


@misses()
def the_other_file_of_a_pair_in_capitals(s: Study) -> Change:
    yield from changes_voxels(s, "CT.HDR", "CT.IMG")


@misses(either=True)
def the_affine_beside_a_pair(s: Study) -> Change:  # SPM's, which its images lack
    import nibabel as nib

    for folder, size in ((s.data, 2.0), (s.folder / "new", 3.0)):
        folder.mkdir(exist_ok=True)
        image = nib.Spm99AnalyzeImage(np.arange(8, dtype=np.int16).reshape(2, 2, 2), np.diag([size, 2.0, 2.0, 1.0]))
        nib.save(image, folder / "ct.img.gz")
    s.edit('f"ct_{i}.nii"', '"ct.hdr.gz"')
    yield
    shutil.copyfile(s.folder / "new" / "ct.mat.gz", s.data / "ct.mat.gz")


def names_read(s: Study, names: str) -> Change:
    """A study whose transforms read the files of these names, of which one then changes."""
    s.item(f'"names": {names}')
    s.add('mt.Lambda(lambda d: {**d, "names": [sum(open(name, "rb").read()) for name in d["names"]]})')
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_1.nii", other)


@misses()
def a_source_in_another_kind_of_list(s: Study) -> Change:
    s.define("from collections import UserList")
    yield from names_read(s, 'UserList([str(DATA / "ct_1.nii")])')


@misses()
def a_source_named_by_bytes(s: Study) -> Change:  # as texts in HDF5 are
    yield from names_read(s, 'np.array([str(DATA / "ct_1.nii").encode()])')


@misses()
def a_source_in_an_array_of_strings(s: Study) -> Change:
    yield from names_read(s, 'np.array([str(DATA / "ct_1.nii")], np.dtypes.StringDType())')


@misses(either=True)
def what_a_link_in_a_folder_leads_to(s: Study) -> Change:
    folder = with_folder(s, "series0/0.dcm")
    elsewhere = s.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0.dcm").write_bytes(bytes(64))
    (folder / "series1").symlink_to(elsewhere)
    s.edit('Path(d["store"]).rglob("*") if p.is_file()', 'Path(d["store"]).glob("*/*.dcm")')
    yield
    (elsewhere / "0.dcm").write_bytes(bytes([5] * 64))


@misses()
def a_source_of_another_name(s: Study) -> Change:
    s.settings = {"root": s.data}
    yield
    (s.data / "ct_0.nii").rename(s.data / "scan_0.nii")
    (s.data / "ct_1.nii").rename(s.data / "scan_1.nii")
    s.edit('f"ct_{i}.nii"', 'f"scan_{i}.nii"')


@misses()
def a_source_outside_the_root_that_moved(s: Study) -> Change:
    root = s.folder / "root"
    root.mkdir()
    s.settings = {"root": root}
    yield
    s.data = s.data.rename(s.folder / "moved")


@misses()
def another_item_below_another_root(s: Study) -> Change:
    s.settings = {"root": s.data}
    yield
    s.data = s.folder / "data2"
    s.data.mkdir()
    for i in range(2):
        write_volume(s.data / f"ct_{i}.nii", seed=60 + i)
    s.settings = {"root": s.data}


@misses(either=True)
def another_time_where_times_count(s: Study) -> Change:
    s.settings = {"options": {"sources": "stat"}}
    yield
    write_volume(s.data / "ct_0.nii", seed=70, mtime=TIME + 1)


@misses(either=True, other_item=False)
def data_touched_where_times_count(s: Study) -> Change:
    s.settings = {"options": {"sources": "stat"}}
    yield
    (s.data / "ct_0.nii").touch()


@misses()
def a_source_hashed_once_in_each_process(s: Study) -> Change:
    s.settings = {"options": {"sources": "once"}}
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_0.nii", other)


@misses(either=True)
def what_a_function_gives_for_a_source(s: Study) -> Change:
    version = s.data / "VERSION"
    version.write_text("1")
    s.settings = {"options": {"sources": version_beside}}
    other = other_content(s).read_bytes()
    yield
    overwritten(s.data / "ct_0.nii", other)
    version.write_text("2")


# ---------------------------------------------------------------------------------------------------------------------
# Files that transforms name


def changes_a_file(s: Study, define: str, transform: str) -> Change:
    """A study whose transforms name the file ATLAS, which then changes with its size and time kept."""
    path = s.data / "atlas.npy"
    np.save(path, np.full((1, 6, 6, 6), 0.5, np.float32))
    os.utime(path, (TIME, TIME))
    s.define(define.replace("ATLAS", repr(str(path))))
    s.add(transform.replace("ATLAS", repr(str(path))))
    yield
    np.save(s.folder / "new.npy", np.full((1, 6, 6, 6), 0.25, np.float32))
    overwritten(path, (s.folder / "new.npy").read_bytes())


TIMES = """
class Times(mt.MapTransform):
    def __init__(self, keys, path):
        super().__init__(keys)
        self.path = path

    def __call__(self, data):
        values = torch.from_numpy(np.load(self.path))
        return {**data, **{key: data[key] * values for key in self.keys}}
"""


@misses()
def a_file_given_to_a_constructor(s: Study) -> Change:
    yield from changes_a_file(s, TIMES, 'Times("image", ATLAS)')


@misses()
def a_path_given_to_a_constructor(s: Study) -> Change:
    yield from changes_a_file(s, TIMES, 'Times("image", Path(ATLAS))')


@misses(one_process=True)
def a_file_given_to_a_constructor_meanwhile(s: Study) -> Change:
    yield from changes_a_file(s, TIMES, 'Times("image", ATLAS)')


@misses()
def a_file_that_a_partial_names(s: Study) -> Change:
    define = "from functools import partial\n\n\ndef times(x, path):\n    return x * torch.from_numpy(np.load(path))"
    yield from changes_a_file(s, define, 'mt.Lambdad("image", partial(times, path=ATLAS))')


@misses()
def a_file_that_a_global_names(s: Study) -> Change:
    define = "WEIGHTS = ATLAS\n\n\ndef times(x):\n    return x * torch.from_numpy(np.load(WEIGHTS))"
    yield from changes_a_file(s, define, 'mt.Lambdad("image", times)')


@misses()
def a_file_that_a_closure_names(s: Study) -> Change:
    define = "def times(path):\n    return lambda x: x * torch.from_numpy(np.load(path))"
    yield from changes_a_file(s, define, 'mt.Lambdad("image", times(ATLAS))')


@misses()
def a_file_that_a_constant_names(s: Study) -> Change:
    yield from changes_a_file(s, "", 'mt.Lambdad("image", lambda x: x * torch.from_numpy(np.load(ATLAS)))')


@misses(either=True)
def a_file_given_to_a_constructor_that_appears(s: Study) -> Change:
    path = s.data / "atlas.npy"
    s.define(TIMES.replace("np.load(self.path)", "np.load(self.path) if Path(self.path).exists() else np.ones(1)"))
    s.add(f'Times("image", {str(path)!r})')
    yield
    np.save(path, np.full((1, 6, 6, 6), 0.5))


@misses()
def a_relative_file_given_to_a_constructor(s: Study) -> Change:
    s.define(TIMES)
    s.add('Times("image", "atlas.npy")')
    for i, name in enumerate(("a", "b")):
        (s.folder / name).mkdir()
        np.save(s.folder / name / "atlas.npy", np.full((1, 6, 6, 6), i + 0.5))
        os.utime(s.folder / name / "atlas.npy", (TIME, TIME))
    s.cwd = s.folder / "a"
    yield
    s.cwd = s.folder / "b"


@misses(one_process=True)
def the_working_folder_with_a_file_given_to_a_constructor(s: Study) -> Change:
    s.define(TIMES)
    s.add('Times("image", "atlas.npy")')
    for i, name in enumerate(("a", "b")):
        (s.folder / name).mkdir()
        np.save(s.folder / name / "atlas.npy", np.full((1, 6, 6, 6), i + 0.5))
    s.cwd = s.folder / "a"
    yield
    s.code = f"import os; os.chdir({str(s.folder / 'b')!r})"


@misses()
def a_table_given_to_a_constructor(s: Study) -> Change:
    table = s.folder / "ages.csv"
    table.write_text("0,1.5\n")
    os.utime(table, (TIME, TIME))
    s.define(
        "class Table:\n    def __init__(self, path):\n        self.path = path\n\n"
        "    def __call__(self, d):\n        return {**d, 'row': open(self.path).read()}"
    )
    s.add(f"mt.Lambda(Table({str(table)!r}))")
    yield
    overwritten(table, b"0,2.5\n")


# ---------------------------------------------------------------------------------------------------------------------
# Transforms


row(MISS, "a_parameter", script=("maxv=1.5", "maxv=2.0"))


@misses()
def the_order_of_transforms(s: Study) -> Change:
    s.add('mt.Flipd("image", 0)')
    s.add('mt.Zoomd("image", 1.5)')
    yield
    s.edit('mt.Flipd("image", 0)', "FIRST")
    s.edit('mt.Zoomd("image", 1.5)', 'mt.Flipd("image", 0)')
    s.edit("FIRST", 'mt.Zoomd("image", 1.5)')


@misses()
def a_transform_added(s: Study) -> Change:
    yield
    s.add('mt.Flipd("image", 0)')


row(MISS, "a_transform_removed", script=('            mt.Flipd("image", 0),\n', ""), add='mt.Flipd("image", 0)')
row(
    MISS,
    "a_lazy_pipeline",
    script=("        ]\n    )", "        ],\n        lazy=True,\n    )"),
    add=('mt.Rotated("image", 0.3)', 'mt.Zoomd("image", 1.5)'),
)


@misses()
def a_lazy_transform(s: Study) -> Change:
    s.add('mt.Rotated("image", 0.3)')
    s.add('mt.Zoomd("image", 1.5)')
    s.edit("        ]\n    )", "        ],\n        lazy=None,\n    )")
    yield
    s.edit('"image", 0.3', '"image", 0.3, lazy=True')
    s.edit('"image", 1.5', '"image", 1.5, lazy=True')


row(
    MISS,
    "overrides_of_a_lazy_pipeline",
    script=('"mode": "bilinear"', '"mode": "nearest"'),
    add='mt.Rotated("image", 0.3)',
    edit=(
        "        ]\n    )",
        '        ],\n        lazy=True,\n        overrides={"image": {"mode": "bilinear"}},\n    )',
    ),
)


@misses()
def map_items(s: Study) -> Change:
    s.define("class Twice(mt.Transform):\n    def __call__(self, data):\n        return [data, dict(data)]")
    s.define("class Count(mt.Transform):\n    def __call__(self, data):\n        return {'count': len(data)}")
    s.add("Twice()")
    s.add("Count()")
    yield
    s.edit("        ]\n    )", "        ],\n        map_items=False,\n    )")


row(MISS, "the_code_of_a_lambda", script=("x + 1", "x - 1"), add='mt.Lambdad("image", lambda x: x + 1)')
row(MISS, "a_constant_of_a_lambda", script=("x + 1", "x + 2"), add='mt.Lambdad("image", lambda x: x + 1)')
row(MISS, "a_method_that_a_lambda_calls", script=("floor", "ceil"), add='mt.Lambdad("image", lambda x: x.floor())')
row(
    MISS,
    "the_value_of_a_closure",
    script=("plus(1.0)", "plus(1.5)"),
    define="def plus(offset):\n    return lambda x: x + offset",
    add='mt.Lambdad("image", plus(1.0))',
)
row(
    MISS,
    "a_global_that_a_function_reads",
    script=("OFFSET = 1.0", "OFFSET = 1.5"),
    define="OFFSET = 1.0\n\n\ndef plus(x):\n    return x + OFFSET",
    add='mt.Lambdad("image", plus)',
)
row(
    MISS,
    "a_function_that_a_function_calls",
    script=("return 1.0", "return 1.5"),
    define="def offset():\n    return 1.0\n\n\ndef plus(x):\n    return x + offset()",
    add='mt.Lambdad("image", plus)',
)


@misses()
def a_function_of_another_file(s: Study) -> Change:
    helpers = s.folder / "helpers.py"
    helpers.write_text("def plus(x):\n    return x + 1.0\n")
    s.define("import helpers")
    s.add('mt.Lambdad("image", lambda x: helpers.plus(x))')
    yield
    helpers.write_text("def plus(x):\n    return x + 1.5\n")


row(
    MISS,
    "a_default_argument",
    script=("offset=1.0", "offset=1.5"),
    define="def plus(x, offset=1.0):\n    return x + offset",
    add='mt.Lambdad("image", plus)',
)
row(
    MISS,
    "a_default_of_a_keyword",
    script=("offset=1.0", "offset=1.5"),
    define="def plus(x, *, offset=1.0):\n    return x + offset",
    add='mt.Lambdad("image", plus)',
)
row(
    MISS,
    "an_argument_of_a_partial",
    script=("plus, 1.0", "plus, 1.5"),
    define="from functools import partial\n\n\ndef plus(offset, x):\n    return x + offset",
    add='mt.Lambdad("image", partial(plus, 1.0))',
)
row(
    MISS,
    "a_keyword_of_a_partial",
    script=("offset=1.0", "offset=1.5"),
    define="from functools import partial\n\n\ndef plus(x, offset):\n    return x + offset",
    add='mt.Lambdad("image", partial(plus, offset=1.0))',
)


PLUS = """
class Base:
    scale = 1.0

    def offset(self):
        return 1.0


class Plus(Base):
    def __init__(self, more):
        self.more = more

    def __call__(self, x):
        return x * self.scale + self.offset() + self.more
"""


row(
    MISS,
    "an_attribute_of_a_callable",
    script=("Plus(0.0)", "Plus(0.5)"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "a_class_edited_in_its_file",
    script=("x * self.scale", "x / 2 * self.scale"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "a_method_of_a_base_class",
    script=("return 1.0", "return 1.5"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "an_attribute_of_a_class",
    script=("scale = 1.0", "scale = 1.5"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "what_a_class_says_of_itself",
    script=("Model(2)", "Model(3)"),
    define="class Model:\n    def __init__(self, version):\n        self.net = lambda x: x * version\n"
    "        self.version = version\n\n    def __cache_key__(self):\n        return self.version\n\n"
    "    def __call__(self, x):\n        return self.net(x)",
    add='mt.Lambdad("image", Model(2))',
)
row(
    MISS,
    "the_value_of_an_enum",
    script=("LARGE = 2.0", "LARGE = 3.0"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0",
    add='mt.Lambdad("image", lambda x: x * Scale.LARGE.value)',
)


@misses()
def an_enum_that_a_transform_holds(s: Study) -> Change:
    s.define("import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0")
    s.define("class By:\n    def __init__(self, scale):\n        self.by = scale\n")
    s.edit("self.by = scale\n", "self.by = scale\n\n    def __call__(self, x):\n        return x * self.by.value")
    s.add('mt.Lambdad("image", By(Scale.LARGE))')
    yield
    s.edit("LARGE = 2.0", "LARGE = 3.0")


row(
    MISS,
    "a_decorator",
    script=("f(x) + 0.0", "f(x) + 0.5"),
    define="import functools\n\n\ndef logged(f):\n    @functools.wraps(f)\n    def g(x):\n        return f(x) + 0.0\n\n"
    "    return g\n\n\n@logged\ndef plus(x):\n    return x + 1.0",
    add='mt.Lambdad("image", plus)',
)
# whose module and name it takes over
row(
    MISS,
    "a_decorator_of_a_librarys_function",
    script=("f(x) + 0.0", "f(x) + 0.5"),
    define="import functools\n\n\ndef logged(f):\n    @functools.wraps(f)\n    def g(x):\n        return f(x) + 0.0\n\n"
    "    return g\n\n\npositive = logged(torch.nn.functional.relu)",
    add='mt.Lambdad("image", positive)',
)
row(
    MISS,
    "what_a_decorator_holds",
    script=("Times(plus, 1.0)", "Times(plus, 1.5)"),
    define="import functools\n\n\nclass Times:\n    def __init__(self, f, k):\n"
    "        functools.update_wrapper(self, f)\n"
    "        self.f, self.k = f, k\n\n    def __call__(self, x):\n        return self.k * self.f(x)\n\n\n"
    "def plus(x):\n    return x + 1.0\n\n\ntimes = Times(plus, 1.0)",
    add='mt.Lambdad("image", times)',
)
row(
    MISS,
    "what_an_expression_of_a_bundle_refers_to",
    script=("'k': 1.0", "'k': 1.5"),
    define="from monai.bundle import ConfigParser\n\nparser = ConfigParser({'k': 1.0, 'f': '$lambda x: x * @k'})\n"
    "scaled = parser.get_parsed_content('f')",
    add='mt.Lambdad("image", scaled)',
)
row(
    MISS,
    "a_method_of_an_enum",
    script=("x * 1.0", "x * 1.5"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0\n\n    def of(self, x):\n        return x * 1.0",
    add='mt.Lambdad("image", lambda x: Scale.LARGE.of(x))',
)
row(
    MISS,
    "what_is_no_member_of_an_enum",
    script=("nonmember(1.0)", "nonmember(1.5)"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0\n    by = enum.nonmember(1.0)",
    add='mt.Lambdad("image", lambda x: x * Scale.by)',
)
row(
    MISS,
    "a_property_of_an_enum",
    script=("/ 2.0", "/ 4.0"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0\n\n    @enum.property\n    def half(self):\n"
    "        return self.value / 2.0",
    add='mt.Lambdad("image", lambda x: x * Scale.LARGE.half)',
)
row(
    MISS,
    "a_function_that_remembers",
    script=("i + 1.0", "i + 1.5"),
    define="import functools\n\n\n@functools.lru_cache\ndef offset(i):\n    return i + 1.0",
    add='mt.Lambdad("image", lambda x: x + offset(1))',
)
row(
    MISS,
    "a_value_in_a_global_dictionary",
    script=("'ct': 1.0", "'ct': 1.5"),
    define="CONFIG = {'scale': {'ct': 1.0}}",
    add='mt.Lambdad("image", lambda x: x * CONFIG["scale"]["ct"])',
)
# each of whose windows becomes a channel
row(
    MISS,
    "the_order_of_a_dictionary",
    script=('"low": (0.0, 0.5), "high": (0.5, 1.0)', '"high": (0.5, 1.0), "low": (0.0, 0.5)'),
    define="class Windows:\n    def __init__(self, windows):\n        self.windows = windows\n\n"
    "    def __call__(self, x):\n        return torch.cat([x.clip(*window) for window in self.windows.values()])",
    add='mt.Lambdad("image", Windows({"low": (0.0, 0.5), "high": (0.5, 1.0)}))',
)
row(
    MISS,
    "the_order_of_an_enum",
    script=("    ONE = 1.0\n    TWO = 2.0", "    TWO = 2.0\n    ONE = 1.0"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    ONE = 1.0\n    TWO = 2.0",
    add='mt.Lambdad("image", lambda x: torch.cat([x * scale.value for scale in Scale]))',
)


@misses()
def a_function_of_a_file_imported_in_a_function(s: Study) -> Change:
    helpers = s.folder / "helpers.py"
    helpers.write_text("def plus(x):\n    return x + 1.0\n")
    s.define("def late(x):\n    import helpers\n\n    return helpers.plus(x)")
    s.add('mt.Lambdad("image", late)')
    yield
    helpers.write_text("def plus(x):\n    return x + 1.5\n")


@misses()
def a_function_imported_from_a_package_in_a_method(s: Study) -> Change:
    package = s.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.0\n")
    (package / "steps.py").write_text(
        "class Plus:\n    def __call__(self, x):\n        from . import helpers\n\n        return helpers.plus(x)\n"
    )
    s.define("from package.steps import Plus")
    s.add('mt.Lambdad("image", Plus())')
    yield
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.5\n")


@misses()
def a_constant_two_files_away(s: Study) -> Change:
    (s.folder / "helpers.py").write_text("import deeper\n\ndef plus(x):\n    return x + deeper.OFFSET\n")
    (s.folder / "deeper.py").write_text("OFFSET = 1.0\n")
    s.define("from helpers import plus")
    s.add('mt.Lambdad("image", plus)')
    yield
    (s.folder / "deeper.py").write_text("OFFSET = 1.5\n")


@misses()
def a_module_in_another_module(s: Study) -> Change:
    (s.folder / "helpers.py").write_text("import deeper\n")
    (s.folder / "deeper.py").write_text("OFFSET = 1.0\n")
    s.define("import helpers")
    s.add('mt.Lambdad("image", lambda x: x + helpers.deeper.OFFSET)')
    yield
    (s.folder / "deeper.py").write_text("OFFSET = 1.5\n")


def changes_a_module(s: Study, define: str, transform: str) -> Change:
    """A study whose transforms are handed the module ``config``, which then changes."""
    (s.folder / "config.py").write_text("import threading\n\nshape = threading.Lock()\nSCALE = 1.0\n")
    s.define(f"import config\n\n\n{define}")
    s.add(transform)
    yield
    (s.folder / "config.py").write_text("import threading\n\nshape = threading.Lock()\nSCALE = 1.5\n")


SCALES = """
class Scale:
    def __init__(self, settings):
        self.settings = settings

    def __call__(self, x):
        return x.reshape(x.shape) * self.settings.SCALE
"""


@misses()
def a_module_given_to_a_constructor(s: Study) -> Change:
    yield from changes_a_module(s, SCALES.strip(), 'mt.Lambdad("image", Scale(config))')


@misses()
def a_module_in_a_dictionary(s: Study) -> Change:
    yield from changes_a_module(s, "SETS = {1: config}", 'mt.Lambdad("image", lambda x: x * SETS[1].SCALE)')


@misses()
def a_module_given_to_a_function(s: Study) -> Change:
    define = "def scale(x, settings):\n    return x * settings.SCALE"
    yield from changes_a_module(s, define, 'mt.Lambdad("image", lambda x: scale(x, config))')


@misses()
def a_module_that_a_function_imports_and_gives_to_another(s: Study) -> Change:
    define = (
        "def scale(x, settings):\n    return x * settings.SCALE\n\n\n"
        "def step(x):\n    import config as c\n\n    return scale(x, c)"
    )
    yield from changes_a_module(s, define, 'mt.Lambdad("image", step)')


@misses()
def a_module_of_a_package_given_to_a_function(s: Study) -> Change:
    (s.folder / "package").mkdir()
    (s.folder / "package" / "config.py").write_text("SCALE = 1.0\n")
    s.define("import package.config\n\n\ndef scale(x, settings):\n    return x * settings.SCALE")
    s.add('mt.Lambdad("image", lambda x: scale(x, package.config))')
    yield
    (s.folder / "package" / "config.py").write_text("SCALE = 1.5\n")


@hits()
def another_module_of_a_package_is_imported_too(s: Study) -> Change:
    (s.folder / "package").mkdir()
    (s.folder / "package" / "config.py").write_text("SCALE = 1.5\n")
    (s.folder / "package" / "shape.py").write_text("ROUND = True\n")  # a name that the transform reads
    s.define(f"import package.config\n\n\n{SCALES.strip().replace('.SCALE', '.config.SCALE')}")
    s.add('mt.Lambdad("image", Scale(package))')
    yield
    s.edit("import package.config\n", "import package.config\nimport package.shape\n")


@misses()
def what_a_module_imports_when_it_is_asked_for(s: Study) -> Change:
    package = s.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def __getattr__(name):\n    import importlib\n\n"
        "    return getattr(importlib.import_module('package.helpers'), name)\n"
    )
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.0\n")
    s.define("import package")
    s.add('mt.Lambdad("image", lambda x: package.plus(x))')
    yield
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.5\n")


@misses()
def what_a_module_of_a_kind_of_its_own_imports(s: Study) -> Change:
    package = s.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib, sys, types\n\n\nclass Lazy(types.ModuleType):\n    def __getattr__(self, name):\n"
        "        if name != 'plus':\n            raise AttributeError(name)\n"
        "        self.plus = importlib.import_module('package.helpers').plus\n        return self.plus\n\n\n"
        "sys.modules[__name__].__class__ = Lazy\n"
    )
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.0\n")
    s.define("import package")
    s.add('mt.Lambdad("image", lambda x: package.plus(x))')
    yield
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.5\n")


def installed(s: Study, offset: float, version: str = "0.1", name: str = "mylab", url: bool = True) -> None:
    """Installs the package ``mylab``, as pip does from a folder, or from an index."""
    site = s.folder / "lib" / "site-packages"
    shutil.rmtree(site, ignore_errors=True)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / "mylab").mkdir()
    code = f"def plus(x):\n    return x + {offset}\n"
    (site / "mylab" / "__init__.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    digest = hashlib.sha256(code.encode()).hexdigest()
    (info / "RECORD").write_text(f"../../bin/x,sha256=0,1\nmylab/__init__.py,sha256={digest},9\n{info.name}/RECORD,,\n")
    if url:
        (info / "direct_url.json").write_text('{"url": "file:///src/mylab", "dir_info": {}}')


def with_package(s: Study) -> None:
    s.code = f"import sys; sys.path.insert(0, {str(s.folder / 'lib' / 'site-packages')!r})"
    s.define("import mylab")
    s.add('mt.Lambdad("image", lambda x: mylab.plus(x))')


@misses()
def a_package_of_ones_own_installed_again(s: Study) -> Change:  # pip install ., with the version left as it was
    installed(s, 1.0)
    with_package(s)
    yield
    installed(s, 1.5)


@hits()
def a_package_of_ones_own_installed_elsewhere(s: Study) -> Change:
    installed(s, 1.0)
    with_package(s)
    yield
    (s.folder / "lib").rename(s.folder / "lib2")
    s.code = s.code.replace("lib", "lib2")


@misses()
def another_version_of_a_package_of_another_name(s: Study) -> Change:
    installed(s, 1.0, "0.1", "lab_transforms", url=False)
    with_package(s)
    yield
    installed(s, 1.5, "0.2", "lab_transforms", url=False)


EXTENSION = """
#include <Python.h>
static PyObject *offset(PyObject *self, PyObject *unused) { return PyFloat_FromDouble(OFFSET); }
static PyMethodDef methods[] = {{"offset", offset, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "extension", "", -1, methods};
PyMODINIT_FUNC PyInit_extension(void) { return PyModule_Create(&module); }
"""


def changes_an_extension(folder: Path) -> Change:
    """A module in C, in a folder, that is compiled again."""
    compiler = shutil.which("cc") or pytest.skip("this machine has no C compiler")
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        pytest.skip("this machine has no header files of Python")
    folder.mkdir(exist_ok=True)
    build = [compiler, "-shared", "-fPIC", f"-I{include}", "-o", folder / "extension.so", "-xc", "-"]
    subprocess.run(build, input=EXTENSION.replace("OFFSET", "1.0").encode(), check=True)
    yield
    subprocess.run(build, input=EXTENSION.replace("OFFSET", "1.5").encode(), check=True)


@misses()
def an_extension_of_ones_own(s: Study) -> Change:
    s.define("import extension")
    s.add('mt.Lambdad("image", lambda x: x + extension.offset())')
    yield from changes_an_extension(s.folder)


@misses()
def an_extension_in_a_folder_without_init(s: Study) -> Change:
    s.define("from native import extension")
    s.add('mt.Lambdad("image", lambda x: x + extension.offset())')
    yield from changes_an_extension(s.folder / "native")


row(
    MISS,
    "a_function_made_a_ufunc",
    script=("x + 1.0", "x + 1.5"),
    define="def plus(x):\n    return x + 1.0\n\n\npluses = np.frompyfunc(plus, 1, 1)",
    add='mt.Lambdad("image", lambda x: torch.as_tensor(pluses(x.numpy()).astype(np.float32)))',
)
row(
    MISS,
    "a_kind_of_property",
    script=("2.0 * super()", "3.0 * super()"),
    define="class Doubled(property):\n    def __get__(self, owner, cls=None):\n"
    "        return 2.0 * super().__get__(owner, cls)\n\n\n"
    "class Plus:\n    @Doubled\n    def offset(self):\n        return 1.0\n\n"
    "    def __call__(self, x):\n        return x + self.offset",
    add='mt.Lambdad("image", Plus())',
)
row(
    MISS,
    "which_of_two_classes_of_one_name",
    script=("first, second =", "second, first ="),
    define="def made(call):\n    return type('Step', (), {'__call__': call, '__module__': __name__})\n\n\n"
    "first, second = made(lambda self, x: x + 1.0), made(lambda self, x: x * 2.0)",
    add=('mt.Lambdad("image", first())', 'mt.Lambdad("image", second())'),
)


QUANTITY = """
class Quantity(np.ndarray):
    def __array_finalize__(self, other):
        self.unit = getattr(other, "unit", 1.0)

    def __deepcopy__(self, memo):
        return quantity(self.copy(), self.unit)


def quantity(values, unit):
    made = np.asarray(values).view(Quantity)
    made.unit = unit
    return made
"""


row(
    MISS,
    "an_attribute_of_a_kind_of_array",
    script=("[1.0, 2.0], 0.5", "[1.0, 2.0], 0.25"),
    define=QUANTITY,
    item='"dose": quantity([1.0, 2.0], 0.5)',
    add='mt.Lambda(lambda d: {**d, "dose": float(d["dose"].max()) * d["dose"].unit})',
)
row(
    MISS,
    "an_attribute_of_a_tensor",
    script=("2.0]), 0.5", "2.0]), 0.25"),
    define="def with_unit(values, unit):\n    values.unit = unit\n    return values",
    item='"dose": with_unit(torch.tensor([1.0, 2.0]), 0.5)',
    add='mt.Lambda(lambda d: {**d, "dose": d["dose"] * d["dose"].unit})',
)
row(
    MISS,
    "an_argument_of_an_operator",
    script=('"add", 1.0', '"add", 1.5'),
    define="import operator",
    add='mt.Lambdad("image", operator.methodcaller("add", 1.0))',
)
row(MISS, "a_function_of_torch", script=("torch.sin", "torch.cos"), add='mt.Lambdad("image", torch.sin)')
row(
    MISS,
    "a_function_of_numpy",
    script=("np.sqrt", "np.cbrt"),
    add=(
        'mt.Lambdad("image", lambda x: torch.as_tensor(np.square(x.numpy())))',
        'mt.Lambda(lambda d: {**d, "age": float(np.sqrt(d["age"]))})',
    ),
)
row(
    MISS,
    "a_method_that_overrides_one_of_monais",
    script=("'age': 1", "'age': 2"),
    define="class Flip(mt.Flipd):\n    def __call__(self, d, lazy=None):\n        return {**d, 'age': 1}",
    add='Flip("image", 0)',
)


NET = """
class Net:
    def __call__(self, x):
        with torch.no_grad():
            return net(x.as_tensor()[None])[0]
"""


row(
    MISS,
    "the_weights_of_a_model",
    script=("net.weight, 0.5", "net.weight, 0.75"),
    define=f"net = torch.nn.Conv3d(1, 1, 1, bias=False)\ntorch.nn.init.constant_(net.weight, 0.5)\n\n{NET}",
    add='mt.Lambdad("image", Net())',
)
row(
    MISS,
    "a_model_in_training",
    script=(".eval()", ".train()"),
    define=f"net = torch.nn.BatchNorm3d(1).eval()\n\n{NET}",
    add='mt.Lambdad("image", Net())',
)
row(
    MISS,
    "an_array_that_a_transform_holds",
    script=("[0.25]", "[0.5]"),
    add='mt.NormalizeIntensityd("image", np.array([0.25]), np.array([2.0]))',
)


@misses()
def an_option_of_a_reader(s: Study) -> Change:
    s.edit("ensure_channel_first=True", "ensure_channel_first=True, as_closest_canonical=False")
    import nibabel as nib

    for path in s.data.iterdir():
        image = nib.load(path)
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj), np.diag([-1.5, 1.5, 2.0, 1.0])), path)
    yield
    s.edit("as_closest_canonical=False", "as_closest_canonical=True")


row(
    MISS,
    "another_reader",
    script=('reader="NibabelReader"', "reader=Mirrored"),
    define="from monai.data import NibabelReader\n\n\nclass Mirrored(NibabelReader):\n    def get_data(self, image):\n"
    "        values, header = super().get_data(image)\n        return values[::-1].copy(), header",
)


FURTHER_READER = """
from monai.data import NibabelReader
from monai.transforms.io import array

class ITKReader(NibabelReader):
    def get_data(self, image):
        values, header = super().get_data(image)
        return values[::-1].copy(), header

array.SUPPORTED_READERS = {**array.SUPPORTED_READERS, "further": ITKReader}
old = array.get_default_reader_registration_order
array.get_default_reader_registration_order = lambda: [*old(), "further"]
"""

row(MISS, "the_readers_one_would_get_without_asking", code=("", FURTHER_READER), edit=('reader="NibabelReader", ', ""))
row(
    MISS,
    "the_dtype_of_a_transform",
    script=("torch.float32", "torch.float64"),
    add='mt.EnsureTyped("image", dtype=torch.float32)',
)
row(
    MISS,
    "tracing_of_one_transform",
    script=("flip = mt.Flip(0)\n", "flip = mt.Flip(0)\nflip.tracing = False\n"),
    define="flip = mt.Flip(0)\n\n\ndef flipped(x):\n    return flip(x)",
    add='mt.Lambdad("image", flipped)',
)


# ---------------------------------------------------------------------------------------------------------------------
# The state of the process


row(
    MISS,
    "tracking_of_metadata",
    code=("", "import monai; monai.data.set_track_meta(False)"),
    add='mt.Spacingd("image", (3.0, 3.0, 3.0))',
    either=True,
)
row(
    MISS,
    "tracking_of_metadata_on_again",
    code=("import monai; monai.data.set_track_meta(False)", "import monai; monai.data.set_track_meta(True)"),
    add='mt.Spacingd("image", (3.0, 3.0, 3.0))',
    either=True,
)
row(
    MISS,
    "the_default_dtype",
    code=("", "import torch; torch.set_default_dtype(torch.float64)"),
    define="def thirds(d):\n    return {**d, 'thirds': torch.tensor([1 / 3, 2 / 3])}",
    add="mt.Lambda(thirds)",
    either=True,
)
row(
    MISS,
    "small_numbers_set_to_zero",
    code=("", "import torch; assert torch.set_flush_denormal(True)"),
    add='mt.Lambdad("image", lambda x: x * 1e-20 * 1e-20)',
    either=True,
)
row(MISS, "metadata_beside_arrays", code=("", "import monai.config; monai.config.USE_META_DICT = True"))


@misses()
def tracing_by_the_environment(s: Study) -> Change:
    s.add('mt.Flipd("image", 0)')
    yield
    s.environment = {"MONAI_TRACE_TRANSFORM": "0"}


@misses()
def identities_of_transforms_kept(s: Study) -> Change:
    s.add('mt.Flipd("image", 0)')
    s.keep_ids = False
    yield
    s.settings = {"reset_ops_id": False}


@misses()
def identities_of_transforms_reset(s: Study) -> Change:  # with those of another process no Invertd works
    s.add('mt.Flipd("image", 0)')
    s.settings = {"reset_ops_id": False}
    s.keep_ids = False
    yield
    s.settings = {}
    s.keep_ids = True


VERSION = "import monai; monai.__version__ = {!r}"


row(MISS, "another_patch_of_monai", code=(VERSION.format("1.6.1"), VERSION.format("1.6.2")), other_item=False)
row(
    MISS,
    "another_minor_version_of_monai",
    settings=({"options": {"monai_version": "minor"}}, {"options": {"monai_version": "minor"}}),
    code=(VERSION.format("1.6.1"), VERSION.format("1.7.0")),
    other_item=False,
)
row(
    MISS,
    "another_word_on_the_version_of_monai",
    settings=({"options": {"monai_version": "minor"}}, {"options": {"monai_version": "exact"}}),
    other_item=False,
)


# ---------------------------------------------------------------------------------------------------------------------
# Records that are not what their names say


def one_record_each(s: Study) -> Change:
    """Runs item 1, then item 0."""
    s.index = 1
    yield
    s.index = 0
    yield


def by_item(s: Study) -> tuple[Path, Path]:
    """The records of items 0 and 1, after :func:`one_record_each`."""
    second, first = sorted(s.records(), key=lambda path: path.stat().st_mtime_ns)
    return first, second


@misses(either=True, other_item=None)
def two_records_swapped(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    a.rename(s.folder / "c")
    b.rename(a)
    (s.folder / "c").rename(b)
    yield


@misses(either=True, other_item=None)
def a_record_copied_under_another_name(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    shutil.copyfile(b, a)
    yield


@misses(either=True, other_item=None)
def a_link_to_another_record(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    a.unlink()
    a.symlink_to(b.name)
    yield


@misses(either=True, other_item=None)
def a_hard_link_of_another_record(s: Study) -> Change:
    yield from one_record_each(s)
    a, b = by_item(s)
    a.unlink()
    a.hardlink_to(b)
    yield


@misses(either=True, other_item=None)
def swapped_records_read_ahead(s: Study) -> Change:
    s.read = READ_AHEAD
    yield
    a, b = s.records()
    a.rename(s.folder / "c")
    b.rename(a)
    (s.folder / "c").rename(b)
    yield


@misses(other_item=None)
def a_record_of_another_pipeline(s: Study) -> Change:
    yield
    (first,) = s.records()
    s.edit("maxv=1.5", "maxv=2.5")
    yield
    (second,) = set(s.records()) - {first}
    shutil.copyfile(first, second)
    yield


# ---------------------------------------------------------------------------------------------------------------------
# Where and how the study runs


@hits()
def another_process(s: Study) -> Change:
    yield


@hits()
def another_hash_seed(s: Study) -> Change:
    s.item('"sites": {"a", "b", "c", "d"}')
    s.define(
        "CODES = {'one', 'two', 'three', 'four'}\n\n\ndef known(x):\n    return x + len(CODES & {'one', 'five', 'six'})"
    )
    s.add('mt.Lambdad("image", known)')
    s.add('mt.LabelFilterd("image", applied_labels={1, 2, 3}, allow_missing_keys=True)')
    yield
    s.hash_seed = "12345"


@hits(either=True)
def another_working_folder(s: Study) -> Change:
    yield
    s.cwd = Path("/")
    s.code = "import os; os.chdir('/')"


@hits()
def another_user(s: Study) -> Change:
    needs_root()
    yield
    s.folder.chmod(0o777)
    s.cache.chmod(0o777)
    s.user = NOBODY


@hits()
def the_environment(s: Study) -> Change:
    yield
    s.environment = {
        "HOME": "/nowhere",
        "TZ": "Asia/Tokyo",
        "LANG": "C",
        "SLURM_JOB_ID": "17",
        "CUDA_VISIBLE_DEVICES": "",
    }


@hits()
def the_environment_that_code_has_a_name_of(s: Study) -> Change:
    s.define("from os import environ\n\n\ndef plus(x):\n    return x + len(environ.get('OFFSET', ''))")
    s.add('mt.Lambdad("image", plus)')
    yield
    s.environment = {"SLURM_JOB_ID": "17"}


row(
    HIT,
    "another_patch_of_python",
    code=(
        "",
        "import sys, platform\nfrom collections import namedtuple\n"
        "V = namedtuple('V', 'major minor micro releaselevel serial')\n"
        "sys.version_info = V(*sys.version_info[:2], 99, 'final', 0)\nsys.version = sys.version.replace('.', '.9', 1)\n"
        "sys.hexversion += 0x100\nplatform.python_version = lambda: '3.11.99'",
    ),
)
row(HIT, "seeds_set", code=("", "import monai; monai.utils.set_determinism(0)"), either=True)
row(HIT, "deterministic_algorithms", code=("", "import torch; torch.use_deterministic_algorithms(True)"), either=True)
row(
    HIT,
    "settings_of_cudnn_and_tf32",
    code=(
        "",
        "import torch\nb = torch.backends\nb.cudnn.benchmark = True\nb.cudnn.deterministic = True\n"
        "b.cudnn.enabled = False\nb.cuda.matmul.allow_tf32 = True\nb.cudnn.allow_tf32 = False",
    ),
    either=True,
)
row(HIT, "another_number_of_threads", code=("", "import torch; torch.set_num_threads(2)"), either=True)
row(
    HIT,
    "logging_and_warnings_configured",
    code=(
        "",
        "import logging, warnings\nlogging.basicConfig(level=logging.DEBUG, filename='run.log')\n"
        "warnings.simplefilter('ignore')",
    ),
    either=True,
)
row(HIT, "gradients_off", code=("", "import torch; torch.set_grad_enabled(False)"), either=True)


#: Settings that a spawned worker starts without.
STATE = (
    "import monai, torch; monai.data.set_track_meta(False); torch.set_default_dtype(torch.float64)"
    "; torch.set_flush_denormal(True)"
)
ALL = "[dataset[i] for i in range(2)][index]"
BY_WORKERS = "list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=lambda x: x))[index]"
READ_AHEAD = (
    "list(__import__('monai_gds').GDSDataLoader(dataset, batch_size=1, collate_fn=lambda batch: batch[0]))[index]"
)


@hits()
def workers_of_a_loader(s: Study) -> Change:
    s.read = ALL
    yield
    s.read = BY_WORKERS


@hits()
def items_made_by_workers_of_a_loader(s: Study) -> Change:
    s.code = STATE
    s.read = BY_WORKERS
    yield
    s.read = ALL


@hits(either=True)
def items_read_ahead(s: Study) -> Change:
    s.code = STATE
    s.read = ALL
    yield
    s.read = READ_AHEAD


@hits()
def items_computed_ahead(s: Study) -> Change:
    s.code = STATE
    s.read = READ_AHEAD
    s.add('mt.Lambdad("image", lambda x: x * torch.tensor(1e-20) * 1e-20)')
    yield
    s.read = ALL


@hits()
def items_made_by_populate(s: Study) -> Change:
    s.code = STATE
    s.read = "dataset.populate(num_workers=2, progress=False) and dataset[index]"
    yield
    s.read = "dataset[index]"


@hits()
def items_made_by_spawned_workers(s: Study) -> Change:
    (s.folder / "study.py").touch()
    s.environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), str(s.folder)])}
    s.code = STATE + "; torch.cuda.is_initialized = lambda: True"  # which is when populate spawns
    s.read = "dataset.populate(num_workers=1, progress=False) and dataset[index]"
    yield
    s.code = STATE
    s.read = "dataset[index]"


@hits()
def another_device(s: Study) -> Change:
    s.environment = {"CUDA_VISIBLE_DEVICES": ""}
    yield
    s.settings = {"device": None}


row(HIT, "another_backend", settings=({}, {"backend": "posix"}))
row(HIT, "how_records_are_checked_and_kept", settings=({}, {"options": {"verify": "always", "durable": True}}))
row(
    HIT,
    "what_happens_to_unsupported_values",
    settings=({"options": {"unsupported": "error"}}, {"options": {"unsupported": "warn"}}),
)
row(
    HIT,
    "arrays_as_tensors",
    settings=({"options": {"arrays": "numpy"}}, {"options": {"arrays": "torch"}}),
    item='"weights": np.array([1.0, 2.0])',
)
row(HIT, "metadata_wanted_or_not", settings=({}, {"track_meta": False}))


# ---------------------------------------------------------------------------------------------------------------------
# The cache folder


row(HIT, "metadata_wanted_after_all", settings=({"track_meta": False}, {}))
row(
    HIT,
    "tensors_as_arrays",
    settings=({"options": {"arrays": "torch"}}, {"options": {"arrays": "numpy"}}),
    item='"weights": np.array([1.0, 2.0])',
)


@hits()
def another_order_of_the_items(s: Study) -> Change:
    yield
    s.edit("for i in range(2)]", "for i in (1, 0)]")
    s.index = 1


@hits()
def a_cache_moved(s: Study) -> Change:
    yield
    s.cache = s.cache.rename(s.folder / "moved")


@hits()
def a_cache_copied(s: Study) -> Change:
    yield
    shutil.copytree(s.cache, s.folder / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(s.cache)
    s.cache = s.folder / "copy"


@hits()
def a_link_to_the_cache(s: Study) -> Change:
    yield
    (s.folder / "link").symlink_to(s.cache)
    s.cache = s.folder / "link"


# ---------------------------------------------------------------------------------------------------------------------
# Data that is elsewhere, and the same


def with_paths(s: Study) -> None:
    """Below a root, with file names in the item, in metadata and in applied operations."""
    s.settings = {"root": s.data}
    s.item('"note": {"files": [str(DATA / "ct_0.nii"), DATA / "ct_1.nii"]}')
    s.add('mt.Spacingd("image", (3.0, 3.0, 3.0))')
    s.add('mt.Flipd("image", 0)')


def now_at(s: Study, folder: Path) -> None:
    s.data = folder
    s.settings = {"root": folder}


@hits()
def data_moved(s: Study) -> Change:
    with_paths(s)
    yield
    now_at(s, s.data.rename(s.folder / "moved"))


@hits()
def data_copied(s: Study) -> Change:
    with_paths(s)
    yield
    now_at(s, shutil.copytree(s.data, s.folder / "copy"))
    shutil.rmtree(s.folder / "data")


@hits()
def data_staged(s: Study) -> Change:  # with times of its own
    with_paths(s)
    yield
    now_at(s, shutil.copytree(s.data, s.folder / "job" / "42", copy_function=shutil.copyfile))


@hits()
def data_of_a_folder_source_staged(s: Study) -> Change:
    with_folder(s, "c/0/0/0", "c/0/0/1")
    s.edit(repr(str(s.data / "store")), 'str(DATA / "store")')
    s.settings = {"root": s.data}
    yield
    now_at(s, shutil.copytree(s.data, s.folder / "job", copy_function=shutil.copyfile))


@hits()
def a_link_to_the_data(s: Study) -> Change:
    with_paths(s)
    yield
    (s.folder / "link").symlink_to(s.data)
    now_at(s, s.folder / "link")


@hits()
def another_mount_of_the_data(s: Study) -> Change:
    needs_root("mount")
    with_paths(s)
    yield
    there = s.folder / "mnt"
    there.mkdir()
    done = subprocess.run(["mount", "--bind", s.data, there], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not mount folders: {done.stderr.strip()}")
    try:
        now_at(s, there)
        yield
    finally:
        subprocess.run(["umount", "-l", there], check=True)


@hits()
def data_moved_with_paths_in_odd_places(s: Study) -> Change:
    with_paths(s)
    s.item('"names": np.array([str(DATA / "ct_0.nii"), "other"])')
    s.item('"pair": (DATA / "ct_1.nii", str(DATA), str(DATA) + "/")')
    s.add('mt.Lambda(lambda d: {**d, "from": Path(d["image"].meta["filename_or_obj"]), "in": {str(DATA): 1}})')
    yield
    now_at(s, s.data.rename(s.folder / "moved"))


@hits()
def a_file_given_to_a_constructor_moved_with_the_data(s: Study) -> Change:
    with_paths(s)
    np.save(s.data / "atlas.npy", np.full((1, 1, 1, 1), 0.5))
    s.define(TIMES)
    s.add('Times("image", DATA / "atlas.npy")')
    yield
    now_at(s, s.data.rename(s.folder / "moved"))


@hits()
def the_root_spelt_otherwise(s: Study) -> Change:
    with_paths(s)
    yield
    s.settings = {"root": f"{s.folder}/cache/../data/"}


@hits()
def a_neighbour_whose_name_begins_like_the_roots(s: Study) -> Change:
    with_paths(s)
    neighbour = s.folder / "data2"
    neighbour.mkdir()
    write_volume(neighbour / "prior.nii")
    s.item(f'"prior": {str(neighbour / "prior.nii")!r}')
    yield
    now_at(s, s.data.rename(s.folder / "moved"))


@hits()
def relative_names_below_the_root(s: Study) -> Change:
    s.edit('str(DATA / f"ct_{i}.nii")', 'f"ct_{i}.nii"')
    s.settings = {"root": s.data}
    s.cwd = s.data
    yield
    now_at(s, s.data.rename(s.folder / "moved"))
    s.cwd = s.data


@hits(either=True)
def data_touched(s: Study) -> Change:
    yield
    (s.data / "ct_0.nii").touch()


@hits(either=True)
def data_made_readable(s: Study) -> Change:
    yield
    (s.data / "ct_0.nii").chmod(0o640)


@hits(either=True)
def a_hard_link_of_the_data(s: Study) -> Change:
    yield
    (s.folder / "link.nii").hardlink_to(s.data / "ct_0.nii")


@hits(either=True)
def data_restored_from_a_backup(s: Study) -> Change:  # the same bytes in another file at another time
    path = s.data / "ct_0.nii"
    yield
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)


@hits(either=True)
def other_files_beside_the_data(s: Study) -> Change:
    yield
    write_volume(s.data / "ct_7.nii", seed=7)


@hits()
def a_source_that_does_not_count(s: Study) -> Change:
    s.settings = {"options": {"sources": None}}
    report = s.data / "report.txt"
    report.write_text("nothing found")
    s.item(f'"report": {str(report)!r}')
    yield
    report.write_text("something found")


@hits(either=True)
def data_made_readable_where_times_count(s: Study) -> Change:
    s.settings = {"options": {"sources": "stat"}}
    yield
    (s.data / "ct_0.nii").chmod(0o640)


# ---------------------------------------------------------------------------------------------------------------------
# Words that are no sources


def fill(folder: Path) -> Change:
    """A folder whose listing changes."""
    folder.mkdir(exist_ok=True)
    (folder / "events.0").write_text("old")
    yield
    (folder / "events.1").write_text("new")


@hits(either=True)
def a_word_that_is_a_folder_too(s: Study) -> Change:
    s.item('"split": "train"')
    yield from fill(s.folder / "train")


@hits(either=True)
def a_folder_for_logs(s: Study) -> Change:
    s.define(
        "class Save(mt.Transform):\n    def __init__(self, output_dir):\n        self.output_dir = output_dir\n\n"
        "    def __call__(self, data):\n        return data"
    )
    s.add(f"Save(output_dir={str(s.folder / 'logs')!r})")
    yield from fill(s.folder / "logs")


@hits(either=True)
def a_folder_that_is_saved_to(s: Study) -> Change:
    s.add(f'mt.SaveImaged("image", output_dir={str(s.folder / "out")!r}, print_log=False)')
    yield from fill(s.folder / "out")


@hits(either=True)
def a_word_in_a_transform_that_is_a_folder_too(s: Study) -> Change:
    s.add('mt.CopyItemsd("image", names="train")')
    yield from fill(s.folder / "train")


# ---------------------------------------------------------------------------------------------------------------------
# Code that means the same


row(
    HIT,
    "a_comment",
    script=("    def offset(self):\n", "    def offset(self):\n        # as in the paper\n"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)


@hits()
def its_formatting(s: Study) -> Change:
    s.define(PLUS)
    s.add('mt.Lambdad("image", lambda x: Plus(0.0)(x) + 1)')
    yield
    s.edit(
        "x * self.scale + self.offset() + self.more",
        "(\n            x * self.scale\n            + self.offset() + self.more\n        )",
    )
    s.edit("lambda x: Plus(0.0)(x) + 1", "lambda x: (\n    Plus( 0.0 )(x)\n    + 1\n)")


row(
    HIT,
    "a_docstring_of_a_class",
    script=("class Plus(Base):\n", 'class Plus(Base):\n    """Adds."""\n\n'),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    HIT,
    "an_unrelated_global",
    script=("RATE = 1", "RATE = 2"),
    define="RATE = 1\nOFFSET = 1.0\n\n\ndef plus(x):\n    return x + OFFSET",
    add='mt.Lambdad("image", plus)',
)


@hits()
def an_unrelated_function(s: Study) -> Change:
    s.define("def plus(x):\n    return x + 1.0")
    s.add('mt.Lambdad("image", plus)')
    yield
    s.define("def unused(x):\n    return x")


@hits()
def the_order_of_an_items_keys(s: Study) -> Change:
    s.keep_order = False
    yield
    s.edit('{"image": str(DATA / f"ct_{i}.nii"), "age": 40 + i}', '{"age": 40 + i, "image": str(DATA / f"ct_{i}.nii")}')


row(HIT, "the_order_of_keywords", script=("minv=0.0, maxv=1.5", "maxv=1.5, minv=0.0"))


@hits()
def random_transforms_behind_the_cache(s: Study) -> Change:
    s.keep_ids = False
    s.add('mt.RandFlipd("image", prob=1.0, spatial_axis=0)')
    yield
    s.edit("spatial_axis=0", "spatial_axis=1")


row(HIT, "seeds_of_the_pipeline", script=("        ]\n    )\n", "        ]\n    ).set_random_state(7)\n"))
row(HIT, "statistics_of_the_pipeline", script=("        ]\n    )\n", "        ],\n        log_stats=True,\n    )\n"))


@hits()
def transforms_that_have_run(s: Study) -> Change:
    s.define("def used(compose):\n    return compose")
    s.edit("return mt.Compose(", "return used(mt.Compose)(")
    yield
    s.define(
        "class Used(mt.Compose):\n    def __init__(self, transforms):\n        super().__init__(transforms)\n"
        "        for i in range(2):\n            self.transforms[1]({'image': str(DATA / f'ct_{i}.nii')})\n"
    )
    s.edit("def used(compose):\n    return compose", "def used(compose):\n    return Used")


row(HIT, "a_further_reader_that_nobody_asked_for", code=("", FURTHER_READER))
row(
    HIT,
    "another_patch_of_monai_where_minor_versions_count",
    settings=({"options": {"monai_version": "minor"}}, {"options": {"monai_version": "minor"}}),
    code=(VERSION.format("1.6.1"), VERSION.format("1.6.2")),
)
row(
    HIT,
    "another_monai_where_it_does_not_count",
    settings=({"options": {"monai_version": None}}, {"options": {"monai_version": None}}),
    code=("", VERSION.format("2.0.0")),
)


# ---------------------------------------------------------------------------------------------------------------------
# The form of records


#: 8 MB that compress well.
LARGE = "np.arange(1 << 20) % 1000 / 7"


def is_whole(path: Path) -> bool:
    return path.stat().st_size > 8 << 20


@hits()
def compression(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": None}
    yield
    assert is_whole(s.records()[0])
    s.settings = {"compression": "zstd"}


@hits()
def compressed_records_where_none_are_asked_for(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": "lz4"}
    yield
    assert not is_whole(s.records()[0])
    s.settings = {"compression": None}


@hits()
def the_size_of_tiles(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": "lz4"}
    yield
    s.settings = {"compression": "lz4", "options": {"tiles": 16}}


row(MISS, "bits_of_mantissa", settings=({}, {"options": {"mantissa_bits": 13}}), array=LARGE)


row(
    MISS,
    "other_bits_of_mantissa",
    settings=({"options": {"mantissa_bits": 13}}, {"options": {"mantissa_bits": 12}}),
    array=LARGE,
)


row(
    MISS,
    "bits_of_mantissa_where_transforms_do_not_count",
    settings=({"hash_transform": None}, {"hash_transform": None, "options": {"mantissa_bits": 13}}),
    array=LARGE,
)


@hits()
def bits_of_mantissa_in_another_form(s: Study) -> Change:
    pytest.importorskip("blosc2")
    with_array(s, LARGE)
    s.settings = {"compression": "zstd", "options": {"mantissa_bits": 13}}
    yield
    s.settings = {"compression": None, "options": {"mantissa_bits": 13}}


row(MISS, "no_bits_of_mantissa", settings=({"options": {"mantissa_bits": 13}}, {}), array=LARGE)
