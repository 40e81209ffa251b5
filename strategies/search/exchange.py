"""A tighter bound on the step of one plan: what its first rank moves with other dp ranks, as its own strategy writes it.

The strategy lowers one microbatch, and the last, of the first rank's stages, and every collective gets the simulation's price
with nothing in its way. Plans whose first ranks exchange the same share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.prices import Prices
from sim.pricing import Pricing
from sim.program import Cohort, Collective, Op, Program
from strategies.data_parallel import hooks
from strategies.job import Job
from strategies.layers import parts
from strategies.resolved import Resolved
from strategies.search.layout import layout_of, splits
from strategies.stage import Stage

Seconds = dict[str, float]  # by stream


class Exchange(NamedTuple):
    """Seconds that each stream of the first rank is busy with communication, for each of its chunks in turn.

    forward, backward: of one microbatch; final: backward of the last microbatch; update: at the optimizer's pass, of all chunks;
    first: gathers that a forward and a backward pass wait for after the rank's pass before.
    """

    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    final: tuple[Seconds, ...]
    update: Seconds
    first: tuple[float, ...]

    def streams(self, microbatches: int) -> float:
        """Seconds of a step in which the busiest of the streams communicates."""
        names = {name for one in (*self.forward, *self.final, self.update) for name in one}
        every = (
            sum(f.get(name, 0.0) * microbatches + b.get(name, 0.0) * (microbatches - 1) + last.get(name, 0.0)
                for f, b, last in zip(self.forward, self.backward, self.final, strict=True)) + self.update.get(name, 0.0)
            for name in names
        )  # fmt: skip
        return max(every, default=0.0)


class Exchanges:
    """Exchanges of plans of one job; those that share one ask once."""

    def __init__(self, job: Job, prices: Prices) -> None:
        self.job, self.prices = job, prices
        self._known: dict[Resolved, Exchange] = {}

    def of(self, plan: Resolved) -> Exchange:
        """Of the plan's first rank. Work of layers does not matter."""
        plain = plan.plan.model_copy(update={"recompute": "none", "microbatch": 1})
        key = plan.model_copy(update={"plan": plain, "microbatches": 2, "global_batch": 0})
        if key not in self._known:
            self._known[key] = _exchange(
                self.job, key, splits(plan.plan.schedule, plan.plan.pp, plan.microbatches, plan.chunks), self.prices
            )
        return self._known[key]


def _exchange(job: Job, plan: Resolved, split: bool, prices: Prices) -> Exchange:
    hook, cohort = hooks[plan.plan.data_parallel](), Cohort({"pp": 0})
    sections: list[tuple[int, int]] = []
    stages = _stages(job, plan, cohort)
    for stage in stages:
        for step in ("forward", "backward", "final"):
            start = len(cohort.ops)
            if step == "forward":
                hook.forward(stage, 0, ())
            else:
                if split:
                    hook.input_gradient(stage, 0, ())
                hook.backward(stage, 0, (), step == "final", split)
            sections.append((start, len(cohort.ops)))
    start = len(cohort.ops)
    for stage in stages:
        hook.update(stage)
    price = _prices(job, plan, cohort.ops, prices)
    each = [_by_stream(cohort.ops[a:b], price) for a, b in sections]
    waits = [price.get(id(cohort.ops[a]), 0.0) for a, _ in sections]
    first = tuple(waits[i] + waits[i + 1] for i in range(0, len(waits), 3))
    return Exchange(tuple(each[0::3]), tuple(each[1::3]), tuple(each[2::3]), _by_stream(cohort.ops[start:], price), first)


def _stages(job: Job, plan: Resolved, cohort: Cohort) -> list[Stage]:
    work, layout = parts(job.model, plan), layout_of(plan)
    result = []
    for chunk, number in enumerate(layout.stages[0]):
        own = work.stage(layout.bounds[number], layout.bounds[number + 1] - layout.bounds[number])
        own = [*([work.embedding] if number == 0 else []), *own, *([work.head] if number == layout.last else [])]
        result.append(Stage(number, 0, chunk, cohort, own, plan, job.model))
    return result


def _prices(job: Job, plan: Resolved, ops: Sequence[Op], prices: Prices) -> dict[int, float]:
    """Seconds of each communication among dp ranks."""
    talk = [op for op in ops if isinstance(op.work, Collective)]
    program = Program(plan.grid, [Cohort({"pp": 0}, talk)], 1, 1, plan.plan.precision, 1, 1)
    pricing = Pricing(program, job.cluster.topology(), prices)
    return {id(op): pricing.collective(op.work, 0).alone for op in talk if isinstance(op.work, Collective)}


def _by_stream(ops: Sequence[Op], price: dict[int, float]) -> Seconds:
    total: Seconds = {}
    for op in ops:
        if id(op) in price:
            total[op.stream] = total.get(op.stream, 0.0) + price[id(op)]
    return total
