"""Runs of a job with other inputs, all with the same failures: interval × bandwidth, spares, scale, better hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.runs.replications import Map
from strategies.job import Job
from strategies.resilience.run_spec import Prepared, prepare
from strategies.resilience.runs import COMPARED, RunAnswer, run
from strategies.resilience.settings import RunSettings
from topologies.costs import mean_rates
from topologies.reading import UserError

SCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # times the job's nodes


@dataclass(frozen=True)
class RunCase:
    """One set of inputs, and the answer: None and the reason where it is refused."""

    changes: Mapping[str, Any]
    prepared: Prepared | None
    answer: RunAnswer | None
    refused: str = ""


def compare_runs(
    read: Callable[[dict[str, Any]], Job],
    inputs: Sequence[Mapping[str, Any]],
    days: float | None,
    tokens: float | None,
    price: float | None,
    seed: int = 0,
    count: int | None = None,
    each: Map = map,
) -> list[RunCase]:
    """The job as `read` has it with each set of changes."""
    result = []
    for changes in inputs:
        own = {field: value for field, value in changes.items() if field != "price"}
        try:
            job = read(own)
            money = mean_rates(job.cluster, changes.get("price", price), "price")
            prepared = prepare(job, job.run or RunSettings(), days, tokens)
        except UserError as error:
            result.append(RunCase(changes, None, None, str(error)))
            continue
        result.append(RunCase(changes, prepared, run(prepared, money, seed, count or COMPARED, each)))
    return result


def scales(job: Job, factors: Sequence[float] = SCALES) -> list[dict[str, Any]]:
    """The job at other sizes, the batch and the spare, free and reserved nodes grown with its nodes; what is no whole number is
    left out.
    """
    settings, batch, nodes = job.run or RunSettings(), job.resolve().global_batch, job.cluster.nodes
    grown = {"nodes": nodes, "plan.global_batch": batch, "run.spares": settings.spares, "run.reserve": settings.reserve}
    if settings.pool is not None:
        grown["run.pool"] = settings.pool
    result = []
    for factor in factors:
        if nodes * factor >= 1 and (nodes * factor).is_integer() and (batch * factor).is_integer():
            changes: dict[str, Any] = {field: round(value * factor) for field, value in grown.items() if value}
            result.append({**changes, "plan.accumulation": None, "plan.dp": None})
    return result
