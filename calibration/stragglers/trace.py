"""An op-level trace as columns: one row per op that a worker ran in a step. Tensor parallel ranks are one worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.replay.graph import Floats, Integers
from topologies.reading import UserError, nearest, shown

FORWARD, BACKWARD = "forward-compute", "backward-compute"
SENDS_AND_RECEIVES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
LAYERNORM, EMBEDDING, CLIP = "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad"
GC, OPTIMIZER = "gc", "optimizer"
OP_TYPES = (FORWARD, BACKWARD, *SENDS_AND_RECEIVES, GATHER, GC, LAYERNORM, EMBEDDING, SCATTER, SEPARATE, CLIP, OPTIMIZER)
"""In the order in which a worker comes to them."""
COMPUTE = (FORWARD, BACKWARD, GC, OPTIMIZER)  # everything else communicates

NUMBERS = {"dp_rank": 2**20, "stage": 2**16, "rank": 2**24, "step": 2**40, "seq_id": 2**31, "mc": 2**16, "gmc": 2**24}
"""Columns of whole numbers and the largest that is meant; mc (chunk in the stage), gmc (chunk in the model): −1 where it has
none.
"""
TIMES = {"start_ts": 1e12, "duration": 1e6}  # seconds
COLUMNS = (*NUMBERS, *TIMES, "optype")

Booleans = NDArray[np.bool_]


class Trace(NamedTuple):
    """Columns, sorted by step, dp rank, stage, op type and start. Times in seconds since the step's first start."""

    dp_rank: Integers  # 0 … dp − 1, numbered anew
    stage: Integers
    rank: Integers
    step: Integers  # numbered anew
    op_type: Integers  # places in OP_TYPES
    seq_id: Integers
    chunk: Integers  # within the stage
    model_chunk: Integers  # within the model
    start: Floats
    duration: Floats
    steps: Integers  # numbers in the file, by number here
    dp_ranks: Integers  # as steps

    @property
    def end(self) -> Floats:
        """Seconds since the step's first start."""
        return self.start + self.duration

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.stage.max()) + 1

    @property
    def worker(self) -> Integers:
        """A number for each pair of dp rank and stage: dp rank · stages + stage."""
        return self.dp_rank * self.stages + self.stage

    @property
    def lane(self) -> Integers:
        """A number for each worker of each step: step · workers + worker."""
        return self.step * len(self.dp_ranks) * self.stages + self.worker

    def is_type(self, *names: str) -> Booleans:
        """Which ops are of one of these types."""
        return np.isin(np.arange(len(OP_TYPES)), [OP_TYPES.index(name) for name in names])[self.op_type]

    def select(self, rows: NDArray[Any]) -> Trace:
        """The trace of some rows, in this order."""
        columns = {name: column[rows] for name, column in self._asdict().items() if name not in ("steps", "dp_ranks")}
        return self._replace(**columns)

    def without(self, steps: Iterable[int]) -> Trace:
        """The trace of the other steps, numbered anew."""
        kept = ~np.isin(np.arange(len(self.steps)), list(steps))
        some = self.select(kept[self.step])
        return some._replace(step=(np.cumsum(kept) - 1)[some.step], steps=self.steps[kept])


def checked(columns: Mapping[str, NDArray[Any]], op_types: Sequence[str], source: str) -> Trace:
    """Columns of a file, named as in COLUMNS; of "optype", places in `op_types`. Raises UserError that begins with `source`."""
    if not len(columns["step"]):
        raise UserError(f"{source}: has no rows")
    whole = {name: _whole(columns[name], name, most, source) for name, most in NUMBERS.items()}
    start, duration = (_seconds(columns[name], name, most, source) for name, most in TIMES.items())
    steps, step = np.unique(whole["step"], return_inverse=True)
    dp_ranks, dp_rank = np.unique(whole["dp_rank"], return_inverse=True)
    began = np.full(len(steps), np.inf)
    np.minimum.at(began, step, start)
    trace = Trace(
        dp_rank=dp_rank,
        stage=whole["stage"],
        rank=whole["rank"],
        step=step,
        op_type=_op_types(columns["optype"], op_types, source),
        seq_id=whole["seq_id"],
        chunk=whole["mc"],
        model_chunk=whole["gmc"],
        start=start - began[step],
        duration=duration,
        steps=steps,
        dp_ranks=dp_ranks,
    )
    _check_workers(trace, source)
    _check_ops(trace, source)
    return trace.select(np.lexsort((trace.seq_id, trace.start, trace.op_type, trace.lane)))


def _whole(values: NDArray[Any], name: str, most: int, source: str) -> Integers:
    lowest = -1 if name in ("mc", "gmc") else 0
    bad = ~((values >= lowest) & (values <= most) & (values == np.floor(values)))
    _refuse(bad, values, name, f"must be a whole number from {lowest} to {most:,}", source)
    return np.asarray(values, np.int64)


def _seconds(values: NDArray[Any], name: str, most: float, source: str) -> Floats:
    lowest = 0.0 if name == "duration" else -most
    bad = ~((values >= lowest) & (values <= most))
    _refuse(bad, values, name, f"must be seconds from {lowest:g} to {most:g}", source)
    return np.asarray(values, np.float64)


def _op_types(places: NDArray[Any], names: Sequence[str], source: str) -> Integers:
    known = np.array([OP_TYPES.index(name) if name in OP_TYPES else -1 for name in names], np.int64)[places]
    if len(unknown := np.flatnonzero(known < 0)):
        name = names[places[unknown[0]]]
        raise UserError(f"{source}: row {unknown[0]}: optype={shown(name)}: unknown{nearest(name, OP_TYPES)}")
    return np.asarray(known)


def _refuse(bad: Booleans, values: NDArray[Any], name: str, rule: str, source: str) -> None:
    if len(rows := np.flatnonzero(bad)):
        raise UserError(f"{source}: row {rows[0]}: {name}={shown(values[rows[0]].item())}: {rule}")


def _check_workers(trace: Trace, source: str) -> None:
    """Stages are numbered without gaps, workers are there, and each is one rank."""
    if len(gaps := np.flatnonzero(np.bincount(trace.stage) == 0)):
        raise UserError(f"{source}: stage={trace.stages - 1}: stages are numbered from 0, and no op is of stage {gaps[0]}")
    workers, rows, chunks = len(trace.dp_ranks) * trace.stages, len(trace.step), int(trace.chunk.max(initial=0)) + 1
    if workers * len(trace.steps) * chunks > rows:
        sizes = f"{len(trace.steps)} steps of {len(trace.dp_ranks)} dp ranks × {trace.stages} stages × {chunks} chunks"
        raise UserError(f"{source}: {rows} rows are too few for {sizes}, each of which has ops")
    rank = np.full(workers, -1)
    rank[trace.worker] = trace.rank
    two = "a rank is one worker, of one dp rank and stage"
    _refuse(rank[trace.worker] != trace.rank, trace.rank, "rank", f"{two}, and this one's has another rank elsewhere", source)
    ranks, counts = np.unique(rank[rank >= 0], return_counts=True)
    if (counts > 1).any():
        raise UserError(f"{source}: rank={ranks[counts > 1][0]}: {two}, and this one is two")


def _check_ops(trace: Trace, source: str) -> None:
    """Each op is there once, and compute ops belong to a chunk of the model."""
    compute = trace.is_type(FORWARD, BACKWARD)
    if not compute.any():
        raise UserError(f"{source}: no op is of type {FORWARD} or {BACKWARD}")
    rule = "a compute op belongs to a chunk of the model, numbered from 0"
    _refuse(compute & (trace.model_chunk < 0), trace.model_chunk, "gmc", rule, source)
    key = (trace.lane * len(OP_TYPES) + trace.op_type) * (int(trace.seq_id.max()) + 1) + trace.seq_id
    order = np.argsort(key, kind="stable")
    again = np.zeros(len(key), bool)
    again[order[1:]] = np.diff(key[order]) == 0
    _refuse(again, trace.seq_id, "seq_id", "another op of this type, step and rank has the same number", source)
