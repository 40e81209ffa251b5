"""What the call of a collective costs the host."""

from __future__ import annotations

import subprocess
import sys


def test_a_call_takes_microseconds_of_cpu_time() -> None:
    """The published 44.8 us of a GPU's process group are more than Python and c10d take."""
    printed = subprocess.run([sys.executable, "-m", "calibration.measure.calls"], capture_output=True, text=True, check=True)
    figures = dict(part.removesuffix(" us").rsplit(" ", 1) for part in printed.stdout.strip().partition(": ")[2].split(", "))
    assert set(figures) == {"collective", "collective backward"}
    assert 0.1 < float(figures["collective"]) < 1000
