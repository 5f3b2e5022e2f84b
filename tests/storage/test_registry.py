"""Choosing a backend and a device: what is taken, and what the errors tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monai_gds.errors import BackendUnavailable, MonaiGdsError
from monai_gds.storage import (
    Availability,
    Storage,
    available_backends,
    backend_names,
    choose_backend,
    open_storage,
    registry,
    resolve_device,
)
from monai_gds.storage.backend import Backend
from monai_gds.storage.plain.posix import PosixBackend

CPU = torch.device("cpu")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one CUDA device; nothing may be put there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


class Absent(PosixBackend):
    """A backend that works nowhere."""

    @classmethod
    def probe(cls, device: torch.device) -> Availability:
        return Availability(False, "libabsent is not there", "install libabsent")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers ``absent``, and lets ``auto`` try it first."""
    monkeypatch.setitem(registry._BACKENDS, "absent", f"{__name__}:Absent")
    monkeypatch.setitem(registry.AUTO, "cpu", ("absent", "posix"))


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", "cuda:9", torch.device("cuda", 1)])
def test_a_cuda_device_without_cuda(device: int | str | torch.device) -> None:
    for call in (resolve_device, available_backends, lambda d: open_storage("auto", d)):
        with pytest.raises(ValueError, match="no CUDA device") as caught:
            call(device)
        assert repr(device) in str(caught.value)
        assert "device='cpu'" in str(caught.value)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("device", [9, "cuda:9", torch.device("cuda", 1)])
def test_a_cuda_device_that_is_not_there(device: int | str | torch.device) -> None:
    with pytest.raises(ValueError, match=r"CUDA devices?.* 0") as caught:
        resolve_device(device)
    assert repr(device) in str(caught.value)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda"), None])
def test_every_way_to_name_a_gpu(device: int | str | torch.device | None) -> None:
    assert resolve_device(device) == torch.device("cuda", 0)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), None])
def test_every_way_to_name_the_cpu(device: str | torch.device | None) -> None:
    assert resolve_device(device) == CPU


@pytest.mark.parametrize(
    "device", ["gpu", "", "meta", "mps", -1, "cuda:-1", "cuda:x", 10**6, 1.0, True, b"cpu", ["cpu"]]
)
def test_what_is_not_a_device(device: object) -> None:
    with pytest.raises(ValueError, match="device") as caught:
        resolve_device(device)  # type: ignore[arg-type]
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("name", ["nvme", "", "Posix", "staging"])
def test_an_unknown_backend_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match="auto, posix, kvikio") as caught:
        open_storage(name, "cpu")
    assert repr(name) in str(caught.value)


@pytest.mark.usefixtures("absent")
def test_a_named_backend_that_cannot_work_says_why_and_what_to_do() -> None:
    with pytest.raises(BackendUnavailable, match=r"absent.*libabsent is not there.*install libabsent") as caught:
        open_storage("absent", "cpu")
    assert isinstance(caught.value, MonaiGdsError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.usefixtures("absent")
def test_auto_goes_on_to_the_next_and_says_so() -> None:
    name, reason = choose_backend("auto", CPU)
    assert name == "posix"
    assert "not absent: libabsent is not there" in reason
    assert open_storage("auto", "cpu").name == "posix"


def test_auto_with_nothing_left_names_all_it_tried(monkeypatch: pytest.MonkeyPatch, absent: None) -> None:
    monkeypatch.setitem(registry.AUTO, "cpu", ("absent",))
    with pytest.raises(BackendUnavailable, match="not absent: libabsent is not there"):
        open_storage("auto", "cpu")


def test_a_name_means_that_backend_and_says_so() -> None:
    assert choose_backend("posix", CPU)[0] == "posix"
    assert "by name" in choose_backend("posix", CPU)[1]


def test_every_backend_has_a_reason_and_the_missing_ones_a_remedy() -> None:
    found = available_backends("cpu")
    assert list(found) == backend_names()
    assert found["posix"].ok
    for availability in found.values():
        assert availability.reason
        assert availability.ok or availability.remedy
        assert bool(availability) == availability.ok


def test_a_backend_bears_the_name_that_it_is_asked_for_by() -> None:
    for name in backend_names():
        assert registry._backend(name).name == name
        assert issubclass(registry._backend(name), Backend)


def test_options_go_to_the_backend_and_wrong_ones_are_refused() -> None:
    storage = open_storage("posix", "cpu", threads=3)
    assert isinstance(storage, Storage)
    assert storage.describe() == {**storage.describe(), "backend": "posix", "device": "cpu", "threads": 3}
    assert {"threads", "direct_io"} <= registry.backend_options("posix", CPU)
    assert registry.backend_options("auto", CPU) == registry.backend_options("posix", CPU)
    with pytest.raises(TypeError, match=r"backend 'posix' has no option 'thread_count': it takes .*threads"):
        open_storage("posix", "cpu", thread_count=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("posix", {"threads": 0}, "threads=0: give a whole number"),
        ("posix", {"threads": 2.5}, "threads=2.5: give a whole number"),
        ("posix", {"pinned_bytes": "many"}, "pinned_bytes"),
        ("kvikio", {"threads": "x"}, "threads='x': give a whole number"),
        ("deepnvme", {"threads": 0}, "threads=0"),
        ("deepnvme", {"block_size": 5}, "block_size must be a multiple of 4096"),
        ("deepnvme-gds", {"blok_size": 4096}, "blok_size"),
        ("deepnvme", {"tuned": {"warp": 9}}, "unknown setting 'warp'"),
        ("xnvme", {"threads": 0}, "threads=0"),
        ("xnvme-block", {"queue_depth": 3}, "queue_depth=3: xNVMe takes powers of two"),
        ("xnvme-block", {"queue_depth": "x"}, "queue_depth='x': xNVMe takes powers of two"),
        ("xnvme-block", {"be": "upcie", "uri": "0000:01:00.0"}, "give the blockmap"),
        ("xnvme-block", {"mem": "gpu"}, "need a CUDA target"),
        ("xnvme-bam", {"controller": "hard"}, "controller='hard' is not known"),
        ("xnvme-bam", {"controller": "software", "queues": 0}, "queues=0"),
    ],
)
def test_values_that_cannot_work_are_refused_before_anything_is_opened(
    name: str, options: dict[str, Any], message: str
) -> None:
    """On every machine, whether the backend works there or not."""
    with pytest.raises((ValueError, TypeError), match=message):
        registry._backend(name)(CPU, **options)


def test_a_backend_of_another_package_may_hand_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(PosixBackend):
        def __init__(self, device: torch.device, **options: Any) -> None:
            super().__init__(device, **options)

    monkeypatch.setattr(registry, "_backend", lambda name: Mine)
    assert open_storage("posix", "cpu", threads=3).describe()["threads"] == 3


@pytest.mark.gpu
def test_auto_on_a_gpu_takes_what_works_there() -> None:
    name, reason = choose_backend("auto", resolve_device("cuda"))
    assert name == ("kvikio" if available_backends("cuda")["kvikio"] else "posix")
    assert reason.startswith("auto: ")


@pytest.mark.gpu
def test_a_real_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="cuda:9"):
        open_storage("auto", "cuda:9")
