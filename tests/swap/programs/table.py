"""Programs as MONAI's users write them: how they are listed and run, and the table of them in the documentation.

A program is a function of a :class:`Study` that yields what its user looks at: batches, losses, predictions. It names
MONAI's classes as ``md.NAME``, so that it finds what stands in for them under ``patch()``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import reset_ops_id
from monai.utils import set_determinism

import monai_gds
from monai_gds.folder.writer import process_writer
from tests.machines import ROOT

__all__ = ["PROGRAMS", "Program", "Study", "plain", "program", "records", "run", "table", "write"]

PAGE = ROOT / "docs/howto/moving.md"

#: The measured times, in seconds by program, and where they were measured.
TIMES = Path(__file__).with_name("times.json")

#: What stands between these two in the page is the table.
BETWEEN = r"(?<=<!-- programs -->\n).*?(?=<!-- end of programs -->)"


class Study:
    """The data of a program, and a folder that it may write to.

    Attributes:
        items: four volumes of CT-like int16 with labels 0 to 4, as paths by ``image`` and ``label``.
        data: the folder of the volumes.
        scratch: a folder for what the program writes. The cold and the warm run share it.
        scale: how many times longer than 20 to 25 voxels the edges of the volumes are.
    """

    def __init__(self, data: Path, scratch: Path, scale: int = 1) -> None:
        self.data, self.scratch = data, scratch
        scratch.mkdir(exist_ok=True)
        self.items = [{key: str(data / f"{key}{i}.nii.gz") for key in ("image", "label")} for i in range(4)]
        if not data.exists():
            data.mkdir()
            self._write(scale)

    def _write(self, scale: int) -> None:
        rng, affine = np.random.default_rng(0), np.diag([-1.5, 1.5, 2.0, 1.0])
        for i, item in enumerate(self.items):
            shape = np.array([24, 22 + i, 20])
            values = rng.integers(-1000, 1000, shape * scale, dtype=np.int16)
            nib.save(nib.Nifti1Image(values, affine), item["image"])
            label = np.zeros(shape, np.uint8)
            label[5:18, 4 + i : 20, 4:16] = rng.integers(1, 5, (13, 16 - i, 12))
            label = np.kron(label, np.ones([scale] * 3, np.uint8))
            nib.save(nib.Nifti1Image(label, affine), item["label"])


@dataclass(frozen=True)
class Program:
    """A program and what is known of it.

    Attributes:
        run: the program.
        uses: the names of MONAI's datasets and loaders in it.
        cached: whether records are made under ``patch()``.
        other: how it differs under ``patch()`` beside its values, which are equal; empty if it does not.
        differs: why its values differ; empty if they do not.
        needs: the packages that it imports and that may be missing.
        long: whether it takes more than a few seconds.
    """

    run: Callable[[Study], Iterator[Any]]
    uses: tuple[str, ...]
    cached: bool = True
    other: str = ""
    differs: str = ""
    needs: tuple[str, ...] = ()
    long: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def what(self) -> str:
        """The program in a line."""
        return (self.run.__doc__ or "").partition("\n")[0].removesuffix(".")

    @property
    def found(self) -> str:
        """How its results are under ``patch()``, as the table has it."""
        if self.differs:
            return f"differs: {self.differs}"
        found = f"values equal: {self.other}" if self.other else "equal"
        return found if self.cached else f"{found}; nothing is cached"


#: Every program, by name, in the order of the table.
PROGRAMS: dict[str, Program] = {}


def program(*uses: str, **known: Any) -> Callable[[Callable[[Study], Iterator[Any]]], Callable[[Study], Iterator[Any]]]:
    """Lists a program, with the names of MONAI's datasets and loaders in it."""

    def listed(run: Callable[[Study], Iterator[Any]]) -> Callable[[Study], Iterator[Any]]:
        PROGRAMS[run.__name__] = Program(run, uses, **known)
        return run

    return listed


def run(program: Program, study: Study, cache: Path | None = None) -> list[Any]:
    """What a program yields, under ``patch()`` if there is a cache folder; without the identities of transforms."""
    set_determinism(0)
    try:
        with monai_gds.patch(cache) if cache else nullcontext():
            found = [deepcopy(one) for one in program.run(study)]
    finally:
        set_determinism(None)
    reset_ops_id(found)
    return found


def records(*folders: Path) -> int:
    """How many records are below these folders, when what this process computed is written."""
    process_writer().flush()
    return sum(1 for folder in folders for _ in folder.rglob("*.safetensors"))


def plain(value: Any) -> Any:
    """A tree with tensors in the place of MetaTensors."""
    if isinstance(value, MetaTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(one) for one in value)
    return value


def table() -> str:
    """The programs as a table in Markdown, and where their times come from."""
    measured = json.loads(TIMES.read_text())
    head = ["program", "MONAI's classes", "cold and warm", "time, cold", "time, warm"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for one in PROGRAMS.values():
        times = measured["seconds"].get(one.name)
        ratios = ["—", "—"] if times is None else [f"{times[how] / times['monai']:.1f}" for how in ("cold", "warm")]
        cells = [one.what, ", ".join(f"`{name}`" for name in one.uses), one.found, *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    about = measured["about"]
    lines += [
        "",
        f"Times: four volumes of {about['voxels']} voxels or a little more, the shortest of {about['rounds']} rounds,",
        f"{about['cores']} cores with a load of {about['load']}, {about['date']}.",
    ]
    return "\n".join([*lines, ""])


def write(page: Path = PAGE) -> None:
    """Writes the table into the page."""
    text = table()
    page.write_text(re.sub(BETWEEN, lambda _: text, page.read_text(), flags=re.DOTALL))
