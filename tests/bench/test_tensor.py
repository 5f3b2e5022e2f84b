"""``monai-gds bench tensor``: every method that works here, the reasons of the others, and wrong usage."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds.bench import tensor
from monai_gds.bench.pagecache import cached
from monai_gds.bench.tensor import Tensors, load, store
from monai_gds.errors import FileChanged, StorageError
from monai_gds.storage import Storage, available_backends
from monai_gds.storage.plain.posix import PosixBackend
from monai_gds.testing.disks import small_disk
from monai_gds.testing.tools import content
from tests import commands
from tests.commands import Done
from tests.fresh import warm
from tests.polls import until

CPU = torch.device("cpu")

DEEPNVME = pytest.param("deepnvme", marks=pytest.mark.long)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "input.bin"
    path.write_bytes(content((9 << 20) + 5))
    return path


def run(*arguments: object) -> Done:
    return commands.run("bench", "tensor", *arguments)


def rows(result: Done) -> dict[str, dict[str, Any]]:
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["reports"]
    return {row["name"]: row for row in report["rows"]}


@pytest.mark.long  # for DeepNVMe
@pytest.mark.parametrize("what", ["load", "store"])
def test_every_method_that_works_here_and_the_reason_of_each_that_does_not(
    file: Path, tmp_path: Path, what: str
) -> None:
    where = ["--input-file", file] if what == "load" else ["--nvme-folder", tmp_path, "--mb-size", 5]
    got = rows(run(what, *where, "--loop", 2, "--validate", "--json", "--device", "cpu"))
    found = available_backends("cpu")
    assert set(got) == {"python", *found} | ({"direct"} if what == "load" else set())
    for name, row in got.items():
        if name in found and not found[name]:
            assert found[name].reason in row["reason"]
            assert row["samples"] == []
        else:
            assert len(row["samples"]) == 2, row
            assert row["median"] > 0
    assert got["python"]["ratio"] == 1
    assert os.listdir(tmp_path) == ["input.bin"]


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["load", "store"])
def test_gpu_tensors(file: Path, tmp_path: Path, what: str) -> None:
    where = ["--input-file", file] if what == "load" else ["--nvme-folder", tmp_path, "--mb-size", 5]
    got = rows(run(what, *where, "--loop", 1, "--validate", "--json", "--device", "cuda"))
    assert got["python"]["samples"]
    assert got["posix"]["samples"]


def test_a_table_for_people(file: Path) -> None:
    result = run("load", "--input-file", file, "--device", "cpu", "--method", "python", "--method", "kvikio")
    assert result.exit_code == 0
    assert "load, CPU tensor, 9 MiB" in result.output
    assert "python" in result.output
    assert "libcuda.so.1" in result.output or "GPU" in result.output or "CUDA" in result.output
    assert "direct" not in result.output.split("date:")[0]


def test_only_the_methods_asked_for(file: Path) -> None:
    got = rows(run("load", "--input-file", file, "--device", "cpu", "--json", "--method", "posix", "--loop", 1))
    assert list(got) == ["posix"]
    assert got["posix"]["ratio"] is None


def test_says_whether_the_page_cache_was_warm(file: Path, tmp_path: Path) -> None:
    assert cached(file) == 1
    got = rows(run("load", "--input-file", file, "--device", "cpu", "--json", "--method", "python"))
    assert got["python"]["notes"] == {"page cache before": "warm"}
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if cached(file) > 0:
        pytest.skip("this file system keeps its pages")
    cold = load(file, CPU, Tensors(["direct"], loop=1)).rows[0].notes
    assert cold["page cache before"] != "warm"


def test_validate_finds_a_method_that_reads_something_else(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(path: Path, nbytes: int, storage: Storage) -> Any:
        return lambda: torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(tensor, "load_storage", wrong)
    load(file, CPU, Tensors(["direct"]))
    with pytest.raises(tensor.WrongBytes, match="direct got other bytes"):
        load(file, CPU, Tensors(["direct"], validate=True))


def test_validate_finds_a_method_that_writes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PosixBackend, "write", lambda self, path, buffers, **_: Path(path).write_bytes(bytes(100)))
    with pytest.raises(tensor.WrongBytes, match="posix got other bytes"):
        store(tmp_path, 100, CPU, Tensors(["posix"], validate=True))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_method_that_refuses_this_file_keeps_its_row_and_says_why(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(self: object, *_: object, **__: object) -> None:
        raise StorageError(1, "the device may not be read", "/dev/some")

    monkeypatch.setattr(PosixBackend, "start", refuse)
    monkeypatch.setattr(PosixBackend, "write", refuse)
    asked = Tensors(["python", "posix"], validate=True)
    python, posix = (load(file, CPU, asked) if what == "load" else store(tmp_path, 100, CPU, asked)).rows
    assert python.median
    assert posix.samples == ()
    assert "the device may not be read" in posix.reason
    assert os.listdir(tmp_path) == ["input.bin"]


def test_a_file_that_changes_meanwhile_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def growing(path: Path, nbytes: int, storage: Storage) -> Any:
        def operation() -> torch.Tensor:
            with open(path, "ab") as f:
                f.write(b"more")
            return torch.zeros(nbytes, dtype=torch.uint8)

        return operation

    monkeypatch.setattr(tensor, "load_storage", growing)
    with pytest.raises(FileChanged, match=r"input\.bin"):
        load(file, CPU, Tensors(["direct"]))
    result = run("load", "--input-file", file, "--device", "cpu", "--method", "direct")
    assert result.exit_code == 1
    assert "changed" in result.output


@pytest.mark.parametrize("size", [0, 1000, 10 << 20])
@pytest.mark.parametrize("method", ["python", "direct", "posix", DEEPNVME])
def test_a_file_that_another_process_changes_is_an_error_whichever_method_meets_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, method: str, size: int
) -> None:
    found = available_backends("cpu").get(method, True)
    if not found:
        pytest.skip(f"{method} does not work here: {found}")

    def change(path: Path) -> float:
        os.truncate(path, size)
        return 1.0

    monkeypatch.setattr(tensor, "cached", change)  # between the look at the file and the read
    with pytest.raises(FileChanged, match=r"input\.bin was replaced or changed"):
        load(file, CPU, Tensors([method]))


@pytest.mark.parametrize("method", ["python", "posix", DEEPNVME])
def test_no_partial_file_is_left_when_a_store_is_ended(tmp_path: Path, method: str) -> None:
    found = available_backends("cpu").get(method, True)
    if not found:
        pytest.skip(f"{method} does not work here: {found}")
    arguments = ["store", "--nvme-folder", tmp_path, "--mb-size", "200", "--device", "cpu", "--method", method]
    running = warm().program("-m", "monai_gds", "bench", "tensor", *arguments, "--loop", "1000")
    until(lambda: any(path.stat().st_size for path in tmp_path.glob("*/tensor.bin")))
    running.send_signal(signal.SIGINT)
    done = running.result()
    assert done.returncode == 130, done
    assert os.listdir(tmp_path) == []


def test_what_is_not_on_the_drive_yet_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or time.sleep(0.25))
    row = store(tmp_path, 12_500_000, CPU, Tensors(["python"], loop=3)).rows[0]
    durable = float(row.notes["with fsync, GB/s"])
    assert (len(row.samples), len(synced)) == (3, 4)
    assert durable <= 0.05 and min(row.samples) > durable, "the samples do not wait for the drive"


def test_no_partial_file_is_left_when_a_store_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, path: str, buffers: object, **_: object) -> None:
        Path(path).write_bytes(b"partial")
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(PosixBackend, "write", full)
    result = run("store", "--nvme-folder", tmp_path, "--mb-size", 1, "--device", "cpu", "--method", "posix")
    assert result.exit_code == 1
    assert "No space left" in result.output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("method", ["python", "posix", DEEPNVME])
def test_a_full_folder_is_an_error_that_names_the_file(tmp_path: Path, method: str) -> None:
    found = available_backends("cpu").get(method, True)
    if not found:
        pytest.skip(f"{method} does not work here: {found}")
    with small_disk(tmp_path) as disk:
        before = sorted(os.listdir(disk))
        result = run("store", "--nvme-folder", disk, "--mb-size", 64, "--device", "cpu", "--method", method)
        assert result.exit_code == 1
        assert "No space left" in result.output
        assert "tensor.bin" in result.output
        assert sorted(os.listdir(disk)) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "--input-file", "missing.bin"], "missing.bin"),
        (["load", "--input-file", "EMPTY"], "is empty"),
        (["load", "--input-file", "/dev/null"], "not a regular file"),
        (["load"], "--input-file"),
        (["store"], "--nvme-folder"),
        (["store", "--nvme-folder", "missing"], "missing"),
        (["store", "--nvme-folder", ".", "--mb-size", "0"], "mb-size"),
        (["store", "--nvme-folder", ".", "--loop", "0"], "loop"),
        (["store", "--nvme-folder", ".", "--method", "pythn"], "pythn"),
        (["store", "--nvme-folder", ".", "--method", "direct"], "direct"),
        (["store", "--nvme-folder", ".", "--mb-size", "1", "--block-size", "1000"], "block_size"),
        (["store", "--nvme-folder", ".", "--mb-size", "1", "--queue-depth", "0"], "queue_depth"),
        (["store", "--nvme-folder", ".", "--mb-size", "1", "--tuned", "EMPTY"], "ds_nvme_tune"),
        (["store", "--nvme-folder", ".", "--mb-size", "1", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").touch()
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert os.listdir(tmp_path) == ["EMPTY"]


def test_a_folder_that_is_not_writable_is_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)  # root may write anywhere
    result = run("store", "--nvme-folder", tmp_path, "--mb-size", 1)
    assert result.exit_code == 2
    assert "not writable" in " ".join(result.output.replace("│", " ").split())
