"""Measurements that others published: facts, each with its source, and the job that each row was.

A source is a YAML file (what it is, how it counts FLOPs and memory, what was the same in all rows) with a CSV file of the same
name (a row per measurement, in SI units; columns `model.*` and `plan.*` are fields of `Model` and `Plan`). A new source is two
more files. Facts about a framework come from the source, and are written beside the numbers; nothing here is fitted.

`use: report` says that no price may be fitted to the source; `fit` that some was, which leaves it out of accuracy figures.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from calibration.published.rules import Step, flops_rules
from strategies.job import Job
from strategies.models.model import Model, load_model
from strategies.plan.plan import Plan
from topologies.cluster import Cluster
from topologies.cluster_files import inline_cluster, load_cluster
from topologies.reading import Config, UserError, build, load_text, load_yaml, nearest, parse_value

FOLDER = Path(__file__).parent
DEFAULT = "default"
MEASURED = ("step", "flops", "mfu", "hfu", "memory")


class Source(Config):
    """One publication."""

    title: str
    url: str
    framework: str
    use: Literal["report", "fit"]
    flops_rule: str = Field("", description="How it counts FLOPs: a name in `rules`; none when it publishes no rate.")
    memory: Literal["allocated", "reserved", "device", "first node", ""] = Field(
        "",
        description="What its memory is: torch's allocated or reserved maximum, or the device's as nvidia-smi shows it, of all "
        "nodes or of the first.",
    )
    machines: dict[str, Any] = Field(description="Clusters by the rows' `machine`: a name or fields.")
    models: dict[str, Any] = Field(description="Models by the rows' `model`: a preset or fields.")
    plan: dict[str, Any] = Field(default_factory=dict, description="Fields of the plan that all rows share.")
    facts: tuple[str, ...] = Field(description="What the source says of its runs, what was assumed, what is not expressed.")


@dataclass(frozen=True)
class Row:
    """One published measurement. SI units; None where nothing was published."""

    name: str  # "bloom-2022/0001"
    source: Source
    where: str  # table or place in the source
    gpus: int
    machine: str
    model: str
    fields: Mapping[str, Mapping[str, Any]]  # of the model and the plan, besides the source's
    measured: Mapping[str, float | None]
    flops_rule: str
    out_of_memory: bool
    obstacle: str  # why the row cannot be a job, "" when it may be
    note: str

    @property
    def group(self) -> str:
        """The source's short name."""
        return self.name.split("/")[0]

    def step(self, job: Job) -> float | None:
        """Published seconds of a step; where only a rate is published, what follows from it by the source's own rule."""
        measured, rate = self.measured["step"], self.measured["flops"]
        return measured or (self.flops(job) / (self.gpus * rate) if rate else None)

    def flops(self, job: Job) -> float:
        """FLOPs of the step by the source's own rule. Raises UserError when it has none."""
        plan = job.resolve()
        return flops_rules[self.flops_rule](Step(job.model, plan.global_batch, plan.sequence))

    def job(self) -> Job:
        """The job that was measured. Raises UserError with the reason when it cannot be expressed."""
        if self.obstacle:
            raise UserError(self.obstacle)
        if self.machine not in self.source.machines:
            raise UserError(f"machine '{self.machine}' is not described")
        chosen = self.source.models.get(self.model, self.source.models.get(DEFAULT)) or {}
        if isinstance(chosen, str):
            chosen = load_model(chosen)[0].model_dump(exclude_none=True)
        plan = build(Plan, {**self.source.plan, **self.fields["plan"]}, "plan")
        sizes = {"name": self.model, "context": self.fields["plan"].get("sequence", 1), **chosen, **self.fields["model"]}
        machine = json.dumps(self.source.machines[self.machine])
        return Job(self.name, build(Model, sizes, "model"), plan, _cluster(machine, self.gpus))


@functools.cache
def _cluster(machine: str, gpus: int) -> Cluster:
    """So many GPUs of a machine, which is given as JSON; a part of a node is a smaller node."""
    fields = json.loads(machine)
    fields = {"based_on": fields} if isinstance(fields, str) else fields
    based_on = fields.pop("based_on", None)

    def read(nodes: int) -> Cluster:
        if based_on is None:
            return inline_cluster({**fields, "nodes": nodes}, "machine")
        return load_cluster(based_on, nodes, fields)

    each = read(1).node.gpus
    if gpus < each:
        fields["node"] = {**fields.get("node", {}), "gpus": gpus}
        return read(1)
    if gpus % each:
        raise UserError(f"{gpus} GPUs are no whole number of nodes of {each}")
    return read(gpus // each)


def sources() -> dict[str, Source]:
    """The publications by short name, in alphabetical order."""
    return {path.stem: build(Source, load_yaml(path), str(path)) for path in sorted(FOLDER.glob("*.yaml"))}


def published(names: tuple[str, ...] = ()) -> Iterator[Row]:
    """All rows of the sources `names`, or of all. Raises UserError for an unknown name."""
    known = sources()
    for name in names:
        if name not in known:
            raise UserError(f"unknown source '{name}'{nearest(name, known)}")
    for name in names or known:
        for cells in csv.DictReader(load_text(FOLDER / f"{name}.csv").splitlines()):
            yield _row(name, known[name], cells)


def _row(name: str, source: Source, cells: Mapping[str, str]) -> Row:
    given = {key: text for key, text in cells.items() if text}
    fields: dict[str, dict[str, Any]] = {"model": {}, "plan": {}}
    for key, text in given.items():
        part, dot, field = key.partition(".")
        if dot:
            fields[part][field] = parse_value(text, f"{name}.csv: {key}={text}")
    return Row(
        name=f"{name}/{given['row']}",
        source=source,
        where=given.get("where", ""),
        gpus=int(given["gpus"]),
        machine=given.get("machine", DEFAULT),
        model=given.get("model", name),
        fields=fields,
        measured={key: float(given[key]) if key in given else None for key in MEASURED},
        flops_rule=given.get("flops_rule", source.flops_rule),
        out_of_memory="outcome" in given,
        obstacle=given.get("obstacle", ""),
        note=given.get("note", ""),
    )
