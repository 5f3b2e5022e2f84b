"""Images that cannot be decoded: finding them in a failed batch, and replacing them by others.

DALI reports that a pipeline failed, but neither in which batch nor at which image. So the images of all batches that
were under way are decoded again, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from monai_gds.errors import BrokenImage
from monai_gds.imagenet.dali.decoding import Decoding
from monai_gds.imagenet.dali.headers import has_plain_samples
from monai_gds.imagenet.dali.pipeline import FedPipeline, PipelineFailed, execution
from monai_gds.imagenet.files.listing import ImageList
from monai_gds.imagenet.readers import Batch

#: The arrays that a pipeline is fed for a batch, by input.
Arrays: TypeAlias = Callable[[Batch], Mapping[str, Any]]


class BrokenImages:
    """The broken images of a list, found so far, and why each cannot be decoded, by path (``reasons``).

    With ``skip``, they are replaced by others; otherwise noting one raises BrokenImage.
    """

    def __init__(self, images: ImageList, skip: bool) -> None:
        self.reasons: dict[str, str] = {}
        self._images = images
        self._skip = skip
        self._indices: set[int] = set()
        self._safe = np.zeros(len(images), bool)  # whether they may be decoded in a batch with others

    def replaced(self, indices: np.ndarray) -> np.ndarray:
        """The indices of a batch with broken images replaced: by a good one of the batch, or the next good one.

        Raises BrokenImage if every image of the list is broken.
        """
        batch = indices.tolist()
        if self._indices.isdisjoint(batch):
            return indices
        good = next((i for i in batch if i not in self._indices), None)
        good = self._next_good(batch[0]) if good is None else good
        return np.asarray([good if i in self._indices else i for i in batch])

    def _next_good(self, index: int) -> int:
        count = len(self._images)
        for i in range(index + 1, index + count):
            if i % count not in self._indices:
                return i % count
        path = self._images.path(index)
        raise BrokenImage(path, f"{self.reasons[path]}, and so is every other image")

    def try_alone(self, batch: Batch, device: torch.device, decoding: Decoding, arrays: Arrays) -> None:
        """Decodes the images alone whose samples DALI might refuse, once each. In a large batch it could crash at them.

        Raises PipelineFailed if one of them cannot be decoded.
        """
        new = np.flatnonzero(~self._safe[batch.indices]).tolist()
        if doubtful := [i for i in new if not has_plain_samples(batch.images[i].numpy())]:
            some = Batch(
                batch.indices[doubtful], [batch.images[i] for i in doubtful], batch.labels[doubtful], lambda: None
            )
            if found := undecodable(some, device, decoding, arrays):
                raise PipelineFailed(ValueError(found[0][1]), [some])
        self._safe[batch.indices] = True

    def note_failure(
        self, error: PipelineFailed, device: torch.device, decoding: Decoding, arrays: Arrays, decodes: bool
    ) -> None:
        """Notes the images that made a pipeline fail, which decodes these ``arrays`` of each batch.

        Even where the pipeline does not decode (``decodes``), a user's graph may: DALI's error shows it.

        Raises:
            BrokenImage: an image cannot be decoded, and broken images are not skipped.
            PipelineFailed: all images can be decoded, so the pipeline failed for another reason.
        """
        if decodes or ".decoders." in str(error):
            for batch in error.feeds:
                assert isinstance(batch, Batch)
                found = undecodable(batch, device, decoding, arrays)
                for index, why in found:
                    self._note(index, why, error)
                if found:
                    return
        raise error

    def note_empty(self, error: BrokenImage) -> None:
        """Notes all empty images. ``error`` is raised again if they are not skipped, or were noted before."""
        empty = np.flatnonzero(self._images.sizes == 0).tolist()
        if not self._skip or self._indices.issuperset(empty):
            raise error
        for index in empty:
            self._note(index, error.why, error)

    def _note(self, index: int, why: str, error: Exception) -> None:
        path = self._images.path(index)
        if not self._skip:
            raise BrokenImage(path, f"it cannot be decoded: {why}") from error
        self.reasons[path] = why
        self._indices.add(index)


def undecodable(batch: Batch, device: torch.device, decoding: Decoding, arrays: Arrays) -> list[tuple[int, str]]:
    """Decodes the images of a batch one by one, unless a header is broken.

    Some images fail only where a part is decoded, so the part is that of ``arrays``. Returns the index and the
    decoder's message of each image that fails.
    """
    names, found = ("image", *decoding.inputs), []
    fed: dict[int, Mapping[str, Any]] = {}
    for image in batch.singles():
        index = int(image.indices[0])
        try:
            fed[index] = {name: array for name, array in arrays(image).items() if name in names}
        except PipelineFailed as e:
            found.append((index, _reason(str(e))))
    if found:
        return found
    pipe: FedPipeline[int] = FedPipeline(
        {name: {} for name in names},
        lambda nodes: {"image": decoding.graph(nodes["image"], device.type == "cuda", nodes)},
        batch_size=1, device=device, execution=execution(num_threads=1),
    )  # fmt: skip
    for index in fed:
        try:
            list(pipe.run([index], fed.__getitem__))
        except PipelineFailed as e:
            found.append((index, _reason(str(e))))
    return found


def _reason(message: str) -> str:
    """The line of DALI's message that names the cause. The rest is a traceback."""
    _, _, tail = message.partition("encountered:")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return lines[0] if lines else message.strip().splitlines()[0]
