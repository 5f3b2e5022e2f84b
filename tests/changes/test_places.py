"""Changes of where the script, the data and the cache are; see ``rows.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.changes.rows import HIT, Change, Table
from tests.changes.test_sources import TIMES, with_folder
from tests.loopdisk import needs_root
from tests.machines import NOBODY
from tests.studies import Study, write_volume

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test

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
    s.hash_seed = "1"


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
