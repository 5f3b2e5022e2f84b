"""The xnvme-bam backend: its kernel, on this machine's processor and on a GPU, over the software controller."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from monai_gds import GDSDataset, ImageNetDataset
from monai_gds.bench.made_up import write_image_folder
from monai_gds.errors import BackendUnavailable, BlockMapError, StorageError
from monai_gds.storage import Reads, Storage, available_backends, open_storage, registry
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.xnvme.bam import bam, software_controller
from monai_gds.storage.xnvme.bam.software_controller import READ, Entry, SoftwareController
from monai_gds.storage.xnvme.libxnvme import Completion
from monai_gds.testing import BackendContract, CudaBackendContract, WriteContract
from monai_gds.testing.tools import bytes_of, content
from tests.loopdisk import loop_disk
from tests.storage.blockmap.striped import ARRAYS, striped
from tests.storage.xnvme.bam.bam_commands import (
    BLOCK,
    CPU,
    DISK_BYTES,
    Confused,
    Delaying,
    Failing,
    Faulty,
    Losing,
    Shuffling,
    Silent,
    Withholding,
    commands,
    opened,
    some,
)  # fmt: skip
from tests.storage.xnvme.bam.host_kernel import HostBamBackend
from tests.storage.xnvme.images import make_image
from tests.storage.xnvme.test_blocks import Volume, ended_quietly, fill_array

#: Of images that are made without checksums, and without the inodes of a file system.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the block map has no checksums"),
    pytest.mark.filterwarnings("ignore:this file system's inodes cannot be found"),
]

#: Where the kernel runs: on the host by one thread per queue or by several, or on the GPU.
WHERE = [1, 3, pytest.param("gpu", marks=pytest.mark.gpu)]

#: The same for the whole backend.
TARGETS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# The contract, on mounted disks.


class OnADisk(BackendContract):
    target = "cpu"

    test_continues_after_a_short_read = None  # a controller's command reads all of its blocks or fails

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """A folder on a disk with blocks of so many bytes."""
        folder = tmp_path_factory.mktemp("disk")
        with loop_disk(folder, "ext4", block_size=request.param, size=1 << 30) as disk:
            (disk.folder / "shared").mkdir()
            yield disk.folder / "shared"

    @pytest.fixture(scope="class")
    @classmethod
    def shared_folder(cls, place: Path) -> Path:
        return place

    @pytest.fixture
    def storage(self, place: Path) -> Iterator[Storage]:
        with closing(opened(self.target)) as storage:
            yield storage


@pytest.mark.parametrize("place", [512], indirect=True)
class TestSimulatedBamOnTheHost(OnADisk, WriteContract):
    pass


@pytest.mark.parametrize("place", [512], indirect=True)
class TestSimulatedBamOnCuda(OnADisk, CudaBackendContract, WriteContract):
    target = "cuda"


def test_simulated_files_on_an_array_of_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated one; each drive has a controller and a kernel of its own."""
    with (
        striped(tmp_path, *ARRAYS["unequal, original"], fill_array, monkeypatch) as made,
        closing(opened("cpu")) as read,
    ):
        for path in sorted((made.disk.folder / "set").iterdir())[:12]:
            data = path.read_bytes()
            assert bytes_of(read.load(Reads.of(str(path), [(0, len(data))])).wait()[0]) == data
        with pytest.raises(BlockMapError, match="an array of 3 drives"):
            opened("cpu", uri=str(made.disk.image), blockmap=BlockMap.build(made.disk.folder / "set"))


# The kernel, command by command.


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random bytes, read as blocks of 512."""
    path = tmp_path_factory.mktemp("bam") / "disk.img"
    path.write_bytes(content(DISK_BYTES))
    return path


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("in_flight", [1, 63, 1023])
def test_simulated_as_many_commands_in_flight_as_a_queue_takes(image: Path, where: int | str, in_flight: int) -> None:
    with commands(where, image, 1, in_flight + 1, 2100, 4096) as made:
        for seed in range(3):
            done = made.read(some(100 if in_flight == 1 else 2100, 8, seed))
            assert all(completion.status == 0 for completion in done)
        assert made.controller.most_at_once == in_flight


@pytest.mark.parametrize("where", [1, pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("pairs", "depth"), [(1, 5), (2, 2), (7, 33), (128, 4)])
def test_simulated_batches_that_wrap_their_queues_many_times(
    image: Path, where: int | str, pairs: int, depth: int
) -> None:
    with commands(where, image, pairs, depth, 1500, 16384) as made:
        for seed, count in enumerate((1500, 1, 999, pairs + 1)):
            assert all(completion.status == 0 for completion in made.read(some(count, 32, seed)))


@pytest.mark.parametrize("where", WHERE)
def test_simulated_transfers_of_every_number_of_pages(image: Path, where: int | str) -> None:
    """One PRP entry, two, and lists of every length up to a whole page."""
    sizes = [1, 7, 8, 9, 15, 16, 17, 24, 25, 504, 512, 513, 4088, 4089, 4095, 4096]
    with commands(where, image, 2, 8, 16, 2 << 20) as made:
        for first in (0, 3):
            assert all(completion.status == 0 for completion in made.read([(first + n, n) for n in sizes]))


@pytest.mark.parametrize("where", WHERE)
def test_simulated_the_controller_sees_reads_and_nothing_else(image: Path, where: int | str) -> None:
    with commands(where, image, 3, 8, 256, 65536) as made:
        for seed in range(4):
            made.read(some(256, 128, seed))
        made.read([(DISK_BYTES // BLOCK, 1)])  # beyond the end
        assert made.controller.opcodes == {READ: 4 * 256 + 1}


def test_simulated_the_software_controller_refuses_what_a_drive_refuses(image: Path) -> None:
    with commands(1, image, 1, 8, 2, 65536) as made:
        controller, at = made.controller, int(made.pool.data.addresses[0])
        page, last = at - 4096, int(made.pool.lists.addresses[0])

        def status(**fields: int) -> int:
            entry = Entry(READ, 0, 1, at, 0, 0, 1)._replace(**fields)
            return int(controller.execute(entry))

        assert status() == 0
        assert status(opcode=0x01) == software_controller.INVALID_OPCODE  # Write
        assert status(nsid=2) == software_controller.INVALID_NAMESPACE
        assert status(blocks=129) == software_controller.INVALID_FIELD
        assert status(lba=DISK_BYTES // BLOCK) == software_controller.OUT_OF_RANGE
        assert status(blocks=9, prp2=page) == 0
        for wrong in ({"prp1": 0}, {"blocks": 9}, {"blocks": 9, "prp2": page + 8}, {"blocks": 17, "prp2": last + 4092}):
            assert status(**wrong) == software_controller.INVALID_PRP


@pytest.fixture(autouse=True)
def unsound() -> None:
    Faulty.sound = False


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("make", [Shuffling, Delaying])
def test_simulated_commands_that_complete_out_of_order_and_late(
    image: Path, where: int | str, make: type[SoftwareController]
) -> None:
    with commands(where, image, 2, 17, 300, 8192, make) as made:
        for seed in range(3):
            assert all(completion.status == 0 for completion in made.read(some(300, 16, seed)))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("pairs", [1, 3])
def test_simulated_the_controller_has_work_from_the_first_read_to_the_last(
    image: Path, where: int | str, pairs: int
) -> None:
    """Commands stay in flight when the kernel returns, so that reads that arrive later join them."""
    with commands(where, image, pairs, 8, 40, 4096, Withholding, 5.0) as made:
        for seed in range(2):
            made.controller.to_come = 200
            assert all(completion.status == 0 for completion in made.read(some(200, 8, seed), at_once=5))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("make", [Losing, Confused])
def test_simulated_a_queue_that_failed_takes_no_command_of_other_queues_with_it(
    image: Path, where: int | str, make: type[Faulty]
) -> None:
    with commands(where, image, 3, 8, 60, 4096, make, 1.5) as made:  # a sound queue may have to wait for the processor
        Faulty.lba = 7
        done = made.read([*some(30, 8), (7, 1), *some(100, 8, 1)], at_once=6)
        assert 1 <= sum(completion.status != 0 for completion in done) <= 2  # of six in three queues
        Faulty.sound = True
        assert all(completion.status == 0 for completion in made.read(some(60, 8, 2)))


FILES = {f"set/{n}.bin": content(n, n) for n in (0, 1, 511, 512, 513, 4097, 116_000, 3_000_001)}


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BlockMap]:
    """FILES on an image below /drive, in pieces."""
    path = tmp_path_factory.mktemp("mapped") / "disk.img"
    return path, make_image(path, FILES, parent=Path("/drive"))


def everything(storage: Storage, names: Sequence[str]) -> dict[str, bytes | Exception]:
    """The bytes of files, or their errors, all of them read at once."""
    reads = Reads.join([Reads.of(f"/drive/{name}", [(0, len(FILES[name]))]) for name in names])
    pending = storage.load(reads)
    errors, tensors = pending.errors, pending.tensors
    return {name: errors[i] if i in errors else bytes_of(tensors[i]) for i, name in enumerate(names)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (Failing, "status code type 0x2, status code 0x81"),
        (Losing, "did not answer within 0.4 s"),
        (Confused, "completed a command that was not in flight"),
    ],
)
def test_simulated_a_command_that_fails_is_named_and_the_storage_goes_on(
    mapped: tuple[Path, BlockMap], monkeypatch: pytest.MonkeyPatch, target: str, make: type[Faulty], error: str
) -> None:
    image, blocks = mapped
    bad = blocks["set/116000.bin"].extents[0]
    Faulty.lba = bad.start // BLOCK + 3
    monkeypatch.setattr(bam, "SoftwareController", make)
    names = list(FILES)
    with closing(opened(target, uri=str(image), blockmap=blocks, seconds=0.4, queues=2)) as storage:
        for _ in range(2):
            got = everything(storage, names)
            failed = got.pop("set/116000.bin")
            assert isinstance(failed, StorageError)
            assert error in str(failed) and "116000.bin" in str(failed)
            assert f"from LBA {bad.start // BLOCK}" in str(failed)
            if make is not Confused:  # which takes the rest of its queue with it
                assert got == {name: FILES[name] for name in got}
        Faulty.sound = True
        assert everything(storage, names) == FILES


@pytest.mark.parametrize("target", TARGETS)
def test_simulated_a_silent_controller_is_an_error_and_not_a_wait(
    mapped: tuple[Path, BlockMap], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    image, blocks = mapped
    monkeypatch.setattr(bam, "SoftwareController", Silent)
    Faulty.sound = True
    with closing(opened(target, uri=str(image), blockmap=blocks, seconds=0.3)) as storage:
        assert everything(storage, list(FILES)) == FILES
        Faulty.sound = False
        got = everything(storage, list(FILES))
        assert all("did not answer within 0.3 s" in str(error) for name, error in got.items() if FILES[name])
        Faulty.sound = True
        assert everything(storage, list(FILES)) == FILES


def test_simulated_reads_that_keep_arriving_do_not_put_the_time_limit_off(image: Path) -> None:
    with commands(1, image, 1, 64, 60, 4096, Silent, 0.4) as made:
        done: list[Completion] = []
        for n in range(60):  # over more than three seconds
            made.queue.read(n, n, 1, made.pool.data.tensor.data_ptr() + n * 4096)
            for _ in range(10):
                done += made.queue.poll() if made.queue.outstanding else []
                time.sleep(0.005)
            if done:
                break
        assert done[0].status < 0
        while made.queue.outstanding:
            made.queue.poll()


def test_simulated_a_queue_is_deleted_before_its_memory_is_used_again(image: Path) -> None:
    """A command that was lost may be carried out later, but never once its queue is gone."""
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(SoftwareController):
        def execute(self, entry: Entry) -> int:
            if entry.lba == 7:
                entered.set()
                go_on.wait(20)
            return super().execute(entry)

    with commands(1, image, 1, 8, 4, 4096, Stuck, 0.2) as made:
        over: list[Completion] = []
        reading = threading.Thread(target=lambda: over.extend(made.read([(7, 8)])))
        reading.start()
        assert entered.wait(20)
        time.sleep(0.5)  # the kernel has given up
        assert not over  # and its caller waits until the command is over
        go_on.set()
        reading.join()
        assert over[0].status < 0


# The backend.


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("block", [512, 4096])
def test_simulated_random_extents_of_an_image_against_pread(tmp_path: Path, target: str, block: int) -> None:
    files = {"one.bin": content(block), "large.bin": content((16 << 20) + 5), "cut.bin": content(2_000_003)}
    blocks = make_image(tmp_path / "disk.img", files, parent=Path("/drive"), block=block, pieces=40)
    large = make_image(tmp_path / "large.img", files, parent=Path("/drive"), block=block, pieces=1)
    dice = random.Random(block)
    for image, where in (("disk.img", blocks), ("large.img", large)):
        with closing(opened(target, uri=str(tmp_path / image), blockmap=where, queues=3, queue_depth=9)) as storage:
            for name, data in files.items():
                ranges = [(0, len(data))]
                for _ in range(20):
                    offset = dice.randint(0, len(data) - 1)
                    ranges.append((offset, dice.randint(0, min(len(data) - offset, dice.choice([9, 5000, 1 << 20])))))
                got = storage.load(Reads.of(f"/drive/{name}", ranges)).wait()
                assert [bytes_of(tensor) for tensor in got] == [data[o : o + n] for o, n in ranges], name


@pytest.mark.parametrize("target", TARGETS)
def test_simulated_an_image_on_a_disk_is_read_only(mapped: tuple[Path, BlockMap], target: str) -> None:
    image, blocks = mapped
    with closing(opened(target, uri=str(image), blockmap=blocks)) as storage:
        assert storage.head("/drive/set/4097.bin", 100)[0] == FILES["set/4097.bin"][:100]
        with pytest.raises(StorageError, match="no file system"):
            storage.write("/drive/set/new.bin", [b"x"])
        with pytest.raises(FileNotFoundError, match="not in the block map"):
            storage.load(Reads.of("/drive/set/none.bin", [(0, 1)])).wait()
        found = storage.describe()
        assert (found["controller"], found["queues"], found["queue_depth"]) == ("software", 4, 128)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target of datasets, which open the backend by its name."""
    if request.param == "cpu":
        monkeypatch.setitem(registry._BACKENDS, "xnvme-bam", f"{HostBamBackend.__module__}:HostBamBackend")
    return str(request.param)


def below(folder: Path) -> dict[str, bytes]:
    """Every file, by its path below the folder's parent."""
    return {str(p.relative_to(folder.parent)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_simulated_a_reader_of_image_net_dataset(target: str, tmp_path: Path) -> None:
    folder = write_image_folder(tmp_path / "train", 60)
    blocks = make_image(tmp_path / "disk.img", below(folder), parent=tmp_path)
    options = {"controller": "software", "uri": str(tmp_path / "disk.img"), "blockmap": blocks}

    def images(**arguments: Any) -> list[tuple[bytes, int]]:
        with closing(ImageNetDataset(folder, 16, device=target, decode=False, **arguments)) as dataset:
            batches = list(dataset)
        return [
            (bytes_of(image), int(label))
            for batch in batches
            for image, label in zip(batch["image"], batch["label"], strict=True)
        ]

    assert images(reader="xnvme-bam", storage_options=options) == images(reader="posix")


def test_simulated_hits_of_gds_dataset(target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tests.volume")
    items = [{"n": n} for n in range(5)]
    with GDSDataset(items, Volume(), tmp_path / "cache", device="cpu") as dataset:
        filled = [dataset[i]["image"] for i in range(5)]
    blocks = make_image(tmp_path / "disk.img", below(tmp_path / "cache"), parent=tmp_path)
    for record in (tmp_path / "cache").rglob("*.safetensors"):
        record.unlink()
    options = {"controller": "software", "uri": str(tmp_path / "disk.img"), "blockmap": blocks}
    with GDSDataset(
        items, Volume(), tmp_path / "cache", device=target, backend="xnvme-bam", backend_options=options
    ) as dataset:
        for _ in range(2):
            assert all(torch.equal(dataset[i]["image"].cpu(), filled[i]) for i in range(5))
    made = [record.getMessage() for record in caplog.records if record.name == "tests.volume"]
    assert made == [str(n) for n in range(5)]  # once, to fill the cache


@pytest.mark.gpu
def test_simulated_reads_in_flight_at_exit_are_no_trouble(mapped: tuple[Path, BlockMap], tmp_path: Path) -> None:
    image, blocks = mapped
    blocks.save(tmp_path / "map.json")
    options = {"controller": "software", "uri": str(image), "blockmap": str(tmp_path / "map.json")}
    script = (
        "import torch\n"
        "from monai_gds.storage import Reads, open_storage\n"
        f"storage = open_storage('xnvme-bam', 'cuda', **{options!r})\n"
        "reads = Reads.of('/drive/set/3000001.bin', [(0, 3_000_001)])\n"
        "kept = storage.load(reads).wait()\n"
        "late = [storage.load(reads) for _ in range(20)]\n"
    )
    assert ended_quietly(script)


# Where it does not work.


def test_a_cpu_target_is_refused() -> None:
    found = available_backends("cpu")["xnvme-bam"]
    assert not found and "CUDA" in found.reason
    with pytest.raises(BackendUnavailable, match="CUDA targets only"):
        open_storage("xnvme-bam", "cpu", controller="software")


def test_without_cupy_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = bam.XnvmeBamBackend.probe(torch.device("cuda", 0))
    assert not found and "CuPy" in found.reason and "pip install" in found.remedy


def test_no_drive_is_taken_for_one_that_gives_queues() -> None:
    with pytest.raises(BackendUnavailable, match=r"no drive gives it queues.*controller='software'"):
        HostBamBackend(CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"controller": "nvme"}, "not known; there is: software"),
        ({"queues": 0}, "1 to 128 queues"),
        ({"queues": 129}, "1 to 128 queues"),
        ({"queue_depth": 1}, "2 to 1024 entries"),
        ({"queue_depth": 1025}, "2 to 1024 entries"),
        ({"seconds": 0}, "a time limit"),
        ({"uri": __file__}, "give blockmap"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened("cpu", **options)


def test_simulated_a_controller_that_nobody_has_any_more_ends_its_thread(image: Path) -> None:
    def threads() -> int:
        return sum(t.name == "monai-gds-software-controller" for t in threading.enumerate())

    before = threads()
    controller = SoftwareController(str(image), CPU)
    assert threads() == before + 1
    del controller
    for _ in range(200):
        if threads() == before:
            return
        time.sleep(0.01)
    raise AssertionError("its thread goes on")
