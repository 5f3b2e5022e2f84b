"""Work for processes that are not forked, as bytes, and whether it is the work that they have. For :mod:`.crew`."""

from __future__ import annotations

import hashlib
import pickle
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import Any

from monai_gds.loader.crew.worker import Work
from monai_gds.pipeline.randomness import is_generator


def pickled_work(work: Work) -> bytes:
    """The work, pickled; by cloudpickle where it is installed and pickle cannot.

    Raises:
        ValueError: something in it cannot be sent to another process. The message names it.
    """
    try:
        return _dumps(work)
    except Exception as e:
        raise ValueError(
            f"{_culprit(work)} cannot be sent to another process: {e}. Pickle finds classes and functions at the top "
            "of a module, and no others: define it there, or install cloudpickle"
        ) from e


def _dumps(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:
        if not find_spec("cloudpickle"):
            raise
    found: bytes = import_module("cloudpickle").dumps(value)
    return found


def _culprit(work: Work) -> str:
    """The part of the work that cannot be pickled."""
    named = [
        (f"transform {i}, {type(transform).__name__},", transform)
        for part in work.parts for i, transform in enumerate(part.dataset.transform.flatten().transforms)
    ]  # fmt: skip
    named += [("collate_fn", work.collate), *(("the dataset's data", part.dataset.data) for part in work.parts)]
    for name, value in named:
        try:
            _dumps(value)
        except Exception:
            return name
    return "the dataset"


def mark_of(work: Work) -> bytes | None:
    """A digest that differs if the work does, but for the states of generators; None if there is none."""
    digest = _Digest()
    try:
        _Marker(digest).dump(work)
    except Exception:
        return None
    return digest.of.digest()


class _Digest:
    """A file of which only the digest is kept: data in memory may be large."""

    def __init__(self) -> None:
        self.of = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.of.update(data)
        return len(data)


class _Marker(pickle.Pickler):
    """Leaves out random states, which are seeded for every item, and takes functions that cannot be pickled apart."""

    def reducer_override(self, value: Any) -> Any:
        if is_generator(value):
            return str, (type(value).__name__,)
        if isinstance(value, FunctionType) and "<" in value.__qualname__:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return tuple, ((value.__code__, value.__defaults__, cells),)
        if isinstance(value, CodeType):
            return tuple, ((value.co_code, value.co_consts, value.co_names),)
        return NotImplemented
