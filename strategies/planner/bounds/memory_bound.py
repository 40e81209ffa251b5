"""How much the fullest rank holds, at least, by its program alone: what is there whenever its next pass begins, however long
communication takes.

Passes follow each other. What they take and give back is known in their order; what communication takes counts from the pass that
waits for it, and what it gives back is gone as soon as all that it waits for is over.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from sim.pricing.prices import Prices
from sim.program import COMPUTE, MEMORY_KINDS, Cohort, Memory, Program
from strategies.planner.bounds.every_plan import SLACK

Ended = dict[str, int]  # of each stream: how many of its ops have ended


def least_memory(program: Program, prices: Prices) -> float:
    """Bytes of the fullest rank, at least, as the device shows them."""
    overhead, axes = prices.profile.overhead, sum(degree > 1 for _, degree in program.grid.sizes)
    most = _most(program)
    reserve = 0.0 if program.expandable else overhead.reserve
    return (most * (1 + reserve) + overhead.context + axes * overhead.communicator) * (1 - SLACK)


@lru_cache(maxsize=16)
def _most(program: Program) -> float:
    """The most that a rank holds when one of its passes begins."""
    return max(_held(number, cohort) for number, cohort in enumerate(program.cohorts))


def _held(number: int, cohort: Cohort) -> float:
    """The most that a rank of a cohort holds when one of its passes begins."""
    before = _before(number, cohort)
    passes = [op for op in cohort.ops if op.stream == COMPUTE]
    change = [0.0] * (len(passes) + 1)  # by the passes that have ended
    at = 0
    known: Ended = {}  # of each other stream, how many of its ops surely have started
    allocated: dict[str, list[float]] = {}  # by each of its ops
    for op, ended in zip(cohort.ops, before, strict=True):
        took, gave = _total(op.allocate), _total(op.free)
        if op.stream != COMPUTE:
            allocated.setdefault(op.stream, []).append(max(0.0, took - gave))
            change[ended.get(COMPUTE, 0)] -= max(0.0, gave - took)
            continue
        for stream, count in ended.items():
            if stream != COMPUTE:
                first, known[stream] = known.get(stream, 0), max(count, known.get(stream, 0))
                change[at] += sum(allocated[stream][first:count])
        at += 1
        change[at] += took - gave
    there = accumulate(change, initial=_total(cohort.resident))
    next(there)
    return max((held + _total(op.allocate) for held, op in zip(there, passes, strict=False)), default=_total(cohort.resident))


def _before(number: int, cohort: Cohort) -> list[Ended]:
    """Of each op, what has surely ended when it starts, by what it waits for on its own rank."""
    result: list[Ended] = []
    last: dict[str, Ended] = {}  # of each stream: what has ended with its latest op
    after: list[tuple[str, int, Ended]] = []  # of each op: its stream, which op of it, and what has ended with it
    for op in cohort.ops:
        ended = last.get(op.stream, {})
        for other, position in op.after:
            if other == number and position < len(after):
                stream, count, more = after[position]
                if ended.get(stream, 0) < count:  # otherwise it is known, with all that had ended with it
                    ended = ended | {name: most for name, most in more.items() if most > ended.get(name, 0)}
        result.append(ended)
        own = 1 + (ended.get(op.stream, 0) if op.stream in last else 0)
        mine = {**ended, op.stream: own}
        last[op.stream] = mine
        after.append((op.stream, own, mine))
    return result


@lru_cache(maxsize=4096)
def _total(memory: Memory) -> float:
    """Bytes that tensors take; what the allocator only keeps besides is not counted."""
    return sum(size for kind, size in memory if kind in MEMORY_KINDS)
