"""Hidden randomness: what a transform draws that is not marked random is cached, and comes again in every epoch.

A pipeline is not suspected without a hint, and without one each item is computed once. Hints are cheap and prove
nothing, since training moves the global generators too:

* a random generator moved while an item was computed: a global one, or one that the transforms hold or name;
* the item holds the time, or a text with the address of an object (``<Reader object at 0x7f…>``);
* the user's code names what moves no generator, such as ``os.urandom``, ``default_rng`` or ``id``.

After the first hint, once for each pipeline in a process, the item is computed once more: by copies of the transforms,
so that attributes and addresses of their own differ too, and with other global seeds. If it comes out otherwise, it is
computed transform by transform, twice side by side, and the first transform whose results differ is named.

Global generators are seeded and put back only where the main thread computes. Elsewhere training may draw from them at
the same time, and they just go on. Pipelines that write files are left alone. Used by the dataset.
"""

from __future__ import annotations

import dis
import re
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from math import prod
from typing import Any

import numpy as np
import torch

from monai_gds.base.notices import Notice
from monai_gds.errors import warn
from monai_gds.keys.code import HashedTransforms
from monai_gds.keys.hashing import hash_item
from monai_gds.keys.libraries import writes_files
from monai_gds.pipeline.parts import name_of, parts
from monai_gds.pipeline.randomness import GLOBAL, is_generator, seed_everything, state_of, states_kept, states_of
from monai_gds.pipeline.split import Split

#: The generators of the whole process. Those of CUDA are not looked at: training moves them all the time.
_GLOBAL = tuple(slot.get() for slot in GLOBAL.values())

#: Names of functions that draw, or that give the time or an address.
_DRAWS = re.compile(
    r".*(rand|rng|noise|shuffle|uuid|secrets|token_).*|id|now|utcnow|today|ctime|localtime|gmtime|strftime"
    r"|((process_|thread_)?time|perf_counter|monotonic)(_ns)?",
    re.IGNORECASE,
)

#: Arrays with more elements are not searched for the time.
_SMALL = 16

#: Seconds after 1970. A time of now, in whatever unit, is more than this.
_LONG_AGO = 1e9

#: How far two floating-point results may be apart, in units of the last place of the largest value: the order of sums
#: may depend on where arrays lie in memory.
_LAST_PLACES = 16

#: Held while an item is computed once more: two threads would put back one another's seeds.
_one = threading.Lock()


class Hidden:
    """Looks for hidden randomness in the deterministic half of one pipeline, in one process.

    Args:
        split: the pipeline.
        hashed: what hashing its transforms met.
        place: where its items are cached; of processes forked from one another, one warns for each place.
    """

    def __init__(self, split: Split, hashed: HashedTransforms, place: str) -> None:
        self._split, self._hashed, self._place = split, hashed, place
        self._is_suspect: bool | None = None  # whether the code names what draws; None: not known yet
        kinds = {cls for transform in split.deterministic for part in parts(transform) for cls in type(part).__mro__}
        self._is_done = any(map(writes_files, kinds))
        self._generators: list[Any] = []
        self._searches = 2  # how often they are still to be found: a first call may make some

    def states(self) -> list[tuple[Any, Any]]:
        """Generators with their states, to be taken before an item is computed."""
        if self._split.steady is not None:
            self._split.steady.begin()
        if self._is_done:
            return []
        if self._searches > 0:
            self._searches -= 1
            held = (part for transform in self._split.deterministic for part in parts(transform))
            self._generators = [part for part in (*_GLOBAL, *self._hashed.generators, *held) if is_generator(part)]
        return states_of(self._generators)

    def look(self, before: list[tuple[Any, Any]], item: Any, computed: Any) -> str:
        """Warns if what was just computed has a hint of randomness, and comes out otherwise once more.

        Args:
            before: the :meth:`states` of before it was computed.
            item: as the data hold it.
            computed: the item after the deterministic transforms.

        Returns:
            Why the item must not be cached; empty if it may.
        """
        steady = self._split.steady
        if steady is None:
            self._warn_of(self._found(before, item, computed))
            return ""
        why = steady.seen()
        if not why and (name := self._found(before, item, computed)):
            why = steady.given_up = f"{name} gives another result each time"
        self.tell()
        return why

    def tell(self) -> None:
        """Warns, once, of the transform because of which nothing is cached, if there is one."""
        steady = self._split.steady
        if steady is not None and steady.given_up and Notice("not steady", self._place, self._hashed.digest).is_new():
            warn(
                f"a Dataset computes its items at every access, as MONAI's does: {steady.given_up}, and is not marked "
                "random. Derive it from monai.transforms.RandomizableTrait, and what comes before it is cached"
            )

    def _found(self, before: list[tuple[Any, Any]], item: Any, computed: Any) -> str:
        """The transform that gives another result each time, if there is a hint of one and no other thread looks."""
        with suppress(Exception):  # of the user's own types, or of transforms that work only once
            if not self._is_done and self._has_hint(before, computed) and _one.acquire(blocking=False):
                try:
                    self._is_done = True
                    is_main = threading.current_thread() is threading.main_thread()
                    with states_kept([generator for generator, _ in before] if is_main else ()):
                        return self._culprit(item, computed)
                finally:
                    _one.release()
        return ""

    def _warn_of(self, name: str) -> None:
        if name and Notice("hidden randomness", self._place, self._hashed.digest).is_new():
            warn(
                f"{name} is not marked random, but gives another result each time: what it drew first is cached, and "
                "comes again in every epoch. Derive it from monai.transforms.RandomizableTransform and draw from "
                "self.R, so that it runs in every epoch; if its result holds a time or the address of an object, leave "
                "that out"
            )

    def _has_hint(self, before: list[tuple[Any, Any]], computed: Any) -> bool:
        if self._is_suspect is None:
            words = (word for function in self._hashed.functions for word in _words(function.__code__, function))
            self._is_suspect = any(map(_DRAWS.fullmatch, words))
        moved = {id(generator) for generator, state in before if state_of(generator) != state}
        # All global ones at once are seeded rather than drawn from, as by a loader's worker that starts in a thread.
        if self._is_suspect or (moved and not moved.issuperset(map(id, _GLOBAL))):
            return True
        text = " ".join(_texts(computed))
        return " at 0x" in text or str(int(time.time()))[:7] in text  # in s, ms, us or ns

    def _culprit(self, item: Any, computed: Any) -> str:
        """The first transform whose results differ; empty if the item comes out as it was computed, or none is."""
        steps = self._split.deterministic
        one = other = steps
        with suppress(Exception):  # what cannot be copied draws on
            one, other = deepcopy(steps), deepcopy(steps)
        if _alike(computed, self._run(other, deepcopy(item), 1)):
            return ""
        a, b = deepcopy(item), deepcopy(item)
        for i, step in enumerate(steps):
            a, b = self._run(one[i : i + 1], a, 2), self._run(other[i : i + 1], b, 3)
            if not _alike(a, b):
                return f"{name_of(step)} (transforms[{i}])"
        return ""

    def _run(self, transforms: Sequence[Callable[..., Any]], item: Any, seed: int) -> Any:
        if threading.current_thread() is threading.main_thread():
            seed_everything((), seed)
        # Memory in between, so that objects that are made for a moment have another address with another seed.
        held = [(object(), float(n), bytes(n)) for n in range(480) for _ in range(seed)]
        result = self._split.again(transforms, item)
        held.clear()
        return result


def _words(code: types.CodeType, function: types.FunctionType) -> Iterator[str]:
    """The names of what code calls or hands on: attributes, and global functions and classes by their own names."""
    for load in dis.get_instructions(code):
        if load.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = function.__globals__.get(load.argval)
            if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
                yield value.__name__
            elif not isinstance(value, types.ModuleType):  # of "time.sleep", "time" is none
                yield load.argval
        elif load.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            yield load.argval
        elif isinstance(load.argval, types.CodeType):
            yield from _words(load.argval, function)


def _texts(computed: Any) -> Iterator[str]:
    """The texts of an item, and the numbers in it that may be a time, as text."""
    todo = [computed]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (int, float, np.int64)):  # np.float64 is a float
            if value > _LONG_AGO:
                yield str(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)
        elif isinstance(value, (np.ndarray, torch.Tensor)):
            todo.append(getattr(value, "_meta", None))
            if value.dtype.itemsize == 8 and prod(value.shape) <= _SMALL and getattr(value, "is_cpu", True):
                todo.append(value.tolist())


def _alike(a: Any, b: Any) -> bool:
    """Whether two results are the same, up to the last bits of floating-point arrays."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, torch.Tensor) and not a.is_sparse:
        plain = [tensor.detach().as_subclass(torch.Tensor).cpu() for tensor in (a, b)]
        arrays = [(t.float() if t.dtype is torch.bfloat16 else t).numpy() for t in plain]
        # without the applied operations, which have the addresses of transforms
        return _close(*arrays) and _alike(getattr(a, "meta", None), getattr(b, "meta", None))
    if isinstance(a, np.ndarray) and a.dtype.kind in "fc":
        return _close(a, b)
    with suppress(Exception):  # of what has no stable hash nothing is known
        return hash_item(a) == hash_item(b)
    return True


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return np.array_equal(a, b)
    largest = np.abs(a[np.isfinite(a)]).max(initial=0)
    return np.allclose(a, b, rtol=0, atol=_LAST_PLACES * np.finfo(a.dtype).eps * largest, equal_nan=True)
