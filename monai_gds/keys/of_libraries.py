"""What the hasher must know about the classes of libraries, by name: nothing here imports them at its start.

MONAI's version is an ingredient of the key by itself, so its code counts by name only.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

#: Libraries that count by name only.
UNVERSIONED = frozenset({"monai", "monai_gds"})

#: Attributes that do not count, by class: random state, and what objects remember of calls and of the process.
TRANSIENT = {
    "monai.data.image_reader.ImageReader": frozenset({"filenames", "has_series"}),
    "monai.transforms.inverse.TraceableTransform": frozenset({"_tracing"}),
    "monai.transforms.transform.Randomizable": frozenset({"R"}),
    "monai.transforms.transform.RandomizableTransform": frozenset({"R", "_do_transform"}),
    "numpy.vectorize": frozenset({"_ufunc"}),
    "omegaconf.base.Node": frozenset({"_flags_cache"}),
    "pydantic._internal._decorators.Decorator": frozenset({"cls_ref"}),  # an address in memory
    "torch._dynamo.convert_frame.ConvertFrameBox": frozenset({"error_on_graph_break"}),
    "torch._dynamo.eval_frame.OptimizedModule": frozenset({"_torchdynamo_wrapper_id"}),  # another
    "torch.nn.modules.rnn.RNNBase": frozenset({"_flat_weight_refs"}),
    "torch.utils.hooks.RemovableHandle": frozenset({"hooks_dict_ref", "extra_dict_ref", "id"}),
}

#: Classes whose objects count by their type: what they hold is the state of a process, which gives no values.
BY_TYPE = frozenset(
    ("_thread.lock", "_thread.RLock", "concurrent.futures._base.Executor", "logging.Handler",
     "multiprocessing.pool.Pool", "multiprocessing.synchronize.SemLock")
)  # fmt: skip

#: What counts of wrappers beside the function that they wrap, by class.
OPTIONS: dict[str, Callable[[Any], Any]] = {
    "functools._lru_cache_wrapper": lambda wrapper: wrapper.cache_parameters()["typed"],
    "joblib.memory.MemorizedFunc": attrgetter("ignore"),
    "numba.core.dispatcher.Dispatcher": attrgetter("targetoptions"),
}


def writes_files(cls: type) -> bool:
    """Whether a class writes the files that its attributes name, so that they are not its inputs."""
    return cls.__module__.startswith("monai.") and cls.__name__.startswith(("Save", "Write"))


def _requested_readers(loader: Any) -> list[Any]:
    """The readers of a ``LoadImage`` that decide what it reads.

    Without ``reader=``, the file's suffix selects among all that are installed, and all count. With ``reader=``, MONAI
    still registers its default readers in front of the requested ones, and which those are depends on the libraries
    that are installed.
    """
    readers = list(loader.readers)
    if loader.auto_select:
        return readers
    from monai.transforms.io.array import SUPPORTED_READERS, get_default_reader_registration_order

    default = iter([SUPPORTED_READERS[name] for name in get_default_reader_registration_order()])
    skipped = 0
    for reader in readers:
        if not any(type(reader) is cls for cls in default):  # `default` continues after the match
            break
        skipped += 1
    return readers[skipped:] or readers


#: Attributes that count by a function of the object, by class and name.
COMPUTED: dict[str, dict[str, Callable[[Any], Any]]] = {
    # kept in _tracing, which is created on first use
    "monai.transforms.inverse.TraceableTransform": {"tracing": attrgetter("tracing")},
    "monai.transforms.io.array.LoadImage": {"readers": _requested_readers},
}
