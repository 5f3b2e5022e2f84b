"""Compiling DeepSpeed's operators: what is said, what is missing, failures, and builds that were killed.

The compiler is a script of the test's own wherever that shows the same: a real build takes minutes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from monai_gds.errors import BackendUnavailable
from monai_gds.storage import available_backends, open_storage
from monai_gds.storage.deepnvme import build
from tests.fresh import warm
from tests.polls import until


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for built operators; DeepSpeed is there, and so is everything that compiling needs."""
    if build._deepspeed_version() is None:  # its import takes seconds
        pytest.skip("deepspeed is not installed on this machine")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_missing", lambda operator: [])
    return tmp_path


@pytest.fixture
def tools() -> None:
    """What DeepSpeed itself looks for before it compiles; to be named before ``root``, which hides what is missing."""
    if missing := build._missing("aio"):
        pytest.skip(f"this machine has no {', no '.join(missing)}")


def make_compiler(folder: Path, does: str) -> Path:
    """A compiler that answers questions about its version, and else does what it is told here."""
    compiler = folder / "c++"
    questions = '*--version*|*-dump*) exec /usr/bin/env -i "PATH=$PATH" c++ "$@";;'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in {questions} esac\n{does}\n')
    compiler.chmod(0o755)
    return compiler


def pretend_child(work: Path) -> None:
    (work / "async_io").mkdir()
    (work / "async_io" / "async_io.so").write_bytes(b"not really")


def test_says_what_it_is_about_to_do_and_what_it_needs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def child(operator: str, work: Path, log: Path) -> int:
        assert any("g++" in line and "libaio-dev" in line and "minutes" in line for line in said)
        pretend_child(work)
        return 0

    monkeypatch.setattr(build, "_run_child", child)
    target = build.build("aio", said.append)
    assert sorted(os.listdir(target)) == ["async_io.so"]
    assert build.built("aio")
    assert sorted(os.listdir(target.parent)) == ["aio", "aio.lock"]
    monkeypatch.setattr(build, "_run_child", lambda *_: pytest.fail("built twice"))
    build.build("aio", said.append)
    assert str(target) in said[-1]


def test_building_ahead_leaves_out_what_this_machine_cannot_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_run_child", lambda operator, work, log: pretend_child(work) or 0)
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    said: list[str] = []
    assert build.build_ahead(said.append) == [build.build_directory("aio")]
    assert said[-1] == "gds is left out: there is no CUDA device"


def test_a_failed_build_shows_the_compilers_last_lines_and_leaves_nothing(
    tools: None, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real child, ninja and all, and a compiler that fails."""
    compiler = make_compiler(root, "echo 'pages.cpp:1:2: error: something is wrong' >&2; exit 1")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BackendUnavailable, match=r"pages\.cpp:1:2: error: something is wrong"):
        build.build("aio", lambda line: None)
    parent = build.build_directory("aio").parent
    assert os.listdir(parent) == ["aio.lock"]


def test_a_build_that_was_killed_stops_nobody(tools: None, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills a builder in the middle, compilers and all, and builds again."""
    compiler = make_compiler(root, f"echo $$ >> {root}/started; exec sleep 300")
    environment = {**os.environ, "CXX": str(compiler)}
    script = (
        "from monai_gds.storage.deepnvme import build as b\nb._missing = lambda operator: []\nb.build('aio', print)\n"
    )
    first = warm().program("-c", script, env=environment)
    until((root / "started").exists)
    first.send_signal(signal.SIGKILL)
    first.result()
    monkeypatch.setattr(build, "_run_child", lambda operator, work, log: pretend_child(work) or 0)
    target = build.build("aio", lambda line: None)
    assert sorted(os.listdir(target.parent)) == ["aio", "aio.lock"]
    for pid in (root / "started").read_text().split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_two_builders_at_once_build_once(root: Path) -> None:
    script = f"""
import time
from pathlib import Path
from monai_gds.storage.deepnvme import build as b
b._missing = lambda operator: []
def child(operator, work, log):
    with open({str(root / "builds")!r}, "a") as f:
        f.write("built ")
    time.sleep(0.3)
    (work / "async_io").mkdir()
    (work / "async_io" / "async_io.so").touch()
    return 0
b._run_child = child
b.build("aio", print)
"""
    both = [warm().program("-c", script) for _ in range(2)]
    done = [program.result() for program in both]
    assert [one.returncode for one in done] == [0, 0]
    assert (root / "builds").read_text() == "built "
    assert sum("another process is compiling" in one.stdout for one in done) <= 1


def test_says_that_it_waits_for_another_builder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build.build_directory("aio")
    target.parent.mkdir(parents=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def say(line: str) -> None:
            said.append(line)
            pretend_finished()
            fcntl.flock(lock, fcntl.LOCK_UN)

        def pretend_finished() -> None:
            target.mkdir()
            (target / "async_io.so").touch()

        said: list[str] = []
        monkeypatch.setattr(build, "_run_child", lambda *_: pytest.fail("built a second time"))
        build.build("aio", say)
    assert said == ["another process is compiling DeepSpeed's async_io; waiting for it"]


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_deepspeed_version", lambda: "0.19.8")
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendUnavailable) as caught:
        open_storage("deepnvme", "cpu")
    for name in ("Debian: g++", "ninja-build", "python3-dev", "doctor --build deepnvme"):
        assert name in str(caught.value)
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    assert "libaio-dev" in available_backends("cpu")["deepnvme"].reason


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_deepspeed_version", lambda: None)
    monkeypatch.setattr(build, "_loaded", {})
    with pytest.raises(BackendUnavailable, match=r"monai_gds\[deepnvme\]"):
        open_storage("deepnvme", "cpu")


def test_something_built_that_cannot_be_loaded_is_an_error_that_says_what_to_remove(root: Path) -> None:
    target = build.build_directory("aio")
    target.mkdir(parents=True)
    (target / "async_io.so").write_bytes(b"not a library")
    with pytest.raises(BackendUnavailable) as caught:
        build.load("aio")
    assert str(target) in str(caught.value)


def compile_with(tmp_path: Path, operator: str, sources: list[str], load: str) -> str:
    """Has the child compile these files with builders of a made-up DeepSpeed; returns what their ``load`` printed."""
    package = tmp_path / "deepspeed" / "ops"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "op_builder.py").write_text(f"""
import subprocess, torch
class AsyncIOBuilder:
    def deepspeed_src_path(self, path): return {str(tmp_path)!r} + "/" + path
    def sources(self): return {[*build._CHANGES, *sources]!r}
    def include_paths(self): return [str(torch.utils.cpp_extension.CUDA_HOME)]
    def cxx_args(self): return []
    def jit_load(self, verbose): {load}
class GDSBuilder(AsyncIOBuilder): pass
""")
    for name in ("aio", "gds", "pin_memory"):
        (tmp_path / "csrc" / name).mkdir(parents=True, exist_ok=True)
    for path in build._ALLOCATOR:
        (tmp_path / path).touch()
    (tmp_path / "work").mkdir()
    command = ("-m", "monai_gds.storage.deepnvme.build", operator, str(tmp_path / "work"))
    done = warm().run(*command, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_deepspeed_takes_for_imported_is_imported(tmp_path: Path) -> None:
    """On a machine with CUDA its builders ask ``torch.utils.cpp_extension``, which they do not import."""
    assert "compiled" in compile_with(tmp_path, "aio", [], 'print("compiled", self.include_paths())')


@pytest.mark.skipif(shutil.which("c++") is None, reason="this machine has no C++ compiler")
@pytest.mark.parametrize(("operator", "code"), [("gds", 3), ("aio", -signal.SIGABRT)])
def test_gds_ends_its_process_without_what_waits_at_the_end_of_one(tmp_path: Path, operator: str, code: int) -> None:
    (tmp_path / "csrc" / "gds").mkdir(parents=True)
    (tmp_path / "csrc" / "gds" / "ends.cpp").write_text("""
#include <cstdlib>
struct AtTheEnd { ~AtTheEnd() { abort(); } } at_the_end;
int main() { exit(3); }
""")
    program = tmp_path / "program"
    load = f'subprocess.run(["c++", self.sources()[-1], "-o", {str(program)!r}], check=True)'
    compile_with(tmp_path, operator, ["csrc/gds/ends.cpp"], load)
    assert subprocess.run([program], check=False).returncode == code
