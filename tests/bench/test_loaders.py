"""bench loaders: every row runs or says why not, and what makes no sense is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from monai_gds.bench import loaders
from monai_gds.bench.made_up import write_image_folder
from monai_gds.command.main import app
from monai_gds.errors import ImageListError
from monai_gds.imagenet import pack_folder
from monai_gds.imagenet.files.listing import list_folder
from monai_gds.storage.blockmap.block_map import BlockMap
from tests.imagenet.conftest import folder  # noqa: F401
from tests.loopdisk import loop_disk
from tests.loopdisk import run as on_machine
from tests.storage.xnvme import libraries

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output


def rows(output: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads(output)
    return {(report["title"], row["name"]): row for report in found["reports"] for row in report["rows"]}


@pytest.mark.parametrize(
    "readers",
    [
        ["dali", "python-file", "torchvision", "posix", "packed", "kvikio"],
        pytest.param([], id="all", marks=pytest.mark.long),  # with DeepNVMe's, which is compiled
    ],
    ids="-".join,
)
def test_loaders_side_by_side(folder: Path, tmp_path: Path, readers: list[str]) -> None:  # noqa: F811
    output = run(
        "loaders", "--datadir", str(folder), "--device", "cpu", "--batchsize", "4", "--batches", "7", "--repeats", "2",
        "--threads", "1", "--threads", "2", "--json", "--crop", "12", "--hw-decoder-load", "0.5",
        *(word for reader in readers for word in ("--reader", reader)),
    )  # fmt: skip
    found = rows(output)
    crops = "random crops of 12 pixels, mirrored and normalised, to cpu"
    ceilings = {report["title"]: report["ceilings"] for report in json.loads(output)["reports"]}
    for title in ("encoded bytes to cpu", "decoded to cpu", crops):
        alone = ["the decoder alone"] if title[0] != "e" else []
        assert [row["name"] for row in ceilings[title]] == alone and all(row["median"] for row in ceilings[title])
        for name in ("dali", "python-file", "posix", "packed"):
            assert len(found[title, name]["samples"]) == 2
            assert min(found[title, name]["samples"]) > 0
            assert min(found[title, name]["figures"]["CPU µs per image"]["samples"]) > 0
            assert found[title, name]["notes"]["threads"] in ("1", "2")
        told = found[title, "torchvision"]
        assert "no row of encoded bytes" in told["reason"] if title[0] == "e" else told["samples"] or told["reason"]
        assert "kvikio" in found[title, "kvikio"]["reason"]


def test_loaders_make_their_images() -> None:
    output = run("loaders", "--make", "12", "--batchsize", "4", "--repeats", "1", "--reader", "posix", "--no-decode",
                 "--device", "cpu", "--json")  # fmt: skip
    assert list(rows(output)) == [("encoded bytes to cpu", "posix")]
    about = json.loads(output)["about"]
    assert 90 < about["kB per image"] < 130
    assert about["page cache"] == "warm"


def test_a_small_folder_is_timed_over_64_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    timed: list[int] = []
    monkeypatch.setattr(loaders, "_rate", lambda *given: loaders._Rate(timed.append(given[3]) or 1, 1))
    run("loaders", "--datadir", str(folder), "--batchsize", "4", "--reader", "posix", "--no-decode", "--device", "cpu")
    assert set(timed) == {64}


@pytest.mark.parametrize("complete", [0, 1])
def test_ctrl_c_shows_the_tables_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: int) -> None:
    images, compare = write_image_folder(tmp_path / "images", 12), loaders.compare
    measured: list[str] = []

    def interrupted(*given: Any) -> Any:
        if len(measured) == complete:
            raise KeyboardInterrupt
        measured.append("one")
        return compare(*given)

    monkeypatch.setattr(loaders, "compare", interrupted)
    output = run(
        "loaders", "--datadir", str(images), "--batchsize", "4", "--batches", "2", "--repeats", "1", "--threads", "1",
        "--reader", "posix", "--device", "cpu", "--json", code=0 if complete else 130,
    )  # fmt: skip
    assert not complete or list(rows(output)) == [("encoded bytes to cpu", "posix")]


def test_loaders_over_a_drive_in_user_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of libxnvme plays the driver; the map is all that is left of the folder."""
    made = tmp_path / "map.json"
    with loop_disk(tmp_path, "ext4") as disk, libraries.using("double next"):
        write_image_folder(disk.folder / "train", 12)
        BlockMap.build(disk.folder / "train", checksums=True).save(made)
        plain = tmp_path / "elsewhere/plain.json"
        plain.parent.mkdir()
        BlockMap.build(disk.folder / "train").plain().save(plain)
        monkeypatch.setenv("XNVME_DOUBLE_DRIVE", disk.device)
        on_machine("umount", str(disk.folder))
        try:
            output = run(
                "loaders", "--be", "upcie", "--uri", "0000:01:00.0", "--nsid", "2", "--bmap", str(made),
                "--heap-bytes", "128MiB", "--mem", "cpu", "--device", "cpu", "--batchsize", "4", "--repeats", "1",
                "--threads", "1", "--json",
            )  # fmt: skip
            assert libraries.Double("double next").count("heap_mib") == 128
        finally:
            on_machine("mount", disk.device, str(disk.folder))
        output_of_folder = run(
            "loaders", "--datadir", str(disk.folder / "train"), "--bmap", str(plain), "--reader",
            "xnvme-block", "--device", "cpu", "--batchsize", "4", "--repeats", "1", "--threads", "1", "--json",
        )  # fmt: skip
    assert any(row["samples"] for row in rows(output_of_folder).values())
    found = rows(output)
    assert {name for (_, name), row in found.items() if row["samples"]} == {"xnvme-block"}
    assert {title for (title, _), row in found.items() if row["samples"]} == {"encoded bytes to cpu", "decoded to cpu"}
    assert json.loads(output)["about"]["page cache"] == "not used"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loaders"], "--make N"),
        (["loaders", "--bmap", ".", "--reader", "xnvme-block", "--reader", "dali"], "needed by dali"),
        (["loaders", "--make", "4", "--reader", "xnvme", "--uri", "/dev/nvme0n1"], "are for the block readers"),
        (["loaders", "--make", "4", "--reader", "nvme"], "'nvme' is not one of dali"),
        (["loaders", "--make", "4", "--batchsize", "0"], "batchsize"),
        (["loaders", "--make", "4", "--heap-bytes", "some"], "'18GiB'"),
        (["loaders", "--make", "4", "--reader", "posix", "--mem", "gpu"], "are for the block readers"),
    ],
)
def test_wrong_usage_is_code_two(arguments: list[str], message: str) -> None:
    assert message in " ".join(run(*arguments, code=2).replace("│", " ").split())


def test_other_images_packed_are_refused(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "other" / "n0").mkdir(parents=True)
    (tmp_path / "other" / "n0" / "a.jpg").write_bytes(next(folder.glob("*/*")).read_bytes())
    pack_folder(list_folder(tmp_path / "other"), tmp_path / "packed")
    command = ["bench", "loaders", "--datadir", str(folder), "--packed", str(tmp_path / "packed"), "--reader", "packed"]
    with pytest.raises(ImageListError, match="does not hold the images of"):
        CliRunner().invoke(app, [*command, "--batchsize", "4", "--device", "cpu"], catch_exceptions=False)
