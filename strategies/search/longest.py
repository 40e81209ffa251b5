"""The tightest bounds on one plan: the longest path through its program, and what the program holds (`held`).

Every op takes at least as long as with nothing in its way, and starts when its stream and all that it waits for are done. Blocks
cost what `strategies.search.work` says; collectives among dp ranks their price on two pipeline ranks, and nothing on others;
sends between nodes their bytes over one rank's NICs.
"""

from __future__ import annotations

from sim.grid import Grid
from sim.prices import Prices
from sim.pricing import Pricing
from sim.program import Block, Cohort, Collective, Op, Program, Send
from strategies.job import Job
from strategies.lower import lower
from strategies.resolved import Resolved
from strategies.search.bounds import SLACK, bounded
from strategies.search.held import least_memory
from strategies.search.work import inside


def longest_path(job: Job, plan: Resolved, prices: Prices) -> tuple[float, float]:
    """Seconds of a step of `plan` and bytes of its fullest rank, at least."""
    if not bounded(plan):
        return 0.0, 0.0
    program = lower(job.model, plan)
    if program.cohorts[0].steady or len(program.cohorts) != plan.plan.pp:
        return 0.0, 0.0
    seconds = _longest(program, _durations(job, plan, program, prices)) / program.steps * (1 - SLACK)
    return seconds, least_memory(program, prices)


def _durations(job: Job, plan: Resolved, program: Program, prices: Prices) -> dict[int, float]:
    """Seconds of each distinct piece of work, by identity; what is not in it takes no time."""
    topology, grid = job.cluster.topology(), inside(plan)
    blocks = {id(op.work): op for cohort in program.cohorts for op in cohort.ops if isinstance(op.work, Block)}
    at = {"pp": 0} if grid.degree("pp") > 1 else {}
    local = Pricing(_program(plan, grid, at, list(blocks.values())), topology, prices)
    result = {key: local.block(op.work, 0).busy for key, op in blocks.items() if isinstance(op.work, Block)}
    for number in _talking(program):
        cohort = program.cohorts[number]
        own = {id(op.work): op for op in cohort.ops if _own(op.work) and (not number or isinstance(op.work, Collective))}
        talk = Pricing(_program(plan, plan.grid, cohort.at, list(own.values())), topology, prices)
        result |= {key: talk.least(op.work, 0) for key, op in own.items() if isinstance(op.work, Collective | Send)}
    node, nic = job.cluster.node, prices.profile.links["nic"].efficiency
    rate = node.nic * max(1.0, node.nics / node.gpus) * nic
    if node.nics and not job.cluster.fabric.direct:
        where = [int(plan.grid.groups((), cohort.at).ravel()[0]) // node.gpus for cohort in program.cohorts]
        for number, cohort in enumerate(program.cohorts):
            for op in cohort.ops:
                if isinstance(op.work, Send) and where[number] != where[op.work.to]:
                    result[id(op.work)] = op.work.bytes / rate
    return result


def _talking(program: Program) -> set[int]:
    """The first pipeline rank, and the one whose ranks exchange most: what they exchange is priced."""
    sizes = [
        sum(op.work.bytes * op.work.repeat for op in cohort.ops if isinstance(op.work, Collective) and _own(op.work))
        for cohort in program.cohorts
    ]
    return {0, sizes.index(max(sizes))}


def _own(work: Block | Collective | Send) -> bool:
    """Whether it is between the ranks of one pipeline rank, or of each with its host."""
    return (isinstance(work, Collective) and not work.cohorts) or (isinstance(work, Send) and work.route is not None)


def _program(plan: Resolved, grid: Grid, at: dict[str, int], ops: list[Op]) -> Program:
    return Program(grid, [Cohort(at, ops)], 1, 1, plan.plan.precision, 1, 1)


def _longest(program: Program, seconds: dict[int, float]) -> float:
    """When the last op ends. Ranks take turns: each goes on until an op waits for one that has not been timed."""
    ends: list[list[float]] = [[] for _ in program.cohorts]
    streams: list[dict[str, float]] = [{} for _ in program.cohorts]
    moving = True
    while moving:
        moving = False
        for number, cohort in enumerate(program.cohorts):
            mine, free = ends[number], streams[number]
            for op in cohort.ops[len(mine) :]:
                start = free.get(op.stream, 0.0)
                for other, position in op.after:
                    theirs = ends[other]
                    if position >= len(theirs):
                        break
                    if theirs[position] > start:
                        start = theirs[position]
                else:
                    end = free[op.stream] = start + seconds.get(id(op.work), 0.0)
                    mine.append(end)
                    moving = True
                    continue
                break
    return max((max(mine) for mine in ends if mine), default=0.0)
