"""The training loop at its seven cut points: what each costs of a step, hidden and exposed, and which fields describe it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reports.formatting import percent, span
from sim.runs.segment import blocked
from strategies.resilience.run_spec import NEVER, Prepared

if TYPE_CHECKING:
    from rich.console import RenderableType

AGGREGATED = ("dp exposed", "replica exposed")  # components of a step that sum gradients or gather parameters


@dataclass(frozen=True)
class CutPoint:
    """A part of the loop: seconds of each step that training waits for it, and that it takes beside training; what it does in
    words, and the fields of a job that describe it.
    """

    name: str
    exposed: float
    hidden: float
    what: str
    fields: str


def cut_points(prepared: Prepared) -> list[CutPoint]:
    """In the order in which a batch meets them. Exposed seconds add up to a step with all that interrupts it."""
    loop, settings, parts = prepared.loop, prepared.settings, prepared.summary.breakdown
    step, given = prepared.summary.step_seconds, loop.input
    aggregated = sum(parts.get(name, 0.0) for name in AGGREGATED)
    updating = parts.get("optimizer", 0.0) + parts.get("launch", 0.0)
    evaluated = loop.evaluation / settings.evaluation_steps if settings.evaluation_steps else 0.0
    logged = loop.metrics / settings.metrics.steps if settings.metrics else 0.0
    read = max(given.preparing, given.reading) + given.copying
    return [
        CutPoint("input pipeline", given.exposed, max(0.0, read - given.exposed), _input(prepared), "run.input"),
        CutPoint("model", step - updating - aggregated, 0.0, "forward, backward, and what they wait for", "model, plan"),
        CutPoint("training loop", updating, 0.0, "optimizer, launches that the GPU waits for", "plan.optimizer, plan.framework"),
        CutPoint("aggregation", aggregated + loop.buffers, 0.0, _aggregation(prepared), "plan.data_parallel, run.buffers"),
        CutPoint("losses", loop.loss / settings.loss.steps if settings.loss else 0.0, 0.0, _summed(prepared, "loss"), "run.loss"),
        CutPoint("metrics", logged + evaluated, 0.0, _metrics(prepared), "run.metrics, run.evaluation"),
        _checkpoint(prepared),
    ]


def _input(prepared: Prepared) -> str:
    given = prepared.loop.input
    if prepared.settings.input is None:
        return "not described: data are always there"
    slower = "workers" if given.preparing >= given.reading else "storage"
    return f"{slower}: {span(max(given.preparing, given.reading))} a step; copies to the GPU {span(given.copying)}"


def _aggregation(prepared: Prepared) -> str:
    buffers = prepared.loop.buffers
    return "gradients and parameters that are waited for" + (f"; buffers {span(buffers)}" if buffers else "")


def _summed(prepared: Prepared, name: str) -> str:
    asked, seconds = getattr(prepared.settings, name), getattr(prepared.loop, name)
    if asked is None:
        return "not described: nothing is summed"
    return (
        f"{asked.values:,} number{'s' * (asked.values > 1)} every {asked.steps:,} step{'s' * (asked.steps > 1)}: {span(seconds)}"
    )


def _metrics(prepared: Prepared) -> str:
    every = prepared.settings.evaluation_steps
    evaluated = f"evaluation every {every:,} steps: {span(prepared.loop.evaluation)}" if every else ""
    return "; ".join(part for part in (_summed(prepared, "metrics") if prepared.settings.metrics else "", evaluated) if part) or (
        "not described: nothing is logged or evaluated"
    )


def _checkpoint(prepared: Prepared) -> CutPoint:
    step = prepared.summary.step_seconds
    saved = [saving for saving in prepared.spec.savings if saving.steps < NEVER]
    exposed = sum(blocked(saving, step) / saving.steps for saving in saved)
    hidden = sum(saving.flush / saving.steps for saving in saved)
    what = "; ".join(f"{saving.name} every {saving.steps:,} steps: blocks {span(blocked(saving, step))}" for saving in saved)
    return CutPoint("checkpoint", exposed, hidden, what or "never saved", "run.checkpoint")


def overview(prepared: Prepared) -> RenderableType:
    """A row per cut point."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    points = cut_points(prepared)
    total = sum(point.exposed for point in points)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("cut point", "exposed", "of all", "beside it", "what it does", "described by"):
        table.add_column(name, justify="right" if name in ("exposed", "of all", "beside it") else "left", no_wrap=True)
    for point in points:
        hidden = span(point.hidden) if point.hidden else ""
        table.add_row(point.name, span(point.exposed), percent(point.exposed / total), hidden, point.what, point.fields)
    first = f"{prepared.job.name}: {span(total)} a step, {span(prepared.summary.step_seconds)} of it as `simulate` says"
    return Group(Text(first, "bold"), table, Text("seconds of each step; what comes every so many steps is spread over them"))


def as_data(prepared: Prepared) -> dict[str, Any]:
    """Plain data with stable keys."""
    return {
        "job": prepared.job.name,
        "step_seconds": prepared.summary.step_seconds,
        "cut_points": [asdict(point) for point in cut_points(prepared)],
    }
