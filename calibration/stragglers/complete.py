"""Which steps of a trace are whole: replaying a step of which ops are missing would tell of another job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibration.stragglers.trace import BACKWARD, FORWARD, OP_TYPES, SENDS_AND_RECEIVES, Trace


def incomplete_steps(trace: Trace) -> dict[int, str]:
    """Step (as numbered in the trace) -> what is missing or too many: against most other steps, or a forward compute without its
    backward, or a worker without any. Sends and receives are checked where they are matched with compute.
    """
    workers = len(trace.dp_ranks) * trace.stages
    counts = np.zeros((len(trace.steps), workers, len(OP_TYPES)), np.int32)
    np.add.at(counts, (trace.step, trace.worker, trace.op_type), 1)
    forward, backward = (OP_TYPES.index(name) for name in (FORWARD, BACKWARD))
    result: dict[int, str] = {}
    for step, worker in np.argwhere((counts[..., forward] != counts[..., backward]) | (counts[..., forward] == 0)).tolist():
        numbers = f"{counts[step, worker, forward]} {FORWARD} and {counts[step, worker, backward]} {BACKWARD}"
        result.setdefault(step, f"{_name(trace, worker)} has {numbers}")
    counts[..., [OP_TYPES.index(name) for name in (FORWARD, BACKWARD, *SENDS_AND_RECEIVES)]] = 0
    usual = _most_common(counts.reshape(len(counts), -1)).reshape(counts.shape[1:])
    for step, worker, kind in np.argwhere(counts != usual).tolist():
        numbers = f"{counts[step, worker, kind]} {OP_TYPES[kind]}, and {usual[worker, kind]} in other steps"
        result.setdefault(step, f"{_name(trace, worker)} has {numbers}")
    return result


def _most_common(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """The row that is there most often; of equally many, the one of the largest sum."""
    different, numbers = np.unique(rows, axis=0, return_counts=True)
    return np.asarray(different[np.lexsort((different.sum(axis=1), numbers))[-1]])


def _name(trace: Trace, worker: int) -> str:
    return f"dp rank {trace.dp_ranks[worker // trace.stages]}, stage {worker % trace.stages}"
