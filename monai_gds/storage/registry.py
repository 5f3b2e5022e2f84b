"""Which backends there are, which of them work here, and which one ``auto`` takes. One line a backend."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch

from monai_gds.errors import BackendUnavailable
from monai_gds.storage.base import Availability, Storage

__all__ = [
    "available_backends",
    "backend_names",
    "choose_backend",
    "open_storage",
    "probe_backend",
    "resolve_device",
]

_BACKENDS = {
    "posix": "monai_gds.storage.posix:PosixStorage",
    "kvikio": "monai_gds.storage.kvikio:KvikioStorage",
    "xnvme": "monai_gds.storage.xnvme:XnvmeStorage",
    "xnvme-block": "monai_gds.storage.xnvme_block:XnvmeBlockStorage",
    "deepnvme": "monai_gds.storage.deepnvme:DeepNvmeStorage",
    "deepnvme-gds": "monai_gds.storage.deepnvme_gds:DeepNvmeGdsStorage",
}

#: What ``auto`` tries, in this order, by type of device.
_AUTO = {"cpu": ("posix",), "cuda": ("kvikio", "posix")}


def resolve_device(device: int | str | torch.device | None) -> torch.device:
    """The target device a user meant, with its index.

    Args:
        device: an int or ``cuda[:N]`` for a CUDA device, ``cpu``, a ``torch.device``, or None for the current CUDA
            device if there is one and the CPU if not.

    Raises:
        ValueError: no such device on this machine, or a device that is neither CPU nor CUDA.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise ValueError(f"device must be an int, a string, a torch.device or None, not {device!r}")
    asked = device
    if isinstance(device, int):
        device = f"cuda:{device}"
    try:
        resolved = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"device={asked!r} is not a device: use an int, 'cuda:N', 'cpu' or None") from e
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ValueError(f"device={asked!r}: only CPU and CUDA targets are supported")
    if not torch.cuda.is_available():
        raise ValueError(f"device={asked!r}, but torch sees no CUDA device here: use device='cpu' or device=None")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={asked!r}, but this machine has CUDA devices 0 to {torch.cuda.device_count() - 1}")
    return torch.device("cuda", index)


def _backend(name: str) -> type[Storage]:
    if name not in _BACKENDS:
        known = ", ".join(["auto", *_BACKENDS])
        raise ValueError(f"backend={name!r} is not known; there are: {known}")
    module, _, attribute = _BACKENDS[name].partition(":")
    return cast(type[Storage], getattr(importlib.import_module(module), attribute))


def available_backends(device: int | str | torch.device | None = None) -> dict[str, Availability]:
    """Says for every backend whether it works here for ``device``, why not, and what to do about it.

    Args:
        device: see :func:`resolve_device`.

    Returns:
        By name, in the order in which the README lists them.

    Raises:
        ValueError: no such device.

    Example:
        >>> available_backends("cpu")["posix"].ok
        True
    """
    return {name: probe_backend(name, device) for name in _BACKENDS}


def backend_names() -> list[str]:
    """The backends there are, whether they work here or not."""
    return list(_BACKENDS)


def probe_backend(name: str, device: int | str | torch.device | None = None) -> Availability:
    """What :func:`available_backends` says of one backend.

    Raises:
        ValueError: no such backend or device.
    """
    return _backend(name).probe(resolve_device(device))


def choose_backend(name: str, device: torch.device) -> tuple[str, str]:
    """The backend that ``name`` means for ``device``, and why.

    Returns:
        ``(name, reason)``.

    Raises:
        BackendUnavailable: the backend named does not work here.
        ValueError: there is no backend of that name.

    Example:
        >>> choose_backend("auto", resolve_device("cpu"))
        ('posix', 'auto: threads over preadv, private mappings')
    """
    if name != "auto":
        found = _backend(name).probe(device)
        if not found:
            remedy = f"; {found.remedy}" if found.remedy else ""
            raise BackendUnavailable(f"backend={name!r} does not work here: {found.reason}{remedy}")
        return name, f"asked for by name: {found.reason}"
    passed_over: list[str] = []
    for candidate in _AUTO[device.type]:
        found = _backend(candidate).probe(device)
        if found:
            return candidate, "; ".join([f"auto: {found.reason}", *passed_over])
        passed_over.append(f"not {candidate}: {found.reason}")
    raise BackendUnavailable(f"no backend works here for {device}: " + "; ".join(passed_over))


def open_storage(name: str = "auto", device: int | str | torch.device | None = None, **options: Any) -> Storage:
    """Opens a storage backend for one target device.

    Args:
        name: ``auto`` or a name that :func:`available_backends` lists. A name means that backend or an error.
        device: where the tensors go; see :func:`resolve_device`.
        options: keyword arguments of the backend's class.

    Raises:
        BackendUnavailable: the backend does not work here; the message says why and what to do.
        ValueError: no such backend or device.

    Example:
        >>> storage = open_storage("auto", "cpu")
        >>> storage.name
        'posix'
    """
    target = resolve_device(device)
    chosen, _ = choose_backend(name, target)
    return _backend(chosen)(target, **options)
