"""Daly's interval: the higher-order optimum, which holds also where failures are frequent."""

from __future__ import annotations

import math

from strategies.resilience.intervals import intervals


@intervals("daly")
def daly(save: float, mtbf: float, restart: float) -> float:
    """√(2·save·M)·(1 + √(save/2M)/3 + save/2M/9) − save, and M where a save takes twice as long as that (Daly 2006, equation 37,
    doi 10.1016/j.future.2004.11.016).
    """
    if mtbf == math.inf:
        return math.inf
    if save >= 2 * mtbf:
        return mtbf
    part = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - save
