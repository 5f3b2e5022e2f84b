"""The deepnvme backend: every way in which DeepSpeed's real handle misreports or ends the process, and settings."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monai_gds.errors import StorageError
from monai_gds.storage import Reads, Storage, open_storage
from monai_gds.storage.deepnvme import Settings, aio, lanes, verified
from monai_gds.storage.deepnvme.aio import DeepNvmeBackend
from monai_gds.testing.disks import broken_disk
from monai_gds.testing.tools import bytes_of, content
from tests.storage.deepnvme.common import fill, need_deepnvme, opened

pytestmark = pytest.mark.long  # DeepSpeed's operator takes minutes to compile


@pytest.fixture
def storage() -> Iterator[Storage]:
    need_deepnvme()
    with opened("deepnvme", "cpu") as storage:
        yield storage


@pytest.mark.parametrize("overlap_events", [False, True])
@pytest.mark.parametrize("single_submit", [False, True])
def test_every_way_of_submitting(tmp_path: Path, single_submit: bool, overlap_events: bool) -> None:
    need_deepnvme()
    data = content((9 << 20) + 77)
    path = tmp_path / "file.bin"
    with opened(
        "deepnvme", "cpu", single_submit=single_submit, overlap_events=overlap_events, queue_depth=3
    ) as storage:
        storage.write(str(path), [data])
        assert path.read_bytes() == data
        dest = torch.zeros(len(data), dtype=torch.uint8)
        fill(storage, path, dest)
    assert bytes_of(dest) == data


# What the real handle does when something goes wrong.


def test_an_input_output_error_is_an_error_that_says_so(storage: Storage, tmp_path: Path) -> None:
    with broken_disk(tmp_path, content(4 << 20)) as path:
        dest = torch.zeros(4 << 20, dtype=torch.uint8)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            fill(storage, path, dest)
        assert str(path) in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_ends_in_an_error_and_not_the_process(tmp_path: Path) -> None:
    """Run in a child, because ``aio_handle`` was seen to end the process when the file is too short."""
    need_deepnvme()
    path = tmp_path / "file.bin"
    script = f"""
import os, threading, torch
from monai_gds.errors import StorageError
from monai_gds.storage import Reads, open_storage
from monai_gds.storage.deepnvme.aio import _AioLane
storage = open_storage("deepnvme", "cpu", threads=1)
transfer = _AioLane.transfer
def shrink_first(self, *asked):
    os.truncate({str(path)!r}, 8192)
    transfer(self, *asked)
_AioLane.transfer = shrink_first
open({str(path)!r}, "wb").write(bytes(1 << 20))
try:
    storage.fill(Reads.of({str(path)!r}, [(0, 1 << 20)]), [torch.ones(1 << 20, dtype=torch.uint8)]).wait()
except StorageError as e:
    print("caught:", e)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (said,) = done.stdout.splitlines()  # and nothing of DeepSpeed's
    assert said.startswith("caught:")
    assert "shorter" in said


def test_no_room_for_its_queues_is_an_error_and_not_the_end_of_the_process(storage: Storage, tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(1 << 20))
    depth = min(limit, (2**31 - 1) // 4096)
    with (
        opened("deepnvme", "cpu", block_size=4096, queue_depth=depth) as greedy,
        pytest.raises(StorageError, match="aio-max-nr"),
    ):
        fill(greedy, path, torch.zeros(1 << 20, dtype=torch.uint8))
    fill(storage, path, torch.zeros(1 << 20, dtype=torch.uint8))


def test_a_filter_of_system_calls_is_not_taken_for_a_lack_of_queues(tmp_path: Path) -> None:
    """In a child whose io_setup a seccomp filter refuses, as some containers' do."""
    need_deepnvme()
    number = {"x86_64": 206, "aarch64": 0}.get(platform.machine())
    if number is None:
        pytest.skip(f"the number of io_setup on {platform.machine()} is not known to this test")
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(1 << 20))
    script = f"""
import ctypes, struct, torch
from monai_gds.errors import StorageError
from monai_gds.storage.deepnvme.aio import DeepNvmeBackend
backend = DeepNvmeBackend(torch.device("cpu"), threads=1)
backend.open()
load, equal, give, refuse, allow = 0x20, 0x15, 0x06, 0x00050001, 0x7FFF0000
steps = (load, 0, 0, 0), (equal, 0, 1, {number}), (give, 0, 0, refuse), (give, 0, 0, allow)
steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(steps)))
libc = ctypes.CDLL(None)
assert not libc.prctl(38, 1, 0, 0, 0) and not libc.prctl(22, 2, program)
try:
    backend._new_lanes()
except StorageError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "may not call io_setup (Operation not permitted)" in done.stdout
    assert "aio-max-nr" not in done.stdout


def test_memory_that_cannot_be_locked_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    """In a child that gives up the right to lock more than 64 KiB."""
    need_deepnvme()
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(1 << 20))
    tmp_path.chmod(0o755)
    drop = "os.seteuid(65534)" if os.geteuid() == 0 else ""
    script = f"""
import os, resource, torch
from monai_gds.errors import StorageError
from monai_gds.storage.deepnvme.aio import DeepNvmeBackend
backend = DeepNvmeBackend(torch.device("cpu"), threads=1)
backend.open()
file = backend._open({str(path)!r}, None)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
{drop}
try:
    backend._read_into(file, 0, torch.zeros(1 << 20, dtype=torch.uint8))
except StorageError as e:
    print("caught:", e)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ulimit -l" in done.stdout


BUSY = """
import ctypes, os, signal, sys, threading, time, torch
from monai_gds.storage import Reads, open_storage
path = sys.argv[1]
signal.signal(signal.SIGUSR1, lambda *_: None)
storage = open_storage("deepnvme", "cpu", threads=2, block_size=64 << 10, queue_depth=16)
dest = torch.zeros(os.path.getsize(path), dtype=torch.uint8)
def work(seconds):
    print("at work", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        dest.zero_()
        storage.fill(Reads.of(path, [(0, dest.numel())]), [dest]).wait()
        storage.write(path + ".new", [dest])
        with open(path, "rb") as right, open(path + ".new", "rb") as written:
            assert dest.numpy().tobytes() == right.read() == written.read()
        os.unlink(path + ".new")
    print("fine", flush=True)
"""


def test_a_process_that_is_stopped_and_goes_on_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z and fg, or a debugger: the kernel ends waiting early then, which DeepSpeed takes for the end of all."""
    need_deepnvme()
    path = tmp_path / "file.bin"
    path.write_bytes(content(48 << 20))
    command = [sys.executable, "-c", f"{BUSY}\nwork(4)", str(path)]
    busy = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert busy.stdout is not None
    assert busy.stdout.readline() == "at work\n"
    while busy.poll() is None:
        busy.send_signal(signal.SIGSTOP)
        time.sleep(0.005)
        busy.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    said = busy.communicate(timeout=60)
    assert (busy.returncode, said[0]) == (0, "fine\n"), said


def test_signals_that_reach_its_threads_end_nothing(tmp_path: Path) -> None:
    """A profiler's timer signals whichever thread runs."""
    need_deepnvme()
    path = tmp_path / "file.bin"
    path.write_bytes(content(48 << 20))
    poke = """
def poke():
    libc, spared = ctypes.CDLL(None), {threading.main_thread().native_id, threading.get_native_id()}
    while True:
        for thread in set(map(int, os.listdir("/proc/self/task"))) - spared:
            libc.tgkill(os.getpid(), thread, int(signal.SIGUSR1))
        time.sleep(0.002)
threading.Thread(target=poke, daemon=True).start()
work(3)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", BUSY + poke, str(path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "at work\nfine\n"), done.stderr


def test_a_storage_that_nobody_closed_is_freed_before_the_interpreter_ends(tmp_path: Path) -> None:
    """One that was freed by the ending interpreter aborted one process in eight."""
    need_deepnvme()
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    script = f"""
import atexit
atexit.register(lambda: print("queues:", aio._queues()))  # called after what is registered later
from monai_gds.storage import Reads, open_storage
from monai_gds.storage.deepnvme import aio
storage = open_storage("deepnvme", "cpu")
storage.load(Reads.of({str(path)!r}, [(0, 1 << 20)])).wait()
print("queues:", aio._queues() > 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "queues: True\nqueues: 0\n"), done.stderr


def test_a_forked_child_leaves_the_engines_of_its_parent_alone_and_has_its_own(tmp_path: Path) -> None:
    """Freeing an engine waits for its threads, which a forked child does not have."""
    need_deepnvme()
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    script = f"""
import gc, os, sys
from monai_gds.storage import Reads, open_storage
reads = Reads.of({str(path)!r}, [(0, 1 << 20)])
dropped, kept = open_storage("deepnvme", "cpu"), open_storage("deepnvme", "cpu")
for storage in (dropped, kept):
    storage.load(reads).wait()
del storage
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    dropped.load(reads).wait()
else:
    del dropped
    gc.collect()
    own = open_storage("deepnvme", "cpu")
    own.load(reads).wait()
print("fine", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\nfine\n"), done.stderr


@pytest.mark.parametrize("overlap_events", [False, True])
@pytest.mark.parametrize("single_submit", [False, True])
def test_transfers_that_the_kernel_does_not_take_are_an_error(
    tmp_path: Path, single_submit: bool, overlap_events: bool
) -> None:
    """With an ``io_submit`` of the test's own in front of libaio's, which takes one transfer and then no more."""
    need_deepnvme()
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("this machine has no C compiler")
    source = tmp_path / "refuse.c"
    source.write_text("""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
int io_submit(void* context, long count, void** iocbs)
{
    static int taken;
    return taken++ ? -22 : syscall(SYS_io_submit, context, 1L, iocbs);
}
""")
    library = tmp_path / "refuse.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    path = tmp_path / "file.bin"
    path.write_bytes(content(4 << 20))
    script = f"""
from monai_gds.errors import StorageError
from monai_gds.storage import Reads, open_storage
settings = dict(block_size=256 << 10, single_submit={single_submit}, overlap_events={overlap_events})
storage = open_storage("deepnvme", "cpu", threads=1, **settings)
for attempt in range(2):
    try:
        storage.load(Reads.of({str(path)!r}, [(0, 4 << 20)])).wait()
    except StorageError as e:
        print("caught:", e)
"""
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("caught: [Errno 22] Invalid argument, at byte") == 2


# Lies, told by a handle that tests made.


def test_no_tensor_is_left_to_the_handles_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They let go of an operation's tensor late: when they have begun with the next one at the latest."""
    asked: list[weakref.ref[torch.Tensor]] = []

    def operate(memory: torch.Tensor, path: str, offset: int) -> int:
        assert all(tensor() is not None for tensor in asked[-1:]), "one of its threads would free it"
        asked.append(weakref.ref(memory))
        return 1

    handle = SimpleNamespace(sync_pread=operate, sync_pwrite=operate)
    monkeypatch.setattr(aio, "_new_handle", lambda *_: handle)
    library = SimpleNamespace(monai_gds_take_error=lambda *_: 0)
    monkeypatch.setattr(aio.ctypes, "CDLL", lambda path: library)
    module: Any = SimpleNamespace(__file__="")
    lane = aio._AioLane(module, Settings(), 4096, pinned=False)
    verbs: list[lanes.Verb] = ["read", "write", "read", "read"]
    for verb in verbs:
        lane.transfer(verb, 0, 0, torch.empty(4096, dtype=torch.uint8))
    assert [tensor() is not None for tensor in asked] == [False, False, False, True]
    lane.close()
    assert asked[-1]() is None


Act = Callable[[int, int, torch.Tensor], None]


class LyingLane(lanes.Lane):
    """Stands in for a handle: does what ``act`` does, and never complains."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self._buffer = torch.zeros(DeepNvmeBackend.lane_bytes, dtype=torch.uint8)

    @property
    def buffer(self) -> torch.Tensor:
        return self._buffer

    def transfer(self, verb: lanes.Verb, fd: int, offset: int, memory: torch.Tensor) -> None:
        self._act(fd, offset, memory)

    def close(self) -> None:
        pass


def lying(monkeypatch: pytest.MonkeyPatch, act: Act) -> None:
    monkeypatch.setattr(DeepNvmeBackend, "_new_lanes", lambda backend: [LyingLane(act)])


def read_but_for(start: int, stop: int) -> Act:
    def act(fd: int, offset: int, dest: torch.Tensor) -> None:
        found = os.pread(fd, dest.numel(), offset)
        kept = dest[start:stop].clone()
        dest.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
        dest[start:stop] = kept

    return act


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1 << 20), (0, 512), (512, 1024), ((1 << 20) - 512, 1 << 20), (4096, 8192)]
)
@pytest.mark.parametrize("value", [0, 0xA5])
def test_a_read_that_left_a_sector_untouched_is_found(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, stop: int, value: int
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(bytes([value]) * (1 << 20))  # what is missing would look like what was asked for
    lying(monkeypatch, read_but_for(start, stop))
    with pytest.raises(StorageError, match=f"bytes at {start} did not arrive"):
        fill(storage, path, torch.full((1 << 20,), value, dtype=torch.uint8))


def write_but_for(start: int, stop: int) -> Act:
    def act(fd: int, offset: int, source: torch.Tensor) -> None:
        data = source.numpy().tobytes()
        for at, part in ((0, data[:start]), (stop, data[stop:])):
            os.pwrite(fd, part, offset + at)
        os.fsync(fd)

    return act


@pytest.mark.parametrize(("start", "stop"), [(0, 2 << 20), (0, 1 << 20), (1 << 20, 2 << 20), (4096, 8192), (0, 4096)])
@pytest.mark.parametrize("fill", [0, 0xA5])
def test_a_write_that_left_something_out_is_found(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, stop: int, fill: int
) -> None:
    lying(monkeypatch, write_but_for(start, stop))
    with pytest.raises(StorageError, match=r"not (write|written)"):
        storage.write(str(tmp_path / "file.bin"), [bytes([fill]) * (2 << 20)])


def test_an_interrupted_write_writes_nothing_more(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor's number may belong to another file a moment later, and pieces are written by way of it."""
    path = tmp_path / "file.bin"
    written: list[bool] = []

    def slowly(fd: int, offset: int, source: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        name = f"/proc/self/fd/{fd}"
        written.append(os.path.exists(name) and os.path.samefile(name, path))

    lying(monkeypatch, slowly)
    with pytest.raises(KeyboardInterrupt):
        storage.write(str(path), [bytes(256 << 20)])
    at_return = len(written)
    time.sleep(0.5)
    assert len(written) == at_return <= storage.describe()["threads"]
    assert all(written)


def test_a_storage_that_can_start_no_thread_writes_by_itself(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", ended)
    data = content((33 << 20) + 5)
    storage.write(str(tmp_path / "file.bin"), [data])
    assert (tmp_path / "file.bin").read_bytes() == data


def test_a_sector_that_looks_unread_by_itself_is_no_error(storage: Storage, tmp_path: Path) -> None:
    """The mark is drawn again for each read: a file that holds the last one is read like any other."""
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    verified.mark_unread(memory)
    path.write_bytes(memory.numpy().tobytes())
    dest = torch.zeros(1 << 20, dtype=torch.uint8)
    fill(storage, path, dest)
    assert bytes_of(dest) == path.read_bytes()


@pytest.mark.parametrize("what", ["directory", "fifo"])
def test_only_regular_files(storage: Storage, tmp_path: Path, what: str) -> None:
    path = tmp_path / "thing"
    path.mkdir() if what == "directory" else os.mkfifo(path)
    with pytest.raises(OSError, match="thing"):
        storage.load(Reads.of(str(path), [(0, 1)])).wait()


def test_lanes_and_their_locked_memory_go_with_close(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content(20 << 20))

    def state() -> tuple[int, int, int]:
        locked = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck"))
        return aio._queues(), int(locked.split()[1]), len(os.listdir("/proc/self/task"))

    storage.close()
    before = state()
    fill(storage, path, torch.zeros(20 << 20, dtype=torch.uint8))
    assert state()[0] > before[0]
    assert state()[1] >= before[1] + 8192
    storage.close()
    assert state() == before


def test_no_more_lanes_than_threads(tmp_path: Path) -> None:
    need_deepnvme()
    path = tmp_path / "file.bin"
    path.write_bytes(content(1 << 20))
    with opened("deepnvme", "cpu", threads=2) as storage:
        callers = [
            threading.Thread(target=fill, args=(storage, path, torch.zeros(400_000, dtype=torch.uint8)))
            for _ in range(16)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert len(storage._backend._lanes._all) <= 2  # type: ignore[attr-defined]


# Settings.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an int of at least 1"),
        ({"block_size": 1000}, "block_size must be a multiple of 4096"),
        ({"block_size": "1M"}, "block_size"),
        ({"queue_depth": -1}, "queue_depth"),
        ({"block_size": 16 << 20, "queue_depth": 128}, "2 GiB"),
        ({"intra_op_parallelism": 0}, "intra_op_parallelism"),
        ({"intra_op_parallelism": 1000}, "intra_op_parallelism"),
        ({"single_submit": "yes"}, "single_submit"),
    ],
)
def test_settings_that_deepnvme_refuses(options: dict[str, Any], message: str) -> None:
    need_deepnvme()
    with pytest.raises(ValueError, match=message):
        open_storage("deepnvme", "cpu", **options)


TUNED = {
    "aio": {
        "single_submit": "true", "overlap_events": "false", "num_threads": 2, "queue_depth": 16, "block_size": 8388608,
    }
}  # fmt: skip


@pytest.mark.parametrize("how", ["mapping", "inner mapping", "output", "json"])
def test_takes_what_ds_nvme_tune_prints(tmp_path: Path, how: str) -> None:
    file = tmp_path / "tuned.txt"
    file.write_text(json.dumps(TUNED, indent=3))
    if how == "output":
        file.write_text("Best performance (GB/sec): read =  3.69, write =  3.18\n" + file.read_text() + "\n")
    found = Settings.tuned({"mapping": TUNED, "inner mapping": TUNED["aio"]}.get(how, file))
    assert found == Settings(8388608, 16, True, False, 2)


def test_a_setting_by_name_wins_over_a_tuned_one() -> None:
    need_deepnvme()
    with opened("deepnvme", "cpu", tuned=TUNED, queue_depth=4) as storage:
        described = storage.describe()
    assert (described["queue_depth"], described["block_size"], described["single_submit"]) == (4, 8388608, True)


@pytest.mark.parametrize("text", ["nothing tuned", "{not json", '{"aio": {"blocksize": 1}}', '{"aio": 3}'])
def test_a_tuned_file_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuned.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match="tuned"):
        Settings.tuned(file)


def test_importing_the_package_does_not_import_deepspeed() -> None:
    script = (
        "import sys, monai_gds.storage as s; s.available_backends('cpu'); "
        "assert 'deepspeed' not in sys.modules, 'deepspeed was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_first_writes_of_a_process_may_come_from_many_threads(tmp_path: Path) -> None:
    """DeepSpeed's warning at the first write was seen to stop two threads for ever. It is compiled out."""
    need_deepnvme()
    script = f"""
from monai_gds.storage import open_storage
open_storage("deepnvme", "cpu", threads=8).write({str(tmp_path / "file.bin")!r}, [bytes(128 << 20)])
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
        (tmp_path / "file.bin").unlink()


def test_nothing_is_printed_and_deepspeed_is_not_imported(tmp_path: Path) -> None:
    """DeepSpeed warns at the first write that drives wear, and when it is imported that there is no GPU."""
    need_deepnvme()
    script = f"""
from monai_gds.storage import Reads, open_storage
storage = open_storage("deepnvme", "cpu")
storage.write({str(tmp_path / "file.bin")!r}, [bytes(1 << 20)])
storage.load(Reads.of({str(tmp_path / "file.bin")!r}, [(0, 1 << 20)])).wait()
import sys
assert "deepspeed" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == done.stderr == ""
