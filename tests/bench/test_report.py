"""The tables and JSON that the benchmarks share."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from monai_gds.bench.report import Report, Row, emit, machine
from monai_gds.errors import BackendUnavailable

ROWS = [
    Row("python", (1.0, 0.5, 2.0), notes={"page cache": "warm"}),
    Row("fast [x]", (4.0, 4.0, 5.0)),
    Row("absent", reason="libfoo is missing"),
]
REPORT = Report("load, CPU", "GB/s", ROWS, reference="python")
ABOUT = {"date": "2026-01-01", "cores": 2}


def text_of(*reports: Report) -> str:
    with redirect_stdout(io.StringIO()) as out:
        emit(reports, as_json=False, about=ABOUT)
    return out.getvalue()


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if name in line)


def test_a_row_shows_median_spread_and_ratio() -> None:
    line = line_of(text_of(REPORT), "fast [x]")
    assert "4.00" in line
    assert "4.00 to 5.00" in line
    assert [cell.strip() for cell in line.split("│")][4] == "4.00"  # the ratio to python's median of 1.0


def test_a_competitor_that_cannot_run_says_why() -> None:
    assert "absent" in line_of(text_of(REPORT), "│ absent")
    assert "\nabsent: libfoo is missing\n" in text_of(REPORT)


def test_a_row_of_several_tables_says_why_once() -> None:
    absent = Row("xnvme", reason="no libxnvme was found")
    text = text_of(*(Report(title, "GB/s", [absent, Row("posix", (1.0,))]) for title in ("CPU", "GPU")))
    assert text.count("\nxnvme: no libxnvme was found\n") == 1


def test_figures_become_columns_with_their_ranges() -> None:
    figures = {"wait, ms": (3.0, 1.0, 20.0), "first epoch, s": (5.0,)}
    report = Report("t", "x", [Row("a", (1.0,), figures=figures), Row("b", (1.0,), notes={"wait, ms": "unknown"})])
    text = text_of(report)
    assert "wait, ms" in text and "first epoch, s" in text
    assert [cell.strip() for cell in line_of(text, "│ a").split("│")][4:6] == ["3.00 (1.00 to 20.0)", "5.00"]
    assert [cell.strip() for cell in line_of(text, "│ b").split("│")][4:6] == ["unknown", ""]
    (row, _) = report.as_dict()["rows"]
    assert row["figures"]["wait, ms"] == {"median": 3, "lowest": 1, "highest": 20, "samples": [3, 1, 20]}


def test_json_into_a_file_comes_beside_the_tables(tmp_path: Path) -> None:
    with redirect_stdout(io.StringIO()) as out:
        emit([REPORT], as_json=tmp_path / "found.json", about=ABOUT)
    assert json.loads((tmp_path / "found.json").read_text())["about"] == ABOUT
    assert "4.00 to 5.00" in line_of(out.getvalue(), "fast [x]")


def test_notes_become_columns_and_the_machine_is_named() -> None:
    text = text_of(REPORT)
    assert "page cache" in text
    assert "warm" in line_of(text, "│ python")
    assert "cores: 2" in text


def test_without_a_reference_there_is_no_ratio() -> None:
    report = Report("t", "items/s", ROWS)
    assert report.ratio(ROWS[1]) is None
    assert "times" not in text_of(report)


def test_a_reference_that_did_not_run_gives_no_ratio() -> None:
    assert Report("t", "GB/s", ROWS, reference="absent").ratio(ROWS[1]) is None


def test_json_holds_every_sample(capsys: pytest.CaptureFixture[str]) -> None:
    emit([REPORT], as_json=True, about=ABOUT)
    got = json.loads(capsys.readouterr().out)
    assert got["about"] == ABOUT
    rows = got["reports"][0]["rows"]
    assert rows[0]["samples"] == [1.0, 0.5, 2.0]
    assert (rows[1]["median"], rows[1]["lowest"], rows[1]["highest"], rows[1]["ratio"]) == (4.0, 4.0, 5.0, 4.0)
    assert (rows[2]["median"], rows[2]["ratio"], rows[2]["reason"]) == (None, None, "libfoo is missing")


@pytest.mark.parametrize("as_json", [True, False])
def test_where_nothing_could_be_measured_the_reasons_are_printed_and_it_is_a_failure(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BackendUnavailable, match="nothing could be measured"):
        emit([Report("t", "GB/s", ROWS[2:])], as_json=as_json, about=ABOUT)
    assert "libfoo is missing" in capsys.readouterr().out


def test_a_notebook_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "command" in machine()
    monkeypatch.setattr("sys.argv", ["/lib/ipykernel_launcher.py", "-f", "/tmp/some.json"])
    assert "command" not in machine()
