"""A rank made slower: processes that compute beside it on its core and take their part of it.

The kernel divides a core among those that want it by their weights, 1024 at nice 0 and 1.25 times less with each further step
(Linux, kernel/sched/core.c: sched_prio_to_weight). A rank that waits leaves its core to them, as a slow device that waits does.
They are children of the rank, in its session, because sessions may be scheduled as groups, and end with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

WEIGHTS = (1024, 820, 655, 526, 423, 335, 272, 215, 172, 137, 110, 87, 70, 56, 45, 36, 29, 23, 18, 15)  # by nice
SLOWEST = 0.1  # part of its usual speed: with more of them beside a rank, turns are too long
BESIDE = """
import os, sys
os.nice(int(sys.argv[1]))
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


_STARTED: list[int] = []  # by this process


def throttle(speed: float) -> list[subprocess.Popen[bytes]]:
    """Start what leaves this process `speed` of each of its cores; they end with it."""
    result = []
    for core in sorted(os.sched_getaffinity(0)):
        for nice in beside(speed):
            started = subprocess.Popen([sys.executable, "-S", "-c", BESIDE, str(nice)], stdin=subprocess.DEVNULL)
            os.sched_setaffinity(started.pid, {core})
            result.append(started)
    _STARTED.extend(process.pid for process in result)
    return result


def spent() -> float:
    """CPU seconds of what was started: it belongs to a measurement as the ranks do."""
    ticks = 0
    for process in _STARTED:
        with suppress(OSError, IndexError, ValueError):
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def beside(speed: float) -> Iterator[int]:
    """Nice values of processes beside one of nice 0 that leave it `speed` of a core, to a hundredth."""
    left = WEIGHTS[0] * (1 / speed - 1)
    for nice, weight in enumerate(WEIGHTS):
        while left >= weight * (1 if nice < len(WEIGHTS) - 1 else 0.5):
            left -= weight
            yield nice
