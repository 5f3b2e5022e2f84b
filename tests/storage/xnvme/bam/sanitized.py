"""The kernel of xnvme-bam in a program of its own, for compute-sanitizer on a machine with a GPU.

compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.storage.xnvme.bam.sanitized
compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.storage.xnvme.bam.sanitized
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from monai_gds.testing.tools import content
from tests.storage.xnvme.bam.bam_commands import (
    BLOCK,
    DISK_BYTES,
    Confused,
    Faulty,
    Losing,
    Shuffling,
    Watching,
    commands,
    some,
)


def main(where: str) -> None:
    """Batches of every kind, with every way that the kernel ends by."""
    on = "gpu" if where == "gpu" else int(where)
    with tempfile.TemporaryDirectory(prefix="monai-gds-bam-") as folder:
        image = Path(folder) / "disk.img"
        image.write_bytes(content(DISK_BYTES))
        for pairs, depth, slots, transfer in ((1, 2, 5, 4096), (3, 64, 400, 65536), (1, 1024, 1100, 4096)):
            for make in (Watching, Shuffling):
                with commands(on, image, pairs, depth, slots, transfer, make, 120.0) as made:
                    for seed in range(2):
                        done = made.read(some(slots, transfer // BLOCK, seed))
                        assert all(completion.status == 0 for completion in done)
        for make in (Losing, Confused):
            Faulty.lba = 1000
            with commands(on, image, 2, 8, 50, 4096, make, 5.0) as made:
                Faulty.sound = False
                done = made.read([*((n * 8, 8) for n in range(49)), (1000, 8)])
                assert any(completion.status < 0 for completion in done)
                Faulty.sound = True
                assert all(completion.status == 0 for completion in made.read(some(50, 8)))
    print("all right")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gpu")
