"""Pages of the fields of jobs: model, plan, cluster, effects, run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from pydantic import BaseModel

from reports.reference.fields import fields_table
from reports.reference.markdown import plain, sentence
from sim.engine.effects import Effect, effects
from strategies.frameworks import kernel_sets
from strategies.models.model import Model
from strategies.plan.computing import Computing
from strategies.plan.degrees import Degrees
from strategies.plan.fine_tuning import FineTuning
from strategies.plan.plan import Plan
from strategies.resilience.settings import RunSettings
from topologies.cluster import Cluster
from topologies.fabric import fabrics
from topologies.node import Node
from topologies.reliability import Part, Reliability
from topologies.storage import Storage

_ON_A_COMMAND_LINE = (
    "In a file as they stand; on the command line `--set {prefix}FIELD=VALUE`. Empty defaults follow from other fields."
)


def field_pages() -> dict[str, str]:
    """Markdown by the name of the page."""
    return {"plan": _plan(), "model": _model(), "cluster": _cluster(), "effects": _effects(), "run": _run()}


def _opening(title: str, about: str, prefix: str) -> list[str]:
    return [f"# {title}\n", about, "", _ON_A_COMMAND_LINE.format(prefix=prefix), ""]


def _plan() -> str:
    about = "How a model is trained: the section `plan` of a job. [Which parts combine](../combinations.md)."
    parts = _opening("Fields of a plan", about, "plan.")
    groups: list[tuple[str, type[BaseModel]]] = [
        ("Degrees", Degrees),
        ("Schedule, batch, sharding, overlap", Plan),
        ("How a rank computes", Computing),
        ("Fine-tuning", FineTuning),
    ]
    inherited = {name for _, kind in groups if kind is not Plan for name in kind.model_fields}
    for title, kind in groups:
        table = fields_table(kind)
        if kind is Plan:
            table = "".join(
                line for line in table.splitlines(keepends=True) if line.split("`")[1:2] == [] or _first(line) not in inherited
            )
        parts += [f"## {title}\n", table]
    parts += ["## Options of frameworks\n", "Below `plan.framework`, by the kernel set of `plan.kernels`.\n"]
    for name in kernel_sets:
        kind = type(kernel_sets[name].options)
        if kind.model_fields:
            parts += [f"### kernels: {name}\n", fields_table(kind, "framework.")]
    return "\n".join(parts)


def _first(line: str) -> str:
    """The field of a row, or of the group that it belongs to."""
    return line.split("`")[1].partition(".")[0]


def _model() -> str:
    about = "What is trained: a preset's name, a path to `config.json`, a traced module, or these fields. [Models](../models.md)."
    return "\n".join([*_opening("Fields of a model", about, "model."), fields_table(Model)])


def _cluster() -> str:
    about = (
        "GPUs, nodes and how they are wired: a name of the catalogue, a path to YAML, or `based_on` with what differs. "
        "[How to describe your own cluster](../tutorials/own-cluster.md)."
    )
    apart = ("node", "fabric", "storage")
    parts = [*_opening("Fields of a cluster", about, "cluster."), "## Cluster\n", fields_table(Cluster, apart=apart)]
    parts += ["## Node\n", _documentation(Node.__mro__[1]), "", fields_table(Node, "node.")]
    parts.append("## Fabric\n\n`fabric.kind` says which; the other fields are those of its kind.\n")
    for name in fabrics:
        parts += [f"### {name}\n", _documentation(fabrics[name]), "", fields_table(fabrics[name], "fabric.")]
    parts += ["## Storage\n", _documentation(Storage), "", fields_table(Storage, "storage.")]
    return "\n".join(parts)


def _effects() -> str:
    about = (
        "What makes a GPU, a host or a link differ from its price: the list `effects` of a job, or `--effect`. "
        "[With examples](../effects.md)."
    )
    parts = ["# Effects\n", about, ""]
    hidden = set(Effect.model_fields)
    for name in effects:
        kind: type[Effect] = effects[name]
        rows = [
            line.replace("`start`", "`from`").replace("`end`", "`to`")
            for line in fields_table(kind).splitlines()
            if not any(line.startswith(f"| `{field}`") for field in hidden)
        ]
        parts += [f"## {name}\n", _documentation(kind), "", "\n".join(rows), ""]
    return "\n".join(parts)


def _run() -> str:
    about = (
        "What happens over days: the section `run` of a job. [Runs](../runs.md), [what surrounds a step](../training-loop.md)."
    )
    parts = [*_opening("Fields of a run", about, "run."), fields_table(RunSettings, apart=("failures", "storage"))]
    parts += [
        "## Failures\n",
        "`run.failures` is a name (`shardyard list failures`) or these fields.\n",
        fields_table(Reliability),
    ]
    parts += ["Each of `parts`:\n", fields_table(Part)]
    parts += [
        "## Storage\n",
        "`run.checkpoint.storage` is a name (`shardyard list storage`) or these fields.\n",
        fields_table(Storage),
    ]
    return "\n".join(parts)


def _documentation(kind: type) -> str:
    return "\n\n".join(_paragraphs(kind))


def _paragraphs(kind: type) -> Iterator[str]:
    for paragraph in (inspect.getdoc(kind) or "").split("\n\n"):
        yield plain(sentence(paragraph))
