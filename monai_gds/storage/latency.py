"""How long small reads take, by which a backend chooses how many are in flight. For :mod:`.blocking`.

On a local disk a small file takes some 30 µs, nearly all of them work of this machine's cores, so there is a thread per
core, and one alone reads without another thread. Over NFS, Lustre or a network volume it takes milliseconds, in which
threads only wait: there 64 reads are in flight (``limits.SLOW_READS``).
"""

from __future__ import annotations

import time
from itertools import count

#: Seconds per read from which threads mostly wait. A file that has to come from an NVMe drive takes 0.2 ms.
SLOW = 0.5e-3

#: A thread that reads a file releases the interpreter's lock about this often.
_RELEASES = 4

#: How many reads decide.
_LAST = 5

#: While all of the last reads were slow, one in so many is noted: finding out how long it waited for the lock makes it
#: wait once more.
_ALIKE = 8

#: How many groups of reads that were done at once there are to one whose first read is timed.
_GROUPS = 16


class Latency:
    """How long the last small reads took, each with the opening of its file. Thread-safe."""

    def __init__(self) -> None:
        self.is_long = False  # whether threads mostly wait: a median decides, not a single read that was held up
        self._last: tuple[float, ...] = ()  # seconds
        self._groups, self._alike = count(), count(1)

    @property
    def is_unknown(self) -> bool:
        """Whether nothing was read yet."""
        return not self._last

    def note(self, seconds: float) -> None:
        """Notes how long a read took. Waits for the interpreter's lock, behind a busy training loop, do not count."""
        if seconds >= SLOW:
            if len(self._last) == _LAST and min(self._last) >= SLOW and next(self._alike) % _ALIKE:
                return
            begin = time.perf_counter()
            time.sleep(0)  # releases the lock and takes it again
            seconds -= _RELEASES * (time.perf_counter() - begin)
        last = self._last = (*self._last[1 - _LAST :], seconds)
        self.is_long = sorted(last)[(len(last) - 1) // 2] >= SLOW

    def is_due(self) -> bool:
        """Whether the first of the next reads that are done at once is to be done before them, and timed."""
        return next(self._groups) % _GROUPS == 0
