"""A tighter bound on the step of one plan: what its first rank moves with other dp ranks, as its own strategy writes it.

The strategy lowers one microbatch, and the last, of the first rank's stages, and every collective gets the simulation's price
with nothing in its way. Plans whose first ranks exchange the same share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sim.pricing.prices import Prices
from sim.pricing.transfers.collective_costs import CollectiveCosts
from sim.program import Cohort, Collective, Op, Program, Send, Work
from strategies.data_parallel.hook import hook_of
from strategies.job import Job
from strategies.layers.model_costs import parts
from strategies.lowering.stage import Stage
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.layer_layout import gatherings, layout_of, splits, through
from strategies.planner.bounds.symmetric_groups import alike

Seconds = dict[str, float]  # by stream
WorkSeconds = dict[Work, float]
HOST_STREAMS = ("to host", "from host", "nvme read", "nvme write")  # streams to and from the host; all others are between ranks


class Exchange(NamedTuple):
    """Seconds that each stream of the first rank is busy with communication, for each of its chunks in turn.

    forward, backward: of one microbatch; begin: forward of the first microbatch; final: backward of the last one; updates: at the
    optimizer's passes; first: gathers of sharded parameters that (a forward, a backward) pass waits for after the rank's pass
    before.
    """

    begin: tuple[Seconds, ...]
    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    final: tuple[Seconds, ...]
    updates: tuple[Seconds, ...]
    first: tuple[tuple[float, float], ...]

    def busy(self, plan: Resolved) -> Seconds:
        """Seconds of a step in which each stream communicates."""
        names = {name for seconds in (*self.begin, *self.final, *self.updates) for name in seconds}
        backward = through(plan) - 1
        forward = 0 if plan.keeps_parameters else backward  # of m + 1 passes that gather, or 1 without reshard
        return {
            name: sum(
                begin.get(name, 0.0)
                + f.get(name, 0.0) * forward
                + b.get(name, 0.0) * backward
                + last.get(name, 0.0)
                + update.get(name, 0.0)
                for begin, f, b, last, update in zip(
                    self.begin, self.forward, self.backward, self.final, self.updates, strict=True
                )
            )
            for name in names
        }

    def waiting(self, plan: Resolved) -> float:
        """Seconds of a step in which the rank's passes wait for their first gathers."""
        if plan.keeps_parameters:
            if plan.reshard:
                return (plan.microbatches + 1) * sum(map(min, self.first))
            return sum(forward for forward, _ in self.first)
        if plan.reshard:
            return through(plan) * sum(forward + backward for forward, backward in self.first)
        times = gatherings(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
        return sum(self.first[chunk][0] * forward for chunk, (forward, _) in enumerate(times))

    @property
    def updating(self) -> float:
        """Seconds in which the busiest stream communicates from the first update on."""
        names = {name for update in self.updates for name in update if name not in HOST_STREAMS}
        return max((sum(update.get(name, 0.0) for update in self.updates) for name in names), default=0.0)

    @property
    def last(self) -> float:
        """Seconds of communication that follow each other from the last chunk's update on; copies may be beside it."""
        return sum(seconds for name, seconds in self.updates[-1].items() if name not in HOST_STREAMS)


class Exchanges:
    """Exchanges of plans of one job; those that share one ask once."""

    def __init__(self, job: Job, prices: Prices) -> None:
        self.job, self.prices = job, prices
        self._known: dict[tuple[Resolved, bool], Exchange] = {}

    def of(self, plan: Resolved) -> Exchange:
        """Of the plan's first rank. Work of layers does not matter."""
        update: dict[str, Any] = {"microbatch": 1, "microbatches": 2, "global_batch": 0}
        if plan.recompute_method != "uniform":  # where layers that are recomputed together share buckets
            update |= {"recompute": "none", "recompute_method": None, "recompute_layers": None}
        key = plan.model_copy(update=update), splits(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
        if key not in self._known:
            self._known[key] = _exchange(self.job, *key, self.prices)
        return self._known[key]


def _exchange(job: Job, plan: Resolved, split: bool, prices: Prices) -> Exchange:
    hook, cohort = hook_of(plan.data_parallel).for_plan(plan), Cohort({"pp": 0})
    sections: list[tuple[int, int]] = []
    stages = _stages(job, plan, cohort)
    for stage in stages:
        for step in ("forward", "backward", "forward", "final"):
            start = len(cohort.ops)
            if step == "forward":
                hook.forward(stage, len(sections) % 4 // 2, ())
            else:
                if split:
                    hook.input_gradient(stage, 0, ())
                hook.backward(stage, 0, (), step == "final", split)
            sections.append((start, len(cohort.ops)))
    updates = []
    for stage in stages:
        start = len(cohort.ops)
        hook.update(stage)
        updates.append((start, len(cohort.ops)))
    price = _prices(job, plan, cohort.ops, prices)
    each = [_by_stream(cohort.ops[a:b], price) for a, b in sections]
    none = plan.runtime.looks_ahead or "parameter" not in hook.shards
    waits = [0.0 if none else _gather(cohort.ops[a], price) for a, _ in sections]
    first = tuple((waits[i], waits[i + 1]) for i in range(0, len(waits), 4))
    last = tuple(_by_stream(cohort.ops[a:b], price) for a, b in updates)
    return Exchange(tuple(each[0::4]), tuple(each[2::4]), tuple(each[1::4]), tuple(each[3::4]), last, first)


def _gather(op: Op, price: WorkSeconds) -> float:
    return price.get(op.work, 0.0) if isinstance(op.work, Collective) else 0.0


def _stages(job: Job, plan: Resolved, cohort: Cohort) -> list[Stage]:
    work, layout = parts(job.model, plan), layout_of(plan)
    result = []
    for chunk, number in enumerate(layout.stages[0]):
        own = work.stage(layout.bounds[number], layout.bounds[number + 1] - layout.bounds[number])
        own = [*([work.embedding] if number == 0 else []), *own, *([work.head] if number == layout.last else [])]
        result.append(Stage(number, 0, chunk, cohort, own, plan, job.model))
    return result


def _prices(job: Job, plan: Resolved, ops: Sequence[Op], prices: Prices) -> WorkSeconds:
    """Seconds of each communication among dp ranks and with the host."""
    talk = [op for op in ops if isinstance(op.work, Collective | Send)]
    program = Program(plan.grid, [Cohort({"pp": 0}, talk)])
    pricing = CollectiveCosts(program, job.cluster.topology(), prices)
    together = alike(job.cluster, plan.grid)
    return {
        op.work: pricing.collective(op.work, 0).alone if together else pricing.least(op.work, 0)
        for op in talk
        if isinstance(op.work, Collective | Send)
    }


def _by_stream(ops: Sequence[Op], price: WorkSeconds) -> Seconds:
    total: Seconds = {}
    for op in ops:
        if op.work in price:
            total[op.stream] = total.get(op.stream, 0.0) + price[op.work]
    return total
