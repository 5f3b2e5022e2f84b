"""``make test-nvme``: boots a guest with emulated NVMe drives and runs the three ``guest*.py`` in it.

QEMU emulates everything, the processor too (no KVM), so it takes minutes and its timings mean nothing. The guest sees
this machine's files read-only and uses this very Python; a libxnvme that XNVME_LIBRARY_PATH names is used there too.
"""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
GUEST = PROJECT / ".build/nvme"
DRIVE_BYTES = 1 << 30
LIBRARY = os.environ.get("XNVME_LIBRARY_PATH")

#: Of 2 MiB: uPCIe's heap takes 512 of them, the tests of xnvme-bam 48.
HUGE_PAGES = 640

#: Seconds after which a guest is taken for hung.
LIMIT = 1500


def main() -> int:
    """Builds the guest where that is needed, and boots it. Returns the exit status of the tests in it."""
    if LIBRARY and not os.path.isfile(LIBRARY):
        print(
            f"XNVME_LIBRARY_PATH names {LIBRARY}, which is not a file: name a libxnvme.so, or unset it", file=sys.stderr
        )
        return 1
    subprocess.run([HERE / "build_guest.sh", GUEST], check=True)
    with tempfile.TemporaryDirectory(prefix="monai-gds-nvme-") as folder:
        drives = [_image(Path(folder) / f"{block}.img") for block in (512, 4096)]
        taken = [_image(Path(folder) / f"{name}.img") for name in ("bam", "upcie1", "upcie2")]
        return _boot(_qemu(drives, taken))


def _image(path: Path) -> Path:
    with path.open("xb") as f:
        f.truncate(DRIVE_BYTES)
    return path


def _qemu(drives: list[Path], taken: list[Path]) -> list[str]:
    environment = {
        "GUEST_COMMAND": f"cd {shlex.quote(str(PROJECT))} && exec {shlex.quote(sys.executable)} -m pytest -q -x "
        f"-p no:cacheprovider --timeout 0 {' '.join(map(shlex.quote, sys.argv[1:]))} "
        "tests/nvme/guest.py tests/nvme/guest_bam.py tests/nvme/guest_upcie.py",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/run/scratch",
        "TMPDIR": "/run/scratch",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
    }
    if LIBRARY:
        environment["XNVME_LIBRARY_PATH"] = os.path.realpath(LIBRARY)
    script = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    encoded = base64.b64encode(script.encode()).decode()
    command = (
        "qemu-system-x86_64 -accel tcg,thread=multi -cpu max -M q35 -m 4608 -smp 2 -nographic -no-reboot "
        f"-kernel {GUEST}/vmlinuz -initrd {GUEST}/initrd "
        "-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap "
        "-device nvme,id=c0,serial=monai-gds"
    ).split()
    command += _namespaces("c0", drives)
    # Drives of their own for what takes one from the kernel
    bam, *upcie = taken
    command += ["-drive", f"file={bam},if=none,id=bam,format=raw"]
    command += ["-device", "nvme,serial=bam,drive=bam,max_ioqpairs=128", "-device", "nvme,id=c2,serial=upcie"]
    command += _namespaces("c2", upcie)
    pages = f"hugepages={HUGE_PAGES} " if LIBRARY else ""
    return [*command, "-append", f"console=ttyS0 quiet panic=-1 {pages}guest_env={encoded}"]


def _namespaces(controller: str, images: list[Path]) -> list[str]:
    """Two namespaces of a controller, with blocks of 512 and of 4096 bytes."""
    command = []
    for number, (path, block) in enumerate(zip(images, (512, 4096), strict=True)):
        name = f"{controller}n{number}"
        command += ["-drive", f"file={path},if=none,id={name},format=raw"]
        blocks = f"logical_block_size={block},physical_block_size={block}"
        command += ["-device", f"nvme-ns,bus={controller},drive={name},{blocks}"]
    return command


def _boot(command: list[str]) -> int:
    status = 1
    start = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as qemu:
        assert qemu.stdout is not None
        for line in qemu.stdout:
            print(line, end="", flush=True)
            if line.startswith("guest: exit status "):
                status = int(line.split()[-1])
            if time.monotonic() - start > LIMIT:
                print(f"the guest did not end within {LIMIT} seconds")
                qemu.kill()
    return status


if __name__ == "__main__":
    sys.exit(main())
