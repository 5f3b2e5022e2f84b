"""Explains why a key has no record: finds the most similar record in the index and describes the differences.

Used by the dataset's ``explain`` and by the warning after an epoch of misses. Pure functions over an
:class:`~monai_gds.folder.index.Index`; no record is opened.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from monai_gds.folder.index import Index, IndexEntry
from monai_gds.records.header import SourceState

#: A path in the description of a pipeline: "transforms[1] Spacingd.pixdim" is the attribute "pixdim" of the transform
#: "Spacingd" at place 1. A transform without attributes is described by its name alone.
_STEP = re.compile(r"transforms\[(\d+)\] ([^\s.]+)(?:\.(.*))?", re.DOTALL)

#: Prefix of the paths that describe the state of the process.
_STATE = "state."


@dataclass(frozen=True, slots=True)
class Nearest:
    """The record that is most similar to a key."""

    entry: IndexEntry | None  # the record; None if none has this item or one of its sources
    differences: list[str]  # from the record to the key, one short text each


def nearest(
    index: Index, item: str, pipeline: str, sources: Mapping[str, SourceState], description: Mapping[str, str]
) -> Nearest:
    """Finds the record that is most similar to a key without one, among those that still exist.

    Records of the same item come first, then those with a source file in common, then those of files of the same
    content elsewhere. Among these the fewest differences win, then the newest record.

    Args:
        index: of the records.
        item: hash of the key's item.
        pipeline: hex digits that identify its transforms and the state.
        sources: size and identity of each source by its absolute path.
        description: of its pipeline, as for :meth:`Index.describe_pipeline`.

    Example:
        >>> from pathlib import Path
        >>> index, entry = Index("."), IndexEntry("ab" * 16, "item", "cafe0123", 4096, 1, (), {})
        >>> Path(entry.name).touch()  # in place of a record
        >>> index.note_records([entry])
        >>> index.describe_pipeline("cafe0123", {"transforms[0] Spacingd.pixdim": "1.5"})
        >>> nearest(index, "item", "beef0123", {}, {"transforms[0] Spacingd.pixdim": "1.0"}).differences
        ['Spacingd.pixdim 1.5 → 1.0']
    """

    @functools.cache
    def of_pipeline(other: str) -> list[str]:
        return [] if other == pipeline else pipeline_differences(other, pipeline, index.pipeline(other), description)

    def ranked(near: Nearest) -> tuple[int, int]:
        return len(near.differences), -near.entry.mtime_ns if near.entry else 0

    entries = list(index.entries().values())
    of_item = [entry for entry in entries if entry.item == item]
    of_source = [entry for entry in entries if not entry.sources.keys().isdisjoint(sources)]
    content = _contents(sources)
    of_copies = [entry for entry in entries if content and _contents(entry.sources) == content]
    for alike, differences in ((of_item, _of_same_item), (of_source, _of_same_sources), (of_copies, _of_copies)):
        found = [Nearest(e, [*of_pipeline(e.pipeline), *differences(e.sources, sources)]) for e in alike]
        for near in sorted(found, key=ranked):
            if near.entry is not None and index.holds(near.entry):
                return near if near.differences else Nearest(near.entry, ["nothing that the index holds differs"])
    return Nearest(None, ["no record here has this item or one of its source files"])


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def source_differences(before: Mapping[str, SourceState], now: Mapping[str, SourceState]) -> list[str]:
    """The differences between the sources of a record and those of a key.

    Example:
        >>> source_differences({"/data/ct_3.nii.gz": (100, "a")}, {"/data/ct_3.nii.gz": (120, "b")})
        ['ct_3.nii.gz changed (size 100 → 120)']
    """
    paths = sorted({*before, *now})
    short = _short_names(paths)
    differences = []
    for path in paths:
        if path not in now:
            differences.append(f"{short[path]} is no longer a source")
        elif path not in before:
            differences.append(f"{short[path]} is a new source")
        else:
            differences += _change(short[path], before[path], now[path])
    return differences


def _change(name: str, before: SourceState, now: SourceState) -> list[str]:
    if before[0] != now[0]:
        return [f"{name} changed (size {before[0]} → {now[0]})"]
    if _by_time(before) != _by_time(now):
        old, new = ("its time" if _by_time(state) else "its content" for state in (before, now))
        return [f"{name} was identified by {old} and is by {new} now (sources=)"]
    if before[1] == now[1]:
        return []
    return [f"{name} has another time" if _by_time(now) else f"{name} content changed"]


def _by_time(state: SourceState) -> bool:
    """Whether a source was identified with ``sources="stat"``."""
    return str(state[1]).startswith("stat:")


def _short_names(paths: Iterable[str]) -> dict[str, str]:
    """The last part of each path, or the whole path if several have the same last part."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(os.path.basename(path) or path, []).append(path)
    return {path: name if len(alike) == 1 else path for name, alike in by_name.items() for path in alike}


def _of_same_item(before: Mapping[str, SourceState], now: Mapping[str, SourceState]) -> list[str]:
    if len(before) == len(now) and before.keys().isdisjoint(now):
        pairs = list(zip(*(sorted(sources, key=lambda path: path[::-1]) for sources in (before, now)), strict=True))
        if all(os.path.basename(old) == os.path.basename(new) for old, new in pairs):  # the same below another root
            before = {new: before[old] for old, new in pairs}
    return source_differences(before, now)


def _of_same_sources(before: Mapping[str, SourceState], now: Mapping[str, SourceState]) -> list[str]:
    names = ", ".join(sorted(_short_names(before.keys() & now.keys()).values()))
    return [
        f"an item with the source {names} that differs in another value, or in how it spells a path",
        *source_differences(before, now),
    ]


def _contents(sources: Mapping[str, SourceState]) -> list[SourceState]:
    """The sources without their paths, in order; empty if they have no content, or one was not identified by it."""
    states = sorted(sources.values())
    return states if any(size > 0 for size, _ in states) and not any(map(_by_time, states)) else []


def _of_copies(before: Mapping[str, SourceState], now: Mapping[str, SourceState]) -> list[str]:
    first = min(now)
    old = min(path for path, state in before.items() if state == now[first])
    return [
        f"{first} has the content of {old}: data that are moved or copied keep their records if every dataset is "
        "given root="
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines

Attributes = dict[str, str]


def pipeline_differences(old: str, new: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The differences between two pipelines, by their digests and descriptions, one of which may be missing."""
    if not before or not now:
        return [f"the transforms or the settings differ (pipeline {old[:8] or '-'} → {new[:8] or '-'})"]
    found = description_differences(before, now)
    return found or ["the transforms differ in a way that their description does not show"]


def steps_of(description: Mapping[str, str]) -> list[str]:
    """The names of the transforms that a description of a pipeline is of, in order."""
    return [step.name for step in _steps(description)[0]]


def description_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The differences between two descriptions of pipelines, step by step and attribute by attribute.

    Example:
        >>> description_differences({"state.track_meta": "False"}, {"state.track_meta": "True"})
        ['track_meta False → True']
    """
    steps_before, rest_before = _steps(before)
    steps_now, rest_now = _steps(now)
    rest = _attribute_differences("", rest_before, rest_now)
    return [*_step_differences(steps_before, steps_now), *(text.removeprefix(_STATE) for text in rest)]


@dataclass(frozen=True, slots=True)
class _Step:
    """A transform of a pipeline: its place, its name and the texts of its attributes."""

    place: int
    name: str
    attributes: Attributes


def _steps(description: Mapping[str, str]) -> tuple[list[_Step], Attributes]:
    """The transforms in order, and the rest of the description."""
    steps: dict[int, _Step] = {}
    rest = {}
    for path, text in description.items():
        found = _STEP.fullmatch(path)
        step = steps.setdefault(int(found[1]), _Step(int(found[1]), found[2], {})) if found else None
        if found and step and step.name == found[2]:
            step.attributes[found[3] or ""] = text
        else:
            rest[path] = text
    return [steps[place] for place in sorted(steps)], rest


def _step_differences(before: Sequence[_Step], now: Sequence[_Step]) -> list[str]:
    names = [Counter(step.name for step in steps) for steps in (before, now)]
    repeated = {name for counts in names for name, count in counts.items() if count > 1}
    differences = []
    for old, new in _aligned(before, now):
        if old and new:
            label = f"transforms[{new.place}] {new.name}" if new.name in repeated else new.name
            differences += _attribute_differences(label, old.attributes, new.attributes)
        elif new:
            differences.append(f"{new.name} inserted at transforms[{new.place}]")
        elif old:
            differences.append(f"{old.name} removed from transforms[{old.place}]")
    return differences


#: Steps are paired if they are equal; those between them if they have the same name.
_ALIKE: tuple[Callable[[_Step], Hashable], ...] = (
    lambda step: (step.name, frozenset(step.attributes.items())),
    lambda step: step.name,
)


def _aligned(
    before: Sequence[_Step], now: Sequence[_Step], alike: Sequence[Callable[[_Step], Hashable]] = _ALIKE
) -> list[tuple[_Step | None, _Step | None]]:
    """Pairs the steps of two pipelines, in order. An unpaired step is paired with None."""
    if not alike:
        return [*((step, None) for step in before), *((None, step) for step in now)]
    pairs: list[tuple[_Step | None, _Step | None]] = []
    matcher = SequenceMatcher(None, [*map(alike[0], before)], [*map(alike[0], now)], autojunk=False)
    for kind, i, to_i, j, to_j in matcher.get_opcodes():
        old, new = before[i:to_i], now[j:to_j]
        pairs += zip(old, new, strict=True) if kind == "equal" else _aligned(old, new, alike[1:])
    return pairs


#: An element of a list among the attributes, such as ``_loader.readers[1]``.
_ELEMENT = re.compile(r"(.*?\[\d+\])\..*", re.DOTALL)


def _whole_elements(before: Attributes, now: Attributes) -> dict[str, str]:
    """The elements of lists that only one side has, each with ``"is gone"`` or ``"is new"``."""
    found: dict[str, str] = {}
    for mine, others, what in ((before, now, "is gone"), (now, before, "is new")):
        elements = {element[1] for name in mine if (element := _ELEMENT.fullmatch(name))}
        found.update({e: what for e in elements if not any(name.startswith(e) for name in others)})
    return found


def _is_shown_by_parts(name: str, before: Attributes, now: Attributes) -> bool:
    """Whether this is the hash of code, and something named within the code differs too, which is reported instead."""
    if not (before.get(name, "").startswith("code ") and now.get(name, "").startswith("code ")):
        return False
    within = (f"{name}'s ", f"{name}.", f"{name}[")
    return any(part.startswith(within) and before.get(part) != now.get(part) for part in {*before, *now})


def _attribute_differences(label: str, before: Attributes, now: Attributes) -> list[str]:
    differences = []
    whole = _whole_elements(before, now)
    shifted = []  # lists of readers: those behind the one that was installed have other places
    for element, what in sorted(whole.items()):
        loader, _, reader = element.rpartition("readers[")
        unnamed = reader and now.get(f"{loader}auto_select") != "False"
        hint = ": name the readers that count, as in reader='NibabelReader'" if unnamed else ""
        shifted += [f"{loader}readers["] if unnamed else []
        differences.append(f"{'.'.join(part for part in (label, element) if part)} {what}{hint}")
    for name in dict.fromkeys([*before, *now]):
        found = _ELEMENT.fullmatch(name)
        if (found and found[1] in whole) or _is_shown_by_parts(name, before, now) or name.startswith(tuple(shifted)):
            continue
        old, new = (attributes.get(name, "not there") for attributes in (before, now))
        if old != new:
            differences.append(f"{'.'.join(part for part in (label, name) if part)} {old} → {new}")
    return differences
