"""Runs side by side on the terminal: what differs, and what it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.formatting import (
    Job,
    components,
    count,
    counted,
    digits,
    dollars,
    gigabytes,
    gpu_hours,
    percent,
    seconds,
    size,
    spread,
    tie_rule,
    tokens_text,
    training_cost,
    unit_of,
)
from reports.tables.step import LEAST, UNEVEN, flatten, lacking
from sim.analysis.summary import Summary
from strategies.planner.ranking import rank

if TYPE_CHECKING:
    from strategies.resilience.runs import RunAnswer

Run = tuple[str, Summary, Job]
ALWAYS = ("sequence", "global_batch")  # inputs that are shown of every run
NOT_COMPARED = ("command", "hash", "name", "notes", "ignored", "rates")  # what is not compared


def _fitting(summary: Summary) -> str:
    """Yes, or what is missing."""
    over = summary.worst.peak - summary.memory_capacity
    return "yes" if summary.fits else f"over by {size(over)}" if over > 0 else lacking(summary)[0].split(":")[0]


def comparison(runs: Sequence[Run], delivered: Sequence[RunAnswer | None] = ()) -> RenderableType:
    """Runs side by side, in the order given: the inputs that differ, the metrics, and each component's change against the first.
    delivered: what each delivers over days, where that was asked.

    The run with most tokens/s/GPU among those that fit is marked. Raises ValueError without runs.
    """
    if not runs:
        raise ValueError("comparison needs at least one run")
    fitting = [run for run in runs if run[1].fits]
    best = min(fitting, key=lambda run: rank(run[1], run[2].get("plan", {}), str(run[2].get("hash", "")))) if fitting else None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for run in runs:
        mark = "★ " if run is best else "≈ " if best and _tied(run, best) else ""
        heading = Text(re.sub(r",(?=[a-z_.]+=)", ",\n", f"{mark}{run[0]}"))  # a variant's fields under each other
        table.add_column(heading, justify="right", style="bold" if run is best else "")
    for name, values in _differences([job for _, _, job in runs]):
        table.add_row(Text(name, "dim"), *(Text(value) for value in values))
    table.add_section()
    units = {unit_of(job) for _, _, job in runs}
    unit = units.pop() if len(units) == 1 else "tokens"
    for label, show in _METRICS:
        table.add_row(label.replace("tokens", unit), *(show(summary) for _, summary, _ in runs))
        if label == "bubble" and any(summary.uneven > UNEVEN for _, summary, _ in runs):
            table.add_row("  by uneven stages", *(percent(summary.uneven) for _, summary, _ in runs))
    for label, values in [*_costs(runs, any(delivered)), *_delivered(delivered)]:
        table.add_row(label, *values)
    for label, values in _sent([summary for _, summary, _ in runs]):
        table.add_row(label, *values)
    table.add_section()
    for name in components(_seen(summary) for _, summary, _ in runs):
        spent = [summary.breakdown.get(name, 0.0) for _, summary, _ in runs]
        table.add_row(name, *_changes(spent, LEAST * runs[0][1].step_seconds))
    caption = f"★ most {unit}/s/GPU of those that fit" if best else "no run fits"
    ties = [Text(tie_rule(), "dim")] if best and any(_tied(run, best) for run in fitting) else []
    return Group(
        table, Text(f"{caption}; components: seconds per step, and the change against the first", "dim"), *ties, *_notes(runs)
    )


def _notes(runs: Sequence[Run]) -> list[Text]:
    """What a reader must know, each once, with the runs that it is about unless it is about all."""
    about: dict[str, list[str]] = {}
    every = [name for name, _, _ in runs]
    for name, summary, job in runs:
        for note in dict.fromkeys((*summary.notes, *job.get("notes", ()))):
            about.setdefault(note, []).append(name)
    return [Text(f"note{_on(names, every)}: {note}", "yellow") for note, names in about.items()]


def _on(names: list[str], every: list[str]) -> str:
    """Of which runs something is said: nothing of all, of most those of which it is not."""
    others = [name for name in every if name not in names]
    if not others:
        return ""
    return f" on all but {'; '.join(others)}" if len(others) < len(names) else f" on {'; '.join(names)}"


def _costs(runs: Sequence[Run], delivered: bool) -> list[tuple[str, list[str]]]:
    """Days and costs of the training, where tokens are given or prices differ. delivered: prices only, the rest is said below."""
    asked, several = "tokens" in runs[0][2], len({job["rates"].usd for _, _, job in runs if "rates" in job}) > 1
    if not (asked or several) or not all("rates" in job for _, _, job in runs):
        return []
    whole = [training_cost(summary, job) for _, summary, job in runs]
    prices = ["no price" if answer.rates.usd is None else f"${answer.rates.usd:.2f}" for answer in whole]
    money = ["–" if answer.usd is None else dollars(answer.usd) for answer in whole]
    of = tokens_text(whole[0].tokens, unit_of(runs[0][2]))
    rows = [("price of a GPU-hour", prices)] if several else []
    if delivered:
        return rows
    days = [digits(answer.seconds / 86400) for answer in whole]
    return [*rows, *([(f"days of {of}", days)] if asked else []), (f"cost of {of}", money)]


def _delivered(answers: Sequence[RunAnswer | None]) -> list[tuple[str, list[str]]]:
    """Goodput, days and costs with failures and checkpoints."""
    able = [answer for answer in answers if answer is not None]
    if not able:
        return []
    of = f"{tokens_text(able[0].tokens.mean, counted(able[0].sequence))}, failures included"

    def row(label: str, show: Callable[[RunAnswer], str]) -> tuple[str, list[str]]:
        return label, ["–" if answer is None else show(answer) for answer in answers]

    return [
        row("goodput", lambda a: percent(a.goodput.mean)),
        row("failures", lambda a: digits(a.failures.mean)),
        row(f"days of {of}", lambda a: digits(a.days.mean)),
        row("  80 % of runs, with this step", lambda a: f"{digits(a.days.low)}–{digits(a.days.high)}"),
        row(f"cost of {of}", lambda a: "–" if a.usd is None else dollars(a.usd.mean)),
    ]


def _sent(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    """What one rank sends along each axis and what all ranks do together, where that was asked for."""
    if any(summary.total is None for summary in summaries):
        return
    for axis in dict.fromkeys(axis for summary in summaries for axis in summary.volume):
        for who, sent in (
            ("a rank", [each.volume for each in summaries]),
            ("all ranks", [each.total or {} for each in summaries]),
        ):
            values = [volume.get(axis) for volume in sent]
            yield f"{axis}, sent by {who}", ["–" if v is None else f"{size(v.bytes)}, {digits(v.psi)} Ψ" for v in values]


def _tied(run: Run, best: Run) -> bool:
    """Whether a run of the same model on as many GPUs fits and is as good as the best, as far as prices of both can tell."""
    from strategies.planner.uncertainty import tied

    (_, summary, mine), (_, best_summary, its) = run, best
    alike = (summary.profile, summary.gpus, mine.get("model")) == (best_summary.profile, best_summary.gpus, its.get("model"))
    if run is best or not summary.fits or not alike:
        return False
    return tied(summary.tokens_per_second_per_gpu, best_summary.tokens_per_second_per_gpu)


def _seen(summary: Summary) -> dict[str, float]:
    """The components that would not show as 0.0 % of the step."""
    return {name: seconds for name, seconds in summary.breakdown.items() if seconds >= LEAST * summary.step_seconds}


_METRICS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("step", lambda s: seconds(s.step_seconds)),
    ("80 % interval", lambda s: spread(s.interval) if s.interval else "–"),
    ("tokens/s", lambda s: count(s.tokens_per_second)),
    ("tokens/s/GPU", lambda s: count(s.tokens_per_second_per_gpu)),
    ("MFU", lambda s: percent(s.mfu)),
    ("HFU", lambda s: percent(s.hfu)),
    ("exposed communication", lambda s: percent(s.exposed)),
    ("bubble", lambda s: percent(s.bubble)),
    ("peak memory", lambda s: f"{gigabytes(s.worst.peak)} of {gigabytes(s.memory_capacity)} GB"),
    ("fits", _fitting),
    ("GPU-hours per 10⁹ tokens", lambda s: digits(gpu_hours(s, 1e9))),
)


def _changes(values: Sequence[float], least: float) -> list[str]:
    """Seconds, and for every value but the first its change, when it is at least `least`."""
    first, *others = values
    return [seconds(first), *(seconds(value) + _change(value - first, least) for value in others)]


def _change(value: float, least: float) -> str:
    return f" ({'+' if value > 0 else '−'}{seconds(abs(value))})" if abs(value) >= least else ""


def _differences(jobs: Sequence[Job]) -> list[tuple[str, list[str]]]:
    """ALWAYS, and inputs that are not the same in all jobs, by name: nested with dots, without what identifies a run."""
    flat = [flatten({key: value for key, value in job.items() if key not in NOT_COMPARED}) for job in jobs]
    for fields in flat:
        fields["profile"] = str(fields.get("profile", "–")).split(" (")[0]  # its name, without what it was measured on
    names = dict.fromkeys(name for fields in flat for name in fields)
    rows = [(name.removeprefix("plan."), [brief(fields.get(name, "–")) for fields in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1 or name in ALWAYS]


def brief(value: object) -> str:
    """As text; of a long list how often each value follows itself: `49 × 1, 14 × 2, 49 × 1`."""
    if not isinstance(value, list) or len(value) <= 8:
        return str(value)
    return ", ".join(f"{len(list(same))} × {value_of_run}" for value_of_run, same in groupby(value))
