"""Tighter bounds on one plan: the slowest rank of GPUs that are not alike, the schedule's own order, and the exchange of its
first rank with other dp ranks.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from sim.pricing.prices import Prices
from strategies.data_parallel.hook import hook_of
from strategies.lowering.lower import given_of
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.critical_path import Critical, critical
from strategies.planner.bounds.every_plan import SLACK, Bounds, bounded, compute
from strategies.planner.bounds.exchange_bound import HOST_STREAMS, Exchange, Exchanges
from strategies.planner.bounds.expected_times import Draws, Expected
from strategies.planner.bounds.layer_cost_table import Floats, Kinds
from strategies.planner.bounds.layer_layout import Layout, layout_of, splits, through
from strategies.planner.bounds.network_bound import sending
from strategies.planner.search.candidates import Candidates
from strategies.predict import may_settle
from strategies.schedules import schedules


class Refiner:
    """Refines bounds of plans one by one; what plans share is worked out once, for all kinds of layer work together."""

    def __init__(self, plans: Candidates, kinds: Kinds, bounds: Bounds, prices: Prices) -> None:
        self.plans, self.kinds, self.bounds = plans, kinds, bounds
        self.exchanges, self._sending = Exchanges(plans.job, prices), sending(plans.job, prices.profile)
        self.expected = Expected(plans.job, kinds.kinds, prices)
        self._known: dict[tuple[object, ...], tuple[Critical, dict[int, int]]] = {}
        self._paths: dict[tuple[object, ...], tuple[Draws, Critical]] = {}

    def waiting(self, plan: int) -> float:
        """Seconds of the expected step of plan i, at least, by the slowest of its ranks alone: it fills, works and drains."""
        resolved = self.resolved(plan)
        if not bounded(resolved) or not self.expected.applies(resolved):
            return 0.0
        layout, flows, drawn = layout_of(resolved), self._flows(resolved), self._draws(plan, resolved)
        split = splits(resolved.schedule, resolved.pp, resolved.microbatches, resolved.chunks)
        anywhere, first, _ = compute(through(resolved), layout, drawn.time, split, flows)
        return _mean(np.maximum(anywhere, first + self._update(plan, resolved, drawn)) if flows else anywhere)

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
        """Seconds of a step of plan i, at least, with what its first rank exchanges with other dp ranks."""
        resolved = self.resolved(plan)
        if not self._flows(resolved) or (resolved.copies == 1 and resolved.offload is None):
            return 0.0
        paths, column = self._critical(plan, resolved)
        layout, kind = layout_of(resolved), self.kinds.kinds[int(self.kinds.of[plan])]
        own = _own(resolved, layout, layout.times([kind]))
        alone = Critical(paths.end[[column]], paths.first[[column]], paths.final[:, [column]], paths.chunks)
        return _mean(self._with_exchange(resolved, alone, own, np.array([self.bounds.update[plan]])))

    def expected_exchange(self, plan: int) -> float:
        """Seconds of the expected step of plan i, at least, by its schedule and with what its first rank exchanges."""
        resolved = self.resolved(plan)
        if not self._flows(resolved) or not self.expected.applies(resolved) or may_settle(resolved):
            return 0.0
        layout, (drawn, paths) = layout_of(resolved), self._drawn_paths(plan, resolved)
        update = self._update(plan, resolved, drawn)
        steps = np.maximum(paths.end, paths.first + update)
        if resolved.copies > 1 or resolved.offload is not None:
            steps = np.maximum(steps, self._with_exchange(resolved, paths, _own(resolved, layout, drawn.time), update))
        return _mean(steps)

    def _sends(self, resolved: Resolved, layout: Layout) -> dict[tuple[str, int], float]:
        """What results take to other nodes; see `critical`."""
        model, grid, gpus = self.plans.job.model, resolved.grid, self.plans.job.cluster.node.gpus
        if model.module is not None:  # whose blocks may be given less
            return {}
        seconds = given_of(model, resolved) * self._sending
        node = {stage: grid.first({"pp": rank}) // gpus for rank, mine in enumerate(layout.stages) for stage in mine}
        ways = (("F", 1), ("B", -1))
        return {
            (way, stage): seconds / resolved.tp if resolved.splits(way) else seconds
            for way, step in ways
            for stage in node
            if node.get(stage + step, node[stage]) != node[stage]
        }

    def _with_exchange(self, resolved: Resolved, paths: Critical, own: Floats, update: Floats) -> Floats:
        """Every stream works through its communication in order. Gradients that are reduced last wait for the pass that makes
        them, chunk after chunk; then comes the update, and what is gathered after it. On the first rank a pass waits for its
        first gather after the pass before. own: its passes one after the other; all of shape (draws,).
        """
        talk = self.exchanges.of(resolved)
        passes, reduced = np.maximum(paths.first, own + talk.waiting(resolved)), _reduced(paths, talk)
        if resolved.offload:
            update = np.zeros_like(update)  # which is among what streams of the host do
        if resolved.chunks == 1:
            passes = np.maximum(passes, reduced)
        end = np.maximum(passes + update, reduced)  # of several chunks, one may be updated while gradients of another are reduced
        streams = talk.busy(resolved)
        hosted = max((time for name, time in streams.items() if name in HOST_STREAMS), default=0.0)
        between = max((time for name, time in streams.items() if name not in HOST_STREAMS), default=0.0)
        busy = np.full_like(own, between)
        if not resolved.overlap and hook_of(resolved.data_parallel).in_turn(resolved):
            busy = busy + own + (update if resolved.chunks == 1 else 0.0)
        return np.asarray(np.maximum.reduce([busy, np.full_like(own, hosted), end + talk.last, passes + talk.updating]))

    def _drawn_paths(self, plan: int, resolved: Resolved) -> tuple[Draws, Critical]:
        """The passes of plan i in every draw, with sends, which plans share that differ in what dp ranks do."""
        key = (*self._shape(resolved), resolved.grid, resolved.scatters, int(self.kinds.of[plan]))
        if key not in self._paths:
            layout, drawn = layout_of(resolved), self._draws(plan, resolved)
            self._paths[key] = drawn, critical(resolved, layout, drawn.time, self._sends(resolved, layout))
        return self._paths[key]

    def _draws(self, plan: int, resolved: Resolved) -> Draws:
        return self.expected.draws(resolved, int(self.kinds.of[plan]), layout_of(resolved))

    def _update(self, plan: int, resolved: Resolved, drawn: Draws) -> Floats:
        """Seconds of the first rank's update in each draw; CPUs are alike."""
        factors = drawn.factors[0] if resolved.offload is None else np.zeros(drawn.factors.shape[1])
        return np.asarray(self.bounds.update[plan] * (1 + factors))

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
        shapes, which = self.plans.each(self._shape)
        for number, shape in enumerate(which.tolist()):
            result.setdefault(shapes[shape], []).append(number)
        return result

    def _shape(self, resolved: Resolved) -> tuple[object, ...]:
        return resolved.schedule, resolved.pp, resolved.microbatches, resolved.chunks, resolved.layers


def _mean(seconds: Floats) -> float:
    """The mean over all draws, less what rounding may do."""
    return float(seconds.mean()) * (1 - SLACK)


def _reduced(paths: Critical, talk: Exchange) -> Floats:
    """When the first rank's gradients are reduced, where only those of the last microbatch are."""
    time = np.zeros(paths.final.shape[1])
    for chunk, begin in zip(paths.chunks, paths.final, strict=True):
        if not talk.backward[chunk].get("dp"):
            time = np.maximum(time, begin) + talk.final[chunk].get("dp", 0.0)
    return time


def _own(resolved: Resolved, layout: Layout, time: dict[str, Floats]) -> Floats:
    """The first rank's passes one after the other, for each row of `time`."""
    halves = splits(resolved.schedule, resolved.pp, resolved.microbatches, resolved.chunks)
    names = ("forward", "input", "weight") if halves else ("forward", "backward")
    return np.asarray(through(resolved) * sum(time[name][:, list(layout.stages[0])].sum(axis=1) for name in names))
