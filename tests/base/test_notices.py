"""Notices given in a run: shared by forked processes, and by spawned ones that attach themselves."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from monai_gds.base import notices
from monai_gds.base.notices import Notice
from tests.machines import in_child, python


def test_a_notice_is_new_once() -> None:
    began = time.monotonic()
    assert Notice("full", "/a").last_given() == -math.inf
    assert Notice("full", "/a").is_new() and not Notice("full", "/a").is_new()
    assert Notice("full", "/b").is_new()
    assert began <= Notice("full", "/a").last_given() <= time.monotonic()


def test_a_notice_given_by_a_forked_process_is_not_new_here() -> None:
    in_child(Notice("by a child").mark_given)
    assert not Notice("by a child").is_new()


def test_a_spawned_process_attaches_itself() -> None:
    Notice("here").mark_given()
    python(f"""
from monai_gds.base import notices
assert notices.Notice("here").is_new()
notices.attach({notices.place()!r})
assert not notices.Notice("here").is_new()
notices.Notice("by a stranger").mark_given()
notices.attach(("/nowhere", 0, 0))
assert not notices.Notice("here").is_new()
""")
    assert not Notice("by a stranger").is_new()


@pytest.mark.parametrize("length", [100, 100_000])
def test_a_file_of_the_user_that_got_the_number_of_the_descriptor_is_left_alone(tmp_path: Path, length: int) -> None:
    file = tmp_path / "of the user"
    file.write_bytes(b"U" * length)
    python(f"""
import os, subprocess, sys
from monai_gds.base import notices
path, device, inode = notices.place()
os.closerange(3, 256)
os.dup2(os.open({str(file)!r}, os.O_RDWR), int(path.rpartition("/")[2]))
child = f"from monai_gds.base.notices import *; attach({{notices.place()!r}}); assert Notice('in the child').is_new()"
subprocess.run([sys.executable, "-c", child], check=True)
assert notices.Notice("here").is_new() and not notices.Notice("here").is_new()
""")
    assert file.read_bytes() == b"U" * length


@pytest.mark.parametrize(
    "without",
    ["del os.memfd_create", "os.memfd_create = os.rmdir", "os.memfd_create = lambda name: os.open('/proc/version', 0)"],
    ids=["not in this libc", "refused", "of no use"],
)
def test_without_files_in_memory_forked_processes_share_the_table(without: str) -> None:
    python(f"""
import os
{without}
before = os.listdir("/proc/self/fd")
from monai_gds.base import notices
assert notices.place() is None and os.listdir("/proc/self/fd") == before
notices.attach(notices.place())
if not (child := os.fork()):
    notices.Notice("by a child").mark_given()
    os._exit(0)
os.waitpid(child, 0)
assert not notices.Notice("by a child").is_new()
""")


def test_the_oldest_notices_are_forgotten() -> None:
    notices = [Notice("many", number) for number in range(10_000)]
    for notice in notices:
        notice.mark_given()
    assert notices[-1].last_given() > -math.inf
    assert 4000 < sum(notice.last_given() > -math.inf for notice in notices) <= 512 * 8
