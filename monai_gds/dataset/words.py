"""A dataset in words, for its user: what is cached, and why an item is not. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from monai.transforms import MapTransform, Transform
from monai.transforms.traits import RandomizableTrait

from monai_gds import limits
from monai_gds.base.units import shown
from monai_gds.dataset.making import nearest_record
from monai_gds.dataset.session import Session
from monai_gds.errors import MonaiGdsError, printable
from monai_gds.folder import maintenance
from monai_gds.folder.budget import limit_of
from monai_gds.folder.explain import Nearest
from monai_gds.folder.index import Index
from monai_gds.pipeline.ahead import drawn_ahead, may_crop, why_not
from monai_gds.pipeline.parts import name_of, parts
from monai_gds.pipeline.split import cacheable_after


def describe(session: Session) -> str:
    """Target, backend, what is cached, where the split is and why, and the sources of the first item."""
    split, settings, count = session.split(), session.settings, len(session.dataset.data)
    below = f", relative to {settings.form.root}" if settings.cache_dir and settings.form.root else ""
    rows = [
        ("target", str(settings.device)),
        ("backend", f"{settings.backend} ({settings.backend_reason})"),
        ("cache", f"{settings.cache_dir or 'none'}{below}"),
        *_limits(session),
        ("cached", _names(split.deterministic) or "nothing"),
        ("each epoch", _names(split.rest) or "nothing"),
        ("split", _split(split.rest)),
    ]
    rows += _random(session)
    if session.caches:
        rows.append(("records", _records(session)))
        rows.append(("pipeline", _pipeline(session)))
    if (bits := settings.options.mantissa_bits) is not None:
        rows.append(("rounded", f"large float tensors, to {bits} bits of mantissa"))
    if count and split.deterministic:
        rows.append(("sources", _sources(session)))
    head = f"{type(session.dataset).__name__} of {count} items"
    return printable("\n".join([head, *(f"  {name + ':':<12}{text}" for name, text in rows)]))


def _names(transforms: Sequence[Callable[..., Any]]) -> str:
    return ", ".join(map(name_of, transforms))


def _limits(session: Session) -> list[tuple[str, str]]:
    rows, settings = [], session.settings
    most = None if settings.cache_dir is None else limit_of(settings.cache_dir, settings.max_bytes)
    if most is not None:
        rows.append(("budget", shown(most)))
    if settings.local_dir is not None:
        limit = "" if settings.local_bytes is None else f", of up to {shown(settings.local_bytes)}"
        rows.append(("copies", f"{settings.local_dir}{limit}"))
    return rows


def _records(session: Session) -> str:
    """How many records this pipeline has, for the items of this dataset and of others, and the form of new ones."""
    try:
        form = session.record_form()
    except (MonaiGdsError, ValueError) as e:  # print() must work on a broken dataset
        return f"none: {e}"
    try:
        count = f"{Index(session.settings.cache_dir or '').count(session.pipeline_digest())} of this pipeline"
    except (OSError, MonaiGdsError, ValueError):  # no such folder yet
        count = "none"
    return f"{count}, new ones as {form}"


def _pipeline(session: Session) -> str:
    """The hash of the pipeline and of the process's settings, as ``monai-gds cache ls`` shows it."""
    try:
        return session.pipeline_digest()[: maintenance.SHOWN] or "not part of the key"
    except (MonaiGdsError, ValueError) as e:
        return f"none: {e}"


def _split(rest: Sequence[Any]) -> str:
    if not rest:
        return "at the end: no transform is random"
    later = cacheable_after(rest)
    if later:
        return f"before {name_of(rest[0])}, which is not a Transform of MONAI's; {later} after it could be cached"
    if not isinstance(rest[0], (Transform, RandomizableTrait)):
        return f"before {name_of(rest[0])}, which is not a Transform of MONAI's and counts as random"
    return f"before {name_of(rest[0])}, the first random transform"


def drawn_first(session: Session) -> str:
    """Which random transforms are drawn before anything is read, or why none is; empty if nothing crops."""
    split = session.split()
    rest = split.steps()
    if not any(map(may_crop, rest)) or not session.caches:
        return ""
    if not drawn_ahead(split):
        name, why = next((name_of(step), why) for step in rest if (why := why_not(step)))
        return f"none is drawn before items are read: {name} comes first, and {why}"
    return f"{_names(drawn_ahead(split))} drawn before anything is read"


def _random(session: Session) -> list[tuple[str, str]]:
    """What is to be said of random transforms: those that could not run without values are known from items so far."""
    eager = "; ".join(f"{name}: {why}" for name, why in session.runtime.on_values.items())
    rows = ("crops", drawn_first(session)), ("on values", eager), ("draws", session.runtime.global_draws.in_words())
    return [row for row in rows if row[1]]


def _arrays_read_whole(session: Session, index: int) -> list[str]:
    """The keys of an item under which crops get large NumPy arrays, which the cache reads whole."""
    steps = drawn_ahead(session.split())
    keys = {key for step in steps for part in parts(step) if isinstance(part, MapTransform) for key in part.keys}
    item = session.read(index) if keys else None
    if not isinstance(item, dict):
        return []
    arrays = {key: item[key] for key in item if key in keys and isinstance(item[key], np.ndarray)}
    return [str(key) for key, array in arrays.items() if array.nbytes >= limits.TILED_BYTES]


def _sources(session: Session) -> str:
    policy = session.settings.options.sources
    if policy is None:
        return "files do not count (sources=None)"
    by = policy if isinstance(policy, str) else name_of(policy)
    try:
        found = session.key(0).sources
    except Exception as e:  # print() must work on a broken dataset
        return f"unknown, since item 0 has no key: {e}"
    return f"of item 0, by {by}: {', '.join(found) or 'none'}"


def explain(session: Session, index: int) -> str:
    """Whether an item has a record, and where. If not, the most similar record and how it differs."""
    cache = session.cache() if session.caches else None
    if cache is None:
        return f"item {index} is computed {session.settings.again}: nothing is cached"
    session.flush()
    key = session.key(index)
    path = cache.record_path(key.digest)
    if cache.holds(key.digest):
        lines = _hit(session, index, path, cache.why_unusable(key.digest))
    else:
        near = nearest_record(Index(cache.path), key)
        lines = [f"item {index} is a miss: there is no {path}", *_lines(near)]
        if near.entry is not None and near.entry.item != key.item:
            before = maintenance.key_in(cache.record_path(near.entry.digest)).get("columns")
            now = session.keys().columns(session.data[index])
            before = before if isinstance(before, dict) else now
            if differ := [repr(name) for name in sorted({*before, *now}) if before.get(name) != now.get(name)]:
                lines.append(f"  values that differ: {', '.join(differ)}")
    state = ", ".join(f"{name} {value}" for name, value in key.pipeline.state) or "defaults"
    lines.append(f"  settings of the process: {state}")
    lines.extend(
        f"  source {path}: {f'{identity.size} bytes, ' if identity.size >= 0 else ''}{identity.content}"
        for path, identity in key.sources.items()
    )
    return printable("\n".join(lines))


def _hit(session: Session, index: int, path: str, why: str | None) -> list[str]:
    if why:
        when = session.settings.again
        return [f"item {index} is computed {when}: {path} cannot be used here and is not replaced: {why}"]
    found = maintenance.look(path)
    packed = f" {found.packed}" if found is not None and found.packed else ""
    lines = [f"item {index} is a hit: {path}{packed}"]
    lines += [f"  {name}: {text}" for name, text in _random(session)]
    for name in _arrays_read_whole(session, index):
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
