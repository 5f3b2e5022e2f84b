"""No name of a file, a folder or a disk commands the terminal, wherever it is shown: warnings, errors, tables, text.

For ``monai-gds cache`` see tests/command/test_cache.py.
"""

from __future__ import annotations

import io
import json
import linecache
import re
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
import torch
from monai.transforms import Compose, EnsureTyped
from rich.table import Table
from torch.utils.data import DataLoader

from monai_gds.base import console
from monai_gds.command import doctor as doctor_cli
from monai_gds.dataset.dataset import GDSDataset
from monai_gds.doctor import Diagnosis
from monai_gds.errors import BlockMapError, BrokenImage, CacheWarning, StorageError, warn
from monai_gds.folder.maintenance import record_files
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk, Extent
from monai_gds.storage.blockmap.saved import FileBlocks, Origin
from tests.commands import run
from tests.doctor.laid import Laid, answers

EVIL = "\x1b]0;owned\x07\x1b[2J\r\u202e\x9b31m"
WRITTEN_OUT = r"\x1b]0;owned\x07\x1b[2J\r\u202e\x9b31m"


@pytest.fixture
def laid(tmp_path: Path) -> Laid:
    return Laid(tmp_path)


def is_harmless(text: str) -> bool:
    """Whether a text drives no terminal, and the evil name is in it all the same."""
    return WRITTEN_OUT in text and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


def filled(folder: Path) -> GDSDataset:
    """A dataset whose one record is damaged, in a folder of an evil name."""
    cache = folder / EVIL
    data = [{"image": torch.ones(1, 8, 8)}]
    with GDSDataset(data, Compose([EnsureTyped("image")]), cache, "cpu") as dataset:
        _ = dataset[0]
    for record in record_files(cache):
        record.write_bytes(b"damaged")
    return GDSDataset(data, Compose([EnsureTyped("image")]), cache, "cpu")


def test_a_warning_names_the_line_of_the_users_that_led_to_it(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to("/proc/none/here")
    with pytest.warns(CacheWarning, match="cannot be made") as given:
        _ = GDSDataset([1], [EnsureTyped("image")], tmp_path / "cache", "cpu")
    with pytest.warns(CacheWarning, match="not a record") as further:
        _ = next(iter(DataLoader(filled(tmp_path))))
    assert [one.filename for one in (*given, *further)] == [__file__, __file__]


@pytest.mark.parametrize("package", ["ignite.engine", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"])
def test_a_warning_within_a_trainer_names_the_line_that_begins_it(package: str) -> None:
    def run(step: Callable[[], None]) -> None:
        step()

    trainer = FunctionType(run.__code__, {"__name__": package})
    with pytest.warns(CacheWarning, match="it went wrong") as given:
        trainer(partial(warn, "it went wrong"))
    assert "trainer(partial" in linecache.getline(given[0].filename, given[0].lineno)


def test_a_warning_of_a_thread_shows_no_code_of_this_package() -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("it went wrong",))
        thread.start()
        thread.join()
    assert [one.filename for one in given] == ["sys"]


def test_in_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        _ = filled(tmp_path)[0]
    (damage,) = [one for one in given if issubclass(one.category, CacheWarning)]
    shown = warnings.formatwarning(damage.message, damage.category, damage.filename, damage.lineno, "")
    assert is_harmless(shown)


def test_in_what_a_dataset_tells(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    assert is_harmless(str(dataset))
    with pytest.warns(CacheWarning):
        assert is_harmless(dataset.explain(0))


def test_in_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / EVIL
    file.write_text("[]")
    with pytest.raises(BlockMapError) as caught:
        BlockMap.load(file)
    shown = "".join(traceback.format_exception_only(caught.value))
    assert is_harmless(shown)


@pytest.mark.parametrize("error", [BrokenImage(EVIL, "it is empty"), StorageError(5, f"{EVIL} ends early", "file")])
def test_in_errors_that_are_errors_of_python_too(error: Exception) -> None:
    assert is_harmless(str(error))


def test_in_a_block_map_that_anyone_may_have_written(tmp_path: Path) -> None:
    """Nor is a name that looks like markup taken for it."""
    evil = f"[/red]{EVIL}"
    origin = Origin(evil, evil, evil, 0, Disk("loop0", "7:0", 512, 1 << 20, 1 << 20))
    BlockMap({"a/b": FileBlocks(512, (Extent(0, 512, 512),))}, origin).save(tmp_path / "map.json")
    done = run("blockmap", "verify", tmp_path / "map.json")
    assert done.exit_code == 1, done.stderr
    assert is_harmless(done.stdout)
    assert done.stdout.count("[/red]") == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_in_what_the_doctor_shows(
    laid: Laid, monkeypatch: pytest.MonkeyPatch, terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (laid.cache / EVIL).mkdir()
    laid.cache = laid.cache / EVIL
    report = Diagnosis(laid.machine.place(laid.cache), "cpu", tuple(laid.findings(answers(gpu=False)).values()))
    screen = type(console.stdout)(force_terminal=terminal, color_system=None, width=4000)
    monkeypatch.setattr(doctor_cli, "stdout", screen)
    doctor_cli.show(report)
    assert is_harmless(capsys.readouterr().out)


def test_in_a_table_on_a_terminal() -> None:
    """The colours of the table itself stay."""
    table = Table(EVIL, title=EVIL)
    table.add_row(f"[red]{EVIL}[/red]")
    out = io.StringIO()
    type(console.stdout)(file=out, force_terminal=True, color_system="standard", width=200).print(table)
    assert out.getvalue().count(WRITTEN_OUT) == 3
    assert "\x1b[31m" in out.getvalue()
    assert "\x1b]0" not in out.getvalue()


def test_in_the_json_of_built_files_and_the_text_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    console.say(EVIL)
    console.say_lines([EVIL, json.dumps(EVIL)])
    said, listed, encoded = capsys.readouterr().out.splitlines()
    assert said == listed == WRITTEN_OUT
    assert json.loads(encoded) == EVIL
