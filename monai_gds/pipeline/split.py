"""The split of a MONAI pipeline: what is computed once and cached, and what runs in every epoch.

Used by the dataset. The split is that of MONAI's ``PersistentDataset``, before the first random transform, with
one difference: MONAI treats a nested ``Compose`` as random whatever it holds, so everything from it on would run in
every epoch. Here a nested ``Compose`` is split too, where that is equivalent.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from types import MethodType
from typing import Any, Literal

import torch
from monai.transforms import Compose, MapTransform, Randomizable, Transform, apply_transform
from monai.transforms.compose import execute_compose
from monai.transforms.traits import RandomizableTrait

from monai_gds.base import stages
from monai_gds.errors import warn
from monai_gds.pipeline.columns import watched
from monai_gds.pipeline.parts import flat, name_of, parts
from monai_gds.pipeline.steady import Steady

#: What a copy of random transforms shares with them.
_SHARED = (torch.nn.Module, torch.utils.data.Dataset, MethodType)


class Split:
    """A ``Compose`` in two halves. It is not changed, so seeds set on it reach its transforms.

    Attributes:
        compose: the pipeline.
        given: its transforms, when this was made.
        deterministic: the transforms before the first random one, flattened.
        rest: what runs in every epoch.
        inner: the first of these that are the transforms of other datasets, which the item comes from.
        steady: watches the deterministic ones, where what changes from call to call must not be cached; else None.
    """

    def __init__(self, compose: Compose, steady: bool = False, inner: Sequence[Callable[..., Any]] = ()) -> None:
        self.compose, self.given, self.inner = compose, compose.transforms, tuple(inner)
        names = ("map_items", "unpack_items", "lazy", "overrides", "log_stats")
        self._settings = {name: getattr(compose, name) for name in names}
        self._own, self.rest = _divide(compose) if in_order(compose) else ([], [compose])
        self.deterministic = [*self.inner, *self._own]
        self.steady = Steady(self.deterministic) if steady else None

    def is_of(self, compose: Compose) -> bool:
        """Whether this is the split of a pipeline as it is now."""
        return self.compose is compose and self.given is compose.transforms

    def settings(self) -> dict[str, Any]:
        """The settings of the pipeline that change the result of the deterministic half."""
        return {k: v for k, v in self._settings.items() if k != "log_stats"}

    def before(self, item: Any) -> Any:
        """Runs the deterministic transforms. Pending operations of lazy ones are applied at the end, as in MONAI."""
        # threading=True copies transforms that are not thread-safe: several threads may load at once. MONAI's Dataset
        # runs the transforms themselves.
        threading = self.steady is None

        def run(item: Any) -> Any:
            for step in self._each(self.inner):
                item = step(item)
            return execute_compose(item, self._each(self._own), threading=threading, **self._settings)

        return watched(item, run)

    def _each(self, transforms: Sequence[Callable[..., Any]]) -> Sequence[Callable[..., Any]]:
        """Transforms that are measured and watched, as far as somebody does."""
        transforms = stages.each("transforms", transforms)
        return transforms if self.steady is None else self.steady.each(transforms)

    def again(self, transforms: Sequence[Callable[..., Any]], item: Any) -> Any:
        """Runs deterministic transforms as :meth:`before` does, without a word of what fails."""
        return execute_compose(item, transforms, threading=True, **{**self._settings, "log_stats": False})

    def steps(self) -> list[Callable[..., Any]]:
        """The steps that run in every epoch: nested ``Compose`` are taken apart where that is equivalent."""
        return _steps(self.compose, self.rest)

    def first(self, count: int) -> Compose:
        """The pipeline up to the first ``count`` steps."""
        return with_only(self.compose, [*self._own, *self.steps()[:count]])

    def step(self, transform: Callable[..., Any], item: Any) -> Any:
        """Runs one step, as :meth:`after` would."""
        stages.enter("random transforms", type(transform).__name__)
        return apply_transform(transform, item, **{**self._settings, "log_stats": False})

    def after(self, item: Any, done: int = 0) -> Any:
        """Runs everything from the first random transform on, without the first ``done`` steps."""
        transforms: Sequence[Callable[..., Any]] = _without(self.compose, self.rest, done) if done else self.rest
        if not done and not transforms:
            return item
        if stages.watching():  # nested transforms are measured by their own names
            transforms = stages.each("random transforms", _steps(self.compose, transforms))
        return execute_compose(item, transforms, **self._settings)

    def copied(self) -> Split:
        """A split with its own copy of the random half. Others may be drawing from this one meanwhile.

        Networks, datasets and objects of methods stay shared, and so does what cannot be copied, such as a lock.
        """
        memo: dict[int, Any] = {id(transform): transform for transform in self.deterministic}
        found = [part for transform in self.rest for part in parts(transform)]
        for part in reversed(found):  # what is within others comes first
            try:
                if isinstance(part, _SHARED) and not isinstance(part, Transform):
                    memo[id(part)] = part
                elif isinstance(part, torch.Generator):
                    memo[id(part)] = part.clone_state()
                else:
                    deepcopy(part, memo)
            except Exception as e:
                if "during iteration" in str(e):  # another thread has just set a new attribute
                    return self.copied()
                memo[id(part)] = part
                if isinstance(part, (Transform, RandomizableTrait)):
                    warn(f"{name_of(part)} cannot be copied, so loops that run at the same time share it: {e}")
        mine = copy(self)
        mine.compose, mine.rest = deepcopy((self.compose, self.rest), memo)
        for part in found:
            if isinstance(part, Randomizable) and "R" not in vars(part) and memo.get(id(part), part) is not part:
                memo[id(part)].R = memo[id(part.R)]  # unseeded: it would draw from its class's
        return mine


def loaded_keys(transforms: Iterable[Callable[..., Any]]) -> frozenset[str] | Literal["all"]:
    """The keys of an item under which transforms load files; "all" if one loads the item itself.

    A transform loads if the name of its class, or of one of its bases, begins with ``Load``.
    """
    found: set[str] = set()
    for transform in flat(transforms):
        if any(cls.__name__.startswith("Load") for cls in type(transform).__mro__):
            if not isinstance(transform, MapTransform):
                return "all"
            found |= {key for key in transform.keys if isinstance(key, str)}
    return frozenset(found)


def before_cuda(steps: Sequence[Callable[..., Any]], names_too: bool) -> int:
    """How many steps come before the first that holds something on a CUDA device or, if ``names_too``, names one."""
    uses = _names_cuda if names_too else _is_on_cuda
    return next((i for i, step in enumerate(steps) if any(map(uses, parts(step)))), len(steps))


def _names_cuda(part: Any) -> bool:
    if isinstance(part, (torch.device, str)):
        return re.fullmatch(r"cuda(:\d+)?", str(part)) is not None
    return _is_on_cuda(part)


def _is_on_cuda(part: Any) -> bool:
    if isinstance(part, torch.Generator):
        return part.device.type == "cuda"
    return isinstance(part, torch.Tensor) and part.is_cuda


def cacheable_after(rest: Sequence[Callable[..., Any]]) -> int:
    """How many deterministic transforms run in every epoch only because they follow a callable, not a Transform."""
    if not rest or isinstance(rest[0], (Transform, RandomizableTrait)):
        return 0
    return sum(1 for _ in itertools.takewhile(lambda t: not _is_random(t), rest[1:]))


def uncached(split: Split) -> str:
    """A warning if nothing of a pipeline is cached, or less than could be; else empty."""
    rest = split.rest
    if not split.deterministic:
        why = "there is no transform" if not rest else (
            f"the pipeline begins with {name_of(rest[0])}, and only what comes before the first random transform (or "
            "callable that is not a MONAI Transform) is"
        )  # fmt: skip
        return f"nothing is cached: {why}"
    later = cacheable_after(rest)
    if not later:
        return ""
    return (
        f"{name_of(rest[0])} is not a Transform of MONAI's and counts as random, so what comes after it runs in "
        f"every epoch, though the next {later} could be cached: use Lambda or Lambdad, or derive it from "
        "monai.transforms.Transform"
    )


def _divide(compose: Compose) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    done: list[Callable[..., Any]] = []
    for i, transform in enumerate(compose.transforms):
        later = list(compose.transforms[i + 1 :])
        if not in_order(transform):
            if _is_random(transform):
                return done, [transform, *later]
            done.append(transform)
        elif _equivalent(compose, transform):
            head, rest = _divide(transform)
            done.extend(head)
            if rest:
                return done, [with_only(transform, rest), *later]
        elif _holds_random(transform):
            return done, [transform, *later]
        else:
            done.append(transform)
    return done, []


def in_order(transform: Any) -> bool:
    """Whether this is a Compose that runs all its transforms in order, unlike OneOf and RandomOrder."""
    return isinstance(transform, Compose) and type(transform).__call__ is Compose.__call__


def _is_random(transform: Any) -> bool:
    return isinstance(transform, RandomizableTrait) or not isinstance(transform, Transform)


def _holds_random(compose: Compose) -> bool:
    return any(_holds_random(t) if in_order(t) else _is_random(t) for t in compose.transforms)


def _equivalent(outer: Compose, inner: Compose) -> bool:
    """Whether running the inner's transforms one by one in the outer is equivalent.

    Lazy pipelines stay whole, since a Compose applies pending operations at its end.
    """
    same = outer.map_items == inner.map_items and outer.unpack_items == inner.unpack_items
    return same and outer.lazy is False and inner.lazy is False


def _steps(compose: Compose, transforms: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    found: list[Callable[..., Any]] = []
    for transform in transforms:
        if isinstance(transform, Compose) and in_order(transform) and _equivalent(compose, transform):
            found.extend(_steps(transform, transform.transforms))
        else:
            found.append(transform)
    return found


def _without(compose: Compose, transforms: Sequence[Callable[..., Any]], done: int) -> list[Callable[..., Any]]:
    """Transforms without their first ``done`` steps, nested as they were."""
    for i, transform in enumerate(transforms):
        if not done:
            return list(transforms[i:])
        inner = _steps(compose, [transform])
        if len(inner) > done and isinstance(transform, Compose):
            return [with_only(transform, _without(transform, transform.transforms, done)), *transforms[i + 1 :]]
        done -= len(inner)
    return []


def with_only(compose: Compose, transforms: Iterable[Callable[..., Any]]) -> Compose:
    """A copy of a Compose with these transforms only. A constructor would draw seeds."""
    tail = copy(compose)
    tail.transforms = tuple(transforms)
    return tail
