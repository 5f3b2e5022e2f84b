"""Training on several nodes: ranks that share a cache over a network, with copies on each node's own drive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from monai.transforms import Compose, EnsureTyped

from monai_gds import GDSDataset
from tests.loopdisk import needs_root, run
from tests.machines import ROOT

#: Two ranks on each of two nodes. Each tells what it did.
TRAINING = """
import json, os, sys
import torch, torch.distributed as dist
from monai.transforms import Compose, EnsureTyped, Lambdad
from torch.utils.data import DistributedSampler
from monai_gds import GDSDataLoader, GDSDataset

far, near = sys.argv[1:]
dist.init_process_group("gloo")
rank, computed = dist.get_rank(), []


def note(i):
    computed.append(i)
    return i


data = [{"image": torch.full((1, 32, 32, 32), float(i)), "i": i} for i in range(12)]
transform = Compose([EnsureTyped("image"), Lambdad("i", note)])
options = {"local_bytes": "100MB"}
dataset = GDSDataset(data, transform, far, "cpu", hash_transform=lambda _: b"same", local_dir=near, options=options)
filled = dataset.populate()
sampler = DistributedSampler(dataset)
loader = GDSDataLoader(dataset, batch_size=1, sampler=sampler)
seen = []
for epoch in range(6):
    sampler.set_epoch(epoch)
    for batch in loader:
        assert (batch["image"] == float(batch["i"][0])).all()
        seen.append(int(batch["i"][0]))
    dataset.flush()
    dist.barrier()
told = json.dumps([rank, filled.computed, computed, sorted(set(seen))])
os.write(1, f"RANK {told}\\n".encode())  # in one piece: torchrun starts python -u, and ranks share the pipe
dist.destroy_process_group()
"""


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, 10.213.0.1 and 10.213.0.2."""
    needs_root("ip")
    names = [f"gds{os.getpid()}{which}" for which in "ab"]
    with ExitStack() as stack:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                stack.callback(run, "ip", "netns", "del", name)
            run(
                "ip",
                "link",
                "add",
                "gds0",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "gds0",
                "netns",
                names[1],
            )
        except RuntimeError as e:
            pytest.skip(f"this machine makes no network namespaces: {e}")
        for n, name in enumerate(names, 1):
            run("ip", "-n", name, "addr", "add", f"10.213.0.{n}/24", "dev", "gds0")
            run("ip", "-n", name, "link", "set", "gds0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names


@pytest.mark.long
def test_two_nodes_fill_one_cache_and_keep_copies_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "gds0"}
    far, drives = tmp_path / "far", [tmp_path / "drive0", tmp_path / "drive1"]
    with two_hosts() as hosts:
        nodes = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, "-W", "ignore", "-m", "torch.distributed.run",
                 "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(n), "--master-addr", "10.213.0.1",
                 "--master-port", "29513", str(tmp_path / "train.py"), str(far), str(drives[n])],
                cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for n, host in enumerate(hosts)
        ]  # fmt: skip
        printed = [node.communicate(timeout=400)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    told = sorted(
        json.loads(line.partition("RANK ")[2]) for text in printed for line in text.splitlines() if "RANK " in line
    )
    assert [rank for rank, *_ in told] == [0, 1, 2, 3]
    assert {computed for _, computed, *_ in told} == {12}, "of all ranks together"
    assert sorted(i for _, _, computed, _ in told for i in computed) == list(range(12)), "each item once"
    records = {path.name for path in far.glob("*.safetensors")}
    assert len(records) == 12
    for n, drive in enumerate(drives):
        seen = {i for _, _, _, seen in told[2 * n : 2 * n + 2] for i in seen}
        copies = {path.name for path in drive.glob("*.safetensors")}
        assert len(copies) == len(seen), "what either rank of the node has read, once"
        assert all((drive / name).read_bytes() == (far / name).read_bytes() for name in copies)


@contextmanager
def nfs(exported: Path, where: Path) -> Iterator[Path]:
    """A folder of this machine, mounted by the kernel's NFS client from the kernel's NFS server."""
    needs_root("exportfs", "rpc.nfsd", "nfsv4.exportd", "mount.nfs4")
    if "nfs4" not in Path("/proc/filesystems").read_text():
        pytest.skip("this machine's kernel has no NFS")
    threads = Path("/proc/fs/nfsd/threads")
    if threads.exists() and threads.read_text().strip() != "0":
        pytest.skip("an NFS server runs on this machine, which is left alone")
    exported.mkdir()
    where.mkdir()
    client = f"127.0.0.1:{exported}"
    with ExitStack() as stack:
        try:
            run("exportfs", "-i", "-o", "rw,no_root_squash,insecure,fsid=213", client)
            stack.callback(run, "exportfs", "-u", client)
            answers = stack.enter_context(subprocess.Popen(["nfsv4.exportd", "--foreground"]))
            stack.callback(answers.terminate)
            run("rpc.nfsd", "-N", "3", "2")
            stack.callback(run, "rpc.nfsd", "0")
            run("mount", "-t", "nfs4", "-o", "soft,timeo=50", client, str(where))
        except RuntimeError as e:
            pytest.skip(f"this machine does not serve NFS: {e}")
        stack.callback(run, "umount", "-l", str(where))
        yield where


@pytest.mark.long
def test_a_cache_on_nfs_with_copies_on_the_own_drive(tmp_path: Path) -> None:
    data = [{"image": torch.full((1, 64, 64, 64), float(i))} for i in range(4)]
    with nfs(tmp_path / "exported", tmp_path / "mounted") as far:
        for _ in range(3):  # compute, read from afar, read from here
            with GDSDataset(data, Compose([EnsureTyped("image")]), far, "cpu", local_dir=tmp_path / "near") as made:
                assert all((made[i]["image"] == float(i)).all() for i in range(4))
        written = {path.name: path.read_bytes() for path in (tmp_path / "exported").glob("*.safetensors")}
        assert {path.name: path.read_bytes() for path in (tmp_path / "near").glob("*.safetensors")} == written
