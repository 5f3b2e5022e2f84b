"""A dataset whose records KvikIO cannot read: each of its calls fails in turn, and every item is right all the same.

KvikIO is simulated, and so is the device: the backend fills host memory through KvikIO as it fills its pinned slots.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.transforms import Compose, RandSpatialCropd, Transform
from monai.transforms.utils import reset_ops_id

from monai_gds import CacheWarning, GDSDataLoader, GDSDataset
from monai_gds.storage import registry
from monai_gds.storage.backend import Availability
from monai_gds.storage.pending import Pending
from monai_gds.storage.plain.kvikio import KvikioBackend
from monai_gds.storage.reads import Reads
from monai_gds.testing.tools import descriptors
from monai_gds.tiles import blosc
from tests.same import assert_same
from tests.storage import simulated

COUNT, EPOCHS = 3, 2

#: What cuFile and KvikIO say.
REFUSALS = [
    RuntimeError("cuFile error at: file_handle.cpp:162: 5030: GPUDirect Storage not supported on current file"),
    RuntimeError("KvikIO failure: POSIX error on pread: Input/output error"),
    ValueError("invalid file handle"),
    MemoryError(),
]

SHORT = [0, 1, 4096]


class OnTheHost(KvikioBackend):
    """Hands everything to KvikIO, in small pieces, and fills host memory."""

    needs_cuda = False

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self._staged.piece_bytes = 512 << 10

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(True, "")

    def start(self, reads: Reads, into: Sequence[torch.Tensor]) -> Pending:
        return self._staged.start(reads, into)


class Make(Transform):  # type: ignore[misc]  # MONAI is untyped
    def __call__(self, data: Any) -> Any:
        generator = torch.Generator().manual_seed(data["i"])
        image = torch.randint(0, 50, (1, 48, 80, 80), generator=generator).float()
        return {"image": image, "label": (image > 30).float(), "i": data["i"]}


def dataset(folder: Path, crops: bool, **options: Any) -> GDSDataset:
    transform = Compose([Make(), *([RandSpatialCropd(["image", "label"], (16, 16, 16), random_size=False)] * crops)])
    transform.set_random_state(1)
    return GDSDataset([{"i": i} for i in range(COUNT)], transform, folder, **{"device": "cpu", **options})


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[simulated.KvikIO]:
    found = simulated.KvikIO()
    found.install(monkeypatch)
    monkeypatch.setitem(registry._BACKENDS, "kvikio", f"{__name__}:OnTheHost")
    yield found
    found.pool.shutdown()
    assert not found.misused


class Failing:
    """Has one call of KvikIO fail, or all from it on."""

    def __init__(self, name: str, first: int, sticky: bool, failure: Exception | int) -> None:
        self._name, self._first, self._sticky, self._failure = name, first, sticky, failure
        self.seen = self.failed = 0

    def __call__(self, name: str) -> int | None:
        if name != self._name:
            return None
        self.seen += 1
        if self.seen == self._first or (self._sticky and self.seen > self._first):
            self.failed += 1
            if isinstance(self._failure, Exception):
                raise copy.copy(self._failure)  # one that is raised again keeps the frames of the first time
            return self._failure
        return None


def epoch(found: GDSDataset, seed: int) -> list[Any]:
    """The items of an epoch, in order, through the loader, which reads ahead."""
    found.transform.set_random_state(seed)
    items = [item for batch in GDSDataLoader(found, batch_size=2, collate_fn=list) for item in batch]
    reset_ops_id(items)  # identities of transforms
    return items


WAYS = [
    pytest.param((None, False), id="whole"),
    pytest.param(("lz4", True), id="tiles", marks=pytest.mark.skipif(bool(blosc.why_not()), reason="no blosc2")),
]


@pytest.fixture(scope="module", params=WAYS)
def cached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool, list[Any]]:
    """A cache, whether crops are read of its records, and the items of its epochs."""
    (compression, crops), folder = request.param, tmp_path_factory.mktemp("cache")
    with dataset(folder, crops, compression=compression, options={"tiles": compression and 32}) as made:
        made.populate(progress=False)
    return folder, crops, [epoch(dataset(folder, crops), seed) for seed in range(EPOCHS)]


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    ("name", "failures"), [("open", REFUSALS), ("pread", REFUSALS), ("get", [*REFUSALS, *SHORT]), ("close", REFUSALS)]
)
def test_whatever_kvikio_does_the_items_are_right(
    cached: tuple[Path, bool, list[Any]], kvikio: simulated.KvikIO, name: str, failures: Any, sticky: bool
) -> None:
    folder, crops, expected = cached
    first, done = 1, False
    while not done:  # the failures take turns
        failure = failures[first % len(failures)]
        if sticky and failure in SHORT:
            failure = 0  # the others would take for ever
        found = dataset(folder, crops, backend="kvikio")
        kvikio.called = failing = Failing(name, first, sticky, failure)
        gc.collect()
        before = descriptors()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for seed in range(EPOCHS):
                for item, wanted in zip(epoch(found, seed), expected[seed], strict=True):
                    assert_same(item, wanted)
            found.flush()
        kvikio.called = lambda name: None
        said = [str(w.message) for w in told if w.category is CacheWarning]
        if name == "close" or not failing.failed:
            assert not said
        elif failure == 0 or isinstance(failure, Exception):
            assert len(said) == len({text.split(":")[0] for text in said}) <= COUNT, said
            assert said
            assert all(str(folder) in text and "computed again" in text for text in said)
            assert all(("monai-gds doctor" in text) is (name == "open") for text in said if sticky)
        done = not failing.failed
        first += 5 if sticky else 3
        del found, item, wanted
        gc.collect()
        assert descriptors() <= before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["open", "pread", "get"])
def test_whatever_kvikio_does_the_items_are_right_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = pytest.importorskip("kvikio", reason="KvikIO is not installed on this machine").CuFile
    failing = Failing("", 1, False, REFUSALS[0])

    class Future:
        def __init__(self, future: Any) -> None:
            self._future = future

        def get(self) -> int:
            done: int = self._future.get()
            failing("get")
            return done

    class CuFile(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            failing("open")
            super().__init__(*args)

        def pread(self, *args: Any) -> Any:
            failing("pread")
            return Future(super().pread(*args))

    with dataset(tmp_path, False, compression=None) as made:
        made.populate(progress=False)
    expected = epoch(made, 0)
    on_device = {"device": "cuda:0", "backend": "kvikio", "compression": None}
    epoch(dataset(tmp_path, False, **on_device), 0)  # what stays on the device is there
    monkeypatch.setattr("kvikio.CuFile", CuFile)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for first in range(1, COUNT + 1):
        for sticky in (False, True):
            failing = Failing(name, first, sticky, REFUSALS[0])
            found = dataset(tmp_path, False, **on_device)
            with pytest.warns(CacheWarning, match="computed again"):
                items = epoch(found, 0) + epoch(found, 0)
            assert failing.failed
            for item, wanted in zip(items, 2 * expected, strict=True):
                assert torch.equal(item["image"].cpu(), wanted["image"])
                assert torch.equal(item["label"].cpu(), wanted["label"])
            found.flush()
            del found, items, item
            gc.collect()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_allocated() <= before
