"""How often each thread gives Python's lock back per batch of a training, and at which lines the loader's does.

    python -m tools.lock_count [cuda]

Each time, the training's thread may take the lock, and the loader's has to wait for it, or be woken again. Needs a C
compiler, glibc on x86-64 and CPython, whose lock is a mutex and a condition. On the CPU, programs are recorded as for a
GPU, and decoding and the transforms of a GPU run on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from monai_gds.bench.feeds import ours
from monai_gds.bench.made_up import write_volumes
from monai_gds.bench.segmentation import Training
from monai_gds.loader import GDSDataLoader, epoch

VOLUMES, SHAPE, WORKERS = 32, (160, 160, 96), 1
WARM, MEASURED = 6, 4  # epochs
TURN = 2  # signals of the lock


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    if device.type == "cpu":
        GDSDataLoader.records = lambda *_: True  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        items = write_volumes(Path(folder) / "volumes", VOLUMES, SHAPE)
        training = Training(items, SHAPE, device, WORKERS)
        (Path(folder) / "cache").mkdir()
        loader = ours(training, Path(folder) / "cache", True).loader
        _epochs(loader, WARM)
        where: Counter[str] = Counter()
        epoch._produce = _watched(epoch._produce, where)
        before, names = _all(), _epochs(loader, MEASURED)
        batches = MEASURED * training.steps
        threads: Counter[str] = Counter()
        for thread, count in _all().items():
            threads[names.get(thread, "others")] += count - before.get(thread, 0)
        for title, found in (("thread", threads), ("line of the loader's thread", where)):
            print(f"\nturns of the lock per batch, by {title}")
            for name, count in found.most_common(60):
                print(f"{count / TURN / batches:9.1f}  {name}")


def _epochs(loader: Any, count: int) -> dict[int, str]:
    """Goes through a loader, slowly, so that its threads do not wait for one another. Returns the threads' names."""
    names = {}
    for _ in range(count):
        for _ in loader:
            time.sleep(0.05)
            names.update({thread.native_id or 0: thread.name for thread in threading.enumerate()})
    return names


def _watched(produce: Callable[..., None], where: Counter[str]) -> Callable[..., None]:
    """The function of the loader's thread, which adds up the signals between two events of Python's profiler."""

    def run(*args: Any) -> None:
        last, place = _library.lock_count_mine(), "begin"

        def event(frame: FrameType, kind: str, argument: Any) -> None:
            nonlocal last, place
            if (now := _library.lock_count_mine()) != last:
                where[place] += now - last
            shown = frame.f_back or frame if kind == "return" else frame
            called = f" in {argument.__qualname__}" if kind == "c_call" else f" after {frame.f_code.co_name}"
            last, place = now, f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno}{called}"

        sys.setprofile(event)
        try:
            produce(*args)
        finally:
            sys.setprofile(None)

    return run


def _all() -> dict[int, int]:
    """Signals so far, by thread."""
    ids, counts = (ctypes.c_int * 4096)(), (ctypes.c_long * 4096)()
    found = _library.lock_count_all(ids, counts)
    return dict(zip(ids[:found], counts[:found], strict=True))


if __name__ == "__main__":
    if "lock_count" not in os.environ.get("LD_PRELOAD", ""):
        with tempfile.TemporaryDirectory() as built:
            library = Path(built) / "lock_count.so"
            source = Path(__file__).with_name("lock_count.c")
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
            again = [sys.executable, "-m", "tools.lock_count", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env={**os.environ, "LD_PRELOAD": str(library)}).returncode)
    _library = ctypes.PyDLL(os.environ["LD_PRELOAD"])  # calls keep the lock
    _library.lock_count_mine.restype = ctypes.c_long
    main()
