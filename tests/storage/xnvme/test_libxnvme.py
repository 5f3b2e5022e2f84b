"""Finding libxnvme: what fits, and clear words where it does not."""

from __future__ import annotations

import ctypes.util
import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from monai_gds.errors import BackendUnavailable, StorageError
from monai_gds.storage import available_backends, open_storage
from monai_gds.storage.blockmap.block_map import BlockMap
from monai_gds.storage.blockmap.extents import Disk
from monai_gds.storage.blockmap.saved import Origin
from monai_gds.storage.xnvme import libxnvme
from tests.storage.xnvme import libraries


@pytest.mark.parametrize(("kind", "layout"), [("double", "0.7"), ("double next", "next")])
def test_the_layout_of_the_options_is_told_by_symbols(kind: str, layout: str) -> None:
    with libraries.using(kind):
        library = libxnvme.load()
        assert library.layout == layout
        assert library.path == libraries.compiled(kind)


@pytest.mark.parametrize("kind", ["double", "double next", "real"])
def test_options_are_for_reading_only(kind: str) -> None:
    """xNVMe's defaults say rdwr, which rdonly alone does not undo."""
    with libraries.using(kind):
        opts = libxnvme.load().options(direct=1, be="linux")
        assert (opts.rdonly, opts.rdwr, opts.wronly, opts.direct, opts.create) == (1, 0, 0, 1, 0)


def test_says_its_version_and_what_it_reaches_devices_with() -> None:
    with libraries.using("real"):
        library = libxnvme.load()
        assert library.version().startswith("0.7")
        assert {"linux", "io_uring"} & set(library.drivers())


def test_a_library_that_does_not_say_is_no_error() -> None:
    with libraries.using("double"):
        assert (libxnvme.load().version(), libxnvme.load().drivers()) == ("", [])


def test_drivers_of_the_development_branch() -> None:
    with libraries.using("double next"):
        assert libxnvme.load().drivers()[:2] == ["upcie", "libvfn"]


@pytest.mark.parametrize("kind", ["double", "double next"])
def test_a_driver_that_the_library_was_built_without(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libxnvme.Library, "drivers", lambda _: ["linux", "io_uring_bdev", "ramdisk"])
    made = BlockMap({}, Origin("/data", "ext4", "", 0, Disk("nvme0n1", "259:0", 512, 1 << 30, 1 << 20)))
    with libraries.using(kind):
        libxnvme.load().check_driver("io_uring")
        with pytest.raises(BackendUnavailable, match=r"built without 'spdk'; its drivers are linux, io_uring_bdev"):
            open_storage("xnvme-block", "cpu", be="spdk", uri="0000:01:00.0", blockmap=made)


def test_an_error_of_opening_has_its_cause(tmp_path: Path) -> None:
    with libraries.using("double"):
        library = libxnvme.load()
        with pytest.raises(StorageError, match="could not open it: No such file or directory") as failed:
            library.open("xnvme_dev_open", str(tmp_path / "none"), library.options())
        assert (failed.value.errno, failed.value.filename) == (errno.ENOENT, str(tmp_path / "none"))


def test_nothing_that_writes_to_a_device_is_even_declared() -> None:
    assert not [name for name in libxnvme._FUNCTIONS if "nvm_write" in name or "adm" in name]


@pytest.mark.parametrize("backend", ["xnvme", "xnvme-block"])
def test_a_library_that_is_not_there(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libxnvme.ENVIRONMENT, "/nowhere/libxnvme.so")
    with pytest.raises(BackendUnavailable, match=r"/nowhere/libxnvme\.so.*conda-forge"):
        open_storage(backend, "cpu")
    assert not available_backends("cpu")[backend]


def test_no_library_at_all_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(libxnvme.ENVIRONMENT, raising=False)
    monkeypatch.setattr(libxnvme, "_NAMES", ("libxnvme-not-here.so",))
    libxnvme._load.cache_clear()
    with pytest.raises(BackendUnavailable, match=r"libxnvme-not-here\.so.*XNVME_LIBRARY_PATH is not set"):
        libxnvme.load()


def test_a_library_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libxnvme.ENVIRONMENT, ctypes.util.find_library("m") or "libm.so.6")
    with pytest.raises(BackendUnavailable, match="undefined symbol: xnvme_opts_set_defaults"):
        libxnvme.load()


def test_a_library_with_other_options_than_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A later version may lay them out in a way that would make every field land elsewhere."""
    source = libraries.SOURCE.read_text().replace("const char *be,", "const char *first, *be,")
    (tmp_path / "other.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "other.so", tmp_path / "other.c"], check=True)
    monkeypatch.setenv(libxnvme.ENVIRONMENT, str(tmp_path / "other.so"))
    with pytest.raises(BackendUnavailable, match="lays out its options"):
        libxnvme.load()


def test_block_maps_need_neither_torch_nor_xnvme() -> None:
    script = (
        "import sys, monai_gds.storage.blockmap.block_map\n"
        "sys.exit(bool({'torch', 'numpy', 'xnvme'} & {m.partition('.')[0] for m in sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_says_what_it_found() -> None:
    with libraries.using("double"):
        found = available_backends(torch.device("cpu"))["xnvme-block"]
        assert found.ok
        assert libraries.compiled("double") in found.reason
