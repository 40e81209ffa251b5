"""Whether microbatches differ in work, as sequences of different lengths do: then their forward and backward passes are slow
together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from calibration.stragglers.trace import BACKWARD, FORWARD, Trace
from sim.replay.graph import Floats, Integers


class Microbatches(NamedTuple):
    """variation: standard deviation of forward passes relative to the mean of their worker and chunk. correlation: of these with
    the backward passes of the same microbatch (Pearson); None where nothing varies.
    """

    variation: float
    correlation: float | None


def microbatches(trace: Trace) -> Microbatches | None:
    """None where forward and backward passes of a chunk differ in number: the i-th of each are of one microbatch."""
    forward, backward = (_by_chunk(trace, name) for name in (FORWARD, BACKWARD))
    if not np.array_equal(_chunks(trace, forward), _chunks(trace, backward)):
        return None
    passes = [_relative(trace, rows) for rows in (forward, backward)]
    spread = [float(times.std()) for times in passes]
    correlation = float(np.mean(passes[0] * passes[1])) / (spread[0] * spread[1]) if min(spread) > 0 else None
    return Microbatches(spread[0], correlation)


def _by_chunk(trace: Trace, name: str) -> Integers:
    rows = np.flatnonzero(trace.is_type(name))
    return rows[np.lexsort((trace.start[rows], trace.chunk[rows], trace.lane[rows]))]


def _chunks(trace: Trace, rows: Integers) -> Integers:
    """A number for each worker, step and chunk."""
    return trace.lane[rows] * (int(trace.chunk.max()) + 2) + trace.chunk[rows] + 1


def _relative(trace: Trace, rows: Integers) -> Floats:
    """Durations relative to the mean of their worker and chunk, minus 1."""
    kind = trace.worker[rows] * (int(trace.chunk.max()) + 2) + trace.chunk[rows] + 1
    mean = np.bincount(kind, trace.duration[rows]) / np.maximum(np.bincount(kind), 1)
    return np.asarray(trace.duration[rows] / np.maximum(mean[kind], np.finfo(float).tiny) - 1)
