"""DDP: each rank gets what it would get alone with the same seeds, and continues with its own state."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from monai.utils import first, set_determinism
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from monai_gds import GDSDataLoader, GDSDataset, rank_states
from tests.fresh import Interpreter
from tests.loader.crew.test_programs import KEYS, Volume, crops
from tests.loader.test_resume import seen_by_lightning

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
    loader = GDSDataLoader(dataset, 1, batch_size=2, sampler=sampler, programs="check")
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


# Continuing in the middle of an epoch


class Draw(mt.RandomizableTransform):  # type: ignore[misc]
    def __call__(self, item: Any) -> Any:
        return {**item, "drawn": self.R.rand()}


def seeded(folder: Path, rank: int, num_workers: int, seed: int) -> GDSDataLoader:
    """The loader of a rank, which is seeded otherwise than the other one."""
    dataset = GDSDataset(list(range(12)), mt.Compose([Volume(), Draw()]), folder, "cpu")
    set_determinism(seed + rank)
    sampler: Any = DistributedSampler(dataset, RANKS, rank)
    return GDSDataLoader(dataset, num_workers, batch_size=2, sampler=sampler)


def seen(batch: Any) -> tuple[list[int], list[float]]:
    return batch["n"].tolist(), batch["drawn"].tolist()


def and_drawn(batch: Any) -> tuple[list[int], list[float], float]:
    """The batch, and a number that its training draws."""
    return *seen(batch), float(torch.rand(()))


def fit(rank: int, folder: Path, port: int) -> list[list[Any]]:
    """What a rank of Lightning's DDP sees in two epochs, and what it sees from their third step on, continued.

    Without workers, and then with one.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    found = []
    for num_workers, continues in product((0, 1), (False, True)):
        seed, path = (50, folder / f"{num_workers}/step=2.ckpt") if continues else (3, None)
        given = {"train_dataloaders": seeded(folder / "cache", rank, num_workers, seed), "ckpt_path": path}
        settings = {"max_epochs": 2, "devices": RANKS, "strategy": "ddp"}
        shown, trainer = seen_by_lightning(and_drawn, folder / str(num_workers), given, rank_states(), **settings)
        found.append(shown)
        trainer.strategy.teardown()
    del trainer
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_each_rank_continues_an_epoch_of_lightnings(tmp_path: Path, interpreter: Interpreter) -> None:
    pytest.importorskip("lightning", reason="this machine has no Lightning")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        ranks = [stack.enter_context(interpreter.process()) for _ in range(RANKS)]
        for rank, process in enumerate(ranks):
            process.start(fit, rank, tmp_path, port)
        for whole, continued, with_worker, continued_with_worker in [process.result() for process in ranks]:
            assert len(whole) == len(with_worker) == 6
            assert continued == whole[2:]
            assert continued_with_worker == with_worker[2:]


def checkpointed(rank: int, folder: Path) -> tuple[list[Any], list[Any]]:
    """The rest of an epoch, and what a loader gives that was loaded by torch's distributed checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    loader = seeded(folder / "cache", rank, 0, 3)
    batches = iter(loader)
    next(batches), torch.rand(())
    dcp.save({f"loader of rank {rank}": loader}, checkpoint_id=folder / "checkpoint")
    rest = [(*seen(batch), float(torch.rand(()))) for batch in batches]
    again = seeded(folder / "cache", rank, 0, 9)
    dcp.load({f"loader of rank {rank}": again}, checkpoint_id=folder / "checkpoint")
    continued = [(*seen(batch), float(torch.rand(()))) for batch in again]
    dist.barrier()
    dist.destroy_process_group()
    return rest, continued


def test_a_distributed_checkpoint_holds_the_loader_of_each_rank(tmp_path: Path, interpreter: Interpreter) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(interpreter.process()) for _ in range(RANKS)]
        for rank, process in enumerate(ranks):
            process.start(checkpointed, rank, tmp_path)
        for rest, continued in [process.result() for process in ranks]:
            assert len(rest) == 2
            assert continued == rest


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_state_of_another_rank_is_told_and_gives_this_ranks_items(tmp_path: Path, num_workers: int) -> None:
    def begun(rank: int) -> tuple[dict[str, Any], list[Any]]:
        loader = seeded(tmp_path, rank, num_workers, 3)
        batches = iter(loader)
        next(batches)
        return loader.state_dict(), [seen(batch) for batch in batches]

    (state, other), (mine, rest) = begun(0), begun(1)
    loader = seeded(tmp_path, 1, num_workers, 3)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"rank 0 of 2, and this is rank 1 of 2.*monai_gds\.rank_states\(\)") as told:
        found = [seen(batch) for batch in loader]
    assert [one.filename for one in told] == [__file__]
    assert [numbers for numbers, _ in found] == [numbers for numbers, _ in rest]
    assert found != rest
    assert not {value for _, drawn in found for value in drawn} & {value for _, drawn in other for value in drawn}
    loader = seeded(tmp_path, 1, num_workers, 9)
    loader.load_state_dict({"of_ranks": [state, mine]})
    assert [seen(batch) for batch in loader] == rest


def test_the_state_of_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    loader = seeded(tmp_path, 0, 0, 3)
    state = {**loader.state_dict(), "rank": (0, 3)}
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="rank 0 of 3, and this is rank 0 of 2.*other items") as told:
        first(loader)
    assert [one.filename for one in told] == [__file__]
