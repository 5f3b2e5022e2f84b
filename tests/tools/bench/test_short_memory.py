"""tools.bench memory: what is read from the drive where memory is short, counted in bytes; and who is killed."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from monai_gds.errors import BackendUnavailable, MonaiGdsError
from tests.tools.bench.commands import run
from tools.bench import short_memory as job

WORK = {"name": "PersistentDataset", "folder": "nowhere", "volumes": 2, "size": (16, 16, 16), "turns": 2}


def test_where_no_control_group_can_be_made_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(job, "_parents", lambda: iter([(tmp_path / "file", {"memory.max": True})]))
    with pytest.raises(BackendUnavailable, match=r"no control group can be made here: .*Not a directory"):
        run("memory", "--cache-dir", tmp_path)
    monkeypatch.setattr(job, "_parents", lambda: iter(()))
    with pytest.raises(BackendUnavailable, match="no memory controller"), job.group(1 << 30):
        pass


def test_a_group_whose_limit_cannot_be_set_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_parents", lambda: iter([(tmp_path, {"no/such/file": True})]))
    with pytest.raises(BackendUnavailable), job.group(1 << 30):
        pass
    assert list(tmp_path.iterdir()) == []


SECOND = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory\n"}


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Path]:
    """Lays out another machine in a folder (simulated), where the files of a new group have to be made."""

    def laid(files: dict[str, str]) -> Path:
        for name, text in {"sys/fs/cgroup/job/cgroup.procs": "", **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(job, "ROOT", tmp_path)
        return tmp_path / "sys/fs/cgroup"

    return laid


@pytest.mark.parametrize("of_user", [False, True])
def test_a_group_of_version_2_has_limit_and_no_swap(
    lay: Callable[[dict[str, str]], Path], monkeypatch: pytest.MonkeyPatch, of_user: bool
) -> None:
    top, make = lay(SECOND), tempfile.mkdtemp

    def not_at_the_top(prefix: str, dir: Path) -> str:  # noqa: A002 (its name)
        if of_user and dir == top:
            raise PermissionError(errno.EACCES, "Permission denied", str(dir))
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", not_at_the_top)
    monkeypatch.setattr(job, "_remove", shutil.rmtree)
    with job.group(1 << 30) as processes:
        made = processes.parent
        assert made.parent == (top / "job" if of_user else top)
        assert ((made / "memory.max").read_text(), (made / "memory.swap.max").read_text()) == (str(1 << 30), "0")
    assert not made.exists()


def test_where_version_2_passes_no_memory_on_that_is_the_reason(
    lay: Callable[[dict[str, str]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    top = lay({**SECOND, "sys/fs/cgroup/cgroup.subtree_control": "cpu\n"})

    def refused(file: Path, value: int, needed: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))  # as the kernel's folders do

    monkeypatch.setattr(job, "_set", refused)
    reason = rf"here: {top}/cgroup\.subtree_control does not name memory.*; \["
    with pytest.raises(BackendUnavailable, match=reason), job.group(1 << 30):
        pass
    assert sorted(path.name for path in top.iterdir()) == ["cgroup.controllers", "cgroup.subtree_control", "job"]


def test_version_2_beside_version_1_limits_no_memory(lay: Callable[[dict[str, str]], Path]) -> None:
    lay({"proc/self/cgroup": "9:cpu:/\n0::/\n"})
    with pytest.raises(BackendUnavailable, match="no memory controller"), job.group(1 << 30):
        pass


@pytest.mark.parametrize("name", job.DATASETS)
def test_every_dataset_runs_its_epochs_and_counts_bytes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = {**WORK, "name": name, "folder": str(tmp_path / "cache")}
    job.fill(work)
    job.epochs(json.dumps(work))
    assert all(nbytes >= 0 for nbytes in json.loads(capsys.readouterr().out))


def test_a_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "drop", lambda paths: 1.0 if list(paths) else 0.0)
    with pytest.raises(MonaiGdsError, match="--cache-dir"):
        job.fill({**WORK, "folder": str(tmp_path / "cache")})


def test_a_process_that_is_killed_has_the_reason_and_one_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_IN_GROUP", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert job._limited(WORK, tmp_path / "procs", 10**9).reason.startswith("killed by the kernel")
    monkeypatch.setattr(job, "_IN_GROUP", "raise ValueError('the reason')")
    with pytest.raises(MonaiGdsError, match="PersistentDataset: ValueError: the reason"):
        job._limited(WORK, tmp_path / "procs", 10**9)


@pytest.mark.long
def test_where_memory_is_short_ours_reads_less_and_cachedataset_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("blosc2", reason="this machine has no blosc2 to compress records with")
    try:
        with job.group(1 << 30):
            pass
    except BackendUnavailable as e:
        pytest.skip(str(e))
    volumes, size = 18, (160, 160, 160)
    kept = volumes * 2 * 4 * 160**3 / 1e6  # MB
    report = job.memory(tmp_path, volumes, size, 750_000_000, 3)
    rows = {row.name: row for row in report.rows}
    assert rows["CacheDataset"].reason.startswith("killed by the kernel")
    assert rows["PersistentDataset"].samples[0] > 0.95 * kept, "the first epoch reads every file"
    assert sum(rows["PersistentDataset"].samples) > 1.5 * kept
    assert sum(rows[job.OURS].samples) < 0.2 * kept
