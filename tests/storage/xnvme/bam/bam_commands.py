"""What the tests of xnvme-bam drive: commands one by one, the backend, and software controllers that misbehave."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from monai_gds.storage import Storage, open_storage
from monai_gds.storage.xnvme.bam.queues import BamQueue, CudaKernel, Pool
from monai_gds.storage.xnvme.bam.software_controller import UNRECOVERED_READ, Entry, SoftwareController
from monai_gds.storage.xnvme.libxnvme import Completion
from tests.storage.xnvme.bam.host_kernel import HostBamBackend, HostKernel

CPU = torch.device("cpu")

BLOCK = 512
DISK_BYTES = 24 << 20


def opened(target: str, **options: Any) -> Storage:
    """The backend's storage."""
    options = {"controller": "software", "seconds": 20.0, **options}
    if target == "cpu":
        return Storage(HostBamBackend(CPU, **options))
    return open_storage("xnvme-bam", target, **options)


class Watching(SoftwareController):
    """Notes what it is sent."""

    def __init__(self, *arguments: Any) -> None:
        self.opcodes: dict[int, int] = {}
        self.most_at_once = 0
        super().__init__(*arguments)

    def answer(self, queue: Any, entries: Sequence[Entry]) -> None:
        self.most_at_once = max(self.most_at_once, len(entries))
        for entry in entries:
            self.opcodes[entry.opcode] = self.opcodes.get(entry.opcode, 0) + 1
        super().answer(queue, entries)


class Commands:
    """Queues of a controller, and the reads of one block range each."""

    def __init__(
        self, where: int | str, image: Path, pairs: int, depth: int, slots: int, transfer: int,
        make: type[SoftwareController] = Watching, seconds: float = 20.0,
    ) -> None:  # fmt: skip
        target = torch.device("cuda", 0) if where == "gpu" else CPU
        kernel = CudaKernel(target) if isinstance(where, str) else HostKernel(where)
        self.image, self.transfer = image, transfer
        self.controller: Any = make(str(image), target, BLOCK, transfer)
        self.pool = Pool(self.controller, target, transfer, slots)
        self.queue = BamQueue(self.controller, kernel, self.pool, pairs, depth, seconds, target)

    def close(self) -> None:
        assert not self.queue.outstanding
        self.queue.close()
        self.pool.close()
        self.controller.close()

    def read(self, ranges: Sequence[tuple[int, int]], at_once: int | None = None) -> list[Completion]:
        """Reads ranges of blocks, no two alike, and checks the bytes of those that succeeded.

        As one completes, the next one is begun, so that ``at_once`` are under way; by default all of them, at most one
        per slot.
        """
        to_come, at_once = list(ranges), at_once or len(ranges)
        bounces: dict[Any, Any] = {}
        slots = self.pool.data.tensor.numpy().reshape(self.pool.slots, -1)
        done: list[Completion] = []
        while len(done) < len(ranges):
            while to_come and len(bounces) < at_once:
                lba, blocks = to_come.pop(0)
                bounce = bounces[lba, blocks] = self.pool.take()
                assert bounce is not None
                slots[self.pool.slot(bounce.address)] = 0xA5
                self.queue.read((lba, blocks), lba, blocks, bounce.address)
            for completion in self.queue.poll():
                bounce = bounces.pop(completion.tag)
                if not completion.status:
                    self._check(completion.tag, slots[self.pool.slot(bounce.address)].tobytes())
                self.pool.give_back(bounce)
                done.append(completion)
        return done

    def _check(self, tag: tuple[int, int], slot: bytes) -> None:
        lba, blocks = tag
        with self.image.open("rb") as f:
            expected = os.pread(f.fileno(), blocks * BLOCK, lba * BLOCK)
        assert slot[: len(expected)] == expected, tag
        assert not slot[len(expected) :].strip(b"\xa5")


@contextmanager
def commands(*arguments: Any, **more: Any) -> Iterator[Commands]:
    with closing(Commands(*arguments, **more)) as made:
        yield made


def some(count: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    """Ranges of blocks, no two alike."""
    dice = random.Random(seed)
    found: set[tuple[int, int]] = set()
    while len(found) < count:
        blocks = dice.randint(1, most)
        found.add((dice.randint(0, DISK_BYTES // BLOCK - blocks), blocks))
    return sorted(found, key=lambda _: dice.random())


# What a controller can do wrong. Each takes the fault back by `sound`.


class Faulty(SoftwareController):
    sound = False
    lba = 0

    def _is_hit(self, entry: Entry) -> bool:
        return not Faulty.sound and entry.lba <= Faulty.lba < entry.lba + entry.blocks


class Failing(Faulty):
    def execute(self, entry: Entry) -> int:
        return UNRECOVERED_READ if self._is_hit(entry) else super().execute(entry)


class Losing(Faulty):
    def answer(self, queue: Any, entries: Sequence[Entry]) -> None:
        super().answer(queue, [entry for entry in entries if not self._is_hit(entry)])


class Silent(Faulty):
    def answer(self, queue: Any, entries: Sequence[Entry]) -> None:
        if Faulty.sound:
            super().answer(queue, entries)


class Confused(Faulty):
    """Completes a command that was never submitted, in place of one that was."""

    def answer(self, queue: Any, entries: Sequence[Entry]) -> None:
        rest = [entry for entry in entries if not self._is_hit(entry)]
        if len(rest) < len(entries):
            queue.post(queue.depth - 1, 0)
        super().answer(queue, rest)


class Shuffling(SoftwareController):
    def answer(self, queue: Any, entries: Sequence[Entry]) -> None:
        super().answer(queue, random.sample(entries, len(entries)))


class Delaying(SoftwareController):
    """Keeps some commands back for a while, and completes them after later ones."""

    def __init__(self, *arguments: Any) -> None:
        self._kept: list[tuple[float, Any, Entry]] = []
        super().__init__(*arguments)

    def answer(self, queue: Any, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._kept.append((time.monotonic() + random.choice([0, 0, 0.02]), queue, entry))

    def look(self) -> bool:
        found = super().look()
        now = time.monotonic()
        for kept in [kept for kept in self._kept if kept[0] <= now]:
            self._kept.remove(kept)
            SoftwareController.answer(self, kept[1], [kept[2]])
        return found or bool(self._kept)


class Withholding(SoftwareController):
    """Completes a command only once it has another one, until it was told that no more will come."""

    def __init__(self, *arguments: Any) -> None:
        self.to_come = 0
        self._kept: list[tuple[Any, Entry]] = []
        super().__init__(*arguments)

    def answer(self, queue: Any, entries: Sequence[Entry]) -> None:
        self.to_come -= len(entries)
        self._kept += [(queue, entry) for entry in entries]
        ready = len(self._kept) - (self.to_come > 0)
        for queue, entry in self._kept[:ready]:
            super().answer(queue, [entry])
        del self._kept[:ready]
