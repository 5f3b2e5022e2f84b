"""The command `monai-gds cache`: what it prints, for people and as JSON, and that no name commands the terminal."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monai_gds.command import cache as cache_command
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.folder import maintenance
from monai_gds.folder.uses import Uses
from monai_gds.shared.notes import line
from tests.commands import Done, on_a_terminal, run
from tests.machines import ROOT
from tests.records.handmade import key_of_version_2, version_2, write

PIPELINES = ("cafe0123", "beef0123")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Four records of three pipelines, made in an order that is not that of their names."""
    folder = tmp_path / "cache"
    made = [
        version_2(folder, key_of_version_2("a", pipeline=PIPELINES[0], **{"/data/ct_2.nii.gz": [10, "x"]})),
        version_2(folder, key_of_version_2("b", pipeline=PIPELINES[1], **{"/data/ct_1.nii.gz": [10, "x"]})),
        version_2(folder, key_of_version_2("c", pipeline=PIPELINES[0])),
        version_2(folder, key_of_version_2("d", pipeline="dead0123", **{"/data/ct_0.nii.gz": [10, "x"]})),
    ]
    for i, path in enumerate(sorted(made, reverse=True)):
        os.utime(path, (0, 1_000_000_000 + 60 * i))
    (folder / "notes.txt").write_text("mine")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def listing(done: Done) -> list[list[str]]:
    """The lines of records, by columns."""
    return [line.split(maxsplit=5) for line in done.stdout.splitlines() if ".safetensors " in line]


def document(*arguments: object) -> dict[str, Any]:
    """What a command prints as JSON, and nothing else."""
    done = run("cache", *arguments, "--json")
    assert done.stderr == ""
    assert done.exit_code in (0, 1)
    assert len(done.stdout.splitlines()) == 1
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# ls


def test_lists_pipeline_time_size_tensors_and_sources_of_each_record(cache: Path) -> None:
    done = run("cache", "ls", cache)
    rows = listing(done)
    assert [row[0] for row in rows] == names(cache)
    pipelines = [row[1] for row in rows]
    assert [pipelines.count(name) for name in PIPELINES] == [2, 1]
    assert all(re.fullmatch(r"2001-09-0\d \d\d:\d\d", f"{row[2]} {row[3]}") for row in rows)
    assert {row[5] for row in rows} == {
        "image (4, 256) float32",
        "image (4, 256) float32 from ct_0.nii.gz",
        "image (4, 256) float32 from ct_1.nii.gz",
        "image (4, 256) float32 from ct_2.nii.gz",
    }
    *_, last = done.stdout.splitlines()
    assert last == "4 records of 0.0 MB, 0 damaged; 1 other files"
    assert re.search(
        r"^pipeline cafe0123: 2 records, 0\.0 MB, the newest from [-\d]+ [:\d]+$", done.stdout, re.MULTILINE
    )


def test_the_second_listing_is_the_first(cache: Path) -> None:
    """The second one is told by the index."""
    for options in ([], ["--json"], ["--sort", "made"]):
        assert run("cache", "ls", *options, cache).stdout == run("cache", "ls", *options, cache).stdout


def test_a_summary_leaves_the_records_out(cache: Path) -> None:
    whole = run("cache", "ls", cache).stdout.splitlines()
    summary = run("cache", "ls", "--summary", cache).stdout.splitlines()
    assert len(summary) == 4
    assert summary == whole[-4:]
    assert "records" not in document("ls", "--summary", cache)


@pytest.mark.parametrize("order", ["name", "made", "size", "pipeline", "source"])
def test_records_are_sorted(cache: Path, order: str) -> None:
    largest = min(cache.glob("*.v2.safetensors"))
    write(largest, 2, json.dumps(key_of_version_2("x" * 5000)))  # damaged, and larger
    shown = [row[0] for row in listing(run("cache", "ls", "--sort", order, cache))]
    told = document("ls", "--sort", order, cache)["records"]
    keys = {
        "name": lambda r: r["name"],
        "made": lambda r: r["mtime_ns"],
        "size": lambda r: r["bytes"],
        "pipeline": lambda r: r["pipeline"],
        "source": lambda r: sorted(r["sources"]),
    }
    assert shown == [r["name"] for r in told]
    assert told == sorted(told, key=keys[order])
    assert len(told) == 4


def test_a_listing_as_json(cache: Path) -> None:
    damaged = write(cache / f"{'f' * 32}.v2.safetensors", 2, {})
    found = document("ls", cache)
    by_name = {record["name"]: record for record in found["records"]}
    assert sorted(by_name) == names(cache)
    (one,) = (record for record in found["records"] if record["item"] == "b")
    assert one["sources"] == {"/data/ct_1.nii.gz": [10, "x"]}
    assert one["tensors"] == [{"name": "image", "dtype": "float32", "shape": [4, 256]}]
    assert (one["pipeline"], one["version"], one["problem"], one["damaged"]) == ("beef0123", 2, "", False)
    assert one["bytes"] == (cache / one["name"]).stat().st_size
    assert one["mtime_ns"] == (cache / one["name"]).stat().st_mtime_ns
    assert by_name[damaged.name]["damaged"]
    assert "its key is malformed" in by_name[damaged.name]["problem"]
    pipelines = {row["pipeline"]: row["records"] for row in found["pipelines"]}
    assert [pipelines[name] for name in PIPELINES] == [2, 1]
    totals = {name: found[name] for name in ("count", "damaged", "unreadable", "other_files")}
    assert totals == {"count": 5, "damaged": 1, "unreadable": 0, "other_files": 1}
    assert found["bytes"] == sum(path.stat().st_size for path in cache.glob("*.safetensors"))


def test_a_damaged_record_is_listed_as_such(cache: Path) -> None:
    (cache / names(cache)[0]).write_bytes(b"no header at all")
    done = run("cache", "ls", cache)
    row = listing(done)[0]
    assert (row[1], row[5]) == ("?", "it is not a record of monai_gds")
    assert "4 records of 0.0 MB, 1 damaged" in done.stdout


def test_a_listing_waits_for_neither_torch_nor_monai(cache: Path) -> None:
    code = f"""
import sys
from monai_gds.command.main import main
sys.argv = ["monai-gds", "cache", "ls", {str(cache)!r}]
try:
    main()
finally:
    print({{"torch", "monai", "numpy", "safetensors"}} & set(sys.modules), file=sys.stderr)
"""
    for _ in range(2):  # without an index, and with one
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "set()\n")
        assert done.stdout.startswith("record ")


# ---------------------------------------------------------------------------------------------------------------------
# Names, terminals and pipes


def control_characters(text: str) -> set[str]:
    return set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text))


COMMANDS = [
    ["ls"],
    ["ls", "--sort", "source"],
    ["ls", "--json"],
    ["verify"],
    ["verify", "--json"],
    ["prune", "--dry-run"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_commands_are_quiet_behind_a_pipe(cache: Path, command: list[str]) -> None:
    done = run("cache", *command, cache)
    assert done.exit_code == 0
    assert done.stderr == ""
    assert control_characters(done.stdout) == set()


def test_names_are_whole_on_a_narrow_terminal(cache: Path) -> None:
    shown = on_a_terminal([sys.executable, "-m", "monai_gds", "cache", "ls", str(cache)], columns=80)
    assert all(name in shown for name in names(cache))
    assert max(map(len, shown.splitlines())) <= 80


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    version_2(tmp_path, key_of_version_2(**{"/data/ct [bold]a[x].npy": [1, "x"]}))
    assert "from ct [bold]a[x].npy\n" in run("cache", "ls", tmp_path).stdout


EVIL = "/data/\x1b]0;owned\x07\x1b[2Jct\r\n\u202e\x9b31m\udcff.nii"
WRITTEN_OUT = r"\x1b]0;owned\x07\x1b[2Jct\r\n\u202e\x9b31m\udcff.nii"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_name_commands_the_terminal(tmp_path: Path, command: list[str]) -> None:
    """Of a source, or of the folder itself."""
    folder = tmp_path / "\x1b[31mcache\udcff"
    version_2(folder, key_of_version_2(**{EVIL: [1, "x"]}))
    write(folder / f"{'a' * 32}.v2.safetensors", 2, json.dumps({"parts": EVIL}))
    done = run("cache", *command, "--", folder)
    assert "Traceback" not in done.stderr
    assert control_characters(done.stdout) == set()
    if command == ["ls"]:
        assert f"from {WRITTEN_OUT}\n" in done.stdout
        assert len(done.stdout.splitlines()) == 6  # a line end in a name makes no line
    if "--json" in command:
        assert json.loads(done.stdout)["directory"] == str(folder)


def test_what_the_output_cannot_encode_is_written_out(tmp_path: Path) -> None:
    version_2(tmp_path, key_of_version_2(**{"/data/Schädel→.nii": [1, "x"]}))
    done = subprocess.run(
        [sys.executable, "-m", "monai_gds", "cache", "ls", tmp_path],
        cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"from Sch\xe4del\u2192.nii" in done.stdout


def test_a_reader_that_has_seen_enough_gets_no_traceback(cache: Path) -> None:
    for i in range(300):  # more than a pipe holds
        version_2(cache, key_of_version_2(f"more {i}", **{f"/data/{'x' * 200}": [1, "x"]}))
    command = f"{sys.executable} -m monai_gds cache ls {cache} | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("record ")
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------------------------
# verify and prune


def test_a_command_that_is_advised_can_be_pasted_whatever_the_folder_is_called(cache: Path, tmp_path: Path) -> None:
    folder = cache.rename(tmp_path / "my $cache; it's")
    (folder / names(folder)[0]).write_bytes(b"damaged")
    advised = run("cache", "verify", folder).stdout.partition("To delete them now: monai-gds ")[2]
    done = run(*shlex.split(advised))
    assert (done.exit_code, done.stdout.splitlines()[-1][:7]) == (0, "1 files")


def test_verify_as_json_and_in_short(cache: Path) -> None:
    assert document("verify", cache)["problems"] == []
    victim = cache / names(cache)[0]
    with victim.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    newer = write(cache / f"{'f' * 32}.v2.safetensors", 3, {})
    found = document("verify", cache)
    assert [(p["name"], p["damaged"]) for p in found["problems"]] == [(victim.name, True), (newer.name, False)]
    assert (found["count"], found["damaged"], found["unreadable"], found["other_files"]) == (5, 1, 1, 1)
    assert "problems" not in document("verify", "--summary", cache)
    done = run("cache", "verify", "--summary", cache)
    assert done.exit_code == 1
    assert victim.name not in done.stdout
    assert done.stdout.startswith("5 records, 1 damaged, 1 that cannot be checked; 1 other files\n")


def test_prune_as_json_and_in_short(cache: Path) -> None:
    victim = cache / names(cache)[0]
    victim.write_bytes(b"no header at all")
    reason = "it is not a record of monai_gds"
    for options in (["--dry-run"], []):
        found = document("prune", *options, cache)
        assert found["files"] == [{"path": str(victim), "bytes": 16, "problem": reason}]
        assert (found["count"], found["bytes"], found["dry_run"]) == (1, 16, bool(options))
        assert victim.exists() == bool(options)
    victim.write_bytes(b"no header at all")
    assert run("cache", "prune", "--summary", cache).stdout == "1 files, 0.0 MB deleted\n"


def age(folder: Path, days: dict[str, float]) -> dict[str, Path]:
    """Makes the records of each pipeline so old; returns one of each."""
    found = {}
    for record in document("ls", folder)["records"]:
        path, made = folder / record["name"], time.time() - 86400 * days[record["pipeline"]]
        os.utime(path, (made, made))
        found[record["pipeline"]] = path
    return found


@pytest.mark.parametrize(
    ("options", "left", "reason"),
    [
        (["--older-than", "25d"], 1, "made 40 days ago"),
        (["--unused-for", "3w"], 3, "not used for 30 days"),  # two of those 40 days old were read yesterday
        (["--unused-for", "12h"], 1, "not used for 1 day"),
        (["--max-size", "30kB"], 3, "not used for 30 days; those that stay were used later"),
        (["--max-size", "1 MB"], 4, ""),
        (["--older-than", "35d", "--max-size", "10kB"], 1, "made 40 days ago"),
        (["--unused-for", "12h", "--pipeline", "dead"], 0, "of the pipeline dead0123"),
    ],
)
def test_prune_deletes_what_is_old_unused_or_too_much(cache: Path, options: list[str], left: int, reason: str) -> None:
    age(cache, {PIPELINES[0]: 40, PIPELINES[1]: 30, "dead0123": 0.1})
    read = [
        json.dumps(["read", time.time() - 86400 - 9, record["name"][:32], 0]).encode()
        for record in document("ls", cache)["records"]
        if record["pipeline"] == PIPELINES[0]
    ]
    (cache / ".index" / "unknown.7.7.0.uses").write_bytes(b"".join(map(line, read)))
    planned = run("cache", "prune", *options, "--dry-run", cache)
    assert len(names(cache)) == 4
    done = run("cache", "prune", *options, cache)
    assert (planned.exit_code, done.exit_code) == (0, 0)
    assert len(names(cache)) == left
    assert reason in done.stdout
    assert done.stdout == planned.stdout.replace("to delete", "deleted")
    assert (cache / "notes.txt").read_text() == "mine"


def test_prune_deletes_records_that_a_wrong_clock_dated_later_than_now_if_they_are_too_many(cache: Path) -> None:
    age(cache, {PIPELINES[0]: -400, PIPELINES[1]: 30, "dead0123": -400})
    training = Uses(cache)
    training.open("dead0123")
    done = run("cache", "prune", "--max-size", "0", cache)
    assert done.stdout.splitlines()[-2].startswith("3 files, ")
    assert [found.pipeline for found in maintenance.survey(cache)] == ["dead0123"]


@pytest.mark.filterwarnings("ignore:every item was computed again")  # each fold is another pipeline
def test_prune_keeps_the_pipelines_of_datasets_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pruned_study.py").write_text(
        "import torch\nfrom monai.transforms import Compose, EnsureTyped, ScaleIntensityd\n"
        "from monai_gds import GDSDataset\n"
        "def make(fold):\n"
        "    transform = [EnsureTyped('image'), ScaleIntensityd('image', maxv=float(fold))]\n"
        "    return GDSDataset([{'image': torch.ones(1, 4, 4, 4)}], Compose(transform), 'cache', 'cpu')\n"
    )
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache"
    for fold in range(1, 4):
        assert run("cache", "warm", "pruned_study:make", f"fold={fold}", "--no-progress").exit_code == 0
    gc.collect()
    keep = ["--keep", "pruned_study:make fold=1", "--keep", "pruned_study:make fold=3"]
    done = run("cache", "prune", "--max-size", "0", *keep, "--summary", folder)
    assert done.exit_code == 1
    assert re.fullmatch(
        r"1 files, 0\.0 MB deleted\n0\.0 MB are left, more than --max-size: they are in use, kept, or cannot be .*\n",
        done.stdout,
    )
    found = document("prune", "--max-size", "0", *keep, folder)
    assert (found["count"], found["left"], found["files"]) == (0, 2, [])
    assert found["bytes_left"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert run("cache", "warm", "pruned_study:make", "fold=3").stdout == "0 items computed, 1 were cached already\n"
    done = run("cache", "prune", "--keep", "pruned_study:make fold=7", "--summary", folder)
    assert re.fullmatch(
        r"--keep: no record here is of the pipeline of pruned_study:make fold=7 \([0-9a-f]+\)\n", done.stderr
    )


def test_prune_leaves_what_is_used_while_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    for n in range(4):
        os.utime(version_2(folder, key_of_version_2(f"item {n}", pipeline=("aaaa", "bbbb")[n // 2])), (0, n))
    monkeypatch.setattr(cache_command, "KNOWN_SECONDS", 0.0)
    training, remove = Uses(folder), maintenance.remove
    monkeypatch.setattr(maintenance, "remove", lambda found: (training.open("bbbb"), remove(found))[1])
    done = run("cache", "prune", "--max-size", "0", folder)
    assert done.stdout.count("kept, since it has been used meanwhile") == 2
    assert {found.pipeline for found in maintenance.survey(folder)} == {"bbbb"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--older-than", "30"], "'30' is not a span of time: use a number of hours, days or weeks: 36h, 30d, 2w"),
        (["--unused-for", "soon"], "'soon' is not a span of time"),
        (["--max-size", "lots"], "--max-size='lots': it must be a number of bytes, or one with a unit"),
        (["--keep", "nothing"], "'nothing' does not have the form module:function"),
        (["--keep", ""], "Invalid value for --keep: '' does not have the form module:function"),
        (["--keep", "training:make name='ct"], "Invalid value for --keep: No closing quotation"),
    ],
)
def test_prune_deletes_nothing_where_a_limit_makes_no_sense(cache: Path, options: list[str], words: str) -> None:
    done = run("cache", "prune", *options, cache)
    assert done.exit_code == 2
    assert words in done.output
    assert len(names(cache)) == 4


def test_prune_says_what_it_kept_since_it_was_replaced_meanwhile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from monai_gds.folder import maintenance

    victim = cache / names(cache)[0]
    sound = victim.read_bytes()
    victim.write_bytes(b"no header at all")
    remove = maintenance.remove

    def late(found: Any) -> bool:
        victim.unlink()
        victim.write_bytes(sound)
        return remove(found)

    monkeypatch.setattr(maintenance, "remove", late)
    done = run("cache", "prune", cache)
    assert done.stdout == f"{victim}: kept, since it was replaced or removed meanwhile\n0 files, 0.0 MB deleted\n"
    assert victim.read_bytes() == sound


# ---------------------------------------------------------------------------------------------------------------------
# explain

MAKER = """
from monai.transforms import Compose, EnsureTyped
from monai_gds import GDSDataset
def make():
    return GDSDataset([{"image": [float(i)]} for i in range(3)], Compose([EnsureTyped("image")]), "cache", "cpu")
def other():
    return 1
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory; explaining is the dataset's own work, and tested there."""
    name = f"explained_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MAKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(GDSDataset, "explain", lambda self, i: f"item {i} of {len(self)}: \x1b[1mmiss")
    monkeypatch.setattr(GDSDataset, "__str__", lambda self: "what is cached")
    return name


def test_explains_items_and_the_dataset(module: str) -> None:
    done = run("cache", "explain", f"{module}:make", 0, 2)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "item 0 of 3: \\x1b[1mmiss\nitem 2 of 3: \\x1b[1mmiss\n"
    assert run("cache", "explain", f"{module}:make").stdout == "what is cached\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{}:make", "3"], "the dataset has 3 items"),
        (["{}:make", "x"], "does not have the form key=value"),
        (["{}:make", "2fold=3"], "does not have the form key=value"),
        (["{}:other"], "a value of type int"),
        (["{}:nothing"], "has no function 'nothing'"),
        (["{}:mak"], "has no function 'mak': did you mean 'make'?"),
        (["{}"], "module:function"),
        (["no_such_module:make"], "no module 'no_such_module'"),
        (["training.py:make"], "without .py"),
    ],
)
def test_what_cannot_be_explained_is_wrong_usage(module: str, arguments: list[str], words: str) -> None:
    done = run("cache", "explain", *(argument.format(module) for argument in arguments))
    assert done.exit_code == 2
    assert words in done.output


def test_a_module_that_imports_what_is_not_there_is_not_taken_for_a_missing_one(module: str) -> None:
    Path("needs_more.py").write_text("import not_installed_here")
    done = run("cache", "explain", "needs_more:make")
    assert done.exit_code == 1
    assert 'needs_more.py", line 1' in done.output and "not_installed_here" in done.output


def test_warm_leaves_a_log_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logged_study.py").write_text(
        "import torch\nfrom monai.transforms import Compose, EnsureTyped\nfrom monai_gds import GDSDataset\n"
        "def make():\n"
        "    data = [{'image': torch.full((4,), float(n))} for n in range(4)]\n"
        "    return GDSDataset(data, Compose([EnsureTyped('image')]), 'cache', 'cpu')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("monai_gds.dataset.populate._LOG_SECONDS", 0.0)
    words = ["cache", "warm", "logged_study:make", "--num-workers", "0", "--rank", "1", "--world-size", "2"]
    lines = run(*words).stderr.replace("\n", " ")
    whose = rf"\(rank 1 of 2, {re.escape(str(tmp_path))}/cache, pipeline [0-9a-f]{{8}}\)"
    assert re.search(rf"filling the cache\S* in this process: 2 of 2 items {whose}", lines), lines
    assert re.search(rf"done {whose}", lines), lines
