"""`calibrate`, `execute` and `validate` as functions; those that run something need PyTorch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from reports.api.jobs import Asked, job_of
from reports.api.result import Result
from reports.formatting import percent, plural

if TYPE_CHECKING:
    from calibration.request import Result as Calibration
    from calibration.validate import Validated


def calibrate(
    output: str | Path,
    *,
    quick: bool = False,
    ranks: int = 0,
    cluster: str | None = None,
    profile: str | None = None,
    parts: Sequence[str] = (),
    logs: Iterable[str | Path] = (),
    collective: str = "",
    minutes: float | None = None,
) -> Calibration | None:
    """Measure this machine, or read logs of nccl-tests or traces, and write the profile `output`; interrupted, it goes on, and
    when `minutes` are over nothing is measured a second time. None on ranks other than 0 of a launcher. Raises UserError.
    """
    from calibration.calibrate import calibrate as measured
    from calibration.from_logs import from_logs
    from calibration.request import PARTS, Request

    until = time.monotonic() + 60 * minutes if minutes else inf
    said = collective if logs else ""
    request = Request(Path(output), quick, ranks, tuple(parts) or PARTS, cluster, profile, collective=said, until=until)
    files = [Path(log) for log in logs]
    return from_logs(request, files) if files else measured(request, lambda _: None)


def execute(job: Asked, *, seconds: float = 5.0) -> Validated | None:
    """Carry out a job with PyTorch on this machine: checked against one process, timed for so long, its bytes counted, beside its
    prediction. None on ranks other than 0 of a launcher. Raises UserError.
    """
    from calibration.validate import validate as executed

    done = executed([job_of(job)], seconds)
    return done[0] if done else None


def validate(
    variants: str | None = None,
    *,
    published: bool = False,
    sources: Sequence[str] = (),
    quick: bool = False,
    only: Sequence[str] = (),
    seconds: float = 5.0,
    launches: int | None = None,
) -> Result:
    """How right predictions are: a row for each strategy of a set, executed here and simulated, or for each published measurement
    (of some sources). Raises UserError.
    """
    if published:
        from calibration.published import published as measurements
        from calibration.published.comparison import compared

        comparisons = list(compared(list(measurements(tuple(sources)))))
        errors = [abs(each.error) for each in comparisons if each.error is not None]
        title = f"{plural(len(comparisons), 'published step')}, off by {percent(median(errors))} in the median"
        rows = tuple(each.to_dict() for each in comparisons)
        return Result(title, rows, ("row", "predicted_step", "step", "error"), detail=comparisons)
    from calibration.validate import validate as executed
    from calibration.validation_set import read_set

    jobs = read_set(variants, (), tuple(only), "quick" if quick else "")
    done = executed(jobs, seconds, launches=launches or (1 if quick else 3))
    rows = tuple(row for each in done for row in each.to_dict()["rows"])
    shown = ("job", "what", "of", "predicted", "measured", "error")
    return Result(f"{plural(len(done), 'job')} executed and simulated", rows, shown, detail=done)
