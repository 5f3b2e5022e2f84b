"""tools/slim.py: what it leaves out, and that its pieces make the tree again. Without network: pip is stood in for."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tools import load_tool

slim = load_tool("slim")

_NOISE = bytes(i * i * 31 % 251 for i in range(3 << 20))

_CODEC = {
    "nvidia/__init__.py": b"\n",
    "nvidia/codec/__init__.py": b"",
    "nvidia/codec/impl.cpython-311-x86_64-linux-gnu.so": b"for 3.11",
    "nvidia/codec/impl.cpython-312-x86_64-linux-gnu.so": b"for 3.12",
    "nvidia/codec/impl.cpython-312t-x86_64-linux-gnu.so": b"for 3.12, free-threaded",
    "nvidia/codec/libcodec.so.0": _NOISE,
    "nvidia/codec/any.abi3.so": b"for all",
    "nvidia/codec/include/codec/api.h": b"header",
    "nvidia/codec/impl.pyi": b"types",
    "nvidia/codec/tests/test_codec.py": b"test",
    "nvidia/bin/tool": b"tool",
    "codec-1.0.data/purelib/codec_tools/a.py": b"spread by pip",
    "codec-1.0.data/scripts/codec": b"script",
    "codec-1.0.dist-info/METADATA": b"Name: codec",
    "codec-1.0.dist-info/licenses/LICENSE": b"licence",
    "codec-1.0.dist-info/RECORD": b"what is no longer so",
}
_OTHER = {"nvidia/__init__.py": b"", "nvidia/other/__init__.py": b"# other", "other/__init__.py": b""}

_WANTED = {
    "nvidia/codec/__init__.py",
    "nvidia/codec/impl.cpython-312-x86_64-linux-gnu.so",
    "nvidia/codec/libcodec.so.0",
    "nvidia/codec/any.abi3.so",
    "codec_tools/a.py",
    "codec-1.0.dist-info/METADATA",
    "codec-1.0.dist-info/licenses/LICENSE",
    "nvidia/other/__init__.py",
    "other/__init__.py",
}


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pieces as the tool makes it of two wheels; a third is named as there already."""

    def download(*arguments: str) -> None:
        (house,) = (Path(a.partition("=")[2]) for a in arguments if a.startswith("--dest="))
        assert {"download", "--python-version=3.12", "--abi=cp312", "nv-codec"} <= set(arguments)
        for name, members in (("nv_codec", _CODEC), ("other", _OTHER), ("Big_Thing", {"big.py": b"big"})):
            with zipfile.ZipFile(house / f"{name}-1.0-py3-none-any.whl", "w") as z:
                for member, data in members.items():
                    z.writestr(member, data)

    monkeypatch.setattr(slim.wheelhouse, "pip", download)
    dest = tmp_path / "the pieces"
    dest.mkdir()
    (dest / "slim.tar.xz.part-009").write_bytes(b"of the last time")
    monkeypatch.setattr(slim.wheelhouse, "_BLOCK", 1000)
    monkeypatch.setattr(slim, "_FILTERS", [{"id": slim.lzma.FILTER_LZMA2, "preset": 0}])
    split = slim.wheelhouse.split
    monkeypatch.setattr(slim.wheelhouse, "split", lambda path, limit: split(path, limit >> 20))  # bytes for MiB
    assert slim.main(["nv-codec", "--without", "big-thing", "--dest", str(dest), "--split", "800"]) == 0
    return dest


def _unpack(pieces: Path, target: Path) -> subprocess.CompletedProcess[str]:
    script = ["bash", str(pieces / "unpack.sh"), str(pieces), str(target)]
    return subprocess.run(script, capture_output=True, text=True, check=False)


def test_the_pieces_make_one_tree_of_what_is_wanted(pieces: Path, tmp_path: Path) -> None:
    parts = sorted(pieces.glob("slim.tar.xz.part-*"))
    assert len(parts) > 1
    assert all(part.stat().st_size <= 800 for part in parts)
    done = _unpack(pieces, tmp_path / "tar get")
    assert done.returncode == 0, done.stderr
    tree = tmp_path / "tar get"
    assert {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()} == _WANTED
    assert (tree / "nvidia/codec/libcodec.so.0").read_bytes() == _NOISE
    assert f"PYTHONPATH={tree}" in done.stdout


def test_without_xz_python_unpacks(pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "mkdir", "cat", "sha256sum"):
        (tools / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
    (tools / "python3").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(tools))
    done = _unpack(pieces, tmp_path / "target")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target/nvidia/codec/libcodec.so.0").read_bytes() == _NOISE


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-1] + b"?")])
def test_a_missing_or_damaged_piece_is_named_and_nothing_is_unpacked(pieces: Path, tmp_path: Path, damage) -> None:
    damage(pieces / "slim.tar.xz.part-001")
    done = _unpack(pieces, tmp_path / "target")
    assert done.returncode != 0
    assert "slim.tar.xz.part-001" in done.stdout + done.stderr
    assert not list((tmp_path / "target").iterdir())


def test_an_init_file_with_content_stays() -> None:
    assert slim.choose("nvidia/__init__.py", lambda: b"import os", "3.12") == "nvidia/__init__.py"


def _device_code(*entries: tuple[int, int, bytes]) -> bytes:
    """A set of device code of (kind, compute capability, content)."""
    body = b""
    for kind, capability, content in entries:
        body += struct.pack("<HHIQQ4xI", kind, 0x101, 64, len(content), 0, capability).ljust(64, b"\xaa") + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


PTX, CODE = 1, 2


def test_only_the_gpus_own_device_code_is_kept() -> None:
    code = [(CODE, 75, b"c75"), (CODE, 90, b"c90"), (PTX, 120, b"p120"), (CODE, 120, b"c120")]
    without = [(CODE, 75, bytes(3)), (CODE, 90, b"c90"), (PTX, 120, bytes(4)), (CODE, 120, bytes(4))]
    none_for_90 = _device_code((CODE, 75, b"c75"), (PTX, 80, b"p80"))
    broken = _device_code((CODE, 75, b"c75"), (CODE, 90, b"c90"))[:-2]
    library = bytearray(b"text" + _device_code(*code) + b"between" + none_for_90 + _device_code(*code) + broken)
    slim.keep_device_code(library, 90)
    assert library == b"text" + _device_code(*without) + b"between" + none_for_90 + _device_code(*without) + broken


def test_a_lower_minor_version_of_the_same_major_runs_too() -> None:
    library = bytearray(_device_code((CODE, 80, b"c80"), (CODE, 86, b"c86"), (CODE, 89, b"c89"), (CODE, 90, b"c90")))
    slim.keep_device_code(library, 86)
    assert library == _device_code((CODE, 80, b"c80"), (CODE, 86, b"c86"), (CODE, 89, bytes(3)), (CODE, 90, bytes(3)))


@pytest.mark.skipif(shutil.which("cc") is None, reason="this machine has no C compiler")
def test_a_library_without_symbols_still_loads(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("static int hidden_from_the_linker(void) { return 6; }\n"
                                  "int seven(void) { return hidden_from_the_linker() + 1; }\n")  # fmt: skip
    path = tmp_path / "a.so"
    subprocess.run(["cc", "-O0", "-shared", "-fPIC", "-o", path, tmp_path / "a.c"], check=True)
    library = bytearray(path.read_bytes())
    assert b"hidden_from_the_linker" in library
    slim.without_symbols(library)
    assert b"hidden_from_the_linker" not in library
    path.write_bytes(library)
    assert ctypes.CDLL(str(path)).seven() == 7


def test_wrong_usage_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slim.main(["x", "--python", "12", "--dest", str(tmp_path / "d")]) == 2
    assert "'12'" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()
