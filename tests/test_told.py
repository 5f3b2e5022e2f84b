"""What processes of a run have told: shared by forked ones, and by spawned ones that attach themselves."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from monai_gds import told
from monai_gds.told import Topic
from tests.machines import in_child, python


def test_a_topic_is_new_once() -> None:
    began = time.monotonic()
    assert Topic("full", "/a").told() == -math.inf
    assert Topic("full", "/a").is_new() and not Topic("full", "/a").is_new()
    assert Topic("full", "/b").is_new()
    assert began <= Topic("full", "/a").told() <= time.monotonic()


def test_what_a_forked_process_tells_is_known_here() -> None:
    in_child(Topic("by a child").tell)
    assert not Topic("by a child").is_new()


def test_a_spawned_process_attaches_itself() -> None:
    Topic("here").tell()
    python(f"""
from monai_gds import told
assert told.Topic("here").is_new()
told.attach({told.place()!r})
assert not told.Topic("here").is_new()
told.Topic("by a stranger").tell()
told.attach(("/nowhere", 0, 0))
assert not told.Topic("here").is_new()
""")
    assert not Topic("by a stranger").is_new()


@pytest.mark.parametrize("length", [100, 100_000])
def test_a_file_of_the_user_that_got_the_number_of_the_descriptor_is_left_alone(tmp_path: Path, length: int) -> None:
    file = tmp_path / "of the user"
    file.write_bytes(b"U" * length)
    python(f"""
import os, subprocess, sys
from monai_gds import told
path, device, inode = told.place()
os.closerange(3, 256)
os.dup2(os.open({str(file)!r}, os.O_RDWR), int(path.rpartition("/")[2]))
child = f"from monai_gds import told; told.attach({{told.place()!r}}); assert told.Topic('in the child').is_new()"
subprocess.run([sys.executable, "-c", child], check=True)
assert told.Topic("here").is_new() and not told.Topic("here").is_new()
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
from monai_gds import told
assert told.place() is None and os.listdir("/proc/self/fd") == before
told.attach(told.place())
if not (child := os.fork()):
    told.Topic("by a child").tell()
    os._exit(0)
os.waitpid(child, 0)
assert not told.Topic("by a child").is_new()
""")


def test_the_oldest_topics_are_forgotten() -> None:
    topics = [Topic("many", number) for number in range(10_000)]
    for topic in topics:
        topic.tell()
    assert topics[-1].told() > -math.inf
    assert 4000 < sum(topic.told() > -math.inf for topic in topics) <= 512 * 8
