"""Parts of the page that tell how far to trust it: where its prices come from, and what they say of measured training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports.formatting import percent, signed, size
from reports.page.page import Picture, Section, Sheet
from topologies.reading import UserError

if TYPE_CHECKING:
    from calibration.published.comparison import Compared
    from sim.pricing.prices import Profile
    from strategies.job import Job
    from strategies.planner.search.workers.executors import Engine

NEAREST = 20  # published rows that are played, of the same kind of GPU
TABLE = ("source", "rows", "mean error", "median", "bias", "worst", "80 % interval holds")


def profile_errors(profile: Profile) -> Section:
    """Where the prices come from, and how far they are off on what was measured."""
    columns = ("prices of", "measured", "error, fitted", "error, held out", "measured range", "where they come from")
    rows = []
    for part, source in profile.provenance.items():
        errors = ["–" if error is None else percent(error) for error in (source.fit_error, source.heldout_error)]
        extent = _extent(source.measured_range)
        origin = ", ".join(filter(None, (source.machine, source.date, source.source)))
        rows.append([part, "yes" if source.measured else "by rule", *errors, extent, origin])
    text = "Errors are medians over sizes; held out: of sizes that were kept out of the fit. Nothing is fitted to training steps."
    return Section(f"How far to trust it: prices of profile {profile.name}", text=(text,), table=Sheet(columns, rows))


def _extent(ranges: Mapping[str, tuple[float, float]]) -> str:
    """From where to where each quantity was measured."""
    spans = [
        (name, *(size(end) if name == "bytes" or name.endswith(" nodes") else f"{end:,.0f}" for end in ends))
        for name, ends in ranges.items()
        if ends[0] < ends[1]
    ]
    return ", ".join(f"{name} {low} to {high}" for name, low, high in spans)


def published(job: Job, engine: Engine) -> Section:
    """The published measurements on this kind of GPU whose numbers of GPUs are nearest, played now."""
    from calibration.published import published as rows_of
    from calibration.published.comparison import compare

    gpu = job.cluster.node.gpu.name
    near = [(abs(math.log(row.gpus / job.cluster.gpus)), row.name, row) for row in rows_of() if _gpu(row) == gpu]
    near.sort(key=lambda entry: entry[:2])
    chosen = [row for _, _, row in near[:NEAREST]]
    title = f"How far to trust it: published training runs on {gpu}"
    predicted = [row for row in engine.map(compare, chosen) if row.error is not None]
    if not predicted:
        return Section(title, text=("None is known that can be expressed.",))
    of = (
        f"of the {len(chosen)} nearest in GPUs ({len(near)} can be expressed)"
        if len(near) > len(chosen)
        else "all that there are"
    )
    text = f"{len(predicted)} runs, {of}, predicted with the shipped prices. No price was fitted to any of them."
    return Section(title, (_scatter("published", predicted),), (text,), table=_errors(predicted))


def measured(rows: Sequence[Compared], name: str) -> Section:
    """What `shardyard validate` wrote."""
    predicted = [row for row in rows if row.error is not None]
    title = f"How far to trust it: {name}"
    if not predicted:
        return Section(title, text=("No row has a measured and a predicted step.",))
    return Section(title, (_scatter("measured", predicted),), table=_errors(predicted))


def _scatter(name: str, rows: Sequence[Compared]) -> Picture:
    from reports.figures.published import published as draw

    return Picture(name, "Predicted against measured step time with y = x and ±10 %, and how often error bars hold", draw, rows)


def _errors(rows: Sequence[Compared]) -> Sheet:
    from calibration.published.comparison import Errors, grouped

    lines = []
    for name, group in [*sorted(grouped(rows, "source").items()), ("all", list(rows))]:
        errors = Errors.of(group)
        assert errors is not None
        lines.append(
            [
                name,
                errors.rows,
                percent(errors.mean),
                percent(errors.median),
                signed(errors.bias),
                signed(errors.worst),
                percent(errors.held),
            ]
        )
    return Sheet(TABLE, lines)


def _gpu(row: Any) -> str | None:
    """The GPU of a published row; None where it cannot be a job."""
    try:
        return str(row.job().cluster.node.gpu.name)
    except UserError:
        return None
