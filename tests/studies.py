"""A study as its user has it: a script, data, a cache folder, and a way to start it; and what a run of it gives.

``tests/changes/`` changes one thing of a study between two runs.
"""

from __future__ import annotations

import os
import sys
import traceback
import types
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import monai.transforms as mt
import numpy as np
import torch
from monai.data import CacheDataset, NibabelReader

from monai_gds import GDSDataset
from tests.same import assert_same

__all__ = ["Log", "Outcome", "Study", "run", "run_among_others", "run_on", "version_beside", "write_volume"]

#: What every script begins as. Rows replace parts of it.
SCRIPT = '''"""How this study loads its volumes."""

from pathlib import Path

import monai.transforms as mt
import numpy as np
import torch

from tests.studies import Log

DATA = Path("DATA")


def items():
    return [{"image": str(DATA / f"ct_{i}.nii"), "age": 40 + i} for i in range(2)]


def transform():
    return mt.Compose(
        [
            Log(),
            mt.LoadImaged("image", reader="NibabelReader", ensure_channel_first=True),
            mt.ScaleIntensityd("image", minv=0.0, maxv=1.5),
        ]
    )
'''

#: The time of every file of the data, so that a change of one may keep it.
TIME = 1_600_000_000


class Log(mt.Transform):  # type: ignore[misc]  # MONAI has no type hints to speak of
    """Counts how often the transforms run, of all processes together: a line each in a file that no key knows."""

    def __call__(self, data: Any) -> Any:
        with open(os.environ["STUDY_LOG"], "a") as log:
            log.write("computed\n")
        return data


class LogReader(NibabelReader):  # type: ignore[misc]
    """Counts as :class:`Log` does, in a pipeline that has MONAI's own dictionary transforms only."""

    def read(self, *arguments: Any, **more: Any) -> Any:
        Log()(None)
        return super().read(*arguments, **more)


@dataclass
class Study:
    """Everything that a run of the study depends on; sent to the process that runs it.

    Attributes:
        folder: where its script, data and cache are.
        data: where the script finds its volumes.
        cache: the cache folder.
        settings: further arguments of ``GDSDataset``.
        code: run in the process before the script, as a user's own main program would; in a process that has its
            dataset already, with ``dataset`` in reach.
        read: an expression that gives the item of ``dataset``.
        cwd: the working directory; None for the folder.
        hash_seed: PYTHONHASHSEED.
        user: the user id that it runs as; None for the tests' own.
        environment: variables that the run finds.
        keep_order: whether the order of an item's keys is compared too.
        keep_ids: whether the identities of transforms in applied operations are compared too.
        index: the item that the run reads.
        keeps: whether the item is compared with that of a CacheDataset, which the first run made and later ones keep.
    """

    folder: Path
    data: Path = field(init=False)
    cache: Path = field(init=False)
    script: str = field(init=False)
    settings: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    read: str = "dataset[index]"
    cwd: Path | None = None
    hash_seed: str = "0"
    user: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    keep_order: bool = True
    keep_ids: bool = True
    index: int = 0
    keeps: bool = False

    def __post_init__(self) -> None:
        self.data = self.folder / "data"
        self.cache = self.folder / "cache"
        self.script = SCRIPT
        self.data.mkdir()
        for i in range(2):
            write_volume(self.data / f"ct_{i}.nii", seed=i)

    # What rows do to it

    def edit(self, old: str, new: str) -> None:
        """Replaces a part of the script, which must be there."""
        assert self.script.count(old) == 1, f"{old!r} is {self.script.count(old)} times in\n{self.script}"
        self.script = self.script.replace(old, new)

    def define(self, code: str) -> None:
        """Adds definitions to the script, above its functions."""
        self.edit("\n\ndef items():", f"\n\n{code.strip()}\n\n\ndef items():")

    def add(self, transform: str) -> None:
        """Adds a transform at the end of the pipeline."""
        self.edit("        ]\n    )\n", f"            {transform},\n        ]\n    )\n")

    def item(self, entry: str) -> None:
        """Adds an entry to every item."""
        self.edit('"age": 40 + i', f'"age": 40 + i, {entry}')

    @property
    def changes_its_process(self) -> bool:
        """Whether a run leaves a process that others cannot run in."""
        return bool(self.code or self.environment or self.cwd) or self.user is not None or self.hash_seed != "0"

    def records(self) -> list[Path]:
        """The records in the cache folder."""
        return sorted(self.cache.glob("*.safetensors"))


def write_volume(path: Path, seed: int = 0, size: int = 6, mtime: int = TIME) -> None:
    """Writes a NIfTI file of ``size``³ int16; files of one size have one length and time, whatever is in them."""
    import nibabel as nib

    values = np.random.default_rng(seed).integers(-1000, 1000, (size,) * 3, dtype=np.int16)
    nib.save(nib.Nifti1Image(values, np.diag([1.5, 1.5, 2.0, 1.0])), path)
    os.utime(path, (mtime, mtime))


def version_beside(path: str) -> str:
    """A user's own identity of a source: the version of the folder that it is in."""
    return Path(path).with_name("VERSION").read_text()


class Outcome(NamedTuple):
    """What a run gave.

    Attributes:
        computed: how many items were computed for it.
        wrong: how the item differs from the one that is computed without a cache in that process; empty if not at all.
        item: the latter.
    """

    computed: int
    wrong: str
    item: Any


#: The dataset of this process, for studies that go on in one.
_living: dict[str, Any] = {}


def run(study: Study) -> Outcome:
    """Runs a study in this process, which is fresh: changes its state for good."""
    _enter(study)
    exec(study.code, {})
    script = _load(study)
    if study.keeps:
        _living["kept"] = CacheDataset(script.items(), script.transform(), progress=False)
    dataset = GDSDataset(script.items(), script.transform(), study.cache, **{"device": "cpu", **study.settings})
    _living.update(dataset=dataset, script=script)
    return _read(study)


def run_among_others(study: Study) -> Outcome:
    """Runs a study in a process where others run before and after it."""
    try:
        return run(study)
    finally:
        _living.clear()
        sys.path.remove(str(study.folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(study.folder)):
                del sys.modules[name]


def run_on(study: Study) -> Outcome:
    """Goes on in the process of an earlier :func:`run`, with its dataset."""
    exec(study.code, {"dataset": _living["dataset"]})
    return _read(study)


def _enter(study: Study) -> None:
    sys.dont_write_bytecode = True  # a module that is edited within a second would be taken for its byte code
    sys.path.insert(0, str(study.folder))
    log = study.folder / "computed.log"
    log.touch()
    log.chmod(0o666)
    os.environ.update(study.environment, STUDY_LOG=str(log))
    os.chdir(study.cwd or study.folder)
    if study.user is not None:
        os.setgroups([])
        os.setgid(study.user)
        os.setuid(study.user)


def _load(study: Study) -> types.ModuleType:
    """The script as a module; without importlib, which takes an edited file of the same size for its byte code."""
    path = study.folder / "study.py"
    text = study.script.replace('Path("DATA")', f"Path({str(study.data)!r})")
    if study.user is None:
        path.write_text(text)
    module = types.ModuleType("study")
    module.__file__ = str(path)
    sys.modules["study"] = module
    exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    return module


def _read(study: Study) -> Outcome:
    dataset, log = _living["dataset"], Path(os.environ["STUDY_LOG"])
    before = len(log.read_text().splitlines())
    got = eval(study.read, {"dataset": dataset, "index": study.index, "torch": torch})
    dataset.flush()
    computed = len(log.read_text().splitlines()) - before
    expected = _uncached(study, dataset)
    return Outcome(computed, _difference(study, expected, got), expected)


def _uncached(study: Study, dataset: GDSDataset) -> Any:
    """What MONAI alone makes of the item, in this process as it is now, by new transforms."""
    if study.keeps:
        return _living["kept"][study.index]
    whole = _living["script"].transform()
    settings = {name: study.settings[name] for name in {"track_meta", "reset_ops_id"} & study.settings.keys()}
    given = study.settings.get("options", {})
    options = {name: given[name] for name in {"arrays", "mantissa_bits"} & given.keys()}
    if settings or options:  # of which MONAI's Compose knows nothing
        return GDSDataset(deepcopy(dataset.data), whole, None, device="cpu", options=options, **settings)[study.index]
    out = whole(deepcopy(dataset.data[study.index]))
    mt.utils.reset_ops_id(out)
    return out


def _difference(study: Study, expected: Any, got: Any) -> str:
    expected, got = deepcopy(expected), deepcopy(got)
    if not study.keep_ids:
        mt.utils.reset_ops_id(expected)
        mt.utils.reset_ops_id(got)
    if not study.keep_order:
        expected, got = (dict(sorted(item.items())) for item in (expected, got))
    try:
        assert_same(expected, got)
    except AssertionError as e:
        return str(e) or traceback.format_exc()
    return ""
