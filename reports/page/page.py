"""The report: one page that needs nothing but itself, and the figures, tables and trace beside it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reports.figures import Drawing
from reports.figures.breakdown import breakdown
from reports.figures.comparison import comparison
from reports.figures.gantt import gantt
from reports.figures.load import load
from reports.figures.memory import memory
from reports.figures.memory_over_time import memory_over_time
from reports.figures.timeline_bars import played_as
from reports.figures.topology import DRAWN
from reports.figures.traffic import MOST, traffic
from reports.formatting import (
    KINDS,
    Job,
    components,
    count,
    digits,
    filled,
    gigabytes,
    held,
    percent,
    provenance,
    rates_text,
    seconds,
    size,
    stages,
)
from reports.metrics import hint
from reports.page.legend import legend
from reports.page.rendering import KEYLESS, render
from reports.page.step_view import script, style, whole_step
from reports.tables.step import flatten, headline, verdict
from reports.trace import write_trace
from sim.analysis.summary import Summary
from sim.timeline import Timeline
from topologies.cluster import Cluster
from topologies.documents.writing import WriteError, write_whole
from topologies.reading import UserError

LONG = 40  # characters of a cell that is a sentence
DATA = ("timeline.csv", "summary.json", "trace.json.gz")


@dataclass(frozen=True)
class Picture:
    """A figure of the page: the name of its file, what it shows in words, how it is drawn and from what.

    keyed: its colours are those of the page's legend.
    """

    name: str
    alt: str
    draw: Drawing
    data: Any
    keyed: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table that can be sorted and filtered: numbers stay numbers; a cell may be None."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @cached_property
    def texts(self) -> list[int]:
        """Columns with sentences, which are wrapped and stand on the left."""
        columns = {at for row in self.rows for at, cell in enumerate(row) if isinstance(cell, str) and len(cell) > LONG}
        return sorted(columns)


@dataclass(frozen=True)
class Section:
    """A part of the page. sheet: a long table, which is sorted and filtered; table: a short one, shown as it is."""

    title: str
    pictures: tuple[Picture, ...] = ()
    text: tuple[str, ...] = ()
    sheet: Sheet | None = None
    table: Sheet | None = None


@dataclass(frozen=True)
class Launch:
    """How a framework runs the plan: its file of settings, the line that starts it, and what it cannot express."""

    framework: str
    file: str
    text: str
    line: str
    unexpressed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a page shows: one step, runs beside it by name, and sections of whatever else was asked.

    sections stand before the network's, evidence (how far to trust all this) after it; launch: files that are written beside;
    network: what the page says of collectives; best: which of all plans on the page is the best.
    """

    timeline: Timeline
    summary: Summary
    job: Job
    cluster: Cluster | None = None
    runs: Mapping[str, Summary] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()
    evidence: tuple[Section, ...] = ()
    launch: tuple[Launch, ...] = ()
    network: Section | None = None
    best: str = ""

    @property
    def step(self) -> dict[str, Picture]:
        """The figures of the step itself."""
        own = {str(self.job.get("model")): self.summary}
        keyed = [
            Picture("breakdown", "Where the step goes: time by component", breakdown, own),
            Picture("memory", "Peak memory of one GPU by stage and kind", memory, self.summary),
            Picture("gantt", "One step: passes and transfers of each stage over time", gantt, self.timeline),
            Picture("memory_over_time", "What the fullest GPU holds over the step, by kind", memory_over_time, self.timeline),
        ]
        if self.runs:
            keyed.append(Picture("comparison", "Runs beside each other: time and memory", comparison, self.runs))
        figures = [replace(picture, keyed=True) for picture in keyed]
        if 1 < self.summary.gpus <= MOST:
            figures.append(Picture("traffic", "Bytes that each rank sends to each other rank", traffic, self.timeline))
        if self.cluster and 1 < self.summary.gpus <= DRAWN:
            figures.append(Picture("load", "Which links of the cluster the step uses", load, (self.cluster, self.timeline)))
        return {picture.name: picture for picture in figures}

    @property
    def pictures(self) -> Iterator[Picture]:
        """Every figure of the page."""
        yield from self.step.values()
        for section in (*self.sections, *([self.network] if self.network else []), *self.evidence):
            yield from section.pictures


def write_report(folder: Path, report: Report, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Write report.html, the figures and DATA into `folder`, which is made if need be. The same inputs give the same bytes.

    formats: of the figures beside the page: png, svg. Returns the paths. Raises UserError when the folder cannot be written.
    """
    return write_folder(Path(folder), lambda folder_made: _write(folder_made, report, formats))


def write_folder(folder: Path, write: Callable[[Path], Sequence[str]]) -> list[Path]:
    """What `write` makes in an empty folder and names is made beside and moved when it is complete, so a failure leaves nothing
    half-written. Returns the paths. Raises UserError when the folder cannot be written.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as name:
            files = write(Path(name))
            for file in files:
                os.replace(Path(name) / file, folder / file)
    except (WriteError, OSError) as error:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        reason = error.reason if isinstance(error, WriteError) else error.strerror or error
        raise UserError(f"{folder}: the report cannot be written: {reason}") from None
    return [folder / file for file in files]


def _write(folder: Path, report: Report, formats: Sequence[str]) -> list[str]:
    pictures = list(report.pictures)
    for picture in pictures:
        for suffix in dict.fromkeys(("png", *formats)):
            picture.draw(picture.data, folder / f"{picture.name}.{suffix}")
        if picture.keyed:
            picture.draw(picture.data, folder / f"{picture.name}{KEYLESS}", legend=False)
    write_trace(report.timeline, folder / "trace.json.gz")
    write_whole(folder / "timeline.csv", _table(report.timeline.records()))
    text = json.dumps(report.summary.to_dict() | {"job": report.job}, indent=1, ensure_ascii=False, default=str)
    write_whole(folder / "summary.json", text + "\n")
    for launch in report.launch:
        if launch.file:  # what cannot express the plan has none
            write_whole(folder / launch.file, launch.text)
    beside = [
        *(f"{picture.name}.{suffix}" for picture in pictures for suffix in formats),
        *DATA,
        *(launch.file for launch in report.launch if launch.file),
    ]
    write_whole(folder / "report.html", page(report, folder, beside))
    return ["report.html", *beside]


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(records)
    return text.getvalue()


def page(report: Report, folder: Path, beside: Sequence[str]) -> str:
    """The HTML page, with the figures of `folder` inside it. Everything from the user is escaped."""
    summary, job, view = report.summary, report.job, whole_step(report.timeline)
    return render(
        "report.html.j2",
        (picture.name for picture in report.pictures),
        folder,
        verdict=verdict(summary, job),
        summary=summary,
        model=job.get("model", "model"),
        cards=[_card(label, value) for label, value in headline(summary, job)],
        titles=list(_titles(report)),
        shows=_shows(report),
        step=report.step,
        view=view,
        legend=legend((summary, *report.runs.values()), view),
        script=script(),
        style=style(),
        sections=report.sections,
        network=report.network,
        best=report.best,
        evidence=report.evidence,
        launch=report.launch,
        sheets=[
            {"columns": s.sheet.columns, "rows": s.sheet.rows, "texts": s.sheet.texts}
            for s in (*report.sections, *report.evidence)
            if s.sheet
        ],
        components=_components(summary),
        memory=_memory(summary),
        volumes=[(axis, size(v.bytes), count(v.elements), digits(v.psi)) for axis, v in summary.volume.items()],
        links=[(x.name, x.count, f"{x.capacity / 1e9:,.4g} GB/s", size(x.bytes), percent(x.utilisation)) for x in summary.links],
        inputs=[(name, "–" if value is None else str(value)) for name, value in flatten(_inputs(job)).items()],
        provenance=provenance(summary, job),
        files=beside,
    )


def _card(label: str, value: str) -> tuple[str, str, str, str]:
    """Label, value, the rest of a long value below it, definition."""
    if whole := re.fullmatch(r"(\S+) (of \S+ (\S+))", value):  # 61.8 of 84.9 GB
        return label, f"{whole[1]} {whole[3]}", whole[2], hint(label)
    short, between, rest = value.partition(" at " if " at " in value else " (")
    return label, short, f"{between.strip(' (')} {rest.rstrip(')')}".strip(), hint(label)


def _shows(report: Report) -> str:
    """Which step the figures over time show, where that is not the one that the page answers with; else ""."""
    played, answer = report.timeline, report.summary.step_seconds
    which = played_as(played).removeprefix(", ")
    if not which:
        return ""
    alone = played.step / played.program.steps
    expected = f"; the expected step takes {seconds(answer)}" if report.summary.variability else ""
    return f"This step of {seconds(alone)} has {which}{expected}."


def _titles(report: Report) -> Iterator[str]:
    """Headings of the page, from top to bottom."""
    yield from ("Where the step goes", "Peak memory of one GPU", "One step, second by second")
    if report.runs:
        yield "Beside other runs"
    yield from (section.title for section in report.sections)
    yield "What is sent"
    if report.network:
        yield report.network.title
    if report.summary.notes:
        yield "Notes"
    yield from (section.title for section in report.evidence)
    yield "Inputs and provenance"
    if report.launch:
        yield "Run it"
    yield "Beside this page"


def _inputs(job: Job) -> Job:
    """What determined the answer, in words where it is not plain data."""
    return {**job, "rates": rates_text(job["rates"])} if job.get("rates") else job


def _components(summary: Summary) -> list[tuple[str, str, str]]:
    return [
        (name, seconds(summary.breakdown[name]), percent(summary.breakdown[name] / summary.step_seconds))
        for name in components([summary.breakdown])
    ]


def _memory(summary: Summary) -> dict[str, Any]:
    """Header and rows of the table of stages, in GB."""
    entries = stages(summary)
    used = [kind for kind in KINDS if any(held(entry)[kind] for entry in entries)]
    rows = [
        [
            str(entry.stage),
            *(gigabytes(held(entry)[kind]) for kind in used),
            gigabytes(entry.peak),
            percent(filled(entry, summary)),
            seconds(entry.time),
            entry.op,
        ]
        for entry in entries
    ]
    return {"header": ["stage", *used, "peak", "of capacity", "reached at", "during"], "rows": rows}
