"""Changes of files that items and transforms name; see ``rows.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.changes.rows import Change, Table
from tests.loopdisk import loop_disk
from tests.studies import TIME, Study, version_beside, write_volume

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test

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
    pytest.importorskip("numpy", "2.0", reason="arrays of strings of any length came with NumPy 2")
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
