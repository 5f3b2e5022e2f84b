"""README.md and the pages of docs/: links lead somewhere, examples run, figures are those of saved runs."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
import torch.distributed as dist

import monai_gds
from monai_gds.bench.made_up import write_volumes
from monai_gds.storage import Reads, Storage
from tests.fresh import warm
from tests.loopdisk import loop_device, needs_root
from tests.loopdisk import run as on_machine
from tests.machines import ROOT
from tests.storage.xnvme import libraries
from tests.tools import load_tool

DOCS = ROOT / "docs"
GENERATED = DOCS / "generated"
PAGES = [*ROOT.glob("*.md"), *(page for page in DOCS.rglob("*.md") if GENERATED not in page.parents)]

each = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

#: What the reader has: a page's examples define everything else.
READERS_OWN = {"items", "transform", "dataset", "local_rank", "ranks_per_node"}


def examples(page: Path) -> list[str]:
    """The Python code of a page, also where it is indented in a list."""
    found = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    return ["".join(line.removeprefix(indent) for line in code.splitlines(True)) for indent, code in found]


def undefined(code: str) -> set[str]:
    """Names that this code uses and neither imports nor sets."""
    nodes = list(ast.walk(ast.parse(code)))
    known = {
        alias.asname or alias.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names
    }
    known |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    known |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names = [n for n in nodes if isinstance(n, ast.Name)]
    known |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return {n.id for n in names} - known - set(dir(builtins)) - {"__name__"}


@each
def test_the_examples_import_what_they_use(page: Path) -> None:
    assert undefined("".join(examples(page))) - READERS_OWN == set()


@each
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        if "generated/" not in link:  # made when the site is built, which finds those
            assert (page.parent / " ".join(link.split())).exists(), link


def test_every_public_name_has_a_place_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"auto(?:class|function):: (?:monai_gds\.)?(\w+)$", text, re.MULTILINE))
    in_errors = {name for name in monai_gds.__all__ if hasattr(monai_gds.errors, name)}
    assert "automodule:: monai_gds.errors" in text
    assert set(monai_gds.__all__) - shown - in_errors == {"__version__"}


def test_every_saved_run_is_shown_and_nothing_else_is() -> None:
    text = "".join(page.read_text() for page in (DOCS / "benchmarks").glob("*.md"))
    shown = re.findall(r"{benchmark} (\S+)", text)
    saved = sorted(str(path.relative_to(ROOT / "benchmarks")) for path in (ROOT / "benchmarks").rglob("*.json"))
    assert sorted(shown) == saved


def test_the_figure_in_front_has_every_row_of_the_saved_run_and_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="this machine has no matplotlib")
    found = json.loads((ROOT / "benchmarks/h100/training.json").read_text())
    (report,) = found["reports"]
    drawn = [text.strip() for text in re.findall(r">([^<>]*)</text>", (ROOT / "benchmarks/training.svg").read_text())]
    told = re.search(r"!\[(Seconds per epoch.*?)\]", (ROOT / "README.md").read_text())
    assert told is not None
    for row in report["rows"]:
        name = row["name"].replace("n workers", f"{found['about']['workers']} workers")
        assert name in " ".join(drawn)
        if row["samples"]:
            seconds = f"{row['figures']['epoch, s']['median']:.2f}"
            assert f"{seconds} ({row['median']:.2f})" in drawn
            assert f"{name} {seconds} s ({row['median']:.2f})" in told[1]
        else:
            assert "not here" in drawn and row["reason"] in told[1]
    (ceiling,) = report["ceilings"]
    assert f"{ceiling['name']}: {ceiling['figures']['epoch, s']['median']:.2f}" in drawn
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    load_tool("figures").write(readme, tmp_path / "training.svg")
    assert readme.read_text() == (ROOT / "README.md").read_text(), "python tools/figures.py writes it again"
    (axes,) = load_tool("figures").picture(*load_tool("figures").seconds()).axes
    assert len(axes.patches) == len(report["rows"])


def test_what_a_benchmark_printed_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="this machine has no matplotlib")
    load_tool("figures").main([str(ROOT / "benchmarks/h100/training.json"), str(tmp_path / "bars.png")])
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_short_memory_has_every_row_of_its_run() -> None:
    (report,) = json.loads((ROOT / "benchmarks/cpu/memory.json").read_text())["reports"]
    lines = (ROOT / "README.md").read_text().splitlines()
    for row in report["rows"]:
        read = f"{sum(row['samples']):.0f}" if row["samples"] else "killed"
        assert [line for line in lines if line.startswith(f"| {row['name']} | {read} | ")], row["name"]


def test_the_ratios_of_latency_are_those_of_its_run() -> None:
    reports = json.loads((ROOT / "benchmarks/cpu/latency.json").read_text())["reports"]
    run = {report["title"]: {row["name"]: row for row in report["rows"]} for report in reports}
    names = {"one read of all": "posix, one read of all", "a read of each": "posix, a read of each"}
    lines = re.findall(r"^\| ((?:images|records|files) .*) \|$", (DOCS / "benchmarks/latency.md").read_text(), re.M)
    assert len(lines) == 6
    for line in lines:
        what, *told = line.split(" | ")
        kind, _, how = what.replace("files", "records").partition(", ")
        name = {"images": f"FileReader, {how}"}.get(kind.split()[0]) or names.get(how, "GDSDataLoader, batches of 32")
        for delay, ratio in ("1", told[0]), ("10", told[1]), ("50", told[3]):
            rows = run[f"1024 {kind}, {delay} ms per open"]
            found = rows[name]["median"] / rows["pread, 64 threads"]["median"]
            assert found == pytest.approx(float(ratio), abs=0.006), (what, delay)
        assert run[f"1024 {kind}, 10 ms per open"][name]["notes"]["opens in flight"] == told[4]


def test_a_row_that_could_not_run_stays_in_the_figure() -> None:
    pytest.importorskip("matplotlib", reason="this machine has no matplotlib")
    tool = load_tool("figures")
    about, report = tool.seconds()
    missing = replace(report.rows[1], samples=(), notes={}, reason="needs kvikio")
    report = replace(report, rows=[report.rows[0], missing])
    assert f"{missing.name} not here: needs kvikio;" in tool.words(about, report)["figure"]
    (axes,) = tool.picture(about, report).axes
    assert "not here" in [text.get_text().strip() for text in axes.texts]


def test_a_browser_finds_what_is_wrong_with_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("playwright", reason="this machine has no playwright")
    tool = load_tool("browse")
    if tool.chromium() is None:
        pytest.skip("this machine has no Chromium")
    head = '<meta name="viewport" content="width=device-width">'
    hits = '<li><a href="reference/datasets.html">1</a><a href="howto/cleaning.html">2</a></li>'
    (tmp_path / "search.html").write_text(f'{head}<ul id="search-results">{hits}</ul>')
    for name in ("reference/datasets.html", "howto/cleaning.html"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f'{head}<p id="here">fine</p>')
    page = tmp_path / "index.html"
    page.write_text(f'{head}<a href="howto/cleaning.html#here">good</a><a href="https://example.org">not looked at</a>')
    assert tool.browse(tmp_path) == 0
    page.write_text(
        f'{head}<a href="nowhere.html">a</a><a href="howto/cleaning.html#nope">b</a><img src="none.png">'
        '<img src="too.png" alt="too.png">'
        '<details><div style="width: 900px">wide</div></details><script>undefinedFunction()</script>'
        '<div style="height: 900px"></div><div class="first-page"><pre>code</pre></div>'
    )
    assert tool.browse(tmp_path) == 1
    said = capsys.readouterr().out
    for what in (
        "nowhere.html leads nowhere", "cleaning.html#nope leads nowhere", "none.png does not load",
        "none.png has no alternative text", "too.png has no alternative text",
        "undefinedFunction is not defined", "pixels wide, and a phone has 390",
        "below a screen of ",
    ):  # fmt: skip
        assert what in said


# ---------------------------------------------------------------------------------------------------------------------
# The examples run


@pytest.fixture
def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Two volumes under the names that the examples use, in the working directory."""
    items = []
    for number, item in enumerate(write_volumes(tmp_path / "made", 2, (48, 48, 40)), 1):
        items.append(
            {key: str(tmp_path / f"{short}_{number}.nii.gz") for key, short in (("image", "ct"), ("label", "seg"))}
        )
        for key, path in items[-1].items():
            Path(item[key]).rename(path)
    monkeypatch.chdir(tmp_path)
    return items


def run(code: str, folder: Path, **names: Any) -> dict[str, Any]:
    """Executes an example whose cache is below ``folder``."""
    names = {"__name__": "example", **names}
    exec(f"from __future__ import annotations\n{code}".replace("/nvme/cache", str(folder / "cache")), names)
    return names


def test_the_first_example_runs_as_pasted_and_prints_a_table(tmp_path: Path) -> None:
    (code,) = examples(ROOT / "README.md")
    assert len(code.strip().splitlines()) <= 16
    done = warm().run("-c", code, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows] == [
        ["epoch 1", "2 computed", "0 read"],
        ["epoch 2", "0 computed", "2 read"],
        ["epoch 3", "0 computed", "2 read"],
    ]
    assert all(row[4] == "(1, 1, 96, 96, 96)" for row in rows)
    assert done.stderr == ""


def test_the_example_of_ones_own_training(
    tmp_path: Path, volumes: list[dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run(examples(DOCS / "start.md")[0], tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(line.startswith("torch.Size([1, 1, ") for line in printed)


def transform_of(folder: Path) -> Any:
    """What the examples call ``transform``."""
    names = run("".join(examples(DOCS / "start.md")[0].partition("data = ")[0]), folder)
    return names["Compose"](names["steps"])


def test_patches(tmp_path: Path, volumes: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = examples(DOCS / "howto/patches.md")
    run(code, tmp_path, items=volumes)
    assert capsys.readouterr().out.count("torch.Size([4, 1, 32, 32, 32])") == 2


def test_moving_and_misses(tmp_path: Path, volumes: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    code, eager, patched = examples(DOCS / "howto/moving.md")
    run(patched, tmp_path)
    names = {"items": volumes * 2, "transform": transform_of(tmp_path)}
    dataset = run(code, tmp_path, **names)["dataset"]
    assert run(eager, tmp_path, **names, GDSDataset=type(dataset))["dataset"].is_cached(0)
    (code,) = examples(DOCS / "howto/misses.md")
    run(code, tmp_path, dataset=dataset)
    assert "Spacingd" in capsys.readouterr().out


def test_fill(tmp_path: Path, volumes: list[dict[str, str]]) -> None:
    pytest.importorskip("isal", reason="this machine has no python-isal")
    populate, ray, code, skipping = examples(DOCS / "howto/fill.md")
    assert run(ray, tmp_path)["RayExecutor"]()
    load = run(code, tmp_path)["load"]
    dataset = monai_gds.GDSDataset(volumes, load, tmp_path / "cache", "cpu")
    run(populate, tmp_path, dataset=dataset)
    assert all(map(dataset.is_cached, range(2)))
    dataset = monai_gds.GDSDataset(volumes * 20, load, tmp_path / "cache", "cpu")
    dataset.data[7] = {**dataset.data[7], "image": str(tmp_path / "cut.nii.gz")}
    (tmp_path / "cut.nii.gz").write_bytes(Path(volumes[0]["image"]).read_bytes()[:1000])
    with pytest.warns(monai_gds.errors.CacheWarning, match="1 item was skipped in this epoch"):
        assert len(list(run(skipping, tmp_path, dataset=dataset)["loader"])) == 40


def test_profile(tmp_path: Path, volumes: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = examples(DOCS / "howto/profile.md")
    dataset = monai_gds.GDSDataset(volumes, transform_of(tmp_path), tmp_path / "cache", "cpu")
    run(code, tmp_path, dataset=dataset)
    assert "2 computed items" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::Warning:lightning")
def test_lightning(tmp_path: Path, volumes: list[dict[str, str]]) -> None:
    pytest.importorskip("lightning", reason="this machine has no Lightning")
    (code,) = examples(DOCS / "howto/lightning.md")
    names = run(code, tmp_path, items=volumes, transform=transform_of(tmp_path))
    assert names["trainer"].global_step == 4  # two items, two epochs


@pytest.mark.filterwarnings("ignore::Warning:torchio")
def test_torchio(tmp_path: Path, volumes: list[dict[str, str]]) -> None:
    tio = pytest.importorskip("torchio", reason="this machine has no TorchIO")
    names = run("".join(examples(DOCS / "howto/torchio.md")), tmp_path, items=volumes)
    assert names["batch"]["image"].shape == names["batch"]["label"].shape == (2, 1, 48, 48, 48)
    steps = names["transform"].transforms
    dataset = monai_gds.GDSDataset(names["subjects"], steps[0], tmp_path / "cache", "cpu")
    assert dataset.is_cached(0)
    ours, theirs = dataset[0], tio.SubjectsDataset(names["subjects"], steps[0])[0]
    assert ours.applied_transforms == theirs.applied_transforms != []
    for name in ("image", "label"):
        assert type(ours[name]) is type(theirs[name])
        assert torch.equal(ours[name].data, theirs[name].data)
        assert np.array_equal(ours[name].affine, theirs[name].affine)
        assert ours[name].path == theirs[name].path

    def epoch() -> list[Any]:
        torch.manual_seed(0)
        return [batch["image"] for batch in monai_gds.GDSDataLoader(names["dataset"], batch_size=1, num_workers=2)]

    warm = epoch()
    for record in (tmp_path / "cache").glob("*.safetensors"):
        record.unlink()
    assert all(map(torch.equal, epoch(), warm))


def test_huggingface(tmp_path: Path, volumes: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pytest.importorskip("datasets", reason="this machine has no Hugging Face datasets").Dataset
    names = run("".join(examples(DOCS / "howto/huggingface.md")), tmp_path, items=volumes)
    pipeline = names["Compose"](names["transform"].transforms[:2])
    expected = [pipeline(number)["image"] for number in range(2)]
    monkeypatch.setattr(rows, "__getitem__", None)
    dataset = monai_gds.GDSDataset([1, 0], pipeline, tmp_path / "cache", "cpu")
    for number, item in enumerate(dataset):
        assert torch.equal(item["image"], expected[1 - number])
        assert torch.equal(item["image"].affine, expected[1 - number].affine)


def test_augment(tmp_path: Path, volumes: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = examples(DOCS / "howto/augment.md")
    run(code, tmp_path, items=volumes)
    assert len(capsys.readouterr().out.splitlines()) == len(volumes)


def test_programs(tmp_path: Path, volumes: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = examples(DOCS / "explanation/programs.md")
    with monai_gds.GDSDataset(volumes, transform_of(tmp_path), tmp_path / "cache", "cpu") as dataset:
        run(code, tmp_path, dataset=dataset)
    assert "item 0 is a hit" in capsys.readouterr().out


def test_resume(tmp_path: Path, volumes: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    code, of_ranks = examples(DOCS / "howto/resume.md")
    transform = transform_of(tmp_path)
    run(code.replace("steps = 0, 6", "steps = 0, 5"), tmp_path, items=volumes, transform=transform)
    run(code, tmp_path, items=volumes, transform=transform)
    steps = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == [*"01234345"]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        run(of_ranks.replace('"last"', '"folder"'), tmp_path, items=volumes, transform=transform)
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_ddp(tmp_path: Path, volumes: list[dict[str, str]]) -> None:
    script, _ = examples(DOCS / "howto/ddp.md")
    steps = examples(DOCS / "start.md")[0].partition("data = ")[0]
    (tmp_path / "training.py").write_text(f"{steps}\nitems = {volumes!r}\ntransform = Compose(steps)\n")
    (tmp_path / "train.py").write_text(script.replace("/nvme/cache", str(tmp_path / "cache")))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # A file for each rank: in one pipe their lines may be mixed up.
    command = [*run, "--redirects", "3", "--log-dir", str(tmp_path / "logs"), "train.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = "".join(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    lines = [line for line in printed.splitlines() if "(1, 1, " in line]
    assert sorted(line[0] for line in lines) == ["0", "0", "1", "1"]


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nvidia.dali", reason="this machine has no DALI")
    from monai_gds.bench.made_up import write_image_folder

    train = write_image_folder(tmp_path / "imagenet/train", 64)
    (tmp_path / "imagenet/val").symlink_to(train / "n01440764")  # a flat folder
    kit = tmp_path / "ILSVRC2012_devkit_t12/data"
    kit.mkdir(parents=True)
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("num_children", object)]
    synsets = [(1, "n03", 0), (2, "n01", 0), (3, "n02", 0), (1001, "n00", 2)]  # the last one has classes below it
    scipy.io.savemat(kit / "meta.mat", {"synsets": np.array(synsets, fields)})
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n3\n1\n" * 16)
    monkeypatch.chdir(tmp_path)
    names = run("".join(examples(DOCS / "howto/images.md")), tmp_path)
    assert "torch.Size([64, 224, 224, 3])" in capsys.readouterr().out
    assert next(iter(names["validation"]))["label"].tolist() == [2, 0, 1, 2] * 16


def test_a_disk_made_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_root("mkfs.ext4")
    (tmp_path / "any.img").write_bytes(bytes(1 << 20))
    with loop_device(tmp_path / "any.img"):  # this machine gives them
        pass
    page = (DOCS / "howto/drives.md").read_text()
    (shown,) = re.findall(r"```console\n(\$ truncate.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    Path("scan.nii.gz").write_bytes(bytes(range(256)) * 8)
    double = libraries.Double()
    try:
        with libraries.using("double"):
            told = on_machine("sh", "-ec", shown.replace("$ ", ""))
            run(examples(DOCS / "howto/drives.md")[1], tmp_path)
    finally:
        subprocess.run(["umount", "mounted"], check=False)
    assert "blocks: ok" in told
    assert capsys.readouterr().out == "True\n"
    assert double.count("reads"), "the bytes came from the device"


def test_the_backend_of_ones_own_reads(tmp_path: Path) -> None:
    code, contract = examples(DOCS / "howto/backend.md")
    names = run(f"{code}\n{contract}", tmp_path)
    (tmp_path / "file.bin").write_bytes(bytes(range(100)))
    storage = Storage(names["MyDriveBackend"](torch.device("cpu")))
    (tensor,) = storage.load(Reads.of(str(tmp_path / "file.bin"), [(10, 5)])).wait()
    assert tensor.tolist() == [10, 11, 12, 13, 14]
