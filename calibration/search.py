"""The search: bounds over the whole space, then simulations of the most promising plan first until the best is proven.

A plan's bound is tightened in turns before it is simulated: over all plans at once (`strategies.search.bounds`), by its schedule
alone, with its first rank's exchange (both in `refine`), by the longest path through its program (`longest`). The queue always
holds the least bound first; when that is no better than the best simulated plans, nothing that is left can beat them.

Simulations are decided in the order in which they were asked for, at most `window` ahead, so that the answer does not depend on
the engine or on how many workers it has.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from calibration.answer import Answer, Progress
from calibration.engines import Engine, Task
from calibration.predict import predict, prices_of
from calibration.results import Results, Row
from strategies.job import Job
from strategies.search.bounds import Bounds, bounds
from strategies.search.candidates import Candidates, candidates
from strategies.search.longest import longest_path
from strategies.search.objective import Limits, Objective, Scale
from strategies.search.refine import Refiner
from strategies.search.space import PER_GPU, Space
from strategies.search.work import kinds_of
from topologies.costs import rates
from topologies.reading import UserError

TIGHT = 3  # ways to tighten a bound
WINDOW = 2  # simulations that may be under way beyond the one that is decided next


def evaluate(job: Job) -> Row:
    """Simulate a job: its row without what was changed. Runs on workers."""
    try:
        summary = predict(job)
    except UserError as error:
        return {"hash": job.hash, "step": None, "error": str(error)}
    return {
        "hash": job.hash, "step": summary.step_seconds, "gpus": summary.gpus, "tokens_per_second": summary.tokens_per_second,
        "tokens_per_second_per_gpu": summary.tokens_per_second_per_gpu, "mfu": summary.mfu, "memory": summary.worst.peak,
        "fits": summary.fits, "bubble": summary.bubble, "exposed": summary.exposed, "events": summary.events, "error": None,
    }  # fmt: skip


@dataclass
class Site:
    """A cluster, model and profile of the space, with the plans on it that are left, and their bounds."""

    job: Job
    changes: dict[str, Any]
    plans: Candidates
    limits: Bounds
    refiner: Refiner
    scale: Callable[[int], Scale]


@dataclass
class Search:
    """One search. read: makes the job with other fields of cluster or model; tokens: of the whole training."""

    read: Callable[[dict[str, Any]], Job]
    space: Space
    objective: Objective
    engine: Engine
    limits: Limits = field(default_factory=Limits)
    tokens: float = 1e9
    price: float | None = None
    top: int = 1  # that are proven
    front: bool = False  # prove the Pareto front of time, cost and memory, too
    seconds: float = float("inf")
    results: Results = field(default_factory=Results)
    tell: Callable[[Progress], None] = lambda _: None
    window: int = WINDOW

    def run(self) -> Answer:
        """Search. Raises UserError for a space without plans."""
        self.began = time.perf_counter()
        self.rows: list[Row] = []
        self.refused: Counter[str] = Counter()
        self.pruned: Counter[str] = Counter()
        self.nearest: dict[str, tuple[float, str]] = {}
        self.heap: list[tuple[float, int, int, int]] = []  # bound, site and plan in order, level
        self.sites: list[Site] = []
        self.seen: set[str] = set()
        self.counts = dict.fromkeys(("allowed", "bounded", "tightened", "simulated", "known", "too big"), 0)
        for changes in self.space.sites():
            self._site(changes)
        bounded = time.perf_counter() - self.began
        if not self.counts["allowed"]:
            raise UserError(self._empty())
        stopped = self._best_first()
        total = time.perf_counter() - self.began
        self.rows.sort(key=lambda row: (row["value"], row["memory"], row["hash"]))
        left = min(self.heap)[0] if self.heap else float("inf")
        done = sum(row["value"] <= left for row in self.rows)
        return Answer(
            self.objective, self.rows, done, left, self.space.size, self.counts, self.refused, self.pruned,
            {name: text for name, (_, text) in self.nearest.items()}, {"bounds": bounded, "all": total}, stopped,
            self.front and not stopped,
        )  # fmt: skip

    # -- bounds ----------------------------------------------------------------------------------------------------------

    def _site(self, changes: dict[str, Any]) -> None:
        job = self.read(changes)
        batch = job.plan.global_batch or (PER_GPU * job.cluster.gpus if not job.plan.accumulation else job.resolve().global_batch)
        plan = job.plan.model_copy(update={"dp": None, "accumulation": None, "global_batch": batch})
        job = replace(job, plan=plan)
        found = candidates(job, self.space)
        self.refused += found.refused
        self.counts["allowed"] += len(found)
        if not len(found):
            return
        price, cluster = rates(job.cluster.node.gpu, self.price), job.cluster
        tokens = [float(one.global_batch * one.sequence) for one in found.resolved]

        def scale(plan: int) -> Scale:
            return Scale(cluster.gpus, tokens[int(found.rule[plan])], self.tokens, price)

        why = self.limits.of_site(scale(0))
        if why is not None:
            self._rule_out(why.split(":")[0], len(found), float(cluster.gpus), f"the smallest needs{why.split(':')[1]}")
            return
        self.tell(Progress(f"bounding {len(found):,} plans"))
        prices = prices_of(job)
        kinds = kinds_of(found, prices)
        limits = bounds(found, kinds, prices)
        self.refused += Counter(limits.reasons)
        site = Site(job, changes, found, limits, Refiner(found, kinds, limits, prices), scale)
        self._queue(site)

    def _queue(self, site: Site) -> None:
        """Put the plans that no constraint rules out into the queue."""
        found, limits, number = site.plans, site.limits, len(self.sites)
        self.sites.append(site)
        keep = limits.possible.copy()
        self.counts["bounded"] += int(keep.sum())
        capacity = self._capacity(site)
        keep = self._cut(
            keep,
            limits.memory,
            np.full(len(found), capacity),
            "memory",
            lambda v: f"{v / 1e9:,.1f} GB of {capacity / 1e9:,.1f} GB",
        )
        scales = [site.scale(int(first)) for first in np.unique(found.rule, return_index=True)[1]]
        of = np.unique(found.rule, return_inverse=True)[1]
        factor = np.array([self.objective.per_second(one) for one in scales])[of]
        for name in self.limits.of_step(scales[0]):
            most = np.array([self.limits.of_step(one)[name] for one in scales])[of]
            show = _limit(name, getattr(self.limits, name))
            keep = self._cut(keep, limits.step / most, np.ones(len(found)), name, show)
        value = limits.step * factor
        entries = [(bound, number, int(plan), 0) for plan, bound in zip(np.flatnonzero(keep), value[keep].tolist(), strict=True)]
        self.heap += entries
        heapq.heapify(self.heap)

    def _cut(self, keep: Any, value: Any, most: Any, name: str, show: Callable[[float], str]) -> Any:
        out = keep & (value > most)
        if out.any():
            least = float(value[out].min())
            self._rule_out(name, int(out.sum()), least, f"the least that one of them needs is {show(least)}")
        return keep & ~out

    def _rule_out(self, name: str, plans: int, least: float, text: str) -> None:
        self.pruned[name] += plans
        if name not in self.nearest or least < self.nearest[name][0]:
            self.nearest[name] = least, text

    def _capacity(self, site: Site) -> float:
        return min(site.job.cluster.node.gpu.memory, self.limits.memory or float("inf"))

    def _empty(self) -> str:
        reasons = "; ".join(f"{count:,} × {reason}" for reason, count in self.refused.most_common(4))
        return f"none of the {self.space.size:,} combinations of the space is a plan: {reasons}"

    # -- simulations -----------------------------------------------------------------------------------------------------

    def _best_first(self) -> str:
        """Simulate until the best are proven; why it stopped before, or nothing."""
        pending: deque[tuple[int, int, Job, Task | None]] = deque()
        stopped = ""
        try:
            while True:
                while len(pending) < self.window and not (stopped := self._late()):
                    entry = self._next()
                    if entry is None:
                        break
                    pending.append(self._start(*entry))
                if not pending:
                    return stopped
                number, plan, job, task = pending[0]
                row = self.results.rows[job.hash] if task is None else task.result()
                pending.popleft()
                self._decide(self.sites[number], plan, row, fresh=task is not None)
        except KeyboardInterrupt:
            stopped = "interrupted"
            for number, plan, _, _ in pending:
                heapq.heappush(
                    self.heap, (self._value(self.sites[number], plan, self.sites[number].limits.step[plan]), number, plan, TIGHT)
                )
            return stopped
        finally:
            self.results.close()

    def _late(self) -> str:
        return f"the time limit of {self.seconds:g} s" if time.perf_counter() - self.began > self.seconds else ""

    def _value(self, site: Site, plan: int, step: float) -> float:
        return float(step) * self.objective.per_second(site.scale(plan))

    def _worst(self) -> float:
        """What the next plan must beat: the last of the top."""
        values = sorted(row["value"] for row in self.rows)
        return values[self.top - 1] if len(values) >= self.top else float("inf")

    def _next(self) -> tuple[int, int, Job] | None:
        """The plan with the least bound, tightened; None when none can beat what was found."""
        while self.heap and (self.heap[0][0] < self._worst() or self.front):
            if self._late():
                return None
            bound, number, plan, level = heapq.heappop(self.heap)
            site = self.sites[number]
            if self.front and bound >= self._worst() and self._dominated(site, plan, bound):
                continue
            if level == TIGHT:
                job = site.plans.job_of(plan)
                if job.hash not in self.seen:
                    self.seen.add(job.hash)
                    return number, plan, job
                continue
            self.counts["tightened"] += level == 0
            finer = self._tighter(site, plan, level)
            heapq.heappush(self.heap, (max(bound, self._value(site, plan, finer)), number, plan, level + 1))
        return None

    def _tighter(self, site: Site, plan: int, level: int) -> float:
        if level < TIGHT - 1:
            return (site.refiner.passes, site.refiner.exchange)[level](plan)
        try:
            return longest_path(site.plans.job_of(plan), site.refiner.resolved(plan), prices_of(site.job))
        except UserError:  # what cannot be lowered is refused by its simulation, with the reason
            return 0.0

    def _dominated(self, site: Site, plan: int, bound: float) -> bool:
        """Whether a simulated plan is at least as good in time, cost and memory as this one can be."""
        step, scale = bound / self.objective.per_second(site.scale(plan)), site.scale(plan)
        here = (step / scale.tokens_per_step, step * scale.gpus / scale.tokens_per_step * (scale.rates.usd or 1.0))
        memory = float(site.limits.memory[plan])
        return any(row["pace"] <= here[0] and row["spend"] <= here[1] and row["memory"] <= memory for row in self.rows)

    def _start(self, number: int, plan: int, job: Job) -> tuple[int, int, Job, Task | None]:
        known = job.hash in self.results.rows
        return number, plan, job, None if known else self.engine.submit(evaluate, job)

    def _decide(self, site: Site, plan: int, row: Row, fresh: bool) -> None:
        changes = site.changes | site.plans.changes(plan)
        if fresh:
            row = row | {"changes": _plain(changes)}
            self.results.add(row)
        self.counts["simulated" if fresh else "known"] += 1
        if row["error"]:
            self.refused[row["error"]] += 1
        elif not row["fits"] or row["memory"] > self._capacity(site):
            self.counts["too big"] += 1
            capacity = self._capacity(site)
            self._rule_out(
                "memory",
                1,
                row["memory"],
                f"the least that one of them needs is {row['memory'] / 1e9:,.1f} GB of {capacity / 1e9:,.1f} GB",
            )
        else:
            self._take(site, plan, row)
        best = min((one["value"] for one in self.rows), default=None)
        self.tell(Progress("simulating", self.counts["simulated"], self._open(), best, self.objective.unit, self.pruned.total()))

    def _take(self, site: Site, plan: int, row: Row) -> None:
        scale = site.scale(plan)
        late = [name for name, most in self.limits.of_step(scale).items() if row["step"] > most]
        for name in late:
            self._rule_out(
                name,
                1,
                row["step"] / self.limits.of_step(scale)[name],
                f"the fastest that was simulated needs a step of {row['step']:.4g} s",
            )
        if late:
            return
        value = self._value(site, plan, row["step"])
        pace, spend = (
            row["step"] / scale.tokens_per_step,
            row["step"] * scale.gpus / scale.tokens_per_step * (scale.rates.usd or 1.0),
        )
        self.rows.append(row | {"value": value, "pace": pace, "spend": spend, "scale": scale, "bound": None})

    def _open(self) -> int:
        worst = self._worst()
        return sum(entry[0] < worst for entry in self.heap)


def _limit(name: str, asked: float) -> Callable[[float], str]:
    return lambda share: f"{name} ≤ {share * asked:,.4g}"


def _plain(changes: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON has."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
