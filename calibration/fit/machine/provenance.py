"""Where the numbers of a fitted profile come from, and how well they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np

from calibration.fit.machine.kernels import error
from calibration.fit.machine.tables import Point
from calibration.machine import MEASURED_HERE
from calibration.samples import Merged
from sim.pricing.provenance import Provenance


def measured_here(
    head: Mapping[str, Any],
    grid: str,
    rule: str,
    points: Sequence[Point],
    ranges: Mapping[str, Any],
    errors: Mapping[str, float],
    transports: tuple[str, ...],
) -> Provenance:
    """The provenance of prices that are fitted to `points`; head: of the journal; ranges: measured values by name."""
    return Provenance.model_construct(
        measured=True,
        machine=str(head["machine"]),
        versions=str(head["versions"]),
        date=date.today().isoformat(),
        source=MEASURED_HERE,
        grid=grid,
        rule=rule,
        fit_error=_short(error(points, False)),
        heldout_error=_short(error(points, True)),
        errors={name: float(f"{value:.3g}") for name, value in errors.items()},
        measured_range={name: (float(np.min(values)), float(np.max(values))) for name, values in ranges.items()},
        spread=_percentiles(points),
        transports=transports,
    )


def quality(samples: Sequence[Merged]) -> dict[str, float]:
    """Median spread of repeated measurements, and the share of cases that were never measured undisturbed."""
    disturbed = sum(sample.disturbed == sample.visits for sample in samples) / len(samples)
    return {"spread": float(np.median([sample.spread for sample in samples])), "disturbed": disturbed}


def _percentiles(points: Sequence[Point]) -> dict[str, tuple[float, float, float]]:
    """10th, 50th and 90th percentile of measured over predicted − 1 of what was kept out, by series."""
    by_name: dict[str, list[float]] = {}
    for point in points:
        if point.heldout:
            by_name.setdefault(point.series, []).append(point.measured / point.predicted - 1)
    return {name: tuple(float(f"{x:.3g}") for x in np.quantile(values, (0.1, 0.5, 0.9))) for name, values in by_name.items()}  # type: ignore[misc]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
