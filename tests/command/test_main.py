"""All commands: help with examples, exit codes, errors without a traceback, plain output to a pipe, completion."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import monai_gds
from monai_gds.base.console import progress_bar
from monai_gds.command import main
from monai_gds.errors import StorageError
from monai_gds.folder import maintenance
from tests.commands import Done, on_a_terminal, run
from tests.fresh import warm
from tests.machines import ROOT
from tests.polls import until

SMALL_DEMO = ["demo", "--volumes", "1", "--size", "24", "24", "24", "--crop", "16", "16", "16", "--epochs", "2"]


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group by its words."""
    command = command or typer.main.get_command(main.app)
    yield path, command
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from commands(below, (*path, name))


ALL = dict(commands())
LEAVES = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}


def words(path: tuple[str, ...]) -> str:
    return " ".join(("monai-gds", *path))


def test_the_commands_in_the_documentation_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("[a-z]*/*.md"), *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages if page.parent.name != "generated")
    named = re.findall(r"(?<=[`\s])monai-gds ((?:[a-z]+ ?)+)", text)
    assert len(named) > 20
    for words_of_one in named:
        path = tuple(words_of_one.split())
        assert any(path[:length] in LEAVES for length in range(1, len(path) + 1)) or path in ALL, words_of_one


@pytest.mark.parametrize("path", ALL, ids=words)
def test_help_explains_and_shows_an_example(path: tuple[str, ...]) -> None:
    done = run(*path, "--help")
    assert done.exit_code == 0
    assert done.stderr == ""
    example = f"Example: {words(path)}"
    assert example in done.output
    assert len(done.output.split("Usage:")[1]) > len(example) + 100
    # Typer keeps the line breaks of all paragraphs but the first: on 80 columns, longer lines would be broken twice.
    assert max(map(len, inspect.cleandoc(ALL[path].help or "").partition("\n\n")[2].splitlines()), default=0) <= 77


@pytest.mark.parametrize("path", ALL, ids=words)
def test_the_example_is_of_this_command_and_its_options_exist(path: tuple[str, ...]) -> None:
    command = ALL[path]
    example = shlex.split(command.epilog.removeprefix("Example: monai-gds "))
    assert tuple(example[: len(path)]) == path
    named = next(ALL[tuple(example[:n])] for n in range(len(example), -1, -1) if tuple(example[:n]) in ALL)
    known = {opt for param in named.params for opt in (*param.opts, *param.secondary_opts)}
    assert {word for word in example if word.startswith("-")} <= known


@pytest.mark.parametrize("path", LEAVES, ids=words)
def test_every_option_and_command_is_explained(path: tuple[str, ...]) -> None:
    command = LEAVES[path]
    assert command.help
    unexplained = [p.name for p in command.params if p.param_type_name == "option" and not p.help]
    assert not unexplained


@pytest.mark.parametrize("path", ALL, ids=words)
def test_wrong_usage_is_exit_code_2(path: tuple[str, ...]) -> None:
    done = run(*path, "--no-such-option")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "No such option" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("path", [path for path in ALL if path not in LEAVES], ids=words)
def test_a_group_alone_shows_its_help(path: tuple[str, ...]) -> None:
    done = run(*path)
    assert f"Usage: {words(path)}" in done.output
    assert done.exit_code == 2
    assert run(*path, "no-such-command").exit_code == 2


WITH_DEVICE = [path for path, command in LEAVES.items() if any(p.name == "device" for p in command.params)]


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
@pytest.mark.parametrize("path", WITH_DEVICE, ids=words)
def test_a_device_that_is_not_there_is_wrong_usage(path: tuple[str, ...], device: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    more = {"load": ["--input-file", tmp_path / "file"], "store": ["--nvme-folder", tmp_path]}.get(path[-1], [])
    done = run(*path, *more, "--device", device)
    assert done.exit_code == 2, done.output
    assert device in done.output


def test_a_backend_that_does_not_exist_is_wrong_usage_and_one_that_does_not_work_is_a_failure() -> None:
    assert run(*SMALL_DEMO, "--backend", "nvme").exit_code == 2
    done = run(*SMALL_DEMO, "--backend", "kvikio", "--device", "cpu")
    assert done.exit_code == 1
    assert done.stderr.startswith("monai-gds: ")
    assert len(done.stderr.splitlines()) == 1
    assert "posix" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["doctor", "--measure", "--device", "cpu"],
        ["demo", "--volumes", "50", "--device", "cpu"],
        ["bench", "tensor", "store", "--mb-size", "1", "--loop", "100000", "--device", "cpu", "--nvme-folder", ".",
         "--method", "posix"],
    ],
    ids=words,
)  # fmt: skip
def test_ctrl_c_is_one_line_and_exit_code_130(command: list[str], tmp_path: Path) -> None:
    running = warm().program("-m", "monai_gds", *command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    # A file in the command's own folder: beside it Python writes one of its own, to try whether TMPDIR can be used, and
    # leaves it behind when the signal comes meanwhile.
    until(lambda: any(path.is_file() for path in tmp_path.glob("*/**/*")))
    running.send_signal(signal.SIGINT)
    done = running.result()
    assert (done.returncode, done.stderr) == (130, "monai-gds: stopped\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StorageError("disk gone"), "disk gone"),
        (StorageError(95, "it is on a tmpfs file system", "/x"), "/x: it is on a tmpfs file system"),
        (OSError(5, "Input/output error", "/x"), "/x: Input/output error"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(18, "Invalid cross-device link", "/x", None, "/y"), "/x to /y: Invalid cross-device link"),
        (ValueError("no"), "no"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def fail(_: Path) -> list[Path]:
        raise error

    monkeypatch.setattr(maintenance, "record_files", fail)
    done = run("cache", "verify", tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"monai-gds: {words}\n")


def test_an_unexpected_error_keeps_its_traceback_for_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(maintenance.header, "digest_in", lambda _: 1 // 0)
    (tmp_path / "file").write_bytes(b"x")
    done = run("cache", "verify", tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "maintenance.py" in done.stderr and done.stderr.endswith(
        "ZeroDivisionError: integer division or modulo by zero\n"
    )
    assert "typer" not in done.stderr


FAULTY = """
from monai.transforms import Compose, EnsureTyped, Lambdad, RandLambdad
from monai_gds import GDSDataset

def faulty(image):
    return image.nothing

def make(what):
    if what == "value":
        return int("seven")
    if what == "argument":
        return GDSDataset([], None, "cache", devise="cpu")
    if what == "backend":
        return GDSDataset([], None, "cache", device="cpu", backend="xnvme-bam")
    wrong = {"once": Lambdad("image", faulty), "random": RandLambdad("image", faulty)}[what]
    return GDSDataset([{"image": [1.0]}], Compose([EnsureTyped("image"), wrong]), "cache", device="cpu")
"""


@pytest.mark.parametrize(
    ("command", "what", "shown", "last"),
    [
        ("cache explain", "value", 'int("seven")', "ValueError: invalid literal"),
        ("cache explain", "argument", "GDSDataset(", "TypeError: GDSDataset has no argument 'devise': did you mean"),
        ("profile", "once", "return image.nothing", "monai_gds: while computing item 0"),
        ("profile", "random", "return image.nothing", "monai_gds: while computing item 0"),
        ("bench dataset --function", "random", "return image.nothing", "monai_gds: while computing item 0"),
    ],
)
def test_an_error_of_the_users_code_is_shown_with_its_line_on_one_screen(
    command: str, what: str, shown: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"faulty_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = run(*command.split(), f"{name}:make", f"what={what}")
    lines = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (1, "")
    assert lines[0] == "Traceback (most recent call last):" and shown in done.stderr
    assert lines[-1].startswith(last)
    assert len(lines) <= 45
    assert "typer" not in done.stderr and "importlib" not in done.stderr


def test_what_this_package_raises_on_the_users_call_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"faulty_{tmp_path.name}.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = run("cache", "explain", f"faulty_{tmp_path.name}:make", "what=backend")
    assert done.stderr.startswith("monai-gds: backend='xnvme-bam' does not work here") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "meant"),
    [(["doctr"], "'doctor'"), (["bench", "trainin"], "'training'"), (["prune"], "'cache prune'"), (["sevnteen"], "")],
)
def test_a_wrong_name_of_a_command_is_answered_with_the_one_that_was_meant(command: list[str], meant: str) -> None:
    done = run(*command)
    assert done.exit_code == 2
    assert f"No such command '{command[-1]}'" in done.output
    assert (f"Did you mean {meant}?" in done.output) == bool(meant)
    assert meant or "Did you mean" not in done.output


@pytest.mark.parametrize("option", ["--size", "--crop"])
@pytest.mark.parametrize("voxels", [(0, 16, 16), (16, 16, -1)])
def test_a_volume_without_voxels_is_wrong_usage(option: str, voxels: tuple[int, int, int]) -> None:
    done = run("demo", "--volumes", 1, "--device", "cpu", option, *voxels)
    assert done.exit_code == 2
    assert option in done.output
    assert "each side takes 1 voxel or more" in done.output


def test_the_reason_for_a_backend_is_shown_verbatim(monkeypatch: pytest.MonkeyPatch) -> None:
    from monai_gds.dataset import settings

    monkeypatch.setattr(settings, "choose_backend", lambda *_: ("posix", "not kvikio: monai_gds[cuda12] is missing"))
    done = run(*SMALL_DEMO, "--device", "cpu")
    assert done.exit_code == 0
    assert "(not kvikio: monai_gds[cuda12] is missing)" in done.stdout


def test_images_cannot_be_made_without_pillow_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    done = run("bench", "loaders", "--make", "1", "--datadir", tmp_path / "images")
    assert done.exit_code == 1
    assert "monai_gds[bench]" in done.stderr
    assert not (tmp_path / "images").exists()


def test_images_are_not_made_in_an_existing_folder(tmp_path: Path) -> None:
    done = run("bench", "loaders", "--make", "1", "--datadir", tmp_path)
    assert done.exit_code == 2
    assert "leave --make out" in done.output


@pytest.mark.parametrize("below", ["", "folder"])
def test_pack_into_a_file_is_an_error_with_a_remedy(below: str, tmp_path: Path) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "afile").touch()
    done = run("pack", tmp_path / "images", tmp_path / "afile" / below)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "afile is a file: name a folder to pack into, a new or an empty one" in done.stderr


def test_pack_uses_singular_and_plural(tmp_path: Path) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"\xff\xd8")
    assert "1 image of 1 class in 2 files" in run("pack", tmp_path / "images", tmp_path / "packed").stdout


def test_pack_does_not_write_into_what_it_packs(tmp_path: Path) -> None:
    """The folder of packed files would become a class and renumber the classes after it."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"\xff\xd8")
    done = run("pack", tmp_path, tmp_path / "a-packed")
    assert done.exit_code == 2
    assert not (tmp_path / "a-packed").exists()


# Behind a pipe.


def as_a_user(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process whose output is redirected."""
    return warm().run("-m", "monai_gds", *map(str, arguments), env={**os.environ, **environment})


def control_characters(text: str) -> set[str]:
    return set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f]", text))


def test_demo_is_quiet_behind_a_pipe(tmp_path: Path) -> None:
    done = as_a_user(*SMALL_DEMO, "--device", "cpu", "--keep", tmp_path / "new" / "folder")
    assert done.returncode == 0, done.stderr
    assert control_characters(done.stdout + done.stderr) == set()
    assert "same volumes" in done.stdout


OWN_DATASET = """
import torch, monai_gds
from monai.transforms import Compose, Lambda

def make():
    transform = Compose([Lambda(lambda item: {"image": torch.full((9,), float(item))})])
    return monai_gds.GDSDataset([1, 2], transform, "cache", "cpu")
"""


@pytest.mark.parametrize("of", ["dataset", "tensor"])
def test_benchmarks_print_json_and_nothing_else(of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_dataset.py").write_text(OWN_DATASET)
    small = {
        "dataset": ["dataset", "--function", "own_dataset:make", "--repeats", 1],
        "tensor": [
            "tensor",
            "store",
            "--nvme-folder",
            tmp_path,
            "--mb-size",
            1,
            "--loop",
            1,
            "--device",
            "cpu",
            "--method",
            "posix",
        ],
    }[of]
    done = run("bench", *small, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["reports"]
    assert control_characters(done.stdout + done.stderr) == set()


def test_bars_are_shown_on_a_terminal_and_not_behind_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    code = "from monai_gds.base.console import progress_bar\nwith progress_bar('checking', 3) as update: update(2)"
    assert "checking" in on_a_terminal([sys.executable, "-c", code])
    with progress_bar("checking", 3) as update:
        update(2)
    assert capfd.readouterr() == ("", "")


def test_bars_are_shown_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    from monai_gds.base import console

    monkeypatch.setattr(console.stderr, "is_jupyter", True)
    assert not console.progress().disable
    monkeypatch.setattr(console.stderr, "is_jupyter", False)
    assert console.progress().disable


# How it starts.


def test_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"monai-gds {monai_gds.__version__}\n")
    assert as_a_user("--version").stdout == done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["doctor", "--help"], ["bench", "tensor", "--help"]])
def test_help_imports_neither_torch_nor_monai(arguments: list[str]) -> None:
    code = f"""
import sys
from monai_gds.command.main import main
sys.argv = ["monai-gds", *{arguments!r}]
try:
    main()
finally:
    print({{"torch", "monai", "numpy", "safetensors", "nibabel"}} & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "set()\n")


def complete(line: str, shell: str) -> str:
    """What the shell receives when the user presses the tabulator key after ``line``."""
    environment = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    code = "from monai_gds.command.main import main; main()"
    done = warm().run("-c", code, env={**os.environ, **environment, "_MONAI_GDS_COMPLETE": f"complete_{shell}"})
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_and_options(shell: str) -> None:
    assert "cache" in complete("monai-gds ca", shell)
    assert "verify" in complete("monai-gds cache ver", shell)
    assert "--measure" in complete("monai-gds doctor --me", shell)


def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = as_a_user("--show-completion", "bash", **environment)
    assert shown.returncode == 0, shown.stderr
    assert "complete" in shown.stdout
    installed = as_a_user("--install-completion", "bash", **environment)
    assert installed.returncode == 0, installed.stderr
    assert any(path.is_file() and "complet" in path.read_text() for path in tmp_path.rglob("*"))


def test_done_joins_both_streams() -> None:
    assert Done(0, "│ a\n│ b", "\nc").output == "a b c"
