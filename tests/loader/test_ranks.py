"""DDP: each rank gets what it would get alone with the same seeds."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from monai_gds import GDSDataLoader, GDSDataset
from tests.fresh import Interpreter
from tests.loader.test_programs import KEYS, Volume, crops

RANKS = 2


def batches(rank: int, folder: Path, kind: str, together: bool) -> list[tuple[list[int], str]]:
    """Two epochs of a rank: numbers of the items, and a digest of their voxels. Together, a model is trained."""
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if together:
        store = f"file://{folder}/store"
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(7)
    model: Any = torch.nn.Conv3d(1, 1, 3).to(device)
    if together:
        model = DistributedDataParallel(model)
    dataset = GDSDataset(list(range(6)), mt.Compose([Volume(), *crops()[1:]]), folder / "cache", device=str(device))
    sampler: Any = DistributedSampler(dataset, RANKS, rank)
    loader = GDSDataLoader(dataset, 2, batch_size=2, sampler=sampler, programs="check")
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            if together:
                model(batch["image"].as_tensor()).mean().backward()
            voxels = b"".join(batch[key].as_tensor().cpu().numpy().tobytes() for key in KEYS)
            found.append((batch["n"].tolist(), hashlib.sha256(voxels).hexdigest()))
    if together:
        del model  # gloo may wait for ever for a model that outlives its group
        dist.barrier()
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_together_get_what_each_gets_alone(kind: str, tmp_path: Path, interpreter: Interpreter) -> None:
    if kind == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"this machine has {torch.cuda.device_count()} CUDA devices, not {RANKS}")
    with ExitStack() as stack:
        ranks = [stack.enter_context(interpreter.process()) for _ in range(RANKS)]
        for rank, process in enumerate(ranks):
            process.start(batches, rank, tmp_path, kind, True)
        together = [process.result() for process in ranks]
        alone = [process.call(batches, rank, tmp_path, kind, False) for rank, process in enumerate(ranks)]
    assert together == alone
    assert {n for numbers, _ in together[0][:2] + together[1][:2] for n in numbers} == set(range(6))
    assert together[0] != together[1]
