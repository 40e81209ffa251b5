"""A trace replayed: its ops' own durations, those of a job without stragglers, and step times of any mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from calibration.stragglers.complete import incomplete_steps
from calibration.stragglers.trace import COMPUTE, OP_TYPES, Booleans, Trace
from calibration.stragglers.waits import Waits, waits_of
from sim.replay.graph import CycleError, Floats, Graph, Integers
from topologies.reading import UserError

CLOCKS = 1e-2  # seconds by which clocks of two workers may disagree; what is more negative counts as 0


class Ops(NamedTuple):
    """When ops started and ended, in seconds since their step's first start, by step. steps: their numbers in the trace."""

    step: Integers
    steps: Integers
    start: Floats
    end: Floats


class Replay:
    """Ops of whole steps as a graph, with their own durations and those of a job without stragglers. left_out: number of a step
    in the trace -> why it is not replayed.
    """

    def __init__(self, ops: Ops, graph: Graph, own: Floats, ideal: Floats, left_out: Mapping[int, str]) -> None:
        self.ops, self.graph, self.own, self.ideal, self.left_out = ops, graph, own, ideal, left_out
        self._first_rows = np.searchsorted(ops.step, np.arange(len(ops.steps)))

    def measured(self) -> Floats:
        """Seconds of each step in the trace."""
        return self._of_steps(self.ops.end)

    def steps(self, durations: Floats) -> Floats:
        """Seconds of each step if ops last so long, without launch delays."""
        return self._of_steps(self.graph.times(durations).end)

    def with_launch_delays(self) -> Floats:
        """Seconds of each step with ops' own durations and launch delays, the gaps between an op's start and all that it waits
        for: measured, unless clocks disagree or the rules do not fit the job.
        """
        delays = self.ops.start - self.graph.ready(self.ops.end)
        return self._of_steps(self.graph.times(self.own, np.where(delays <= -CLOCKS, 0.0, delays)).end)

    def only(self, rows: Booleans) -> Floats:
        """Seconds of each step if only these rows keep their own durations."""
        return self.steps(np.where(rows, self.own, self.ideal))

    def fixed(self, rows: Booleans) -> Floats:
        """Seconds of each step if these rows are as in a job without stragglers."""
        return self.steps(np.where(rows, self.ideal, self.own))

    def _of_steps(self, ends: Floats) -> Floats:
        latest: Floats = np.maximum.reduceat(ends, self._first_rows)
        return latest


def replay_of(trace: Trace, source: str) -> tuple[Trace, Replay]:
    """The whole steps of a trace, and their replay. Raises UserError that begins with `source` when no step is whole."""
    left_out: dict[int, str] = {}
    while True:
        bad, waits, graph = _built(trace)
        left_out |= {int(trace.steps[step]): why for step, why in bad.items()}
        if len(bad) == len(trace.steps):
            step, why = min(left_out.items())
            raise UserError(f"{source}: step {step}: {why}; no step can be replayed")
        if waits is not None and graph is not None:
            break
        trace = trace.without(bad)
    ops = Ops(trace.step, trace.steps, trace.start, trace.end)
    own = own_durations(ops, waits.rendezvous)
    is_compute = np.isin(trace.op_type, [OP_TYPES.index(name) for name in COMPUTE])
    return trace, Replay(ops, graph, own, ideal_durations(own, trace.op_type, is_compute), left_out)


def _built(trace: Trace) -> tuple[dict[int, str], Waits | None, Graph | None]:
    """(step -> why it cannot be replayed, waits, graph); without graph where there is such a step."""
    if bad := incomplete_steps(trace):
        return bad, None, None
    waits = waits_of(trace)
    if waits.mismatched:
        return waits.mismatched, None, None
    try:
        return {}, waits, Graph(len(trace.step), waits.before, waits.after, waits.rendezvous)
    except CycleError as error:
        op = f"{OP_TYPES[trace.op_type[error.op]]} {trace.seq_id[error.op]} of rank {trace.rank[error.op]}"
        return {int(trace.step[error.op]): f"{op} never starts: what it waits for waits in a circle"}, None, None


def own_durations(ops: Ops, rendezvous: Integers) -> Floats:
    """Of what meets the transfer: end minus the latest start of those that meet; of everything else its duration."""
    meets = np.flatnonzero(rendezvous >= 0)
    number = rendezvous[meets]
    latest = np.full(int(number.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(latest, number, ops.start[meets])
    transfer = ops.end[meets] - latest[number]
    result = ops.end - ops.start
    result[meets] = np.where(transfer <= -CLOCKS, 0.0, transfer)
    return result


def ideal_durations(own: Floats, alike: Integers, is_compute: Booleans) -> Floats:
    """Of compute the mean, of communication the median over all ops of the same number in `alike`."""
    result = own.copy()
    order = np.argsort(alike, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(alike[order])) + 1):
        if len(rows):
            result[rows] = own[rows].mean() if is_compute[rows[0]] else np.median(own[rows])
    return result
