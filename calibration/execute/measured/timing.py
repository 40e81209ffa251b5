"""Step times: warm-up, then blocks of steps; blocks that other processes disturbed are thrown away.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from calibration.execute.runner import Runner
from calibration.measure.interference import LIMIT, Moment, foreign

WARM_UP = 2  # steps
BLOCK = 0.5  # seconds of one block at least
VISITS = 3  # to the anchors of the machine's speed, about
LEAST = 5  # blocks that the median is taken of, time permitting


@dataclass(frozen=True)
class Times:
    """Seconds per step. spread: half the distance of the quartiles of block means, relative to their median."""

    step: float
    spread: float
    blocks: tuple[float, ...]  # mean of each undisturbed block, the slowest rank's; of every block where none was undisturbed
    kept: int  # undisturbed blocks
    steps_per_block: int
    disturbed: int  # blocks thrown away
    foreign: float  # median fraction of the machine that others took, over all blocks
    waited: float  # of the wall time, by the rank that waited longest for a core


def measure(runner: Runner, seconds: float, visit: Callable[[], None]) -> Times:
    """Run blocks until there are enough undisturbed ones or `seconds` are over. Every rank must call it; all get the same.

    visit: called before the first block, after the last, and between blocks VISITS − 2 times, evenly; a step that is not timed
    follows it.
    """
    setup = runner.setup
    for _ in range(WARM_UP):
        runner.step()
    size = _steps_per_block(runner, seconds)
    kept: list[float] = []
    every: list[tuple[float, float, float]] = []  # seconds per step, foreign, waited
    spent = visited = 0.0
    while not every or _agreed(_goes_on(spent, seconds, len(kept)), runner):
        if not every or _agreed(spent - visited >= seconds / (VISITS - 1), runner):
            visit()
            runner.step()
            visited = spent
        begin = time.perf_counter()
        every.append(_block(runner, size))
        spent += time.perf_counter() - begin
        if every[-1][1] <= LIMIT:
            kept.append(every[-1][0])
    visit()
    used = sorted(kept or [step for step, _, _ in every])
    quartiles = statistics.quantiles(used, n=4) if len(used) > 1 else [used[0]] * 3
    rounds = setup.resolved.local_steps
    middle, shares = statistics.median(used), [share for _, share, _ in every]
    return Times(
        middle / rounds,
        (quartiles[2] - quartiles[0]) / 2 / middle,
        tuple(step / rounds for step in used),
        len(kept),
        size,
        len(every) - len(kept),
        statistics.median(shares),
        max(waited for *_, waited in every),
    )


def _goes_on(spent: float, seconds: float, kept: int) -> bool:
    """Whether another block is wanted: until the time is over; for want of quiet ones twice as long."""
    return spent < seconds or (kept < LEAST and spent < 2 * seconds)


def _agreed(wanted: bool, runner: Runner) -> bool:
    """What rank 0 wants."""
    flag = torch.tensor([float(wanted)], device=runner.setup.device)
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _steps_per_block(runner: Runner, seconds: float) -> int:
    runner.setup.barrier()
    begin = time.perf_counter()
    runner.step()
    runner.setup.synchronise()
    alone = torch.tensor([time.perf_counter() - begin], device=runner.setup.device)
    dist.all_reduce(alone, op=dist.ReduceOp.MAX)
    return max(1, round(min(BLOCK, seconds / LEAST) / float(alone)))


def _block(runner: Runner, size: int) -> tuple[float, float, float]:
    """(seconds per step of the slowest rank, foreign fraction on the busiest node, longest wait for a core)."""
    runner.setup.barrier()
    before = Moment.now()
    for _ in range(size):
        runner.step()
    runner.setup.synchronise()
    elapsed = Moment.now() - before
    place = runner.setup.place
    gathered: list[tuple[int, Moment]] = [(place.rank - place.local_rank, elapsed)] * place.world
    dist.all_gather_object(gathered, gathered[0])
    nodes: dict[int, list[Moment]] = {}
    for node, moment in gathered:
        nodes.setdefault(node, []).append(moment)
    disturbed = max(foreign(ranks[0], sum(rank.own for rank in ranks)) for ranks in nodes.values())
    wall = max(rank.wall for _, rank in gathered)
    return wall / size, disturbed, max(rank.waited / rank.wall for _, rank in gathered)
