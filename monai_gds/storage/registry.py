"""Which backends exist, which of them work here, and which one ``auto`` chooses. One line per backend.

Another package adds a backend by an entry point of the group ``monai_gds.backends``. Its name is the backend's, and its
value is a :class:`monai_gds.storage.backend.Backend`::

    [project.entry-points."monai_gds.backends"]
    mydrive = "mypackage.mydrive:MyDriveBackend"
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from monai_gds.errors import BackendUnavailable
from monai_gds.storage.backend import CUDA_ONLY, Availability, Backend
from monai_gds.storage.storage import Storage

_BACKENDS = {
    "posix": "monai_gds.storage.plain.posix:PosixBackend",
    "kvikio": "monai_gds.storage.plain.kvikio:KvikioBackend",
    "xnvme": "monai_gds.storage.xnvme.files:XnvmeBackend",
    "xnvme-block": "monai_gds.storage.xnvme.blocks:XnvmeBlockBackend",
    "xnvme-bam": "monai_gds.storage.xnvme.bam.bam:XnvmeBamBackend",
    "deepnvme": "monai_gds.storage.deepnvme.aio:DeepNvmeBackend",
    "deepnvme-gds": "monai_gds.storage.deepnvme.gds:DeepNvmeGdsBackend",
}

#: What ``auto`` tries, in this order, by type of device.
AUTO = {"cpu": ("posix",), "cuda": ("kvikio", "posix")}


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


@functools.cache
def _foreign() -> dict[str, str]:
    """Backends of other packages. One with the name of a backend of ours is left out."""
    found = {entry.name: entry.value for entry in entry_points(group="monai_gds.backends")}
    return {name: value for name, value in found.items() if name not in _BACKENDS}


def backend_names() -> list[str]:
    """The names of all backends, whether they work here or not.

    Example:
        >>> backend_names()[:2]
        ['posix', 'kvikio']
    """
    return [*_BACKENDS, *_foreign()]


def _backend(name: str) -> type[Backend]:
    place = _BACKENDS.get(name) or _foreign().get(name)
    if place is None:
        raise ValueError(f"backend={name!r} is not known; there are: {', '.join(['auto', *backend_names()])}")
    module, _, attribute = place.partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), attribute)
    found.name = name
    return found


def available_backends(device: int | str | torch.device | None = None) -> dict[str, Availability]:
    """Returns for every backend whether it works here for ``device``, why not, and what to do about it.

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
    return {name: probe_backend(name, device) for name in backend_names()}


def backend_options(name: str, device: torch.device) -> frozenset[str]:
    """The keyword arguments that a backend takes, or the one that ``auto`` chooses for ``device``."""
    return frozenset(inspect.signature(_chosen(name, device)).parameters) - {"device"}


def _chosen(name: str, device: torch.device) -> type[Backend]:
    return _backend(choose_backend(name, device)[0] if name == "auto" else name)


def check_options(name: str, options: Mapping[str, Any], device: torch.device) -> Backend:
    """Refuses options that a backend does not take, and values that cannot work. Opens nothing.

    Returns:
        The backend with these options, not opened yet.

    Raises:
        BackendUnavailable: such a value, on this machine.
        TypeError: it takes no such option; the message names those it takes.
        ValueError: such a value.
    """
    backend = _chosen(name, device)
    parameters = inspect.signature(backend).parameters
    takes = sorted(parameters.keys() - {"device"})
    wrong = sorted(options.keys() - set(takes))
    if wrong and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        has = f"it takes {', '.join(takes)}" if takes else "it takes none"
        raise TypeError(f"backend {backend.name!r} has no option {wrong[0]!r}: {has}")
    return backend(device, **options)


def probe_backend(name: str, device: int | str | torch.device | None = None) -> Availability:
    """What :func:`available_backends` returns for one backend.

    Args:
        name: the backend's name.
        device: see :func:`resolve_device`.

    Raises:
        ValueError: no such backend or device.

    Example:
        >>> probe_backend("posix", "cpu").ok
        True
    """
    target = resolve_device(device)
    try:
        backend = _backend(name)
        if backend.needs_cuda and target.type != "cuda":
            return Availability(False, CUDA_ONLY, 'use backend="posix" for a CPU target')
        return backend.probe(target)
    except (ImportError, AttributeError) as e:  # another package may name a class that it does not have
        return Availability(False, f"importing it failed: {e}")


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
        found = probe_backend(name, device)
        if not found:
            remedy = f"; {found.remedy}" if found.remedy else ""
            raise BackendUnavailable(f"backend={name!r} does not work here: {found.reason}{remedy}")
        return name, f"asked for by name: {found.reason}"
    passed_over: list[str] = []
    for candidate in AUTO[device.type]:
        found = probe_backend(candidate, device)
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
        TypeError: the backend takes no such option; the message names those it takes.
        ValueError: no such backend or device.

    Example:
        >>> storage = open_storage("auto", "cpu")
        >>> storage.name
        'posix'
    """
    target = resolve_device(device)
    chosen, _ = choose_backend(name, target)
    return Storage(check_options(chosen, options, target))
