"""Writing packed folders: whole or not at all, over executors, again where it ended, and with smaller images."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from monai_gds.base.units import bytes_of
from monai_gds.bench.made_up import jpeg
from monai_gds.command.main import app
from monai_gds.errors import BrokenImage, ImageListError
from monai_gds.imagenet import ImageNetDataset, open_images, pack_folder
from monai_gds.imagenet.files import packing
from monai_gds.imagenet.files.packed import INDEX, open_packed, verify_packed
from monai_gds.imagenet.files.resizing import smaller_jpeg
from monai_gds.shared.leases import Leases
from monai_gds.shared.owner import this_process
from monai_gds.storage import Storage
from monai_gds.storage.plain.posix import PosixBackend
from tests.imagenet.conftest import COUNT, samples_of_dali
from tests.machines import ROOT
from tests.polls import until

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed on this machine")


@pytest.mark.parametrize("file_bytes", [1, "1500", "1GB"])
def test_files_hold_what_they_should(folder: Path, tmp_path: Path, file_bytes: int | str) -> None:
    out = pack_folder(open_images(folder), tmp_path / "out", file_bytes=file_bytes)  # type: ignore[arg-type]
    assert out.bounds[-1] == COUNT
    most = bytes_of(file_bytes, "file_bytes")
    assert len(out.files) == (COUNT if most == 1 else 1 if most > 10**8 else len(out.files))
    assert all(count == 1 or nbytes <= most for count, nbytes in out.files[:, :2].tolist())


def test_nothing_half_written_is_taken_for_packed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Storage, path: str, buffers: Any, **_: Any) -> None:
        raise OSError(28, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "write", fail)
        with pytest.raises(OSError, match="No space left"):
            pack_folder(open_images(folder), tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out" / INDEX).exists()


def test_an_empty_image_and_a_full_folder_are_refused(copy_of: Callable[[], Path], tmp_path: Path) -> None:
    root = copy_of()
    with pytest.raises(ImageListError, match="not empty"):
        pack_folder(open_images(root), root)  # type: ignore[arg-type]
    bad = sorted(root.glob("*/*"))[3]
    bad.write_bytes(b"")
    with pytest.raises(BrokenImage, match=bad.name):
        pack_folder(open_images(root), tmp_path / "out")  # type: ignore[arg-type]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["pack", str(folder), str(tmp_path / "out"), "--file-mb", "1"])
    assert done.exit_code == 0, done.output
    assert "23 images of 4 classes in 2 files" in done.output
    assert len(open_packed(tmp_path / "out")) == COUNT
    assert runner.invoke(app, ["pack", str(tmp_path / "absent"), str(tmp_path / "x")]).exit_code == 2
    assert runner.invoke(app, ["pack", str(folder), str(tmp_path / "x"), "--file-mb", "0"]).exit_code == 2


# ---------------------------------------------------------------------------------------------------------------------
# Interrupted, and over executors


def content(packed: Path) -> list[tuple[str, bytes]]:
    return [(file.name, file.read_bytes()) for file in sorted(packed.iterdir())]


def written(monkeypatch: pytest.MonkeyPatch, fail_at: int = 10**9) -> list[str]:
    """Notes the files of images that are written. The disk is full at one of them."""
    names: list[str] = []
    being_written = packing.being_written

    def noting(directory: str, digest: str, path: str) -> Any:
        if "images-" in path:
            names.append(Path(path).name[:12])
            if len(names) == fail_at:
                raise OSError(28, "No space left on device", path)
        return being_written(directory, digest, path)

    monkeypatch.setattr(packing, "being_written", noting)
    return names


def interrupted(folder: Path, out: Path, **how: Any) -> None:
    """Packs two of the files, of which there are more than three."""
    with pytest.MonkeyPatch.context() as patch:
        written(patch, fail_at=3)
        with pytest.raises(OSError, match="No space left"):
            pack_folder(open_images(folder), out, file_bytes=3000, **how)  # type: ignore[arg-type]
    assert [file.name for file in sorted(out.iterdir())] == [
        "images-00000.safetensors", "images-00001.safetensors", "packing.json"
    ]  # fmt: skip


def test_packing_goes_on_where_it_ended(
    folder: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupted(folder, out)
    with pytest.raises(ImageListError, match="interrupted, run the same `monai-gds pack` again"):
        open_images(out)  # what is unfinished does not count
    place, _, _ = this_process().split(".")
    for name in (f"{0:032x}.{place}.999999999.5.0", f"{0:032x}.lease"):
        (out / ".tmp").mkdir(exist_ok=True)
        (out / ".tmp" / name).write_text(f"{place}.999999999.5.0")  # left by a process that was killed
    with pytest.raises(ImageListError, match="interrupted, run the same `monai-gds pack` again"):
        open_images(out)
    told: list[int] = []
    names = written(monkeypatch)
    pack_folder(open_images(folder), out, file_bytes=3000, progress=told.append)  # type: ignore[arg-type]
    files = open_packed(packed).files[:, 0].tolist()
    assert names == [f"images-{number:05d}" for number in range(2, len(files))]
    assert told == np.cumsum(files).tolist()
    assert content(out) == content(packed)


@pytest.mark.parametrize("max_side", [None, 20])
def test_what_is_packed_already_is_left_as_it_is_and_said(
    folder: Path, copy_of: Callable[[], Path], tmp_path: Path, max_side: int | None
) -> None:
    out = tmp_path / "out"
    root = copy_of()
    command = ["pack", str(root), str(out), "--file-mb", "1", *(["--max-side", str(max_side)] if max_side else [])]
    first = CliRunner().invoke(app, command)
    before = [(file, file.stat().st_mtime_ns) for file in sorted(out.iterdir())]
    again = CliRunner().invoke(app, command)
    assert (first.exit_code, again.exit_code) == (0, 0), again.output
    assert "packed already" not in first.output
    assert "packed already: 23 images of 3 classes in 2 files" in again.output
    assert [(file, file.stat().st_mtime_ns) for file in sorted(out.iterdir())] == before
    others: list[tuple[Path, dict[str, Any]]] = [
        (root, {"max_side": 10}), (root, {"max_side": 20, "quality": 50}), (root, {"file_bytes": 3000}), (root, {}),
        (folder / "n01443537", {"file_bytes": "1MiB", "max_side": max_side}),
    ]  # fmt: skip
    for images, how in others:
        with pytest.raises(ImageListError, match=r"packed already, of other images or in another way \(23 images in 1"):
            pack_folder(open_images(images), out, **how)  # type: ignore[arg-type]
    time.sleep(0.02)  # the clock of a file system has ticks
    image = sorted(root.glob("*/*"))[3]
    image.write_bytes(image.read_bytes()[:-1] + b"x")
    changed = CliRunner().invoke(app, command)
    assert changed.exit_code == 1
    assert f"{image} was changed since: pack into another folder, or remove that one" in str(changed.exception)


def test_packing_into_a_damaged_folder_that_was_finished_says_to_remove_it(folder: Path, tmp_path: Path) -> None:
    pack_folder(open_images(folder), tmp_path / "out")  # type: ignore[arg-type]
    (tmp_path / "out" / "images-00000.safetensors").unlink()
    with pytest.raises(ImageListError, match=r"packed already, and damaged: .*00000.* is missing.* or remove that one"):
        pack_folder(open_images(folder), tmp_path / "out")  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["damaged", "cut", "older", "replaced"])
def test_what_is_not_whole_or_older_than_its_images_is_packed_again(
    copy_of: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder, out = copy_of(), tmp_path / "out"
    interrupted(folder, out)
    file = out / "images-00001.safetensors"
    data = file.read_bytes()
    if what == "cut":
        file.write_bytes(data[:-1])
    elif what == "damaged":
        at = data.rindex(b"\xff\xd9")  # the end of the last JPEG
        file.write_bytes(data[:at] + b"\xfe" + data[at + 1 :])
    else:
        time.sleep(0.02)  # the clock of a file system has ticks
        image = Path(open_images(folder).path(0))
        image.write_bytes(image.read_bytes()[:-1] + b"x")
        # by a file that was written later, or by one from earlier whose time is kept, as by `cp -p`
        os.utime(image, ns=(time.time_ns() + (10**9 if what == "older" else -(10**15)),) * 2)
    names = written(monkeypatch)
    pack_folder(open_images(folder), out, file_bytes=3000)  # type: ignore[arg-type]
    assert names[0] == ("images-00000" if what in ("older", "replaced") else "images-00001")
    assert verify_packed(out) == {}
    assert samples(out) == samples(folder)


def samples(root: Path) -> list[tuple[bytes, int]]:
    dataset = ImageNetDataset(root, 8, device="cpu", decode=False)
    return [
        (image.numpy().tobytes(), label)
        for batch in dataset
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True)
    ]


@pytest.mark.parametrize("other", ["images", "settings", "files"])
def test_what_others_began_is_left_alone(folder: Path, copy_of: Callable[[], Path], tmp_path: Path, other: str) -> None:
    out = tmp_path / "out"
    interrupted(folder, out)
    if other == "files":
        (out / "packing.json").unlink()
    before = content(out)
    images = open_images(copy_of() if other == "images" else folder)
    message = "not empty" if other == "files" else "unfinished folder of other images, or packed in another way"
    with pytest.raises(ImageListError, match=message):
        pack_folder(images, out, file_bytes=3000, max_side=20 if other == "settings" else None)  # type: ignore[arg-type]
    assert content(out) == before


def test_two_processes_do_not_pack_into_one_folder(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(folder, out)
    script = f"""if True:
        import sys
        from monai_gds.imagenet import open_images, pack_folder
        def wait(done):
            print("packing", flush=True)
            sys.stdin.read()
        pack_folder(open_images({str(folder)!r}), {str(out)!r}, file_bytes=3000, progress=wait)"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ImageListError, match="being packed by another process"):
            pack_folder(open_images(folder), out, file_bytes=3000)  # type: ignore[arg-type]
        other.kill()
    pack_folder(open_images(folder), out, file_bytes=3000)  # type: ignore[arg-type]
    assert verify_packed(out) == {}


def test_two_packers_of_one_folder_do_not_spoil_it(
    folder: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease is no lock: one that was frozen goes on when another has taken over, begins or ends."""
    out = tmp_path / "out"
    monkeypatch.setattr(Leases, "take", lambda *_: Leases.none())
    steps = threading.Barrier(2, timeout=60)

    def pack(pause: float) -> int:
        images = open_images(folder)
        steps.wait()
        try:
            return len(pack_folder(images, out, file_bytes=3000, progress=lambda _: time.sleep(pause)))  # type: ignore[arg-type]
        except FileNotFoundError:  # the other one removed .tmp at its end, a moment before this one wrote there
            return 0

    interrupted(folder, out)
    with ThreadPoolExecutor(2) as threads:
        assert COUNT in list(threads.map(pack, (0.0, 0.01)))
    assert content(out) == content(packed)


def test_nor_do_two_threads(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def again(_: int) -> None:
        with pytest.raises(ImageListError, match="being packed by another process or thread"):
            pack_folder(open_images(folder), out, file_bytes=3000)  # type: ignore[arg-type]

    pack_folder(open_images(folder), out, file_bytes=3000, progress=again)  # type: ignore[arg-type]
    assert verify_packed(out) == {}


@pytest.mark.parametrize("others", ["ended", "began again"])
def test_a_folder_that_another_process_packs_at_this_moment_is_left_alone(
    folder: Path, copy_of: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """The other process ends between a look at the folder and the lock."""
    out, smaller = tmp_path / "out", copy_of()
    shutil.rmtree(smaller / "n01440764")
    interrupted(folder, out)
    looked = Path.exists

    def ending(path: Path) -> bool:
        found = looked(path)
        if path.name == "packing.json":
            monkeypatch.undo()
            pack_folder(open_images(folder), out, file_bytes=3000)  # type: ignore[arg-type]
            if others == "began again":
                path.write_bytes(b"")
        return found

    monkeypatch.setattr(Path, "exists", ending)
    with pytest.raises(ImageListError, match="not empty"):
        pack_folder(open_images(smaller), out, file_bytes=3000)  # type: ignore[arg-type]
    assert len(open_packed(out)) == COUNT
    assert verify_packed(out) == {}


def test_an_empty_note_beside_other_files_allows_nothing(folder: Path, tmp_path: Path) -> None:
    for name in ("packing.json", "images-00000.safetensors"):
        (tmp_path / name).write_bytes(b"" if name == "packing.json" else b"precious")
    with pytest.raises(ImageListError, match="not empty"):
        pack_folder(open_images(folder), tmp_path)  # type: ignore[arg-type]
    assert content(tmp_path) == [("images-00000.safetensors", b"precious"), ("packing.json", b"")]
    (tmp_path / "images-00000.safetensors").unlink()
    pack_folder(open_images(folder), tmp_path)  # type: ignore[arg-type]


def test_a_note_that_cannot_be_written_whole_is_not_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pack_folder(open_images(folder), out)  # type: ignore[arg-type]
    assert content(out) == []
    (out / "packing.json").write_bytes(b"\xff of another version")
    with pytest.raises(ImageListError, match="remove that one"):
        pack_folder(open_images(folder), out)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["a file", "a link that leads nowhere"])
def test_what_is_in_the_way_of_the_folder_is_named(folder: Path, tmp_path: Path, what: str) -> None:
    inside = tmp_path / "way"
    inside.write_bytes(b"") if what == "a file" else inside.symlink_to("nowhere")
    for out in (inside, inside / "out"):
        with pytest.raises(ImageListError, match=f"{inside} is {what}: name a folder"):
            pack_folder(open_images(folder), out)  # type: ignore[arg-type]


def test_over_executors(folder: Path, packed: Path, tmp_path: Path) -> None:
    makes: list[Callable[[], Executor]] = [lambda: ThreadPoolExecutor(3), lambda: ProcessPoolExecutor(2)]
    for number, make in enumerate(makes):
        out, told = tmp_path / str(number), list[int]()
        interrupted(folder, out)
        with make() as executor:
            pack_folder(open_images(folder), out, file_bytes=3000, executor=executor, progress=told.append)  # type: ignore[arg-type]
        assert content(out) == content(packed)
        assert told == sorted(told)
        assert told[-1] == COUNT


@pytest.mark.long
def test_over_dask(folder: Path, packed: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="Dask is not installed on this machine")
    with (
        distributed.LocalCluster(n_workers=2, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor(pure=False) as executor,
    ):
        pack_folder(open_images(folder), tmp_path / "out", file_bytes=3000, executor=executor)  # type: ignore[arg-type]
    assert content(tmp_path / "out") == content(packed)


def test_an_error_over_an_executor_names_the_image(copy_of: Callable[[], Path], tmp_path: Path) -> None:
    root = copy_of()
    bad = sorted(root.glob("*/*"))[5]
    data = bad.read_bytes()
    bad.write_bytes(bytes(len(data)))

    def pack() -> None:
        pack_folder(open_images(root), tmp_path / "out", max_side=10, file_bytes=3000, executor=executor)  # type: ignore[arg-type]

    with ProcessPoolExecutor(2) as executor:
        with pytest.raises(BrokenImage, match=f"{bad.name}: it cannot be decoded"):
            pack()
        assert not (tmp_path / "out" / INDEX).exists()
        bad.write_bytes(data)
        pack()  # the processes that the executor forked hold no lock


@pytest.mark.long
def test_the_command_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    data = jpeg(random, 400, 600, 5)
    for number in range(300):
        (tmp_path / "images" / f"{number:03d}.jpg").write_bytes(data)
    command = [sys.executable, "-m", "monai_gds", "pack", str(tmp_path / "images"), str(tmp_path / "out"),
               "--max-side", "300", "--file-mb", "1", "--num-workers", "1"]  # fmt: skip
    killed = subprocess.Popen(command, cwd=ROOT)
    until(lambda: len(list(tmp_path.glob("out/images-*.safetensors"))) >= 3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/images-*.safetensors")}
    assert len(before) >= 3
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "300 images" in done.stdout
    assert all(file.stat().st_mtime_ns == mtime for file, mtime in before.items())
    assert verify_packed(tmp_path / "out") == {}
    assert not list(tmp_path.glob("out/*.tmp"))


# ---------------------------------------------------------------------------------------------------------------------
# Smaller images


def test_large_images_are_made_smaller_and_others_stay_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed on this machine")
    random = np.random.default_rng(0)
    sizes = {"wide": (300, 400), "high": (401, 200), "small": (150, 200), "exact": (200, 120)}
    for label, (name, (height, width)) in enumerate(sizes.items()):
        (tmp_path / "images" / f"{label}").mkdir(parents=True)
        (tmp_path / "images" / f"{label}" / f"{name}.jpg").write_bytes(jpeg(random, height, width))
    done = CliRunner().invoke(
        app, ["pack", str(tmp_path / "images"), str(tmp_path / "out"), "--max-side", "200", "--quality", "80"]
    )
    assert done.exit_code == 0, done.output
    assert verify_packed(tmp_path / "out") == {}
    before, after = (
        {label: (content, shape) for content, shape, label in dalis}
        for dalis in (samples_of_dali(tmp_path / "images"), samples_of_dali(tmp_path / "images", decode=True))
    )
    packed = open_images(tmp_path / "out")
    assert packed.names == list(open_images(tmp_path / "images").names)
    bytes_of = {label: data for data, label in samples(tmp_path / "out")}
    (batch,) = ImageNetDataset(tmp_path / "out", 4, device="cpu")
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert [tuple(image.shape) for image in batch["image"]] == [
        (150, 200, 3), (200, 100, 3), (150, 200, 3), (200, 120, 3)
    ]  # fmt: skip
    for label in (2, 3):
        assert bytes_of[label] == before[label][0]
    for label in (0, 1):
        pixels = np.frombuffer(after[label][0], np.uint8).reshape(after[label][1])
        ours = batch["image"][label].numpy()
        expected = np.asarray(Image.fromarray(pixels).resize(ours.shape[1::-1], Image.Resampling.LANCZOS))
        assert np.abs(ours.astype(int) - expected).mean() < 3
        assert len(bytes_of[label]) < len(before[label][0])


def saved(image: Any, kind: str = "JPEG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def test_pictures_are_turned_as_their_exif_data_tell() -> None:
    picture = Image.new("RGB", (400, 200), (200, 0, 0))
    picture.paste((0, 0, 200), (0, 0, 200, 200))  # blue on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees: blue above
    small = Image.open(io.BytesIO(smaller_jpeg(saved(picture, exif=exif), 100, 90)))
    assert small.size == (50, 100)
    assert not small.getexif()
    assert small.getpixel((25, 10))[2] > 150
    assert small.getpixel((25, 90))[0] > 150


@pytest.mark.parametrize(
    ("mode", "kind", "becomes"),
    [("L", "JPEG", "L"), ("CMYK", "JPEG", "RGB"), ("RGBA", "PNG", "RGB"), ("P", "PNG", "RGB"), ("LA", "PNG", "RGB"),
     ("1", "PNG", "RGB"), ("I;16", "PNG", None)],
)  # fmt: skip
def test_images_of_other_kinds(mode: str, kind: str, becomes: str | None) -> None:
    data = saved(Image.new(mode, (60, 30)), kind)
    small = smaller_jpeg(data, 20, 90)
    if becomes is None:
        assert small == data  # 16 bits per channel, which a JPEG cannot hold
        return
    opened = Image.open(io.BytesIO(small))
    assert (opened.format, opened.mode, opened.size) == ("JPEG", becomes, (20, 10))
    assert smaller_jpeg(data, 60, 90) == data


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "TIFF"), ("P", "PNG"), ("1", "PNG")]
)
def test_smaller_pictures_have_the_colours_that_decoders_see(mode: str, kind: str) -> None:
    """Decoders drop transparency; and every pixel counts, not every other one of a pattern."""
    stripes = np.repeat(np.arange(200)[None] % 2 * 255, 100, axis=0).astype(np.uint8)
    picture = Image.fromarray(stripes).convert(mode if mode in ("P", "1") else mode[:-1])
    if mode in ("RGBA", "LA"):
        picture.putalpha(0)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, once
    small = Image.open(io.BytesIO(smaller_jpeg(saved(picture, kind, exif=exif), 50, 90)))
    assert small.size == (25, 50)
    assert np.abs(np.asarray(small.convert("RGB")).astype(int) - 127).max() < 20


@pytest.mark.parametrize("how", [{"max_side": 0}, {"quality": 0}, {"quality": 101}, {"file_bytes": 0}])
def test_settings_that_make_no_sense(folder: Path, tmp_path: Path, how: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(how))):
        pack_folder(open_images(folder), tmp_path / "out", **how)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
