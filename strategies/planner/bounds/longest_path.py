"""The tightest bounds on one plan: the longest path through its program, and what the program holds (`held`).

Every op takes at least as long as with nothing in its way, and starts when its stream and all that it waits for are done. Blocks
cost what `strategies.planner.bounds.layer_cost_table` says; collectives among dp ranks their price; sends between nodes their
bytes over one rank's NICs. Where ranks of a stage differ, the path is that of ranks one of each stage, those that communicate
longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

import numpy as np

from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.program import Block, Cohort, Collective, Op, Program, Send, Work
from sim.replay.places import axes_inside
from sim.replay.program_graph import program_graph
from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.every_plan import SLACK, bounded
from strategies.planner.bounds.expected_times import Growth, deviation_of, slowest
from strategies.planner.bounds.layer_cost_table import Floats, inside
from strategies.planner.bounds.memory_bound import least_memory
from strategies.planner.bounds.network_bound import sending
from strategies.planner.bounds.symmetric_groups import OfOne, alike, stages_alike, stages_like
from strategies.predict import may_settle, program_of
from topologies.links.topology import Values

ORDER = Plan.model_fields["order"].default  # of ranks, which changes the grid of a program and none of its ops
Seconds = dict[Work, float]  # work that is not in it takes no time


def longest_path(job: Job, plan: Resolved, prices: Prices, capacity: float = inf) -> tuple[float, float]:
    """Seconds of a step of `plan` and bytes of its fullest rank, at least; seconds are 0 where these are more than `capacity`."""
    if not bounded(plan):
        return 0.0, 0.0
    program = program_of(job.model, plan)
    if program.cohorts[0].steady or len(program.cohorts) != plan.pp:
        return 0.0, 0.0
    held = least_memory(program, prices)
    if held > capacity:
        return 0.0, held
    if _together(job, plan):
        blocks = _blocks(program)
        durations = _alike(job, plan, program, prices, _seconds(blocks, _local(job, plan, blocks, prices)))
    else:
        durations = _apart(job, plan, program, prices)
    return _longest(program, durations) / program.steps * (1 - SLACK), held


def expected_path(job: Job, plan: Resolved, prices: Prices, capacity: float = inf) -> tuple[float, float] | None:
    """Seconds of the expected step of `plan`, the mean of its longest paths in every draw of GPUs that are not quite alike
    (`strategies.planner.bounds.expected_times`), and bytes of its fullest rank, at least; None where it is not known. Seconds are
    0 where these are more than `capacity`.
    """
    deviation = deviation_of(job, plan, prices)
    if not (bounded(plan) and deviation and _together(job, plan)) or may_settle(plan):
        return None
    lowered = program_of(job.model, plan.model_copy(update={"order": ORDER}))  # plans that differ in it share what follows
    if len(lowered.cohorts) != plan.pp:
        return None
    held = least_memory(lowered, prices)
    if held > capacity:
        return 0.0, held
    program = replace(lowered, grid=plan.grid)
    blocks = _blocks(program)
    local = _local(job, plan, blocks, prices)
    durations = _alike(job, plan, program, prices, _seconds(blocks, local))
    growths = {block: Growth.of_block(block, local) for block in blocks}
    rises: list[Seconds] = [{block: float(growth.rise) for block, growth in growths.items()}] * len(durations)
    busy, rise = (np.array(list(map(_total, program.cohorts, table))) for table in (durations, rises))
    factors = slowest(plan.grid, tuple(sorted(axes_inside(program))), deviation).where(busy, rise)
    drawn: list[dict[Work, Floats | float]] = []
    for cohort, table, own in zip(program.cohorts, durations, factors, strict=True):
        works = {op.work: table.get(op.work, 0.0) for op in cohort.ops}
        drawn.append({work: time + growths[work].more(own) if work in growths else time for work, time in works.items()})
    return float(_longest_drawn(lowered, drawn).mean()) / program.steps * (1 - SLACK), held


def _total(cohort: Cohort, seconds: Seconds) -> float:
    """Seconds of all blocks of a cohort."""
    return sum(seconds.get(op.work, 0.0) for op in cohort.ops if isinstance(op.work, Block))


def _together(job: Job, plan: Resolved) -> bool:
    """Whether one sibling group, and one stage, stands for all."""
    return alike(job.cluster, plan.grid) and stages_alike(job.cluster, plan.grid, inside(plan))


def _alike(job: Job, plan: Resolved, program: Program, prices: Prices, blocks: Seconds) -> list[Seconds]:
    """By stage, where one sibling group, and one stage, stands for all. blocks: seconds of each."""
    topology = job.cluster.topology()
    like = stages_like(job.cluster, plan.grid)
    every = [list(_own(program, number)) for number in range(len(program.cohorts))]
    talk: dict[int, Seconds] = {}  # by the stages that others are like
    for first in dict.fromkeys(like):
        works = dict.fromkeys(chain.from_iterable(own for own, other in zip(every, like, strict=True) if other == first))
        exchange = Cohort(program.cohorts[first].at, [Op("", work) for work in works])
        pricing = OpCosts(Program(plan.grid, [exchange]), topology, prices)
        talk[first] = {work: pricing.collective(work, 0).alone for work in works}
    return [blocks | talk[first] | sent for first, sent in zip(like, _sent(job, program, 0, prices), strict=True)]


def _blocks(program: Program) -> dict[Block, Op]:
    """Its different blocks, each with an op."""
    return {op.work: op for cohort in program.cohorts for op in cohort.ops if isinstance(op.work, Block)}


def _seconds(blocks: Iterable[Block], local: OpCosts) -> Seconds:
    return {block: local.block(block, 0).busy for block in blocks}


def _local(job: Job, plan: Resolved, blocks: Mapping[Block, Op], prices: Prices) -> OpCosts:
    """Prices of blocks whose groups are alone."""
    grid = inside(plan)
    cohort = Cohort({"pp": 0} if grid.degree("pp") > 1 else {}, list(blocks.values()))
    return OpCosts(Program(grid, [cohort]), job.cluster.topology(), prices)


def _apart(job: Job, plan: Resolved, program: Program, prices: Prices) -> list[Seconds]:
    """By stage, of one of its ranks."""
    every = OfOne(program, job.cluster.topology(), prices)
    if not every.alike:
        every = every.of(int(np.argmax(sum(_busy(program, number, every) for number in range(len(program.cohorts))))))
    result, sent = list[Seconds](), _sent(job, program, max(every.index, 0), prices)
    for number, cohort in enumerate(program.cohorts):
        blocks = dict.fromkeys(op.work for op in cohort.ops if isinstance(op.work, Block))
        times: Seconds = {block: every.block(block, number).busy for block in blocks}
        times |= {work: every.collective(work, number).alone for work in _own(program, number)}
        result.append(times | sent[number])
    return result


def _busy(program: Program, number: int, pricing: OfOne) -> Values:
    """Seconds of communication of each rank of a stage, with nothing in its way."""
    counts = dict[Collective | Send, float]()
    for op in program.cohorts[number].ops:
        inside_blocks = op.work.collectives if isinstance(op.work, Block) else []
        for times, work in (*inside_blocks, *([(1, op.work)] if isinstance(op.work, Collective) and not op.work.cohorts else [])):
            counts[work] = counts.get(work, 0.0) + times
    none: Values = np.zeros(program.grid.world // len(program.cohorts))
    return sum((times * pricing.soonest(work, number)[pricing.groups(work, number)] for work, times in counts.items()), none)


def _sent(job: Job, program: Program, index: int, prices: Prices) -> list[Seconds]:
    """By stage, sends of its rank number `index` to other nodes."""
    each, gpus = sending(job, prices.profile), job.cluster.node.gpus
    if not each:
        return [{} for _ in program.cohorts]
    where = [int(program.grid.groups((), cohort.at).ravel()[index]) // gpus for cohort in program.cohorts]
    return [
        {
            work: work.bytes * each
            for work in dict.fromkeys(op.work for op in cohort.ops)
            if isinstance(work, Send) and work.route is None and node != where[work.to]
        }
        for cohort, node in zip(program.cohorts, where, strict=True)
    ]


def _own(program: Program, number: int) -> Iterator[Collective | Send]:
    """What is between the ranks of one stage; on the first, also of each with its host."""
    for work in dict.fromkeys(op.work for op in program.cohorts[number].ops):
        if (isinstance(work, Collective) and not work.cohorts) or (isinstance(work, Send) and work.route and not number):
            yield work


def _longest(program: Program, seconds: list[Seconds]) -> float:
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
                    end = free[op.stream] = start + seconds[number].get(op.work, 0.0)
                    mine.append(end)
                    moving = True
                    continue
                break
    return max((max(mine) for mine in ends if mine), default=0.0)


def _longest_drawn(program: Program, seconds: list[dict[Work, Floats | float]]) -> Floats:
    """When the last op ends in each draw."""
    graph = program_graph(program)
    cohort = [number for number, each in enumerate(program.cohorts) for _ in each.ops]
    works = [op.work for each in program.cohorts for op in each.ops]
    ends: list[Any] = [0.0] * graph.places
    latest = np.zeros(1)
    for number, place, first, others in graph.turns:
        start = ends[first]
        for other in others:
            start = np.maximum(start, ends[other])
        ends[place] = start + seconds[cohort[number]][works[number]]
    for number in chain.from_iterable(graph.last):
        latest = np.maximum(latest, ends[graph.place[number]])
    return latest
