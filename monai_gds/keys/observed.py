"""What a computation reads, whether its item names it or not: seen by an audit hook while the item is computed.

What counts is the thread that computes, and whatever it starts (``Thread.start``), hands to a ``ThreadPoolExecutor``
or to an event loop. A context variable says which observation a thread belongs to. Event loops copy it by themselves;
``Thread.start`` and ``ThreadPoolExecutor.submit`` carry it from the first observation on. So reads of other threads,
such as a logger or a checkpoint, do not count, and in the time between observations the hook returns at once.

Not seen are existence tests, ``os.stat``, environment variables, what other programs read, and files that a library
opens in C. Imports neither torch nor MONAI.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shlex
import shutil
import stat
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from monai_gds import limits
from monai_gds.keys.folder_listing import NAMES

_current: ContextVar[Observation | None] = ContextVar("monai_gds_observation", default=None)

#: What is below the first is of the system. The others are parts of paths: of what is installed, and of what is made
#: again on demand.
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_INSTALLED = ("/site-packages/", "/dist-packages/", f"/python{sys.version_info[0]}{sys.version_info[1]}.zip/")
_MADE = ("/__pycache__/", "/.cupy/kernel_cache/", "/.triton/cache/", "/torchinductor_")
_STANDARD_LIBRARY = tuple(f"{os.path.realpath(sysconfig.get_path(kind))}/" for kind in ("stdlib", "platstdlib"))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

#: Modules that read source files for messages, and those that list the folders of ``sys.path``.
_SHOW_CODE, _FIND_MODULES = ("linecache", "tokenize"), ("importlib", "pkgutil")

#: How far the clock of a file system may be behind this machine's, in ns.
_BEHIND = 10_000_000


#: What a file or a folder was: mode, device, inode, size, mtime, ctime. None if there was neither.
State: TypeAlias = "tuple[int, int, int, int, int, int] | None"


def state_of(path: str) -> State:
    """The state of a file or a folder now."""
    try:
        st = os.stat(path)
    except (OSError, ValueError):
        return None
    return st.st_mode, st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns


class Observation:
    """What one computation reads, as :func:`observing` sees it.

    Attributes:
        open: whether it goes on.
        programs: whether the computation has started any program.
        own: files that it wrote, and folders that it made.
    """

    def __init__(self) -> None:
        self.open, self.programs = True, False
        self.own: set[str] = set()
        self._began = time.time_ns() - _BEHIND
        self._files: dict[str, State] = {}  # by path, as they were when they were first read
        self._folders: dict[str, State] = {}  # that were listed
        self._given: set[str] = set()  # files of command lines: what a program changes of them is its output
        self._counted: dict[str, State] = {}  # what must not have changed

    def read(self, path: str) -> None:
        """Notes that a file is being read, or would be if it were there."""
        if path in self._files or _is_of_system(path) or self.is_own(path):
            return
        state = state_of(path)
        if state is not None and self.programs and state[5] >= self._began:
            self.own.add(path)  # a program made it just now
        elif state is None or stat.S_ISREG(state[0]):
            self._files[path] = state

    def look_into(self, folder: str) -> None:
        """Notes that a folder is being listed."""
        if folder not in self._folders and not _is_of_system(f"{folder}/") and not self.is_own(folder):
            self._folders[folder] = state_of(folder)

    def include(self, other: Observation) -> None:
        """Notes all that another observation has seen."""
        self._files = {**other._files, **self._files}
        self._folders = {**other._folders, **self._folders}
        self.own |= other.own
        self.programs |= other.programs

    def run(self, program: str | None, words: Iterable[str], folder: str) -> None:
        """Notes that a program is being started, which may read the files that its command line names."""
        if program and os.path.realpath(program) != os.path.realpath(sys.executable):
            self.read(os.path.join(folder, program))
        for text in (part for word in words for part in (word, word.partition("=")[2]) if part):
            path = os.path.normpath(os.path.join(folder, text))
            if path not in self._files and os.path.isfile(path):
                self._given.add(path)
                self.read(path)
        self.programs = True

    def is_own(self, path: str) -> bool:
        """Whether the computation wrote a file, or made a folder that it is in."""
        while self.own and len(path) > 1:
            if path in self.own:
                return True
            path = os.path.dirname(path)
        return False

    def paths(self, named: Collection[str], apart: Iterable[str]) -> list[str]:
        """What was read beside the files and folders that are ``named``, and beside what is below ``apart``.

        Paths as :func:`as_folders` gives them.
        """
        files = {path: state for path, state in list(self._files.items()) if path not in named}
        folders = {path: state for path, state in list(self._folders.items()) if path not in named}
        self._counted = {}
        if not files and not folders:  # most items read what they name and nothing else
            return []
        real = functools.lru_cache(None)(os.path.realpath)
        known = {state[1:3] for state in map(state_of, named) if state}
        inside = tuple(f"{real(path)}/" for path in {*filter(os.path.isdir, named), *apart, _PACKAGE})

        def counts(path: str, state: State) -> bool:
            place = os.path.join(real(os.path.dirname(path)), os.path.basename(path), "")
            if place.startswith((*_STANDARD_LIBRARY, *inside)) or any(part in place for part in (*_INSTALLED, *_MADE)):
                return False
            return not (state and state[1:3] in known)

        def is_output(path: str, state: State) -> bool:
            return path in self.own if state is None else path in self._given and state_of(path) != state

        files = {p: state for p, state in files.items() if counts(p, state) and not is_output(p, state)}
        folders = {path: state for path, state in folders.items() if counts(path, state)}
        wrote = {os.path.dirname(path) for path in list(self.own)}
        self._counted = {**files, **{path: state for path, state in folders.items() if path not in wrote}}
        return sorted(as_folders(files, folders, self.own))

    def changed(self) -> str:
        """Describes what :meth:`paths` found and what has changed since it was read; empty if nothing has."""
        changed = [path for path, state in self._counted.items() if state_of(path) != state]
        hint = "; the computation itself writes it, after it has read it" if self.own.intersection(changed) else ""
        return f"{', '.join(changed[:3])} changed{hint}" if changed else ""


def as_folders(files: Collection[str], listed: Collection[str], written: Collection[str]) -> Iterator[str]:
    """What stands for files that were read, and for folders that were listed.

    A folder stands for all that is in it, if many of its files were read and none was written. Otherwise the files
    do, and for a folder that was listed, its path and :data:`NAMES`. Modules are left out of this: what Python writes
    beside them does not count.
    """
    left = {path for path in files if not path.endswith(".py")}
    below = Counter(folder for path in left for folder in _above(path))
    whole: list[str] = []
    for folder in sorted(below, key=lambda folder: -folder.count("/")):
        most = limits.READ_LISTED_FILES if folder in listed else limits.READ_FILES
        if below[folder] > most and not any(path.startswith(folder + "/") for path in written):
            inside = {path for path in left if path.startswith(folder + "/")}
            if len(inside) > most:
                left -= inside
                whole.append(folder)
    yield from whole
    yield from (path for path in files if path in left or path.endswith(".py"))
    yield from (
        folder.rstrip("/") + NAMES for folder in listed if not any(f"{folder}/".startswith(f"{one}/") for one in whole)
    )


def _above(path: str) -> Iterator[str]:
    """The folders that a file is in, except the root and those directly below it."""
    while (path := os.path.dirname(path)).count("/") > 1:
        yield path


# ---------------------------------------------------------------------------------------------------------------------
# Events


def _is_of_system(path: str) -> bool:
    return path.startswith(_SYSTEM) and not path.startswith("/dev/shm/")  # where users stage data


def _absolute(path: Any) -> str:
    text = os.fsdecode(path)
    if not text.startswith("/"):
        text = os.path.join(os.getcwd(), text)
    return text if "/../" in text else os.path.normpath(text)  # after a link, ".." leads elsewhere


def _caller() -> str:
    """The name of the module whose code caused the event."""
    return str(sys._getframe(3).f_globals.get("__name__"))


def _on_open(seen: Observation, path: Any, mode: Any, flags: int) -> None:
    if isinstance(path, int):
        return
    name = _absolute(path)
    if flags & (os.O_CREAT | os.O_TRUNC) or flags & os.O_ACCMODE == os.O_WRONLY:
        seen.own.add(name)
    elif _caller() not in _SHOW_CODE:
        if name.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # it has no source
                name = importlib.util.source_from_cache(name)
        # A relative name that os.open does not find may be relative to a descriptor, of which events say nothing.
        if mode is not None or os.path.isabs(os.fsdecode(path)) or os.path.exists(name):
            seen.read(name)


def _on_list(seen: Observation, path: Any) -> None:
    if not isinstance(path, int) and not _caller().startswith(_FIND_MODULES):
        seen.look_into(_absolute("." if path is None else path))


def _on_database(seen: Observation, database: Any) -> None:
    text = os.fsdecode(database)
    text = unquote(urlsplit(text).path) if text.startswith("file:") else text
    if text and text != ":memory:":
        note = seen.read if os.path.exists(text) else seen.own.add
        for suffix in ("", "-wal", "-journal"):
            note(_absolute(text) + suffix)


def _on_program(seen: Observation, program: Any, args: Any, folder: Any, env: Any) -> None:
    words = [os.fsdecode(word) for word in ([args] if isinstance(args, (str, bytes, os.PathLike)) else args)]
    words = [os.fsdecode(program), *words[1:]]
    if os.path.basename(words[0]) in ("sh", "bash", "dash", "zsh") and words[1:2] == ["-c"]:
        words = shlex.split(words[2])
    found = shutil.which(words[0], path=os.fsdecode((os.environ if env is None else env).get("PATH", os.defpath)))
    seen.run(found, words[1:], os.getcwd() if folder is None else _absolute(folder))


_EVENTS: dict[str, Callable[..., Any]] = {
    "open": _on_open,
    "os.listdir": _on_list,
    "os.scandir": _on_list,
    "import": lambda seen, module, path, *rest: path and seen.read(_absolute(path)),  # a library in C
    "ctypes.dlopen": lambda seen, name: name and "/" in os.fsdecode(name) and seen.read(_absolute(name)),
    "sqlite3.connect": _on_database,
    "subprocess.Popen": _on_program,
    "os.posix_spawn": lambda seen, program, args, env: _on_program(seen, program, args, None, env),
    "os.system": lambda seen, command: _on_program(seen, "sh", ["sh", "-c", os.fsdecode(command)], None, None),
    "os.fork": lambda seen: setattr(seen, "programs", True),
    "os.rename": lambda seen, old, new, *rest: seen.is_own(_absolute(old)) and seen.own.add(_absolute(new)),
    "os.mkdir": lambda seen, path, *rest: os.path.lexists(path) or seen.own.add(_absolute(path)),
}


def _hook(
    event: str,
    args: tuple[Any, ...],
    events: dict[str, Callable[..., Any]] = _EVENTS,  # as arguments, since globals end before the interpreter
    current: ContextVar[Observation | None] = _current,
) -> None:
    note = events.get(event)
    if note is not None and (seen := current.get()) is not None and seen.open:
        with contextlib.suppress(Exception):  # which would go to the code that is observed
            note(seen, *args)


@functools.cache
def _install() -> None:
    """Begins to see events, and to carry observations to other threads."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def start_observed(self: threading.Thread) -> None:
        if (seen := _current.get()) is not None:
            self.run = functools.partial(_run_thread, seen, self, vars(self).get("run"))  # type: ignore[method-assign]
        start(self)

    def submit_observed(self: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if (seen := _current.get()) is None:
            return submit(self, function, *args, **kwargs)
        # Threads that the pool starts for this work belong to the pool.
        return _run(None, submit, self, functools.partial(_run, seen, function), *args, **kwargs)

    threading.Thread.start = start_observed  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_observed  # type: ignore[assignment, method-assign]
    sys.addaudithook(_hook)


def _run(seen: Observation | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = _current.set(seen)
    try:
        return function(*args, **kwargs)
    finally:
        _current.reset(token)


def _run_thread(seen: Observation, thread: threading.Thread, own: Callable[[], None] | None) -> None:
    vars(thread).pop("run", None)  # else thread and function would keep each other
    _run(seen, own or thread.run)


@contextlib.contextmanager
def observing(seen: Observation | None = None) -> Iterator[Observation]:
    """Observes what the block reads; goes on with an observation if there is one.

    An observation around it, of an item that is made from another dataset's, sees the same.
    """
    _install()
    outer, seen = _current.get(), seen or Observation()
    seen.open = True
    token = _current.set(seen)
    try:
        yield seen
    finally:
        seen.open = False
        _current.reset(token)
        if outer is not None:
            outer.include(seen)
