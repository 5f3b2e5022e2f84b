"""Compiles and loads DeepSpeed's C++ operators for the ``deepnvme`` backends. Called by them and by ``doctor --build``.

DeepSpeed ships its file operators as C++ source and compiles them on first use, in the middle of whatever the user was
doing. Here that is a step of its own:

* it says what it is about to do and what it needs, and a failure shows the compiler's last lines;
* it runs in a child process, so that nothing of it (environment, working directory, output) reaches the caller's;
* it works in a fresh directory that is renamed when it is complete. Two processes that start at once are kept apart by
  ``flock``, which the kernel drops when its holder dies. (torch's own lock is a file: one killed build, and every later
  one waits for it for ever. Ours never meets an old one, because the directory is new.)

What was built is loaded from its file, without going through torch's locking again.

DeepSpeed's source is compiled as it is, but for five things (:func:`_compile_here`):

* Its twelve files are compiled as three, for nearly all of the time goes into torch's headers.
* The results of the single transfers, which DeepSpeed drops, are kept for the backend to ask for, and waiting for them
  goes on behind a signal, which would end the process: the first lines of ``deepnvme_results.h`` say how.
* In one file, files are said to have no end. ``aio_handle.pread`` looks whether the range lies inside the file; if not,
  it says so on standard output, where JSON may be going, and ends the process. The backend looks first, but a file may
  shrink in between; so the read comes back short, which the backend finds.
* ``gds_handle`` ends its process with ``_Exit`` where it called ``exit``, also in its own threads: there, the code that
  libraries have for the end of a process would run beside the other threads, and may wait for them.
* The handles' C++ types get names of our own. pybind11 refuses a type that is registered already, and the process may
  use DeepSpeed for its own purposes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from monai_gds.errors import BackendUnavailable
from monai_gds.storage.base import Availability

__all__ = [
    "Operator",
    "build",
    "build_ahead",
    "build_directory",
    "build_for_use",
    "built",
    "load",
    "probe",
    "taker_of_errors",
    "writing",
]

#: ``aio``: the bounce buffer operator. ``gds``: GPUDirect Storage, which needs the CUDA toolkit and libcufile.
Operator = Literal["aio", "gds"]

_MODULE = {"aio": "async_io", "gds": "gds"}
_PINNED = "pin_memory"  # holds the page-locked memory that both operators share; must be loaded before them
_SHARED = "_deepspeed_pin_memory_op_module"
_REMEDY = "pip install 'monai_gds[deepnvme]'"
_AHEAD = "monai-gds doctor --build deepnvme"
_LOG_LINES = 25

#: What stands before a file of DeepSpeed's; see the module's docstring.
_PREFIXES = {
    "csrc/aio/py_lib/deepspeed_py_io_handle.cpp": (
        "#include <cstdint>\n"
        "static int64_t monai_gds_no_end(const char*, int64_t& size) { size = INT64_MAX; return 0; }\n"
        "#define get_file_size monai_gds_no_end"
    ),
    "csrc/aio/common/deepspeed_aio_common.cpp": f'#include "{Path(__file__).with_name("deepnvme_results.h")}"',
}

#: What stands before everything of an operator's, see there. <cstdlib> first: it undefines these macros.
_HEADS: dict[Operator, list[str]] = {"aio": [], "gds": ["#include <cstdlib>", "#define exit _Exit"]}

_RECIPE = 4  #: to be raised with every change of what `_compile_here` builds, so that older builds are not used

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: dict[Operator, ModuleType] = {}
_first_write = threading.Lock()
_has_written = False

#: Whether DeepSpeed's C++ code has warned in this process: an attribute of the module ``deepspeed.utils``.
_WARNED = "_deepspeed_nvme_write_warning_emitted"


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
    return Path(root) / "monai_gds" / "-".join([*parts, _processor_and_shim()]) / operator


def built(operator: Operator) -> bool:
    """Whether the operator needs no compiling any more."""
    return (build_directory(operator) / f"{_MODULE[operator]}.so").is_file()


def _deepspeed_version() -> str | None:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "unpacked" if importlib.util.find_spec("deepspeed") else None


@functools.cache
def _processor_and_shim() -> str:
    """Stands for what else decides whether a build fits: this processor's abilities, and what we compile in."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    abilities = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    ours = Path(__file__).with_name("deepnvme_results.h").read_bytes()
    return hashlib.sha256(f"{_RECIPE} {abilities}".encode() + ours).hexdigest()[:12]


def _path_with_scripts() -> str:
    """PATH, and the folder of this Python's scripts: ``pip install ninja`` puts it there, on PATH or not."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _missing(operator: Operator) -> list[str]:
    """What compiling lacks on this machine, each with its Debian package."""
    missing = []
    if operator == "gds":
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None or not os.path.isfile(os.path.join(CUDA_HOME, "include", "cufile.h")):
            missing.append("CUDA toolkit with cufile.h (its path in CUDA_HOME; NVIDIA's Debian package: libcufile-dev)")
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
    missing = _missing(operator)
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


def _compile_here(operator: Operator, work: Path, *, joined: bool) -> None:
    """The child's part: lets DeepSpeed compile into ``TORCH_EXTENSIONS_DIR``, which the parent has set.

    Args:
        operator: what.
        work: a folder of its own.
        joined: few groups of files. If they do not compile, each file is tried for itself.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: do not outlive a parent that was killed
    import torch.utils.cpp_extension  # noqa: F401  # with CUDA, DeepSpeed takes for granted that somebody has
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

    builder: Any = AsyncIOBuilder() if operator == "aio" else GDSBuilder()
    _copy_source(Path(builder.deepspeed_src_path("csrc")), work / "csrc")
    groups = _groups(builder.sources()) if joined else [[source] for source in builder.sources()]
    sources = [work / f"group{number}.cpp" for number in range(len(groups))]
    for path, members in zip(sources, groups, strict=True):
        lines = [line for source in members for line in (_PREFIXES.get(source, ""), f'#include "{work / source}"')]
        path.write_text("\n".join([*_HEADS[operator], *lines, ""]))
    folders = [str(work / path) if path.startswith("csrc/") else path for path in builder.include_paths()]
    flags = [flag for flag in builder.cxx_args() if flag != "-g"]
    flags += [f"-D{name}=monai_gds_{name}" for name in ("deepspeed_aio_handle_t", "deepspeed_gds_handle_t")]
    builder.sources, builder.include_paths = (lambda: [str(path) for path in sources]), (lambda: folders)
    builder.cxx_args = lambda: flags
    try:
        builder.load(verbose=True)
    except Exception as e:
        if joined and (work / _MODULE[operator]).is_dir():  # it came as far as this one
            print("not so; each file for itself", flush=True)
            shutil.rmtree(work / _MODULE[operator])
            os.execv(sys.executable, [sys.executable, "-m", __spec__.name, operator, str(work), "single"])
        # a traceback would push the compiler's lines out of sight
        sys.exit(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")


def _groups(sources: Sequence[str]) -> list[list[str]]:
    """Files to be compiled as one: those with a line of our own before them apart, and the one whose names clash."""
    apart = [source for source in sources if source in _PREFIXES]
    others = [source for source in sources if source not in _PREFIXES]
    first = [source for source in others if source.endswith("/deepspeed_aio_types.cpp")]
    return [[apart[0], *first], *([source] for source in apart[1:]), [s for s in others if s not in first]]


def _copy_source(csrc: Path, to: Path) -> None:
    """Copies DeepSpeed's source, with a guard in every header: most have none, and files that share them are joined."""
    for name in ("aio", "gds", "pin_memory"):
        shutil.copytree(csrc / name, to / name, dirs_exist_ok=True)
    for header in to.rglob("*.h"):
        header.write_text("#pragma once\n" + header.read_text())


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
    directory = build_for_use(operator)
    try:
        if getattr(sys, _SHARED, None) is None:  # DeepSpeed's own way of having one for the process
            path = directory / f"{_PINNED}.so"
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # the operators find its functions by name
            setattr(sys, _SHARED, _import_file(_PINNED, path))
        return _import_file(name, directory / f"{name}.so")
    except (ImportError, OSError) as e:
        raise BackendUnavailable(
            f"DeepSpeed's {name} was built but cannot be loaded: {e}; remove {directory} and run `{_AHEAD}`"
        ) from e


def build_for_use(operator: Operator) -> Path:
    """Builds the operator if need be, with a warning before it starts; says nothing when there is nothing to do.

    Returns and raises as :func:`build`.
    """
    return build(operator, (lambda line: None) if built(operator) else _log.warning)


def _import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def taker_of_errors(module: ModuleType) -> Callable[[torch.Tensor], tuple[int, int] | None]:
    """The function that says what the kernel answered to the transfers from or to a piece of host memory.

    It takes the memory as a 1-D uint8 tensor and returns None when every transfer was complete; else the first
    failure: ``(offset within the memory, errno, or 0 when the transfer was short)``, and forgets the others.
    """
    take = ctypes.CDLL(module.__file__).monai_gds_take_error
    take.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_long)]

    def taker(memory: torch.Tensor) -> tuple[int, int] | None:
        at, result = ctypes.c_void_p(), ctypes.c_long()
        if not take(memory.data_ptr(), memory.numel(), at, result):
            return None
        return (at.value or 0) - memory.data_ptr(), max(0, -result.value)

    return taker


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Surrounds every write through a handle; the first one of the process has it to itself.

    That one imports deepspeed to warn that writing wears drives out. Two threads in it at once wait for each other for
    ever: one has the interpreter's lock and wants the C++ once-flag, the other has the flag and wants the lock. And
    deepspeed's logger writes to whatever standard output is when it is imported, where JSON may be going.

    The warning is left out: who stores tensors here asked for that. A handle of the user's own still gives it.
    """
    global _has_written
    if _has_written:
        yield
        return
    with _first_write:
        with contextlib.redirect_stdout(sys.stderr), _quietly_importing():
            utils = importlib.import_module("deepspeed.utils")
        warned = hasattr(utils, _WARNED)
        setattr(utils, _WARNED, True)
        try:
            yield
        finally:
            if not warned:
                delattr(utils, _WARNED)
        _has_written = True


@contextlib.contextmanager
def _quietly_importing() -> Iterator[None]:
    """Turns what this thread has deepspeed log, but for errors, into lines of our own log's level INFO.

    It warns when it is imported where there is no GPU, which is how half of this package is used.
    """
    here = threading.get_ident()

    def turn_down(record: logging.LogRecord) -> bool:
        if record.thread != here or record.levelno >= logging.ERROR:
            return True
        _log.info("deepspeed: %s", record.getMessage())
        return False

    logger = logging.getLogger("DeepSpeed")  # the filter stays when deepspeed gives it its level and handler
    logger.addFilter(turn_down)
    try:
        yield
    finally:
        logger.removeFilter(turn_down)


if __name__ == "__main__":
    _compile_here("gds" if sys.argv[1] == "gds" else "aio", Path(sys.argv[2]), joined=sys.argv[3:] != ["single"])
