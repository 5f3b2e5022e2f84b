"""Where Python code comes from, an installed library or the user, and what counts of libraries' classes.

Nothing here imports these libraries at its start. MONAI's version is an ingredient of the key by itself, so its code
counts by name only.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any

#: Libraries that count by name only.
UNVERSIONED = frozenset({"monai", "monai_gds"})

_STANDARD_LIBRARY = tuple(sysconfig.get_path(kind) + "/" for kind in ("stdlib", "platstdlib"))

HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE


@functools.lru_cache(maxsize=1024)
def library_of(module: str | None) -> bytes | None:
    """Name and version of the installed library that a module belongs to; None for a user's own code."""
    root = (module or "builtins").partition(".")[0]
    if root in UNVERSIONED:
        return root.encode()
    file = getattr(sys.modules.get(root), "__file__", None) or ""  # none of what is built in, or a namespace package
    if is_in_site(file):
        return f"{root} {_version(root, file)}".encode()
    if file.startswith(_STANDARD_LIBRARY) or (not file and root in sys.stdlib_module_names):
        return root.encode()
    binary = getattr(sys.modules.get(module or ""), "__file__", None)
    if binary is None or not binary.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
        return None
    with open(binary, "rb") as f:  # a user's own extension counts by its machine code
        return f"{module} {hashlib.file_digest(f, hashlib.blake2b).hexdigest()[:32]}".encode()


@functools.cache
def _version(root: str, file: str) -> str:
    """The version of an installed library, given its top-level module and that module's file.

    A library that was installed from a folder or a repository may change and keep its version, so it counts by the
    hashes of its files, too. Those that conda installs all look as if they were.
    """
    try:
        found: importlib.metadata.Distribution | None = importlib.metadata.distribution(root)
        named = ""
    except importlib.metadata.PackageNotFoundError:  # what is installed has another name than what is imported
        end = max(file.rfind("/site-packages/"), file.rfind("/dist-packages/")) + len("/site-packages")
        record = f"\n{file[end + 1 :]},"
        installed = importlib.metadata.distributions(path=[file[:end]])
        found = next((d for d in installed if record in "\n" + (d.read_text("RECORD") or "")), None)
        named = str(getattr(sys.modules[root], "__version__", ""))
    if found is None:
        return named
    told = named or found.version
    if found.read_text("direct_url.json") is None or "conda" in (found.read_text("INSTALLER") or ""):
        return told
    lines = (found.read_text("RECORD") or "").splitlines()
    files = sorted(line for line in lines if ",sha256=" in line and not re.match(r"\.\./|[^/]*\.dist-info/", line))
    return f"{told} {hashlib.blake2b(chr(10).join(files).encode(), digest_size=16).hexdigest()}"


def library_of_function(function: types.FunctionType) -> bytes | None:
    """As :func:`library_of`, for a function: None unless its code is a library's, too.

    ``functools.wraps`` gives a user's function the name of the library's that it calls. A function that
    ``eval`` makes, as in a bundle's configuration, has no module.
    """
    home = function.__globals__.get("__name__", function.__module__)
    if function.__module__ is None or library_of(home) is None:
        return None
    return library_of(function.__module__)


def library_of_class(cls: type) -> bytes | None:
    """As :func:`library_of`, for a class: None also for one of the user's that names a library as its module.

    What ``exec`` makes without a ``__name__`` names ``builtins``, and what ``types.new_class``, ``make_dataclass`` and
    metaclasses make on demand names the module that calls ``type``.
    """
    library = library_of(cls.__module__)
    if library is None or not is_made_in_python(cls) or is_in_its_module(cls):
        return library
    functions = [member for member in vars(cls).values() if isinstance(member, types.FunctionType)]
    is_users = cls.__module__ in ("builtins", "types") or any(library_of_function(f) is None for f in functions)
    return None if is_users else library


def is_made_in_python(cls: type) -> bool:
    """Whether a class was made by a class statement, or by calling ``type``, rather than written in C."""
    return cls.__flags__ & (HEAP_TYPE | _IMMUTABLE_TYPE) == HEAP_TYPE


def is_in_its_module(value: Any) -> bool:
    """Whether a class or function is found under its own name in the module that it names."""
    outer, *inner = value.__qualname__.split(".")
    found = vars(sys.modules[value.__module__]).get(outer) if value.__module__ in sys.modules else None
    for name in inner:
        found = getattr(found, name, None)
    return found is value


def is_installed(root: str) -> bool:
    """Whether a top-level module belongs to an installed library. It is not imported to find out."""
    if root in sys.modules or root in sys.stdlib_module_names:
        return root not in sys.modules or library_of(root) is not None
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return True
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return spec is None or any(map(is_in_site, places))


@functools.cache
def is_in_site(file: str) -> bool:
    """Whether a file lies where packages are installed, and not in a folder of the user's that is linked there."""
    site = re.search(r".*/(?:site|dist)-packages/[^/]*", file)
    return site is not None and re.search(r"/(?:site|dist)-packages/", f"{os.path.realpath(site[0])}/") is not None


def version_of_monai(wanted: str | None) -> str:
    """MONAI's version, as far as it counts: ``"exact"``, ``"minor"``, or None for nothing."""
    if wanted is None:
        return ""
    import monai

    found = str(monai.__version__)
    if wanted == "exact" and not is_in_site(monai.__file__):  # a clone keeps its version from edit to edit
        found = f"{found} {_digest_of_folder(os.path.dirname(monai.__file__))}"
    return ".".join(re.split(r"[.+]", found)[:2]) if wanted == "minor" else found


@functools.cache
def _digest_of_folder(folder: str) -> str:
    """32 hex digits of the code in a folder, as it was when it was first asked for."""
    h = hashlib.blake2b(digest_size=16)
    for kind in ("py", "so"):
        for path in sorted(glob.glob(f"{glob.escape(folder)}/**/*.{kind}", recursive=True)):
            with open(path, "rb") as file:
                h.update(f"{path[len(folder) :]} {os.fstat(file.fileno()).st_size} ".encode() + file.read())
    return h.hexdigest()


def module_name(module: str | None) -> bytes:
    return (module or "").replace("__mp_main__", "__main__").encode()  # the name of the script in a spawned worker


def as_in_the_script(name: Any, value: Any) -> Any:
    """The value of a variable, where a spawned worker or another folder has another: as in the script."""
    if name in ("__name__", "__module__") and isinstance(value, str):
        return module_name(value).decode()
    if name == "__file__" and isinstance(value, str):
        return os.path.basename(value).encode()  # bytes do not name a source
    return value


def file_of(module: str) -> str | None:
    """The file of a user's module, which is not imported to find it; None if there is none."""
    *outer, _ = [module[:i] for i, letter in enumerate(f"{module}.") if letter == "."]
    try:
        spec = importlib.util.find_spec(outer[0] if outer else module)
    except (ImportError, ValueError):  # of a module that was made without one
        return None
    for package in [*outer[1:], module] if outer else ():
        places = None if spec is None else spec.submodule_search_locations
        spec = None if places is None else importlib.machinery.PathFinder.find_spec(package, places)
    return None if spec is None or not spec.has_location else spec.origin


def is_lazy(module: types.ModuleType) -> bool:
    """Whether a module may make up members when it is asked for them."""
    return "__getattr__" in vars(module) or type(module) is not types.ModuleType


#: Attributes that do not count, by class: random state, and what objects remember of calls and of the process.
TRANSIENT = {
    "monai.data.image_reader.ImageReader": frozenset({"filenames", "has_series"}),
    "monai.transforms.inverse.TraceableTransform": frozenset({"_tracing"}),
    "monai.transforms.transform.Randomizable": frozenset({"R"}),
    "monai.transforms.transform.RandomizableTransform": frozenset({"R", "_do_transform"}),
    "numpy.vectorize": frozenset({"_ufunc"}),
    "omegaconf.base.Node": frozenset({"_flags_cache"}),
    "pydantic._internal._decorators.Decorator": frozenset({"cls_ref"}),  # an address in memory
    "random.Random": frozenset({"gauss_next"}),
    "torch._dynamo.convert_frame.ConvertFrameBox": frozenset({"error_on_graph_break"}),
    "torch._dynamo.eval_frame.OptimizedModule": frozenset({"_torchdynamo_wrapper_id"}),  # another
    "torch.nn.modules.rnn.RNNBase": frozenset({"_flat_weight_refs"}),
    "torch.utils.hooks.RemovableHandle": frozenset({"hooks_dict_ref", "extra_dict_ref", "id"}),
}

#: Classes whose objects count by their type: what they hold is the state of a process, which gives no values.
BY_TYPE = frozenset(
    ("_thread.lock", "_thread.RLock", "concurrent.futures._base.Executor", "logging.Handler",
     "multiprocessing.pool.Pool", "multiprocessing.synchronize.SemLock")
)  # fmt: skip

#: What counts of wrappers beside the function that they wrap, by class.
OPTIONS: dict[str, Callable[[Any], Any]] = {
    "functools._lru_cache_wrapper": lambda wrapper: wrapper.cache_parameters()["typed"],
    "joblib.memory.MemorizedFunc": attrgetter("ignore"),
    "numba.core.dispatcher.Dispatcher": attrgetter("targetoptions"),
}


def writes_files(cls: type) -> bool:
    """Whether a class writes the files that its attributes name, so that they are not its inputs."""
    return cls.__module__.startswith("monai.") and cls.__name__.startswith(("Save", "Write"))


def _requested_readers(loader: Any) -> list[Any]:
    """The readers of a ``LoadImage`` that decide what it reads.

    Without ``reader=``, the file's suffix selects among all that are installed, and all count. With ``reader=``, MONAI
    still registers its default readers in front of the requested ones, and which those are depends on the libraries
    that are installed.
    """
    readers = list(loader.readers)
    if loader.auto_select:
        return readers
    from monai.transforms.io.array import SUPPORTED_READERS, get_default_reader_registration_order

    default = iter([SUPPORTED_READERS[name] for name in get_default_reader_registration_order()])
    skipped = 0
    for reader in readers:
        if not any(type(reader) is cls for cls in default):  # `default` continues after the match
            break
        skipped += 1
    return readers[skipped:] or readers


#: Attributes that count by a function of the object, by class and name.
COMPUTED: dict[str, dict[str, Callable[[Any], Any]]] = {
    # kept in _tracing, which is created on first use
    "monai.transforms.inverse.TraceableTransform": {"tracing": attrgetter("tracing")},
    "monai.transforms.io.array.LoadImage": {"readers": _requested_readers},
}
