"""Changes of files that nothing names, and that were read while the item was computed; see ``rows.py``.

The rows of a family differ in one thing, such as where a path comes from. The first of each runs by default, the others
are long.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.changes.rows import HIT, MISS, Change, Table
from tests.changes.test_places import ALL, BY_WORKERS
from tests.changes.test_sources import overwritten
from tests.studies import TIME, Study

TABLE = Table()
test_change = TABLE.test

#: Writes a number, in a form whose size does not depend on it.
Write = Callable[[Path, int], Any]


def family(miss: bool, name: str, rows: Mapping[str, Any], change: Callable[..., Change]) -> None:
    """Registers a row for each of ``rows``: their values are arguments of ``change``."""
    for i, (which, given) in enumerate(rows.items()):
        run = partial(_changed, change, given)
        run.__name__ = f"{name}-{which}"  # type: ignore[attr-defined]
        (TABLE.misses if miss else TABLE.hits)(other_item=True if miss else None, long=i > 0)(run)


def _changed(change: Callable[..., Change], given: Any, s: Study) -> Change:
    yield from change(s, *given) if isinstance(given, tuple) else change(s, given)


def rewrite(write: Write, path: Path, number: int) -> None:
    """Writes another number into a file whose size and times stay."""
    before = path.read_bytes()
    write(path.with_name(f"new_{path.name}"), number)
    after = path.with_name(f"new_{path.name}").read_bytes()
    assert len(after) == len(before)
    overwritten(path, after)


def as_array(path: Path, number: int) -> None:
    with path.open("wb") as file:
        np.save(file, np.full(4, number))
    os.utime(path, (TIME, TIME))


#: In scripts, the file of a name beside the script, which no text names.
FILE = 'def file(name="atlas.npy"):\n    return Path(__file__).parent / "assets" / name'


def asset(s: Study, name: str = "atlas.npy") -> Path:
    """That file."""
    path = s.folder / "assets" / name
    path.parent.mkdir(exist_ok=True)
    return path


def reading(s: Study, expression: str, define: str = "") -> None:
    """Adds a transform that puts a number into the item: what an expression over the item ``d`` gives."""
    s.define(f"{define}\n\n\ndef read(d):\n    return float({expression})")
    s.add('mt.Lambda(lambda d: {**d, "read": read(d)})')


# A path inside a longer text of the item


def by_text(s: Study, text: str, load: str) -> Change:
    paths = [s.data / "part_007.npy", s.data / "other.npy"]
    for path in paths:
        as_array(path, 1)
    with zipfile.ZipFile(s.data / "a.zip", "w", zipfile.ZIP_STORED) as file:
        file.write(paths[0], "x.npy")
    np.savez(s.data / "a.npz", x=np.full(4, 1))
    os.utime(s.data / "a.npz", (TIME, TIME))
    s.environment = {"STUDY_DATA": str(s.data)}
    s.item(f'"text": f"{text}"')
    reading(s, load, "import glob\nimport io\nimport json\nimport os\nimport zipfile\n\nROOT = DATA")
    yield
    for path in paths:
        rewrite(as_array, path, 2)
    with zipfile.ZipFile(s.data / "a.zip", "w", zipfile.ZIP_STORED) as file:
        file.write(paths[0], "x.npy")
    np.savez(s.data / "a.npz", x=np.full(4, 2))


family(
    MISS,
    "text",
    {
        "member_of_a_zip": (
            "{DATA}/a.zip!x.npy",
            'np.load(io.BytesIO(zipfile.ZipFile(d["text"].split("!")[0]).read("x.npy"))).sum()',
        ),
        "member": ("{DATA}/a.npz::x", 'np.load(d["text"].split("::")[0])["x"].sum()'),
        "index": ("{DATA}/part_007.npy#3", 'np.load(d["text"].split("#")[0])[3]'),
        "url": ("file://{DATA}/part_007.npy", 'np.load(d["text"].removeprefix("file://")).sum()'),
        "list": ("{DATA}/part_007.npy;{DATA}/other.npy", 'sum(np.load(p).sum() for p in d["text"].split(";"))'),
        "commas": ("{DATA}/part_007.npy, {DATA}/other.npy", 'sum(np.load(p).sum() for p in d["text"].split(", "))'),
        "pattern": ("{DATA}/part_*.npy", 'sum(np.load(p).sum() for p in glob.glob(d["text"]))'),
        "number": ("{DATA}/part_%03d.npy", 'np.load(d["text"] % 7).sum()'),
        "braces": ("{DATA}/part_{{:03}}.npy", 'np.load(d["text"].format(7)).sum()'),
        "stem": ("{DATA}/other", 'np.load(d["text"] + ".npy").sum()'),
        "name": ("other", "np.load(ROOT / f\"{d['text']}.npy\").sum()"),
        "variable": ("$STUDY_DATA/other.npy", 'np.load(os.path.expandvars(d["text"])).sum()'),
        "option": ("--in={DATA}/other.npy --fast", 'np.load(d["text"].split()[0][5:]).sum()'),
        "json": (
            "{json.dumps(dict(path=str(DATA / 'other.npy')))}",
            'np.load(json.loads(d["text"])["path"]).sum()',
        ),
        "sentence": ("see {DATA}/other.npy.", 'np.load(d["text"].split()[1][:-1]).sum()'),
        "as_bytes": ("{DATA}/other", 'np.load(open(os.fsencode(d["text"]) + b".npy", "rb")).sum()'),
    },
    by_text,
)


# An atlas whose path is put together


def by_place(s: Study, place: str) -> Change:
    path = s.folder / "assets" / "atlas.npy"
    path.parent.mkdir()
    as_array(path, 1)
    s.environment = {"STUDY_ASSETS": str(path.parent), "HOME": str(s.folder)}
    s.code = f"import sys; sys.argv[1:] = ['--assets', {str(path.parent)!r}]"
    define = "import glob\nimport os\nimport sys\nfrom importlib import resources\n\nNAME = 'atlas'"
    reading(s, f"np.load({place}).sum()", define)
    yield
    rewrite(as_array, path, 2)


family(
    MISS,
    "place",
    {
        "file": 'Path(__file__).with_name("assets") / "atlas.npy"',
        "environment": 'os.path.join(os.environ["STUDY_ASSETS"], NAME + ".npy")',
        "variable": 'os.path.expandvars("$STUDY_ASSETS/atlas.npy")',
        "command_line": "f\"{sys.argv[sys.argv.index('--assets') + 1]}/{NAME}.npy\"",
        "working_folder": 'os.path.join("assets", NAME + ".npy")',
        "home": 'Path.home() / "assets" / f"{NAME}.npy"',
        "found": 'next(Path(__file__).parent.rglob("atlas.npy"))',
        "pattern": 'glob.glob("assets/*.npy")[0]',
        "search_path": 'next(Path(p, "assets") / "atlas.npy" for p in sys.path if Path(p, "assets").exists())',
        "data_folder": 'DATA.parent / "assets" / (NAME + ".npy")',
    },
    by_place,
)


# Kinds of files, and the libraries that read them


def as_text(path: Path, number: int) -> None:
    path.write_text(f"value: {number}\n")


def as_pickle(path: Path, number: int) -> None:
    path.write_bytes(pickle.dumps(number))


def as_checkpoint(path: Path, number: int) -> None:
    import torch

    with path.open("wb") as file:  # else its name would be in it
        torch.save({"value": torch.tensor(number)}, file)


def as_nifti(path: Path, number: int) -> None:
    import nibabel as nib

    nib.save(nib.Nifti1Image(np.full((2, 2, 2), number, np.int16), np.eye(4)), path)


def as_image(path: Path, number: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    image.new("L", (4, 4), number).save(path, "bmp")


def as_mat(path: Path, number: int) -> None:
    io = pytest.importorskip("scipy.io", reason="SciPy is not installed")
    io.savemat(path, {"x": np.full(2, number)})


def as_table(path: Path, number: int) -> None:
    path.write_text(f"case,value\n1,{number}\n")


def as_module(path: Path, number: int) -> None:
    path.write_text(f"VALUE = {number}\n")


def by_kind(s: Study, name: str, write: Write, load: str) -> Change:
    path = asset(s, name)
    write(path, 1)
    os.utime(path, (TIME, TIME))
    if write is as_module:
        s.environment = {"PYTHONPATH": str(path.parent)}
        s.code = f"import sys; sys.path.append({str(path.parent)!r})"
    reading(s, load.replace("FILE", f"file({name!r})"), f"import importlib\nimport json\nimport pickle\n\n\n{FILE}")
    yield
    rewrite(write, path, 2)


family(
    MISS,
    "kind",
    {
        "checkpoint": ("w.pt", as_checkpoint, 'torch.load(FILE, weights_only=True)["value"]'),
        "yaml": ("c.yaml", as_text, '__import__("yaml").safe_load(FILE.read_text())["value"]'),
        "configuration": ("c.yaml", as_text, '__import__("omegaconf").OmegaConf.load(FILE).value'),
        "pickle": ("a.pkl", as_pickle, "pickle.loads(FILE.read_bytes())"),
        "nifti": ("a.nii", as_nifti, '__import__("nibabel").load(FILE).get_fdata().sum()'),
        "image": ("a.bmp", as_image, 'np.asarray(__import__("PIL.Image").Image.open(FILE)).sum()'),
        "matlab": ("a.mat", as_mat, '__import__("scipy.io").io.loadmat(FILE)["x"].sum()'),
        "table": ("a.csv", as_table, 'np.loadtxt(FILE, delimiter=",", skiprows=1).sum()'),
        "mapped": ("a.npy", as_array, 'np.load(FILE, mmap_mode="r").sum()'),
        "raw": ("a.npy", as_array, "np.fromfile(FILE, np.uint8).sum()"),
        "late_import": ("late.py", as_module, 'importlib.import_module("late").VALUE'),
    },
    by_kind,
)


def instantiated(s: Study, _: None) -> Change:
    """What hydra's ``instantiate`` does: a class and its arguments from a file."""
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = asset(s, "model.yaml")
    path.write_text("_target_: fractions.Fraction\nnumerator: 1\n")
    os.utime(path, (TIME, TIME))
    define = (
        "import importlib\nimport yaml\n\n\ndef instantiate(path):\n    given = yaml.safe_load(path.read_text())\n"
        '    module, _, name = given.pop("_target_").rpartition(".")\n'
        "    return getattr(importlib.import_module(module), name)(**given)"
    )
    reading(s, 'instantiate(file("model.yaml"))', f"{define}\n\n\n{FILE}")
    yield
    overwritten(path, path.read_bytes().replace(b"1", b"2"))


family(MISS, "kind", {"object_from_yaml": None}, instantiated)


# Files beside the one that the item names


def beside(s: Study, header: str, voxels: str, text: str) -> Change:
    (s.data / header).write_text(text)
    for value in (1, 2):
        (s.folder / f"{value}").write_bytes(bytes([value] * 64))
    shutil.copyfile(s.folder / "1", s.data / voxels)
    os.utime(s.data / voxels, (TIME, TIME))
    s.item(f'"header": str(DATA / {header!r})')
    define = (
        "def voxels(header):\n    for line in Path(header).read_text().splitlines():\n"
        '        key, _, value = line.replace(":", "=").partition("=")\n'
        '        if key.strip().lower() in ("elementdatafile", "data file"):\n'
        "            return Path(header).with_name(value.strip())\n"
        '    return Path(header).with_suffix("") if header.endswith(".hdr") else Path(header[:-5]) / "Data.dat"'
    )
    reading(s, 'sum(voxels(d["header"]).read_bytes())', define)
    yield
    overwritten(s.data / voxels, (s.folder / "2").read_bytes())


family(
    MISS,
    "beside",
    {
        "metaimage_of_another_stem": ("ct.mhd", "voxels.raw", "ElementDataFile = voxels.raw"),
        "metaimage_compressed": ("ct.mhd", "other.zraw", "ElementDataFile = other.zraw"),
        "nrrd": ("ct.nhdr", "parts.raw.gz", "data file: parts.raw.gz"),
        "nrrd_in_another_suffix": ("ct.nhdr", "ct.bin", "data file: ct.bin"),
        "envi": ("scene.dat.hdr", "scene.dat", "ENVI\nsamples = 8"),
        "mirax": ("slide.mrxs", "Data.dat", "MIRAX\ndata file: Data.dat"),
    },
    beside,
)


def database(s: Study, journal: str) -> Change:
    path = s.data / "cases.db"
    writer = sqlite3.connect(path)
    writer.execute(f"pragma journal_mode={journal}")
    writer.execute("create table t (x)")
    writer.execute("insert into t values (1)")
    writer.commit()
    connect = 'sqlite3.connect(DATA / "cases.db")'
    reading(s, f'{connect}.execute("select x from t").fetchone()[0]', "import sqlite3")
    yield
    writer.execute("update t set x = 2")
    writer.commit()
    yield
    writer.close()


family(MISS, "database", {"with_a_wal": "wal", "alone": "delete"}, database)


# Folders, and files that are not there


def listed(s: Study, count: str) -> Change:
    folder = s.folder / "series"
    folder.mkdir()
    for i in range(2):
        (folder / f"{i}.dcm").touch()
    reading(s, count, 'import glob\nimport os\n\nFOLDER = Path(__file__).with_name("series")')
    yield
    (folder / "2.dcm").touch()


family(
    MISS,
    "folder",
    {
        "glob": 'len(list(FOLDER.glob("*.dcm")))',
        "listdir": "len(os.listdir(FOLDER))",
        "scandir": "sum(1 for _ in os.scandir(FOLDER))",
        "walk": "sum(len(files) for _, _, files in os.walk(FOLDER.parent / FOLDER.name))",
        "pattern": 'len(glob.glob(f"{FOLDER}/*.dcm"))',
        "iterdir": "len([*FOLDER.iterdir()])",
    },
    listed,
)


def appears(s: Study, gone: str) -> Change:
    path = asset(s, "mask.npy")
    define = (
        f'{FILE}\n\n\ndef mask():\n    try:\n        return np.load(file("mask.npy")).sum()\n'
        f"    except {gone}:\n        return 0"
    )
    reading(s, "mask()", define)
    yield
    as_array(path, 3)


family(MISS, "appears", {"by_its_error": "FileNotFoundError", "by_any_error": "OSError"}, appears)


def one_chunk(s: Study, _: None) -> Change:
    """A store of many chunks, which count as their folder."""
    folder = s.folder / "store" / "c"
    folder.mkdir(parents=True)
    for i in range(300):
        (folder / str(i)).write_bytes(bytes([1] * 8))
        os.utime(folder / str(i), (TIME, TIME))
    reading(s, 'sum(sum((Path(__file__).with_name("store") / "c" / str(i)).read_bytes()) for i in range(300))')
    yield
    overwritten(folder / "123", bytes([9] * 8))


family(MISS, "chunks", {"of_many": None}, one_chunk)


# What one call loads and keeps

KEEPS = {
    "lru_cache": "import functools\n\n\n@functools.lru_cache\ndef atlas():\n    return np.load(file()).sum()",
    "cached_property": (
        "import functools\n\n\nclass Lazy(mt.Transform):\n    @functools.cached_property\n    def atlas(self):\n"
        "        return np.load(file()).sum()\n\n    def __call__(self, d):\n"
        '        return {**d, "read": float(self.atlas)}'
    ),
    "global": (
        "KEPT = {}\n\n\ndef atlas():\n    if not KEPT:\n        KEPT[0] = np.load(file()).sum()\n    return KEPT[0]"
    ),
    "late_import": "def atlas():\n    from late import ATLAS\n\n    return ATLAS",
}


def kept(s: Study, keep: str, read: str) -> Change:
    path = asset(s)
    as_array(path, 1)
    (s.folder / "late.py").write_text(f"import numpy as np\nATLAS = np.load({str(path)!r}).sum()\n")
    s.define(f"{FILE}\n\n\n{KEEPS[keep]}")
    if keep == "cached_property":
        s.add("Lazy()")
    else:
        s.add('mt.Lambda(lambda d: {**d, "read": float(atlas())})')
    s.index, s.read = 1, read  # item 0 reads it
    yield
    rewrite(as_array, path, 2)
    s.read = "dataset[index]"


family(
    MISS,
    "kept",
    {**{keep: (keep, ALL) for keep in KEEPS}, "lru_cache_in_workers": ("lru_cache", BY_WORKERS)},
    kept,
)


# Threads and programs


def by_thread(s: Study, load: str) -> Change:
    path = asset(s)
    as_array(path, 1)
    define = (
        "import asyncio\nimport threading\nfrom concurrent.futures import ThreadPoolExecutor\n\n"
        f"{FILE}\n\n\n"
        "def in_thread():\n    found = []\n"
        "    thread = threading.Thread(target=lambda: found.append(np.load(file())))\n"
        "    thread.start()\n    thread.join()\n    return found[0].sum()"
    )
    reading(s, load, define)
    yield
    rewrite(as_array, path, 2)


family(
    MISS,
    "thread",
    {
        "pool": "ThreadPoolExecutor(1).submit(np.load, file()).result().sum()",
        "own": "in_thread()",
        "loop": "asyncio.run(asyncio.to_thread(np.load, file())).sum()",
        "dask": '__import__("dask").compute(__import__("dask").delayed(np.load)(file()), scheduler="threads")[0].sum()',
    },
    by_thread,
)


def by_program(s: Study, command: str) -> Change:
    tool, config = s.folder / "bin" / "tool", s.folder / "tool.conf"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 1 $(cat $1) | wc -w\n")
    tool.chmod(0o755)
    config.write_text("0 1\n")
    os.utime(config, (TIME, TIME))
    s.environment = {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    reading(s, f"subprocess.check_output({command})", "import subprocess")
    yield
    if "tool.conf" in command:
        overwritten(config, b"0123")
    else:
        overwritten(tool, tool.read_bytes().replace(b"echo 1 $", b"echo   $"))


family(
    MISS,
    "program",
    {
        "on_path": '["tool", "/dev/null"]',
        "in_a_shell": '"tool /dev/null", shell=True',
        "named_file": '["tool", "tool.conf"]',
        "named_file_in_a_shell": '"tool tool.conf", shell=True',
    },
    by_program,
)


# What must hit


def unread(s: Study, done: Callable[[Path], Any]) -> Change:
    """A study that reads an atlas, where something else changes."""
    folder = s.folder / "assets"
    folder.mkdir()
    as_array(folder / "atlas.npy", 1)
    as_array(folder / "other.npy", 1)
    reading(s, 'np.load(Path(__file__).with_name("assets") / "atlas.npy").sum()')
    yield
    done(folder)


def _copied_back(folder: Path) -> None:
    shutil.copy(folder / "atlas.npy", folder / "copy.npy")
    (folder / "copy.npy").replace(folder / "atlas.npy")


family(
    HIT,
    "unread",
    {
        "file_beside": lambda folder: rewrite(as_array, folder / "other.npy", 2),
        "file_that_appears": lambda folder: (folder / "new.npy").touch(),
        "touched": lambda folder: (folder / "atlas.npy").touch(),
        "copied_back": _copied_back,
        "file_gone": lambda folder: (folder / "other.npy").unlink(),
    },
    unread,
)


def of_its_own(s: Study, define: str) -> Change:
    """A study that reads what it writes itself, in a folder where other files appear."""
    s.define(f"import logging\nimport os\nimport subprocess\nimport tempfile\nimport warnings\n\n\n{define}")
    s.add('mt.Lambda(lambda d: {**d, "read": float(made())})')
    yield
    (s.folder / "yet_another_file").touch()


family(
    HIT,
    "own",
    {
        "temporary_folder": (
            "def made():\n    with tempfile.TemporaryDirectory() as folder:\n"
            "        np.save(f'{folder}/x.npy', np.ones(3))\n"
            "        return np.load(f'{folder}/x.npy').sum() + len(os.listdir(folder))"
        ),
        "output_of_a_program": (
            "def made():\n    with tempfile.TemporaryDirectory() as folder:\n"
            "        subprocess.run(f'echo 7 > {folder}/out', shell=True, check=True)\n"
            "        return Path(folder, 'out').read_text()"
        ),
        "log": (
            "NAME = 'log'\n\n\ndef made():\n    with open(f'{NAME}.txt', 'a') as log:\n        log.write('x')\n"
            "    return Path(f'{NAME}.txt').read_text().count('x') > 0"
        ),
        "warning": "def made():\n    warnings.warn('careful')\n    return 1",
        "system": "def made():\n    return Path('/proc/self', 'status').read_text().count('Name')",
        "thread_of_another": (
            "import threading\n\n\nclass Logger:\n    def __init__(self):\n"
            "        self.asked, self.done = threading.Semaphore(0), threading.Semaphore(0)\n"
            "        threading.Thread(target=self.run, daemon=True).start()\n\n"
            "    def __cache_key__(self):\n        return 'logger'\n\n"
            "    def run(self):\n        while self.asked.acquire():\n            os.listdir(Path(__file__).parent)\n"
            "            self.done.release()\n\n\nLOGGER = Logger()\n\n\n"
            "def made():\n    LOGGER.asked.release()\n    return LOGGER.done.acquire(timeout=10)"
        ),
    },
    of_its_own,
)


def moved(s: Study, name: str) -> Change:
    """Files below the root that nothing names, moved with it."""
    s.settings = {"root": s.data}
    as_array(s.data / "atlas.npy", 1)
    reading(s, f"np.load(DATA / {name!r}).sum()")
    yield
    s.data = s.data.rename(s.folder / "moved")
    s.settings = {"root": s.data}


family(HIT, "moved", {"root": "atlas.npy"}, moved)


def either_version(s: Study, _: None) -> Change:
    """A cache that two versions of the data share serves both."""
    path = s.folder / "atlas.npy"
    as_array(path, 1)
    reading(s, 'np.load(Path(__file__).with_name("atlas.npy")).sum()')
    yield
    rewrite(as_array, path, 2)
    yield
    rewrite(as_array, path, 1)
    yield


family(HIT, "both", {"versions": None}, either_version)
