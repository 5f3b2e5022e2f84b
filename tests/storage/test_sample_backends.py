"""A backend that another package brings: found by its entry point, opened by its name, and held to the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from monai_gds.storage import Reads, Storage, available_backends, backend_names, open_storage, registry
from monai_gds.testing import BackendContract, CudaBackendContract
from tests.storage.sample_blocking_backend import SampleBackend
from tests.storage.sample_reaching_gpu import SampleReachingGpu


class TestSample(BackendContract):
    @pytest.fixture
    def backend(self) -> SampleBackend:
        return SampleBackend(torch.device("cpu"))


class TestSampleOnCuda(CudaBackendContract):
    @pytest.fixture
    def backend(self) -> SampleBackend:
        return SampleBackend(torch.device("cuda", 0))


class TestSampleReachingGpu(CudaBackendContract):
    """What BlockingBackend does for a backend that fills GPU memory past the copy stream."""

    @pytest.fixture
    def backend(self) -> SampleReachingGpu:
        return SampleReachingGpu(torch.device("cuda", 0))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two packages that are installed beside this one, as pip leaves them."""
    for package, entry in (("sample", "tests.storage.sample_blocking_backend:SampleBackend"), ("torn", "torn.gone:X")):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[monai_gds.backends]\n{package} = {entry}\nposix = {entry}\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._foreign.cache_clear()
    yield
    registry._foreign.cache_clear()


@pytest.mark.usefixtures("installed")
def test_it_is_opened_by_its_name_and_names_its_files(blob: Path, data: bytes) -> None:
    with closing(open_storage("sample", "cpu", threads=3)) as storage:
        assert isinstance(storage, Storage)
        assert (storage.name, storage.describe()["backend"], storage.describe()["threads"]) == ("sample", "sample", 3)
        (tensor,) = storage.load(Reads.of(str(blob), [(5, 9 << 20)])).wait()
        assert tensor.numpy().tobytes() == data[5 : 5 + (9 << 20)]
        with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
            storage.load(Reads.of(str(blob.parent / "missing.bin"), [(0, 10)])).wait()
        with pytest.raises(OSError, match=r"blob\.bin"):
            storage.load(Reads.of(str(blob), [(len(data), 10)])).wait()


@pytest.mark.usefixtures("installed")
def test_one_that_is_damaged_hides_no_other_and_none_takes_a_name_of_ours() -> None:
    assert backend_names()[-2:] == ["sample", "torn"]
    found = available_backends("cpu")
    assert found["sample"]
    assert not found["torn"]
    assert "torn" in found["torn"].reason
    with closing(open_storage("posix", "cpu")) as storage:
        assert not isinstance(storage._backend, SampleBackend)
