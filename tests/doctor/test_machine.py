"""What the doctor reads from the kernel's files, on machines laid out in a folder."""

from __future__ import annotations

from typing import Any

import pytest

from monai_gds.doctor import findings
from tests.doctor.laid import CLOSED_DRIVER, OPEN_DRIVER, Laid


def test_a_directory_that_does_not_exist_yet_is_looked_at_through_what_is_above_it(laid: Laid) -> None:
    laid.on_nvme()
    place = laid.machine.place(laid.cache / "run 7" / "records")
    assert place.folder == laid.cache
    assert place.mount is not None
    assert (place.mount.kind, place.number) == ("ext4", "259:3")
    assert place.drive is not None
    assert (place.drive.name, place.drive.is_nvme, place.drive.model) == ("nvme0n1", True, "Fast Drive 9000")
    words = findings.directory(place, "").found
    assert "does not exist yet" in words
    assert "Fast Drive 9000" in words


def test_a_file_is_no_cache_directory(laid: Laid) -> None:
    (laid.cache / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(NotADirectoryError, match="file is not a directory"):
            laid.machine.place(laid.cache / path)


def test_of_two_mounts_at_one_place_the_later_one_is_seen(laid: Laid) -> None:
    laid.mount("ext4", "259:3")
    laid.mount("xfs", "259:4")
    mount = laid.machine.place(laid.cache).mount
    assert mount is not None
    assert mount.kind == "xfs"


@pytest.mark.parametrize(
    ("text", "version", "is_open"), [(OPEN_DRIVER, "580.65.06", True), (CLOSED_DRIVER, "535.183.01", False)]
)
def test_the_driver(laid: Laid, text: str, version: str, is_open: bool) -> None:
    laid.with_gpu(text)
    driver = laid.machine.driver
    assert driver is not None
    assert (driver.version, driver.is_open) == (version, is_open)


@pytest.mark.parametrize(
    ("prepare", "kind"),
    [
        (lambda laid: None, None),
        (lambda laid: laid.file(".dockerenv"), "docker"),
        (lambda laid: laid.file("run/.containerenv"), "podman"),
        (lambda laid: laid.environment.update(KUBERNETES_SERVICE_HOST="10.0.0.1"), "kubernetes"),
        (lambda laid: laid.environment.update(container="lxc"), "lxc"),
    ],
)
def test_containers(laid: Laid, prepare: Any, kind: str | None) -> None:
    prepare(laid)
    assert laid.machine.container == kind
