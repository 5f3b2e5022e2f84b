"""``python -m tools.bench shuffling``: each way has a figure, warm and cold, and a window shows what it costs."""

from __future__ import annotations

import json
from pathlib import Path

from monai_gds.bench.made_up import write_image_folder
from monai_gds.imagenet import pack_folder
from monai_gds.imagenet.files.listing import list_folder
from tests.tools.bench.commands import run
from tools.bench.shuffling import measure


def test_a_window_has_fewer_classes_in_a_batch(tmp_path: Path) -> None:
    images, told = write_image_folder(tmp_path / "images", 60, per_class=5), list[int]()
    pack_folder(list_folder(images), tmp_path / "packed", file_bytes="1MiB")
    reports = measure(images, tmp_path / "packed", 10, 2, told.append, window=1)
    assert told == list(range(1, 13))
    assert ["warm" in report.title for report in reports] == [True, False]
    for report in reports:
        assert [row.name for row in report.rows] == ["a folder of files", "packed", "packed, window=1"]
        assert all(len(row.samples) == 2 for row in report.rows)
        files, packed, window = (float(row.notes["classes in a batch"]) for row in report.rows)
        assert min(files, packed) > window + 2


def test_the_command(tmp_path: Path) -> None:
    found = json.loads(run("shuffling", "--make", 12, "--batchsize", 4, "--repeats", 1, "--json"))["reports"]
    assert all(row["samples"] for report in found for row in report["rows"])
