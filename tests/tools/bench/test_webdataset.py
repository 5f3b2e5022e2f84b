"""tools.bench loaders: a tar file of the images is one of the peers, and holds what the folder does."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from monai_gds.imagenet.files.listing import list_folder
from tests.imagenet.conftest import folder  # noqa: F401
from tests.tools.bench.commands import rows, run
from tools.bench.webdataset import NAME, write_shard


def test_the_shard_holds_the_folder(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    images, shard = list_folder(folder), tmp_path / "images.tar"
    write_shard(images, shard)
    with tarfile.open(shard) as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    expected = {f"{i:08}.jpg": Path(images.path(i)).read_bytes() for i in range(len(images))}
    expected |= {f"{i:08}.cls": str(int(label)).encode() for i, label in enumerate(images.labels)}
    assert held == expected


def test_it_has_a_row_beside_the_others(folder: Path) -> None:  # noqa: F811
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")
    output = run(
        "loaders", "--datadir", folder, "--device", "cpu", "--batchsize", 4, "--batches", 7, "--repeats", 2,
        "--threads", 1, "--reader", "dali", "--reader", NAME, "--json",
    )  # fmt: skip
    for report in json.loads(output)["reports"]:
        assert min(rows(report)[NAME]["samples"]) > 0 and rows(report)[NAME]["ratio"]
