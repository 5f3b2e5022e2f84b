"""Writes records by hand, following the format's specification."""

from __future__ import annotations

import json
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from monai_gds.base.checksum import checksum

__all__ = ["digest_of", "key_of_version_2", "version_2", "write"]


def digest_of(text: str) -> str:
    """32 hex digits."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


def key_of_version_2(
    item: str = "item", transform: str = "t", pipeline: str = "cafe0123", monai: str = "1.5.1", **sources: Any
) -> dict[str, Any]:
    """A key as records of version 2 store it; sources as ``path=(size, identity)``."""
    named = [[path, size, identity] for path, (size, identity) in sources.items()]
    parts = ["monai_gds 2", item, transform, monai, {"track_meta": True}, named, False]
    found = {path: [size, identity] for path, (size, identity) in sources.items()}
    return {"parts": parts, "sources": found, "pipeline": pipeline, "item": item, "monai": monai}


def version_2(folder: Path, key: dict[str, Any]) -> Path:
    """Writes a record of version 2 under its name."""
    digest = digest_of(json.dumps(key["parts"], separators=(",", ":")))
    return write(folder / f"{digest}.v2.safetensors", 2, key)


def write(path: Path, version: int, key: Any) -> Path:
    """Writes a record that holds the tensor ``image``, 4 x 256 float32 of ones. ``key`` may be its JSON as text."""
    image = torch.ones(4, 256)
    data = image.view(torch.uint8).reshape(-1)
    metadata = {
        "header_crc32": "00000000",
        "format": "monai_gds",
        "version": str(version),
        "checksum": "wsum64",
        "checksums": json.dumps({"image": f"{checksum(data):016x}"}),
        "key": key if isinstance(key, str) else json.dumps(key),
        "tree": json.dumps({"t": "image"}),
    }
    entry = {"dtype": "F32", "shape": [4, 256], "data_offsets": [0, 4096]}
    text = bytearray(json.dumps({"__metadata__": metadata, "image": entry}, separators=(",", ":")).encode())
    text.extend(b" " * (-(8 + len(text)) % 4096))
    text[33:41] = b"%08x" % zlib.crc32(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.numpy().tobytes())
    return path
