"""Profiler traces of all ranks as ops that wait for each other: stretches of compute, and collectives.

A collective waits for all compute that was launched before it, as PyTorch's NCCL process groups make it. Which compute waits for
a collective a trace does not say: it is the first after which nothing was ever, on any rank and in any step of the same program,
run before the collective had ended. Compute of a rank is one stream, its busiest; what other streams compute is left out. Ranks
and steps run the same program when they launch as many kernels between the same collectives; their ops are alike place by place.
Clocks of ranks are set to one (`calibration.stragglers.clocks`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from calibration.readers.kineto_ops import Kernel, RankTrace
from calibration.stragglers.analysis import SLOWEST, WORKERS, Analysis, Parts, Worker, worst_first
from calibration.stragglers.clocks import on_one_clock
from calibration.stragglers.replay import Ops, Replay, ideal_durations, own_durations
from calibration.stragglers.trace import Booleans
from sim.replay.graph import CycleError, Graph
from topologies.reading import UserError

SHOWN = 5  # ranks that are named
CLOCK = 1e-6  # seconds by which times of a rank may be rounded


class _Lane(NamedTuple):
    """What one rank ran in one step, in the order of launches; launched_after: compute kernels launched before each
    collective.
    """

    step: int
    rank: int
    compute: list[Kernel]
    collectives: list[Kernel]
    launched_after: list[int]

    @property
    def program(self) -> tuple[object, ...]:
        """What alike lanes have in common."""
        names = ((kernel.collective, kernel.peers != "") for kernel in self.collectives)
        return (len(self.compute), tuple(zip(self.launched_after, names, strict=True)))


class _Op(NamedTuple):
    start: float
    end: float
    kind: str
    rank: int
    step: int
    alike: tuple[int, int]  # program, place


def analyse_kernels(traces: Sequence[RankTrace], source: str) -> Analysis:
    """What replays of profiler traces tell about stragglers. Raises UserError that begins with `source`."""
    traces, moved = on_one_clock(traces)
    replay, ops = replay_of_kernels(traces, source)
    parts = Parts(replay)
    kinds, ranks = np.array([op.kind for op in ops]), np.array([op.rank for op in ops])
    excess = {rank: float((replay.own - replay.ideal)[ranks == rank].sum()) for rank in np.unique(ranks).tolist()}
    worst = sorted(excess, key=lambda rank: (-excess[rank], rank))[:WORKERS]
    workers = worst_first(_worker(parts, rank, ranks == rank) for rank in worst)
    slowest = [worker.rank for worker in workers[: math.ceil(SLOWEST * len(excess))]]
    return parts.analysis(
        op_types=worst_first(parts.of(kind, kinds == kind) for kind in np.unique(kinds).tolist()),
        dp_ranks=[],
        stages=[],
        workers=workers,
        worker_count=len(excess),
        slowest=slowest,
        slowest_part=parts.of("slowest workers", np.isin(ranks, slowest)),
        microbatches=None,
        notes=_notes(traces, ops, moved),
    )


def _notes(traces: Sequence[RankTrace], ops: Sequence[_Op], moved: float) -> list[str]:
    kernels = [kernel for trace in traces for step in trace.steps.values() for kernel in step]
    result = (
        ["a trace of one rank: waiting for other ranks counts as transfer; give the traces of all"] if len(traces) == 1 else []
    )
    result += _missing(traces)
    if moved:
        apart = f"clocks of ranks are up to {1e3 * moved:.3g} ms apart"
        result.append(f"{apart}, by the ends of what they do together: all times are of the lowest rank's clock")
    if unnamed := sum(bool(kernel.collective) and not kernel.peers for kernel in kernels):
        result.append(f"{unnamed} NCCL kernels do not name their group or peer: waiting for other ranks counts as their transfer")
    lanes = {(op.step, op.rank): op.alike[0] for op in ops}
    single = sum(count == 1 for count in Counter(lanes.values()).values())
    if single:
        result.append(f"{single} of {len(lanes)} steps of a rank launch kernels as no other does: they are their own ideal")
    return result


def _missing(traces: Sequence[RankTrace]) -> Iterator[str]:
    """Ranks of the run without a trace."""
    there, world = {trace.rank for trace in traces}, max(trace.world for trace in traces)
    count = world - sum(rank < world for rank in there)
    if count > 0 and len(traces) > 1:
        first = islice((rank for rank in range(world) if rank not in there), SHOWN)
        ranks = ", ".join(map(str, first)) + (", …" if count > SHOWN else "")
        have = "has" if count == 1 else "have"
        yield f"of {world:,} ranks {count:,} {have} no trace here ({ranks}): waiting for them counts as transfer"


def _worker(parts: Parts, rank: int, rows: Booleans) -> Worker:
    numbers = parts.numbers(rows)
    return Worker(name=str(rank), rank=rank, dp_rank=None, stage=None, score=numbers["slowdown"], **numbers)


def replay_of_kernels(traces: Sequence[RankTrace], source: str) -> tuple[Replay, list[_Op]]:
    """The steps that all ranks have, and their ops. Raises UserError that begins with `source`."""
    numbers = sorted(set.intersection(*(set(trace.steps) for trace in traces)))
    left_out = {
        step: f"rank {trace.rank} has no kernel in it" for trace in traces for step in _all_steps(traces) - set(trace.steps)
    }
    if not numbers:
        raise UserError(f"{source}: no step that all {len(traces)} ranks recorded")
    lanes = [_lane(place, trace.rank, trace.steps[step]) for place, step in enumerate(numbers) for trace in traces]
    programs: dict[tuple[object, ...], list[_Lane]] = {}
    for lane in lanes:
        programs.setdefault(lane.program, []).append(lane)
    waiting = {program: _waiting(alike) for program, alike in programs.items()}
    place_of = {program: place for place, program in enumerate(programs)}
    build = _Build()
    for lane in lanes:
        build.add(lane, waiting[lane.program], place_of[lane.program])
    step = np.array([op.step for op in build.ops])
    start, end = (np.array(times) for times in zip(*((op.start, op.end) for op in build.ops), strict=True))
    began = np.full(len(numbers), np.inf)
    np.minimum.at(began, step, start)
    ops = Ops(step, np.array(numbers), start - began[step], end - began[step])
    rendezvous = np.array(build.rendezvous)
    try:
        graph = Graph(len(step), build.before, build.after, rendezvous)
    except CycleError as error:
        op = build.ops[error.op]
        number = numbers[op.step]
        raise UserError(f"{source}: step {number}: {op.kind} of rank {op.rank} waits in a circle: traces of one run?") from None
    alike = {key: number for number, key in enumerate(dict.fromkeys(op.alike for op in build.ops))}
    own = own_durations(ops, rendezvous)
    is_compute = np.array([op.kind == "compute" for op in build.ops])
    ideal = ideal_durations(own, np.array([alike[op.alike] for op in build.ops]), is_compute)
    return Replay(ops, graph, own, ideal, left_out), build.ops


def _all_steps(traces: Sequence[RankTrace]) -> set[int]:
    return {step for trace in traces for step in trace.steps}


def _lane(step: int, rank: int, kernels: Sequence[Kernel]) -> _Lane:
    busy: dict[int, float] = {}
    for kernel in kernels:
        busy[kernel.stream] = busy.get(kernel.stream, 0.0) + (0.0 if kernel.collective else kernel.end - kernel.start)
    main = max(busy, key=lambda stream: busy[stream])
    compute: list[Kernel] = []
    collectives: list[Kernel] = []
    launched_after: list[int] = []
    for kernel in kernels:
        if kernel.collective:
            collectives.append(kernel)
            launched_after.append(len(compute))
        elif kernel.stream == main:
            compute.append(kernel)
    return _Lane(step, rank, compute, collectives, launched_after)


def _waiting(alike: Sequence[_Lane]) -> list[int]:
    """For each collective of a program the compute kernel that waits for it; as many as there are kernels where none does."""
    result = list(alike[0].launched_after)
    for lane in alike:
        starts = np.maximum.accumulate([kernel.start for kernel in lane.compute]) if lane.compute else np.zeros(0)
        for place, kernel in enumerate(lane.collectives):
            result[place] = max(result[place], int(np.searchsorted(starts, kernel.end - CLOCK)))
    return result


class _Build:
    """Ops of all lanes, numbered one after another, and what they wait for."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.before: list[int] = []
        self.after: list[int] = []
        self.rendezvous: list[int] = []
        self._meetings: dict[tuple[int, str, int], int] = {}

    def add(self, lane: _Lane, waiting: Sequence[int], program: int) -> None:
        """Ops of a lane: compute between the kernels before which something changes, then collectives."""
        bounds = sorted({0, *lane.launched_after, *waiting} - {len(lane.compute)}) if lane.compute else []
        first = len(self.ops)
        for low, high in zip(bounds, [*bounds[1:], len(lane.compute)], strict=False):
            inside = lane.compute[low:high]
            self._op(lane, "compute", inside[0].start, max(kernel.end for kernel in inside), first, program)
        stretch = {low: first + place for place, low in enumerate(bounds)}
        self._wait(range(first, len(self.ops) - 1), range(first + 1, len(self.ops)))
        met: Counter[str] = Counter()
        last_of_stream: dict[int, int] = {}
        for kernel, launched_after, waits in zip(lane.collectives, lane.launched_after, waiting, strict=True):
            number = self._op(lane, _kind(kernel), kernel.start, kernel.end, first, program)
            if launched_after:
                before = stretch.get(launched_after, first + len(bounds)) - 1
                self._wait([before], [number])
            if kernel.stream in last_of_stream:
                self._wait([last_of_stream[kernel.stream]], [number])
            last_of_stream[kernel.stream] = number
            if waits in stretch:
                self._wait([number], [stretch[waits]])
            if kernel.peers:
                key = lane.step, kernel.peers, met[kernel.peers]
                self.rendezvous[number] = self._meetings.setdefault(key, len(self._meetings))
                met[kernel.peers] += 1

    def _op(self, lane: _Lane, kind: str, start: float, end: float, first: int, program: int) -> int:
        number = len(self.ops)
        self.ops.append(_Op(start, end, kind, lane.rank, lane.step, (program, number - first)))
        self.rendezvous.append(-1)
        return number

    def _wait(self, before: Sequence[int], after: Sequence[int]) -> None:
        self.before += before
        self.after += after


def _kind(kernel: Kernel) -> str:
    return "send and receive" if kernel.collective in ("send", "recv") else kernel.collective
