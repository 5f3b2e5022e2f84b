"""Compiles and loads DeepSpeed's C++ operators for the ``deepnvme`` backends. Called by them and by ``doctor --build``.

DeepSpeed ships its file operators as C++ source and compiles them on first use, in the middle of whatever the user was
doing. Here that is a step of its own:

* it says what it is about to do and what it needs, and a failure shows the compiler's last lines;
* it runs in a child process, so that nothing of it (environment, working directory, output) reaches the caller's;
* it works in a fresh directory that is renamed when it is complete. Two processes that start at once are kept apart by
  ``flock``, which the kernel drops when its holder dies. (torch's own lock is a file: one killed build, and every later
  one waits for it for ever. Ours never meets an old one, because the directory is new.)

What was built is loaded from its file, without going through torch's locking again, and handed to DeepSpeed as its own:
the same C++ types cannot be registered twice in a process.

One assertion is compiled out. ``aio_handle.pread`` asserts that the range lies inside the file, and ends the process if
not. The backend checks that first, but a file may shrink in between; without the assertion the read comes back short,
which the backend finds (see :mod:`monai_gds.storage.checked`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from monai_gds.errors import BackendUnavailable
from monai_gds.storage.base import Availability

__all__ = ["Operator", "build_ahead", "build_directory", "built", "load", "probe"]

#: ``aio``: the bounce buffer operator. ``gds``: GPUDirect Storage, which needs the CUDA toolkit and libcufile.
Operator = Literal["aio", "gds"]

_MODULE = {"aio": "async_io", "gds": "gds"}
_PINNED = "pin_memory"  # holds the page-locked memory that both operators share; must be loaded before them
_REMEDY = "pip install 'monai_gds[deepnvme]'"
_AHEAD = "monai-gds doctor --build deepnvme"
_LOG_LINES = 25

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: dict[Operator, ModuleType] = {}


def build_directory(operator: Operator) -> Path:
    """Where the built operator lies: one directory for each combination that needs its own.

    It is under ``TORCH_EXTENSIONS_DIR``, or torch's default for it (``~/.cache/torch_extensions``). The processor's
    abilities are part of the name because DeepSpeed compiles for exactly this processor.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions"
    )
    device = f"cu{torch.version.cuda}" if torch.cuda.is_available() else "cpu"
    parts = [_deepspeed_version() or "none", f"torch{torch.__version__}", device, f"py{platform.python_version()}"]
    return Path(root) / "monai_gds" / "-".join([*parts, _processor()]) / operator


def built(operator: Operator) -> bool:
    """Whether the operator needs no compiling any more."""
    return (build_directory(operator) / f"{_MODULE[operator]}.so").is_file()


def _deepspeed_version() -> str | None:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "unpacked" if importlib.util.find_spec("deepspeed") else None


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    abilities = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return hashlib.sha256(abilities.encode()).hexdigest()[:8]


def _path_with_scripts() -> str:
    """PATH, and the folder of this Python's scripts: ``pip install ninja`` puts it there, on PATH or not."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _missing() -> list[str]:
    """What compiling lacks on this machine, each with its Debian package."""
    missing = []
    compiler = os.environ.get("CXX", "c++")
    found = shutil.which(compiler)
    if found is None:
        missing.append(f"a C++ compiler ({compiler}; Debian: g++)")
    elif subprocess.run([found, "-E", "-xc++", "-"], input=b"#include <libaio.h>", capture_output=True).returncode:
        missing.append("libaio.h (Debian: libaio-dev)")
    if shutil.which("ninja", path=_path_with_scripts()) is None:
        missing.append("ninja (Debian: ninja-build)")
    if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
        missing.append("Python.h (Debian: python3-dev)")
    return missing


def probe(operator: Operator) -> Availability:
    """Whether the operator can be used here: built, or everything there to build it. Compiles nothing."""
    version = _deepspeed_version()
    if version is None:
        return Availability(False, "the package deepspeed is not installed", _REMEDY)
    if operator == "gds" and not torch.cuda.is_available():
        return Availability(False, "there is no CUDA device", 'use backend="deepnvme" for a CPU target')
    if operator in _loaded or built(operator):
        return Availability(True, f"DeepSpeed {version}, {_MODULE[operator]} is built")
    missing = _missing()
    if missing:
        return Availability(
            False, f"DeepSpeed's {_MODULE[operator]} must be compiled, and there is no " + ", no ".join(missing),
            f"install it, then `{_AHEAD}`",
        )  # fmt: skip
    return Availability(
        True, f"DeepSpeed {version}; the first use compiles {_MODULE[operator]}, which takes minutes (`{_AHEAD}` now)"
    )


def build_ahead(say: Callable[[str], None] = print) -> list[Path]:
    """Builds what this machine can use, for ``monai-gds doctor --build deepnvme``.

    Args:
        say: receives one line a step.

    Returns:
        The directories of the built operators.

    Raises:
        BackendUnavailable: deepspeed or a tool is missing, or the compiler failed; its last lines are in the message.
    """
    done = [build("aio", say)]
    can_gds = probe("gds")
    if can_gds:
        done.append(build("gds", say))
    else:
        say(f"gds is left out: {can_gds.reason}")
    return done


def build(operator: Operator, say: Callable[[str], None]) -> Path:
    """Builds the operator unless that is done already, or another process does it first.

    Returns:
        The directory that it lies in.

    Raises:
        BackendUnavailable: see :func:`build_ahead`.
    """
    target = build_directory(operator)
    if built(operator):
        say(f"{_MODULE[operator]} is built: {target}")
        return target
    found = probe(operator)
    if not found:
        raise BackendUnavailable(f"{found.reason}; {found.remedy}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(target, say):
        if not built(operator):
            say(
                f"compiling DeepSpeed's {_MODULE[operator]}, once for this machine; this takes minutes. "
                "It uses g++, ninja and the libaio headers (Debian: g++ ninja-build libaio-dev)"
            )
            _compile_into(operator, target)
            say(f"compiled: {target}")
    return target


@contextlib.contextmanager
def _only_builder(target: Path, say: Callable[[str], None]) -> Iterator[None]:
    with open(target.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is compiling DeepSpeed's {_MODULE[_operator_of(target)]}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _operator_of(target: Path) -> Operator:
    return "gds" if target.name == "gds" else "aio"


def _compile_into(operator: Operator, target: Path) -> None:
    """Compiles in a new directory beside ``target`` and renames the result. The caller holds the lock."""
    for left_behind in target.parent.glob(f"{target.name}.building-*"):  # by a build that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        log = work / "log"
        code = _run_child(operator, work, log)
        modules = [work / name / f"{name}.so" for name in (_PINNED, _MODULE[operator])]
        if code or not all(module.is_file() for module in modules):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise BackendUnavailable(f"compiling DeepSpeed's {_MODULE[operator]} failed (exit status {code}):\n{tail}")
        finished = work / "finished"
        finished.mkdir()
        for module in modules:
            module.rename(finished / module.name)
        finished.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_child(operator: Operator, work: Path, log: Path) -> int:
    environment = {**os.environ, "PATH": _path_with_scripts(), "TORCH_EXTENSIONS_DIR": str(work)}
    # The caller's import path, for packages that are not installed but lie on it; never its working directory.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    architectures = environment.get("TORCH_CUDA_ARCH_LIST")
    if architectures:  # DeepSpeed cannot parse "9.0a", and there is no device code in these operators
        environment["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(?<=\d)[a-z]\b", "", architectures)
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "monai_gds.storage.deepnvme_build", operator, str(work)],
            cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait()
        finally:
            if child.returncode is None:  # interrupted: end the compilers too
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _compile_here(operator: Operator, work: Path) -> None:
    """The child's part: lets DeepSpeed compile into ``TORCH_EXTENSIONS_DIR``, which the parent has set."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: do not outlive a parent that was killed
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

    builder: Any = AsyncIOBuilder() if operator == "aio" else GDSBuilder()
    asserting = builder.deepspeed_src_path("csrc/aio/py_lib/deepspeed_py_io_handle.cpp")
    shim = work / "io_handle.cpp"
    shim.write_text(f'#define NDEBUG\n#include "{asserting}"\n')  # see the module's docstring
    sources = [str(shim) if asserting.endswith(source) else source for source in builder.sources()]
    if str(shim) not in sources:
        raise RuntimeError(f"this version of DeepSpeed has no {asserting}; the backend was written for 0.19")
    builder.sources = lambda: sources
    builder.load(verbose=True)


def load(operator: Operator) -> ModuleType:
    """The operator's module (``async_io`` has ``aio_handle``, ``gds`` has ``gds_handle``), compiled first if need be.

    Raises:
        BackendUnavailable: it cannot be built (see :func:`build_ahead`) or what was built cannot be loaded.
    """
    with _lock:
        if operator not in _loaded:
            _loaded[operator] = _load(operator)
        return _loaded[operator]


def _load(operator: Operator) -> ModuleType:
    name = _MODULE[operator]
    deepspeed_has = _deepspeed_operators()
    if name in deepspeed_has:  # DeepSpeed loaded it before us
        return deepspeed_has[name]
    directory = build(operator, _quietly(_log.warning, operator))
    try:
        pinned = getattr(sys, "_deepspeed_pin_memory_op_module", None)
        if pinned is None:
            path = directory / f"{_PINNED}.so"
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # the other module finds its functions by name
            pinned = _import_file(_PINNED, path)
            sys._deepspeed_pin_memory_op_module = pinned  # type: ignore[attr-defined]
        module = _import_file(name, directory / f"{name}.so")
    except (ImportError, OSError) as e:
        raise BackendUnavailable(
            f"DeepSpeed's {name} was built but cannot be loaded: {e}; remove {directory} and run `{_AHEAD}`"
        ) from e
    deepspeed_has[name] = module
    return module


def _quietly(warn: Callable[[str], None], operator: Operator) -> Callable[[str], None]:
    """Warns of a build that is about to start, and says nothing when there is none to do."""
    return (lambda line: None) if built(operator) else warn


def _import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _deepspeed_operators() -> dict[str, ModuleType]:
    """DeepSpeed's own table of loaded operators."""
    with contextlib.redirect_stdout(sys.stderr):  # it logs to standard output, where a table or JSON may be going
        try:
            from deepspeed.ops.op_builder.builder import OpBuilder
        except ImportError as e:
            raise BackendUnavailable(f"importing deepspeed failed: {e}; {_REMEDY}") from e
    operators: dict[str, ModuleType] = OpBuilder._loaded_ops
    return operators


if __name__ == "__main__":
    _compile_here("gds" if sys.argv[1] == "gds" else "aio", Path(sys.argv[2]))
