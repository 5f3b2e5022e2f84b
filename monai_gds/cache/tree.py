"""The item tree: an item taken apart into JSON and tensors, and put together again. Used by the record only.

This is the face of it: :mod:`.encoding` takes apart, :mod:`.decoding` puts together, :mod:`.codecs` has the types that
both know, :mod:`.given` the values that come from the dataset's item, :mod:`.rooted` the text below a data root.

What JSON has is itself: None, bools, strings, finite floats, lists, and dicts whose keys are plain strings. Everything
else is an object with one key that begins with ``$``, for example ``{"$tuple": [1, 2]}``. Large data stay outside the
JSON in two places:

* a **tensor** of the item (a torch tensor, a MetaTensor's data, or a numeric array) is a named entry of the record and
  goes to the target device: ``{"$tensor": {"name": "image"}}``. Of an array the node holds its dtype too, ``{"name":
  "image", "numpy": "<f4"}``: a reader on the CPU makes an array over the tensor's memory, another leaves the tensor;
* a **small array** (what MetaTensor's meta and applied operations hold, and arrays that torch cannot) keeps its type,
  stays on the CPU and lies in one packed block of bytes: ``{"$array": ["<f4", [4], 128]}``, the last number its offset.

Two kinds of values are not in the record. Text below the data root is stored without the root, ``{"$root":
"/case_3/ct.nii"}``, and put below the reader's own. What no record can store, and passed through the transforms
unchanged, is a place in the dataset's item, from where it is copied: ``{"$item": ["reader"]}``.

Reading a tree never imports or calls what a record names: types come from the fixed tables of :mod:`.codecs`, from
MONAI's enums, from :func:`register_type`, and, for named tuples only, from modules that are imported already.
"""

from monai_gds.cache.codecs import register_type
from monai_gds.cache.decoding import Plan, Recipe, compile_tree, tensor_of
from monai_gds.cache.encoding import EncodedItem, encode_item, tensor_bytes
from monai_gds.cache.given import Given, given_copy

__all__ = [
    "EncodedItem",
    "Given",
    "Plan",
    "Recipe",
    "compile_tree",
    "encode_item",
    "given_copy",
    "register_type",
    "tensor_bytes",
    "tensor_of",
]
