"""The benchmark over a slow disk: every method reads all files, and the opens in flight are shown."""

from __future__ import annotations

import json
import re

import pytest

from tests.tools.bench import commands
from tools import slow_disk
from tools.bench.latency import REFERENCE


def test_every_method_reads_all_files_at_each_delay() -> None:
    arguments = ["latency", "--files", 100, "--delay", 0, "--delay", 20, "--repeats", 1]
    try:
        printed = commands.run(*arguments, "--json")
    except AssertionError as e:
        if re.search(r"needs root|this machine", str(e)):
            pytest.skip(str(e))
        raise
    reports = json.loads(printed)["reports"]
    assert [re.sub(r"\d+ kB", "kB", report["title"]) for report in reports] == [
        f"100 {kind} of kB, {delay} ms per open" for kind in ("records", "records", "images") for delay in (0, 20)
    ]
    for report in reports:
        assert report["rows"][0]["name"] == REFERENCE
        for row in report["rows"]:
            assert len(row["samples"]) == 1
            assert min(row["figures"]["CPU µs per file"]["samples"]) > 0
            assert int(row["notes"]["opens in flight"]) > (30 if "20 ms" in report["title"] else 0)


def test_a_machine_without_it_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_disk.os, "geteuid", lambda: 1000)
    assert "needs root" in commands.run("latency", code=2)
