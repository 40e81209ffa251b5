"""Runs of a job with other inputs, side by side: a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reports.formatting import count, digits, dollars, percent, plural, span, unit_of_job
from strategies.job import Job
from strategies.resilience.compare_runs import RunCase
from strategies.resilience.runs import RunAnswer
from topologies.reading import argument

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("change", "GPUs", "step", "failures", "saved every", "goodput", "80 % of runs", "ETTR", "days")


def table(job: Job, cases: Sequence[RunCase], seed: int) -> RenderableType:
    """A row per case; the highest goodput and the lowest price of a token are marked."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (*COLUMNS, unit_of_job(job), "cost"):
        result.add_column(column, justify="left" if column == "change" else "right", no_wrap=True)
    played = [case for case in cases if case.answer is not None]
    best = max((case.answer.goodput.mean for case in played if case.answer), default=0.0)
    for case in played:
        result.add_row(*_row(case, best))
    lines: list[RenderableType] = [Text(f"{job.name}: runs with other inputs, all with the same failures", "bold"), result]
    lines += [Text(f"{_change(case)}: {case.refused}") for case in cases if case.refused]
    lines += [Text(line) for line in _notes(played)]
    runs = played[0].answer.runs if played and played[0].answer else 0
    return Group(*lines, Text(f"{plural(runs, 'run')} each, seed {seed}; * the highest goodput"))


def _notes(played: Sequence[RunCase]) -> Iterator[str]:
    """What is to be known of the runs, and of which inputs where it is not of all."""
    said: dict[str, list[str]] = {}
    for case in played:
        for note in case.prepared.notes if case.prepared else ():
            said.setdefault(note, []).append(_change(case))
    for note, changes in said.items():
        yield f"note: {note}" if len(changes) == len(played) else f"note on {'; '.join(changes)}: {note}"


def _change(case: RunCase) -> str:
    return " ".join(argument(name, value) for name, value in case.changes.items())


def _row(case: RunCase, best: float) -> list[str]:
    answer, prepared = case.answer, case.prepared
    assert answer is not None
    assert prepared is not None
    goodput = answer.goodput
    mark = " *" if goodput.mean == best else ""
    savings = prepared.spec.savings
    between = span(savings[0].steps * prepared.summary.step_seconds) if savings and savings[0].steps < 1e12 else "never"
    return [
        _change(case),
        f"{prepared.spec.gpus:,}",
        span(prepared.summary.step_seconds),
        digits(answer.failures.mean),
        between,
        f"{percent(goodput.mean)}{mark}",
        f"{percent(goodput.low)}–{percent(goodput.high)}",
        percent(answer.ettr.mean),
        digits(answer.days.mean),
        count(answer.tokens.mean),
        dollars(answer.usd.mean) if answer.usd is not None else "",
    ]


def as_data(case: RunCase) -> dict[str, Any]:
    """Plain data with stable keys."""
    if case.answer is None or case.prepared is None:
        return {"changes": dict(case.changes), "refused": case.refused}
    return {
        "changes": dict(case.changes),
        "gpus": case.prepared.spec.gpus,
        "step_seconds": case.prepared.summary.step_seconds,
        **run_data(case.answer),
    }


def run_data(answer: RunAnswer) -> dict[str, Any]:
    """What runs of one job say, with stable keys."""
    data = {name: asdict(getattr(answer, name)) for name in ("days", "tokens", "goodput", "ettr", "failures", "kwh")}
    money = None if answer.usd is None else asdict(answer.usd)
    return {**data, "usd": money, "ledger": answer.shares, "runs": answer.runs}
