"""Young's interval: the first-order optimum."""

from __future__ import annotations

import math

from strategies.resilience.intervals import intervals


@intervals("young")
def young(save: float, mtbf: float, restart: float) -> float:
    """√(2·save·MTBF) (Young 1974, doi 10.1145/361147.361115)."""
    return math.sqrt(2 * save * mtbf)
