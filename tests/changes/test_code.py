"""Changes of code, and of values that code may or may not read; see ``rows.py``."""

from __future__ import annotations

from tests.changes.rows import HIT, MISS, Change, Table
from tests.studies import Study

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test

Edit = tuple[str, str]


def family(miss: bool, name: str, members: dict[str, tuple[str, Edit]], *, other_item: bool | None = None) -> None:
    """Registers rows, of which one runs by default: what the script defines, ``by`` among it, and the change of it."""
    for i, (member, (define, edit)) in enumerate(members.items()):
        options = {"other_item": True if miss and other_item is None else other_item, "long": i > 0}
        row(miss, f"{name}: {member}", define=define, script=edit, add='mt.Lambdad("image", by)', **options)


# What is read of a configuration

#: What the script makes, with a scale of 2.0 and a rank of 10, and how code reads the scale.
CONFIGURATIONS = {
    "a namespace": ("import argparse\n\nC = argparse.Namespace(scale=2.0, rank=10)", "C.scale"),
    "a simple namespace": ("import types\n\nC = types.SimpleNamespace(scale=2.0, rank=10)", "C.scale"),
    "a dict": ('C = {"scale": 2.0, "rank": 10}', 'C["scale"]'),
    "a dict that may lack it": ('C = {"scale": 2.0, "rank": 10}', 'C.get("scale", 1.0)'),
    "a list": ("C = [2.0, 10]", "C[0]"),
    "a class": ("class C:\n    scale = 2.0\n    rank = 10", "C.scale"),
    "a data class": (
        "import dataclasses\n\n\n@dataclasses.dataclass\nclass Config:\n    scale: float\n    rank: int\n\n\n"
        "C = Config(scale=2.0, rank=10)",
        "C.scale",
    ),
    "slots": (
        "import dataclasses\n\n\n@dataclasses.dataclass(slots=True)\nclass Config:\n    scale: float\n    rank: int\n"
        "\n\nC = Config(scale=2.0, rank=10)",
        "C.scale",
    ),
    "a dict in a namespace": (
        "import types\n\nC = types.SimpleNamespace(data={'scale': 2.0, 'workers': 10}, name='a')",
        'C.data["scale"]',
    ),
    "a dict that reads as attributes": (
        "class Config(dict):\n    __getattr__ = dict.__getitem__\n\n\nC = Config(scale=2.0, rank=10)",
        "C.scale",
    ),
    "omegaconf": (
        "from omegaconf import OmegaConf\n\nC = OmegaConf.create(dict(data=dict(scale=2.0, workers=10)))",
        "C.data.scale",
    ),
    "a part of omegaconf": (
        "from omegaconf import OmegaConf\n\nC = OmegaConf.create(dict(data=dict(scale=2.0), rank=10))",
        "sum(C.data.values())",
    ),
    "pydantic": (
        "import pydantic\n\n\nclass Config(pydantic.BaseModel):\n    scale: float\n    rank: int\n\n\n"
        "C = Config(scale=2.0, rank=10)",
        "C.scale",
    ),
}

#: How a function gets at it.
WAYS = {
    "global": "{made}\n\n\ndef by(x):\n    return x * {read}",
    "captured": "{made}\n\n\ndef make(C):\n    return lambda x: [x * {read} for _ in range(1)][0]\n\n\nby = make(C)",
    "imported": "def by(x):\n    from config import C\n\n    return x * {read}\n\n\nimport config\n",
}

for way, code in WAYS.items():
    for kind, (made, read) in CONFIGURATIONS.items():
        for miss, edit in ((MISS, ("2.0", "3.0")), (HIT, ("10", "11"))):

            def change(s: Study, edit: Edit = edit, made: str = made, code: str = code, read: str = read) -> Change:
                config = s.folder / "config.py"
                config.write_text(made)
                s.define(code.format(made=made, read=read))
                s.add('mt.Lambdad("image", by)')
                yield
                config.write_text(made.replace(*edit))
                if "{made}" in code:
                    s.edit(*edit)

            change.__name__ = f"{'what is' if miss else 'what is not'} read of {kind}, {way}"
            (misses() if miss else hits(long=kind != "a namespace"))(change)
            name = f"{'miss' if miss else 'hit'}-{change.__name__}"
            TABLE.rows[name] = TABLE.rows[name]._replace(long=kind != "a namespace")

NAMESPACE = (
    "import types\n\n\nclass Config(types.SimpleNamespace):\n    def both(self):\n        return self.scale\n\n"
    "    @property\n    def twice(self):\n        return 2 * self.scale\n\n\nC = Config(scale=2.0)\n\n\n"
)
UNTOLD = {
    "it is passed on": "def of(c):\n    return c.scale\n\n\ndef by(x):\n    return x * of(C)",
    "it is iterated": "def by(x):\n    return x * sum(vars(C).values())",
    "its name is a variable": "def by(x):\n    return x * max(getattr(C, name) for name in ('scale',))",
    "a method reads it": "def by(x):\n    return x * C.both()",
    "a property reads it": "def by(x):\n    return x * C.twice",
    "it gets another name": "def by(x):\n    c = C\n    return x * c.scale",
    "it is returned": "def get():\n    return C\n\n\ndef by(x):\n    return x * get().scale",
    "it stands for another": "def by(x, c=None):\n    return x * (c or C).scale",
    "it is reached by its module": "import sys\n\n\ndef by(x):\n    return x * sys.modules[__name__].C.scale",
    "a function inside reads it": "def by(x):\n    def inner():\n        return C.scale\n\n    return x * inner()",
}
family(
    MISS, "all of it counts where", {n: (NAMESPACE + code, ("scale=2.0", "scale=3.0")) for n, code in UNTOLD.items()}
)


# Wrappers

WRAPPED = {
    "partialmethod": "import functools\n\n\nclass T:\n    def of(self, x, y):\n        return x * y\n\n"
    "    twice = functools.partialmethod(of, 2.0)\n\n\nby = T().twice",
    "singledispatchmethod": "import functools\n\n\nclass T:\n    @functools.singledispatchmethod\n"
    "    def of(self, x):\n        return x * 2.0\n\n\nby = T().of",
    "wraps": "import functools\n\n\ndef scaled(f):\n    @functools.wraps(f)\n    def inner(x):\n"
    "        return f(x) * 2.0\n\n    return inner\n\n\n@scaled\ndef by(x):\n    return x",
    "cache": "import functools\n\n\n@functools.cache\ndef scale():\n    return 2.0\n\n\n"
    "def by(x):\n    return x * scale()",
    "a proxy": "class Proxy:\n    def __init__(self, f, scale):\n        self.f, self.scale = f, scale\n\n"
    "    @property\n    def __class__(self):\n        return type(self.f)\n\n    def __call__(self, x):\n"
    "        return self.f(x) * self.scale\n\n    def __getattr__(self, name):\n        return getattr(self.f, name)\n"
    "\n\ndef same(x):\n    return x\n\n\nby = Proxy(same, 2.0)",
    "a weak proxy": "import weakref\n\n\nclass T:\n    def __init__(self):\n        self.scale = 2.0\n\n\n"
    "T1 = T()\nP = weakref.proxy(T1)\n\n\ndef by(x):\n    return x * P.scale",
    "TorchScript": "@torch.jit.script\ndef by(x):\n    return x * 2.0",
    "a model of TorchScript": "class M(torch.nn.Module):\n    def forward(self, x):\n        return x * 2.0\n\n\n"
    "S = torch.jit.script(M())\n\n\ndef by(x):\n    return S(x)",
}
family(MISS, "what wraps or is wrapped", {name: (code, ("2.0", "3.0")) for name, code in WRAPPED.items()})

# What code reads of code

READ = {
    "a docstring": ('def by(x):\n    """2.0"""\n    return x * float(by.__doc__)', ("2.0", "3.0")),
    "a docstring of a class": (
        'import inspect\n\n\nclass T:\n    """2.0"""\n\n\ndef by(x):\n    return x * float(inspect.getdoc(T))',
        ("2.0", "3.0"),
    ),
    "an annotation": ("def by(x: 2.0):\n    return x * by.__annotations__['x']", ("2.0", "3.0")),
    "an annotation of a class": (
        "import typing\n\n\nclass T(typing.TypedDict):\n    a: int\n\n\n"
        "def by(x):\n    return x * (2 if typing.get_type_hints(T)['a'] is int else 3)",
        ("a: int", "a: str"),
    ),
    "the order of methods": (
        "class T:\n    def one(self):\n        return 1.0\n\n    two = lambda self: 2.0\n\n\n"
        "def by(x):\n    return x * [f(None) for f in vars(T).values() if callable(f)][0]",
        ("    def one(self):\n        return 1.0\n\n    two = lambda self: 2.0",
         "    two = lambda self: 2.0\n\n    def one(self):\n        return 1.0"),
    ),
    "what a class matches": (
        "class T:\n    __match_args__ = ('a', 'b')\n    a, b = 1.0, 2.0\n\n\n"
        "def by(x):\n    match T():\n        case T(a):\n            return x * a",
        ("('a', 'b')", "('b', 'a')"),
    ),
    "a field of a data class": (
        "import dataclasses\n\n\n@dataclasses.dataclass\nclass T:\n    scale: int = 2\n\n\n"
        "def by(x):\n    return x * (2.0 if dataclasses.fields(T)[0].type in (int, 'int') else 3.0)",
        ("scale: int", "scale: float"),
    ),
}  # fmt: skip
family(MISS, "code that is read", READ)

SAME = {
    "a docstring": ("def by(x):\n    return x * 2.0", ("by(x):\n", 'by(x):\n    """Doubles."""\n')),
    "another docstring": ('def by(x):\n    """One."""\n    return x * 2.0', ("One", "Two")),
    "an annotation": ("def by(x):\n    return x * 2.0", ("by(x)", "by(x: torch.Tensor) -> torch.Tensor")),
    "an annotation of a variable": ("def by(x):\n    y = x * 2.0\n    return y", ("y = x", "y : object = x")),
    "a comment": ("def by(x):\n    return x * 2.0", ("* 2.0", "* 2.0  # as before")),
    "parentheses": ("def by(x):\n    return x * 2.0", ("x * 2.0", "((x) * (2.0))")),
    "quotes": ("def by(x):\n    return x * len('ab')", ("'ab'", '"ab"')),
    "lines": (
        "def by(x):\n    return max([x], key=len)[0] * 2.0",
        ("([x], key=len)", "(\n        [x],\n        key=len,\n    )"),
    ),
    "lines above": ("def by(x):\n    return x * 2.0", ("def by", "OTHER = 1\n\n\ndef by")),
    "a docstring of a method": (
        "class T:\n    def __call__(self, x):\n        return x * 2.0\n\n\nby = T()",
        ("        return", '        "Doubles."\n        return'),
    ),
    "another lambda in the line": ("a, by = lambda x: x * 2.0, lambda x: x * 2.0 + 1", ("x * 2.0,", "x * 4.0,")),
}
family(HIT, "code that means the same", SAME)

# Values that give no values, and what calls leave behind

HELD = {
    "a log file": ("open('a.log', 'w')", "open('b.log', 'w')"),
    "a lock": ("threading.Lock()", "threading.Lock()"),
    "a reentrant lock": ("threading.RLock()", "threading.RLock()"),
    "an event": ("threading.Event()", "threading.Event()"),
    "a condition": ("threading.Condition()", "threading.Condition()"),
    "a pool": ("futures.ThreadPoolExecutor(2)", "futures.ThreadPoolExecutor(4)"),
    "a handler": ("logging.FileHandler('a.log')", "logging.FileHandler('b.log')"),
    "a lock of processes": ("multiprocessing.Lock()", "multiprocessing.Lock()"),
    "a variable of a context": ("ContextVar('a', default=1.0)", "ContextVar('a', default=1.0)"),
    "a format": ("struct.Struct('<d')", "struct.Struct('<d')"),
    "a script": ("torch.jit.script(double)", "torch.jit.script(double)"),
}
HOLDER = (
    "import logging, multiprocessing, struct, threading\nfrom concurrent import futures\n"
    "from contextvars import ContextVar\n\n\ndef double(x):\n    return x + x\n\n\n"
    "class T:\n    def __init__(self, held):\n        self.held = held\n\n"
    "    def __call__(self, x):\n        return x * 2.0\n\n\nby = T(HELD)"
)
family(HIT, "an attribute that gives no values", {n: (HOLDER.replace("HELD", a), (a, b)) for n, (a, b) in HELD.items()})

READS_HELD = "import struct\nfrom contextvars import ContextVar\n\nHELD = {0}\n\n\ndef by(x):\n    return x * HELD{1}"
family(
    MISS,
    "a value that was refused",
    {
        "a struct": (READS_HELD.format("struct.Struct('<d')", ".size"), ("<d", "<f")),
        "a variable of a context": (READS_HELD.format("ContextVar('a')\nHELD.set(2.0)", ".get()"), ("2.0", "3.0")),
        "a device": (
            "class T:\n    def __init__(self, made_on):\n        self.made_on = made_on\n\n    def __call__(self, x):\n"
            "        return x * (2.0 if self.made_on.type == 'cpu' else 3.0)\n\n\nby = T(torch.device('cpu'))",
            ("('cpu'))", "('meta'))"),
        ),
    },
)


@hits(one_process=False)
def attributes_that_calls_have_set(s: Study) -> Change:
    s.define(
        "import functools\n\n\nclass T:\n    @functools.cached_property\n    def scale(self):\n        return 2.0\n\n"
        "    def __call__(self, x):\n        return x * self.scale\n\n\nby = T()\nUSED = 0"
    )
    s.add('mt.Lambdad("image", by)')
    yield
    s.edit("USED = 0", "USED = by(1)")


@hits(one_process=True)
def what_a_call_loaded_goes_to_another_process(s: Study) -> Change:
    """A loader may send its dataset to workers after it was used."""
    s.define(
        "class T:\n    model = None\n\n    def __call__(self, x):\n        self.model = self.model or [2.0]\n"
        "        return x * self.model[0]"
    )
    s.add('mt.Lambdad("image", T())')
    yield
    s.read = "__import__('pickle').loads(__import__('pickle').dumps(dataset))[index]"


# Where code is

PATHS = {
    "its folder": "from pathlib import Path\n\n\ndef by(x):\n    return x * len(Path(__file__).parent.name[:1])",
    "its folder as a variable": "from pathlib import Path\n\nHERE = Path(__file__).parent\n\n\n"
    "def by(x):\n    return x * len(HERE.name[:1])",
    "itself as a variable": "SCRIPT = __file__\n\n\ndef by(x):\n    return x * len(SCRIPT[:1])",
    "another module's": "def by(x):\n    import study\n\n    return x * len(study.__file__[:1])",
}
family(
    HIT,
    "an edit of a script that knows where it is",
    {n: (f"OTHER = 1\n{c}", ("OTHER = 1", "OTHER = 2")) for n, c in PATHS.items()},
)


def late(s: Study, code: str) -> None:
    """A function that imports the module ``late`` when it is called, if at all."""
    (s.folder / "late.py").write_text(code)
    (s.folder / "deeper.py").write_text("SCALE = 2.0\n")
    s.define("def by(x, on=False):\n    if on:\n        import late\n\n        return late.of(x)\n    return x * 2.0")
    s.add('mt.Lambdad("image", by)')


@hits()
def an_import_that_would_end_the_program(s: Study) -> Change:
    late(s, "raise SystemExit\n")
    yield


@misses(other_item=False)
def a_module_that_is_not_imported_yet(s: Study) -> Change:
    late(s, "def of(x):\n    return x * 2.0\n")
    yield
    (s.folder / "late.py").write_text("def of(x):\n    return x * 3.0\n")


@misses(other_item=False, long=True)
def a_module_that_a_module_would_import(s: Study) -> Change:
    late(s, "from deeper import SCALE\n\n\ndef of(x):\n    return x * SCALE\n")
    yield
    (s.folder / "deeper.py").write_text("SCALE = 3.0\n")


@hits(long=True)
def a_comment_in_a_module_that_is_not_imported_yet(s: Study) -> Change:
    late(s, "def of(x):\n    return x * 2.0\n")
    yield
    (s.folder / "late.py").write_text('"""Late."""\n\n\ndef of(x):\n    return x * 2.0  # twice\n')


@misses()
def a_package_that_is_linked_into_an_environment(s: Study) -> Change:
    clone, site = s.folder / "clone" / "mylab", s.folder / "lib" / "site-packages"
    clone.mkdir(parents=True)
    site.mkdir(parents=True)
    (clone / "__init__.py").write_text("def plus(x):\n    return x + 1.0\n")
    (site / "mylab").symlink_to(clone)
    s.define("import sys\n\nsys.path.insert(0, str(Path(__file__).parent / 'lib' / 'site-packages'))\n\nimport mylab")
    s.add('mt.Lambdad("image", lambda x: mylab.plus(x))')
    yield
    (clone / "__init__.py").write_text("def plus(x):\n    return x + 2.0\n")


@misses(long=True)
def a_package_that_was_installed_to_be_edited(s: Study) -> Change:
    clone = s.folder / "clone" / "mylab"
    clone.mkdir(parents=True)
    (clone / "__init__.py").write_text("def plus(x):\n    return x + 1.0\n")
    s.define("import sys\n\nsys.path.append(str(Path(__file__).parent / 'clone'))\n\nimport mylab")
    s.add('mt.Lambdad("image", lambda x: mylab.plus(x))')
    yield
    (clone / "__init__.py").write_text("def plus(x):\n    return x + 2.0\n")


@misses(other_item=False)
def monai_from_a_clone(s: Study) -> Change:
    (s.folder / "monai").mkdir()
    (s.folder / "monai" / "__init__.py").write_text("A = 1\n")
    s.code = "import monai; monai.__file__ = 'monai/__init__.py'"
    yield
    (s.folder / "monai" / "__init__.py").write_text("A = 2\n")


# Settings that code may see

SETTINGS = {
    "the time zone": (
        "import os, time; os.environ['TZ'] = {}; time.tzset()",
        ("'UTC'", "'Asia/Tokyo'"),
        "import time\n\n\ndef by(x):\n    return x * (2.0 + time.localtime(0).tm_hour)",
    ),
    "the decimal context": (
        "import decimal; decimal.getcontext().prec = {}",
        ("28", "2"),
        "from decimal import Decimal\n\n\ndef by(x):\n    return x * float(Decimal(1) / Decimal(3))",
    ),
    "how NumPy prints": (
        "import numpy; numpy.set_printoptions(precision={})",
        ("8", "1"),
        "def by(x):\n    return x * float(str(np.array([0.123456]))[1:-1])",
    ),
}
for i, (setting, (code, values, define)) in enumerate(SETTINGS.items()):
    calls = (code.format(values[0]), code.format(values[1]))
    added = {"add": 'mt.Lambdad("image", by)', "long": i > 0}
    row(MISS, f"{setting} where code may see it", code=calls, define=define, **added)
    row(HIT, f"{setting} where no code sees it", code=calls, define="def by(x):\n    return x * 2.0", **added)


# The dataset


@misses(one_process=True)
def a_transform_changed_in_place_and_assigned_again(s: Study) -> Change:
    s.define("MAXV = [1.5]")
    s.edit("maxv=1.5", "maxv=MAXV[0]")
    yield
    s.code = (
        "import study; study.MAXV[0] = 3.0; dataset.transform.transforms[2].scaler.maxv = 3.0; "
        "dataset.transform = dataset.transform"
    )


@misses(one_process=True, long=True)
def an_array_of_a_file_that_this_process_writes(s: Study) -> Change:
    s.define("np.save('mapped.npy', np.ones(2))\nMAPPED = np.load('mapped.npy', mmap_mode='r+')")
    s.item('"mapped": MAPPED')
    s.add('mt.EnsureTyped("mapped")')
    yield
    s.code = "import study; study.MAPPED[:] = 2.0"
