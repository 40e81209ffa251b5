"""Prediction beside measurement: jobs carried out by PyTorch and simulated with the same plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median, median_low
from typing import Any

from calibration.drift import drift, drifted
from calibration.execute import Execution, execute
from calibration.execute.limits import ready
from calibration.launch.emulation import PROBE, Emulation, cluster, probe
from calibration.launch.launcher import under_launcher
from calibration.launch.place import Hear, available_cores, need_torch
from calibration.launch.ranks import launch
from calibration.machine import elsewhere
from sim.analysis.summary import Summary
from sim.pricing.prices import Profile
from strategies.job import Job
from strategies.predict import predict, profile_of


@dataclass(frozen=True)
class Row:
    """One number of a job. what: "step" (seconds), "volume" or "memory" (bytes); of: its axis or stage."""

    job: str
    what: str
    of: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1; 0 where both are 0."""
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Validated:
    """A job that was executed and simulated."""

    job: Job
    execution: Execution  # of several launches the one with the median step
    summary: Summary
    rows: tuple[Row, ...]
    every: tuple[Execution, ...] = ()  # launch, of which `execution` is one
    profile: Profile | None = None  # that was measured on this very machine

    @property
    def launches(self) -> tuple[float, ...]:
        """Seconds per step in each."""
        return tuple(execution.times["step"] for execution in self.every if execution.times)

    @cached_property
    def drifts(self) -> list[dict[str, float]]:
        """By launch, how much slower the machine's anchors were than when it was calibrated."""
        return [drift(self.profile, execution.anchors) for execution in self.every] if self.profile else []

    @cached_property
    def drift(self) -> dict[str, float]:
        """The same in the median of the launches."""
        names = self.drifts[0] if self.drifts else ()
        return {name: median(each[name] for each in self.drifts if name in each) for name in names}

    @cached_property
    def corrected(self) -> Row | None:
        """Of all launches, each beside the prediction with prices that had drifted so by then, the one in the middle."""
        if not (self.profile and self.drift and self.execution.times):
            return None
        rows = [
            Row(self.job.name, "step", "", predict(self.job, drifted(self.profile, by)).step_seconds, seconds)
            for by, seconds in zip(self.drifts, self.launches, strict=True)
        ]
        return sorted(rows, key=lambda row: row.error)[(len(rows) - 1) // 2]

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        return {
            "job": self.job.name,
            "hash": self.job.hash,
            "plan": self.job.plan.model_dump(mode="json"),
            "profile": self.summary.profile,
            "rows": rows,
            "execution": self.execution.to_dict(),
            "launches": list(self.launches),
            "drift": self.drift,
            "drifts": self.drifts,
            "corrected": asdict(self.corrected) | {"error": self.corrected.error} if self.corrected else None,
        }


def validate(jobs: Sequence[Job], seconds: float, hear: Hear | None = None, launches: int = 1) -> list[Validated]:
    """Execute and simulate each job; empty on ranks other than 0 under a launcher, which launches once.

    launches: how often processes are started anew for all the jobs, one after the other, which share the `seconds` of each: two
    launches differ by more than the steps of one. hear: called with {"done": number, "job": name, "validated": Validated} as
    soon as a job is done once more. Raises UserError as `execute` does.
    """
    jobs = [ready(job) for job in jobs]
    return _executed(jobs, [predict(job) for job in jobs], seconds, hear, launches=1 if under_launcher() else launches)


def emulate(
    jobs: Sequence[Job], seconds: float, emulation: Emulation, hear: Hear | None = None, launches: int = 1
) -> list[Validated]:
    """The same on a cluster that is emulated on this machine: network namespaces as nodes. Raises UserError."""
    here = [(profile_of(job), job.cluster.node.loopback) for job in jobs]
    jobs = [ready(emulation.on(job), emulated=True) for job in jobs]
    need_torch()
    with cluster(emulation) as nodes:
        said = emulation.said(min(launch(probe, len(nodes), PROBE, nodes=nodes)))
        played = [emulation.played(job, len(available_cores())) for job in jobs]
        predicted = [predict(job, emulation.priced(*of)) for job, of in zip(played, here, strict=True)]
        return _executed(jobs, predicted, seconds, hear, nodes, (said,), launches)


def _executed(
    jobs: Sequence[Job],
    predicted: Sequence[Summary],
    seconds: float,
    hear: Hear | None,
    nodes: Sequence[str] = (),
    said: tuple[str, ...] = (),
    launches: int = 1,
) -> list[Validated]:
    """`predicted` beforehand: nothing computes here while processes are timed."""
    executions: list[list[Execution]] = [[] for _ in jobs]
    done: dict[int, Validated] = {}

    def heard(message: dict[str, Any]) -> None:
        at, execution = message["done"] - 1, message.pop("execution")
        profile = profile_of(jobs[at])
        notes = tuple(filter(None, (*said, *execution.notes, elsewhere(profile, execution.machine))))
        executions[at].append(replace(execution, notes=notes))
        own = None if nodes or elsewhere(profile, execution.machine) else profile
        done[at] = _beside(jobs[at], executions[at], predicted[at], own)
        if hear:
            hear(message | {"done": sum(map(len, executions)), "validated": done[at]})

    for _ in range(launches if seconds else 1):
        execute(jobs, seconds / launches, heard, nodes)
    return [done[at] for at in sorted(done)]


def _beside(job: Job, executions: Sequence[Execution], summary: Summary, profile: Profile | None) -> Validated:
    """profile: of this very machine; None where jobs run in another place, or prices were measured on another."""
    steps = [execution.times["step"] if execution.times else 0.0 for execution in executions]
    execution = executions[steps.index(median_low(steps))]
    times = execution.times
    rows = [Row(job.name, "step", "", summary.step_seconds, times["step"])] if times else []
    for axis, size in execution.volume.items():
        volume = summary.volume.get(axis)
        rows.append(Row(job.name, "volume", axis, volume.bytes if volume else 0.0, size))
    for stage, peak in sorted(execution.memory.items()):
        # tensors alone: contexts and communicators are outside of what was measured
        most = max(memory.peak - memory.overhead for memory in summary.memory if memory.stage == stage)
        rows.append(Row(job.name, "memory", str(stage), most, peak))
    return Validated(job, execution, summary, tuple(rows), tuple(executions), profile)
