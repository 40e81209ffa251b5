"""A job over days: what it delivers, where its GPU-seconds go, what to change first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import exp
from typing import TYPE_CHECKING, Any

from reports.formatting import bar, count, counted, digits, dollars, percent, plural, size, span, tokens_text
from sim.runs import ledger
from sim.runs.replications import Estimate
from sim.runs.segment import blocked
from sim.runs.spec import Saving
from strategies.planner.arguments import as_arguments
from strategies.planner.uncertainty import NORMAL
from strategies.resilience.run_spec import NEVER, Prepared
from strategies.resilience.runs import Alternative, RunAnswer
from topologies.costs import Rates

if TYPE_CHECKING:
    from rich.console import RenderableType

WORTH = 0.0005  # of goodput, below which a change is not shown
MOST = 6  # changes


def overview(
    prepared: Prepared,
    answer: RunAnswer,
    rates: Rates,
    tried: Sequence[tuple[int, float]],
    changes: Sequence[Alternative],
    seed: int,
) -> RenderableType:
    """One screen."""
    from rich.console import Group
    from rich.text import Text

    spec = prepared.spec
    lines: list[RenderableType] = [Text(headline(prepared, answer), "bold"), _quantities(answer, rates), _ledger(answer)]
    lines += [Text(line) for line in facts(prepared, answer)]
    lines += [Text(line) for line in _advice(prepared, tried, changes)]
    if answer.finished < 1 and spec.deadline > 50 * spec.work:
        lines.append(Text(f"{percent(1 - answer.finished)} of the runs never got to the end: they were given up"))
    lines += [Text(f"note: {note}") for note in prepared.notes]
    known = f"mean goodput ± {100 * answer.error:.2g} % (95 %)" if answer.runs > 1 else "one run"
    lines.append(Text(f"{plural(answer.runs, 'run')}, seed {seed}: {known}; ledgers close to {answer.closes:.0e}"))
    return Group(*lines)


def headline(prepared: Prepared, answer: RunAnswer) -> str:
    """The job and what it delivers, in one line."""
    job, spares = prepared.job, prepared.spec.spares
    ready = f" and {plural(spares, 'spare node')}" if spares else ""
    what = f"{job.name} on {job.cluster.nodes} × {job.cluster.name} ({job.cluster.gpus:,} GPUs){ready}"
    tokens, unit = answer.tokens, counted(answer.sequence)
    trained = tokens_text(tokens.mean, unit) if tokens.low == tokens.high else f"{count(tokens.mean)} {unit}"
    delivered = f"{trained} in {digits(answer.days.mean)} days"
    return f"{what}: {delivered}, goodput {percent(answer.goodput.mean)}"


def _quantities(answer: RunAnswer, rates: Rates) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    unit = counted(answer.sequence)
    for column in ("", "mean", "median", "80 % of runs"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)

    def row(name: str, estimate: Estimate, shown: Any) -> None:
        if name in ("days", unit) and estimate.low == estimate.high:  # as they were asked for: the first line has them
            return
        values = [shown(value) for value in (estimate.mean, estimate.median)]
        table.add_row(name, *values, f"{shown(estimate.low)}–{shown(estimate.high)}")

    row("days", answer.days, digits)
    row(unit, answer.tokens, lambda value: count(value))
    row("goodput", answer.goodput, percent)
    row("ETTR", answer.ettr, percent)
    row("failures", answer.failures, digits)
    if answer.usd is not None:
        row(f"cost at ${rates.usd:.2f}/h", answer.usd, dollars)
    row("energy, at most", answer.kwh, lambda value: f"{count(1000 * value)}Wh")
    return table


def _ledger(answer: RunAnswer) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("GPU-seconds", "of all", "", "badput type"):
        table.add_column(column, justify="right" if column == "of all" else "left", no_wrap=True)
    for cause, share in answer.shares.items():
        if share > 0:
            table.add_row(cause, f"{100 * share:.2f} %", Text(bar(share, 20), "cyan"), ledger.BADPUT.get(cause, ""))
    return table


def facts(prepared: Prepared, answer: RunAnswer) -> list[str]:
    """Checkpoint, saves, failures."""
    step, bytes_each = prepared.summary.step_seconds, prepared.size
    lines = [f"step {span(step)}{_interval(prepared, answer)}"]
    lines.append(f"checkpoint {size(bytes_each.total)}, up to {size(bytes_each.busiest_node)} per node")
    lines += [_saving(saving, step) for saving in prepared.spec.savings]
    failures = prepared.settings.failures
    if prepared.mtbf < float("inf"):
        often = f"one every {span(prepared.mtbf)} on {prepared.spec.nodes:,} nodes{_spread(prepared)}"
        lines.append(f"failures '{failures.name}': {often}; a start takes {span(prepared.restart)}")
    return lines


def _spread(prepared: Prepared) -> str:
    """How unlike clusters of this kind are: each run has a rate of its own."""
    if not prepared.spec.rate_spread:
        return ""
    factor = exp(NORMAL * prepared.spec.rate_spread)
    between = f"{span(prepared.mtbf / factor)}–{span(prepared.mtbf * factor)}"
    return f" (median; {between} in 80 % of runs, as published clusters differ)"


def _interval(prepared: Prepared, answer: RunAnswer) -> str:
    """How sure the step is, and what of the days is chance."""
    interval, chance = prepared.summary.interval, answer.chance
    if interval is None or not prepared.spec.slower:
        return ""
    days = f"{digits(chance.mean)} days ({digits(chance.low)}–{digits(chance.high)})"
    alone = f"; with the predicted one in all, as `compare --runs` has it, {days}" if answer.finished else ""
    return f", 80 % interval {span(interval.low)}–{span(interval.high)}: each run has its own{alone}"


def _saving(saving: Saving, step: float) -> str:
    if saving.steps >= NEVER:
        return f"{saving.name}: never saved (nothing would be lost)"
    beside = f", {span(saving.flush)} beside training" if saving.flush else ""
    waits = blocked(saving, step) - saving.blocking
    beside += f", waits {span(waits)} for the save before it" if waits > 0 else ""
    between = f"every {saving.steps:,} steps ({span(saving.steps * step)})"
    return f"{saving.name}: saved {between}, blocks {span(saving.blocking)}{beside}; read in {span(saving.restore)}"


def _advice(prepared: Prepared, tried: Sequence[tuple[int, float]], changes: Sequence[Alternative]) -> list[str]:
    lines = []
    if tried:
        present = dict(tried).get(prepared.spec.savings[0].steps, 0.0)
        steps, best = max(tried, key=lambda each: each[1])
        step = prepared.summary.step_seconds
        what = f"best of {len(tried)} intervals: {steps:,} steps ({span(steps * step)})"
        said = as_arguments({"run.checkpoint.interval": f"{steps} steps"})
        lines.append(f"{what}, goodput {100 * (best - present):+.2f} % ({said})")
    helpful = [change for change in changes if change.gain >= WORTH][:MOST]
    for number, change in enumerate(helpful):
        lead = "" if number else "change first:"
        said = f" ({as_arguments(change.fields)})" if change.fields else ""
        lines.append(f"{lead:14}{change.change}: goodput {100 * change.gain:+.2f} %{said}")
    if changes and not helpful:
        lines.append(f"of {len(changes)} changes that were tried none gains {100 * WORTH:.2g} % of goodput")
    return lines


def as_data(
    prepared: Prepared, answer: RunAnswer, tried: Sequence[tuple[int, float]], changes: Sequence[Alternative]
) -> dict[str, Any]:
    """Plain data with stable keys."""
    spec, step = prepared.spec, prepared.summary.step_seconds
    return {
        "job": prepared.job.name,
        "hash": prepared.job.hash,
        "gpus": spec.gpus,
        "spare_nodes": spec.spares,
        "step_seconds": step,
        "mtbf_seconds": prepared.mtbf if prepared.mtbf < float("inf") else None,
        "restart_seconds": prepared.restart,
        "checkpoint_bytes": prepared.size.total,
        "checkpoint_bytes_per_node": prepared.size.busiest_node,
        "savings": [asdict(saving) for saving in spec.savings],
        "step_interval": _ends(prepared),
        **{name: asdict(getattr(answer, name)) for name in ("days", "chance", "tokens", "goodput", "ettr", "failures", "kwh")},
        "usd": None if answer.usd is None else asdict(answer.usd),
        "ledger": answer.shares,
        "badput_types": ledger.BADPUT,
        "failures_by_part": answer.failures_by_part,
        "runs": answer.runs,
        "goodput_error": answer.error,
        "finished": answer.finished,
        "ledger_closes": answer.closes,
        "intervals": [{"steps": steps, "seconds": steps * step, "goodput": goodput} for steps, goodput in tried],
        "changes": [
            {"change": each.change, "goodput": each.goodput, "gain": each.gain, "arguments": as_arguments(each.fields)}
            for each in changes
        ],
        "notes": list(prepared.notes),
    }


def _ends(prepared: Prepared) -> list[float] | None:
    """Seconds between which 80 % of the runs have their step."""
    interval = prepared.summary.interval
    return None if interval is None or not prepared.spec.slower else [interval.low, interval.high]
