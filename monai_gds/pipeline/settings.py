"""Settings of the process that change what a transform computes: part of every key.

The dataset captures them for every key, since a user may change them between two accesses. A worker that computes an
item in another process or thread first applies the captured ones (:func:`applied`): a spawned process starts with the
defaults.

Only settings that differ from their defaults are listed, so a setting that a later version adds invalidates nothing.
Settings of CUDA (TF32, cuDNN, deterministic algorithms) count where a transform names a CUDA device. The number of
threads, over which sums are split, and the processor do not count, since they differ between machines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import monai.config
import torch
from monai.data.meta_obj import get_track_meta, set_track_meta

#: Names and values of the settings that differ from their defaults, in the order of the tables below.
State = tuple[tuple[str, str], ...]

#: Half of it is subnormal: 0 on a processor in flush-to-zero mode.
_SMALLEST_NORMAL = sys.float_info.min


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    read: Callable[[], Any]
    default: Any
    apply: Callable[[Any], object] | None = None  # None: the environment decides


def _flushes_subnormals() -> bool:
    return _SMALLEST_NORMAL * 0.5 == 0.0  # a mode of the thread, so Python's arithmetic has it too


#: How many torch function modes are in force, default devices among them. None: this torch does not have it.
_modes_in_force: Callable[[], int] | None = getattr(torch._C, "_len_torch_function_stack", None)


def _default_device() -> str:
    if _modes_in_force is not None and not _modes_in_force():
        return "cpu"
    return str(torch.get_default_device())  # 2.5 us


def _set_default_device(device: str) -> None:
    torch.set_default_device(None if device == "cpu" else device)  # "cpu" would be a mode in force, as any other


def _autocast(device: str) -> str:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"


def _set_autocast(device: str, value: str) -> None:
    torch.set_autocast_enabled(device, value != "off")
    if value != "off":
        torch.set_autocast_dtype(device, getattr(torch, value.removeprefix("torch.")))


# The precision of float32 is read from torch's newer settings if it has them (2.9): reading an older one is an error
# after a newer one was set. The older setters change the newer settings too.

_get_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_precision: Callable[[str, str, str], object] | None = getattr(torch._C, "_set_fp32_precision_setter", None)


def _precision(backend: str, operation: str) -> str:
    if _get_precision is None:
        return torch.get_float32_matmul_precision().replace("highest", "ieee")
    found = _get_precision(backend, operation)
    return "ieee" if found == "none" else found


def _set_precision_of(backend: str, operation: str, value: str) -> None:
    if _set_precision is None:
        torch.set_float32_matmul_precision(value.replace("ieee", "highest"))
    else:
        _set_precision(backend, operation, value)


def _on_cpu(operation: str) -> str:
    precision = _precision("mkldnn", operation)
    return "exact" if precision == "ieee" else _on_cpu_under(operation, precision)


def _set_on_cpu(operation: str, value: str) -> None:
    _set_precision_of("mkldnn", operation, "ieee" if value == "exact" else value)


def _numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(1, 2, prod(shape), dtype=torch.float32, device="cpu").reshape(shape)


#: What shows whether a CPU that has bfloat16 uses it: small operations are exact, such as matrices of 128 rows.
_TRIALS: dict[str, Callable[[], torch.Tensor]] = {
    "matmul": lambda: _numbers(512, 512) @ _numbers(512, 512),
    "conv": lambda: torch.conv3d(_numbers(1, 16, 16, 16, 16), _numbers(1, 16, 5, 5, 5)),
}


@cache
def _on_cpu_under(operation: str, precision: str) -> str:
    """``precision`` if this processor computes with fewer bits than float32 has under that setting, else "exact".

    The setting is mostly meant for TF32 on a GPU.
    """
    reduced = _TRIALS[operation]()
    _set_on_cpu(operation, "exact")
    try:
        exact = _TRIALS[operation]()
    finally:
        _set_on_cpu(operation, precision)
    return "exact" if torch.equal(exact, reduced) else precision


def _precision_on_cpu(operation: str) -> _Setting:
    return _Setting(f"cpu_{operation}", partial(_on_cpu, operation), "exact", partial(_set_on_cpu, operation))


def _flag(label: str, owner: Any, name: str, default: bool) -> _Setting:
    return _Setting(label, partial(getattr, owner, name), default, partial(setattr, owner, name))


def _truncated_images() -> bool:
    return bool(getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False))


def _allow_truncated_images(allow: bool) -> None:
    if allow or "PIL.ImageFile" in sys.modules:
        from PIL import ImageFile

        ImageFile.LOAD_TRUNCATED_IMAGES = allow


#: In the order of a state. Reading them all takes well under a microsecond.
_SETTINGS = (
    _Setting("track_meta", get_track_meta, True, set_track_meta),
    _Setting("default_dtype", torch.get_default_dtype, torch.float32, torch.set_default_dtype),
    _Setting("default_device", _default_device, "cpu", _set_default_device),
    _Setting("flush_denormal", _flushes_subnormals, False, torch.set_flush_denormal),
    _Setting("autocast", partial(_autocast, "cpu"), "off", partial(_set_autocast, "cpu")),
    _precision_on_cpu("matmul"),
    *(() if _get_precision is None else (_precision_on_cpu("conv"),)),
    _flag("mkldnn", torch.backends.mkldnn, "enabled", True),
    _Setting("truncated_images", _truncated_images, False, _allow_truncated_images),
    _Setting("monai_compiled", lambda: monai.config.USE_COMPILED, False),
    _Setting("monai_meta_dict", lambda: monai.config.USE_META_DICT, False),
)

_WITH_GRADIENTS = (_Setting("grad", torch.is_grad_enabled, True, torch.set_grad_enabled),)


def _precision_on_cuda(label: str, operation: str, default: str) -> _Setting:
    return _Setting(
        label, partial(_precision, "cuda", operation), default, partial(_set_precision_of, "cuda", operation)
    )


_TF32_OF_CUDNN = (
    (_flag("cudnn_tf32", torch.backends.cudnn, "allow_tf32", True),)
    if _get_precision is None
    else (_precision_on_cuda("cudnn_tf32", "conv", "tf32"), _precision_on_cuda("cudnn_rnn_tf32", "rnn", "tf32"))
)

_ON_CUDA = (
    _precision_on_cuda("matmul_precision", "matmul", "ieee"),
    _flag("cudnn", torch.backends.cudnn, "enabled", True),
    _flag("cudnn_benchmark", torch.backends.cudnn, "benchmark", False),
    _flag("cudnn_deterministic", torch.backends.cudnn, "deterministic", False),
    *_TF32_OF_CUDNN,
    _flag("reduced_fp16", torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
    _flag("reduced_bf16", torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    _Setting("deterministic", torch.are_deterministic_algorithms_enabled, False, torch.use_deterministic_algorithms),
    _Setting("autocast_cuda", partial(_autocast, "cuda"), "off", partial(_set_autocast, "cuda")),
)

_ALL = (*_SETTINGS, *_WITH_GRADIENTS, *_ON_CUDA)


def capture(*, names_cuda: bool = False, requires_grad: bool = False) -> State:
    """The state of this process and thread.

    Args:
        names_cuda: a transform names a CUDA device, so the settings of CUDA count.
        requires_grad: a transform holds parameters, so the grad mode counts.
    """
    settings = (*_SETTINGS, *_WITH_GRADIENTS) if requires_grad else _SETTINGS
    found = [(s.name, str(value)) for s in settings if (value := s.read()) != s.default]
    if names_cuda or dict(found).get("default_device", "").startswith("cuda"):
        found += [(s.name, str(value)) for s in _ON_CUDA if (value := s.read()) != s.default]
    return tuple(found)


def defaults() -> dict[str, str]:
    """Every setting with its default, as text; a state lists the settings that differ."""
    return {setting.name: str(setting.default) for setting in _ALL}


def capture_all() -> State:
    """The state with every setting that counts for any pipeline, to be applied in another process."""
    return capture(names_cuda=True, requires_grad=True)


def apply(state: State) -> list[Callable[[], object]]:
    """Applies a state that was captured elsewhere to this process and thread.

    Settings that the environment decides stay as they are, and show in the keys that are made here.

    Returns:
        Functions to call, in this order, to restore the old state.
    """
    wanted = dict(state)
    undo: list[Callable[[], object]] = []
    for setting in _ALL:
        if setting.apply is None or not (setting.name in wanted or setting in _SETTINGS):
            continue
        before = setting.read()
        value = wanted.get(setting.name, str(setting.default))
        if str(before) != value:
            setting.apply(_value_of(setting, value))
            undo.insert(0, partial(setting.apply, before))
    return undo


@contextlib.contextmanager
def applied(state: State) -> Iterator[None]:
    """Applies a state within a ``with`` block."""
    undo = apply(state)
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _value_of(setting: _Setting, text: str) -> Any:
    """The value of a setting from its text in a state."""
    if isinstance(setting.default, bool):
        return text == "True"
    if isinstance(setting.default, torch.dtype):
        return getattr(torch, text.removeprefix("torch."))
    return text
