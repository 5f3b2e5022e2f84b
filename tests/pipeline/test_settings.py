"""The process's settings that change results are captured, applied elsewhere, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import monai.data.meta_obj
import numpy as np
import pytest
import torch
from PIL import ImageFile

from monai_gds.pipeline import settings
from monai_gds.pipeline.settings import State, apply, capture, capture_all
from tests.fresh import Interpreter, printed_by


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    assert capture() == (), "an earlier test left a setting changed"
    yield
    monai.data.meta_obj.set_track_meta(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_autocast_enabled("cpu", False)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    torch.backends.mkldnn.enabled = True


SETTINGS: dict[str, Callable[[], Any]] = {
    "track_meta": lambda: monai.data.meta_obj.set_track_meta(False),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
    "flush_denormal": lambda: torch.set_flush_denormal(True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "truncated_images": lambda: setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_captured_applied_and_put_back(name: str) -> None:
    SETTINGS[name]()
    found = capture()
    assert [setting for setting, _ in found] == [name]
    with apply(()):  # as another process begins
        assert capture() == ()
        with apply(found):
            assert capture() == found
        assert capture() == ()
    assert capture() == found


def test_an_error_puts_the_settings_back() -> None:
    with pytest.raises(RuntimeError), apply((("track_meta", "False"), ("default_dtype", "torch.float64"))):
        assert len(capture()) == 2
        raise RuntimeError
    assert capture() == ()


def test_no_mode_of_a_device_stays_in_force() -> None:
    with apply((("default_device", "meta"),)):
        assert torch.empty(1).is_meta
    assert torch.overrides._get_current_function_mode() is None


def test_a_device_context_counts() -> None:
    with torch.device("meta"):
        assert capture() == (("default_device", "meta"),)


def test_a_setting_for_gpus_counts_where_a_transform_names_one() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert capture() == ()
        names = [
            name for name, _ in capture(names_cuda=True) if name != "cudnn_rnn_tf32"
        ]  # told apart from torch 2.9 on
        assert names == ["cudnn_deterministic", "cudnn_tf32", "deterministic"]
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_matrix_precision_counts_on_a_cpu_that_has_less_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor here may have none, so that it is simulated: the multiplication itself is asked."""
    torch.set_float32_matmul_precision("medium")
    exact = np.ones((512, 512), np.float32)
    reduced = {True: torch.from_numpy(exact), False: torch.from_numpy(exact + 1)}
    matmul = lambda a, b: reduced[settings._precision("mkldnn", "matmul") == "ieee"]  # noqa: E731
    settings._on_cpu_under.cache_clear()
    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    try:
        found = capture()
        assert [name for name, _ in found] == ["cpu_matmul"]
        assert torch.get_float32_matmul_precision() == "medium"
        torch.set_float32_matmul_precision("highest")
        with apply(found):
            assert capture() == found
        assert capture() == ()
    finally:
        settings._on_cpu_under.cache_clear()


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch has no newer settings")
def test_precision_of_convolutions_counts_on_a_cpu_that_has_less_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor here has, as above."""
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    trial = lambda: torch.tensor(settings._precision("mkldnn", "conv") == "ieee")  # noqa: E731
    settings._on_cpu_under.cache_clear()
    monkeypatch.setitem(settings._TRIALS, "conv", trial)
    try:
        found = capture()
        assert found == (("cpu_conv", "bf16"),)
        assert torch.backends.mkldnn.conv.fp32_precision == "bf16"
        with apply(()):
            assert capture() == ()
        assert capture() == found
    finally:
        torch.backends.mkldnn.conv.fp32_precision = "none"
        settings._on_cpu_under.cache_clear()


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch has no newer settings")
@pytest.mark.parametrize("setting", ["fp32_precision", "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision"])
def test_the_newer_settings_of_precision_are_read(setting: str, interpreter: Interpreter) -> None:
    """Reading the older ones is an error from then on. In a process of its own, since nothing takes that back."""
    found, names = interpreter.call(_captured_after, setting)
    assert found == ()
    assert set(names) >= ({"cudnn_tf32"} if "cudnn" in setting else {"matmul_precision", "cudnn_tf32"})


def _captured_after(setting: str) -> tuple[State, list[str]]:
    """What is captured once a newer setting was used, and the names of all that there is to capture."""
    for value in ("ieee", "tf32"):
        exec(f"torch.backends.{setting} = {value!r}")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    found = capture_all()
    with apply(()), apply(found):
        assert capture_all() == found
    assert capture_all() == found
    return capture(), [name for name, _ in found]


def test_gradients_count_where_transforms_hold_parameters() -> None:
    with torch.no_grad():
        assert capture() == ()
        assert capture(requires_grad=True) == (("grad", "False"),)


@pytest.mark.parametrize("variable", ["USE_META_DICT"])
def test_settings_of_monais_environment_count(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import importlib, monai
for module in (monai.config.deviceconfig, monai.config):  # which read the variable when they are imported
    importlib.reload(module)
from monai_gds.pipeline.settings import capture
print(capture())
"""
    monkeypatch.setenv(variable, "1")
    assert printed_by(code) == "(('monai_meta_dict', 'True'),)"


def test_what_cannot_be_applied_shows_in_what_is_captured() -> None:
    wanted: State = (("monai_compiled", "True"),)
    with apply(wanted):
        assert capture() != wanted
