"""Predictions beside published measurements: every row of `calibration.published` that can be a job is played.

Nothing here chooses anything: the job is what the source says, the prices are the shipped profiles', and every row counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from calibration.published import Row
from sim.analysis.summary import Summary, summarise
from strategies.job import Job
from strategies.planner.search.workers.executors import engine
from strategies.planner.uncertainty import LAUNCH, around, deviations
from strategies.predict import played, uncollected
from topologies.reading import UserError

SCALES = ((8, "1–8"), (64, "9–64"), (512, "65–512"), (10**9, "513 and more"))


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction: seconds, FLOP/s and fractions by the source's own rule, bytes by its own convention.

    reason: why nothing was predicted, "" when something was. None: not published.
    """

    row: str
    source: str
    framework: str
    where: str
    model: str
    gpu: str = ""
    gpus: int = 0
    strategy: str = ""
    profile: str = ""
    step: float | None = None
    predicted_step: float | None = None
    predicted_alike: float | None = None  # if all GPUs of one kind were alike
    low: float | None = None
    high: float | None = None
    spread: float | None = None  # σ of the step's logarithm by its prices' own spreads, without launches
    launch: float | None = None  # elasticity of the step to the price of launches
    flops: float | None = None
    predicted_flops: float | None = None
    mfu: float | None = None
    predicted_mfu: float | None = None
    memory: float | None = None
    predicted_memory: float | None = None
    memory_is: str = ""
    ran_out_of_memory: bool = False
    fits: bool | None = None
    reason: str = ""
    note: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over published step time, minus 1."""
        return self.predicted_step / self.step - 1 if self.step and self.predicted_step else None

    @property
    def alike_error(self) -> float | None:
        """The same of the step with GPUs alike."""
        return self.predicted_alike / self.step - 1 if self.step and self.predicted_alike else None

    @property
    def memory_error(self) -> float | None:
        """Predicted over published memory, minus 1."""
        return self.predicted_memory / self.memory - 1 if self.memory and self.predicted_memory else None

    @property
    def held(self) -> bool | None:
        """Whether the published step lies in the interval."""
        if self.step is None or self.low is None or self.high is None:
            return None
        return self.low <= self.step <= self.high

    @property
    def scale(self) -> str:
        """The range of GPUs it falls in."""
        return next(name for most, name in SCALES if self.gpus <= most)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return asdict(self) | {"error": self.error, "memory_error": self.memory_error, "held": self.held}


@dataclass(frozen=True)
class Errors:
    """How far a group of predictions is off, in fractions of what was published; bias is negative when predictions are fast."""

    rows: int
    mean: float
    median: float
    bias: float
    worst: float
    held: float  # share of rows whose interval holds the published step
    alike: tuple[float, float]  # mean and bias with GPUs of one kind alike

    @classmethod
    def of(cls, rows: Iterable[Compared]) -> Errors | None:
        """None when no row has a published and a predicted step."""
        known = [
            (row.error, row.error if row.alike_error is None else row.alike_error, bool(row.held))
            for row in rows
            if row.error is not None
        ]
        if not known:
            return None
        errors, alike, held = zip(*known, strict=True)
        absolute = [abs(error) for error in errors]
        with_alike = mean(map(abs, alike)), mean(alike)
        return cls(len(known), mean(absolute), median(absolute), mean(errors), max(errors, key=abs), mean(held), with_alike)


def compare(row: Row) -> Compared:
    """One row and its prediction, or the reason why there is none."""
    measured = row.measured
    known = Compared(
        row.name,
        row.group,
        row.source.framework,
        row.where,
        row.model,
        gpus=row.gpus,
        step=measured["step"],
        note=row.note,
        flops=measured["flops"],
        mfu=measured["mfu"],
        memory=measured["memory"],
        ran_out_of_memory=row.out_of_memory,
    )
    try:
        job = row.job()
        with uncollected():
            return replace(known, **_predicted(row, job))
    except UserError as error:
        return replace(known, reason=str(error))


def _predicted(row: Row, job: Job) -> dict[str, Any]:
    """What is predicted of a row, as fields of `Compared`. Raises UserError for impossible jobs."""
    timeline = played(job)  # as `simulate` does
    summary = summarise(timeline)
    seconds, gpu = summary.step_seconds, job.cluster.node.gpu
    parts = deviations(timeline, launch=1.0)
    elasticity = parts.pop("launch", 0.0)
    bar = around(seconds, {**parts, "launch": elasticity * LAUNCH})
    fields: dict[str, Any] = {
        "gpu": gpu.name,
        "strategy": strategy(job),
        "profile": summary.profile,
        "step": row.step(job),
        "predicted_step": seconds,
        "predicted_alike": summary.ideal_seconds,
        "low": bar.low,
        "high": bar.high,
        "spread": math.hypot(*(sigma for name, sigma in parts.items() if name != "composition")),
        "launch": elasticity,
        "fits": summary.fits,
        "memory_is": row.source.memory,
    }
    if row.flops_rule:
        rate = row.flops(job) / (row.gpus * seconds)
        fields |= {"predicted_flops": rate, "predicted_mfu": rate / gpu.peak[job.plan.precision]}
    if row.source.memory:
        fields["predicted_memory"] = _memory(summary, row.source.memory, job.cluster.node.gpus)
    return fields


def _memory(summary: Summary, convention: str, gpus: int) -> float:
    """Of the stage that holds most, on the first node of `gpus` where that was read; torch's own count is logged on the last
    rank.
    """
    if convention == "allocated":
        return max(summary.memory, key=lambda stage: stage.stage).allocated
    stages = [stage for stage in summary.memory if convention != "first node" or stage.rank < gpus]
    return max(stage.reserved if convention == "reserved" else stage.peak + stage.cached for stage in stages)


def strategy(job: Job) -> str:
    """What is parallel, in short: "tp pp zero1"."""
    plan = job.resolve()
    axes = [axis for axis in ("tp", "cp", "ep", "pp") if getattr(plan, axis) > 1]
    return " ".join([*axes, *([plan.data_parallel] if plan.copies > 1 else [])]) or "one GPU"


def compared(rows: Sequence[Row]) -> Iterator[Compared]:
    """Each row with its prediction, in order, on all cores."""
    workers = min(os.cpu_count() or 1, len(rows) // 32 + 1)
    if workers == 1:
        yield from map(compare, rows)
        return
    with engine(workers) as runs:
        for task in [runs.submit(compare, row) for row in rows]:
            yield task.result()


def grouped(rows: Iterable[Compared], by: str) -> dict[str, list[Compared]]:
    """Rows by an attribute, such as "source", "gpu", "scale" or "strategy"; rows without a prediction are left out."""
    result: dict[str, list[Compared]] = {}
    for row in rows:
        if row.error is not None:
            result.setdefault(str(getattr(row, by)), []).append(row)
    return result
