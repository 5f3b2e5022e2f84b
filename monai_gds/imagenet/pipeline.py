"""Running a DALI pipeline that is fed batch by batch: epochs of any length, early ends, failures that can be survived.

:class:`FedPipeline` is what ImageNetDataset and :func:`monai_gds.imagenet.dali_iterator` share. DALI itself is imported
only when a pipeline is built.
"""

from __future__ import annotations

import math
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from monai_gds.errors import BackendUnavailable, MonaiGdsError

__all__ = ["FedPipeline", "Input", "PipelineFailed", "dali", "to_torch"]

T = TypeVar("T")

#: Named data nodes in, named data nodes out.
Graph: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]

#: Batches that DALI works on ahead of the consumer: its own default.
PREFETCH = 2


def dali() -> Any:
    """The package ``nvidia.dali``.

    Raises:
        BackendUnavailable: it is not installed, or does not fit this machine.
    """
    try:
        import nvidia.dali
        import nvidia.dali.fn
        import nvidia.dali.types
    except ImportError as e:
        extra = "dali-cuda13" if (torch.version.cuda or "").startswith("13") else "dali-cuda12"
        raise BackendUnavailable(f"NVIDIA DALI cannot be imported ({e}): pip install 'monai_gds[{extra}]'") from e
    return nvidia.dali


class PipelineFailed(MonaiGdsError, RuntimeError):
    """DALI ended a pipeline with an error.

    Attributes:
        feeds: what had been fed and not come out, the oldest first; DALI does not say which one failed.
    """

    def __init__(self, error: Exception, feeds: Sequence[Any]) -> None:
        super().__init__(str(error))
        self.feeds = feeds


@dataclass(frozen=True)
class Input:
    """One input of a pipeline.

    Attributes:
        device: ``"cpu"`` or ``"gpu"``, where the arrays that are fed lie.
        no_copy: DALI reads the fed arrays where they are, until the outputs are there.
        options: further arguments of ``fn.external_source`` (layout, dtype, ndim).
    """

    device: str = "cpu"
    no_copy: bool = False
    options: Mapping[str, Any] | None = None


class FedPipeline(Generic[T]):
    """A DALI pipeline with named inputs and outputs.

    Args:
        inputs: by name; none for a graph that has its own reader.
        graph: what is done with them.
        batch_size: the most samples that a batch has.
        device: a CUDA device, or the CPU for a pipeline without a GPU.
        threads: DALI's CPU threads.
        seed: of random operators.
    """

    def __init__(
        self,
        inputs: Mapping[str, Input],
        graph: Graph,
        *,
        batch_size: int,
        device: torch.device,
        threads: int,
        seed: int = 0,
    ) -> None:
        self._inputs = inputs
        self._graph = graph
        self._arguments = {
            "batch_size": batch_size,
            "num_threads": threads,
            "device_id": device.index if device.type == "cuda" else None,
            "seed": seed,
            "prefetch_queue_depth": PREFETCH,
        }
        self._pipe: Any = None
        self._outputs: list[str] = []

    def run(
        self, feeds: Iterable[T], arrays: Callable[[T], Mapping[str, Any]]
    ) -> Iterator[tuple[T, dict[str, torch.Tensor | list[torch.Tensor]]]]:
        """Feeds batch after batch and gives what comes out. Closing the iterator leaves the pipeline ready for another.

        Args:
            feeds: what describes a batch.
            arrays: gives a batch's arrays by input: a list of arrays, or one with a leading batch axis.

        Yields:
            The description, and the outputs by name as :func:`to_torch` gives them. All work on the batch is done, so
            memory that was fed without a copy is free again.

        Raises:
            PipelineFailed: DALI gave up, or refused the graph; the next run builds a new pipeline. Its cause is what
                DALI raised: often a RuntimeError, but also a ValueError for a layout, a KeyError for an argument…
            Exception: whatever ``feeds`` or ``arrays`` raised. It comes once everything fed before has come out, and so
                does PipelineFailed where DALI refused a batch's arrays.
        """
        pipe = self._built()
        under_way: deque[T] = deque()
        pipe.source = _Source(iter(feeds), arrays, under_way)
        try:
            pipe.schedule_run()
            while not pipe.empty():
                outputs = pipe.share_outputs()
                feed = under_way.popleft()
                pipe.schedule_run()  # first of all: with a batch less under way DALI may run dry
                result = {name: to_torch(out) for name, out in zip(self._outputs, outputs, strict=True)}
                del outputs
                pipe.release_outputs()
                yield feed, result
            if pipe.source.error is not None:
                raise pipe.source.error
        except Exception as e:
            if e is pipe.source.error and not pipe.source.refused:
                raise
            # DALI's threads may still read what was fed: end them before the caller can let go of it.
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
        """Takes out what is under way, so that the next run begins with an empty pipeline."""
        pipe.source.stop()
        try:
            while not pipe.empty():
                pipe.share_outputs()
                pipe.release_outputs()
            pipe.schedule_run()  # notices that the source has ended, without which reset() does nothing
            pipe.reset()
        except (RuntimeError, AttributeError):  # the latter when DALI has shut it down, as it does at exit
            self._pipe = None
        pipe.source = None

    def discard(self) -> None:
        """Frees the pipeline; the next run builds a new one."""
        self._pipe = None

    def epoch_size(self, reader: str) -> int:
        """How many samples there are in a reader of the graph's own, by its name."""
        return int(self._built().reader_meta(reader)["epoch_size"])

    def _built(self) -> Any:
        if self._pipe is None:
            try:
                self._pipe = self._build()
            except Exception as e:
                if not _by_dali(e):  # the user's function may have errors of its own
                    raise
                raise PipelineFailed(e, []) from e
        return self._pipe

    def _build(self) -> Any:
        fn = dali().fn
        pipe = _pipeline_class()(**self._arguments)
        with pipe:
            nodes = {name: fn.external_source(name=name, device=i.device, no_copy=i.no_copy, **(i.options or {}))
                     for name, i in self._inputs.items()}  # fmt: skip
            outputs = self._graph(nodes)
            self._outputs = list(outputs)
            pipe.set_outputs(*outputs.values())
        pipe.build()
        return pipe


class _Source(Generic[T]):
    """Feeds a pipeline from an iterator. An error waits until what was fed before it has come out."""

    def __init__(self, feeds: Iterator[T], arrays: Callable[[T], Mapping[str, Any]], under_way: deque[T]) -> None:
        self._feeds = feeds
        self._arrays = arrays
        self._under_way = under_way
        self.error: Exception | None = None
        self.refused = False  # whether the error is DALI's, which may have taken some of the batch's inputs

    def feed(self, pipe: Any) -> None:
        try:
            feed = next(self._feeds)
            arrays = self._arrays(feed)
            self._under_way.append(feed)
            self.refused = True
            for name, data in arrays.items():
                pipe.feed_input(name, data)
            self.refused = False
        except StopIteration:
            raise
        except Exception as e:
            self.error = e
            raise StopIteration from e

    def stop(self) -> None:
        self._feeds = iter(())


def _by_dali(error: Exception) -> bool:
    """Whether an error was raised within DALI."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("nvidia.dali") for frame in frames)


def _pipeline_class() -> Any:
    """``nvidia.dali.Pipeline`` with a source to ask before each iteration (``iter_setup`` is DALI's hook for that)."""

    class Pipeline(dali().Pipeline):  # type: ignore[misc]
        source: Any = None

        def iter_setup(self) -> None:
            self.source.feed(self)

    return Pipeline


def to_torch(outputs: Any, *, dense: bool = True) -> torch.Tensor | list[torch.Tensor]:
    """A DALI TensorList as torch tensors that share its memory and keep it alive.

    Args:
        outputs: of a pipeline.
        dense: give one tensor with a leading batch axis where all samples have one shape; otherwise always a list.
    """
    if dense and outputs.is_dense_tensor():
        return from_dlpack(outputs.as_tensor())
    shapes = outputs.shape()
    sizes = [math.prod(shape) for shape in shapes]
    try:
        flat = from_dlpack(outputs.as_reshaped_tensor([sum(sizes)]))  # a hand-over takes 10 us and more: one, not 64
    except RuntimeError:  # the samples lie in places of their own
        return [from_dlpack(sample) for sample in outputs]
    starts = accumulate(sizes, initial=0)
    return [flat.narrow(0, start, n).view(shape) for start, n, shape in zip(starts, sizes, shapes, strict=False)]
