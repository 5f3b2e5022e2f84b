"""Changes of columns that no transform touches, and of such that one does; see ``rows.py``."""

from __future__ import annotations

from tests.changes.rows import HIT, MISS, Change, Table
from tests.studies import Study

TABLE = Table()
hits, misses, row = TABLE.hits, TABLE.misses, TABLE.row
test_change = TABLE.test


def monais_only(s: Study) -> None:
    """Has the study count its runs in the reader, so that its transforms are MONAI's own."""
    s.edit("            Log(),\n", "")
    s.edit('reader="NibabelReader"', "reader=LogReader")
    s.edit("import Log", "import Log, LogReader")


def column(
    name: str, before: str, after: str, *transforms: str, miss: bool, other_item: bool = True, long: bool = True
) -> None:
    """Registers a row in which a column of every item has another value."""

    def change(s: Study) -> Change:
        monais_only(s)
        for transform in transforms:
            s.add(transform)
        s.item(before)
        yield
        s.edit(before, after)

    change.__name__ = name
    (misses if miss else hits)(other_item=other_item, long=long)(change)


#: One value and another of its type.
VALUES = {"number": ("1", "2"), "text": ('"a"', '"b"'), "float": ("0.5", "0.25"), "bool": ("True", "False"),
          "bytes": ('b"a"', 'b"b"'), "path": ('"/data/ct_7.nii"', '"/data/ct_8.nii"')}  # fmt: skip

for kind, (one, other) in VALUES.items():
    column(f"{kind}_that_nothing_reads", f'"fold": {one}', f'"fold": {other}', miss=HIT, long=kind != "number")
    column(f"{kind}_that_a_transform_names", f'"fold": {one}', f'"fold": {other}', 'mt.Identityd("fold")', miss=MISS)

TRANSFORMS = {
    "copies": 'mt.CopyItemsd("fold", names="other")',
    "stacks": 'mt.ConcatItemsd(["image", "image"], name="both")',
    "a_lambda_of_another": 'mt.Lambdad("image", lambda image: image + 1)',
    "selects": 'mt.SelectItemsd(["image", "fold"])',
    "deletes": 'mt.DeleteItemsd("fold")',
}
for what, transform in TRANSFORMS.items():
    names_it, gone = "fold" in transform, "Delete" in transform
    column(what, '"fold": 1', '"fold": 2', transform, miss=names_it, other_item=not gone)

column("a_type", '"fold": 1', '"fold": "1"', miss=MISS)
column("with_a_transform_of_the_user", '"fold": 1', '"fold": 2', "Log()", miss=MISS)
column("with_a_subclass_of_the_user", '"fold": 1', '"fold": 2',
       'type("Own", (mt.Identityd,), {})("image")', miss=MISS)  # fmt: skip


@hits(other_item=True)
def a_column_that_a_hash_func_leaves_out(s: Study) -> Change:
    monais_only(s)
    s.item('"fold": 1')
    s.settings = {"hash_func": by_image}
    yield
    s.edit('"fold": 1', '"fold": 2')


@hits(one_process=True, other_item=True)
def a_column_in_place(s: Study) -> Change:
    monais_only(s)
    s.item('"fold": 1')
    yield
    s.code = 'dataset.data[0]["fold"] = 2'


def by_image(item: object) -> bytes:
    """A user's hash of an item."""
    return str(item["image"]).encode()  # type: ignore[index]
