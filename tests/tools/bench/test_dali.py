"""``python -m tools.bench dali``: every row runs or says why not, and what makes no sense is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from monai_gds.bench import made_up
from monai_gds.bench.made_up import write_image_folder
from monai_gds.imagenet.files.listing import list_folder
from tests.tools.bench.commands import run
from tools.bench import dali
from tools.bench.__main__ import app
from tools.bench.squirrel_store import write_store

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")


def rows(output: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads(output)
    return {(report["title"], row["name"]): row for report in found["reports"] for row in report["rows"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dali", "--only", "speed"], "'speed' is not one of"),
        (["dali", "--store", ".", "--datadir", "d"], "leave --datadir and --make out"),
        (["dali", "--store", "no/such/store"], "does not exist"),
    ],
)
def test_wrong_usage_is_code_two(arguments: list[str], message: str) -> None:
    assert message in run(*arguments, code=2)


def test_dali_on_a_store_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    run("dali", "--store", tmp_path / "absent", "--device", "cpu", code=2)
    assert not (tmp_path / "absent").exists()


def test_dali_on_images_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made where it is told and kept, then used as they are."""
    pytest.importorskip("squirrel", reason="squirrel-core is not installed on this machine")
    where = tmp_path / "images"
    arguments = ("dali", "--datadir", str(where), "--only", "torch", "--batchsize", "4", "--repeats", "1",
                 "--device", "cpu", "--json")  # fmt: skip
    ran = [rows(run(*arguments, "--make", "5"))]
    assert len(list(where.glob("*/*.JPEG"))) == 5
    monkeypatch.setattr(made_up, "write_image_folder", lambda *_, **__: pytest.fail("made again"))
    ran.append(rows(run(*arguments)))
    assert all(len(found["DALI against torch, from the store", "DALI"]["samples"]) == 1 for found in ran)


def test_a_store_without_samples_is_an_error_and_no_rate_of_zero(tmp_path: Path) -> None:
    pytest.importorskip("squirrel", reason="squirrel-core is not installed on this machine")
    done = CliRunner().invoke(app, ["dali", "--store", str(tmp_path), "--only", "torch", "--device", "cpu"])
    assert done.exit_code == 1
    assert "holds no samples" in str(done.exception)


def test_dali_from_memory_and_from_a_squirrel_store() -> None:
    pytest.importorskip("squirrel", reason="squirrel-core is not installed on this machine")
    output = run("dali", "--make", "10", "--batchsize", "4", "--repeats", "2", "--device", "cpu", "--json")
    bounds = [[len(row["samples"]) for row in report["ceilings"]] for report in json.loads(output)["reports"]]
    assert bounds == [[], [2]] * 3  # the store on its own bounds what comes from it, and only that
    found = rows(output)
    for source in ("from memory", "from the store"):
        ran = {name for (title, name), row in found.items() if len(row["samples"]) == 2 and title.endswith(source)}
        assert ran >= {"NumPy samples, batched here", "NumPy batches from the source", "1 thread", "32 threads", "DALI"}
        assert "CUDA" in found[f"DALI against torch, {source}", "torch on the GPU"]["reason"]
        assert "CUDA" in found[f"batching, NumPy or CuPy, {source}", "CuPy batches from the source"]["reason"]


def test_what_is_held_in_memory_is_unpacked_once_and_no_more_than_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("squirrel", reason="squirrel-core is not installed on this machine")
    write_store(list_folder(write_image_folder(tmp_path / "images", 7)), tmp_path / "store", size=32)
    memory = dali.Memory(dali.DaliSettings(tmp_path / "store", torch.device("cpu"), batch_size=4, held=6))
    sizes = [len(batch["label"]) for batch in memory.batches()]
    assert (sizes, len(memory.samples())) == ([4, 2], 6)
    monkeypatch.setattr(dali, "_stored", lambda _: pytest.fail("the store is read again"))
    assert [len(batch["label"]) for batch in memory.batches()] == sizes
    assert [sample["image"].shape for sample in memory.samples()] == [(3, 32, 32)] * 6
