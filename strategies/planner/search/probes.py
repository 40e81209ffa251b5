"""Which plans a search simulates before their bound is the least: one of each kind.

Bounds of some kinds of plans are looser than those of others, and all of these would be simulated first. A probe is the plan with
the least bound of a kind that none was simulated of yet: it costs one simulation, and finds early what can beat the loose ones.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from strategies.planner.search.site import Floats, Mask, Site

KIND = frozenset({"tp", "cp", "pp", "data_parallel"})  # fields that make plans of one kind


class Probes:
    """The plans to probe, the least bound first."""

    def __init__(self) -> None:
        self._kinds: list[NDArray[np.int64]] = []  # by site: of each plan, its kind
        self._waiting: list[tuple[float, int, int]] = []  # bound, site and plan
        self._seen: set[tuple[int, int]] = set()  # site and kind

    def add(self, site: Site, keep: Mask, value: Floats) -> None:
        """One more site, whose plans `keep` may be simulated and have these bounds."""
        kinds = site.plans.kinds(KIND)
        plans = np.flatnonzero(keep & (site.base < 0))
        order = plans[np.lexsort((plans, value[plans]))]
        _, first = np.unique(kinds[order], return_index=True)
        number = len(self._kinds)
        self._kinds.append(kinds)
        self._waiting += [(float(value[plan]), number, int(plan)) for plan in order[first]]
        heapq.heapify(self._waiting)

    def simulated(self, number: int, plan: int) -> None:
        """A plan of this kind has been asked for."""
        self._seen.add((number, int(self._kinds[number][plan])))

    def next(self, worst: float) -> tuple[int, int] | None:
        """Site and plan of the next probe that may be better than `worst`."""
        while self._waiting and self._waiting[0][0] < worst:
            _, number, plan = heapq.heappop(self._waiting)
            if (number, int(self._kinds[number][plan])) not in self._seen:
                return number, plan
        return None
