"""Foreign load on this machine, so that what it disturbs can be told from what is slow.

Sources: /proc/stat (busy time of all cores, ticks of 1/100 s) and /proc/self/schedstat (time that this process's main thread
waited for a core), proc(5). On systems without them nothing is foreign.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from calibration.launch.throttle import spent

LIMIT = 0.05  # of all cores' time: more disturbs a measurement


@dataclass(frozen=True)
class Moment:
    """Clocks in seconds: wall, this process (and what throttles it) on cores, waiting for a core, all cores busy or stolen."""

    wall: float
    own: float
    waited: float
    busy: float

    @classmethod
    def now(cls) -> Moment:
        """Read all clocks."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), usage.ru_utime + usage.ru_stime + spent(), _waited(), busy())

    def __sub__(self, other: Moment) -> Moment:
        return Moment(self.wall - other.wall, self.own - other.own, self.waited - other.waited, self.busy - other.busy)


def foreign(elapsed: Moment, own: float) -> float:
    """Fraction of all cores' time that others took; own: seconds of all of a measurement's processes on this machine."""
    return max(0.0, elapsed.busy - own) / (elapsed.wall * (os.cpu_count() or 1))


def _waited() -> float:
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def busy() -> float:
    """Seconds that cores were busy or stolen since the start of the machine, without interrupts; 0 where the system does not say.

    Interrupts serve the measured traffic too, and whether they are in a process's own time depends on the kernel
    (CONFIG_IRQ_TIME_ACCOUNTING): counted where they are not, loopback traffic would look like somebody else. Where they are,
    leaving them out hides little: 1 % of two ranks that all-reduce over loopback and do nothing else.
    """
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    return sum(int(fields[column]) for column in (0, 1, 2, 7)) / os.sysconf("SC_CLK_TCK")
