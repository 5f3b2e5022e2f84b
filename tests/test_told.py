"""What processes of a run have told: shared by forked ones, and by spawned ones that attach themselves."""

from __future__ import annotations

import math
import time

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
told.attach("/nowhere")
assert not told.Topic("here").is_new()
""")
    assert not Topic("by a stranger").is_new()


def test_the_oldest_topics_are_forgotten() -> None:
    topics = [Topic("many", number) for number in range(10_000)]
    for topic in topics:
        topic.tell()
    assert topics[-1].told() > -math.inf
    assert 4000 < sum(topic.told() > -math.inf for topic in topics) <= 512 * 8
