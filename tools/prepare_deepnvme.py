#!/usr/bin/env python3
"""Prepares the tests of DeepNVMe: installs the packages of a compiler and compiles DeepSpeed's operators. For make.

As root with apt-get it installs missing Debian packages, otherwise it prints their names. It never fails: the tests are
skipped, with the reason, if something is still missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess

from monai_gds.errors import BackendUnavailable
from monai_gds.storage.deepnvme import build

__all__ = ["install", "main"]

#: Seconds per step of apt-get, which retries for minutes without a network.
_PATIENCE = 180


def install(packages: list[str]) -> bool:
    """Installs Debian packages if possible; prints what it does, or what to do."""
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
    """Installs, compiles and prints the result."""
    asked: set[str] = set()
    while not (found := build.probe("aio")):
        packages = re.findall(r"Debian: ([^\s)]+)", found.reason)  # the compiler names one missing package at a time
        if not set(packages) - asked or not install(packages):
            break
        asked.update(packages)
    if not found:
        print(f"DeepNVMe is not tested: {found.reason}", flush=True)
        return
    try:
        build.build_ahead(lambda line: print(line, flush=True))
    except BackendUnavailable as e:
        print(e, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # it takes no options, and --help must not install anything
    main()
