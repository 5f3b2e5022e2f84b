"""Makes OpenMP's threads wait asleep on a machine with more work than processors. For loaders.

torch computes on the CPU in OpenMP's threads, which wait for one another by spinning. On an idle machine that is the
quickest way. On a busy one they spend their share of the processors, for milliseconds at every operation, while the
thread they wait for has none: an epoch of eight batches of 2 MB, each summed, took 130 ms instead of 22 beside two
other processes on two processors. libgomp spins only for microseconds if a process has more of these threads than the
machine has processors. That is so if the loader's thread computes, too. If it only reads, an idle thread of ours holds
some more of them for as long as the machine is busy.
"""

from __future__ import annotations

import os
import threading

import torch

from monai_gds.base import cores
from monai_gds.base.process import PerProcess

#: The load from which a machine is busy, per core that this process may use. A process that computes on all of them
#: makes 1 by itself. In a container the load includes that of other cores, so threads sleep sooner than they have to:
#: the other way round, they would spend the quota on spinning.
LOAD_OF_BUSY_MACHINES = 1.5

#: torch divides operations on more elements than this among threads.
_SHARED_OUT = 1 << 15

#: The longest wait for the thread, which a Ctrl-C may have come before.
_BEGIN_SECONDS = 10.0


def heed_load() -> None:
    """Makes OpenMP's threads of this process wait asleep if the machine is busy, and spin if it is not."""
    _surplus().keep(os.getloadavg()[0] >= LOAD_OF_BUSY_MACHINES * cores.usable())


class _Surplus:
    """Threads of OpenMP beyond those that this process needs, held by a thread of ours; or none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: threading.Event | None = None  # of that thread; None without one

    def keep(self, needed: bool) -> None:
        with self._lock:
            if needed and self._end is None:
                made, self._end = threading.Event(), threading.Event()
                work = (made, self._end)
                try:
                    threading.Thread(target=_idle, args=work, name="monai-gds-openmp", daemon=True).start()
                finally:  # the interpreter must not end while it is in torch, after a Ctrl-C neither
                    made.wait(_BEGIN_SECONDS)
            elif not needed and self._end is not None:
                self._end.set()
                self._end = None


_surplus: PerProcess[_Surplus] = PerProcess(_Surplus)


def _idle(made: threading.Event, end: threading.Event) -> None:
    try:
        torch.ones(2 * _SHARED_OUT).sum()
    finally:
        made.set()
    end.wait()
