"""Compiles and loads DeepSpeed's C++ operators, for the DeepNVMe backends and for ``doctor --build``.

DeepSpeed ships its file operators as C++ source and compiles them on first use, in the middle of whatever the user was
doing. Here that is a separate step:

* It announces what it is about to do and what it needs. A failure shows the compiler's last lines.
* It runs in a child process, so that its environment, working directory and output never reach the caller's.
* It works in a fresh directory, which is renamed when it is complete. Builders that start at once are kept apart by
  ``flock``, which the kernel releases when its holder dies. (torch's own lock is a file: after one killed build, every
  later one waits for ever. Ours never meets an old one, because the directory is new.)

The built library is loaded directly, without torch's locking.

DeepSpeed's source is compiled with these changes (:data:`_CHANGES`, :func:`_compile_here`):

* Its files are compiled as two units, since nearly all of the time goes into torch's headers.
* The result of every transfer, which DeepSpeed drops, is kept for the backend to fetch, and a signal during a wait no
  longer ends the process; see ``results.h``.
* Files have no end. ``aio_handle.pread`` compares the range with the file's size and, if it does not fit, prints to
  standard output, where JSON may be going, and ends the process. The backend checks first, but the file may shrink
  after that. This way the read comes back short, which the backend detects.
* Nothing warns at the first write. The warning imports deepspeed, whose logger takes over standard output. Two threads
  that write first wait for each other for ever: one holds the interpreter's lock and wants the C++ once-flag, the
  other holds the flag and wants the lock. Users who store tensors here have asked for the writes; a handle of their
  own still warns.
* ``gds_handle`` ends its process with ``_Exit`` instead of ``exit``: it does so in its own threads too, where the
  exit handlers of libraries would run beside the other threads, and may wait for them.
* The allocator of page-locked memory, a separate library in DeepSpeed, is compiled in. It and the handles get names
  of our own: the process may use DeepSpeed's operators as well, and pybind11 refuses a type that is registered twice.
"""

from __future__ import annotations

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
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from monai_gds.base.process import PerProcess, end_with_parent
from monai_gds.errors import BackendUnavailable
from monai_gds.storage.backend import Availability

#: ``aio``: libaio through host memory. ``gds``: GPUDirect Storage, which needs the CUDA toolkit and libcufile.
Operator = Literal["aio", "gds"]

_MODULE = {"aio": "async_io", "gds": "gds"}
_REMEDY = "pip install 'monai_gds[deepnvme]'"
_AHEAD = "monai-gds doctor --build deepnvme"
_LOG_LINES = 25
_RESULTS = Path(__file__).with_name("results.h")


#: Lines put in front of some of DeepSpeed's files, and the macros undefined after each; see the module's docstring.
#: torch's headers come first where they use the same name.
_CHANGES = {
    "csrc/aio/py_lib/deepspeed_py_io_handle.cpp": (
        "#include <cstdint>\n"
        "static int64_t monai_gds_no_end(const char*, int64_t& size) { size = INT64_MAX; return 0; }\n"
        "#define get_file_size monai_gds_no_end",
        ["get_file_size"],
    ),
    "csrc/aio/py_lib/deepspeed_aio_op_desc.cpp": (
        "#include <torch/extension.h>\n#include <mutex>\n#define call_once(...) once_flag()", ["call_once"],
    ),
    "csrc/aio/common/deepspeed_aio_common.cpp": (f'#include "{_RESULTS}"', ["io_submit", "io_pgetevents"]),
}  # fmt: skip

#: Lines in front of every unit of an operator. <cstdlib> comes first: it undefines these macros.
_HEADS: dict[Operator, list[str]] = {"aio": [], "gds": ["#include <cstdlib>", "#define exit _Exit"]}

#: The file that looks for DeepSpeed's allocator in the process, and the files that are compiled in its place.
_ALLOCATOR_CLIENT = "csrc/aio/py_lib/deepspeed_pin_tensor_client.cpp"
_ALLOCATOR = ["csrc/pin_memory/page_alloc.cpp", "csrc/pin_memory/deepspeed_pin_tensor.cpp"]

_RENAMED = (
    "deepspeed_aio_handle_t", "deepspeed_gds_handle_t", "deepspeed_pin_tensor_t", "deepspeed_pin_tensor_mgr_holder",
)  # fmt: skip

_RECIPE = 5  #: raised with every change of what `_compile_here` builds, so that older builds are not used

_log = logging.getLogger(__name__)
_loading = PerProcess(threading.Lock)
_loaded: dict[Operator, ModuleType] = {}


def build_directory(operator: Operator) -> Path:
    """The directory of the built operator: one for each combination that needs its own build.

    It is under ``TORCH_EXTENSIONS_DIR``, or torch's default for it (``~/.cache/torch_extensions``). The processor's
    features are part of the name because DeepSpeed compiles for exactly this processor.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions"
    )
    device = f"cu{torch.version.cuda}" if torch.cuda.is_available() else "cpu"
    parts = [_deepspeed_version() or "none", f"torch{torch.__version__}", device, f"py{platform.python_version()}"]
    return Path(root) / "monai_gds" / "-".join([*parts, _processor_and_changes()]) / operator


def _library(operator: Operator) -> Path:
    return build_directory(operator) / f"{_MODULE[operator]}.so"


def built(operator: Operator) -> bool:
    """Whether the operator has been built."""
    return _library(operator).is_file()


def _deepspeed_version() -> str | None:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "unpacked" if importlib.util.find_spec("deepspeed") else None


@functools.cache
def _processor_and_changes() -> str:
    """A digest of what else decides whether a build fits: the processor's features, and our changes."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return hashlib.sha256(f"{_RECIPE} {features}".encode() + _RESULTS.read_bytes()).hexdigest()[:12]


def _path_with_scripts() -> str:
    """PATH with the folder of this Python's scripts: ``pip install ninja`` puts it there, on PATH or not."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _missing(operator: Operator) -> list[str]:
    """What this machine lacks for compiling, each with its Debian package."""
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
    """Whether the operator can be used here: it is built, or nothing that building needs is missing."""
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


def build_ahead(say: Callable[[str], None]) -> list[Path]:
    """Builds what this machine can use, for ``monai-gds doctor --build deepnvme``, and returns the directories.

    ``say`` gets one line per step. Raises BackendUnavailable if deepspeed or a tool is missing, or with the compiler's
    last lines.
    """
    done = [build("aio", say)]
    can_gds = probe("gds")
    if can_gds:
        done.append(build("gds", say))
    else:
        say(f"gds is left out: {can_gds.reason}")
    return done


def build(operator: Operator, say: Callable[[str], None] | None = None) -> Path:
    """Builds the operator unless that is done, or another process does it first, and returns its directory.

    ``say`` gets one line per step. By default each step of a build is a warning. Raises as :func:`build_ahead`.
    """
    name, target = _MODULE[operator], build_directory(operator)
    if built(operator):
        if say is not None:
            say(f"{name} is built: {target}")
        return target
    say = say or _log.warning
    found = probe(operator)
    if not found:
        raise BackendUnavailable(f"{found.reason}; {found.remedy}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is compiling DeepSpeed's {name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not built(operator):
            say(
                f"compiling DeepSpeed's {name}, once for this machine; this takes minutes. "
                "It uses g++, ninja and the libaio headers (Debian: g++ ninja-build libaio-dev)"
            )
            _compile_into(operator, target)
            say(f"compiled: {target}")
    return target


def _compile_into(operator: Operator, target: Path) -> None:
    """Compiles in a new directory beside ``target`` and renames the result. The caller holds the lock."""
    name = _MODULE[operator]
    for left_behind in target.parent.glob(f"{target.name}.building-*"):  # by a build that was killed
        shutil.rmtree(left_behind, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        log = work / "log"
        code = _run_child(operator, work, log)
        library = work / name / f"{name}.so"
        if code or not library.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise BackendUnavailable(f"compiling DeepSpeed's {name} failed (exit status {code}):\n{tail}")
        finished = work / "finished"
        finished.mkdir()
        library.rename(finished / library.name)
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
            [sys.executable, "-m", __name__, operator, str(work)],
            cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait()
        finally:
            if child.returncode is None:  # interrupted: end the compilers too
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _compile_here(operator: Operator, work: Path) -> None:
    """Runs in the child: has DeepSpeed compile into ``TORCH_EXTENSIONS_DIR``, which the parent has set."""
    end_with_parent()
    import torch.utils.cpp_extension  # noqa: F401  # with CUDA, DeepSpeed relies on somebody having imported it
    from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

    builder: Any = AsyncIOBuilder() if operator == "aio" else GDSBuilder()
    _copy_source(Path(builder.deepspeed_src_path("csrc")), work / "csrc")
    files = [*(path for path in builder.sources() if path != _ALLOCATOR_CLIENT), *_ALLOCATOR]
    # Files that we change, and one whose names clash with the others, are a unit of their own.
    apart = [path for path in files if path in _CHANGES or path.endswith("/deepspeed_aio_types.cpp")]
    units = [apart, [path for path in files if path not in apart]]
    sources = [work / f"unit{number}.cpp" for number in range(len(units))]
    for path, members in zip(sources, units, strict=True):
        path.write_text("\n".join([*_HEADS[operator], *(_include(work, member) for member in members), ""]))
    folders = [str(work / path) if path.startswith("csrc/") else path for path in builder.include_paths()]
    flags = [flag for flag in builder.cxx_args() if flag != "-g"]
    flags += [f"-D{name}=monai_gds_{name}" for name in _RENAMED]
    builder.sources, builder.include_paths = (lambda: [str(path) for path in sources]), (lambda: folders)
    builder.cxx_args = lambda: flags
    try:
        builder.jit_load(verbose=True)
    except Exception as e:
        # a traceback would push the compiler's lines out of sight
        sys.exit(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")


def _include(work: Path, path: str) -> str:
    lines, macros = _CHANGES.get(path, ("", []))
    return "\n".join([lines, f'#include "{work / path}"', *(f"#undef {macro}" for macro in macros)])


def _copy_source(csrc: Path, to: Path) -> None:
    """Copies DeepSpeed's source, with a guard in every header: most have none, and files that share them are joined."""
    for name in ("aio", "gds", "pin_memory"):
        shutil.copytree(csrc / name, to / name, dirs_exist_ok=True)
    for header in to.rglob("*.h"):
        header.write_text("#pragma once\n" + header.read_text())


def load(operator: Operator) -> ModuleType:
    """The operator's module (``async_io`` has ``aio_handle``, ``gds`` has ``gds_handle``), compiled first if need be.

    Raises BackendUnavailable if it cannot be built or loaded.
    """
    with _loading():
        if operator not in _loaded:
            build(operator)
            path = _library(operator)
            try:
                spec = importlib.util.spec_from_file_location(_MODULE[operator], path)
                assert spec is not None and spec.loader is not None, "its name ends in .so"
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except (ImportError, OSError) as e:
                found = f"DeepSpeed's {path.stem} was built but cannot be loaded: {e}"
                raise BackendUnavailable(f"{found}; remove {path.parent} and run `{_AHEAD}`") from e
            _loaded[operator] = module
        return _loaded[operator]


if __name__ == "__main__":
    _compile_here("gds" if sys.argv[1] == "gds" else "aio", Path(sys.argv[2]))
