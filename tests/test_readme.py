"""README.md and the other pages: links lead somewhere, the example runs, figures are those of the saved runs."""

from __future__ import annotations

import ast
import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.storage import Reads, Storage
from monai_gds.synthetic import write_volumes
from tests.machines import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "tutorials").glob("*.md")]

#: The README's names of rows, and those of the benchmarks.
ROWS = {
    "`monai_gds.GDSDataset` through `GDSDataLoader`": "GDSDataset, GDSDataLoader",
    "`monai_gds.GDSDataset` through `ThreadDataLoader`": "GDSDataset",
    "`PersistentDataset`": "PersistentDataset",
    "`PersistentDataset`, then `.to(device)`": "PersistentDataset",
    "`PersistentDataset` with metadata": "PersistentDataset + meta",
    "`LMDBDataset`": "LMDBDataset",
    "`CacheDataset` (host memory)": "CacheDataset",
    "`monai.data.GDSDataset` as shipped": "monai GDSDataset",
    "`monai.data.GDSDataset`, KvikIO at 16 threads": "monai GDSDataset, 16 thr.",
    "pinned copy to the GPU": "pinned copy to the GPU",
    "page cache to pinned memory, 16 threads": "page cache to pinned memory, 16 threads",
    "`dali`: `fn.readers.file`": "dali",
    "`python-file`: `open` and `read`, called by DALI": "python-file",
    "`posix`": "posix",
    "`packed`": "packed",
    "`python`, `open` and `read` or `write`": "python",
    "`direct`: threads with O_DIRECT, what the disk gives": "direct",
    "`posix`, from and to the page cache": "posix",
    "`kvikio`, from the page cache and past it": "kvikio",
    "`deepnvme`, past the page cache": "deepnvme",
}

#: Tables, by how their headings begin; of each pair of columns (figure, ratio) the file, and the report in it.
TABLES = {
    "| | whole volumes, GB/s": [("cpu/epochs", 0), ("cpu/epochs", 1)],
    "| | batch 1, GB/s": [("h100/volumes", 0), ("h100/volumes-batch-4", 0)],
    "| | plain tensors, records/s": [("h100/small", 0), ("h100/small", 1)],
    "| | encoded bytes to the GPU": [("h100/loaders", 0), ("h100/loaders", 1)],
    "| | load, GB/s | ratio | store, GB/s": [("cpu/tensor-load", 0), ("cpu/tensor-store", 0)],
    "| | load to CPU, GB/s": [
        ("h100/tensor-load", 0),
        ("h100/tensor-load", 1),
        ("h100/tensor-store", 0),
        ("h100/tensor-store", 1),
    ],
}


#: What the reader has: a page's examples define everything else.
READERS_OWN = {"items", "transform"}


def undefined(code: str) -> set[str]:
    """Names that this code uses and neither imports nor sets."""
    nodes = list(ast.walk(ast.parse(code)))
    known = {
        alias.asname or alias.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names
    }
    known |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    known |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names = [n for n in nodes if isinstance(n, ast.Name)]
    known |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return {n.id for n in names} - known - set(dir(builtins))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_import_what_they_use(page: Path) -> None:
    code = "".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    assert undefined(code) - READERS_OWN == set()


def rows_of(table: str) -> list[list[str]]:
    lines = README[README.index(f"\n{table}") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def report(file: str, number: int) -> dict[str, dict[str, Any]]:
    found = json.loads((ROOT / "benchmarks" / f"{file}.json").read_text())["reports"][number]
    return {row["name"]: row for row in (*found["rows"], *found["ceilings"])}


@pytest.mark.parametrize("table", TABLES)
def test_figures_are_those_of_the_runs_that_were_saved(table: str) -> None:
    for name, *cells in rows_of(table):
        for (file, number), median, ratio in zip(TABLES[table], cells[::2], cells[1::2], strict=True):
            if not median:  # it cannot do that
                continue
            saved = report(file, number)
            if name.startswith("`PersistentDataset` (for MetaTensors"):
                row = saved.get("PersistentDataset + meta") or saved["PersistentDataset"]
            else:
                row = saved[ROWS[name]]
            for figure, is_so in ((median, row["median"]), (ratio, row["ratio"])):
                if figure:
                    digits = len(figure.partition(".")[2])
                    assert abs(float(figure.replace(",", "")) - is_so) <= 0.501 * 10**-digits, (name, figure, is_so)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_example_runs_and_is_short_enough_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    for number, item in enumerate(write_volumes(tmp_path / "made", 2, (40, 40, 32)), 1):
        Path(item["image"]).rename(tmp_path / f"ct_{number}.nii.gz")
        Path(item["label"]).rename(tmp_path / f"seg_{number}.nii.gz")
    monkeypatch.chdir(tmp_path)
    exec(code.replace("/nvme/cache", str(tmp_path / "cache")), {"__name__": "example"})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(line.startswith("torch.Size([1, 1, ") for line in printed)


def test_the_backend_of_ones_own_reads(tmp_path: Path) -> None:
    _, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{code}", names)
    (tmp_path / "file.bin").write_bytes(bytes(range(100)))
    storage = Storage(names["MyDriveBackend"](torch.device("cpu")))
    (tensor,) = storage.load(Reads.of(str(tmp_path / "file.bin"), [(10, 5)])).wait()
    assert tensor.tolist() == [10, 11, 12, 13, 14]
