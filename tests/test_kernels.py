"""CUDA kernels compile, also on machines without a GPU. On a user's machine NVRTC compiles the same language."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from monai_gds.storage.xnvme.bam.queues import SOURCE
from monai_gds.tiles import device

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")

KERNELS = {"tiles": device._KERNELS, "xnvme-bam": SOURCE.read_text()}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])  # Turing is the oldest that CUDA 13 compiles for
def test_compiles_without_warnings_or_spilled_registers(kernel: str, architecture: str, tmp_path: Path) -> None:
    source, binary = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text(KERNELS[kernel])
    command = ["nvcc", "--std=c++14", f"-arch={architecture}", "-cubin", "-Werror", "all-warnings", "-Xptxas", "-v"]
    done = subprocess.run([*command, "-o", binary, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert binary.stat().st_size
    assert set(re.findall(r"(\d+) bytes spill stores", done.stderr)) == {"0"}, done.stderr
