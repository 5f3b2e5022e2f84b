"""``monai-gds run``: a script that knows nothing of us gets our datasets, and so do the processes that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from monai_gds.command.main import app
from tests.machines import ROOT

SCRIPT = """
import json, multiprocessing, os, sys

if __name__ == "__mp_main__":
    from monai_gds import GDSDataset  # ours first, in a spawned process
import monai.data
from helper import NAME
from monai.data import CacheDataset, DataLoader, Dataset
from monai.transforms import Compose, EnsureTyped


def home():
    dataset = CacheDataset([{"image": [1.0]}] * 2, Compose([EnsureTyped("image")]), progress=False)
    return [type(dataset).__mro__[1].__module__, type(DataLoader(dataset)).__name__, __name__]


def send(connection):
    connection.send(home())


if __name__ == "__main__":
    found = {"here": home(), "argv": sys.argv, "helper": NAME, "rank": os.environ.get("RANK")}
    if "--children" in sys.argv:
        for method in ("spawn", "fork"):
            context = multiprocessing.get_context(method)
            ours, theirs = context.Pipe()
            child = context.Process(target=send, args=(theirs,))
            child.start()
            theirs.close()
            found[method] = ours.recv()
            child.join()
    print(json.dumps(found))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").write_text(SCRIPT)
    (tmp_path / "lab" / "helper.py").write_text("NAME = 'beside the script'\n")
    return tmp_path / "lab" / "train.py"


def run(folder: Path, *command: str, before: tuple[str, ...] = (), **environment: str) -> Any:
    """Runs a command in a fresh process, and gives it with what it printed."""
    line = [sys.executable, *before, "-m", "monai_gds", "run", "--cache-dir", str(folder / "cache"), *command]
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(line, cwd=folder, env=given, text=True, capture_output=True)
    return done, [json.loads(one) for one in done.stdout.splitlines() if one.startswith("{")]


OURS = ["monai_gds.swap.cached", "GDSDataLoader"]


def test_a_script_and_all_that_it_starts(script: Path, tmp_path: Path) -> None:
    own = tmp_path / "site"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = 'was run'\n")
    done, (found,) = run(tmp_path, str(script), "--children", "-m", "--lr", "1", PYTHONPATH=f"{ROOT}:{own}")
    assert done.returncode == 0, done.stderr
    assert found["argv"] == [str(script), "--children", "-m", "--lr", "1"] and found["helper"] == "beside the script"
    assert (found["here"], found["spawn"]) == ([*OURS, "__main__"], [*OURS, "__mp_main__"])
    assert found["fork"] == [*OURS, "__main__"]
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1


def test_a_module_whose_error_is_its_own(tmp_path: Path) -> None:
    shows = "import json, sys\nprint(json.dumps({'name': __name__, 'argv': sys.argv[1:]}))\n"
    (tmp_path / "fails.py").write_text(f"{shows}raise ValueError('of the module')\n")
    done, found = run(tmp_path, "-m", "fails", "--lr", "1")
    assert (done.returncode, found) == (1, [{"name": "__main__", "argv": ["--lr", "1"]}])
    assert "ValueError: of the module" in done.stderr and "monai_gds/" not in done.stderr


LATE = """
import atexit, json, pickle, sys, threading


class Mine:
    pass


def sent(place):
    again = pickle.loads(pickle.dumps(Mine()))
    print(json.dumps({place: [type(again).__module__, type(again) is sys.modules["__main__"].Mine]}))


def when_it_has_ended():
    threading.main_thread().join()
    sent("thread")


atexit.register(sent, "atexit")
threading.Thread(target=when_it_has_ended).start()
"""


def test_threads_and_exit_handlers_that_outlive_the_last_line_are_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    done, found = run(tmp_path, "late.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert found == [{place: ["__main__", True]} for place in ("thread", "atexit")]


def test_ctrl_c_shows_where_the_script_was(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)  # here\n")
    done, _ = run(tmp_path, "stopped.py")
    assert done.returncode == -signal.SIGINT
    assert "os.kill(os.getpid(), signal.SIGINT)  # here" in done.stderr
    assert "KeyboardInterrupt" in done.stderr and "monai_gds" not in done.stderr


def test_options_of_python_stay(tmp_path: Path) -> None:
    names = '{"O": sys.flags.optimize, "W": sys.warnoptions, "u": sys.stdout.write_through}'
    (tmp_path / "options.py").write_text(f"import json, sys\nprint(json.dumps({names}))\n")
    _, found = run(tmp_path, "options.py", before=("-u", "-O", "-W", "error::UserWarning"), PYTHONUNBUFFERED="")
    assert found == [{"O": 1, "W": ["error::UserWarning"], "u": True}]


@pytest.mark.long
def test_below_torchrun(script: Path, tmp_path: Path) -> None:
    before = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done, found = run(script.parent, "train.py", before=before)
    assert done.returncode == 0, done.stderr
    assert sorted(one["rank"] for one in found) == ["0", "1"] and all(one["here"][:2] == OURS for one in found)


def test_what_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "--cache-dir", str(tmp_path), "no_such.py"])
    assert result.exit_code == 2 and "there is no script" in result.output
