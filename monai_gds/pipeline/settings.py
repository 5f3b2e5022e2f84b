"""Settings of the process that change what a transform computes: part of every key.

The dataset captures them when it is made, and they hold for every item that it computes, in whatever process or thread
(``dataset/making.py``): a spawned process starts with the defaults. The default device, flush_denormal, autocast and
grad belong to the thread that sets them, and may be switched around a computation (:func:`apply`). All others belong
to the whole process.

Only settings that differ from their defaults are listed, so a setting that a later version adds invalidates nothing.
Settings of CUDA (TF32, cuDNN, deterministic algorithms) count where a transform names a CUDA device. The number of
threads, over which sums are split, and the processor do not count, since they differ between machines.
"""

from __future__ import annotations

import contextlib
import decimal
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import monai.config
import numpy as np
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
    of_thread: bool = False


def _flushes_subnormals() -> bool:
    return _SMALLEST_NORMAL * 0.5 == 0.0  # a mode of the thread, so Python's arithmetic has it too


def _default_device() -> str:
    # A default device is one of the function modes in force: mostly there is none, and asking for it takes 2.5 us.
    return str(torch.get_default_device()) if torch._C._len_torch_function_stack() else "cpu"


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
    _Setting("default_device", _default_device, "cpu", _set_default_device, True),
    _Setting("flush_denormal", _flushes_subnormals, False, torch.set_flush_denormal, True),
    _Setting("autocast", partial(_autocast, "cpu"), "off", partial(_set_autocast, "cpu"), True),
    _precision_on_cpu("matmul"),
    *(() if _get_precision is None else (_precision_on_cpu("conv"),)),
    _flag("mkldnn", torch.backends.mkldnn, "enabled", True),
    _Setting("truncated_images", _truncated_images, False, _allow_truncated_images),
    _Setting("monai_compiled", lambda: monai.config.USE_COMPILED, False),
    _Setting("monai_meta_dict", lambda: monai.config.USE_META_DICT, False),
)

_WITH_GRADIENTS = (_Setting("grad", torch.is_grad_enabled, True, torch.set_grad_enabled, True),)


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
    _Setting("autocast_cuda", partial(_autocast, "cuda"), "off", partial(_set_autocast, "cuda"), True),
)


def _decimal_context() -> str:
    context = decimal.getcontext()
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    return str([getattr(context, name) for name in names])


def _print_options() -> str:
    return str(sorted(np.get_printoptions().items()))


#: Settings that count where the user's code reads one of these names.
_IF_NAMED = (
    (_Setting("time_zone", lambda: os.environ.get("TZ", ""), ""), ("time", "datetime", "localtime", "fromtimestamp")),
    (_Setting("decimal", _decimal_context, _decimal_context()), ("decimal", "Decimal")),
    (_Setting("numpy_print", _print_options, _print_options()), ("str", "repr", "format", "array2string", "array_str")),
)

_ALL = (*_SETTINGS, *_WITH_GRADIENTS, *_ON_CUDA)
_BY_THE_ENVIRONMENT = tuple(setting for setting in _ALL if setting.apply is None)


def capture(names_cuda: bool = False, requires_grad: bool = False) -> State:
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


def counting(held: State, *, names_cuda: bool, requires_grad: bool) -> State:
    """What counts of a state of :func:`capture_all` for a pipeline, see :func:`capture`, and can be applied."""
    cuda = names_cuda or dict(held).get("default_device", "").startswith("cuda")
    settings = (*_SETTINGS, *(_WITH_GRADIENTS if requires_grad else ()), *(_ON_CUDA if cuda else ()))
    names = {setting.name for setting in settings if setting.apply is not None}
    return tuple(pair for pair in held if pair[0] in names)


def by_environment(names: frozenset[str] = frozenset()) -> State:
    """What is decided by the environment of this process.

    Args:
        names: what the user's code reads; the time zone, the decimal context and how NumPy prints count if it may.
    """
    named = (setting for setting, told_by in _IF_NAMED if not names.isdisjoint(told_by))
    return tuple((s.name, str(value)) for s in (*_BY_THE_ENVIRONMENT, *named) if (value := s.read()) != s.default)


def differences(held: State, now: State) -> dict[str, tuple[str, str]]:
    """The settings that differ between two states and can be applied, with both values."""
    was, has = dict(held), dict(now)
    pairs = {s.name: (was.get(s.name, d := str(s.default)), has.get(s.name, d)) for s in _ALL if s.apply is not None}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def of_process(differ: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Those that belong to the whole process."""
    of_thread = {setting.name for setting in _ALL if setting.of_thread}
    return {name: pair for name, pair in differ.items() if name not in of_thread}


def apply(state: State, only: bool = False) -> contextlib.ExitStack:
    """Applies a state that was captured elsewhere to this process and thread; ``only`` what it names, or all.

    Settings that the environment decides stay as they are, and show in the keys that are made here.

    Returns:
        What restores the old state when it is closed, or at the end of a ``with`` block.
    """
    wanted, undo = dict(state), contextlib.ExitStack()
    for setting in _ALL:
        if setting.apply is None or not (setting.name in wanted or (not only and setting in _SETTINGS)):
            continue
        before = setting.read()
        value = wanted.get(setting.name, str(setting.default))
        if str(before) != value:
            setting.apply(_value_of(setting, value))
            undo.callback(setting.apply, before)
    return undo


class OfThread(NamedTuple):
    """The settings of a thread, for what another one runs on its behalf."""

    state: State
    inference: bool  # whether it is in inference mode

    @classmethod
    def now(cls) -> OfThread:
        """Those of this thread."""
        found = tuple((s.name, str(value)) for s in _ALL if s.of_thread and (value := s.read()) != s.default)
        return cls(found, torch.is_inference_mode_enabled())

    def with_process(self) -> State:
        """These, and those of the process as they are now."""
        mine = {setting.name: str(setting.default) for setting in _ALL if setting.of_thread} | dict(self.state)
        return (*(pair for pair in capture_all() if pair[0] not in mine), *mine.items())

    def applied(self) -> contextlib.AbstractContextManager[object]:
        """Applies them within a ``with`` block, in a thread that has the defaults."""
        if not self.state and not self.inference:
            return contextlib.nullcontext()
        stack = apply(self.state, only=True)
        if self.inference:
            stack.enter_context(torch.inference_mode())
        return stack


def _value_of(setting: _Setting, text: str) -> Any:
    """The value of a setting from its text in a state."""
    if isinstance(setting.default, bool):
        return text == "True"
    if isinstance(setting.default, torch.dtype):
        return getattr(torch, text.removeprefix("torch."))
    return text
