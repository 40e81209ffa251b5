"""The page of a job with parameter servers: the answer, how it moves with staleness and the number of servers, and all-reduce."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.figures.staleness import staleness
from reports.formatting import count, counted, digits, percent, seconds, size
from reports.page.page import Picture, Section, Sheet, write_folder
from reports.page.rendering import render
from reports.tables.parameter_servers import asynchrony, labelled, settings
from reports.tables.step import flatten
from sim.analysis.summary import Summary
from strategies.lowering.parameter_servers import Answer
from topologies.documents.writing import write_whole

COLUMNS = (
    "a worker's step",
    "compute",
    "into servers",
    "out of servers",
    "mean staleness",
    "p99",
    "of a worker",
    "of a server",
)


@dataclass(frozen=True)
class ServerReport:
    """What the page shows. by_staleness, by_servers: the same job otherwise; reduced: by all-reduce on the workers' GPUs."""

    name: str
    job: Mapping[str, Any]
    answer: Answer
    by_staleness: Mapping[str, Answer]
    by_servers: Mapping[str, Answer]
    reduced: Summary | None


def write_server_report(folder: Path, report: ServerReport) -> list[Path]:
    """report.html, the figure and servers.json. The same inputs give the same bytes. Raises UserError for such a folder."""
    return write_folder(folder, lambda folder_path: _write(folder_path, report))


def _write(folder: Path, report: ServerReport) -> list[str]:
    sections = _sections(report)
    pictures = [picture for section in sections for picture in section.pictures]
    for picture in pictures:
        picture.draw(picture.data, folder / f"{picture.name}.png")
    groups = {"by_staleness": report.by_staleness, "by_servers": report.by_servers}
    data = {
        "job": report.job,
        "answer": report.answer.to_dict(),
        **{name: {key: answer.to_dict() for key, answer in group.items()} for name, group in groups.items()},
    }
    write_whole(folder / "servers.json", json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n")
    files = ["servers.json", *(f"{picture.name}.png" for picture in pictures)]
    unit = counted(report.answer.sequence)
    title = f"{settings(report.answer, report.name)}: {count(report.answer.tokens_per_second)} {unit}/s"
    text = render(
        "server.html.j2",
        (picture.name for picture in pictures),
        folder,
        title=title,
        fits=report.answer.fits,
        cards=[(label, value, "", "") for label, value in labelled(report.answer)],
        sections=sections,
        files=files,
        provenance=f"shardyard {report.job['version']} · hash {report.job['hash']}",
        inputs=[(name, "–" if value is None else str(value)) for name, value in flatten(report.job).items()],
    )
    write_whole(folder / "report.html", text)
    return ["report.html", *files]


def _sections(report: ServerReport) -> list[Section]:
    alt = "Gradients per second by staleness, and how many updates gradients missed"
    picture = Picture("staleness", alt, staleness, report.by_staleness)
    sentences = ["How fast steps follow each other, not how fast the loss falls: stale gradients need more steps."]
    if report.reduced is not None:
        ways = f"{count(report.reduced.tokens_per_second)} {counted(report.answer.sequence)}/s"
        sentences.append(
            f"By all-reduce (DDP) the workers' {report.reduced.gpus:,} GPUs train {ways} in steps of "
            f"{seconds(report.reduced.step_seconds)}, without servers or staleness."
        )
    rate = f"{counted(report.answer.sequence)}/s"
    by_servers = Sheet(("servers", rate, *COLUMNS), [_row(name, answer) for name, answer in report.by_servers.items()])
    return [
        Section(
            "By staleness",
            (picture,),
            tuple(sentences),
            table=Sheet(("staleness", rate, *COLUMNS), [_row(*answer) for answer in report.by_staleness.items()]),
        ),
        Section("By number of servers", text=(f"Each {asynchrony(report.answer)}, beside the same workers.",), table=by_servers),
    ]


def _row(name: str, answer: Answer) -> list[Any]:
    played = answer.played
    stale = played.staleness
    return [
        name,
        count(answer.tokens_per_second),
        seconds(played.seconds / answer.steps),
        percent(played.computing),
        percent(played.pushing),
        percent(played.pulling),
        digits(stale.mean),
        f"{stale.p99:.0f}",
        _held(answer.worker_memory, answer),
        _held(answer.server_memory, answer),
    ]


def _held(used: float, answer: Answer) -> str:
    return size(used) + ("" if used <= answer.memory_capacity else " ✗")
