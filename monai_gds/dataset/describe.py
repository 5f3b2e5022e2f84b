"""Descriptions of a dataset for its user: what is cached, and why an item is not. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from monai.transforms import MapTransform, Transform
from monai.transforms.traits import RandomizableTrait

from monai_gds import limits
from monai_gds.base.units import shown
from monai_gds.dataset.misses import nearest_record
from monai_gds.errors import MonaiGdsError, printable
from monai_gds.folder import maintenance
from monai_gds.folder.explain import Nearest
from monai_gds.folder.index import Index
from monai_gds.keys.key import Key
from monai_gds.pipeline.parts import parts
from monai_gds.pipeline.split import Split, cacheable_after
from monai_gds.programs.ghosts import drawn_ahead, hazard

if TYPE_CHECKING:
    from monai_gds.dataset.dataset import GDSDataset

__all__ = ["describe", "explain_item", "uncached"]


def _name_of(transform: Callable[..., Any]) -> str:
    """The name of a function, or of an object's type."""
    return str(getattr(transform, "__qualname__", type(transform).__name__)).rpartition("<locals>.")[2]


def describe(dataset: GDSDataset) -> str:
    """Target, backend, what is cached, where the split is and why, and the sources of the first item."""
    split = dataset.split()
    below = f", relative to {dataset.settings.form.root}" if dataset.cache_dir and dataset.settings.form.root else ""
    rows = [
        ("target", str(dataset.device)),
        ("backend", f"{dataset.backend} ({dataset.backend_reason})"),
        ("cache", f"{dataset.cache_dir or 'none'}{below}"),
        *_limits(dataset),
        ("cached", _names(split.deterministic) or "nothing"),
        ("each epoch", _names(split.rest) or "nothing"),
        ("split", _split(split.deterministic, split.rest)),
    ]
    if drawn := drawn_first(dataset):
        rows.append(("crops", drawn))
    if dataset.caches:
        rows.append(("records", _records(dataset)))
        rows.append(("pipeline", _pipeline(dataset)))
    if dataset.settings.options.mantissa_bits is not None:
        rows.append(("rounded", f"large float tensors, to {dataset.settings.options.mantissa_bits} bits of mantissa"))
    if len(dataset.data) and split.deterministic:
        rows.append(("sources", _sources(dataset)))
    head = f"{type(dataset).__name__} of {len(dataset.data)} items"
    return printable("\n".join([head, *(f"  {name + ':':<12}{text}" for name, text in rows)]))


def _names(transforms: Sequence[Callable[..., Any]]) -> str:
    return ", ".join(map(_name_of, transforms))


def _limits(dataset: GDSDataset) -> list[tuple[str, str]]:
    rows = []
    if dataset.settings.max_bytes is not None:
        rows.append(("budget", shown(dataset.settings.max_bytes)))
    if dataset.settings.local_dir is not None:
        limit = "" if dataset.settings.local_bytes is None else f", of up to {shown(dataset.settings.local_bytes)}"
        rows.append(("copies", f"{dataset.settings.local_dir}{limit}"))
    return rows


def _records(dataset: GDSDataset) -> str:
    try:
        form = dataset.record_form()
    except (MonaiGdsError, ValueError) as e:  # print() must work on a broken dataset
        return f"none: {e}"
    return f"{_count_of_records(dataset)}, new ones as {form}"


def _count_of_records(dataset: GDSDataset) -> str:
    """How many records this pipeline has, for the items of this dataset and of others."""
    try:
        return f"{Index(dataset.cache_dir or '').count(dataset.pipeline_digest())} of this pipeline"
    except (OSError, MonaiGdsError, ValueError):  # no such folder yet
        return "none"


def _pipeline(dataset: GDSDataset) -> str:
    """The hash of the pipeline and of the process's settings, as ``monai-gds cache ls`` shows it."""
    try:
        return dataset.pipeline_digest()[: maintenance.SHOWN] or "not part of the key"
    except (MonaiGdsError, ValueError) as e:
        return f"none: {e}"


def _split(deterministic: Sequence[Any], rest: Sequence[Any]) -> str:
    if not rest:
        return "at the end: no transform is random"
    later = cacheable_after(rest)
    if later:
        return f"in front of {_name_of(rest[0])}, which is not a Transform of MONAI's; {later} after it could be cached"
    if not isinstance(rest[0], (Transform, RandomizableTrait)):
        return f"in front of {_name_of(rest[0])}, which is not a Transform of MONAI's and counts as random"
    return f"in front of {_name_of(rest[0])}, the first random transform"


def drawn_first(dataset: GDSDataset) -> str:
    """Which random transforms are drawn before anything is read, and why others are not; empty if nothing crops."""
    split = dataset.split()
    rest = split.steps()
    crops = [step for step in rest if any("Crop" in type(part).__name__ for part in parts(step))]
    if not crops or not dataset.caches:
        return ""
    if not drawn_ahead(split):
        name, why = next((_name_of(step), why) for step in rest if (why := hazard(step)))
        return f"none is drawn before items are read: {name} comes first, and {why}"
    notes = [f"{name} ran on values: {why}" for name, why in dataset.on_values.items()]
    return "; ".join([f"{_names(drawn_ahead(split))} drawn before anything is read", *notes])


def _arrays_read_whole(dataset: GDSDataset, index: int) -> list[str]:
    """The keys of an item under which crops get large NumPy arrays, which the cache reads whole."""
    steps = drawn_ahead(dataset.split())
    keys = {key for step in steps for part in parts(step) if isinstance(part, MapTransform) for key in part.keys}
    item = dataset.read(index) if keys else None
    if not isinstance(item, dict):
        return []
    return [str(key) for key in item if key in keys and _is_large(item[key])]


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes >= limits.TILED_BYTES


def _sources(dataset: GDSDataset) -> str:
    policy = dataset.settings.options.sources
    if policy is None:
        return "files do not count (sources=None)"
    by = policy if isinstance(policy, str) else _name_of(policy)
    try:
        found = dataset.key(0).sources
    except Exception as e:  # print() must work on a broken dataset
        return f"unknown, since item 0 has no key: {e}"
    return f"of item 0, by {by}: {', '.join(found) or 'none'}"


def uncached(split: Split) -> str:
    """A warning if nothing of a pipeline is cached, or less than could be; else empty."""
    rest = split.rest
    if not split.deterministic:
        why = "there is no transform" if not rest else (
            f"the pipeline begins with {_name_of(rest[0])}, and only what comes before the first random transform (or "
            "callable that is not a MONAI Transform) is"
        )  # fmt: skip
        return f"nothing is cached: {why}"
    later = cacheable_after(rest)
    if not later:
        return ""
    return (
        f"{_name_of(rest[0])} is not a Transform of MONAI's and counts as random, so what comes after it runs in "
        f"every epoch, though the next {later} could be cached: use Lambda or Lambdad, or derive it from "
        "monai.transforms.Transform"
    )


def explain_item(dataset: GDSDataset, index: int) -> str:
    """Whether an item has a record, and where. If not, the most similar record and how it differs."""
    if not dataset.caches or dataset.cache_dir is None:
        return f"item {index} is computed at every access: nothing is cached"
    dataset.flush()
    key = dataset.key(index)
    if dataset.holds(key):
        lines = _hit(dataset, index, key)
    else:
        near = nearest_record(Index(dataset.cache_dir), key)
        lines = [f"item {index} is a miss: there is no {dataset.record_path(key)}", *_lines(near)]
    state = ", ".join(f"{name} {value}" for name, value in key.pipeline.state) or "defaults"
    lines.append(f"  settings of the process: {state}")
    lines.extend(
        f"  source {path}: {identity.size} bytes, {identity.content}" for path, identity in key.sources.items()
    )
    return printable("\n".join(lines))


def _hit(dataset: GDSDataset, index: int, key: Key) -> list[str]:
    path = dataset.record_path(key)
    if why := dataset.why_unusable(key):
        return [f"item {index} is computed at every access: {path} cannot be used here and is not replaced: {why}"]
    found = maintenance.look(path)
    packed = f" {found.packed}" if found is not None and found.packed else ""
    lines = [f"item {index} is a hit: {path}{packed}"]
    if drawn := drawn_first(dataset):
        lines.append(f"  crops: {drawn}")
    for name in _arrays_read_whole(dataset, index):
        lines.append(
            f"  {name!r} is an array, so it is read whole for every crop: end the cached part with EnsureTyped"
        )
    return lines


def _lines(near: Nearest) -> list[str]:
    if near.entry is None:
        return [f"  {'; '.join(near.differences)}"]
    made = f"{datetime.fromtimestamp(near.entry.mtime_ns / 1e9):%Y-%m-%d %H:%M}"
    head = f"  the nearest record is {near.entry.name}, made {made}; what differs:"
    return [head, *(f"    {difference}" for difference in near.differences)]
