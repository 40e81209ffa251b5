"""The page of a job over days: what it delivers, a run that can be looked at closely, where time goes, what to change first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.figures.badput import badput
from reports.figures.completion import completion
from reports.figures.goodput import goodput
from reports.figures.intervals import intervals
from reports.figures.run_timeline import CAUSES, run_timeline
from reports.formatting import count, counted, digits, dollars, percent, span
from reports.metrics import metric
from reports.page.page import Picture, Section, Sheet, write_folder
from reports.page.rendering import render
from reports.tables.loop import cut_points
from reports.tables.run import facts, headline
from reports.tables.step import flatten
from sim.runs import ledger
from sim.runs.record import Span
from sim.runs.replications import Estimate
from sim.runs.run import Outcome
from strategies.resilience.compare_runs import RunCase
from strategies.resilience.run_spec import Prepared
from strategies.resilience.runs import Alternative, RunAnswer
from topologies.costs import Rates
from topologies.documents.writing import write_whole
from topologies.reading import UserError

DIGITS = 3  # of seconds, in the page's timeline


@dataclass(frozen=True)
class RunReport:
    """What the page shows. tried: goodput by interval; changes: what would help; scales: the job at other sizes; outcome: a run
    with its timeline; inputs: what determined all of it.
    """

    prepared: Prepared
    answer: RunAnswer
    rates: Rates
    tried: Sequence[tuple[int, float]]
    changes: Sequence[Alternative]
    scales: Sequence[RunCase]
    outcome: Outcome
    inputs: Mapping[str, Any]
    seed: int


def write_run_report(folder: Path, report: RunReport) -> list[Path]:
    """report.html and its figures. The same inputs give the same bytes. Raises UserError for such a folder."""
    return write_folder(folder, lambda folder_made: _write(folder_made, report))


def _write(folder: Path, report: RunReport) -> list[str]:
    prepared, answer = report.prepared, report.answer
    sections = [_ledger(answer), *_optima(report), *_tables(report)]
    static = Picture("run_timeline", "One run: what the job did when", run_timeline, report.outcome)
    pictures = [static, *(picture for section in sections for picture in section.pictures)]
    for picture in pictures:
        picture.draw(picture.data, folder / f"{picture.name}.png")
    page = render(
        "run.html.j2",
        (picture.name for picture in pictures),
        folder,
        title=headline(prepared, answer),
        cards=_cards(answer, report.rates),
        static=static,
        timeline=timeline(report.outcome),
        about=_about(report.outcome),
        sections=sections,
        facts=facts(prepared, answer),
        notes=prepared.notes,
        provenance=f"shardyard {report.inputs['version']} · hash {report.inputs['hash']} · seed {report.seed}",
        command=report.inputs["command"],
        inputs=[(name, "–" if value is None else str(value)) for name, value in flatten(_inputs(report)).items()],
    )
    write_whole(folder / "report.html", page)
    return ["report.html", *(f"{picture.name}.png" for picture in pictures)]


def timeline(outcome: Outcome) -> dict[str, Any]:
    """A run as plain data for the page's script: names and colours of causes; spans as [start, end, cause] and, of training,
    [when its first step began, that step's number, seconds of a step, pauses as [steps, seconds, cause]].
    """
    number = {cause: place for place, cause in enumerate(CAUSES)}
    return {
        "seconds": outcome.seconds,
        "causes": ["training" if cause == ledger.PRODUCTIVE else cause for cause in CAUSES],
        "colours": list(CAUSES.values()),
        "training": number[ledger.PRODUCTIVE],
        "spans": [_plain(span, number) for span in outcome.timeline],
    }


def _plain(span: Span, number: Mapping[str, int]) -> list[Any]:
    bare = [round(span.start, DIGITS), round(span.end, DIGITS), number[span.cause]]
    if span.segment is None:
        return bare
    paused = zip(span.segment.pauses, span.pauses, strict=True)
    pauses = [[pause.steps, pause.seconds, number[cause]] for pause, cause in paused if pause.seconds]
    return [*bare, [span.origin, span.segment.first, span.segment.step, pauses]]


def _about(outcome: Outcome) -> str:
    failures = sum(outcome.failures.values())
    what = (
        f"{failures:,} failure{'s' * (failures != 1)}, {percent(outcome.goodput)} goodput, {digits(outcome.seconds / 86400)} days"
    )
    return f"The first of the runs: {what}."


def _cards(answer: RunAnswer, rates: Rates) -> list[tuple[str, str, str, str]]:
    """(label, mean, 80 % of the runs, definition)."""
    rows: list[tuple[str, Estimate | None, Any]] = [
        ("days", answer.days, digits),
        (counted(answer.sequence), answer.tokens, count),
        ("goodput", answer.goodput, percent),
        ("ETTR", answer.ettr, percent),
        ("failures", answer.failures, digits),
        (f"cost at ${rates.usd:.2f}/h" if rates.usd is not None else "cost", answer.usd, dollars),
        ("energy, at most", answer.kwh, lambda value: f"{count(1000 * value)}Wh"),
    ]
    return [
        (name, shown(each.mean), f"{shown(each.low)}–{shown(each.high)}", _definition(name)) for name, each, shown in rows if each
    ]


def _definition(name: str) -> str:
    try:
        return metric(name).definition
    except UserError:
        return ""


def _ledger(answer: RunAnswer) -> Section:
    rows = [[cause, f"{100 * share:.3g} %", ledger.BADPUT.get(cause, "")] for cause, share in answer.shares.items() if share > 0]
    return Section(
        "Where the GPU-seconds go",
        (
            Picture("badput", "Badput: from all GPU-seconds down to goodput", badput, answer),
            Picture("completion", "When the runs are over", completion, answer),
        ),
        ("Every second of every GPU that is held has one cause; the last column is Google's badput type.",),
        table=Sheet(("cause", "of all", "badput type"), rows),
    )


def _optima(report: RunReport) -> list[Section]:
    """Goodput by interval and by scale."""
    pictures = []
    if report.tried:
        alt = "Goodput by checkpoint interval, the best one marked"
        pictures.append(Picture("intervals", alt, intervals, (report.prepared, report.tried)))
    played = [case for case in report.scales if case.answer is not None]
    if len(played) > 1:
        pictures.append(Picture("scale", "Goodput by number of GPUs, the best one marked", goodput, ("nodes", played)))
    if not pictures:
        return []
    sentences = ["All points meet the same failures."]
    if len(played) > 1:
        grown = "batch, spare and free nodes grow with the job's nodes, storage only where it comes in units"
        sentences.append(f"By number of GPUs the step is simulated anew: {grown}.")
    rows = [_scale(case) for case in played] if len(played) > 1 else []
    table = (
        Sheet(("GPUs", "step", "failures per day", "goodput", "80 % of runs", f"{counted(report.answer.sequence)} per day"), rows)
        if rows
        else None
    )
    return [Section("How often to save, how far to scale", tuple(pictures), tuple(sentences), table=table)]


def _scale(case: RunCase) -> list[Any]:
    answer, prepared = case.answer, case.prepared
    assert answer is not None
    assert prepared is not None
    return [
        f"{prepared.spec.gpus:,}",
        span(prepared.summary.step_seconds),
        digits(answer.failures.mean / answer.days.mean),
        percent(answer.goodput.mean),
        f"{percent(answer.goodput.low)}–{percent(answer.goodput.high)}",
        count(answer.tokens.mean / answer.days.mean),
    ]


def _tables(report: RunReport) -> list[Section]:
    sections = []
    if report.changes:
        rows = [[change.change, f"{100 * change.gain:+.2f} %", percent(change.goodput)] for change in report.changes]
        sections.append(Section("What to change first", table=Sheet(("change", "gain", "goodput"), rows)))
    parts = {name: each for name, each in report.answer.failures_by_part.items() if each}
    if parts:
        days = report.answer.days.mean
        rows = [[name, digits(each), digits(each / days)] for name, each in sorted(parts.items(), key=lambda pair: -pair[1])]
        sections.append(Section("What failed", table=Sheet(("part", "failures of a run", "per day"), rows)))
    points = [
        [point.name, span(point.exposed), span(point.hidden) if point.hidden else "", point.what, point.fields]
        for point in cut_points(report.prepared)
    ]
    table = Sheet(("cut point", "exposed", "beside it", "what it does", "described by"), points)
    text = (
        "Seconds of each step at the seven cut points of the training loop; what comes every so many steps is spread over them.",
    )
    return [*sections, Section("The training loop", text=text, table=table)]


def _inputs(report: RunReport) -> dict[str, Any]:
    hidden = ("version", "hash", "command", "notes", "ignored")
    own = {name: value for name, value in report.inputs.items() if name not in hidden}
    return {**own, "run": report.prepared.settings.model_dump(mode="json")}
