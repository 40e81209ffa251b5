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
