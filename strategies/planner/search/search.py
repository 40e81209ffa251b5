"""The search: bounds over the whole space, then simulations of the most promising plan first until the best is proven.

A plan's bound is tightened in turns before it is simulated: over all plans at once (`strategies.planner.bounds.every_plan`), by
its slowest rank, by its schedule alone, with its first rank's exchange, the same of GPUs that are not quite alike (all in
`strategies.planner.bounds.single_plan`), by the longest path through its program
(`strategies.planner.bounds.longest_path`). The least bound comes first (`strategies.planner.search.selection`); when
that is no better than the best simulated plans, nothing that is left can beat them.

Simulations are decided in the order in which they were asked for, at most `window` ahead, so that the answer does not depend on
the engine or on how many workers it has.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from strategies.job import Job
from strategies.planner.arguments import differences
from strategies.planner.search.answer import Answer, Progress, order
from strategies.planner.search.best_plans import BestPlans
from strategies.planner.search.candidates import Candidates, candidates
from strategies.planner.search.deadline import Deadline, TimeUp
from strategies.planner.search.delivered import evaluation
from strategies.planner.search.evaluate import evaluate, version_of
from strategies.planner.search.objective import Limits, Objective
from strategies.planner.search.results import Results, Row
from strategies.planner.search.selection import Selection
from strategies.planner.search.site import RuledOut, Site, budget, scale_of, started
from strategies.planner.search.space import Space
from strategies.planner.search.workers.executors import Engine, Task
from strategies.predict import uncollected
from topologies.costs import rates
from topologies.reading import UserError, plain

WINDOW = 2  # simulations that may be under way beyond the one that is decided next


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
    seconds: float = float("inf")  # after which it stops, wherever it is
    within: float = 0.0  # stop when nothing that is left can be better by more than this part
    results: Results = field(default_factory=Results)
    tell: Callable[[Progress], None] = lambda _: None
    window: int = WINDOW
    began: float = field(default_factory=time.perf_counter)

    def run(self) -> Answer:
        """Search. Raises UserError for a space without plans."""
        self._begin()
        with uncollected():  # plans and bounds stay to the end, and workers that are forked look through nothing either
            return self._run()

    def _run(self) -> Answer:
        looked_at, sites = 0, list(self.space.sites())
        with suppress(TimeUp):
            for changes in sites:
                with self.deadline.cut():
                    site_plans = self._bounded(changes)
                looked_at += 1
                self._queue(*site_plans)
        self.counts["unseen"] = self.space.size // len(sites) * (len(sites) - looked_at)
        bounded = time.perf_counter() - self.began
        if not self.counts["allowed"] and looked_at == len(sites):
            raise UserError(self._empty())
        stopped = self._best_first()
        total = time.perf_counter() - self.began
        return self._answer(looked_at, len(sites), stopped, {"bounds": bounded, "all": total})

    def _begin(self) -> None:
        self.deadline = Deadline(self.seconds, self.began)
        self.best = BestPlans(self.objective, self.top)
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.out = RuledOut()
        self.ended: KeyboardInterrupt | None = None
        self.selection = Selection(self.best, self.deadline, self.limits, self.within, self.front, self.out)
        names = ("allowed", "same", "bounded", "tightened", "simulated", "known", "too big", "set aside", "unseen")
        self.counts = dict.fromkeys(names, 0)

    def _answer(self, looked_at: int, sites: int, stopped: str, seconds: dict[str, float]) -> Answer:
        """The best plans, and what nothing that is left can beat. looked_at: how many of the sites."""
        rows, bounds = sorted(self.best.rows, key=order), self.selection.open.bounds
        left = min(bounds, default=float("inf"))
        self.counts["tightened"] = self.selection.tightened
        self.counts["open"] = sum(bound < self.best.worst for bound in bounds)
        if looked_at < sites:
            missing = f"{sites - looked_at} of {sites} clusters not looked at"
            stopped, left = f"{stopped}, {missing if sites > 1 else 'before all bounds were known'}", 0.0
        elif not self.counts["open"] and not self.front and not self.ended:
            stopped = ""  # whatever the clock says now
        elif not stopped and left < self.best.worst:
            stopped = f"within the {self.within:.3g} that was asked for"
        return Answer(
            self.objective,
            rows,
            sum(row["value"] <= left for row in rows),
            left,
            self.space.size,
            self.counts,
            self.refused,
            self.out.plans,
            {name: text for name, (_, text) in self.out.nearest.items()},
            seconds,
            stopped,
            self.front and not stopped,
            self.examples,
            self.ended,
        )

    # -- bounds ----------------------------------------------------------------------------------------------------------

    def _bounded(self, changes: dict[str, Any]) -> tuple[Candidates, str | None, Site | None]:
        """The plans of one site; if there are any, the constraint that rules out all of them, or them with their bounds."""
        asked = self.read(changes)
        for effect in asked.effects:
            if not effect.alike:
                raise UserError(
                    f"effect '{effect}': a search proves by lower bounds, which random times may undercut; leave it out"
                )
        job = started(asked)
        plans, price = candidates(job, self.space), rates(job.cluster.node.gpu, self.price)
        why = self.limits.of_site(scale_of(plans, 0, self.tokens, price)) if len(plans) else None
        if why is not None or not len(plans):
            return plans, why, None
        self.tell(Progress(f"bounding {len(plans):,} plans"))
        return plans, None, Site.of(job, changes | differences(asked, job), plans, self.tokens, price)

    def _queue(self, plans: Candidates, why: str | None, site: Site | None) -> None:
        """Put the plans of one site that no constraint rules out into the queue."""
        self.refused += plans.refused
        self.examples = plans.examples | self.examples
        self.counts["allowed"] += len(plans)
        self.counts["same"] += plans.same
        if why is not None:
            name, needed = why.split(":")
            self.out.add(name, len(plans), float(plans.job.cluster.gpus), f"the smallest needs{needed}")
        if site is None:
            return
        self.refused += Counter(site.limits.reasons)
        self.counts["bounded"] += int(site.limits.possible.sum())
        keep, value = site.promising(self.limits, self.objective, self.out)
        self.selection.add(site, keep, value)

    def _empty(self) -> str:
        reasons = "; ".join(f"{count:,} × {self.examples.get(reason, reason)}" for reason, count in self.refused.most_common(4))
        return f"none of the {self.space.size:,} combinations of the space is a plan: {reasons}"

    # -- simulations -----------------------------------------------------------------------------------------------------

    def _best_first(self) -> str:
        """Simulate until the best are proven; why it stopped before, or nothing."""
        pending: deque[tuple[int, int, Task | Row]] = deque()
        try:
            while True:
                while len(pending) < self.window and not self._late():
                    asked = self.selection.next()
                    if asked is None:
                        break
                    with self.deadline.cut() if self.engine.immediate else nullcontext():
                        pending.append(self._start(*asked))
                if not pending:
                    return self._late()
                number, plan, task = pending[0]
                row = self._row(task)
                self._decide(number, plan, row, fresh=isinstance(task, Task))
                pending.popleft()
                self.selection.open.release((number, plan))
        except TimeUp:
            self._reopen(pending)
            return self._late()
        except KeyboardInterrupt as error:
            self.ended = error
            self._reopen(pending)
            return "interrupted"
        finally:
            self.results.close()

    def _row(self, task: Task | Row) -> Row:
        """What was simulated, waited for until the time is over."""
        if not isinstance(task, Task):
            return task
        try:
            row: Row = task.result(None if self.deadline.left == float("inf") else self.deadline.left)
        except TimeoutError:
            raise TimeUp from None
        return row

    def _reopen(self, pending: Iterable[tuple[int, int, Task | Row]]) -> None:
        """Give up what is under way."""
        tasks = [task for _, _, task in pending if isinstance(task, Task)]
        for task in tasks:
            task.cancel()
        if tasks:
            self.engine.abandon()
        self.selection.reopen()

    def _late(self) -> str:
        """Which limit is over."""
        return f"the time limit of {self.seconds:g} s" if self.deadline.over else ""

    def _start(self, number: int, plan: int, job: Job) -> tuple[int, int, Task | Row]:
        """Ask for its simulation, unless one by the same prices and code is known."""
        known = self.results.rows.get(job.hash)
        delivered = self.objective.delivered is not None
        if (
            known is not None
            and known["version"] == version_of(job)
            and (not delivered or known.get("run_tokens") == self.tokens)
        ):
            return number, plan, known
        self.counts["set aside"] += known is not None
        return number, plan, self.engine.submit(evaluation(self.tokens) if delivered else evaluate, job)

    def _decide(self, number: int, plan: int, row: Row, fresh: bool) -> None:
        site = self.selection.sites[number]
        changes = site.changes | site.plans.changes(plan)
        row = row | {"changes": {name: plain(value) for name, value in changes.items()}}  # of this job, whose a known row is not
        if fresh:
            self.results.add(row)
        self.counts["simulated" if fresh else "known"] += 1
        site.steps[plan] = row["step"] or 0.0
        if row["error"]:
            self.refused[row["error"]] += 1
        elif not row["fits"] or row["memory"] > site.capacity(self.limits):
            self.counts["too big"] += 1
            site.too_big(row, self.limits, self.out)
        else:
            self._take(site, plan, row)
        best = min((row["value"] for row in self.best.rows), default=None)
        waiting = self.selection.open
        gap = max(0.0, 1 - self.selection.least((number, plan)) / best) if best else 0.0
        simulated, ruled_out = self.counts["simulated"], self.out.plans.total()
        self.tell(Progress("simulating", simulated, waiting.count(self.best.worst), best, gap, self.objective.display, ruled_out))

    def _take(self, site: Site, plan: int, row: Row) -> None:
        """A plan that fits: ruled out by a constraint, or one of the best."""
        scale = site.scale(plan)
        step = row["step"] * (row["stretch"] if self.objective.delivered else 1.0)
        late = {name: most for name, most in self.limits.of_step(scale).items() if step > most}
        for name, most in late.items():
            needed = budget(name, getattr(self.limits, name))(step / most)
            self.out.add(name, 1, step / most, f"the best that was simulated needs {needed}")
        if not late:
            self.best.add(site, plan, row)
