"""The interval that makes the most of the time, restarts included."""

from __future__ import annotations

import math

from strategies.resilience.intervals import intervals


@intervals("availability")
def availability(save: float, mtbf: float, restart: float) -> float:
    """√(2·(MTBF + restart)·save + save²) of training between two saves (Saxena et al., NVIDIA, arXiv 2410.18124, whose interval
    has the save in it).
    """
    return math.sqrt(2 * (mtbf + restart) * save + save**2)
