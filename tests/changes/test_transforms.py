"""Changes of the code and the parameters of transforms; see ``rows.py``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.changes.rows import HIT, MISS, Change, Table
from tests.changes.test_settings import VERSION
from tests.studies import Study

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test

# Transforms


row(MISS, "a_parameter", script=("maxv=1.5", "maxv=2.0"))


@misses()
def the_order_of_transforms(s: Study) -> Change:
    s.add('mt.Flipd("image", 0)')
    s.add('mt.Zoomd("image", 1.5)')
    yield
    s.edit('mt.Flipd("image", 0)', "FIRST")
    s.edit('mt.Zoomd("image", 1.5)', 'mt.Flipd("image", 0)')
    s.edit("FIRST", 'mt.Zoomd("image", 1.5)')


@misses()
def a_transform_added(s: Study) -> Change:
    yield
    s.add('mt.Flipd("image", 0)')


row(MISS, "a_transform_removed", script=('            mt.Flipd("image", 0),\n', ""), add='mt.Flipd("image", 0)')
row(
    MISS,
    "a_lazy_pipeline",
    script=("        ]\n    )", "        ],\n        lazy=True,\n    )"),
    add=('mt.Rotated("image", 0.3)', 'mt.Zoomd("image", 1.5)'),
)


@misses()
def a_lazy_transform(s: Study) -> Change:
    s.add('mt.Rotated("image", 0.3)')
    s.add('mt.Zoomd("image", 1.5)')
    s.edit("        ]\n    )", "        ],\n        lazy=None,\n    )")
    yield
    s.edit('"image", 0.3', '"image", 0.3, lazy=True')
    s.edit('"image", 1.5', '"image", 1.5, lazy=True')


row(
    MISS,
    "overrides_of_a_lazy_pipeline",
    script=('"mode": "bilinear"', '"mode": "nearest"'),
    add='mt.Rotated("image", 0.3)',
    edit=(
        "        ]\n    )",
        '        ],\n        lazy=True,\n        overrides={"image": {"mode": "bilinear"}},\n    )',
    ),
)


@misses()
def map_items(s: Study) -> Change:
    s.define("class Twice(mt.Transform):\n    def __call__(self, data):\n        return [data, dict(data)]")
    s.define("class Count(mt.Transform):\n    def __call__(self, data):\n        return {'count': len(data)}")
    s.add("Twice()")
    s.add("Count()")
    yield
    s.edit("        ]\n    )", "        ],\n        map_items=False,\n    )")


row(MISS, "the_code_of_a_lambda", script=("x + 1", "x - 1"), add='mt.Lambdad("image", lambda x: x + 1)')
row(MISS, "a_constant_of_a_lambda", script=("x + 1", "x + 2"), add='mt.Lambdad("image", lambda x: x + 1)')
row(MISS, "a_method_that_a_lambda_calls", script=("floor", "ceil"), add='mt.Lambdad("image", lambda x: x.floor())')
row(
    MISS,
    "the_value_of_a_closure",
    script=("plus(1.0)", "plus(1.5)"),
    define="def plus(offset):\n    return lambda x: x + offset",
    add='mt.Lambdad("image", plus(1.0))',
)
row(
    MISS,
    "a_global_that_a_function_reads",
    script=("OFFSET = 1.0", "OFFSET = 1.5"),
    define="OFFSET = 1.0\n\n\ndef plus(x):\n    return x + OFFSET",
    add='mt.Lambdad("image", plus)',
)
row(
    MISS,
    "a_function_that_a_function_calls",
    script=("return 1.0", "return 1.5"),
    define="def offset():\n    return 1.0\n\n\ndef plus(x):\n    return x + offset()",
    add='mt.Lambdad("image", plus)',
)


@misses()
def a_function_of_another_file(s: Study) -> Change:
    helpers = s.folder / "helpers.py"
    helpers.write_text("def plus(x):\n    return x + 1.0\n")
    s.define("import helpers")
    s.add('mt.Lambdad("image", lambda x: helpers.plus(x))')
    yield
    helpers.write_text("def plus(x):\n    return x + 1.5\n")


row(
    MISS,
    "a_default_argument",
    script=("offset=1.0", "offset=1.5"),
    define="def plus(x, offset=1.0):\n    return x + offset",
    add='mt.Lambdad("image", plus)',
)
row(
    MISS,
    "a_default_of_a_keyword",
    script=("offset=1.0", "offset=1.5"),
    define="def plus(x, *, offset=1.0):\n    return x + offset",
    add='mt.Lambdad("image", plus)',
)
row(
    MISS,
    "an_argument_of_a_partial",
    script=("plus, 1.0", "plus, 1.5"),
    define="from functools import partial\n\n\ndef plus(offset, x):\n    return x + offset",
    add='mt.Lambdad("image", partial(plus, 1.0))',
)
row(
    MISS,
    "a_keyword_of_a_partial",
    script=("offset=1.0", "offset=1.5"),
    define="from functools import partial\n\n\ndef plus(x, offset):\n    return x + offset",
    add='mt.Lambdad("image", partial(plus, offset=1.0))',
)


PLUS = """
class Base:
    scale = 1.0

    def offset(self):
        return 1.0


class Plus(Base):
    def __init__(self, more):
        self.more = more

    def __call__(self, x):
        return x * self.scale + self.offset() + self.more
"""


row(
    MISS,
    "an_attribute_of_a_callable",
    script=("Plus(0.0)", "Plus(0.5)"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "a_class_edited_in_its_file",
    script=("x * self.scale", "x / 2 * self.scale"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "a_method_of_a_base_class",
    script=("return 1.0", "return 1.5"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "an_attribute_of_a_class",
    script=("scale = 1.0", "scale = 1.5"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    MISS,
    "what_a_class_says_of_itself",
    script=("Model(2)", "Model(3)"),
    define="class Model:\n    def __init__(self, version):\n        self.net = lambda x: x * version\n"
    "        self.version = version\n\n    def __cache_key__(self):\n        return self.version\n\n"
    "    def __call__(self, x):\n        return self.net(x)",
    add='mt.Lambdad("image", Model(2))',
)
row(
    MISS,
    "the_value_of_an_enum",
    script=("LARGE = 2.0", "LARGE = 3.0"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0",
    add='mt.Lambdad("image", lambda x: x * Scale.LARGE.value)',
)


@misses()
def an_enum_that_a_transform_holds(s: Study) -> Change:
    s.define("import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0")
    s.define("class By:\n    def __init__(self, scale):\n        self.by = scale\n")
    s.edit("self.by = scale\n", "self.by = scale\n\n    def __call__(self, x):\n        return x * self.by.value")
    s.add('mt.Lambdad("image", By(Scale.LARGE))')
    yield
    s.edit("LARGE = 2.0", "LARGE = 3.0")


row(
    MISS,
    "a_decorator",
    script=("f(x) + 0.0", "f(x) + 0.5"),
    define="import functools\n\n\ndef logged(f):\n    @functools.wraps(f)\n    def g(x):\n        return f(x) + 0.0\n\n"
    "    return g\n\n\n@logged\ndef plus(x):\n    return x + 1.0",
    add='mt.Lambdad("image", plus)',
)
# whose module and name it takes over
row(
    MISS,
    "a_decorator_of_a_librarys_function",
    script=("f(x) + 0.0", "f(x) + 0.5"),
    define="import functools\n\n\ndef logged(f):\n    @functools.wraps(f)\n    def g(x):\n        return f(x) + 0.0\n\n"
    "    return g\n\n\npositive = logged(torch.nn.functional.relu)",
    add='mt.Lambdad("image", positive)',
)
row(
    MISS,
    "what_a_decorator_holds",
    script=("Times(plus, 1.0)", "Times(plus, 1.5)"),
    define="import functools\n\n\nclass Times:\n    def __init__(self, f, k):\n"
    "        functools.update_wrapper(self, f)\n"
    "        self.f, self.k = f, k\n\n    def __call__(self, x):\n        return self.k * self.f(x)\n\n\n"
    "def plus(x):\n    return x + 1.0\n\n\ntimes = Times(plus, 1.0)",
    add='mt.Lambdad("image", times)',
)
row(
    MISS,
    "what_an_expression_of_a_bundle_refers_to",
    script=("'k': 1.0", "'k': 1.5"),
    define="from monai.bundle import ConfigParser\n\nparser = ConfigParser({'k': 1.0, 'f': '$lambda x: x * @k'})\n"
    "scaled = parser.get_parsed_content('f')",
    add='mt.Lambdad("image", scaled)',
)
row(
    MISS,
    "a_method_of_an_enum",
    script=("x * 1.0", "x * 1.5"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0\n\n    def of(self, x):\n        return x * 1.0",
    add='mt.Lambdad("image", lambda x: Scale.LARGE.of(x))',
)
row(
    MISS,
    "what_is_no_member_of_an_enum",
    script=("nonmember(1.0)", "nonmember(1.5)"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0\n    by = enum.nonmember(1.0)",
    add='mt.Lambdad("image", lambda x: x * Scale.by)',
)
row(
    MISS,
    "a_property_of_an_enum",
    script=("/ 2.0", "/ 4.0"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    LARGE = 2.0\n\n    @enum.property\n    def half(self):\n"
    "        return self.value / 2.0",
    add='mt.Lambdad("image", lambda x: x * Scale.LARGE.half)',
)
row(
    MISS,
    "a_function_that_remembers",
    script=("i + 1.0", "i + 1.5"),
    define="import functools\n\n\n@functools.lru_cache\ndef offset(i):\n    return i + 1.0",
    add='mt.Lambdad("image", lambda x: x + offset(1))',
)
row(
    MISS,
    "a_value_in_a_global_dictionary",
    script=("'ct': 1.0", "'ct': 1.5"),
    define="CONFIG = {'scale': {'ct': 1.0}}",
    add='mt.Lambdad("image", lambda x: x * CONFIG["scale"]["ct"])',
)
# each of whose windows becomes a channel
row(
    MISS,
    "the_order_of_a_dictionary",
    script=('"low": (0.0, 0.5), "high": (0.5, 1.0)', '"high": (0.5, 1.0), "low": (0.0, 0.5)'),
    define="class Windows:\n    def __init__(self, windows):\n        self.windows = windows\n\n"
    "    def __call__(self, x):\n        return torch.cat([x.clip(*window) for window in self.windows.values()])",
    add='mt.Lambdad("image", Windows({"low": (0.0, 0.5), "high": (0.5, 1.0)}))',
)
row(
    MISS,
    "the_order_of_an_enum",
    script=("    ONE = 1.0\n    TWO = 2.0", "    TWO = 2.0\n    ONE = 1.0"),
    define="import enum\n\n\nclass Scale(enum.Enum):\n    ONE = 1.0\n    TWO = 2.0",
    add='mt.Lambdad("image", lambda x: torch.cat([x * scale.value for scale in Scale]))',
)


@misses()
def a_function_of_a_file_imported_in_a_function(s: Study) -> Change:
    helpers = s.folder / "helpers.py"
    helpers.write_text("def plus(x):\n    return x + 1.0\n")
    s.define("def late(x):\n    import helpers\n\n    return helpers.plus(x)")
    s.add('mt.Lambdad("image", late)')
    yield
    helpers.write_text("def plus(x):\n    return x + 1.5\n")


@misses()
def a_function_imported_from_a_package_in_a_method(s: Study) -> Change:
    package = s.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.0\n")
    (package / "steps.py").write_text(
        "class Plus:\n    def __call__(self, x):\n        from . import helpers\n\n        return helpers.plus(x)\n"
    )
    s.define("from package.steps import Plus")
    s.add('mt.Lambdad("image", Plus())')
    yield
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.5\n")


@misses()
def a_constant_two_files_away(s: Study) -> Change:
    (s.folder / "helpers.py").write_text("import deeper\n\ndef plus(x):\n    return x + deeper.OFFSET\n")
    (s.folder / "deeper.py").write_text("OFFSET = 1.0\n")
    s.define("from helpers import plus")
    s.add('mt.Lambdad("image", plus)')
    yield
    (s.folder / "deeper.py").write_text("OFFSET = 1.5\n")


@misses()
def a_module_in_another_module(s: Study) -> Change:
    (s.folder / "helpers.py").write_text("import deeper\n")
    (s.folder / "deeper.py").write_text("OFFSET = 1.0\n")
    s.define("import helpers")
    s.add('mt.Lambdad("image", lambda x: x + helpers.deeper.OFFSET)')
    yield
    (s.folder / "deeper.py").write_text("OFFSET = 1.5\n")


def changes_a_module(s: Study, define: str, transform: str) -> Change:
    """A study whose transforms are handed the module ``config``, which then changes."""
    (s.folder / "config.py").write_text("import threading\n\nshape = threading.Lock()\nSCALE = 1.0\n")
    s.define(f"import config\n\n\n{define}")
    s.add(transform)
    yield
    (s.folder / "config.py").write_text("import threading\n\nshape = threading.Lock()\nSCALE = 1.5\n")


SCALES = """
class Scale:
    def __init__(self, settings):
        self.settings = settings

    def __call__(self, x):
        return x.reshape(x.shape) * self.settings.SCALE
"""


@misses()
def a_module_given_to_a_constructor(s: Study) -> Change:
    yield from changes_a_module(s, SCALES.strip(), 'mt.Lambdad("image", Scale(config))')


@misses()
def a_module_in_a_dictionary(s: Study) -> Change:
    yield from changes_a_module(s, "SETS = {1: config}", 'mt.Lambdad("image", lambda x: x * SETS[1].SCALE)')


@misses()
def a_module_given_to_a_function(s: Study) -> Change:
    define = "def scale(x, settings):\n    return x * settings.SCALE"
    yield from changes_a_module(s, define, 'mt.Lambdad("image", lambda x: scale(x, config))')


@misses()
def a_module_that_a_function_imports_and_gives_to_another(s: Study) -> Change:
    define = (
        "def scale(x, settings):\n    return x * settings.SCALE\n\n\n"
        "def step(x):\n    import config as c\n\n    return scale(x, c)"
    )
    yield from changes_a_module(s, define, 'mt.Lambdad("image", step)')


@misses()
def a_module_of_a_package_given_to_a_function(s: Study) -> Change:
    (s.folder / "package").mkdir()
    (s.folder / "package" / "config.py").write_text("SCALE = 1.0\n")
    s.define("import package.config\n\n\ndef scale(x, settings):\n    return x * settings.SCALE")
    s.add('mt.Lambdad("image", lambda x: scale(x, package.config))')
    yield
    (s.folder / "package" / "config.py").write_text("SCALE = 1.5\n")


@hits()
def another_module_of_a_package_is_imported_too(s: Study) -> Change:
    (s.folder / "package").mkdir()
    (s.folder / "package" / "config.py").write_text("SCALE = 1.5\n")
    (s.folder / "package" / "shape.py").write_text("ROUND = True\n")  # a name that the transform reads
    s.define(f"import package.config\n\n\n{SCALES.strip().replace('.SCALE', '.config.SCALE')}")
    s.add('mt.Lambdad("image", Scale(package))')
    yield
    s.edit("import package.config\n", "import package.config\nimport package.shape\n")


def of_a_lazy_package(s: Study, imports: str) -> Change:
    """A function of a package that imports it when it is asked for it."""
    package = s.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def __getattr__(name):\n    import importlib\n\n"
        "    return getattr(importlib.import_module('package.helpers'), name)\n"
    )
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.0\n")
    s.define(imports)
    s.add('mt.Lambdad("image", lambda x: package.plus(x))')
    yield
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.5\n")


@misses()
def what_a_module_imports_when_it_is_asked_for(s: Study) -> Change:
    return of_a_lazy_package(s, "import package")


@misses()
def what_a_module_is_asked_for_and_was_imported_before(s: Study) -> Change:  # so no read of it is seen
    return of_a_lazy_package(s, "import package.helpers")


@misses()
def what_a_module_of_a_kind_of_its_own_imports(s: Study) -> Change:
    package = s.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import importlib, sys, types\n\n\nclass Lazy(types.ModuleType):\n    def __getattr__(self, name):\n"
        "        if name != 'plus':\n            raise AttributeError(name)\n"
        "        self.plus = importlib.import_module('package.helpers').plus\n        return self.plus\n\n\n"
        "sys.modules[__name__].__class__ = Lazy\n"
    )
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.0\n")
    s.define("import package")
    s.add('mt.Lambdad("image", lambda x: package.plus(x))')
    yield
    (package / "helpers.py").write_text("def plus(x):\n    return x + 1.5\n")


def installed(s: Study, offset: float, version: str = "0.1", name: str = "mylab", url: bool = True) -> None:
    """Installs the package ``mylab``, as pip does from a folder, or from an index."""
    site = s.folder / "lib" / "site-packages"
    shutil.rmtree(site, ignore_errors=True)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / "mylab").mkdir()
    code = f"def plus(x):\n    return x + {offset}\n"
    (site / "mylab" / "__init__.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    digest = hashlib.sha256(code.encode()).hexdigest()
    (info / "RECORD").write_text(f"../../bin/x,sha256=0,1\nmylab/__init__.py,sha256={digest},9\n{info.name}/RECORD,,\n")
    if url:
        (info / "direct_url.json").write_text('{"url": "file:///src/mylab", "dir_info": {}}')


def with_package(s: Study) -> None:
    s.code = f"import sys; sys.path.insert(0, {str(s.folder / 'lib' / 'site-packages')!r})"
    s.define("import mylab")
    s.add('mt.Lambdad("image", lambda x: mylab.plus(x))')


@misses()
def a_package_of_ones_own_installed_again(s: Study) -> Change:  # pip install ., with the version left as it was
    installed(s, 1.0)
    with_package(s)
    yield
    installed(s, 1.5)


@hits()
def a_package_of_ones_own_installed_elsewhere(s: Study) -> Change:
    installed(s, 1.0)
    with_package(s)
    yield
    (s.folder / "lib").rename(s.folder / "lib2")
    s.code = s.code.replace("lib", "lib2")


@misses()
def another_version_of_a_package_of_another_name(s: Study) -> Change:
    installed(s, 1.0, "0.1", "lab_transforms", url=False)
    with_package(s)
    yield
    installed(s, 1.5, "0.2", "lab_transforms", url=False)


EXTENSION = """
#include <Python.h>
static PyObject *offset(PyObject *self, PyObject *unused) { return PyFloat_FromDouble(OFFSET); }
static PyMethodDef methods[] = {{"offset", offset, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "extension", "", -1, methods};
PyMODINIT_FUNC PyInit_extension(void) { return PyModule_Create(&module); }
"""


def changes_an_extension(folder: Path) -> Change:
    """A module in C, in a folder, that is compiled again."""
    compiler = shutil.which("cc") or pytest.skip("this machine has no C compiler")
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        pytest.skip("this machine has no header files of Python")
    folder.mkdir(exist_ok=True)
    build = [compiler, "-shared", "-fPIC", f"-I{include}", "-o", folder / "extension.so", "-xc", "-"]
    subprocess.run(build, input=EXTENSION.replace("OFFSET", "1.0").encode(), check=True)
    yield
    subprocess.run(build, input=EXTENSION.replace("OFFSET", "1.5").encode(), check=True)


@misses()
def an_extension_of_ones_own(s: Study) -> Change:
    s.define("import extension")
    s.add('mt.Lambdad("image", lambda x: x + extension.offset())')
    yield from changes_an_extension(s.folder)


@misses()
def an_extension_in_a_folder_without_init(s: Study) -> Change:
    s.define("from native import extension")
    s.add('mt.Lambdad("image", lambda x: x + extension.offset())')
    yield from changes_an_extension(s.folder / "native")


row(
    MISS,
    "a_function_made_a_ufunc",
    script=("x + 1.0", "x + 1.5"),
    define="def plus(x):\n    return x + 1.0\n\n\npluses = np.frompyfunc(plus, 1, 1)",
    add='mt.Lambdad("image", lambda x: torch.as_tensor(pluses(x.numpy()).astype(np.float32)))',
)
row(
    MISS,
    "a_kind_of_property",
    script=("2.0 * super()", "3.0 * super()"),
    define="class Doubled(property):\n    def __get__(self, owner, cls=None):\n"
    "        return 2.0 * super().__get__(owner, cls)\n\n\n"
    "class Plus:\n    @Doubled\n    def offset(self):\n        return 1.0\n\n"
    "    def __call__(self, x):\n        return x + self.offset",
    add='mt.Lambdad("image", Plus())',
)
row(
    MISS,
    "which_of_two_classes_of_one_name",
    script=("first, second =", "second, first ="),
    define="def made(call):\n    return type('Step', (), {'__call__': call, '__module__': __name__})\n\n\n"
    "first, second = made(lambda self, x: x + 1.0), made(lambda self, x: x * 2.0)",
    add=('mt.Lambdad("image", first())', 'mt.Lambdad("image", second())'),
)


QUANTITY = """
class Quantity(np.ndarray):
    def __array_finalize__(self, other):
        self.unit = getattr(other, "unit", 1.0)

    def __deepcopy__(self, memo):
        return quantity(self.copy(), self.unit)


def quantity(values, unit):
    made = np.asarray(values).view(Quantity)
    made.unit = unit
    return made
"""


row(
    MISS,
    "an_attribute_of_a_kind_of_array",
    script=("[1.0, 2.0], 0.5", "[1.0, 2.0], 0.25"),
    define=QUANTITY,
    item='"dose": quantity([1.0, 2.0], 0.5)',
    add='mt.Lambda(lambda d: {**d, "dose": float(d["dose"].max()) * d["dose"].unit})',
)
row(
    MISS,
    "an_attribute_of_a_tensor",
    script=("2.0]), 0.5", "2.0]), 0.25"),
    define="def with_unit(values, unit):\n    values.unit = unit\n    return values",
    item='"dose": with_unit(torch.tensor([1.0, 2.0]), 0.5)',
    add='mt.Lambda(lambda d: {**d, "dose": d["dose"] * d["dose"].unit})',
)
row(
    MISS,
    "an_argument_of_an_operator",
    script=('"add", 1.0', '"add", 1.5'),
    define="import operator",
    add='mt.Lambdad("image", operator.methodcaller("add", 1.0))',
)
row(MISS, "a_function_of_torch", script=("torch.sin", "torch.cos"), add='mt.Lambdad("image", torch.sin)')
row(
    MISS,
    "a_function_of_numpy",
    script=("np.sqrt", "np.cbrt"),
    add=(
        'mt.Lambdad("image", lambda x: torch.as_tensor(np.square(x.numpy())))',
        'mt.Lambda(lambda d: {**d, "age": float(np.sqrt(d["age"]))})',
    ),
)
row(
    MISS,
    "a_method_that_overrides_one_of_monais",
    script=("'age': 1", "'age': 2"),
    define="class Flip(mt.Flipd):\n    def __call__(self, d, lazy=None):\n        return {**d, 'age': 1}",
    add='Flip("image", 0)',
)


NET = """
class Net:
    def __call__(self, x):
        with torch.no_grad():
            return net(x.as_tensor()[None])[0]
"""


row(
    MISS,
    "the_weights_of_a_model",
    script=("net.weight, 0.5", "net.weight, 0.75"),
    define=f"net = torch.nn.Conv3d(1, 1, 1, bias=False)\ntorch.nn.init.constant_(net.weight, 0.5)\n\n{NET}",
    add='mt.Lambdad("image", Net())',
)
row(
    MISS,
    "a_model_in_training",
    script=(".eval()", ".train()"),
    define=f"net = torch.nn.BatchNorm3d(1).eval()\n\n{NET}",
    add='mt.Lambdad("image", Net())',
)
row(
    MISS,
    "an_array_that_a_transform_holds",
    script=("[0.25]", "[0.5]"),
    add='mt.NormalizeIntensityd("image", np.array([0.25]), np.array([2.0]))',
)


@misses()
def an_option_of_a_reader(s: Study) -> Change:
    s.edit("ensure_channel_first=True", "ensure_channel_first=True, as_closest_canonical=False")
    import nibabel as nib

    for path in s.data.iterdir():
        image = nib.load(path)
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj), np.diag([-1.5, 1.5, 2.0, 1.0])), path)
    yield
    s.edit("as_closest_canonical=False", "as_closest_canonical=True")


row(
    MISS,
    "another_reader",
    script=('reader="NibabelReader"', "reader=Mirrored"),
    define="from monai.data import NibabelReader\n\n\nclass Mirrored(NibabelReader):\n    def get_data(self, image):\n"
    "        values, header = super().get_data(image)\n        return values[::-1].copy(), header",
)


FURTHER_READER = """
from monai.data import NibabelReader
from monai.transforms.io import array

class ITKReader(NibabelReader):
    def get_data(self, image):
        values, header = super().get_data(image)
        return values[::-1].copy(), header

array.SUPPORTED_READERS = {**array.SUPPORTED_READERS, "further": ITKReader}
old = array.get_default_reader_registration_order
array.get_default_reader_registration_order = lambda: [*old(), "further"]
"""

row(MISS, "the_readers_one_would_get_without_asking", code=("", FURTHER_READER), edit=('reader="NibabelReader", ', ""))
row(
    MISS,
    "the_dtype_of_a_transform",
    script=("torch.float32", "torch.float64"),
    add='mt.EnsureTyped("image", dtype=torch.float32)',
)
row(
    MISS,
    "tracing_of_one_transform",
    script=("flip = mt.Flip(0)\n", "flip = mt.Flip(0)\nflip.tracing = False\n"),
    define="flip = mt.Flip(0)\n\n\ndef flipped(x):\n    return flip(x)",
    add='mt.Lambdad("image", flipped)',
)


# Code that means the same


row(
    HIT,
    "a_comment",
    script=("    def offset(self):\n", "    def offset(self):\n        # as in the paper\n"),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)


@hits()
def its_formatting(s: Study) -> Change:
    s.define(PLUS)
    s.add('mt.Lambdad("image", lambda x: Plus(0.0)(x) + 1)')
    yield
    s.edit(
        "x * self.scale + self.offset() + self.more",
        "(\n            x * self.scale\n            + self.offset() + self.more\n        )",
    )
    s.edit("lambda x: Plus(0.0)(x) + 1", "lambda x: (\n    Plus( 0.0 )(x)\n    + 1\n)")


row(
    HIT,
    "a_docstring_of_a_class",
    script=("class Plus(Base):\n", 'class Plus(Base):\n    """Adds."""\n\n'),
    define=PLUS,
    add='mt.Lambdad("image", Plus(0.0))',
)
row(
    HIT,
    "an_unrelated_global",
    script=("RATE = 1", "RATE = 2"),
    define="RATE = 1\nOFFSET = 1.0\n\n\ndef plus(x):\n    return x + OFFSET",
    add='mt.Lambdad("image", plus)',
)


@hits()
def an_unrelated_function(s: Study) -> Change:
    s.define("def plus(x):\n    return x + 1.0")
    s.add('mt.Lambdad("image", plus)')
    yield
    s.define("def unused(x):\n    return x")


@hits()
def the_order_of_an_items_keys(s: Study) -> Change:
    s.keep_order = False
    yield
    s.edit('{"image": str(DATA / f"ct_{i}.nii"), "age": 40 + i}', '{"age": 40 + i, "image": str(DATA / f"ct_{i}.nii")}')


row(HIT, "the_order_of_keywords", script=("minv=0.0, maxv=1.5", "maxv=1.5, minv=0.0"))


@hits()
def random_transforms_behind_the_cache(s: Study) -> Change:
    s.keep_ids = False
    s.add('mt.RandFlipd("image", prob=1.0, spatial_axis=0)')
    yield
    s.edit("spatial_axis=0", "spatial_axis=1")


row(HIT, "seeds_of_the_pipeline", script=("        ]\n    )\n", "        ]\n    ).set_random_state(7)\n"))
row(HIT, "statistics_of_the_pipeline", script=("        ]\n    )\n", "        ],\n        log_stats=True,\n    )\n"))


@hits()
def transforms_that_have_run(s: Study) -> Change:
    s.define("def used(compose):\n    return compose")
    s.edit("return mt.Compose(", "return used(mt.Compose)(")
    yield
    s.define(
        "class Used(mt.Compose):\n    def __init__(self, transforms):\n        super().__init__(transforms)\n"
        "        for i in range(2):\n            self.transforms[1]({'image': str(DATA / f'ct_{i}.nii')})\n"
    )
    s.edit("def used(compose):\n    return compose", "def used(compose):\n    return Used")


row(HIT, "a_further_reader_that_nobody_asked_for", code=("", FURTHER_READER))
row(
    HIT,
    "another_patch_of_monai_where_minor_versions_count",
    settings=({"options": {"monai_version": "minor"}}, {"options": {"monai_version": "minor"}}),
    code=(VERSION.format("1.6.1"), VERSION.format("1.6.2")),
)
row(
    HIT,
    "another_monai_where_it_does_not_count",
    settings=({"options": {"monai_version": None}}, {"options": {"monai_version": None}}),
    code=("", VERSION.format("2.0.0")),
)
