"""The settings that held when a dataset was made, under which its items are computed for as long as it lives.

A user may call ``set_track_meta(False)`` before the training, as MONAI's tutorials do: with ``CacheDataset``, which
computes at once, that concerns the random half alone. Settings of a thread are switched around a computation. Those of
the whole process never are where threads of the user's run: a helper process computes there.
"""

from __future__ import annotations

import multiprocessing
from contextlib import AbstractContextManager, nullcontext

import torch

from monai_gds.pipeline.settings import applied, of_process
from monai_gds.shared.owner import this_process


def computing(differ: dict[str, tuple[str, str]], asked_by: str | None) -> AbstractContextManager[None]:
    """Where an item is computed, under the settings that held.

    Args:
        differ: how the present settings differ from them.
        asked_by: the process for which this one may be working.

    Raises:
        RuntimeError: those of the whole process differ, and it may be the user's.
    """
    if not differ:
        return nullcontext()
    if of_process(differ) and not _works_for_another(asked_by):
        raise RuntimeError(in_words(differ, "it cannot be computed in this process"))
    return applied(tuple((name, held) for name, (held, _) in differ.items()), only=True)


def in_words(differ: dict[str, tuple[str, str]], why: str) -> str:
    """An error's message that names both settings."""
    named = [f"{name} was {held} and is now {now}" for name, (held, now) in of_process(differ).items()]
    return (
        f"an item has to be computed under the settings that held when the dataset was made, and {why}: "
        f"{', '.join(named)}. Change settings before the dataset is made, or call dataset.populate() before the change"
    )


def _works_for_another(asked_by: str | None) -> bool:
    if asked_by is not None:
        return asked_by != this_process()
    # a worker of torch's loader; those of MONAI's may be threads of this process
    return torch.utils.data.get_worker_info() is not None and multiprocessing.current_process().daemon
