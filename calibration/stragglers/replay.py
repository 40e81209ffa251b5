"""A trace replayed: its ops' own durations, those of a job without stragglers, and step times of any mixture."""

from __future__ import annotations

import numpy as np

from calibration.stragglers.complete import incomplete_steps
from calibration.stragglers.trace import COMPUTE, OP_TYPES, Booleans, Trace
from calibration.stragglers.waits import Waits, waits_of
from sim.replay.graph import CycleError, Floats, Graph
from topologies.reading import UserError

CLOCKS = 1e-2  # seconds by which clocks of two workers may disagree; what is more negative counts as 0


class Replay:
    """A trace's whole steps as a graph. left_out: number of a step in the file -> why it is not replayed. Raises UserError that
    begins with `source` when nothing is left.
    """

    def __init__(self, trace: Trace, source: str) -> None:
        self.left_out: dict[int, str] = {}
        while True:
            bad, waits, graph = _built(trace)
            self.left_out |= {int(trace.steps[step]): why for step, why in bad.items()}
            if len(bad) == len(trace.steps):
                step, why = min(self.left_out.items())
                raise UserError(f"{source}: step {step}: {why}; no step can be replayed")
            if waits is not None and graph is not None:
                break
            trace = trace.without(bad)
        self.trace, self.graph = trace, graph
        self.own = _own_durations(trace, waits)
        self.ideal = _ideal_durations(trace, self.own)
        self._first_rows = np.searchsorted(trace.step, np.arange(len(trace.steps)))

    def measured(self) -> Floats:
        """Seconds of each step in the trace."""
        return self._of_steps(self.trace.end)

    def steps(self, durations: Floats) -> Floats:
        """Seconds of each step if ops last so long, without launch delays."""
        return self._of_steps(self.graph.times(durations).end)

    def with_launch_delays(self) -> Floats:
        """Seconds of each step with ops' own durations and launch delays, the gaps between an op's start and all that it waits
        for: measured, unless clocks disagree or the rules do not fit the job.
        """
        delays = self.trace.start - self.graph.ready(self.trace.end)
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


def _own_durations(trace: Trace, waits: Waits) -> Floats:
    """Of what meets the transfer: end minus the latest start of those that meet; of everything else its duration."""
    meets = np.flatnonzero(waits.rendezvous >= 0)
    number = waits.rendezvous[meets]
    latest = np.full(int(number.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(latest, number, trace.start[meets])
    transfer = trace.end[meets] - latest[number]
    result = trace.duration.copy()
    result[meets] = np.where(transfer <= -CLOCKS, 0.0, transfer)
    return result


def _ideal_durations(trace: Trace, own: Floats) -> Floats:
    """Of compute the mean, of communication the median over all ops of its type."""
    result = own.copy()
    for number, name in enumerate(OP_TYPES):
        rows = trace.op_type == number
        if rows.any():
            result[rows] = own[rows].mean() if name in COMPUTE else np.median(own[rows])
    return result
