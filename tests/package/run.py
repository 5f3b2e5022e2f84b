"""``make test-package``: builds the sdist and from it the wheel, and tries the wheel in an empty environment.

The environment is outside of the source tree and has only the wheel and the dependencies that it names. So files that
are missing from the wheel, and dependencies that are missing from pyproject.toml, show here. See ``smoke.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Tracked files that the sdist leaves out.
NOT_IN_SDIST = (".ci/", ".git")


def run(*command: object, cwd: Path | None = None) -> str:
    """Prints and runs a command, and exits if it fails."""
    print("+", *(os.path.relpath(c, ROOT) if isinstance(c, Path) and c.is_relative_to(ROOT) else c for c in command))
    done = subprocess.run([str(c) for c in command], cwd=cwd, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        print(done.stdout)
        sys.exit(f"failed with exit status {done.returncode}")
    return done.stdout


def tracked() -> set[str]:
    """Every tracked file."""
    return set(run("git", "-C", ROOT, "ls-files").splitlines())


def copy_tracked(target: Path) -> None:
    """Copies tracked files only, so that leftovers of earlier builds cannot help."""
    for name in tracked():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def names_in(sdist: Path, wheel: Path) -> tuple[set[str], set[str]]:
    """The files of both, by their paths in the repository."""
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    return in_sdist, in_wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Compares both with the tracked files."""
    in_sdist, in_wheel = names_in(sdist, wheel)
    files = tracked()
    missing = sorted(name for name in files - in_sdist if not name.startswith(NOT_IN_SDIST))
    missing += sorted(name for name in files - in_wheel if name.startswith("monai_gds/"))
    foreign = sorted(name for name in in_wheel if not name.startswith(("monai_gds/", "monai_gds-")))
    stray = sorted(name for name in in_wheel - files if name.startswith("monai_gds/"))
    for what, names in (("missing", missing), ("not of the package", foreign), ("not tracked", stray)):
        if names:
            sys.exit(f"{what}: {', '.join(names)}")


def main() -> None:
    """Builds, checks, installs and tries."""
    with tempfile.TemporaryDirectory(prefix="monai-gds-package-") as temporary:
        work = Path(temporary)
        copy_tracked(work / "source")
        run(sys.executable, "-m", "build", "--outdir", work / "dist", work / "source")
        (sdist,) = (work / "dist").glob("*.tar.gz")
        (wheel,) = (work / "dist").glob("*.whl")
        check_contents(sdist, wheel)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        run(sys.executable, "-m", "venv", work / "clean")
        python = work / "clean/bin/python"
        constraints = os.environ.get("CONSTRAINTS", str(ROOT / "constraints.txt"))
        pinned = ["-c", constraints] if constraints else []
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pinned, wheel)
        run(python, "-m", "pip", "check", "--disable-pip-version-check")
        # In a folder of its own, so that mypy reads the package that is installed and not this checkout.
        shutil.copy(ROOT / "tests/package/user.py", work / "clean")
        run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "user.py", cwd=work / "clean")
        print(run(python, "-I", ROOT / "tests/package/smoke.py", cwd=work))
        print(f"{sdist.name} and {wheel.name} are correct")


if __name__ == "__main__":
    main()
