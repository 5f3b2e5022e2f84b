"""The item tree: an item taken apart into JSON and tensors, and put together again.

Import the item tree from here. :mod:`.encoding` takes items apart and :mod:`.decoding` puts them together;
:mod:`.codecs` holds the types that both support, :mod:`.passthrough` the values taken from the dataset's item, and
:mod:`.data_root` the text below a data root.

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

from monai_gds.items.decoding import Recipe, TreePlan, compile_tree, tensor_of
from monai_gds.items.encoding import EncodedItem, encode_item, tensor_bytes
from monai_gds.items.passthrough import ItemValues, copy_item
from monai_gds.items.types import register_type

__all__ = [
    "EncodedItem",
    "ItemValues",
    "Recipe",
    "TreePlan",
    "compile_tree",
    "copy_item",
    "encode_item",
    "register_type",
    "tensor_bytes",
    "tensor_of",
]
