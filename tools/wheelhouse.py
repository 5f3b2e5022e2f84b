#!/usr/bin/env python3
"""Collects the wheels that a machine without network needs to install this package.

    python tools/wheelhouse.py --python 3.12 --cuda 13 --dest wheelhouse
    python tools/wheelhouse.py --python 3.12 --cuda 13 --dest wheelhouse --extra test --split 512
    python tools/wheelhouse.py --python 3.12 --dest wheelhouse --only kvikio-cu13 libkvikio-cu13

Run it where there is a network, carry the folder over, and run the commands that it prints at the end. It may run with
another Python than it collects for, and needs only pip.

The CUDA version of torch's wheel on PyPI is torch's choice. For another, add torch's own index and pin the build:
``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/… --constraint FILE``. If that machine has torch already,
``--only`` brings missing packages without their dependencies.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["install_commands", "main", "pip", "pip_target", "platforms", "split", "split_large"]

ROOT = Path(__file__).resolve().parent.parent

#: Older names of manylinux platforms, by their minor version of glibc (PEP 513, 571, 599).
_OLD_NAMES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}

#: Bytes per copied block.
_BLOCK = 1 << 20


def platforms(glibc: str, machine: str = "x86_64") -> list[str]:
    """Every platform tag that a Linux machine with this glibc can install, newest first (PEP 600)."""
    major, _, minor = glibc.partition(".")
    if major != "2" or not minor.isdigit() or int(minor) < 5:
        raise ValueError(f"glibc {glibc!r} is not a version like 2.28 (see it with `ldd --version`)")
    tags = []
    for n in range(int(minor), 4, -1):
        tags.append(f"manylinux_2_{n}_{machine}")
        if n in _OLD_NAMES:
            tags.append(f"{_OLD_NAMES[n]}_{machine}")
    return [*tags, f"linux_{machine}"]


def pip_target(python: str, glibc: str) -> list[str]:
    """The arguments that make pip choose wheels for another machine's CPython."""
    major, _, minor = python.partition(".")
    if major != "3" or not minor.isdigit():
        raise ValueError(f"Python {python!r} is not a version like 3.12")
    arguments = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    arguments += [f"--abi={abi}" for abi in (f"cp3{minor}", "abi3", "none")]
    return arguments + [f"--platform={tag}" for tag in platforms(glibc)]


def extras_for(cuda: str, extra: Sequence[str]) -> list[str]:
    """The extras to collect. Raises ValueError for an extra that is not in pyproject.toml."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = sorted({*extra, *([] if cuda == "none" else [f"cuda{cuda}"])})
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no extra {name!r}; there are: {', '.join(sorted(known))}")
    return wanted


def split(path: Path, limit: int) -> list[Path]:
    """Cuts a file into ``NAME.part-000``, ``NAME.part-001``… of at most ``limit`` bytes, and removes it.

    Parts of an earlier run are removed first: joined with the new ones they would corrupt the file.

    Returns:
        The parts; the file itself if it is small enough.
    """
    for old in path.parent.glob(f"{path.name}.part-*"):
        old.unlink()
    if path.stat().st_size <= limit:
        return [path]
    parts: list[Path] = []
    with path.open("rb") as whole:
        while block := whole.read(min(_BLOCK, limit)):
            part = path.with_name(f"{path.name}.part-{len(parts):03d}")
            parts.append(part)
            with part.open("wb") as out:
                left = limit
                while block:
                    out.write(block)
                    left -= len(block)
                    block = whole.read(min(_BLOCK, left)) if left else b""
    path.unlink()
    return parts


def split_large(dest: Path, limit: int) -> list[Path]:
    """Splits every wheel in ``dest`` that is larger than ``limit`` bytes, and returns the parts."""
    return [part for wheel in sorted(dest.glob("*.whl")) for part in split(wheel, limit) if part != wheel]


def install_commands(dest: Path, requirements: Sequence[str], *, parts: bool, with_dependencies: bool) -> list[str]:
    """The shell commands that install the folder on the machine without network, run beside it."""
    commands, folder = [], shlex.quote(dest.name)
    if parts:
        commands.append(
            f'for p in {folder}/*.part-000; do w="${{p%.part-000}}"; cat "$w".part-* > "$w" && rm "$w".part-*; done'
        )
    no_deps = "" if with_dependencies else "--no-deps "
    names = " ".join(f"'{name}'" for name in requirements)
    return [*commands, f"python -m pip install --no-index --find-links {folder} {no_deps}{names}"]


def pip(*arguments: str) -> None:
    """Runs pip and exits if it fails."""
    command = [sys.executable, "-m", "pip", *arguments]
    print("+ pip", *(a for a in arguments if not a.startswith("--platform=")), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(1)


def collect(options: argparse.Namespace, target: list[str]) -> list[str]:
    """Fills ``options.dest``, and returns the requirements to install from it."""
    dest = str(options.dest)
    constraint = [f"--constraint={options.constraint}"] if options.constraint else []
    if options.only:
        pip("download", "--no-deps", f"--dest={dest}", *constraint, *target, *options.only)
        return list(options.only)
    for old in options.dest.glob("monai_gds-*.whl"):
        old.unlink()
    pip("wheel", "--quiet", "--no-deps", f"--wheel-dir={dest}", str(ROOT))
    (wheel,) = options.dest.glob("monai_gds-*.whl")
    extras = extras_for(options.cuda, options.extra)
    suffix = f"[{','.join(extras)}]" if extras else ""
    pip("download", f"--dest={dest}", *constraint, *target, f"{wheel}{suffix}")
    with tempfile.TemporaryDirectory() as nowhere:  # a missing wheel shows here instead of there
        offline = ["--no-index", f"--find-links={dest}", "--dry-run", "--quiet", f"--target={nowhere}"]
        pip("install", *offline, *constraint, *target, f"monai_gds{suffix}")
    return [f"monai_gds{suffix}"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version to collect for (default: %(default)s)")
    parser.add_argument("--cuda", choices=["12", "13", "none"], default="none", help="adds the extra cuda12 or cuda13")
    parser.add_argument("--dest", type=Path, required=True, help="folder for the wheels")
    parser.add_argument("--extra", nargs="+", default=[], help="further extras of pyproject.toml")
    parser.add_argument("--only", nargs="+", metavar="PKG", help="these and nothing else, without their dependencies")
    parser.add_argument("--constraint", help="a pip constraints file")
    parser.add_argument("--glibc", default="2.34", help="glibc of that machine, or older (default: %(default)s)")
    parser.add_argument("--split", type=int, metavar="MIB", help="cut wheels larger than this into parts")
    options = parser.parse_args(arguments)
    if options.only and (options.extra or options.cuda != "none"):
        parser.error("--only names all there is to collect: leave --extra and --cuda out")
    if options.split is not None and options.split < 1:
        parser.error("--split takes a positive number of MiB")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Collects, splits and says how to install. Returns the exit code."""
    options = parse(arguments)
    try:
        target = pip_target(options.python, options.glibc)
        extras_for(options.cuda, options.extra)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if options.python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        print(f"note: pip decides by its own Python, not by {options.python}, what depends on the Python version")
    options.dest.mkdir(parents=True, exist_ok=True)
    requirements = collect(options, target)
    parts = split_large(options.dest, options.split << 20) if options.split else []
    nbytes = sum(f.stat().st_size for f in options.dest.iterdir())
    print(f"\n{options.dest}: {nbytes / 1e6:.0f} MB. On the machine without network, beside that folder:\n")
    for line in install_commands(
        options.dest.resolve(), requirements, parts=bool(parts), with_dependencies=not options.only
    ):
        print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
