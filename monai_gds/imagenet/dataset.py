"""ImageNetDataset: image folders through any storage backend, decoded by DALI, as torch tensors."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from monai_gds.errors import BackendUnavailable, BrokenImage, meant, warn
from monai_gds.imagenet.background_close import close_when_dropped
from monai_gds.imagenet.broken import BrokenImages
from monai_gds.imagenet.dali.decoding import Decoding
from monai_gds.imagenet.dali.headers import Headers
from monai_gds.imagenet.dali.pipeline import FedPipeline, PipelineFailed, dali, execution, tensor_list
from monai_gds.imagenet.files.listing import ImageList, StrPath
from monai_gds.imagenet.files.sampling import LastBatch, Sampler, policy_named
from monai_gds.imagenet.readers import Batch, FileReader
from monai_gds.imagenet.source import arrays_of, open_images, open_reader
from monai_gds.storage import resolve_device

if TYPE_CHECKING:
    from monai_gds.storage.blockmap.block_map import BlockMap


class ImageNetDataset(IterableDataset[dict[str, Any]]):
    """Batches of images with labels, read by a storage backend and decoded by NVIDIA DALI.

    Iterating yields ``{"image": …, "label": …}``: images as uint8 (batch, height, width, 3) RGB, or as a list of
    (height, width, 3) where sizes differ; labels as int64 (batch,); both on ``device``. Each ``iter()`` is a new
    epoch, even if the last one was left early; it begins with its first batch. Only one epoch runs at a time. The
    dataset is its own loader: pass it where a DataLoader is expected, or give it to one with ``batch_size=None`` and no
    workers.

    Args:
        root: an image folder ``<root>/<class>/<file>``, a flat folder ``<root>/<file>``, a folder written by
            ``monai-gds pack``, or a block map of an image folder (a :class:`monai_gds.BlockMap`, or the JSON file of
            one). Readers that read by block maps take it as their ``blockmap``.
        batch_size: images per batch.
        reader: how encoded images are read: one of :data:`~monai_gds.imagenet.source.READERS`, which are the storage
            backends, ``auto``, and ``packed`` for the best backend over a packed folder.
        device: where the batches go: an int or ``"cuda:N"``, ``"cpu"``, or None for the current CUDA device, or the CPU
            if there is none.
        decode: decode with DALI, on the GPU if ``device`` is one. False yields encoded bytes as a list of 1-D uint8
            tensors on ``device``. Without ``graph``, DALI is then not used and need not be installed. The tensors of a
            batch are slices of one buffer (packed: of one file's images), which any one of them keeps alive.
        file_list, files, labels: name the images, as in ``fn.readers.file``; see
            :func:`~monai_gds.imagenet.source.open_images`.
        shuffle: a new order of all images in every epoch, unless ``window`` is given.
        seed: seeds the order, crops and flips. They depend on the epoch and the image alone: not on its batch, on
            shards, or on where a run was continued. (DALI seeds random operators of a ``graph`` by itself, whenever it
            builds a pipeline; they differ between shards.)
        shard_id, num_shards: this process's share of each epoch. Default: rank and world size of torch.distributed if
            it is initialised, else all images.
        last_batch: ``"partial"`` (the default), ``"exact"``, ``"fill"`` or ``"drop"``, see
            :class:`~monai_gds.imagenet.files.sampling.Sampler`. On uneven shards, ``"partial"`` repeats an image.
        last_batch_policy: instead of ``last_batch``, DALI's ``LastBatchPolicy`` or its name. ``FILL``, ``DROP`` and
            ``PARTIAL`` are ``"fill"``, ``"drop"`` and ``"exact"``: each epoch of a shard is the first epoch of DALI's
            iterator over a reader with ``pad_last_batch=True``.
        crop: (height, width) of a random resized crop, or None. Only the part of each image inside the crop is decoded.
        training: False cuts ``crop`` from the middle, as an evaluation does, after the image was resized so that the
            crop takes 224/256 of its shorter side. With (224, 224), pixels are those of torchvision's ``Resize(256,
            antialias=True)`` and ``CenterCrop(224)``, but for rounding.
        flip: mirror each image with a probability of one half.
        normalize: float32 CHW, normalised with ImageNet's mean and deviation or with ``(mean, std)``; see
            :class:`~monai_gds.imagenet.dali.decoding.Decoding`.
        graph: a function from the DALI nodes ``(images, labels)``, or ``(jpegs, labels)`` without ``decode``, to the
            nodes ``(image, label)``. It replaces crop, training, flip and normalize.
        decoder: arguments of ``fn.decoders.image``, such as ``hw_decoder_load``, the share of the images for a GPU's
            hardware decoder; and ``random_area``, ``random_aspect_ratio`` and ``num_attempts`` of
            ``fn.decoders.image_random_crop``.
        skip_broken: replace an image that cannot be decoded, and its label, by another one, if possible of the same
            batch, and note it in ``broken``. Otherwise it raises BrokenImage. Because DALI 2.4 can crash at an image
            that it refuses in a large batch, TIFF, JPEG 2000 and unusual JPEG images, such as those in CMYK, are
            decoded alone first, once each. (In a ``graph`` with ``decode=False`` it can crash at any file that is not
            an image, in batches of more than 4 images per thread.)
        num_threads, prefetch_queue_depth, exec_dynamic, threads: DALI's own, see
            :func:`~monai_gds.imagenet.dali.pipeline.execution`.
        window: reads a packed folder in whole files, as suits spinning disks, and shuffles within so many files at a
            time. Batches then hold images of few classes, which trainings may not bear, and so many files, and as many
            read ahead, are held in memory. By default each image is read by itself.
        storage_options: keyword arguments of the storage backend.

    Attributes:
        images: the :class:`~monai_gds.imagenet.files.listing.ImageList`: classes, names, labels, sizes.
        broken: why each image skipped so far cannot be decoded, by path.
        copied_back: bytes copied from the GPU back to the host, because the reader fills only GPU memory and decoders
            need host memory.

    Raises:
        BackendUnavailable: the reader's backend, or DALI, does not work here. The message says why and what to do.
        ImageListError: no class, no image, a dead link, or a packed folder with a missing file.
        ValueError: an argument is wrong, or ``last_batch="drop"`` leaves no batch.

    While iterating: BrokenImage names an image that is empty or cannot be decoded, DamagedRecord a file of a packed
    folder whose bytes do not match their checksum (compared the first time it is read), OSError a file that is gone.
    The dataset can be iterated again after an error.

    Example:
        >>> from pathlib import Path
        >>> from monai_gds.bench.made_up import write_image_folder
        >>> folder = write_image_folder(Path("images"), 3)  # made up, in ImageNet's layout
        >>> train = ImageNetDataset(folder, 2, device="cpu", crop=(224, 224), flip=True, normalize=True)
        >>> for batch in train:
        ...     print(tuple(batch["image"].shape), batch["label"].tolist())
        (2, 3, 224, 224) [0, 0]
        (1, 3, 224, 224) [0]
    """

    def __init__(
        self,
        root: StrPath | BlockMap | None = None,
        batch_size: int = 1,
        reader: str = "auto",
        device: int | str | torch.device | None = None,
        decode: bool = True,
        *,
        file_list: StrPath | None = None,
        files: Sequence[StrPath] | None = None,
        labels: Sequence[int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shard_id: int | None = None,
        num_shards: int | None = None,
        last_batch: LastBatch | None = None,
        last_batch_policy: Any = None,
        crop: tuple[int, int] | None = None,
        training: bool = True,
        flip: bool = False,
        normalize: bool | tuple[Sequence[float], Sequence[float]] = False,
        graph: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        decoder: Mapping[str, Any] | None = None,
        skip_broken: bool = False,
        num_threads: int | None = None,
        prefetch_queue_depth: int | None = None,
        exec_dynamic: bool | None = None,
        window: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        self.device = resolve_device(device)
        self.reader = reader
        self._decode = decode
        self._decoding = Decoding(crop, flip, normalize, decoder or {}, training)
        self._graph = graph
        transforms = crop or flip or normalize or not training
        if graph is not None and transforms:
            raise ValueError("graph replaces crop, training, flip and normalize: give one or the other")
        if not decode and (transforms or decoder):
            raise ValueError(
                "decode=False gives encoded bytes: crop, training, flip, normalize and decoder need decode=True"
            )
        self.images = images = open_images(root, file_list=file_list, files=files, labels=labels)
        shard_id, num_shards = _shard(shard_id, num_shards)
        self._sampler = Sampler(
            len(images), batch_size, shuffle, seed, shard_id, num_shards,
            policy_named(last_batch, last_batch_policy), images.bounds, window,
        )  # fmt: skip
        self._reader = self._open_reader(images, window=window, options=storage_options)
        self._pipe = self._make_pipeline(execution(num_threads, prefetch_queue_depth, exec_dynamic, threads))
        self._headers = Headers(self._sampler.batch_size, decoder or {})
        self._broken = BrokenImages(images, skip_broken)
        self.broken = self._broken.reasons
        self.copied_back = 0
        self._next = self._place = (0, 0)  # epoch and batches taken: where iter() begins, and where the consumer is
        self._running: weakref.ref[Generator[dict[str, Any]]] | None = None
        close_when_dropped(self, self._reader.close)

    def _open_reader(self, images: ImageList, **arguments: Any) -> FileReader:
        if not self._decode or self.device.type == "cpu":
            return open_reader(self.reader, images, self.device, **arguments)
        try:  # decoders want encoded bytes in host memory
            return open_reader(self.reader, images, torch.device("cpu"), pinned=True, **arguments)
        except (BackendUnavailable, ValueError) as e:  # perhaps for GPU memory only: else this fails again
            why = str(e)
            reader = open_reader(self.reader, images, self.device, **arguments)
        warn(
            f"reader={self.reader!r} reads into GPU memory, since it cannot read into host memory ({why}). Decoders "
            "want encoded bytes in host memory: every batch is copied back (counted in copied_back); reader='auto' "
            "reads into host memory",
            UserWarning,
        )
        return reader

    def _make_pipeline(self, how: Mapping[str, Any]) -> FedPipeline[Batch] | None:
        if not self._decode and self._graph is None:
            return None
        dali()  # an error now, not at the first batch
        where = "gpu" if self._reader.device.type == "cuda" and not self._decode else "cpu"
        graph = partial(
            _graph_of, decoding=self._decoding if self._decode else None, on_gpu=self.device.type == "cuda",
            graph=self._graph,
        )  # fmt: skip
        inputs: dict[str, dict[str, Any]] = {"image": {"device": where, "no_copy": self._recycles}, "label": {}}
        if self._decode:
            inputs.update((name, {}) for name in self._decoding.inputs)
        return FedPipeline(
            inputs, graph, batch_size=self._sampler.batch_size, device=self.device,
            seed=self._sampler.seed + self._sampler.shard_id, execution=how,
        )  # fmt: skip

    @property
    def _recycles(self) -> bool:
        """Whether no output of the pipeline shares memory with its inputs. With a user's graph, one might."""
        return self._decode and self._graph is None

    def __repr__(self) -> str:
        sampler, images = self._sampler, self.images
        whole = images.bounds is None or sampler.window is None
        order = f"shuffled {'as a whole' if whole else f'within windows of {sampler.window} files'}"
        order = order if sampler.shuffle else "in order"
        return (
            f"<ImageNetDataset: {len(images)} images of {images.root}, {order}, in batches of {sampler.batch_size}; "
            f"reader={self.reader!r}, shard {sampler.shard_id} of {sampler.num_shards}, {self.device}>"
        )

    # Epochs.

    def __len__(self) -> int:
        """Batches per epoch, on this shard."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """A new epoch, which begins with its first batch. Ends the one under way if there is one.

        Raises:
            RuntimeError: in a DataLoader's worker process.
        """
        if get_worker_info() is not None:  # each worker would yield all images again
            raise RuntimeError(
                "ImageNetDataset reads ahead and decodes in its own threads and needs no workers: give it to a "
                "DataLoader with num_workers=0 and batch_size=None, or use it in the DataLoader's place"
            )
        self.reset()
        run = self._run()
        self._running = weakref.ref(run)
        return run

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the epoch that begins next, and thereby its order, crops and flips.

        The number that a loaded state has changes nothing: that epoch goes on.
        """
        if epoch != self._next[0]:
            self._next = epoch, 0
        self._place = self._next

    def state_dict(self) -> dict[str, int]:
        """The position of the loop that was begun last: its epoch, and the batches that it gave.

        It is the same for all ranks that are in step, and ``torch.load`` loads it with ``weights_only=True``.
        """
        return dict(zip(("epoch", "batches"), self._place, strict=True))

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Makes the next loop give the remaining batches of the epoch that was saved, bit for bit.

        If none remains, it gives the next epoch. The dataset must be made with the same arguments, except for
        ``device`` and how images are read.

        Raises:
            ValueError: this is not the state of an ImageNetDataset.
        """
        if set(state_dict) != {"epoch", "batches"}:
            raise ValueError("this is not a state of ImageNetDataset.state_dict(): was it saved by another loader?")
        self.reset()
        epoch, batches = state_dict["epoch"], state_dict["batches"]
        self._next = self._place = (epoch, batches) if batches < len(self) else (epoch + 1, 0)

    def reset(self) -> None:
        """Ends the epoch under way; the next ``iter()`` begins another."""
        if self._running is not None and (running := self._running()) is not None:
            running.close()

    def close(self) -> None:
        """Frees the pipeline, threads and memory. The dataset can still be iterated again."""
        self.reset()
        if self._pipe is not None:
            self._pipe.discard()
        self._headers.discard()
        self._reader.close()

    def _run(self) -> Generator[dict[str, Any]]:
        epoch, begin = self._place = self._next
        self._next = epoch + 1, 0  # here, since a trainer may call iter() and not use it
        with closing(self._epoch(epoch, begin)) as batches:
            for number, batch in enumerate(batches, begin):
                self._place = epoch, number + 1
                yield batch
        self._place = self._next

    def _epoch(self, epoch: int, begin: int) -> Generator[dict[str, Any]]:
        """The batches of an epoch from the one numbered ``begin`` on."""
        batches = self._sampler.epoch(epoch)
        ends_empty = self._sampler.ends_empty
        if ends_empty:
            del batches[-1]
        at = min(begin, len(batches) - 1)  # an empty batch has the form of the one before it
        empty: dict[str, Any] = {}
        while at < len(batches):
            try:
                for batch in self._loaded(epoch, batches[at:]):
                    at += 1
                    if ends_empty:
                        empty = {key: _empty(value) for key, value in batch.items()}
                    if at > begin:
                        yield batch
            except PipelineFailed as e:
                self._broken.note_failure(e, self.device, self._decoding, partial(self._fed, epoch), self._decode)
            except BrokenImage as e:
                self._broken.note_empty(e)
        if ends_empty:
            yield empty

    def _loaded(self, epoch: int, batches: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        """Reads and decodes batches, and yields them as the user gets them."""
        with closing(self._reader.read([self._broken.replaced(indices) for indices in batches])) as read:
            if self._pipe is None:
                for batch in read:
                    yield {"image": list(batch.images), "label": self._labels(torch.from_numpy(batch.labels))}
                return
            for batch, outputs in self._pipe.run(read, partial(self._arrays, epoch)):
                if self._recycles:
                    batch.done()
                yield {"image": outputs["image"], "label": self._labels(outputs["label"])}

    def _arrays(self, epoch: int, batch: Batch) -> dict[str, Any]:
        """What the pipeline is fed for a batch. Raises PipelineFailed for images that might crash it."""
        arrays = self._fed(epoch, batch)
        if self._decode:
            self._broken.try_alone(batch, self.device, self._decoding, partial(self._fed, epoch))
        return arrays

    def _fed(self, epoch: int, batch: Batch) -> dict[str, Any]:
        """The arrays of a batch. Raises PipelineFailed for a broken header."""
        labels = batch.labels[:, None]
        if not self._decode:
            return {"image": arrays_of(batch), "label": labels}
        if batch.images[0].is_cuda:
            self.copied_back += batch.copy_back()
        images = arrays_of(batch)
        shapes = self._headers.shapes(images, batch)
        cuts = self._decoding.arrays(self._sampler.seed, epoch, batch.indices, shapes)
        return {"image": tensor_list(images), "label": labels, **cuts}

    def _labels(self, labels: Any) -> Any:
        """Turns DALI's labels, int32 (batch, 1), into int64 (batch,) on the device. A graph's own are left alone."""
        if isinstance(labels, torch.Tensor) and labels.dtype == torch.int32 and labels.numel() == len(labels):
            return labels.reshape(-1).to(self.device, torch.int64, non_blocking=True)
        return labels


def _empty(value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """An empty batch in the form of these images or labels."""
    return value.new_empty((0, *value.shape[1:])) if isinstance(value, torch.Tensor) else []


def _graph_of(
    nodes: dict[str, Any], decoding: Decoding | None, on_gpu: bool, graph: Callable[[Any, Any], tuple[Any, Any]] | None
) -> dict[str, Any]:
    """The DALI graph. Not a method, so that a dropped dataset is not in a cycle and frees GPU memory at once."""
    image, label = nodes["image"], nodes["label"]
    if decoding is not None:
        image = decoding.graph(image, on_gpu, nodes)
    if graph is not None:
        image, label = graph(image, label)
    return {"image": image, "label": label}


def _shard(shard_id: int | None, num_shards: int | None) -> tuple[int, int]:
    if (shard_id is None) != (num_shards is None):
        raise ValueError("give both shard_id and num_shards, or neither")
    if shard_id is not None and num_shards is not None:
        return shard_id, num_shards
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _refuse(others: Mapping[str, Any]) -> None:
    """Raises a TypeError for an argument that there is not, with the one that was probably meant."""
    for name in others:
        raise TypeError(
            f"ImageNetDataset has no argument {name!r}{meant(name, inspect.signature(ImageNetDataset).parameters)}"
        )
