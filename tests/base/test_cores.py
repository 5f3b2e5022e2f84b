"""How many cores a process may use, on machines laid out in a folder (simulated), and who heeds that."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monai_gds.base import cores
from monai_gds.dataset.engines import default_workers
from monai_gds.imagenet.dali.pipeline import execution
from monai_gds.pipeline import openmp
from monai_gds.storage.plain import kvikio
from monai_gds.storage.plain.posix import PosixBackend

SECOND = "30 23 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
FIRST = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lays out a machine of 64 cores, whose mounts, groups and limits a test gives."""

    def laid(mounts: str, groups: str, limits: dict[str, str]) -> Path:
        for name, text in {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, **limits}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(cores, "ROOT", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        return tmp_path

    return laid


@pytest.mark.parametrize(
    ("mounts", "groups", "limits", "usable"),
    [
        (SECOND, "0::/\n", {"sys/fs/cgroup/cpu.max": "600000 100000\n"}, 6),
        (SECOND, "0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),  # as much as two and a half
        (SECOND, "0::/\n", {"sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        (SECOND, "0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        (SECOND, "0::/\n", {"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 64),  # more than there are
        (SECOND, "0::/\n", {}, 64),
        (  # one above may allow less, and one beside does not count
            SECOND, "0::/job/step\n",
            {
                "sys/fs/cgroup/job/cpu.max": "400000 100000\n", "sys/fs/cgroup/job/step/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/job/other/cpu.max": "100000 100000\n",
            }, 4,
        ),
        (SECOND, "0::/docker/abc\n", {"sys/fs/cgroup/cpu.max": "600000 100000\n"}, 6),  # named as on the host
        (  # version 1, beside a part of version 2 that limits nothing
            FIRST + SECOND.replace("cgroup rw", "cgroup/unified rw"), "5:cpu,cpuacct:/job\n3:cpuset:/job\n0::/\n",
            {
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            }, 3,
        ),
        ("", "", {}, 64),
    ],
)  # fmt: skip
def test_simulated_cores_are_those_of_the_affinity_and_of_every_quota_above(
    lay: Callable[..., Path], mounts: str, groups: str, limits: dict[str, str], usable: int
) -> None:
    root = lay(mounts, groups, limits)
    assert cores.usable() == usable
    assert math.ceil(min(cores.quota(root), 64)) == usable


def test_without_files_of_the_kernel_there_is_no_quota(tmp_path: Path) -> None:
    assert cores.quota(tmp_path / "nothing") == math.inf


def test_simulated_a_quota_bounds_threads_and_workers(
    lay: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(SECOND, "0::/\n", {"sys/fs/cgroup/cpu.max": "600000 100000\n"})
    assert PosixBackend(torch.device("cpu")).threads == 6
    assert execution()["num_threads"] == 6
    assert default_workers(100) == 6
    monkeypatch.setattr(os, "getloadavg", lambda: (10.0, 0.0, 0.0))  # nothing for 64 cores, too much for 6
    openmp.heed_load()
    try:
        assert [thread for thread in threading.enumerate() if thread.name == "monai-gds-openmp"]
    finally:
        monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        openmp.heed_load()
    lay(SECOND, "0::/\n", {"sys/fs/cgroup/cpu.max": "1600000 100000\n"})
    assert kvikio.default_threads() == 10


def test_a_thread_stays_on_its_cores_within_the_block_only() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with cores.staying_on({one}):
        assert os.sched_getaffinity(0) == {one}
    for none in (set(), {9999}):  # of a machine with other cores
        with cores.staying_on(none):
            assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
