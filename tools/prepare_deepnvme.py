#!/usr/bin/env python3
"""Makes ready what the tests of DeepNVMe need: the compiler's packages, and DeepSpeed's operators, compiled. For make.

Missing Debian packages are installed where apt-get is and this process is root; elsewhere it says which they are. It
never fails: what is still missing then is the reason that the tests give for being skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess

from monai_gds.errors import BackendUnavailable
from monai_gds.storage import deepnvme_build

__all__ = ["install", "main"]

#: Seconds that apt-get may take for one step: without a network it tries for minutes.
_PATIENCE = 180


def install(packages: list[str]) -> bool:
    """Installs Debian packages where that is possible; says what it does, or what is to be done."""
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"DeepNVMe is not tested: as root, `apt-get install {' '.join(packages)}`", flush=True)
        return False
    print(f"installing {' '.join(packages)}, to test DeepNVMe", flush=True)
    return _quiet(command) or (_quiet(["apt-get", "update", "-qq"]) and _quiet(command))


def _quiet(command: list[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    """Installs, compiles, and says what came of it."""
    asked: set[str] = set()
    while not (found := deepnvme_build.probe("aio")):
        packages = re.findall(r"Debian: ([^\s)]+)", found.reason)  # the compiler finds the next one missing
        if not set(packages) - asked or not install(packages):
            break
        asked.update(packages)
    if not found:
        print(f"DeepNVMe is not tested: {found.reason}", flush=True)
        return
    try:
        deepnvme_build.build_ahead(lambda line: print(line, flush=True))
    except BackendUnavailable as e:
        print(e, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # it takes no options, and --help must not install anything
    main()
