"""Fuzzing by coverage: bytes that reach new code of the readers are changed further.

It needs atheris, in this Python or in a folder named by ``ATHERIS``; without it there is nothing to run. Checksums are
made right before a record is read, so that the fuzzer need not guess them. What it finds goes to ``corpus/``, which
every run of the tests reads again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines import ROOT
from tests.soak.soak import Soak
from tests.soak.tally import Tally

__all__ = ["CORPUS", "run", "run_again"]

#: Inputs that once found something, by the name of their reader.
CORPUS = Path(__file__).with_name("corpus")

READERS = ("record", "map")


def run(soak: Soak) -> None:
    """The corpus; then the fuzzer for the rest of the time, reader by reader."""
    soak.call(run_again, soak.folder / "again")
    if soak.quick:
        return
    if not (os.environ.get("ATHERIS") or importlib.util.find_spec("atheris")):
        pytest.skip("atheris is not installed")
    for number, reader in enumerate(READERS, 1):
        fuzz(soak, reader, max(5.0, soak.share(number / len(READERS)) - time.monotonic()))


def run_again(folder: Path) -> Tally:
    """Reads what is in the corpus."""
    tally = Tally()
    folder.mkdir()
    for reader in READERS:
        read = reader_of(reader, folder)
        for file in sorted((CORPUS / reader).glob("*")):
            tally.trials += 1
            try:
                read(file.read_bytes())
            except Exception:
                tally.found("lost", f"{file.name}: {traceback.format_exc()[-1500:]}")
    return tally


def fuzz(soak: Soak, reader: str, seconds: float) -> None:
    """Runs libFuzzer in a process of its own, again behind each input that it stopped at."""
    folder = soak.folder / reader
    for name in ("corpus", "found", "files"):
        (folder / name).mkdir(parents=True)
    end, seen = time.monotonic() + seconds, set[str]()
    while (left := int(end - time.monotonic())) > 3:
        before = set((folder / "found").iterdir())
        paths = [str(ROOT), os.environ.get("ATHERIS", ""), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [
                sys.executable, "-W", "ignore", "-m", "tests.soak.fuzz", reader, str(folder / "files"),
                f"-max_total_time={left}", "-timeout=20", "-rss_limit_mb=6000", "-max_len=40000",
                "-print_final_stats=1", f"-artifact_prefix={folder}/found/", str(folder / "corpus"),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=left + 120,
        )  # fmt: skip
        for line in done.stderr.splitlines():
            if line.startswith("stat::number_of_executed_units:"):
                soak.tally.trials += int(line.split()[-1])
        if done.returncode == 0:
            return
        said = done.stdout.partition("Uncaught Python exception")[2]
        where = [line.strip() for line in said.splitlines() if line.strip().startswith('File "')][-1:]
        new = set((folder / "found").iterdir()) - before
        kind = "hangs" if any("timeout" in path.name for path in new) else "lost" if where else "crashes"
        if (place := f"{kind} {where}") not in seen:
            seen.add(place)
            soak.tally.found(kind, f"{reader}: {said[-2500:] or done.stderr[-1500:]}")
            for path in new:
                if os.environ.get("SOAK_KEEP"):
                    (Path(os.environ["SOAK_KEEP"]) / f"{reader}-{path.name}").write_bytes(path.read_bytes())
        if not new:
            return  # it cannot even start


# ---------------------------------------------------------------------------------------------------------------------
# The readers


def reader_of(name: str, folder: Path) -> Callable[[bytes], None]:
    """A function that reads bytes as a reader would, and raises what nobody expects."""
    return _record_reader(folder) if name == "record" else _map_reader(folder)


def _record_reader(folder: Path) -> Callable[[bytes], None]:
    """Reads a record in every way. The first byte chooses the file that the others are written over."""
    import warnings

    from monai_gds.cache.header import SUFFIX, digest_of
    from monai_gds.errors import CacheWarning
    from tests.soak.hostile import WAYS
    from tests.soak.made import enter

    enter()
    warnings.simplefilter("ignore", CacheWarning)
    path = folder / f"{digest_of([])}{SUFFIX}"

    def read(data: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(record_of(data))
        for way in WAYS.values():
            way(path)

    return read


def record_of(data: bytes) -> bytes:
    """A record with a right header checksum and, where they can be made, right checksums of its entries."""
    import json

    from monai_gds.cache.header import CRC
    from tests.soak.grammar import Parts

    text, _, rest = data.partition(b"\0")
    with contextlib.suppress(Exception):
        header = json.loads(text)
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        parts, at = {}, 0
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            parts[name], at = rest[at : at + end - begin].ljust(min(end - begin, 1 << 20), b"\0"), at + end - begin
        metadata = {"format": "monai_gds", "version": "2", "checksum": "wsum64", **header["__metadata__"]}
        metadata = {**metadata, "checksums": {}, "key": {"parts": [], "sources": {}, "item": "", "pipeline": "00"}}
        return Parts(metadata, entries, parts).to_bytes()
    whole = bytearray(text + b" " * (-(8 + len(text)) % 4096))
    whole[CRC] = b"00000000"
    whole[CRC] = b"%08x" % zlib.crc32(whole)
    return len(whole).to_bytes(8, "little") + bytes(whole) + rest


def _map_reader(folder: Path) -> Callable[[bytes], None]:
    """Loads a block map, and uses what was accepted."""
    from monai_gds.errors import BlockMapError, MonaiGdsError
    from monai_gds.imagenet.source import open_images
    from monai_gds.storage.xnvme.block_map import BlockMap

    path = folder / "map.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(BlockMapError):
            found = BlockMap.load(path)
            found.save(folder / "again.json")
            found.verify(folder)
        with contextlib.suppress(MonaiGdsError):
            open_images(path)

    return read


def seeds(reader: str) -> list[bytes]:
    """What the fuzzer begins with."""
    if reader == "map":
        return [b'{"train/a/1.JPEG":{"startblock":2048,"endblock":2055}}']
    import json

    tree = {"image": {"$tensor": {"name": "image"}}, "a": {"$array": ["<f4", [2], 0]}, "b": {"$tuple": [1, "x"]}}
    tiles = {"dtype": "U8", "shape": [1, 2, 2, 2], "tile": [2, 2, 2], "filter": "shuffle", "codec": "lz4", "palette": 0}
    packed = {"image": {"$tensor": {"name": "image", "tiles": tiles}}}
    found = []
    for node, table in ((tree, False), (packed, True)):
        entries: dict[str, object] = {"__arrays": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}
        if table:
            entries = {"__tiles.image": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}
        entries["image"] = {"dtype": "U8", "shape": [32], "data_offsets": [8, 40]}
        header = {"__metadata__": {"tree": node}, **entries}
        found.append(json.dumps(header).encode() + b"\0" + bytes(40))
    return found


def main() -> None:
    """The fuzzer's own process."""
    import atheris  # type: ignore[import-not-found]

    reader, folder = sys.argv[1], Path(sys.argv[2])
    with atheris.instrument_imports(include=["monai_gds"]):
        read = reader_of(reader, folder)
    for number, data in enumerate(seeds(reader)):
        (Path(sys.argv[-1]) / f"seed{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *sys.argv[3:]], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
