#!/usr/bin/env python3
"""Packs a few large packages for a machine without network, as small as possible and in pieces.

    python tools/slim.py --python 3.12 --gpu 90 --dest pieces nvidia-dali-cuda130 --without numpy typing_extensions
    bash pieces/unpack.sh pieces TARGET         # on that machine; then PYTHONPATH=TARGET python3 …

Use it where ``tools/wheelhouse.py`` brings too much: nvidia-dali-cuda130's wheel carries the modules of every Python
version, device code for seven GPU architectures and headers for plug-ins. The wheels are unpacked into one tree as pip
would, without files that only other Python versions, compilers or tests need. In libraries, symbols that only debuggers
read are zeroed, and with ``--gpu`` so is device code that this GPU does not run. Nothing moves, so the rest works as
before. The tree becomes one .tar.xz, cut into pieces. ``unpack.sh`` names a missing or damaged piece before it unpacks
anything; it needs bash, and xz or Python.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import re
import shlex
import struct
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the sibling, also where this file is loaded by its path

import wheelhouse

__all__ = ["archive", "choose", "keep_device_code", "main", "unpack_script", "without_symbols"]

#: Files that only compilers and type checkers read.
_SOURCES = {".a", ".cmake", ".cu", ".cuh", ".h", ".hpp", ".inl", ".pxd", ".pyi", ".pyx"}
_FOLDERS = {"include", "bin", "test", "tests", "__pycache__"}

#: A module compiled for one Python: ``backend_impl.cpython-312-x86_64-linux-gnu.so``.
_COMPILED = re.compile(r"\.cpython-(\d+t?)-[^/]*\.so$")

#: A library: ``libdali.so``, ``libnvjpeg.so.13``.
_LIBRARY = re.compile(r"\.so(\.[\w.]+)?$")

#: A project's name ends where its version begins (PEP 427).
_PROJECT = re.compile(r"^([^-]+)-")

#: A set of device code begins with magic, version (u16) and the size of this header (u16); then the bytes that follow
#: (u64), which are entries. Each: kind (u16: 1 is PTX, 2 machine code), version (u16), size of its header (u32), of its
#: content (u64), and at byte 28 the compute capability, 90 for 9.0 (u32). This is undocumented and was found in CUDA
#: 13's libraries. If the numbers do not add up, nothing is changed.
_FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_MACHINE_CODE = 2

_SHT_SYMTAB = 2

_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def choose(name: str, data: Callable[[], bytes], python: str) -> str | None:
    """The place of a wheel's file in the tree, or None if it is not needed at run time.

    Args:
        name: its path in the wheel.
        data: returns its content; called only if the name does not decide.
        python: the target's version, ``"3.12"``.
    """
    path = PurePosixPath(name)
    head = path.parts[0]
    if head.endswith(".data"):  # pip spreads this over the environment; only modules are needed
        if len(path.parts) < 3 or path.parts[1] not in ("purelib", "platlib"):
            return None
        path = PurePosixPath(*path.parts[2:])
    if head.endswith(".dist-info"):  # keep the version and the licences; the rest would be wrong
        return None if path.name in ("RECORD", "INSTALLER") else str(path)
    if path.suffix in _SOURCES or _FOLDERS & set(path.parts[:-1]):
        return None
    compiled = _COMPILED.search(path.name)
    if compiled and compiled[1] != python.replace(".", ""):
        return None
    if len(path.parts) == 2 and path.name == "__init__.py" and not data().strip():
        return None if path.parts[0] == "nvidia" else str(path)  # it would hide the nvidia/ that torch brought
    return str(path)


def without_symbols(library: bytearray) -> None:
    """Zeroes an ELF library's ``.symtab`` and its names. Linking and loading need ``.dynsym`` only."""
    if library[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count = struct.unpack_from("<HH", library, 58)
    # sh_type, sh_offset, sh_size, sh_link of every section header (Elf64_Shdr, elf.h)
    sections = [struct.unpack_from("<4xI16xQQI", library, table + i * size) for i in range(count)]
    for kind, offset, nbytes, link in sections:
        if kind == _SHT_SYMTAB:
            library[offset : offset + nbytes] = bytes(nbytes)
            _, names, length, _ = sections[link]
            library[names : names + length] = bytes(length)


def keep_device_code(library: bytearray, capability: int) -> None:
    """Zeroes device code that a GPU of this compute capability does not run.

    A set without machine code for its major version stays as it is, since the driver would compile its PTX.

    Args:
        library: changed in place.
        capability: 90 for 9.0.
    """
    at = -1
    while (at := library.find(_FATBIN, at + 1)) >= 0:
        entries = _device_code(library, at)
        runs = [e for e in entries if e[0] == _MACHINE_CODE and e[1] // 10 == capability // 10 and e[1] <= capability]
        for entry in entries if runs else ():
            if entry not in runs:
                _, _, start, nbytes = entry
                library[start : start + nbytes] = bytes(nbytes)


def _device_code(library: bytearray, at: int) -> list[tuple[int, int, int, int]]:
    """(kind, compute capability, start of content, bytes) of each entry of a set; none if this is not a set."""
    entries: list[tuple[int, int, int, int]] = []
    position = at + 16
    end = position + struct.unpack_from("<Q", library, at + 8)[0]
    if end > len(library):
        return []
    while position < end:
        if position + 64 > end:
            return []
        kind, _, header, nbytes, _, capability = struct.unpack_from("<HHIQQ4xI", library, position)
        if not 64 <= header <= 4096 or position + header + nbytes > end:
            return []
        entries.append((kind, capability, position + header, nbytes))
        position += header + nbytes
    return entries


def _chosen(wheels: Sequence[Path], python: str) -> Iterator[tuple[str, Path, zipfile.ZipInfo]]:
    """The files of the tree as (path in it, wheel, member), similar ones side by side for compression."""
    found: dict[str, tuple[Path, zipfile.ZipInfo]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as z:
            for info in z.infolist():
                place = None if info.is_dir() else choose(info.filename, lambda z=z, i=info: z.read(i), python)
                if place is not None:
                    found.setdefault(place, (wheel, info))
    for place in sorted(found, key=lambda p: (PurePosixPath(p).suffix == ".py", p)):
        yield place, *found[place]


def archive(wheels: Sequence[Path], python: str, out: Path, capability: int | None = None) -> int:
    """Writes the tree of these wheels as a .tar.xz and returns the tree's size in bytes."""
    nbytes = 0
    with lzma.open(out, "wb", filters=_FILTERS) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for place, wheel, info in _chosen(wheels, python):
            with zipfile.ZipFile(wheel) as z:
                data = bytearray(z.read(info))
            if _LIBRARY.search(place):
                without_symbols(data)
                if capability is not None:
                    keep_device_code(data, capability)
            entry = tarfile.TarInfo(place)
            entry.size = len(data)
            entry.mode = 0o755 if place.endswith(".so") else 0o644
            tar.addfile(entry, io.BytesIO(data))
            nbytes += len(data)
    return nbytes


def unpack_script(parts: Sequence[Path]) -> str:
    """The script that joins, checks and unpacks: ``unpack.sh FOLDER_WITH_ALL_PIECES TARGET``."""
    sums = "\n".join(f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}" for part in parts)
    names = " ".join(shlex.quote(part.name) for part in parts)
    return f"""#!/usr/bin/env bash
# usage: bash unpack.sh FOLDER_WITH_ALL_PIECES TARGET      then: PYTHONPATH=TARGET python3 …
set -euo pipefail
[ $# -eq 2 ] || {{ sed -n 2p "$0"; exit 2; }}
mkdir -p "$2"
target=$(cd "$2" && pwd)
cd "$1"
sha256sum --check --quiet <<'SUMS'
{sums}
SUMS
if command -v xz > /dev/null; then
  cat {names} | xz -dc | tar -x --no-same-owner -C "$target"
else
  cat {names} | python3 -c 'import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as t: t.extractall(sys.argv[1])' "$target"
fi
echo "unpacked; use it with: PYTHONPATH=$target"
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="PKG", help="package to bring, with its dependencies")
    parser.add_argument("--without", nargs="+", default=[], metavar="PKG", help="dependencies that are already there")
    parser.add_argument("--python", default="3.12", help="version to collect for (default: %(default)s)")
    parser.add_argument("--gpu", type=int, metavar="NN", help="compute capability, 90 for 9.0; drops other device code")
    parser.add_argument("--glibc", default="2.34", help="glibc of that machine, or older (default: %(default)s)")
    parser.add_argument("--dest", type=Path, required=True, help="folder for the pieces")
    parser.add_argument("--split", type=int, default=50, metavar="MIB", help="size of a piece (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.split < 1:
        parser.error("--split takes a positive number of MiB")
    return options


def _without(wheels: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """The wheels except those of these projects, whose names are compared as in PEP 503."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    gone = {plain(name) for name in names}
    return [w for w in wheels if plain(_PROJECT.match(w.name)[1]) not in gone]  # type: ignore[index]


def main(arguments: Sequence[str] | None = None) -> int:
    """Downloads, packs, cuts and prints how to unpack. Returns the exit code."""
    options = parse(arguments)
    try:
        target = wheelhouse.pip_target(options.python, options.glibc)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    options.dest.mkdir(parents=True, exist_ok=True)
    for old in options.dest.glob("slim.tar.xz*"):
        old.unlink()
    packed = options.dest / "slim.tar.xz"
    with tempfile.TemporaryDirectory() as house:
        wheelhouse.pip("download", f"--dest={house}", *target, *options.packages)
        wheels = _without(sorted(Path(house).glob("*.whl")), options.without)
        print("packing " + ", ".join(w.name.split("-")[0] for w in wheels) + ": this takes minutes", flush=True)
        nbytes = archive(wheels, options.python, packed, options.gpu)
    parts = wheelhouse.split(packed, options.split << 20)
    (options.dest / "unpack.sh").write_text(unpack_script(parts))
    size = sum(part.stat().st_size for part in parts)
    pieces = f"{len(parts)} piece{'s' * (len(parts) > 1)}"
    print(f"{options.dest}: {pieces}, {size / 1e6:.0f} MB, {nbytes / 1e6:.0f} MB unpacked. On the other machine:\n")
    folder = shlex.quote(options.dest.resolve().name)
    print(f"    bash {folder}/unpack.sh {folder} TARGET")
    return 0


if __name__ == "__main__":
    sys.exit(main())
