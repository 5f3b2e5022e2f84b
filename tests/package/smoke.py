"""Run by ``run.py`` in an environment that has the wheel and its dependencies only, without test tools."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import monai_gds


def check(condition: object, what: str) -> None:
    """An assertion with a message that also works under -O."""
    if not condition:
        sys.exit(f"not so: {what}")


def it_is_the_wheel_s() -> None:
    """Every file of the wheel is installed unchanged, and the imported package is one of them."""
    found = distribution("monai_gds")
    folder = Path(sysconfig.get_path("purelib"))
    check(Path(monai_gds.__file__).parent == folder / "monai_gds", f"imported from {folder}, not {monai_gds.__file__}")
    files = [file for file in found.files or [] if file.hash is not None]
    check(any(str(file) == "monai_gds/py.typed" for file in files), "py.typed is in the wheel")
    for compiled in ("storage/deepnvme/results.h", "storage/xnvme/bam/bam.cu", "tiles/tiles.cu"):
        check(any(str(file) == f"monai_gds/{compiled}" for file in files), f"{compiled}, which is compiled, is there")
    for file in files:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        check(base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, f"{file} is unchanged")
    check(importlib.util.find_spec("tests") is None, "no tests are installed")
    check(found.version == monai_gds.__version__, "the version is that of the wheel")


def a_dataset_works(folder: Path) -> None:
    """Items from the cache equal those that were computed."""
    import torch
    from monai.transforms import Compose, LoadImaged, RandFlipd, ScaleIntensityd

    from monai_gds.bench.made_up import write_volumes

    items = write_volumes(folder / "volumes", 2, (24, 24, 16))
    transform = Compose(
        [
            LoadImaged(("image", "label"), ensure_channel_first=True),
            ScaleIntensityd("image"),
            RandFlipd(("image", "label"), prob=0.0),
        ]
    )

    def images() -> list[torch.Tensor]:
        dataset = monai_gds.GDSDataset(items, transform, folder / "cache", device="cpu")
        with dataset:
            return [dataset[i]["image"] for i in range(2)]

    computed, cached = images(), images()
    check(len(list((folder / "cache").glob("*.safetensors"))) == 2, "two records were written")
    same = [torch.equal(a, b) and a.meta.keys() == b.meta.keys() for a, b in zip(computed, cached, strict=True)]
    check(all(same), "what comes from the cache is what was computed")


def command(*arguments: object) -> str:
    """The output of the installed command."""
    script = Path(sysconfig.get_path("scripts")) / "monai-gds"
    done = subprocess.run([script, *map(str, arguments)], capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"monai-gds {' '.join(map(str, arguments))}: {done.stderr}")
    return done.stdout


def the_commands_work(folder: Path) -> None:
    """Commands that need no extras."""
    check(command("--version").strip() == f"monai-gds {monai_gds.__version__}", "--version")
    told = json.loads(command("doctor", folder, "--json", "--device", "cpu"))
    check(told["works"] and told["default"] == "posix", "the doctor finds posix at work")
    check("2 records, 0 damaged" in command("cache", "verify", folder / "cache"), "the records are whole")
    small = ("--volumes", 1, "--size", 24, 24, 24, "--crop", 16, 16, 16, "--epochs", 2, "--device", "cpu")
    check("same volumes" in command("demo", *small), "the demo gives the same volumes")


def main() -> None:
    """Runs everything in a temporary folder."""
    it_is_the_wheel_s()
    found = monai_gds.available_backends("cpu")
    check(found["posix"] and not found["deepnvme"] and found["deepnvme"].remedy, "extras are extras")
    with tempfile.TemporaryDirectory() as folder:
        a_dataset_works(Path(folder))
        the_commands_work(Path(folder))
    print(f"monai_gds {monai_gds.__version__} works, installed in {sys.prefix}")


if __name__ == "__main__":
    main()
