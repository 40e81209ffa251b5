"""The report: one page that needs nothing but itself, and the figures, tables and trace beside it."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from reports.figures.breakdown import breakdown
from reports.figures.gantt import gantt
from reports.figures.memory import memory
from reports.metrics import metric
from reports.tables import flatten, headline, verdict
from reports.trace import write_trace
from reports.words import KINDS, Job, components, count, digits, gigabytes, held, percent, provenance, seconds, size, stages
from sim.summary import Summary
from sim.timeline import Timeline
from topologies.reading import UserError

FILES = ("report.html", "gantt.png", "breakdown.png", "memory.png", "timeline.csv", "summary.json", "trace.json.gz")
TEMPLATES = Path(__file__).parent / "templates"


def write_report(folder: Path, timeline: Timeline, summary: Summary, job: Job) -> list[Path]:
    """Write FILES into `folder`, which is made if need be, and return their paths. The same inputs give the same bytes.

    Everything is made in a folder beside and moved when it is complete, so a failure leaves nothing half-written.
    Raises UserError when the folder cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as name:
            _write(Path(name), timeline, summary, job)
            for file in FILES:
                os.replace(Path(name) / file, folder / file)
    except OSError as error:
        raise UserError(f"{folder}: the report cannot be written: {error.strerror or error}") from None
    return [folder / file for file in FILES]


def _write(folder: Path, timeline: Timeline, summary: Summary, job: Job) -> None:
    gantt(timeline, folder / "gantt.png")
    breakdown({str(job.get("model", "step")): summary}, folder / "breakdown.png")
    memory(summary, folder / "memory.png")
    write_trace(timeline, folder / "trace.json.gz")
    timeline.frame().to_csv(folder / "timeline.csv", index=False, lineterminator="\n")
    text = json.dumps(summary.to_dict() | {"job": job}, indent=1, ensure_ascii=False, default=str)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(summary, job, folder), encoding="utf-8")


def page(summary: Summary, job: Job, folder: Path) -> str:
    """The HTML page, with the figures of `folder` inside it. Everything from the user is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    figures = {name: _embedded(folder / f"{name}.png") for name in ("gantt", "breakdown", "memory")}
    return environment.get_template("report.html.j2").render(
        verdict=verdict(summary, job),
        summary=summary,
        model=job.get("model", "model"),
        cards=[(label, value, _hint(label)) for label, value in headline(summary, job)],
        figures=figures,
        components=_components(summary),
        memory=_memory(summary),
        volumes=[(axis, size(v.bytes), count(v.elements), digits(v.psi)) for axis, v in summary.volume.items()],
        links=[(x.name, x.count, f"{x.capacity / 1e9:,.4g} GB/s", size(x.bytes), percent(x.utilisation)) for x in summary.links],
        inputs=[(name, "–" if value is None else str(value)) for name, value in flatten(job).items()],
        provenance=provenance(summary, job),
        files=FILES[1:],
    )


def _embedded(path: Path) -> str:
    """A picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _hint(label: str) -> str:
    """The glossary's definition of a card, to be shown on hovering."""
    try:
        return metric(label).definition
    except UserError:
        return ""


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
        [str(entry.stage), *(gigabytes(held(entry)[kind]) for kind in used), gigabytes(entry.peak),
         percent(entry.peak / summary.memory_capacity), seconds(entry.time), entry.op]
        for entry in entries
    ]  # fmt: skip
    return {"header": ["stage", *used, "peak", "of capacity", "reached at", "during"], "rows": rows}
