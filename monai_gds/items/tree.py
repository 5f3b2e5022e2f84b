"""The item tree: an item taken apart into JSON and tensors, and put together again.

Import the item tree from here. :mod:`.encoding` takes items apart and :mod:`.decoding` puts them together;
:mod:`.table` has a row for each type that both support, and :mod:`.types` the registry of those that users add.
:mod:`.passthrough` holds the values that are taken from the dataset's item.

JSON's own values stand for themselves: None, bools, strings, finite floats, lists, and dicts whose keys are plain
strings. Everything else is an object with one key that begins with ``$``, such as ``{"$tuple": [1, 2]}``. Large data
stay outside the JSON in two places:

* A **tensor** of the item (a torch tensor, a MetaTensor's data, or a numeric array) is a named entry of the record and
  goes to the target device: ``{"$tensor": {"name": "image"}}``. The node of an array also holds its dtype, ``{"name":
  "image", "numpy": "<f4"}``, so that on the CPU it becomes an array over the tensor's memory.
* A **small array** (in the meta and applied operations of a MetaTensor, or of a dtype that torch lacks) keeps its type,
  stays on the CPU, and lies in one packed block of bytes: ``{"$array": ["<f4", [4], 128]}``. The last number is its
  offset.

Two kinds of values are not in the record. Text below the data root is stored without the root, ``{"$root":
"/case_3/ct.nii"}``, and the reader puts it below its own. A value that no record can store, and that passed through
the transforms unchanged, is a path into the dataset's item, from which it is copied: ``{"$item": ["reader"]}``.

Reading a tree never imports or calls what a record names. Types come from :func:`register_type`, from MONAI's enums,
and, for named tuples only, from modules that are already imported.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

from monai_gds.errors import DamagedRecord, RecordError
from monai_gds.items.decoding import Form, Parser, Recipe, TreePlan, tensor_of
from monai_gds.items.encoding import EncodedItem, Encoder, tensor_bytes
from monai_gds.items.passthrough import ItemValues, copy_item
from monai_gds.items.table import FIXED, OTHERS, ROWS
from monai_gds.items.types import register_type

__all__ = [
    "EncodedItem", "ItemValues", "Recipe", "TreePlan", "compile_tree", "copy_item", "encode_item", "register_type",
    "tensor_bytes", "tensor_of",
]  # fmt: skip


def encode_item(
    item: Any, *, strict: bool = True, root: str | None = None, given: ItemValues | None = None
) -> EncodedItem:
    """Takes an item apart.

    Args:
        item: dicts, lists, tuples, sets, named tuples, scalars, strings, bytes, None, dates and times, NumPy scalars,
            dtypes and arrays of numbers or text, torch tensors and dtypes, MetaTensors, paths, MONAI's enums,
            registered types, nested in any way.
        strict: False lets anything else pass as it is, for an item that is put together again in memory and never
            written.
        root: a data root; absolute, without a trailing slash. Text and paths at or below it are stored relative to it,
            also in arrays and as keys. Bytes are not.
        given: see :func:`monai_gds.items.passthrough.copy_item`. A value that cannot be stored otherwise is taken from
            the dataset's item again if it passed through unchanged.

    Raises:
        UnsupportedType: the item holds something else. The message names its key path and type, and the way out.

    Example:
        >>> encode_item({"label": "/data/ct.nii"}, root="/data").tree
        {'label': {'$root': '/ct.nii'}}
    """
    encoder = Encoder(FIXED, OTHERS, strict, root, given)
    encoder.out.tree = encoder.node(item, ())
    return encoder.out


def compile_tree(
    tree: Any,
    arrays: bytes | bytearray,
    names: Container[str],
    *,
    track_meta: bool = True,
    numpy: bool = False,
    root: str | None = None,
) -> Recipe:
    """Compiles a tree.

    Args:
        tree: as :func:`encode_item` returned it.
        arrays: the packed block of small arrays.
        names: the names of the tensors in the record.
        track_meta: False drops the attributes of MetaTensors and returns plain tensors.
        numpy: True returns what was a NumPy array as a writable one over the memory of its tensor, which must be on the
            CPU. False returns that tensor.
        root: the data root for text that was stored relative to one; absolute, without a trailing slash.

    Raises:
        DamagedRecord: the tree is not well-formed, names a tensor that is not there, or needs a root.
        NewerRecord: it holds a kind of node or field that this version does not know.

    Example:
        >>> import numpy as np
        >>> encoded = encode_item({"label": np.arange(3)})
        >>> compile_tree(encoded.tree, encoded.arrays, encoded.tensors, numpy=True)(encoded.tensors)
        {'label': array([0, 1, 2])}
    """
    parser = Parser(ROWS, names, track_meta, numpy, root)
    try:
        return Recipe(_plan(parser.form(tree)), parser.values, bytes(arrays))
    except RecordError:
        raise
    except Exception as e:
        raise DamagedRecord(f"its item tree cannot be read: {e!r}") from e


@functools.lru_cache(maxsize=64)
def _plan(form: Form) -> TreePlan:
    return TreePlan(form, ROWS)
