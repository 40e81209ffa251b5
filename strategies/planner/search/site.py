"""A cluster, model and profile of a space, with the plans on it, their bounds, and which of them constraints rule out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.job import Job
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.every_plan import Bounds, bounds
from strategies.planner.bounds.layer_cost_table import kinds_of
from strategies.planner.bounds.longest_path import expected_path, longest_path
from strategies.planner.bounds.single_plan import Refiner
from strategies.planner.search.candidates import Candidates
from strategies.planner.search.objective import Limits, Objective, Scale
from strategies.predict import prices_of
from topologies.costs import Rates
from topologies.reading import UserError

TIGHT = 5  # ways to tighten a bound of one plan
_UNITS = {"days": "days", "cost": "dollars"}
Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
ANOMALY = 0.05  # of a step, that a copy may save by the order in which it lets others go: proofs are to within it of plans with
# offload. 4.7 % was seen of DualPipe, whose stages send both ways beside gathers on the same links, 0.1 % of other schedules


@dataclass
class RuledOut:
    """Plans that constraints rule out: how many each does, and what the nearest of them would need."""

    plans: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, constraint: str, plans: int, least: float, text: str) -> None:
        """So many plans; text: what the plan that needs `least` needs."""
        self.plans[constraint] += plans
        if constraint not in self.nearest or least < self.nearest[constraint][0]:
            self.nearest[constraint] = least, text


@dataclass
class Site:
    """One site. changes: fields of the job that make it; tokens: of the whole training."""

    job: Job
    changes: dict[str, Any]
    plans: Candidates
    limits: Bounds
    refiner: Refiner
    tokens: float
    rates: Rates
    # of each plan with states outside of the GPUs, the same plan without; −1 for others
    base: NDArray[np.int64] = field(init=False)
    steps: dict[int, float] = field(default_factory=dict)  # of plans: the tightest bound so far, or the step

    def __post_init__(self) -> None:
        self.base = np.where(self.limits.slower, self.plans.at_choice("plan.offload", None), -1)

    def floor(self, plan: int) -> float:
        """Seconds of a step of plan i, at least, by what is known of the same plan without offload.

        What is offloaded is moved, and updated by slower CPUs, besides all that is done without. A copy may delay one flow to
        the good of another (Graham 1969, doi:10.1137/0117039: anomalies of schedules): ANOMALY, which is not searched for.
        """
        base = int(self.base[plan])
        return max(self.steps.get(base, 0.0), float(self.limits.step[base])) if base >= 0 else 0.0

    @classmethod
    def of(cls, job: Job, changes: dict[str, Any], plans: Candidates, tokens: float, rates: Rates) -> Site:
        """Bound every plan."""
        prices = prices_of(job)
        kinds = kinds_of(plans, prices)
        limits = bounds(plans, kinds, prices)
        return cls(job, changes, plans, limits, Refiner(plans, kinds, limits, prices), tokens, rates)

    def scale(self, plan: int) -> Scale:
        """What turns a step of plan i into an objective."""
        return scale_of(self.plans, plan, self.tokens, self.rates)

    def _scale(self, tokens_per_step: float) -> Scale:
        return Scale(self.plans.job.cluster.gpus, tokens_per_step, self.tokens, self.rates)

    def value(self, plan: int, step: float, objective: Objective) -> float:
        """A step of plan i as an objective."""
        return float(step) * objective.per_second(self.scale(plan))

    def promising(self, asked: Limits, objective: Objective, out: RuledOut) -> tuple[Mask, Floats]:
        """Which plans no constraint rules out by its bound, and every plan's bound of the objective."""
        capacity = self.capacity(asked)
        keep = self.limits.possible.copy()
        keep = _cut(keep, self.limits.memory / capacity, "memory", lambda share: told_memory(share * capacity, capacity), out)
        each, which = self.plans.each(_tokens)
        scales, of = [self._scale(tokens) for tokens in each], which[self.plans.rule]
        for name in asked.of_step(scales[0]):
            most = np.array([asked.of_step(scale)[name] for scale in scales])[of]
            keep = _cut(keep, self.limits.step / most, name, budget(name, getattr(asked, name)), out)
        return keep, self.limits.step * np.array([objective.per_second(scale) for scale in scales])[of]

    def tighter(self, plan: int, level: int, capacity: float) -> float:
        """Seconds of a step of plan i, at least, by the way number `level` of TIGHT; the longest path bounds its memory, too, and
        is not looked for where that is more than `capacity`.
        """
        refiner = self.refiner
        if level < TIGHT - 1:
            return (refiner.waiting, refiner.passes, refiner.exchange, refiner.expected_exchange)[level](plan)
        return self._longest(plan, capacity)

    def _longest(self, plan: int, capacity: float) -> float:
        """See `strategies.planner.bounds.longest_path`."""
        asked = self.plans.job_of(plan), self.refiner.resolved(plan), prices_of(self.job), capacity
        try:
            longest, held = expected_path(*asked) or longest_path(*asked)
        except UserError:  # what cannot be lowered is refused by its simulation, with the reason
            return 0.0
        self.limits.memory[plan] = max(held, self.limits.memory[plan])
        return longest

    def capacity(self, asked: Limits) -> float:
        """Bytes that a GPU may hold."""
        return min((1 - asked.headroom) * self.job.cluster.node.gpu.memory, asked.memory or float("inf"))

    def over_budget(self, plan: int, step: float, asked: Limits, out: RuledOut) -> bool:
        """Rule out a plan that takes at least `step` seconds where that is more than it may."""
        over = {name: step / most for name, most in asked.of_step(self.scale(plan)).items() if step > most}
        for name, share in over.items():
            out.add(name, 1, share, f"none of them needs less than {budget(name, getattr(asked, name))(share)}")
        return bool(over)

    def too_big(self, row: dict[str, Any], asked: Limits, out: RuledOut) -> None:
        """Rule out a plan that was simulated."""
        capacity = self.capacity(asked)
        if row["memory"] > capacity:
            out.add("memory", 1, row["memory"], told_memory(row["memory"], capacity))
        else:
            out.add("memory of the nodes", 1, row["memory"], "what is offloaded has no room there")


def started(job: Job) -> Job:
    """The job with a global batch, and nothing of its plan that would contradict other degrees."""
    return replace(job, plan=job.plan.model_copy(update={"dp": None, "accumulation": None, "global_batch": job.global_batch}))


def scale_of(plans: Candidates, plan: int, tokens: float, rates: Rates) -> Scale:
    """See `Site.scale`."""
    return Scale(plans.job.cluster.gpus, _tokens(plans.resolved[int(plans.rule[plan])]), tokens, rates)


def _tokens(plan: Resolved) -> float:
    """Of a step."""
    return float(plan.global_batch * plan.sequence)


def _cut(keep: Mask, share: Floats, name: str, show: Callable[[float], str], out: RuledOut) -> Mask:
    """Without the plans that need more than all (1) of what they may."""
    over = keep & (share > 1)
    if over.any():
        least = float(share[over].min())
        out.add(name, int(over.sum()), least, f"none of them needs less than {show(least)}")
    return keep & ~over


def told_memory(needed: float, capacity: float) -> str:
    """With as many places as tell them apart."""
    texts = ((f"{needed / 1e9:,.{places}f}", f"{capacity / 1e9:,.{places}f}") for places in range(1, 9))
    short, long = next(pair for pair in texts if pair[0] != pair[1] or len(pair[0].partition(".")[2]) == 8)
    return f"{short} GB of {long} GB"


def budget(name: str, asked: float) -> Callable[[float], str]:
    """How a share of what was asked is told."""
    return lambda share: f"{share * asked:,.5g} {_UNITS[name]}, of {asked:,.4g}"
