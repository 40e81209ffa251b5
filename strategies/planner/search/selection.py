"""Which plan a search simulates next: that with the least bound, tightened in turns before; every other time a probe."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from strategies.job import Job
from strategies.planner.search.best_plans import BestPlans
from strategies.planner.search.deadline import Deadline, TimeUp
from strategies.planner.search.objective import Limits
from strategies.planner.search.open_plans import Entry, OpenPlans, Place
from strategies.planner.search.probes import Probes
from strategies.planner.search.site import TIGHT, Floats, Mask, RuledOut, Site

PROBING = 16  # simulations after which bounds are thought to be loose
Asked = tuple[int, int, Job]  # number of the site, number of the plan on it, and its job


@dataclass
class Selection:
    """The plans of all sites that are not decided. limits, within, front: see `Search`; best: what a plan must beat; out: what
    constraints rule out.
    """

    best: BestPlans
    deadline: Deadline
    limits: Limits
    within: float
    front: bool
    out: RuledOut
    tightened: int = 0  # plans whose bound was tightened
    sites: list[Site] = field(default_factory=list)
    open: OpenPlans = field(default_factory=OpenPlans)
    probes: Probes = field(default_factory=Probes)
    seen: set[str] = field(default_factory=set)  # hashes of jobs whose simulation was asked for
    _probing: bool = False  # whether the next simulation is a probe

    def add(self, site: Site, keep: Mask, value: Floats) -> None:
        """One more site, with the plans `keep` and their bounds of the objective."""
        self.probes.add(site, keep, value)
        self.open.add(len(self.sites), zip(np.flatnonzero(keep).tolist(), value[keep].tolist(), strict=True))
        self.sites.append(site)

    def next(self) -> Asked | None:
        """The plan to simulate; None when none can beat what was simulated, or the time is over."""
        asked = self._probe() or self._tightest()
        if asked is not None:
            self._probing = not self._probing
        return asked

    def reopen(self) -> None:
        """Simulations under way were given up: those plans are open again, and so are all that waited for them."""
        self.open.reopen(self._entry)

    def least(self, decided: Place) -> float:
        """The least bound of what is not ruled out; also of plans whose simulation is under way, but for `decided`."""
        under_way = (self._entry(*place).bound for place in self.open.running if place != decided)
        return min((self.open.least, *under_way, *self.open.waiting))

    def _entry(self, number: int, plan: int) -> Entry:
        site = self.sites[number]
        step = max(float(site.limits.step[plan]), site.steps.get(plan, 0.0))  # as it was tightened
        return Entry(site.value(plan, step, self.best.objective), number, plan, TIGHT)

    def _probe(self) -> Asked | None:
        """When the best is not proven by then, every other time: a plan of a kind that none was simulated of yet."""
        due = self._probing and len(self.open.asked) >= PROBING
        probe = self.probes.next(self._least()) if due else None
        return self._ask(*probe) if probe else None

    def _least(self) -> float:
        """What is left must have a lower bound to be looked at."""
        return self.best.worst * (1 - self.within)

    def _ask(self, number: int, plan: int) -> Asked | None:
        """The plan's job to be simulated, unless it was."""
        job = self.sites[number].plans.job_of(plan)
        if job.hash not in self.seen:
            self.open.running.add((number, plan))
        self.open.asked.add((number, plan))
        self.probes.simulated(number, plan)
        if job.hash in self.seen:
            return None
        self.seen.add(job.hash)
        return number, plan, job

    def _tightest(self) -> Asked | None:
        """The plan with the least bound, tightened."""
        while self.open.heap and (self.open.least < self._least() or self.front):
            if self.deadline.over:
                return None
            entry = self.open.pop()
            try:
                chosen = self._look(entry)
            except TimeUp:  # what is under way may be done
                self.open.push(entry)
                chosen = None
            self.open.settle()
            if chosen:
                return chosen
        return None

    def _look(self, entry: Entry) -> Asked | None:
        """The plan, if it is to be simulated; otherwise it goes back into the queue with a tighter bound, or is ruled out."""
        bound, number, plan, level = entry
        site = self.sites[number]
        if entry.place in self.open.asked:
            return None
        if self.front and bound >= self.best.worst and self.best.dominates(site, plan, bound):
            return None
        if self._follows(entry):
            return None
        if site.over_budget(plan, bound / self.best.objective.per_second(site.scale(plan)), self.limits, self.out):
            return None
        if level == TIGHT:
            return self._ask(number, plan)
        self.tightened += level == 0
        capacity = site.capacity(self.limits)
        with self.deadline.cut():
            finer = site.tighter(plan, level, capacity)
        site.steps[plan] = max(finer, site.steps.get(plan, 0.0))
        if site.limits.memory[plan] > capacity:
            site.too_big({"memory": float(site.limits.memory[plan])}, self.limits, self.out)
        else:
            self.open.push(Entry(max(bound, site.value(plan, finer, self.best.objective)), number, plan, level + 1))
        return None

    def _follows(self, entry: Entry) -> bool:
        """Whether the same plan without offload puts this one further back, or is being simulated."""
        site = self.sites[entry.site]
        base = entry.site, int(site.base[entry.plan])
        if base in self.open.running:
            self.open.wait(entry, base)
            return True
        floor = site.value(entry.plan, site.floor(entry.plan), self.best.objective)
        if floor > entry.bound:
            self.open.push(entry._replace(bound=floor))
        return floor > entry.bound
