"""What a job's checkpoint is and costs: tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reports.formatting import digits, percent, size, span
from strategies.resilience.checkpoint_plan import CheckpointPlan, PolicyCost

if TYPE_CHECKING:
    from rich.console import RenderableType

    from topologies.storage import Storage


def overview(plan: CheckpointPlan) -> RenderableType:
    """One screen."""
    from rich.console import Group
    from rich.text import Text

    prepared = plan.prepared
    total, storage = prepared.size, prepared.settings.checkpoint.shared
    per = total.total / total.parameters
    job = f"{prepared.job.name} on {prepared.job.cluster.nodes} × {prepared.job.cluster.name}"
    first = f"{job}: checkpoint {size(total.total)}, {digits(per)} bytes per parameter, up to {size(total.busiest_node)} per node"
    lines: list[RenderableType] = [Text(first, "bold")]
    writes, reads = (span(value) for value in (prepared.costs.write, prepared.costs.read))
    lines.append(Text(f"{_named(storage)}: written in {writes}, read in {reads}"))
    if prepared.mtbf < float("inf"):
        failures, restart = prepared.settings.failures.name, span(prepared.restart)
        lines.append(Text(f"failures '{failures}': one every {span(prepared.mtbf)}; a start takes {restart}"))
    lines.append(_policies(plan))
    lines += [Text(f"{cost.policy}: {cost.refused}") for cost in plan.policies if cost.refused]
    lines += [Text(_bandwidth(*row)) for row in plan.bandwidth]
    return Group(*lines, *[Text(f"note: {note}") for note in prepared.notes])


def _policies(plan: CheckpointPlan) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    possible = [cost for cost in plan.policies if cost.intervals is not None]
    rules = list(possible[0].intervals or ()) if possible else []
    for column in ("policy", "to", "GPUs wait", "complete after", "read in", *rules, "saves and lost work"):
        table.add_column(column, justify="left" if column in ("policy", "to") else "right", no_wrap=True)
    for cost in possible:
        table.add_row(*_row(cost, rules))
    return table


def _row(cost: PolicyCost, rules: list[str]) -> list[str]:
    after = span(cost.blocking + cost.flush)
    between = [span((cost.intervals or {})[rule]) if (cost.intervals or {})[rule] < 1e12 else "never" for rule in rules]
    return [cost.policy, cost.place, span(cost.blocking), after, span(cost.restore), *between, percent(cost.waste)]


def _bandwidth(part: float, waiting: float, beside: float) -> str:
    asynchronous = f"{size(beside)}/s" if beside < float("inf") else "no bandwidth is enough (snapshots alone take more)"
    return f"for {percent(part)} in saves and lost work: {size(waiting)}/s when GPUs wait for writes, else {asynchronous}"


def as_data(plan: CheckpointPlan) -> dict[str, Any]:
    """Plain data with stable keys."""
    prepared = plan.prepared
    finite = prepared.mtbf < float("inf")
    every = []
    for cost in plan.policies:
        data = asdict(cost)
        between = data["intervals"] or {}
        every.append(data | {"intervals": {rule: value if value < 1e12 else None for rule, value in between.items()}})
    return {
        "job": prepared.job.name,
        "hash": prepared.job.hash,
        "parameters": prepared.size.parameters,
        "bytes": prepared.size.total,
        "bytes_per_parameter": prepared.size.total / prepared.size.parameters,
        "bytes_per_node": prepared.size.busiest_node,
        "bytes_per_gpu": prepared.size.largest_rank,
        "step_seconds": prepared.summary.step_seconds,
        "mtbf_seconds": prepared.mtbf if finite else None,
        "restart_seconds": prepared.restart,
        "seconds": asdict(prepared.costs),
        "policies": every,
        "bandwidth": [
            {"waste": part, "synchronous": waiting, "asynchronous": beside if beside < float("inf") else None}
            for part, waiting, beside in plan.bandwidth
        ],
        "notes": list(prepared.notes),
    }


def _named(storage: Storage) -> str:
    """Storage of the catalogue by its name."""
    return "storage" if storage.name == "storage" else f"storage '{storage.name}'"
