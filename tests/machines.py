"""What tests need of the machine: small and read-only disks, a user without rights, processes that get killed."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fresh import ROOT

__all__ = [
    "NOBODY", "ROOT", "few_descriptors", "fork", "in_child", "mounted_tmpfs", "python", "read_only", "shared_folder",
]  # fmt: skip

NOBODY = 65534


@contextmanager
def mounted_tmpfs(where: Path, size: int, options: str = "") -> Iterator[Path]:
    """A file system in memory of ``size`` bytes, with further mount options."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root, which this process is not")
    where.mkdir(exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}{options and ','}{options}", "none", where],
        capture_output=True,
        text=True,
    )
    if mount.returncode:
        pytest.skip(f"this machine does not mount file systems: {mount.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def read_only(where: Path) -> None:
    """Makes a file system of :func:`mounted_tmpfs` read-only."""
    subprocess.run(["mount", "-o", "remount,ro", where], check=True)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Lets this process open no more than ``more`` further descriptors."""
    opened = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fork() -> int:
    """``os.fork``, for children that use torch: its own threads do not survive a fork, as in DataLoader's workers."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
    return pid


def in_child(work: Callable[[], Any], *, nobody: bool = False) -> Any:
    """Runs ``work`` in a forked process, as the user nobody if asked, and gives what it returned or raised."""
    if nobody and os.geteuid() != 0:
        pytest.skip("becoming another user needs root, which this process is not")
    read_end, write_end = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            if nobody:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            answer = (True, work())
        except BaseException:
            answer = (False, traceback.format_exc())
        with open(write_end, "wb") as f:
            f.write(pickle.dumps(answer))
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as f:
        raw = f.read()
    os.waitpid(pid, 0)
    ok, value = pickle.loads(raw)
    assert ok, value
    return value


def python(code: str, *args: str, timeout: float = 120) -> str:
    """Runs a program in a Python that has imported nothing, and gives what it printed; see ``fresh.printed_by``."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
