"""``make test-nvme``: boots a guest with emulated NVMe drives and runs ``guest.py`` and ``guest_bam.py`` in it.

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
        return _boot(_qemu(drives, _image(Path(folder) / "bam.img")))


def _image(path: Path) -> Path:
    with path.open("xb") as f:
        f.truncate(DRIVE_BYTES)
    return path


def _qemu(drives: list[Path], taken: Path) -> list[str]:
    environment = {
        "GUEST_COMMAND": f"cd {shlex.quote(str(PROJECT))} && exec {shlex.quote(sys.executable)} -m pytest -q -x "
        f"-p no:cacheprovider --timeout 0 {' '.join(map(shlex.quote, sys.argv[1:]))} "
        "tests/nvme/guest.py tests/nvme/guest_bam.py",
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
        "qemu-system-x86_64 -accel tcg,thread=multi -cpu max -M q35 -m 3072 -smp 2 -nographic -no-reboot "
        f"-kernel {GUEST}/vmlinuz -initrd {GUEST}/initrd "
        "-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap "
        "-device nvme,id=c0,serial=monai-gds"
    ).split()
    for number, (path, block) in enumerate(zip(drives, (512, 4096), strict=True)):
        command += ["-drive", f"file={path},if=none,id=d{number},format=raw"]
        command += ["-device", f"nvme-ns,bus=c0,drive=d{number},logical_block_size={block},physical_block_size={block}"]
    # A drive of its own for what takes one from the kernel
    command += ["-drive", f"file={taken},if=none,id=taken,format=raw"]
    command += ["-device", "nvme,serial=bam,drive=taken,max_ioqpairs=128"]
    return [*command, "-append", f"console=ttyS0 quiet panic=-1 guest_env={encoded}"]


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
