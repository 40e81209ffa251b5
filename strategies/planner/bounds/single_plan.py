"""A tighter bound on one plan: the schedule's own order, and the exchange of its first rank with other dp ranks."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from sim.pricing.prices import Prices
from strategies.data_parallel.hook import hook_of
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.critical_path import Critical, critical
from strategies.planner.bounds.every_plan import SLACK, Bounds, bounded
from strategies.planner.bounds.exchange_bound import HOST_STREAMS, Exchange, Exchanges
from strategies.planner.bounds.layer_cost_table import Kinds
from strategies.planner.bounds.layer_layout import layout_of, splits, through
from strategies.planner.search.candidates import Candidates
from strategies.schedules import schedules


class Refiner:
    """Refines bounds of plans one by one; what plans share is worked out once, for all kinds of layer work together."""

    def __init__(self, plans: Candidates, kinds: Kinds, bounds: Bounds, prices: Prices) -> None:
        self.plans, self.kinds, self.bounds = plans, kinds, bounds
        self.exchanges = Exchanges(plans.job, prices)
        self._known: dict[tuple[object, ...], tuple[Critical, dict[int, int]]] = {}

    def passes(self, plan: int) -> float:
        """Seconds of a step of plan i, at least, when nothing but the passes of its schedule and the update takes time."""
        resolved = self.resolved(plan)
        if not self._flows(resolved):
            return 0.0
        paths, column = self._critical(plan, resolved)
        return max(float(paths.end[column]), float(paths.first[column]) + float(self.bounds.update[plan])) * (1 - SLACK)

    def _flows(self, resolved: Resolved) -> bool:
        """Whether steps are filled and drained one by one, by a schedule."""
        return bounded(resolved) and not resolved.hook.local and not schedules[resolved.schedule].versions

    def exchange(self, plan: int) -> float:
        """Seconds of a step of plan i, at least, with what its first rank exchanges with other dp ranks.

        Every stream works through its communication in order. Gradients that are reduced last wait for the pass that makes them,
        chunk after chunk; then comes the update, and what is gathered after it. On the first rank a pass waits for its first
        gather after the pass before.
        """
        resolved = self.resolved(plan)
        if not self._flows(resolved) or (resolved.copies == 1 and resolved.offload is None):
            return 0.0
        paths, column = self._critical(plan, resolved)
        talk, update = self.exchanges.of(resolved), float(self.bounds.update[plan])
        own = self._own(plan, resolved)
        passes, reduced = max(float(paths.first[column]), own + talk.waiting(resolved)), self._reduced(paths, column, talk)
        if resolved.offload:
            update = 0.0  # which is among what streams of the host do
        if resolved.chunks == 1:
            passes = max(passes, reduced)
        end = max(passes + update, reduced)  # of several chunks, one may be updated while gradients of another are reduced
        streams = talk.busy(resolved)
        hosted = max((time for name, time in streams.items() if name in HOST_STREAMS), default=0.0)
        busy = max((time for name, time in streams.items() if name not in HOST_STREAMS), default=0.0)
        if not resolved.overlap and hook_of(resolved.data_parallel).in_turn(resolved):
            busy += own + (update if resolved.chunks == 1 else 0.0)
        return max(busy, hosted, end + talk.last, passes + talk.updating) * (1 - SLACK)

    def _reduced(self, paths: Critical, column: int, talk: Exchange) -> float:
        """When the first rank's gradients are reduced, where only those of the last microbatch are."""
        time = 0.0
        for chunk, begin in zip(paths.chunks, paths.final[:, column].tolist(), strict=True):
            if not talk.backward[chunk].get("dp"):
                time = max(time, begin) + talk.final[chunk].get("dp", 0.0)
        return time

    def _own(self, plan: int, resolved: Resolved) -> float:
        """The first rank's passes one after the other."""
        layout, kind = layout_of(resolved), [self.kinds.kinds[int(self.kinds.of[plan])]]
        mine = list(layout.stages[0])
        halves = splits(resolved.schedule, resolved.pp, resolved.microbatches, resolved.chunks)
        time = layout.times(kind)
        seconds = sum(
            float(time[name][0, mine].sum()) for name in (("forward", "input", "weight") if halves else ("forward", "backward"))
        )
        return through(resolved) * seconds

    def resolved(self, plan: int) -> Resolved:
        """Plan i with its defaults filled in."""
        resolved = self.plans.resolved[int(self.plans.rule[plan])]
        return resolved.for_plan(self.plans.job_of(plan).plan)

    def _critical(self, plan: int, resolved: Resolved) -> tuple[Critical, int]:
        """The passes of all plans of this shape, and which column is this plan's."""
        key = self._shape(resolved)
        if key not in self._known:
            rules = self._rules_of.get(key, [])
            kinds = np.unique(self.kinds.of[np.isin(self.plans.rule, rules)]).tolist()
            layout, chosen = layout_of(resolved), [self.kinds.kinds[kind] for kind in kinds]
            self._known[key] = (
                critical(resolved, layout, layout.times(chosen)),
                {kind: column for column, kind in enumerate(kinds)},
            )
        paths, columns = self._known[key]
        return paths, columns[int(self.kinds.of[plan])]

    @cached_property
    def _rules_of(self) -> dict[tuple[object, ...], list[int]]:
        """The rules of each shape of pipeline."""
        result: dict[tuple[object, ...], list[int]] = {}
        for number, resolved in enumerate(self.plans.resolved):
            result.setdefault(self._shape(resolved), []).append(number)
        return result

    def _shape(self, resolved: Resolved) -> tuple[object, ...]:
        return resolved.schedule, resolved.pp, resolved.microbatches, resolved.chunks, resolved.layers
