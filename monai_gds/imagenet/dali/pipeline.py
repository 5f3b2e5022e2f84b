"""Runs DALI pipelines that are fed batch by batch: epochs of any length, early ends, recovery from failures.

ImageNetDataset and :func:`monai_gds.imagenet.dali_iterator` both run :class:`FedPipeline`.
"""

from __future__ import annotations

import math
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from monai_gds import limits
from monai_gds.base import cores
from monai_gds.errors import BackendUnavailable, MonaiGdsError
from monai_gds.imagenet.files.sampling import check_int

T = TypeVar("T")

#: Named data nodes in, named data nodes out.
Graph: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]


def dali() -> Any:
    """The package ``nvidia.dali``. Raises BackendUnavailable where it cannot be imported."""
    try:
        import nvidia.dali
        import nvidia.dali.fn
        import nvidia.dali.tensors
        import nvidia.dali.types
    except ImportError as e:
        extra = "dali-cuda13" if (torch.version.cuda or "").startswith("13") else "dali-cuda12"
        raise BackendUnavailable(f"NVIDIA DALI cannot be imported ({e}): pip install 'monai_gds[{extra}]'") from e
    return nvidia.dali


class PipelineFailed(MonaiGdsError, RuntimeError):
    """DALI ended a pipeline with an error.

    Attributes:
        feeds: batches that were fed and had not come out, oldest first. DALI does not report which one failed.
    """

    def __init__(self, error: Exception, feeds: Sequence[Any]) -> None:
        super().__init__(str(error))
        self.feeds = feeds


def execution(
    num_threads: int | None = None,
    prefetch_queue_depth: int | None = None,
    exec_dynamic: bool | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Checks the arguments of DALI's pipelines that control how they run, and fills in defaults.

    Args:
        num_threads: CPU threads. Default: one per core, at most 8.
        prefetch_queue_depth: batches that DALI works on ahead of the consumer. Default: 2, as in DALI.
        exec_dynamic: DALI's dynamic executor, or the older one, whose outputs are copied. Default: DALI's own.
        threads: another name for ``num_threads``.

    Raises:
        ValueError: a number is not an int, or not positive; or both ``num_threads`` and ``threads`` are given.
    """
    if threads is not None and num_threads is not None:
        raise ValueError("threads is another name for num_threads: give one of them")
    num_threads = threads if num_threads is None else num_threads
    chosen = {"num_threads": min(8, cores.usable()), "prefetch_queue_depth": limits.DALI_PREFETCH_BATCHES}
    for name, value in (("num_threads", num_threads), ("prefetch_queue_depth", prefetch_queue_depth)):
        if value is not None:
            check_int(name, value, 1)
            chosen[name] = int(value)
    return chosen if exec_dynamic is None else {**chosen, "exec_dynamic": exec_dynamic}


class FedPipeline(Generic[T]):
    """A DALI pipeline with named inputs and outputs, and at most ``batch_size`` samples per batch.

    ``inputs`` holds arguments of ``fn.external_source`` by name: ``device``, where the fed arrays are (default: the
    CPU), ``layout``, and ``no_copy``, if DALI reads the fed arrays in place until the outputs are there. ``execution``
    holds DALI's own arguments, as returned by :func:`execution`.
    """

    def __init__(
        self, inputs: Mapping[str, Mapping[str, Any]], graph: Graph, *, batch_size: int, device: torch.device,
        seed: int = 0, execution: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._inputs = inputs
        self._graph = graph
        device_id = device.index if device.type == "cuda" else None
        self._arguments = {"batch_size": batch_size, "device_id": device_id, "seed": seed, **execution}
        self._pipe: Any = None
        self._outputs: list[str] = []

    def run(
        self, feeds: Iterable[T], arrays: Callable[[T], Mapping[str, Any]]
    ) -> Iterator[tuple[T, dict[str, torch.Tensor | list[torch.Tensor]]]]:
        """Feeds batch after batch and yields the outputs. Closing the iterator leaves the pipeline ready to run again.

        Args:
            feeds: one description per batch.
            arrays: returns a batch's arrays by input: a list of arrays, one with a leading batch axis, or what
                :func:`tensor_list` returns.

        Yields:
            The description, and the outputs by name as from :func:`to_torch`. All work on the batch is done, so memory
            that was fed without a copy is free again.

        Raises:
            PipelineFailed: DALI failed, or refused the graph. Its cause is DALI's error, often a RuntimeError, but also
                a ValueError for a layout or a KeyError for an argument. The next run builds a new pipeline.
            Exception: an error of ``feeds`` or ``arrays``, after everything fed before has come out. If DALI refuses
                a batch's arrays, PipelineFailed is raised at that time too.
        """
        pipe = self._built()
        under_way: deque[T] = deque()
        pipe.feeder = _Feeder(iter(feeds), arrays, under_way)
        try:
            pipe.schedule_run()
            while not pipe.empty():
                outputs = pipe.share_outputs()
                feed = under_way.popleft()
                if pipe.exec_dynamic:
                    pipe.schedule_run()  # before anything else: with one batch less under way DALI may run dry
                result = {name: to_torch(out) for name, out in zip(self._outputs, outputs, strict=True)}
                del outputs
                if pipe.exec_dynamic:
                    pipe.release_outputs()
                else:  # the older executor writes to the outputs' memory again once they are released
                    result = {name: _copied(out) for name, out in result.items()}
                    pipe.release_outputs()
                    pipe.schedule_run()
                yield feed, result
            if pipe.feeder.error is not None:
                raise pipe.feeder.error
        except Exception as e:
            if e is pipe.feeder.error and not pipe.feeder.refused:
                raise
            # DALI's threads may still read the fed arrays: end them before the caller can free those.
            self._pipe = None
            traceback.clear_frames(e.__traceback__)
            del pipe
            if not isinstance(e, RuntimeError) and not _by_dali(e):
                raise
            raise PipelineFailed(e, list(under_way)) from e
        finally:
            if self._pipe is not None:
                self._drain(self._pipe)

    def _drain(self, pipe: Any) -> None:
        """Takes out the batches that are under way, so that the next run begins with an empty pipeline."""
        pipe.feeder.feeds = iter(())
        try:
            while not pipe.empty():
                pipe.share_outputs()
                pipe.release_outputs()
            pipe.schedule_run()  # notices that the feeder has ended, without which reset() does nothing
            pipe.reset()
        except (RuntimeError, AttributeError):  # AttributeError after DALI's own shutdown at exit
            self._pipe = None
        pipe.feeder = None

    def discard(self) -> None:
        """Frees the pipeline; the next run builds a new one."""
        self._pipe = None

    def _built(self) -> Any:
        if self._pipe is None:
            try:
                self._pipe = self._build()
            except Exception as e:
                if not _by_dali(e):  # it may come from the user's function
                    raise
                raise PipelineFailed(e, []) from e
        return self._pipe

    def _build(self) -> Any:
        fn = dali().fn
        pipe = _pipeline_class()(**self._arguments)
        with pipe:
            nodes = {name: fn.external_source(name=name, **how) for name, how in self._inputs.items()}
            outputs = self._graph(nodes)
            self._outputs = list(outputs)
            pipe.set_outputs(*outputs.values())
        pipe.build()
        pipe.dropped = {name for name in self._inputs if not _has_input(pipe, name)}
        return pipe


class _Feeder(Generic[T]):
    """Feeds a pipeline from an iterator. Errors are kept until everything fed before has come out."""

    def __init__(self, feeds: Iterator[T], arrays: Callable[[T], Mapping[str, Any]], under_way: deque[T]) -> None:
        self.feeds = feeds
        self._arrays = arrays
        self._under_way = under_way
        self.error: Exception | None = None
        self.refused = False  # whether DALI raised the error and may have taken some of the inputs

    def feed(self, pipe: Any) -> None:
        try:
            feed = next(self.feeds)
            arrays = self._arrays(feed)
            self._under_way.append(feed)
            self.refused = True
            for name, data in arrays.items():
                if name not in pipe.dropped:
                    pipe.feed_input(name, data)
            self.refused = False
        except StopIteration:
            raise
        except Exception as e:
            self.error = e
            raise StopIteration from e


def tensor_list(arrays: Iterable[np.ndarray]) -> Any:
    """Arrays of several sizes as DALI's own type, without a copy. Of a list, DALI checks each array in Python."""
    tensors = dali().tensors
    return tensors.TensorListCPU([tensors.TensorCPU(array, "") for array in arrays], "", contiguous=False)


def _has_input(pipe: Any, name: str) -> bool:
    """Whether a pipeline takes an input. DALI drops what the graph does not use, and refuses to be fed for it."""
    try:
        pipe.input_feed_count(name)
    except (KeyError, RuntimeError):  # RuntimeError: of the older executor
        return False
    return True


def _by_dali(error: Exception) -> bool:
    """Whether an error was raised within DALI."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("nvidia.dali") for frame in frames)


def _pipeline_class() -> Any:
    """``nvidia.dali.Pipeline`` with a feeder that is called before each iteration by DALI's hook ``iter_setup``."""

    class Pipeline(dali().Pipeline):  # type: ignore[misc]
        feeder: Any = None
        dropped: Collection[str] = ()

        def iter_setup(self) -> None:
            self.feeder.feed(self)

    return Pipeline


def _copied(output: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Copies an output of a pipeline. The copy is complete on return, also on a GPU."""
    copy = output.clone() if isinstance(output, torch.Tensor) else [tensor.clone() for tensor in output]
    if output[0].is_cuda:
        torch.cuda.current_stream(output[0].device).synchronize()
    return copy


def to_torch(outputs: Any) -> torch.Tensor | list[torch.Tensor]:
    """A DALI TensorList as torch tensors that share its memory and keep it alive.

    It is one tensor with a leading batch axis where all samples have the same shape.
    """
    if outputs.is_dense_tensor():
        return from_dlpack(outputs.as_tensor())
    shapes = outputs.shape()
    sizes = [math.prod(shape) for shape in shapes]
    try:
        flat = from_dlpack(outputs.as_reshaped_tensor([sum(sizes)]))  # one hand-over instead of 64, at 10 us each
    except RuntimeError:  # the samples are not contiguous
        return [from_dlpack(sample) for sample in outputs]
    starts = accumulate(sizes, initial=0)
    return [flat.narrow(0, start, n).view(shape) for start, n, shape in zip(starts, sizes, shapes, strict=False)]
