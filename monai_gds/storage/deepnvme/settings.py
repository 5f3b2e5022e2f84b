"""The settings of a DeepNVMe handle: their defaults, their limits, and what DeepSpeed's tuner prints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from monai_gds.storage.files import ALIGNMENT

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Settings:
    """The settings of a handle, by DeepSpeed's names and in the order of its arguments.

    The defaults were measured with ``python -m tools.bench tune --mb-size 256`` on a virtual disk and 2 cores, beside
    other work (2026-11-21). Only ``block_size`` made a difference, and only for stores: 1.72 GB/s with 8 MiB, 1.33 with
    1 MiB (median of eleven turns). Over all 72 combinations, every other setting, and this one for loads, changed the
    result by no more than a tenth. The command finds the settings that suit another drive.

    Args:
        block_size: bytes per transfer, a multiple of 4096.
        queue_depth: transfers in flight per thread of a handle.
        single_submit: one system call per transfer instead of one for many.
        overlap_events: submit the next transfer as soon as one has finished instead of when all have. Off by default:
            DeepSpeed then refills its control blocks while the kernel still works on them.
        intra_op_parallelism: threads among which one operation is divided.

    Raises:
        ValueError: a value that DeepNVMe does not work with; the message names it.
    """

    block_size: int = 8 << 20
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = False
    intra_op_parallelism: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "intra_op_parallelism"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, not {value!r}")
        for name in ("single_submit", "overlap_events"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, not {getattr(self, name)!r}")
        if self.block_size % ALIGNMENT:
            raise ValueError(f"block_size must be a multiple of {ALIGNMENT} bytes (O_DIRECT), not {self.block_size}")
        if self.block_size * self.queue_depth > _INT_MAX:  # DeepSpeed multiplies them in 32 bits
            raise ValueError(
                f"block_size times queue_depth must stay below 2 GiB, and {self.block_size} times "
                f"{self.queue_depth} does not"
            )
        if self.intra_op_parallelism > 64:
            raise ValueError(f"intra_op_parallelism must be at most 64, not {self.intra_op_parallelism}")

    @classmethod
    def chosen(cls, tuned: str | os.PathLike[str] | Mapping[str, Any] | None, by_name: Mapping[str, Any]) -> Settings:
        """The tuned settings (see :meth:`tuned`) or the defaults, except for those given by name (not None)."""
        base = cls() if tuned is None else cls.tuned(tuned)
        return replace(base, **{name: value for name, value in by_name.items() if value is not None})

    @classmethod
    def tuned(cls, found: str | os.PathLike[str] | Mapping[str, Any]) -> Settings:
        """The settings that DeepSpeed's tuner ``ds_nvme_tune`` found.

        Args:
            found: a file with its output (lines before the JSON are skipped), or that JSON as a mapping:
                ``{"aio": {"block_size": …, "queue_depth": …, "single_submit": "false", "overlap_events": "true",
                "num_threads": …}}``, with or without the outer ``aio``.

        Raises:
            ValueError: it holds something else.
            OSError: the file cannot be read.
        """
        if isinstance(found, Mapping):
            values = found
        else:
            text = Path(found).read_text()
            try:
                values, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
            except ValueError:
                raise ValueError(f"{os.fspath(found)} holds no JSON: expected the output of ds_nvme_tune") from None
        inner = values.get("aio", values)
        if not isinstance(inner, Mapping):
            raise ValueError(f"tuned: expected settings by name, not {inner!r}")
        named = {"intra_op_parallelism" if key == "num_threads" else key: value for key, value in inner.items()}
        unknown = sorted(set(named) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"tuned: unknown setting {unknown[0]!r}; there are {[f.name for f in fields(cls)]}")
        return cls(**{key: {"true": True, "false": False}.get(value, value) for key, value in named.items()})
