"""Any iterable as a DALI pipeline: samples or batches of arrays in, torch tensors out, every one in every epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from monai_gds.imagenet.dali.pipeline import FedPipeline, Graph, dali, execution
from monai_gds.imagenet.files.sampling import check_int, policy_named
from monai_gds.storage import resolve_device

#: An iterable of items, or a function that returns a new one for every epoch.
Items: TypeAlias = "Iterable[Any] | Callable[[], Iterable[Any]]"


class DaliIterator:
    """Wraps an iterable as a DALI pipeline.

    Each ``iter()`` is an epoch. It yields dicts by key of torch tensors (batch, …), or of lists of tensors where shapes
    differ. Tensors are on the device where the graph left them.

    Args:
        source: an iterable of dicts or tuples of arrays (NumPy, CuPy, torch on the CPU or a GPU) or numbers. It is
            iterated again every epoch. If it can be iterated only once, give a function that makes it.
        batch_size: samples per batch; with ``already_batched``, the maximum.
        graph: a function from a dict of DALI nodes by key to another one, whose keys are those of the results. None
            brings everything to ``device``.
        keys: names of a tuple's elements, or the keys of a dict to use (default: those of the first item).
        already_batched: items are batches: arrays with a leading batch axis, or lists of arrays.
        device: where DALI works: an int or ``"cuda:N"``, ``"cpu"``, or None for the current CUDA device if there is one
            and the CPU if not.
        num_threads, prefetch_queue_depth, exec_dynamic, threads: DALI's own, see
            :func:`~monai_gds.imagenet.dali.pipeline.execution`.
        last_batch_policy: DALI's ``LastBatchPolicy``, or its name: what becomes of an epoch's last samples if they do
            not fill a batch. ``PARTIAL``, the default, makes a smaller batch, ``FILL`` repeats the last sample, and
            ``DROP`` drops them. Not with ``already_batched``: there the source decides.
        seed: seeds random operators.
        layouts: DALI's layouts by key, such as ``{"image": "CHW"}``, which many operators need.

    Raises:
        BackendUnavailable: DALI is not installed.
        ValueError: an argument is wrong, or there is no such device.

    While iterating: TypeError or ValueError, naming the key, for an item that is not an array of numbers or differs
    from the first in its keys, dtype, number of axes or device; RuntimeError if the source has nothing left for another
    epoch; PipelineFailed for an error in the graph.

    Example:
        >>> import numpy as np
        >>> from nvidia.dali import fn
        >>> def augment(nodes):
        ...     return {"image": fn.resize(nodes["image"], size=(224, 224)), "label": nodes["label"]}
        >>> samples = [{"image": np.zeros((3, 300, 300), np.uint8), "label": i} for i in range(4)]
        >>> loader = dali_iterator(samples, 2, augment, layouts={"image": "CHW"}, device="cpu")
        >>> [tuple(batch["image"].shape) for batch in loader]
        [(2, 3, 224, 224), (2, 3, 224, 224)]
    """

    def __init__(
        self,
        source: Items,
        batch_size: int,
        graph: Graph | None = None,
        *,
        keys: Sequence[str] | None = None,
        already_batched: bool = False,
        device: int | str | torch.device | None = None,
        num_threads: int | None = None,
        prefetch_queue_depth: int | None = None,
        exec_dynamic: bool | None = None,
        last_batch_policy: Any = None,
        seed: int = 0,
        layouts: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        check_int("batch_size", batch_size, 1)
        if already_batched and last_batch_policy is not None:
            raise ValueError("last_batch_policy is for samples: a source of batches has already made its last batch")
        self._last_batch = policy_named(None, last_batch_policy)
        self._execution = execution(num_threads, prefetch_queue_depth, exec_dynamic, threads)
        dali()  # an error now, not at the first batch
        self.device = resolve_device(device)
        self._source = source
        self._batch_size = batch_size
        self._graph = graph
        self._keys = (keys,) if isinstance(keys, str) else tuple(keys) if keys is not None else None
        self._already_batched = already_batched
        self._seed = seed
        self._layouts = layouts or {}
        self._pipe: FedPipeline[Any] | None = None
        self._kinds: dict[str, _ArrayKind] = {}
        self._epochs = 0
        self._running: weakref.ref[Generator[dict[str, Any]]] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begins a new epoch, and ends the one under way if there is one."""
        if self._running is not None and (running := self._running()) is not None:
            running.close()
        run = self._run()
        self._running = weakref.ref(run)
        return run

    def _run(self) -> Generator[dict[str, Any]]:
        # in a chain, what has ended stays so: iterators in DALI's documentation begin again when asked once more
        items: Iterator[Any] = chain(self._source() if callable(self._source) else self._source)
        batches = items
        if not self._already_batched:
            batches = iter(lambda: self._of_samples(list(islice(items, self._batch_size))), [])
        first = list(islice(batches, 1))
        if not first:
            if self._epochs:
                raise RuntimeError(
                    f"the source ({type(self._source).__name__}) has nothing left for another epoch: give a function "
                    "that makes a new one"
                )
            return
        self._epochs += 1
        if self._pipe is None:
            self._pipe = self._build(self._columns(first[0]))
        for _, outputs in self._pipe.run(chain(first, batches), self._arrays):
            yield outputs

    def _of_samples(self, samples: list[Any]) -> list[Any]:
        """A batch of these samples, which at the end of an epoch may be too few."""
        missing = self._batch_size - len(samples)
        if missing and self._last_batch == "drop":
            return []
        return samples + samples[-1:] * missing if self._last_batch == "fill" else samples

    def _columns(self, batch: Any) -> dict[str, Any]:
        """The batch by key: arrays with a batch axis, or lists of arrays."""
        if self._already_batched:
            columns = {
                key: [_array(sample, key) for sample in value] if isinstance(value, list) else _array(value, key)
                for key, value in self._named(batch).items()
            }
            sizes = {k: len(v) if isinstance(v, list) or v.ndim else 0 for k, v in columns.items()}
            if len(set(sizes.values())) != 1 or 0 in sizes.values():
                raise ValueError(f"a batch needs at least one sample, and as many of every key: not {sizes}")
            return columns
        samples = [self._named(sample) for sample in batch]
        if any(sample.keys() != samples[0].keys() for sample in samples):
            raise ValueError(f"samples of one batch have different keys: {[list(s) for s in samples]}")
        return {key: [_array(sample[key], key) for sample in samples] for key in samples[0]}

    def _named(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Mapping):
            missing = set(self._keys or ()) - item.keys()
            if missing:
                raise ValueError(f"an item has no {sorted(missing)}, only {list(item)}")
            return {key: item[key] for key in self._keys or item}
        if not isinstance(item, (tuple, list)):
            raise TypeError(f"items must be dicts or tuples of arrays, not {type(item).__name__}")
        if self._keys is None or len(self._keys) != len(item):
            raise ValueError(f"an item has {len(item)} elements: name them all with keys=(…)")
        return dict(zip(self._keys, item, strict=True))

    def _build(self, columns: Mapping[str, Any]) -> FedPipeline[Any]:
        self._keys = tuple(columns)
        self._kinds = {key: next(_kinds(value)) for key, value in columns.items()}
        inputs = {key: {"device": k.device, "layout": self._layouts.get(key, "")} for key, k in self._kinds.items()}
        to_copy = {key for key, kind in self._kinds.items() if kind.device == "cpu" and self.device.type == "cuda"}

        def bring_to_device(nodes: dict[str, Any]) -> dict[str, Any]:
            return {key: node.gpu() if key in to_copy else node for key, node in nodes.items()}

        return FedPipeline(
            inputs, self._graph or bring_to_device, batch_size=self._batch_size, device=self.device,
            seed=self._seed, execution=self._execution,
        )  # fmt: skip

    def _arrays(self, batch: Any) -> dict[str, Any]:
        columns = self._columns(batch)
        for key, value in columns.items():
            if len(value) > self._batch_size:
                raise ValueError(f"a batch of {len(value)} {key!r} is larger than batch_size={self._batch_size}")
            for kind in _kinds(value):
                if kind != self._kinds[key]:
                    raise ValueError(f"{key!r} was {self._kinds[key]} and is now {kind}")
        return columns


#: The class is used like a function.
dali_iterator = DaliIterator


class _ArrayKind(NamedTuple):
    """The properties that all samples of a key share."""

    device: str
    dtype: Any
    axes: int

    def __str__(self) -> str:
        return f"{self.dtype} with {self.axes} axes on the {self.device}"


def _kinds(column: Any) -> Iterator[_ArrayKind]:
    """The kind of each sample of a list, or of all samples of an array with a batch axis."""
    samples = [(a, a.ndim) for a in column] if isinstance(column, list) else [(column, column.ndim - 1)]
    for array, axes in samples:
        yield _ArrayKind("gpu" if hasattr(array, "__cuda_array_interface__") else "cpu", array.dtype, axes)


def _array(value: Any, key: str) -> Any:
    """An array as DALI takes it: contiguous, and in native byte order, which DALI silently assumes."""
    if hasattr(value, "__cuda_array_interface__") and not isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous()
            if value.is_cuda:
                return value
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as e:  # bfloat16, a sparse tensor, lists of several lengths
        raise TypeError(f"{key!r} holds {type(value).__name__}, not an array that NumPy takes: {e}") from e
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:  # long double
        what = f"{type(value).__name__} of {array.dtype}" if hasattr(value, "dtype") else type(value).__name__
        raise TypeError(f"{key!r} holds {what}, not an array of numbers that DALI takes: leave it out with keys=…")
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
