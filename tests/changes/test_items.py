"""Changes of values of items; see ``rows.py``."""

from __future__ import annotations

import os

import numpy as np

from tests.changes.rows import MISS, Change, Table, with_array
from tests.studies import TIME, Study

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test

# Items


row(MISS, "a_value_of_the_item", script=("40 + i", "41 + i"))
row(MISS, "the_type_of_a_value", script=("40 + i", "40.0 + i"))
row(MISS, "a_key_of_the_item", script=('"age": 40', '"years": 40'))


@misses()
def another_entry(s: Study) -> Change:
    yield
    s.item('"site": "a"')


row(MISS, "one_element_of_an_array", script=("2.0, 3.0", "2.0, 3.5"), array="np.array([1.0, 2.0, 3.0])")


row(
    MISS,
    "one_element_of_a_large_array",
    script=("700_001", "700_002"),
    array="np.where(np.arange(1 << 20) == 700_001, 1.0, 0.0)",
)


row(
    MISS,
    "the_dtype_of_an_array",
    script=("np.int32", "np.int64"),
    item='"weights": np.array([1, 2], np.int32)',
    add='mt.EnsureTyped("weights")',
)


row(MISS, "the_shape_of_an_array", script=("(2, 3)", "(3, 2)"), array="np.ones((2, 3))")


row(MISS, "an_element_of_a_tensor", script=("[1.0, 2.0]", "[1.0, 2.5]"), item='"weights": torch.tensor([1.0, 2.0])')
row(MISS, "a_tuple_in_place_of_a_list", script=("[1.0, 2.0]", "(1.0, 2.0)"), item='"spacing": [1.0, 2.0]')
row(
    MISS,
    "a_path_in_place_of_a_string",
    script=('"report": "report"', '"report": Path("report")'),
    item='"report": "report"',
)
row(
    MISS, "a_scalar_of_numpy_in_place_of_a_float", script=('"dose": 1.5', '"dose": np.float64(1.5)'), item='"dose": 1.5'
)
row(MISS, "the_sign_of_zero", script=('"dose": 0.0', '"dose": -0.0'), item='"dose": 0.0')


@misses(one_process=True)
def an_array_changed_in_place(s: Study) -> Change:
    with_array(s, "np.zeros((1 << 17,))")
    yield
    s.code = "dataset.data[0]['weights'][70_000] = 1.0"


row(
    MISS,
    "a_tensor_changed_in_place",
    code=("", "dataset.data[0]['weights'][70_000] = 1.0"),
    item='"weights": torch.zeros(1 << 17)',
    one_process=True,
)
# which its version counter does not see
row(
    MISS,
    "a_tensor_changed_through_numpy",
    code=("", "dataset.data[0]['weights'].numpy()[70_000] = 1.0"),
    item='"weights": torch.zeros(1 << 17)',
    one_process=True,
)


@misses(one_process=True)
def an_array_changed_through_another_view(s: Study) -> Change:  # it is read-only, what it shows is not
    s.define("BASE = np.zeros((1 << 17,))\nVIEW = BASE.view()\nVIEW.flags.writeable = False")
    with_array(s, "VIEW")
    yield
    s.code = "import sys; sys.modules['study'].BASE[70_000] = 1.0"


@misses(either=True)
def an_array_mapped_from_a_file(s: Study) -> Change:
    path = s.data / "weights.npy"
    np.save(path, np.zeros(1 << 17))
    with_array(s, f"np.load({str(path)!r}, mmap_mode='r')")
    yield
    raw = bytearray(path.read_bytes())
    raw[-100] = 1
    with path.open("r+b") as f:
        f.write(raw)
    os.utime(path, (TIME, TIME))


row(MISS, "an_item_changed_in_place", code=("", "dataset.data[0]['age'] = 7"), one_process=True)
