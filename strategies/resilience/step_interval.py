"""How sure a run's step is: its 80 % interval, of prices that may be wrong and GPUs that differ, as a distribution over runs."""

from __future__ import annotations

import math
from dataclasses import replace

from strategies.planner.uncertainty import NORMAL, with_interval
from strategies.resilience.run_spec import Prepared

MARGIN = 4.0  # times as many steps as fit into a run's days: shorter ones have room


def with_step_interval(prepared: Prepared) -> Prepared:
    """The same run with steps that differ from run to run, as far as the section `run` says so. Raises UserError."""
    if not prepared.settings.step_interval:
        return prepared
    summary = with_interval(prepared.job, prepared.summary)
    interval, spec = summary.interval, prepared.spec
    if interval is None:
        return prepared
    step = summary.step_seconds
    faster, slower = math.log(step / interval.low) / NORMAL, math.log(interval.high / step) / NORMAL
    if spec.work >= spec.deadline:  # until the days are over
        spec = replace(spec, steps=spec.steps * MARGIN, work=spec.work * MARGIN)
    return replace(prepared, summary=summary, spec=replace(spec, faster=faster, slower=slower))
