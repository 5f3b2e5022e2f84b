"""ImageNetDataset: image folders through any storage backend, decoded by DALI, as torch tensors."""

from __future__ import annotations

import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from monai_gds.errors import BrokenImage, ImageListError
from monai_gds.imagenet.closing import close_when_dropped
from monai_gds.imagenet.decoding import Decoding, broken_images, reason
from monai_gds.imagenet.listing import StrPath
from monai_gds.imagenet.pipeline import FedPipeline, Input, PipelineFailed, dali
from monai_gds.imagenet.readers import Batch, Reader
from monai_gds.imagenet.sampling import LastBatch
from monai_gds.imagenet.source import (
    arrays_of,
    check_reader,
    list_of,
    make_sampler,
    open_images,
    open_reader,
)  # fmt: skip
from monai_gds.storage import resolve_device

__all__ = ["ImageNetDataset"]


class ImageNetDataset(IterableDataset[dict[str, Any]]):
    """Batches of images with labels, read by a storage backend and decoded by NVIDIA DALI.

    Iterating gives ``{"image": …, "label": …}``: images uint8 (batch, height, width, 3) RGB, or a list of (height,
    width, 3) where sizes differ; labels int64 (batch,); both on ``device``. Each ``iter()`` is a new epoch, also after
    a loop was left early; only one runs at a time. It is its own loader: pass it where a DataLoader is expected, or
    give it to one with ``batch_size=None`` and no workers.

    Args:
        root: ``<root>/<class>/<file>``, a folder written by ``monai-gds pack``, or a block map of such a folder.
        batch_size: images a batch.
        reader: how encoded images are read: ``auto``, ``posix``, ``kvikio``, ``deepnvme``, ``deepnvme-gds``,
            ``xnvme-file``, ``xnvme-block`` (or ``xnvme-gds``), ``packed``; ``python-file`` is plain Python, ``dali``
            DALI's own ``fn.readers.file``, which maps files: cutting one that it has mapped ends the process.
        device: where the batches go: an int or ``"cuda:N"``, ``"cpu"``, or None for the current CUDA device if there is
            one and the CPU if not.
        decode: decode with DALI, on the GPU if ``device`` is one. False gives the encoded bytes as a list of 1-D uint8
            tensors on ``device``; without ``graph`` DALI has nothing to do then and is left out (it need not be
            installed). Tensors of one batch are slices of one buffer (packed: of one file's images), which one of them
            keeps alive.
        shuffle: a new order every epoch. A packed folder is shuffled within windows of ``window`` of its files.
        seed: of the order and of random transforms, which are other ones on every shard.
        shard_id, num_shards: this process's share of each epoch; default: rank and world size of torch.distributed
            where it is initialised, else everything.
        last_batch: ``"partial"``, ``"fill"`` or ``"drop"``, see :class:`~monai_gds.imagenet.sampling.Sampler`.
        crop: (height, width) of a random resized crop, or None. flip: mirror every other image. normalize: float32 CHW,
            with ImageNet's mean and deviation or ``(mean, std)``. See :class:`~monai_gds.imagenet.decoding.Decoding`.
        graph: a function of the DALI nodes ``(jpegs, labels)``, or ``(images, labels)`` with ``decode``, that gives the
            nodes ``(image, label)``; in place of crop, flip and normalize.
        decoder: arguments for ``fn.decoders.image``, such as ``device_memory_padding`` and ``host_memory_padding``.
        skip_broken: replace an image that cannot be decoded by another, of its batch if it has one, with that one's
            label, and note it in ``broken``, instead of raising BrokenImage. Not with reader ``dali``.
        threads: DALI's CPU threads; default: one a core, 8 at most.
        window: files, see ``shuffle``. They and as many read ahead are held in memory.
        storage_options: for the storage backend.

    Attributes:
        images: the :class:`~monai_gds.imagenet.listing.ImageList`: classes, names, labels, sizes.
        broken: path of each image skipped so far, with the reason.
        copied_back: bytes that a GPU reader's batches took back to the host because decoders want them there.

    Raises:
        BackendUnavailable: the reader's backend, or DALI, does not work here; the message says why and what to do.
        ImageListError: no class, no image, a link to nothing, a packed folder with a missing file.
        ValueError: an argument makes no sense, or ``last_batch="drop"`` leaves no batch.

    While iterating: BrokenImage names an image that is empty or cannot be decoded (reader ``dali`` only with
    ``shuffle=False``), OSError a file that is gone; the dataset can be iterated again.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.imagenet.synthetic import write_image_folder
        >>> folder = write_image_folder(Path("images"), 3)  # made up, in ImageNet's layout
        >>> train = ImageNetDataset(folder, 2, device="cpu", crop=(224, 224), flip=True, normalize=True)
        >>> for batch in train:
        ...     print(tuple(batch["image"].shape), batch["label"].tolist())
        (2, 3, 224, 224) [0, 0]
        (1, 3, 224, 224) [0]
    """

    def __init__(
        self,
        root: StrPath,
        batch_size: int,
        reader: str = "auto",
        device: int | str | torch.device | None = None,
        decode: bool = True,
        *,
        shuffle: bool = False,
        seed: int = 0,
        shard_id: int | None = None,
        num_shards: int | None = None,
        last_batch: LastBatch = "partial",
        crop: tuple[int, int] | None = None,
        flip: bool = False,
        normalize: bool | tuple[Sequence[float], Sequence[float]] = False,
        graph: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        decoder: Mapping[str, Any] | None = None,
        skip_broken: bool = False,
        threads: int | None = None,
        window: int = 8,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = resolve_device(device)
        self._decode = decode
        self._decoding = Decoding(crop, flip, normalize, decoder or {})
        self._graph = graph
        self._skip_broken = skip_broken
        self._check(reader)
        packed_or_not = open_images(root)
        check_reader(reader, packed_or_not)
        self.images = list_of(packed_or_not)
        self.reader = reader
        shard_id, num_shards = _shard(shard_id, num_shards)
        self._sampler = make_sampler(
            packed_or_not, batch_size, shuffle=shuffle, seed=seed, shard_id=shard_id, num_shards=num_shards,
            last_batch=last_batch, window=window,
        )  # fmt: skip
        self._reader = self._open_reader(packed_or_not, window, storage_options)
        self._pipe = self._make_pipeline(threads or min(8, os.cpu_count() or 1))
        self.broken: dict[str, str] = {}
        self.copied_back = 0
        self._replaced: set[int] = set()
        self._epoch = 0
        self._running: weakref.ref[Iterator[dict[str, Any]]] | None = None
        if self._reader is not None:
            close_when_dropped(self, self._reader.close)

    def _check(self, reader: str) -> None:
        transforms = self._decoding.crop or self._decoding.flip or self._decoding.normalize
        if self._graph is not None and transforms:
            raise ValueError("graph takes the place of crop, flip and normalize: give one or the other")
        if not self._decode and (transforms or self._decoding.options):
            raise ValueError("decode=False gives encoded bytes: crop, flip, normalize and decoder need decode=True")
        if reader == "dali" and self._skip_broken:
            raise ValueError("skip_broken=True does not work with reader='dali', which chooses its files by itself")

    def _open_reader(self, images: Any, window: int, options: Mapping[str, Any] | None) -> Reader | None:
        if self.reader == "dali":
            return None
        on_gpu = self.device.type == "cuda"
        # Decoders want encoded bytes in host memory; so does plain Python, which DALI brings to the device.
        host = self._decode or self.reader == "python-file"
        only_gpu = self.reader in ("kvikio", "deepnvme-gds") or (options or {}).get("mem") == "gpu"
        target = torch.device("cpu") if host and not (only_gpu and on_gpu) else self.device
        if self._decode and target.type == "cuda":
            warnings.warn(
                f"reader={self.reader!r} reads into GPU memory and decoders want encoded bytes in host memory: every "
                "batch is copied back (counted in copied_back); reader='auto' reads into host memory",
                stacklevel=3,
            )
        return open_reader(
            self.reader, images, target, pinned=on_gpu and self._decode, window=window, options=options
        )  # fmt: skip

    @property
    def _uses_dali(self) -> bool:
        return self._decode or self._graph is not None or self.reader in ("dali", "python-file")

    def _make_pipeline(self, threads: int) -> FedPipeline[Batch] | None:
        if not self._uses_dali:
            return None
        dali()  # an error now, not at the first batch
        inputs: dict[str, Input] = {}
        if self._reader is None:
            _check_utf8(self.images.root)
        else:
            # A graph of the user's may hand its input through, and the reader fills buffers again: let DALI copy.
            on_device = "gpu" if self._reader.device.type == "cuda" and not self._decode else "cpu"
            inputs = {"image": Input(on_device, self._recycles), "label": Input()}
        sampler = self._sampler
        weakly = weakref.WeakMethod(self._nodes)  # no cycle: a dropped dataset frees GPU memory at once

        def nodes(inputs: dict[str, Any]) -> dict[str, Any]:
            method = weakly()
            assert method is not None  # who runs the pipeline has the dataset
            return method(inputs)

        return FedPipeline(
            inputs, nodes, batch_size=sampler.batch_size, device=self.device, threads=threads,
            seed=sampler.seed + sampler.shard_id,
        )  # fmt: skip

    @property
    def _recycles(self) -> bool:
        """Whether nothing that comes out of the pipeline shares memory with what went in."""
        return self._decode and self._graph is None

    def _nodes(self, inputs: dict[str, Any]) -> dict[str, Any]:
        jpegs, labels = inputs.values() if inputs else self._file_reader()
        on_gpu = self.device.type == "cuda"
        image = self._decoding.graph(jpegs, on_gpu) if self._decode else jpegs
        if self._graph is not None:
            image, labels = self._graph(image, labels)
        elif on_gpu and not self._decode and self._to_gpu:
            image = image.gpu()
        return {"image": image, "label": labels}

    @property
    def _to_gpu(self) -> bool:
        return self._reader is None or self._reader.device.type == "cpu"

    def _file_reader(self) -> Any:
        sampler = self._sampler
        return dali().fn.readers.file(
            file_root=self.images.root, random_shuffle=sampler.shuffle, seed=sampler.seed,
            initial_fill=1024, shard_id=sampler.shard_id, num_shards=sampler.num_shards, pad_last_batch=True,
            stick_to_shard=True, name="files",
        )  # fmt: skip

    # Epochs.

    def __len__(self) -> int:
        """Batches an epoch, on this shard."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begins a new epoch, and ends the one under way if there is one.

        Raises:
            RuntimeError: in a DataLoader's worker process.
        """
        if get_worker_info() is not None:  # each worker would give all images again
            raise RuntimeError(
                "ImageNetDataset reads ahead and decodes in threads of its own and needs no workers: give it to a "
                "DataLoader with num_workers=0 and batch_size=None, or use it in the DataLoader's place"
            )
        self.reset()
        epoch, self._epoch = self._epoch, self._epoch + 1
        run = self._run(epoch)
        self._running = weakref.ref(run)
        return run

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch, and so which order, the next ``iter()`` begins."""
        self._epoch = epoch

    def reset(self) -> None:
        """Ends the epoch under way; the next ``iter()`` begins another."""
        running = self._running() if self._running is not None else None
        self._running = None
        if running is not None:
            running.close()  # type: ignore[attr-defined]  # it is a generator

    def close(self) -> None:
        """Frees the pipeline, threads and memory. The dataset can be iterated again all the same."""
        self.reset()
        if self._pipe is not None:
            self._pipe.discard()
        if self._reader is not None:
            self._reader.close()

    def _run(self, epoch: int) -> Iterator[dict[str, Any]]:
        batches = self._sampler.epoch(epoch)
        if self._reader is None:
            yield from self._run_dali(batches)
            return
        while batches:
            done = 0
            try:
                for batch in self._loaded(batches, self._reader):
                    done += 1
                    yield batch
            except PipelineFailed as e:
                self._note_broken([b for b in e.feeds if isinstance(b, Batch)], e)
            except BrokenImage as e:
                self._note_empty(e)
            else:
                return
            batches = batches[done:]

    def _loaded(self, batches: Sequence[np.ndarray], reader: Reader) -> Iterator[dict[str, Any]]:
        """The batches as they are given to the user."""
        read = reader.read([self._without_broken(indices) for indices in batches])
        try:
            if self._pipe is None:
                for batch in read:
                    yield {"image": list(batch.images), "label": self._labels(torch.from_numpy(batch.labels))}
                return
            for batch, outputs in self._pipe.run(read, self._arrays):
                if self._recycles:
                    batch.done()
                yield self._finish(outputs)
        finally:
            read.close()  # type: ignore[attr-defined]  # it is a generator

    def _arrays(self, batch: Batch) -> dict[str, Any]:
        if self._decode and batch.images[0].is_cuda:
            batch.images = self._copy_back(batch)
        return {"image": arrays_of(batch), "label": batch.labels[:, None]}

    def _copy_back(self, batch: Batch) -> Sequence[torch.Tensor]:
        sizes = [image.numel() for image in batch.images]
        self.copied_back += sum(sizes)
        return torch.split(torch.cat(list(batch.images)).cpu(), sizes)

    def _finish(self, outputs: dict[str, Any]) -> dict[str, Any]:
        image, label = outputs["image"], outputs["label"]
        if not self._decode and self._graph is None and isinstance(image, torch.Tensor):
            image = list(image)  # encoded bytes always come as a list
        return {"image": image, "label": self._labels(label)}

    def _labels(self, labels: Any) -> Any:
        """(batch, 1) int32, as DALI has them, become (batch,) int64 on the device; what a graph changed stays."""
        if isinstance(labels, torch.Tensor) and labels.dtype == torch.int32 and labels.numel() == len(labels):
            return labels.reshape(-1).to(self.device, torch.int64, non_blocking=True)
        return labels

    def _run_dali(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        """``fn.readers.file`` keeps its own place in the files, so every epoch goes to the end of what it pads."""
        assert self._pipe is not None
        sampler = self._sampler
        rounds = -(-sampler.count // (sampler.num_shards * sampler.batch_size))
        finished = False
        try:
            found = self._pipe.epoch_size("files")
            if found != sampler.count:
                raise ImageListError(
                    f"{self.images.root} held {sampler.count} images when it was listed and holds {found} now: "
                    "list the files again"
                )
            for number, outputs in self._pipe.run(range(rounds), lambda _: {}):  # type: ignore[arg-type]
                if number < len(batches):  # type: ignore[operator]
                    batch = self._finish(outputs)
                    size = len(batches[number])  # type: ignore[call-overload]
                    yield {key: value[:size] for key, value in batch.items()}
            finished = True
        except PipelineFailed as e:
            self._raise_broken_file(batches, e)
        finally:
            if not finished:
                self._pipe.discard()  # its reader cannot go back

    # Broken images.

    def _without_broken(self, indices: np.ndarray) -> np.ndarray:
        if not self._replaced or not any(i in self._replaced for i in indices.tolist()):
            return indices
        good = [i for i in indices.tolist() if i not in self._replaced] or self._good_after(int(indices[0]))
        return np.asarray([i if i not in self._replaced else good[0] for i in indices.tolist()])

    def _good_after(self, index: int) -> list[int]:
        count = len(self.images)
        for i in range(index + 1, index + count):
            if i % count not in self._replaced:
                return [i % count]
        path = self.images.path(index)
        raise BrokenImage(path, f"{self.broken[path]}, and so is every other image")

    def _note_broken(self, batches: Sequence[Batch], error: PipelineFailed) -> None:
        """Finds what could not be decoded in the batches that were under way.

        Raises:
            BrokenImage: there is such an image, and ``skip_broken`` is off.
            PipelineFailed: every image can be decoded, so that the error was another.
        """
        found, decodes = False, self._decodes(error)
        for batch in batches:
            host = [image.cpu().numpy() for image in batch.images]
            for position, why in broken_images(host, self.device, self._decoding.options) if decodes else []:
                found = True
                self._skip(int(batch.indices[position]), why, error)
            if found:
                return
        raise error

    def _note_empty(self, error: BrokenImage) -> None:
        empty = np.flatnonzero(self.images.sizes == 0).tolist()
        if not self._skip_broken or all(i in self._replaced for i in empty):
            raise error
        for index in empty:
            self._skip(index, error.why, error)

    def _skip(self, index: int, why: str, error: Exception) -> None:
        path = self.images.path(index)
        if not self._skip_broken:
            raise BrokenImage(path, f"it cannot be decoded: {why}") from error
        self.broken[path] = why
        self._replaced.add(index)

    def _raise_broken_file(self, batches: Sequence[np.ndarray], error: PipelineFailed) -> None:
        """Finds what ``fn.readers.file`` or the decoder behind it failed at: DALI names files that it cannot read, but
        not those that it cannot decode."""
        named = re.search(re.escape(self.images.root) + "/.*", reason(str(error)))
        if named:
            paths = [named[0]]
        elif self._sampler.shuffle or not error.feeds:
            error.add_note("reader='dali' does not say in which order it reads: another reader names a broken image")
            raise error
        else:
            near = batches[error.feeds[0] : error.feeds[-1] + 2]  # the reader is a batch ahead
            paths = [self.images.path(index) for index in dict.fromkeys(i for batch in near for i in batch.tolist())]
        for path in paths:
            data = np.fromfile(path, dtype=np.uint8)
            if not len(data):
                raise BrokenImage(path, "it is empty") from error
            for _, why in broken_images([data], self.device, self._decoding.options) if self._decodes(error) else []:
                raise BrokenImage(path, f"it cannot be decoded: {why}") from error
        raise error

    def _decodes(self, error: PipelineFailed) -> bool:
        """Whether the pipeline that failed decodes; the user's graph may, where this class does not."""
        return self._decode or ".decoders." in str(error)


def _check_utf8(root: str) -> None:
    try:
        root.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"reader='dali' cannot open {root!r}, which is not UTF-8: use another reader") from e


def _shard(shard_id: int | None, num_shards: int | None) -> tuple[int, int]:
    if (shard_id is None) != (num_shards is None):
        raise ValueError("give both shard_id and num_shards, or neither")
    if shard_id is not None and num_shards is not None:
        return shard_id, num_shards
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
