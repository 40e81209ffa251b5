"""What stragglers cost, and which: a job without them replayed with one part as it was, and the job replayed without one part's
excess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from calibration.stragglers.microbatches import Microbatches, microbatches
from calibration.stragglers.replay import Replay, replay_of
from calibration.stragglers.spread import Spread, spread
from calibration.stragglers.trace import OP_TYPES, Booleans, Trace
from sim.replay.graph import Floats, Integers

WORKERS = 64  # that are replayed one by one: those with the highest scores
SLOWEST = 0.03  # of the workers, at least one
NOTHING = 1e-4  # a smaller slowdown has no shares
TOGETHER = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}
"""Op types that are one part, named as in the published analysis."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the job: ops of one type, dp rank, stage or worker.

    slowdown: step time when only this part keeps its own durations, relative to the job without stragglers (per_step: of each
    step). fixed: mean step seconds when only this part is without stragglers. share: part of all that stragglers cost that this
    saves; None where they cost nothing.
    """

    name: str
    slowdown: float
    fixed: float
    share: float | None
    per_step: Floats

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without steps."""
        return {"slowdown": self.slowdown, "fixed_step_seconds": self.fixed, "share": self.share}


@dataclass(frozen=True, kw_only=True)
class Worker(Part):
    """rank, dp_rank and stage as in the trace; None where it does not say. score: the smaller slowdown of its dp rank and its
    stage, by which the published analysis ranks workers.
    """

    rank: int
    dp_rank: int | None
    stage: int | None
    score: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        place = {"rank": self.rank, "dp_rank": self.dp_rank, "stage": self.stage}
        return place | {"score": self.score} | super().to_dict()


P = TypeVar("P", bound=Part)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Times in seconds per step. measured: in the trace; replayed: without launch delays; ideal: also without stragglers. Parts
    worst first; dp_ranks and stages are empty where the trace does not say. workers: the worst of worker_count. slowest: ranks of
    the slowest workers, and what they are together. notes: what was assumed or ignored.
    """

    steps: Integers
    left_out: Mapping[int, str]
    ops: int
    measured: Floats
    with_delays: Floats
    replayed: Floats
    ideal: Floats
    op_types: list[Part]
    dp_ranks: list[Part]
    stages: list[Part]
    workers: list[Worker]
    worker_count: int
    slowest: list[int]
    slowest_part: Part
    microbatches: Microbatches | None
    spread: Spread | None = None  # of workers with the same work
    notes: Sequence[str] = ()

    @property
    def slowdown(self) -> float:
        """Replayed without launch delays, relative to also without stragglers."""
        return float(self.replayed.mean() / self.ideal.mean())

    @property
    def kinds(self) -> dict[str, Sequence[Part]]:
        """Parts by their kind, small ones first."""
        return {"worker": self.workers, "stage": self.stages, "dp rank": self.dp_ranks, "op type": self.op_types}

    @property
    def per_step(self) -> Floats:
        """The slowdown of each step."""
        return self.replayed / self.ideal


def analyse(trace: Trace, source: str) -> Analysis:
    """What replays of an op-level trace tell about its stragglers. Raises UserError that begins with `source`."""
    trace, replay = replay_of(trace, source)
    parts = Parts(replay)
    type_names = {name: TOGETHER.get(name, name) for name in OP_TYPES}
    by_type = {group: trace.is_type(*(name for name in OP_TYPES if type_names[name] == group)) for group in type_names.values()}
    dp_ranks = [parts.of(str(number), trace.dp_rank == place) for place, number in enumerate(trace.dp_ranks)]
    stages = [parts.of(str(stage), trace.stage == stage) for stage in range(trace.stages)]
    workers, slowest = _workers(trace, parts, dp_ranks, stages)
    return parts.analysis(
        op_types=worst_first(parts.of(name, rows) for name, rows in by_type.items() if rows.any()),
        dp_ranks=worst_first(dp_ranks),
        stages=worst_first(stages),
        workers=worst_first(workers),
        worker_count=len(dp_ranks) * len(stages),
        slowest=slowest,
        slowest_part=parts.of("slowest workers", np.isin(trace.rank, slowest)),
        microbatches=microbatches(trace),
        spread=spread(trace, replay),
    )


def worst_first(parts: Iterable[P]) -> list[P]:
    """By slowdown."""
    return sorted(parts, key=lambda part: -part.slowdown)


class Parts:
    """Parts of a job, each replayed twice."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.replayed, self.ideal = replay.steps(replay.own), replay.steps(replay.ideal)

    def of(self, name: str, rows: Booleans) -> Part:
        """The part that these rows are."""
        return Part(name=name, **self.numbers(rows))

    def numbers(self, rows: Booleans) -> dict[str, Any]:
        """Fields of the part that these rows are."""
        only, fixed = self.replay.only(rows), float(self.replay.fixed(rows).mean())
        replayed, ideal = float(self.replayed.mean()), float(self.ideal.mean())
        cost = replayed - ideal
        share = (replayed - fixed) / cost if cost > NOTHING * ideal else None
        return {"slowdown": float(only.mean()) / ideal, "fixed": fixed, "share": share, "per_step": only / self.ideal}

    def analysis(self, **fields: Any) -> Analysis:
        """The analysis of the job, given its parts."""
        replay = self.replay
        return Analysis(
            steps=replay.ops.steps,
            left_out=replay.left_out,
            ops=len(replay.own),
            measured=replay.measured(),
            with_delays=replay.with_launch_delays(),
            replayed=self.replayed,
            ideal=self.ideal,
            **fields,
        )


def _workers(trace: Trace, parts: Parts, dp_ranks: list[Part], stages: list[Part]) -> tuple[list[Worker], list[int]]:
    """(workers of the highest scores, each replayed; ranks of the slowest of all)."""
    scores = np.minimum.outer([part.slowdown for part in dp_ranks], [part.slowdown for part in stages]).ravel()
    ranks = np.zeros(len(scores), np.int64)
    ranks[trace.worker] = trace.rank
    order = np.lexsort((ranks, -scores))
    workers = [
        Worker(
            name=str(ranks[worker]),
            rank=int(ranks[worker]),
            dp_rank=int(trace.dp_ranks[worker // trace.stages]),
            stage=int(worker % trace.stages),
            score=float(scores[worker]),
            **parts.numbers(trace.worker == worker),
        )
        for worker in order[:WORKERS].tolist()
    ]
    return workers, ranks[order[: math.ceil(SLOWEST * len(scores))]].tolist()
