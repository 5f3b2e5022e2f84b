"""The canonical hash: equal for equal values, in every process, and different for whatever changes a result."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import functools
import importlib
import io
import itertools
import logging
import operator
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.transforms as mt
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor, NibabelReader, NumpyReader, PILReader

from monai_gds.errors import HashingError
from monai_gds.keys import hashing
from monai_gds.keys.hashing import canonical_hash, hash_transforms
from tests.fresh import ROOT, printed_by

LIMIT = 10


def differ(*values: Any) -> bool:
    return len({canonical_hash(v) for v in values}) == len(values)


# ---------------------------------------------------------------------------------------------------------------------
# Data


def test_looks_like_monais_hashes() -> None:
    h = canonical_hash({"a": 1})
    assert isinstance(h, bytes)
    assert len(h) == 32
    int(h, 16)


class Name(str):
    pass


class Queue(collections.deque):
    tag = 1


class Names(set):
    pass


class Draws(random.Random):
    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma


class Noise(np.random.RandomState):
    pass


def noise(sigma: float) -> Noise:
    made = Noise()
    made.sigma = sigma
    return made


def drawn(generator: random.Random) -> random.Random:
    generator.gauss(0, 1)
    return generator


_RELU, _TANH = ("a", torch.nn.ReLU()), ("b", torch.nn.Tanh())


def same_name(value: object) -> str:
    """A name for a test that is the same in every process, as pytest-xdist needs it."""
    return "set" if isinstance(value, set) else re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))


@pytest.mark.parametrize(
    "values",
    [
        [1, True, 1.0, "1", b"1", 1 + 0j, np.int64(1), np.float64(1), np.array(1), torch.tensor(1)],
        [None, "", b"", 0, [], (), {}, set(), "None"],
        [0.0, -0.0],
        [[1, 2], (1, 2), {1, 2}, {1: 2}, [2, 1], [[1], 2]],
        ["ab", ["a", "b"], ["ab", ""], ("a", "b")],
        [{"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 2}, collections.OrderedDict(a=1)],
        [np.zeros(2), np.zeros(2, "f4"), np.zeros((2, 1)), np.ones(2), np.zeros(2, ">f8"), torch.zeros(2)],
        [np.array([("a", 1)], object), np.array([("a", 2)], object)],
        [np.ma.masked_array([1, 2], [True, False]), np.ma.masked_array([1, 2], [False, True])],
        [torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(1, 2), torch.zeros(2, dtype=torch.bfloat16)],
        [MetaTensor(torch.zeros(2)), MetaTensor(torch.zeros(2), meta={"a": 1}), torch.zeros(2)],
        [pathlib.Path("a"), "a", pathlib.Path("b")],
        [Name("a"), Name("b"), "a"],
        [Queue([1]), Queue([2]), collections.deque([1])],
        [slice(1), slice(2), range(1), range(2)],
        [np.exp, np.log, torch.exp, operator.itemgetter("a"), operator.itemgetter("b"), np.flip, np.flipud],
        [torch.float32, np.dtype("f4"), np.float32, "float32"],
        [functools.partial(int, base=2), functools.partial(int, base=8), functools.partial(int, "1")],
        [collections.Counter("aab"), collections.Counter("abb")],
        [{"device": "GE"}, {"device": "Siemens"}, {"device": 0}, {"device": 1}],
        [io.BytesIO(b"a"), io.BytesIO(b"b"), io.StringIO("a"), io.StringIO("b")],
        [torch.quantize_per_tensor(torch.ones(3) * scale, scale, 0, torch.qint8) for scale in (0.25, 0.5)],
        [{1}, frozenset({1}), Names({1}), Names({2})],
        [Draws(1), Draws(2), random.Random()],
        [noise(1), noise(2), np.random.RandomState()],
        [b"a", bytearray(b"a")],
        [(1, 2), torch.Size([1, 2])],
        [collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)],
        [collections.defaultdict(int), collections.defaultdict(list), {}],
        [datetime.datetime(2024, 10, 27, 2), datetime.datetime(2024, 10, 27, 2, fold=1)],
        [torch.nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)],
        [pathlib.PurePosixPath("a"), pathlib.PosixPath("a")],
        [np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[0, 1], hard_mask=True)],
        [np.ma.array([1, 2]), np.ma.array([1, 2], mask=[0, 0])],
        [torch.nn.Sequential(collections.OrderedDict(pair)) for pair in ((_RELU, _TANH), (_TANH, _RELU))],
    ],
    ids=same_name,
)  # fmt: skip
def test_different_values(values: list[Any]) -> None:
    assert differ(*values)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (float("nan"), -float("nan")),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (np.arange(6).reshape(2, 3).T, np.ascontiguousarray(np.arange(6).reshape(2, 3).T)),
        (torch.device("cuda:0"), torch.device("cuda:1")),
        ({"device": torch.device("cuda:0")}, {"device": torch.device("cpu")}),
        ({"device": "cuda:0"}, {"device": "cuda:1"}),
        (np.random.RandomState(1), np.random.RandomState(2)),
        (random.Random(1), random.Random(2)),
        (Draws(1), drawn(Draws(1))),
        (torch.Generator().manual_seed(1), torch.Generator()),
    ],
    ids=same_name,
)
def test_equal_values(a: Any, b: Any) -> None:
    assert canonical_hash(a) == canonical_hash(b)


def test_numbers_of_any_length_are_described() -> None:
    assert hash_transforms([Parameters(10**5000)]) != hash_transforms([Parameters(10**5000 + 1)])


def test_hashing_leaves_no_trace() -> None:
    stream = io.BytesIO(b"a")
    assert canonical_hash(stream) == canonical_hash(stream) == canonical_hash(io.BytesIO(b"a"))


def test_sharing_does_not_matter() -> None:
    inner = [1, "x"]
    assert canonical_hash([inner, inner]) == canonical_hash([[1, "x"], [1, "x"]])


def test_what_contains_itself_has_a_hash() -> None:
    def ring(n: int) -> list[Any]:
        a: list[Any] = [n]
        a.append([a])
        return a

    assert canonical_hash(ring(1)) == canonical_hash(ring(1))
    assert differ(ring(1), ring(2))


# ---------------------------------------------------------------------------------------------------------------------
# Code


def _above(limit: float) -> Callable[[Any], Any]:
    return lambda x: x > limit


def test_lambdas_count_by_constants_defaults_and_closure() -> None:
    assert differ(lambda x: x > 1, lambda x: x > 2, lambda x: x < 1, lambda x: x >= 1)
    assert differ(lambda x, c=1: x > c, lambda x, c=2: x > c, lambda x, *, c=1: x > c)
    assert differ(_above(1), _above(2))
    assert canonical_hash(_above(1)) == canonical_hash(_above(1))
    a, b = (lambda x: x > 1), (lambda x: x > 1)
    assert canonical_hash(a) == canonical_hash(b)
    assert differ(lambda x: [y for y in x if y > 1], lambda x: [y for y in x if y > 2])


def _uses_global(x: float) -> bool:
    return _helper(x) > LIMIT


def _helper(x: float) -> float:
    return x * 2


def test_globals_that_a_function_reads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [canonical_hash(_uses_global)]
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 11)
    seen.append(canonical_hash(_uses_global))
    monkeypatch.setattr(sys.modules[__name__], "_helper", lambda x: x * 3)
    seen.append(canonical_hash(_uses_global))
    assert len(set(seen)) == 3


def test_attributes_of_functions_that_a_function_reads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = canonical_hash(scaled)
    monkeypatch.setattr(scaled, "unread", 1, raising=False)
    assert canonical_hash(scaled) == before
    monkeypatch.setattr(scaled, "factor", 3)
    assert canonical_hash(scaled) != before


def scaled(x: Any) -> Any:
    return x * scaled.factor  # type: ignore[attr-defined]


scaled.factor = 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["functions", "classes"])
def test_the_same_code_counts_by_the_variables_of_its_own_file(kind: str) -> None:
    """As a loader of plugins gives it, which calls every module the same."""

    def step(scale: int) -> Any:
        names: dict[str, Any] = {"__name__": "plugin", "SCALE": scale}
        exec("def step(x): return x * SCALE + 1\nclass Step:\n def __call__(self, x): return x * SCALE + 1", names)
        return names["step"] if kind == "functions" else names["Step"]()

    assert differ([step(2), step(3)], [step(3), step(2)], [step(2), step(2)])
    assert canonical_hash([step(2), step(3)]) == canonical_hash([step(2), step(3)])


def test_what_a_try_covers_counts() -> None:
    """From Python 3.11 on, that is beside the bytecode."""

    both = "def f(x):\n for i in x:\n  try: pass; a(i); b(i)\n  except E: pass"
    one = "def f(x):\n for i in x:\n  pass; a(i)\n  try: b(i)\n  except E: pass"
    assert differ(*(_function(source) for source in (both, one)))


def _function(source: str) -> Any:
    names: dict[str, Any] = {"__name__": __name__}
    exec(source, names)
    return names["f"]


def test_globals_that_it_does_not_read_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = canonical_hash(_helper)
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 11)
    assert canonical_hash(_helper) == before


def test_globals_that_only_share_their_name_with_an_attribute_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a spawned worker a script has no ``args`` that it makes under ``if __name__ == "__main__"``."""

    def of_the_object(x: Any) -> Any:
        return [y.LIMIT for y in x]

    def of_the_module() -> Any:
        return sys.modules[__name__].LIMIT

    before = canonical_hash(of_the_object), canonical_hash(of_the_module)
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 11)
    assert canonical_hash(of_the_object) == before[0]
    assert canonical_hash(of_the_module) != before[1]


def test_a_global_called_device_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for device in ("cuda:0", "cuda:1"):
        hashes.add(canonical_hash(lambda x: x.to(device)))  # noqa: B023
    assert len(hashes) == 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Writes packages of the user's, and imports one afresh."""
    monkeypatch.syspath_prepend(tmp_path)
    written: set[str] = set()

    def write(name: str, **files: str) -> Any:
        for file, text in files.items():
            path = tmp_path / name / f"{file}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        for known in [m for m in sys.modules if m.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        written.add(name)
        importlib.invalidate_caches()
        sys.dont_write_bytecode = True
        return importlib.import_module(name)

    yield write
    for name in written:
        for known in [m for m in sys.modules if m.partition(".")[0] == name]:
            del sys.modules[known]


@pytest.mark.parametrize("name", ["userpackage", "input", "test"])
def test_changed_code_in_a_users_package_counts(module: Any, name: str) -> None:
    """Also when it is called after a builtin, or after a module of Python's."""
    init = """
        from . import tools
        from .tools import Base, helper
        import NAME.tools
        class T(Base):
            def __call__(self, x):
                return helper(x)
        def f(x):
            return NAME.tools.helper(x)
    """.replace("NAME", name)
    tools = """
        def deep(x): return x {0}
        def helper(x): return deep(x)
        class Base:
            def inherited(self): return {1}
    """
    seen = []
    for change in (("+ 1", "1"), ("+ 2", "1"), ("+ 1", "2"), ("+ 1", "1")):
        package = module(name, __init__=init, tools=tools.format(*change))
        seen.append((canonical_hash(package.T()), canonical_hash(package.f)))
    assert seen[0] == seen[3]
    assert len({t for t, _ in seen}) == 3, "methods, bases and what they call"
    assert seen[0][1] != seen[1][1], "module.attribute.function"


def test_what_a_function_of_many_names_imports_counts(module: Any) -> None:
    """Those above the 256th are in bytecode of another form."""
    reads = "\n".join(f"    x.a{i}" for i in range(300))
    code = f"def f(x):\n{reads}\n    from .tools import helper\n    return helper(x)\n"
    seen = [
        canonical_hash(module("userpackage", __init__=code, tools=f"def helper(x): return x + {n}").f)
        for n in (1, 2, 1)
    ]
    assert seen[0] == seen[2] != seen[1]


def test_comments_docstrings_and_places_do_not_count(module: Any) -> None:
    bare = canonical_hash(module("userpackage", __init__="class T:\n    def f(self): return 1\n").T())
    code = "\n\n# new\nclass T:\n    'doc'\n    def f(self):\n        'doc'\n        return 1\n"
    assert canonical_hash(module("userpackage", __init__=code).T()) == bare


def test_functions_that_call_each_other_take_linear_time(module: Any) -> None:
    import time

    code = "\n".join(f"def f{i}(x): return " + " + ".join(f"f{j}(x)" for j in range(60)) for i in range(60))
    package = module("userpackage", __init__=code)
    start = time.perf_counter()
    first = canonical_hash([package.f0, package.f1])
    assert time.perf_counter() - start < 10
    changed = module("userpackage", __init__=code.replace("def f59(x): return ", "def f59(x): return 1 + "))
    assert canonical_hash([changed.f0, changed.f1]) != first


class Parameters:
    def __init__(self, value: Any) -> None:
        self.value = value

    @functools.cached_property
    def doubled(self) -> Any:
        return self.value * 2

    def __call__(self, x: Any) -> Any:
        logging.getLogger(__name__).info("called")
        _log.info("called")
        return x


_log = logging.getLogger(__name__)


class Slotted:
    __slots__ = ("a", "device")

    def __init__(self, a: int, device: str) -> None:
        self.a, self.device = a, device


class Private:
    __slots__ = ("__a",)

    def __init__(self, a: int) -> None:
        self.__a = a


class Keyed:
    lock = threading.Lock()

    def __init__(self, shown: int) -> None:
        self.shown, self.hidden = shown, threading.Lock()

    def __cache_key__(self) -> int:
        return self.shown


def test_objects_count_by_attributes() -> None:
    assert differ(Parameters(1), Parameters(2), Parameters("1"))
    assert differ(Slotted(1, "cpu"), Slotted(2, "cpu"))
    assert differ(Private(1), Private(2))
    assert canonical_hash(Slotted(1, "cuda:0")) == canonical_hash(Slotted(1, "cuda:1"))
    assert differ(Parameters(1).__call__, Parameters(2).__call__)


class Settings(dict):
    """As many projects have for their settings: attributes are keys, and others a KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Defaults(Settings):
    """The same with more of itself for every key that is missing."""

    def __missing__(self, key: str) -> Any:
        return Defaults()


@pytest.mark.parametrize("cls", [Settings, Defaults])
def test_attributes_that_a_class_makes_up_are_not_looked_for(cls: type) -> None:
    assert differ(cls(a=1), cls(a=2), {"a": 1})
    assert hash_transforms([Parameters(cls(a=1))]).digest != hash_transforms([Parameters(cls(a=2))]).digest


def test_copying_leaves_no_trace_in_a_class() -> None:
    class Copied:
        pass

    value = Copied()
    before = canonical_hash(value)
    copy.deepcopy(value)
    pickle.dumps(Parameters(1))
    assert canonical_hash(value) == before


def test_cache_key_decides_what_counts() -> None:
    assert canonical_hash(Keyed(1)) == canonical_hash(Keyed(1))
    assert differ(Keyed(1), Keyed(2))


def test_loggers_in_globals_can_be_hashed() -> None:
    canonical_hash(Parameters.__call__)


def test_a_logger_of_loguru_can_be_hashed() -> None:
    loguru = pytest.importorskip("loguru", reason="loguru is not installed on this machine")
    canonical_hash(Parameters(loguru.logger))


def test_reading_and_pickling_a_configuration_of_omegaconf_keeps_its_hash() -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="OmegaConf is not installed on this machine")
    config = omegaconf.OmegaConf.create({"spacing": {"x": 1.5, "y": "${spacing.x}"}, "rate": 1})
    config.rate = 2
    before = canonical_hash(Parameters(config))
    assert config.spacing.y == 1.5
    pickled = pickle.loads(pickle.dumps(config))
    assert canonical_hash(Parameters(pickled)) == before == canonical_hash(Parameters(config))
    config.spacing.x = 1.0
    assert canonical_hash(Parameters(config)) != before


def _local(factor: int) -> Any:
    class Local:
        def __call__(self, x: Any) -> Any:
            return x * factor

    return Local()


def _dispatching(factor: int) -> Any:
    class Local:
        @functools.singledispatchmethod
        def scaled(self, x: Any) -> Any:
            return x

        @scaled.register
        def _(self, x: int) -> Any:
            return x * factor

    return Local()


def _times(factor: int) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any) -> Any:
            return factor * function(*args)

        return inner

    return decorate


class Times:
    def __init__(self, function: Any, factor: int) -> None:
        functools.update_wrapper(self, function)
        self.function, self.factor = function, factor

    def __call__(self, *args: Any) -> Any:
        return self.factor * self.function(*args)


@pytest.mark.parametrize("function", [os.path.join, _uses_global, np.sum], ids=["Python's", "a user's", "a library's"])
def test_a_wrapper_counts_as_itself_and_not_only_by_what_it_wraps(function: Any) -> None:
    assert differ(function, _times(2)(function), _times(3)(function), Times(function, 2), Times(function, 3))
    assert canonical_hash(_times(2)(function)) == canonical_hash(_times(2)(function))


def test_options_of_a_librarys_wrapper_count(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib", reason="joblib is not installed on this machine")
    memory = joblib.Memory(tmp_path, verbose=0)
    assert differ(memory.cache(_helper), memory.cache(_helper, ignore=["x"]))
    assert differ(functools.lru_cache(_helper), functools.lru_cache(typed=True)(_helper))


def test_a_proxy_counts_by_itself_and_by_what_it_stands_for() -> None:
    first, second = Parameters(1), Parameters(2)
    assert differ(first, weakref.proxy(first), weakref.proxy(second))


def test_expressions_of_bundles_count_by_what_they_call_and_refer_to(module: Any) -> None:
    from monai.bundle import ConfigParser

    def hashed(tool: str = "x + 1", **values: Any) -> bytes:
        package = module("userpackage", __init__="from . import tools", tools=f"def helper(x): return {tool}")
        config = {"factor": 2, "other": 1, "f": "$lambda x: userpackage.tools.helper(x) * @factor", **values}
        parser = ConfigParser(config, globals={"userpackage": package})
        parser.get_parsed_content("other")
        return canonical_hash(mt.Lambdad("image", parser.get_parsed_content("f")))

    assert len({hashed(), hashed("x + 2"), hashed(factor=3)}) == 3
    assert hashed() == hashed(other=5)


def test_functions_in_c_count_by_their_librarys_version(monkeypatch: pytest.MonkeyPatch) -> None:
    cython = [np.random.default_rng, np.random.Generator.normal, np.random.RandomState(0).rand]
    functions = [torch.Tensor.sqrt, np.dot, torch.ones(2).sqrt, *cython]
    assert differ(*functions)
    before = [canonical_hash(function) for function in functions]
    monkeypatch.setattr("monai_gds.keys.code.library_of", lambda module: f"{module} of another version".encode())
    assert all(canonical_hash(f) != was for f, was in zip(functions, before, strict=True))


def test_functions_that_toolz_composed_count_one_by_one() -> None:
    toolz = pytest.importorskip("toolz", reason="toolz is not installed on this machine")
    assert differ(*(toolz.compose(function, abs) for function in (_helper, _uses_global)))


def test_dates_of_a_table_count() -> None:
    pandas = pytest.importorskip("pandas", reason="this machine has no pandas")
    assert differ(pandas.Timestamp("2026-01-01"), pandas.Timestamp("2026-01-02"), pandas.NaT)


def test_a_vectorized_function_counts_by_what_it_is_and_not_by_its_calls() -> None:
    made = [np.vectorize(function, otypes=[float]) for function in (abs, abs, round)]
    made[0]([1, 2])
    assert canonical_hash(made[0]) == canonical_hash(made[1]) != canonical_hash(made[2])


def test_what_dispatches_by_type_counts_by_its_functions_and_not_by_its_calls() -> None:
    assert differ([_dispatching(2), _dispatching(3)], [_dispatching(2), _dispatching(2)])
    used = _dispatching(2)
    assert used.scaled(3) == 6
    assert canonical_hash(used) == canonical_hash(_dispatching(2))


def test_iterators_count_by_their_remaining_values() -> None:
    counts = [itertools.count(3), itertools.count(4), itertools.count(3)]
    assert differ(*counts[:2], zip([1], [2], strict=False), zip([1], [3], strict=False))
    assert canonical_hash(counts[0]) == canonical_hash(counts[2]) and next(counts[0]) == 3


def test_local_classes_count_by_what_they_close_over() -> None:
    assert differ([_local(2), _local(3)], [_local(3), _local(2)], [_local(2), _local(2)])


@pytest.mark.parametrize(
    ("make", "path"),
    [
        pytest.param(lambda: (i for i in range(3)), "", id="generator"),
        pytest.param(lambda: torch.eye(2).to_sparse(), "", id="sparse tensor"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "", id="nested tensor"),
        pytest.param(lambda: torch.ones(2, device="meta"), "", id="tensor without data"),
        pytest.param(lambda: sys._getframe(), "", id="frame"),
    ],
)
def test_no_stable_content_is_an_error_that_names_place_type_and_way_out(make: Any, path: str) -> None:
    with pytest.raises(HashingError, match=rf"value\['a'\]\[1\]\.value{path} is a .*cannot be hashed stably") as caught:
        canonical_hash({"a": [0, Parameters(make())]})
    for way_out in ("__cache_key__", "hash_func", "hash_transform=None"):
        assert way_out in str(caught.value)
    assert isinstance(caught.value, TypeError)


# ---------------------------------------------------------------------------------------------------------------------
# From process to process

_PROGRAM = """
import numpy as np, torch, monai.transforms as mt
from monai_gds.keys.hashing import canonical_hash
LIMIT = {"b", "a", "c"}
class Mine(mt.Transform):
    names = frozenset({"x", "y", "zz"})
    def __call__(self, data): return {k for k in data if k in LIMIT}
def f(x, names={"q", "w", "e"}):
    return x in {"one", "two", "three"} and Mine in names
transforms = [
    mt.LoadImaged(["image", "label"]), mt.Spacingd("image", (1, 1, 2.0)), Mine(), mt.Lambda(f),
    mt.Lambdad("image", lambda x: x in {"k", "l"}), mt.EnsureTyped("image", device="cpu", dtype=np.float32),
    mt.Compose([mt.Orientationd("image", "RAS")]),
]
item = {"image": "a", "s": {"p", "q", "r"}, "t": torch.arange(3), "n": np.arange(3), "f": 1.5, "d": {"u": {"v"}}}
print(canonical_hash(transforms).decode(), canonical_hash(item).decode(), canonical_hash([f, Mine]).decode())
"""


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("random", marks=pytest.mark.long)])
def test_same_in_every_process(hash_seed: str) -> None:
    assert printed_by(_PROGRAM, hash_seed=hash_seed) == printed_by(_PROGRAM)


def test_same_in_a_spawned_worker(tmp_path: Path) -> None:
    """Where the script is called ``__mp_main__``, which a logger, a decorator or an alias of a type remembers."""
    program = tmp_path / "program.py"
    program.write_text(
        "import functools, logging, sys, typing, multiprocessing as mp\n"
        "from monai_gds.keys.hashing import canonical_hash\n"
        "log, here = logging.getLogger(__name__), sys.modules[__name__]\n"
        "def g(x): return x + 1\n"
        "class T:\n"
        "    def __call__(self, x): return g(x)\n"
        "class Decorated:\n"
        "    def __init__(self, f): functools.update_wrapper(self, f)\n"
        "def logs(x): return log.info(x)\n"
        "def logs_later(x): return logging.getLogger(__name__).info(x)\n"
        "def of_module(x): return here.g(x)\n"
        "class Of(typing.Generic[typing.TypeVar('V')]): pass\n"
        "class Configured:\n"
        "    def __init__(self, args): self.args = args\n"
        "    def __call__(self, x): return x * self.args\n"
        "def work(t):\n"
        "    objects = Decorated(g), Of[int](), Configured(2)\n"
        "    return [*map(canonical_hash, (t, g, logs, logs_later, of_module, *objects))]\n"
        "if __name__ == '__main__':\n"
        "    args = 2\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        found, expected = pool.apply(work, (T(),)), work(T())\n"
        "        assert found == expected, (found, expected)\n"
        "    print('same')\n"
    )
    # not forked: how Python calls the script is the subject
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# MONAI's transforms


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("volumes")
    rng = np.random.default_rng(0)
    for name, data in (("image", rng.random((10, 12, 8))), ("label", rng.integers(0, 3, (10, 12, 8)))):
        nib.save(nib.Nifti1Image(data.astype(np.float32), np.diag([1.0, 1.5, 2, 1])), folder / f"{name}.nii.gz")
    np.save(folder / "array.npy", rng.random((10, 12, 8)).astype(np.float32))
    from PIL import Image

    Image.fromarray(rng.integers(0, 255, (10, 12), dtype=np.uint8)).save(folder / "photo.png")
    files = {"image": "image.nii.gz", "label": "label.nii.gz", "array": "array.npy", "photo": "photo.png"}
    return {key: str(folder / file) for key, file in files.items()}


BOTH = ["image", "label"]


def call(*args: Any, **kwargs: Any) -> Callable[[str], Any]:
    """Makes the transform of a name with these arguments."""
    return lambda name: getattr(mt, name.split()[0])(*args, **kwargs)


#: Deterministic dictionary transforms by class: arguments, and arguments that change what they do.
TRANSFORMS = {
    "ScaleIntensityRanged": (call("image", 0, 1, 0, 2), call("image", 0, 1, 0, 3)),
    "ScaleIntensityd": (call("image"), call("image", minv=0.5)),
    "NormalizeIntensityd": (call("image"), call("image", nonzero=True)),
    "Spacingd": (
        call(BOTH, (1, 1, 1), mode=("bilinear", "nearest")),
        call(BOTH, (1, 1, 1.5), mode=("bilinear", "nearest")),
    ),
    "Orientationd": (call(BOTH, axcodes="RAS", labels=None), call(BOTH, axcodes="LPS", labels=None)),
    "CropForegroundd": (call(BOTH, "image"), call(BOTH, "image", margin=2)),
    "CropForegroundd with a lambda": (
        call(BOTH, "image", select_fn=lambda x: x > 0.1),
        call(BOTH, "image", select_fn=lambda x: x > 0.2),
    ),
    "Resized": (call(BOTH, (6, 6, 6)), call(BOTH, (6, 6, 7))),
    "SpatialPadd": (call(BOTH, (16, 16, 16)), call(BOTH, (16, 16, 17))),
    "ResizeWithPadOrCropd": (call(BOTH, (9, 16, 9)), call(BOTH, (9, 16, 8))),
    "CenterSpatialCropd": (call(BOTH, (5, 5, 5)), call(BOTH, (5, 5, 4))),
    "DivisiblePadd": (call(BOTH, 8), call(BOTH, 16)),
    "EnsureTyped": (call(BOTH, dtype=torch.float16), call(BOTH, dtype=torch.float32)),
    "CastToTyped": (call(BOTH, np.float16), call(BOTH, np.float32)),
    "Lambdad": (call("image", lambda x: x * 2), call("image", lambda x: x * 3)),
    "ConcatItemsd": (call(BOTH, "both"), call(BOTH, "all")),
    "AsDiscreted": (call("label", to_onehot=3), call("label", to_onehot=4)),
    "Flipd": (call(BOTH, 0), call(BOTH, 1)),
    "Rotate90d": (call(BOTH, 1), call(BOTH, 2)),
    "Rotated": (call(BOTH, 0.1), call(BOTH, 0.2)),
    "Zoomd": (call(BOTH, 1.2), call(BOTH, 1.3)),
    "Affined": (call(BOTH, translate_params=(1, 0, 0)), call(BOTH, translate_params=(2, 0, 0))),
    "GaussianSmoothd": (call("image", 1.0), call("image", 2.0)),
    "ThresholdIntensityd": (call("image", 0.5), call("image", 0.6)),
    "MapLabelValued": (call("label", [0, 1], [1, 0]), call("label", [0, 1], [1, 2])),
    "FillHolesd": (call("label"), call("label", connectivity=2)),
    "CopyItemsd": (call("image", names="copy"), call("image", names="kopie")),
    "DeleteItemsd": (call("label"), call("image")),
    "SelectItemsd": (call("label"), call("image")),
    "SqueezeDimd": (call("image"), call("label")),
    "ToDeviced": (call("image", "cpu"), call("label", "cpu")),
    "HistogramNormalized": (call("image"), call("image", num_bins=10)),
    "ClipIntensityPercentilesd": (call("image", 5, 95), call("image", 5, 94)),
    "Compose": (call([mt.Flipd(BOTH, 0), mt.Rotate90d(BOTH)]), call([mt.Rotate90d(BOTH), mt.Flipd(BOTH, 0)])),
    "DataStatsd": (call("image", data_shape=False), call("image", data_shape=True)),
    "FgBgToIndicesd": (call("label"), call("label", image_threshold=0.5)),
    "Transposed": (call("image", (0, 2, 1, 3)), call("image", (0, 3, 2, 1))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_use_leaves_no_trace_and_parameters_count(name: str, volumes: dict[str, str]) -> None:
    make, changed = TRANSFORMS[name]
    fresh = canonical_hash(make(name))
    transform = make(name)
    for _ in range(2):
        data = mt.LoadImaged(BOTH, ensure_channel_first=True)({k: volumes[k] for k in BOTH})
        transform(data)
    assert canonical_hash(transform) == fresh, f"{name} leaves something in itself"
    assert canonical_hash(changed(name)) != fresh


@pytest.mark.parametrize(
    ("keys", "make"),
    [
        ("image", lambda: mt.LoadImaged("image")),
        ("image", lambda: mt.LoadImaged("image", reader="NibabelReader")),
        ("image", lambda: mt.LoadImaged("image", reader=NibabelReader())),
        ("image", lambda: mt.LoadImaged("image", reader=NibabelReader(squeeze_non_spatial_dims=True))),
        ("array", lambda: mt.LoadImaged("array", reader=NumpyReader())),
        ("array", lambda: mt.LoadImaged("array")),
        ("photo", lambda: mt.LoadImaged("photo", reader=PILReader())),
        ("photo", lambda: mt.LoadImaged("photo", reader=PILReader(converter=lambda i: i.convert("L")))),
    ],
)
def test_readers_that_were_used_hash_as_fresh_ones(keys: str, make: Any, volumes: dict[str, str]) -> None:
    transform, fresh = make(), canonical_hash(make())
    transform({keys: volumes[keys]})
    assert canonical_hash(transform) == fresh


def test_readers_and_their_settings_count() -> None:
    assert differ(
        mt.LoadImaged("image"),
        mt.LoadImaged("image", reader=NibabelReader()),
        mt.LoadImaged("image", reader=NibabelReader(squeeze_non_spatial_dims=True)),
        mt.LoadImaged("image", ensure_channel_first=True),
        mt.LoadImaged("image", dtype=np.float64),
        mt.LoadImaged("label"),
    )


def test_the_order_of_a_dictionary_counts_where_a_transform_has_it() -> None:
    windows = {"low": 1, "high": 2}
    turned = dict(reversed(windows.items()))
    hashed = [hash_transforms([Parameters(given)]) for given in (windows, dict(windows), turned)]
    assert hashed[0] == hashed[1] and hashed[0].digest != hashed[2].digest
    assert hashed[0].description != hashed[2].description
    assert canonical_hash(windows) == canonical_hash(turned)


def test_compose_counts_with_its_settings() -> None:
    def make(**settings: Any) -> mt.Compose:
        return mt.Compose([mt.Flipd("a", 0)], **settings)

    assert differ(
        make(), make(lazy=True), make(lazy=None), make(map_items=False), make(map_items=2), make(unpack_items=True),
        make(lazy=True, overrides={"a": {"mode": "nearest"}}), make(lazy=True, overrides={"a": {"mode": "bilinear"}}),
    )  # fmt: skip


def test_devices_and_random_states_do_not_count() -> None:
    assert canonical_hash(mt.EnsureTyped("a", device="cuda:0")) == canonical_hash(mt.EnsureTyped("a", device="cuda:1"))
    assert canonical_hash(mt.ToDeviced("a", "cuda:0")) == canonical_hash(mt.ToDeviced("a", torch.device("cuda:1")))
    seeded = mt.Compose([mt.RandFlipd("a")]).set_random_state(1)
    assert canonical_hash(seeded) == canonical_hash(mt.Compose([mt.RandFlipd("a")]).set_random_state(2))


def test_a_model_counts_by_its_mode() -> None:
    """Dropout and batch norm compute something else in training."""
    assert canonical_hash(torch.nn.Dropout().eval()) != canonical_hash(torch.nn.Dropout())


def test_a_model_that_refers_weakly_to_its_weights_and_hooks_has_a_hash() -> None:
    class Watched(torch.nn.LSTM):
        def __init__(self, factor: float) -> None:
            super().__init__(1, 1)
            for weight in self.parameters():
                torch.nn.init.ones_(weight)
            self.handle = self.register_forward_hook(lambda model, given, found: found[0] * factor)

    models = [Watched(factor) for factor in (2.0, 2.0, 3.0)]
    models[0](torch.ones(1, 1))
    assert canonical_hash(models[0]) == canonical_hash(models[1]) != canonical_hash(models[2])
    torch.nn.init.zeros_(models[1].weight_ih_l0)
    assert canonical_hash(models[0]) != canonical_hash(models[1])


def test_what_torch_compiled_counts_by_its_weights_and_not_by_where_it_lies_and_its_calls() -> None:
    def compiled(weight: float) -> Any:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, weight)
        return torch.compile(model, backend="eager")

    made = [compiled(weight) for weight in (1.0, 1.0, 2.0)]
    made[0](torch.ones(1))
    assert canonical_hash(made[0]) == canonical_hash(made[1]) != canonical_hash(made[2])


def test_a_function_that_torch_compiled_has_a_hash() -> None:
    made = [torch.compile(function, backend="eager") for function in (_helper, _helper, _uses_global)]
    made[0](torch.ones(1))
    assert canonical_hash(made[0]) == canonical_hash(made[1]) != canonical_hash(made[2])


class Scale(enum.Enum):
    LARGE = 2.0


def test_a_flag_without_bits_has_a_hash() -> None:
    assert len({canonical_hash(flags) for flags in (re.RegexFlag(0), re.RegexFlag.I, re.RegexFlag.I | re.M)}) == 3


def test_an_enum_of_the_users_counts_by_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(x: Any) -> Any:
        return x * Scale.LARGE.value

    before = canonical_hash(Scale.LARGE), canonical_hash(times)
    changed = enum.Enum("Scale", {"LARGE": 3.0}, module=__name__, qualname="Scale")
    monkeypatch.setattr(sys.modules[__name__], "Scale", changed)
    assert canonical_hash(changed.LARGE) != before[0]  # type: ignore[attr-defined]
    assert canonical_hash(times) != before[1]


def test_a_data_frame_is_refused_with_what_to_do() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed on this machine")
    frame = pandas.DataFrame({"window": [40, 80]})
    for table in (frame, frame["window"]):
        with pytest.raises(HashingError, match=r"value\.value is a pandas\.core.* hold its values, as frame\.to_dict"):
            canonical_hash(Parameters(table))
    assert canonical_hash(Parameters(frame.to_dict("list"))) != canonical_hash(Parameters({"window": [40, 90]}))


def test_functions_that_cython_compiled_count_by_name() -> None:
    algos = pytest.importorskip("pandas._libs.algos", reason="pandas is not installed on this machine")
    assert type(algos.groupsort_indexer).__name__ == "cython_function_or_method"
    assert canonical_hash(algos.groupsort_indexer) == canonical_hash(algos.groupsort_indexer)
    assert differ(algos.groupsort_indexer, algos.is_monotonic)


def test_an_enum_is_hashed_once_for_all_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    organs = enum.Enum("Organs", {f"organ{n}": n for n in range(104)}, module=__name__)
    digests = []
    digest = hashing.Values.digest

    def counted(*args: Any) -> bytes:
        digests.append(args)
        return digest(*args)

    monkeypatch.setattr(hashing.Values, "digest", counted)
    canonical_hash(dict.fromkeys(organs, 1.0))
    assert len(digests) < 10 * len(organs)


def test_files_that_an_enum_names_count_although_a_transform_that_writes_has_it_too() -> None:
    atlas = enum.Enum("atlas", {"BRAIN": "/data/atlas.nii"}, module=__name__)
    saver = mt.SaveImaged("a")
    saver.atlas = atlas["BRAIN"]
    assert "/data/atlas.nii" not in hash_transforms([saver]).strings
    assert "/data/atlas.nii" in hash_transforms([saver, Parameters(atlas["BRAIN"])]).strings


def test_enums_that_refer_to_each_other_have_the_same_hash_in_any_order() -> None:
    """Sets come in another order in every process."""

    class Atlas:
        pass

    atlases = [Atlas(), Atlas()]
    organ = enum.Enum("organ", {"LIVER": atlases[0], "LEFT": atlases[0], "SPLEEN": 2}, module=__name__)
    side = enum.Enum("side", {"LEFT": atlases[1], "RIGHT": organ["LIVER"]}, module=__name__)
    atlases[0].__dict__.update(organ=organ["LIVER"], side=side["LEFT"])
    atlases[1].__dict__.update(organ=organ["SPLEEN"])
    values = {"a": organ["SPLEEN"], "b": side["RIGHT"], "c": atlases[0], "d": atlases[1]}
    orders = itertools.permutations(values.items())
    assert len({canonical_hash(dict(order)) for order in orders}) == 1


def test_what_a_users_model_calls_hooks_counts_by_its_keys() -> None:
    class Windows(torch.nn.Module):
        def __init__(self, **windows: int) -> None:
            super().__init__()
            self.window_hooks = windows

    assert differ(Windows(lung=1, bone=2), Windows(lung=2, bone=1))
    assert canonical_hash(Windows(lung=1, bone=2)) == canonical_hash(Windows(bone=2, lung=1))


CLASSES = {
    "an enum's": """
        import enum
        class Mode(enum.Enum):
            ONE = 1
            def made(self): return {0}
        class T:
            mode = Mode.ONE
            def __call__(self, x): return self.mode.made()
    """,
    "an enum's static": """
        import enum
        class Mode(enum.Enum):
            ONE = 1
            @staticmethod
            def made(): return {0}
        class T:
            mode = Mode.ONE
            def __call__(self, x): return self.mode.made()
    """,
    "an enum's base's": """
        import enum
        class Base(enum.Enum):
            def made(self): return {0}
        class Mode(Base):
            ONE = 1
        class T:
            mode = Mode.ONE
            def __call__(self, x): return self.mode.made()
    """,
    "an enum's mixin's": """
        import enum
        class Mixin:
            def made(self): return {0}
        class Mode(Mixin, enum.Enum):
            ONE = 1
        class T:
            mode = Mode.ONE
            def __call__(self, x): return self.mode.made()
    """,
    "a class's class's": """
        class Meta(type):
            def made(cls): return {0}
        class T(metaclass=Meta):
            def __call__(self, x): return type(self).made()
    """,
    "a hook's": """
        import torch
        def hook(model, given, found): return found * {0}
        class T(torch.nn.ReLU):
            def __init__(self):
                super().__init__()
                self.register_forward_hook(hook)
    """,
    "what a decorator leaves on a function": """
        def by(function):
            def wrapper(x): return function(x) * wrapper.scale
            wrapper.scale = {0}
            return wrapper
        @by
        def same(x): return x
        class T:
            def __call__(self, x): return same(x)
    """,
    "what a decorator leaves on a method": """
        def order(n):
            def mark(function):
                function.order = n
                return function
            return mark
        class T:
            @order({0})
            def first(self, x): return x + 1
            @order(1.5)
            def second(self, x): return x * 2
            def __call__(self, x):
                steps = [step for step in vars(T).values() if hasattr(step, "order")]
                for step in sorted(steps, key=lambda step: step.order): x = step(self, x)
                return x
    """,
    "what a function holds that an object has": """
        def step(x): return x
        step.scale = {0}
        class T:
            def __init__(self): self.step = step
            def __call__(self, x): return self.step(x) * self.step.scale
    """,
    "what a partial has": """
        import functools
        step = functools.partial(round, ndigits=1)
        step.scale = {0}
        class T:
            def __call__(self, x): return step(x) * step.scale
    """,
    "what a kind of property holds": """
        class Scaled(property):
            def __init__(self, get, scale):
                super().__init__(get)
                self.scale = scale
            def __get__(self, owner, cls=None): return super().__get__(owner) * self.scale
        class T:
            one = Scaled(lambda self: 1, {0})
            def __call__(self, x): return x * self.one
    """,
    "what a member of an enum has": """
        import enum
        class Window(str, enum.Enum):
            def __new__(cls, value, width):
                self = str.__new__(cls, value)
                self._value_, self.width = value, width
                return self
            LUNG = "lung", {0}
        class T:
            window = Window.LUNG
            def __call__(self, x): return x / self.window.width
    """,
    "a class's that exec made": """
        names = {{}}
        exec("class T:\\n    def __call__(self, x): return {0}", names)
        T = names["T"]
    """,
    "a class's without methods that exec made": """
        names = {{}}
        exec("class Settings: scale = {0}", names)
        class T:
            settings = names["Settings"]
            def __call__(self, x): return self.settings.scale
    """,
    "a class's made on demand": """
        import types
        T = types.new_class("T", exec_body=lambda names: names.update(__call__=lambda self, x: {0}))
    """,
    "a data class's made on demand": """
        import dataclasses
        T = dataclasses.make_dataclass("T", [], namespace=dict(__call__=lambda self, x: {0}))
    """,
    "a class's made by its metaclass": """
        import abc
        T = abc.ABCMeta("T", (), dict(__call__=lambda self, x: {0}))
    """,
    "a layer's that torch parametrized": """
        import torch
        class Layer(torch.nn.Conv1d):
            def forward(self, x): return super().forward(x) * {0}
        def T():
            torch.manual_seed(0)
            return torch.nn.utils.parametrizations.weight_norm(Layer(1, 1, 1))
    """,
}

#: Values that count by what they hold, of classes of the user's: what ``Kind`` derives from, and how one is made.
KINDS = {
    "set": ("set", "Kind([1])"),
    "array": ("numpy.ndarray", "numpy.ones(2).view(Kind)"),
    "masked array": ("numpy.ma.MaskedArray", "numpy.ones(2).view(Kind)"),
    "number": ("numpy.float64", "Kind(1)"),
    "tensor": ("torch.Tensor", "torch.ones(2).as_subclass(Kind)"),
    "path": ("pathlib.PosixPath", "Kind('atlas')"),
    "generator": ("random.Random", "Kind(0)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_code_of_a_kind_of_value_counts(module: Any, kind: str) -> None:
    base, make = KINDS[kind]
    code = f"""
        import pathlib, random, numpy, torch
        class Kind({base}):
            def scale(self): return {{0}}
        value = {make}
    """
    seen = [canonical_hash(Parameters(module("userpackage", __init__=code.format(n)).value)) for n in (1, 2, 1)]
    assert seen[0] == seen[2] != seen[1]


@pytest.mark.parametrize("code", CLASSES.values(), ids=list(CLASSES))
def test_code_counts_that_is_reached_by_no_name(module: Any, code: str) -> None:
    seen = [canonical_hash(module("userpackage", __init__=code.format(n)).T()) for n in (1, 2, 1)]
    assert seen[0] == seen[2] != seen[1]


PYDANTIC = {
    "a default": "class Settings(pydantic.BaseModel):\n    scale: float = {0}",
    "a type": "class Settings(pydantic.BaseModel):\n    scale: (None, int, float)[{0}] = 1",
    "a bound": "class Settings(pydantic.BaseModel):\n    scale: float = pydantic.Field(1.0, lt={0}0)",
    "a validator": """class Settings(pydantic.BaseModel):
        scale: float = 1.0
        @pydantic.field_validator("scale")
        @classmethod
        def scaled(cls, given): return given * {0}""",
    "a property": """class Settings(pydantic.BaseModel):
        @pydantic.computed_field
        @property
        def scale(self) -> float: return {0}.0""",
}


@pytest.mark.parametrize("code", PYDANTIC.values(), ids=list(PYDANTIC))
def test_a_model_of_pydantic_counts_by_what_it_says_and_not_by_where_it_lies(module: Any, code: str) -> None:
    pytest.importorskip("pydantic", reason="pydantic is not installed on this machine")
    seen = []
    for n in (1, 2, 1):
        settings = module("userpackage", __init__=f"import pydantic\n{code.format(n)}").Settings()
        seen.append(canonical_hash(Parameters(settings)))
        type(settings).model_validate({}).model_dump()
        assert canonical_hash(Parameters(settings)) == seen[-1]
    assert seen[0] == seen[2] != seen[1]


def test_files_and_iterators_in_transforms_name_the_transform() -> None:
    class Logging(mt.Transform):
        def __init__(self) -> None:
            self.out = io.TextIOWrapper(io.BytesIO())

        def __call__(self, data: Any) -> Any:
            return data

    with pytest.raises(HashingError, match=r"value\[1\]\.out is a _io\.TextIOWrapper"):
        canonical_hash([mt.Flipd("a"), Logging()])


def _with_numbers(x: Any) -> Any:
    return x * next(_with_numbers.numbers)  # type: ignore[attr-defined]


def test_an_attribute_of_a_function_that_cannot_be_hashed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_with_numbers, "numbers", (n for n in ()), raising=False)
    with pytest.raises(HashingError, match=r"_with_numbers\['numbers'\]"):
        hash_transforms([lambda x: _with_numbers(x)])


class Planes(list[int]):
    """A list that computes something of its members, and keeps it."""

    @functools.cached_property
    def total(self) -> int:
        """Their sum."""
        return sum(self)


def test_what_a_list_of_a_users_has_computed_once_does_not_count() -> None:
    used = Planes([1, 2])
    assert used.total == 3
    assert hash_transforms([mt.Lambda(used.count)]).digest == hash_transforms([mt.Lambda(Planes([1, 2]).count)]).digest
