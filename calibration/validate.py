"""Prediction beside measurement: jobs carried out by PyTorch and simulated with the same plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from calibration.emulation import PROBE, Emulation, cluster, probe
from calibration.execute import Execution, execute
from calibration.execute.limits import ready
from calibration.launch import Hear, launch
from calibration.predict import predict, profile_of
from sim.summary import Summary
from strategies.job import Job


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
    execution: Execution
    summary: Summary
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        return {"job": self.job.name, "hash": self.job.hash, "plan": self.job.plan.model_dump(mode="json"),
                "profile": self.summary.profile, "rows": rows, "execution": self.execution.to_dict()}  # fmt: skip


def emulate(jobs: Sequence[Job], seconds: float, emulation: Emulation, hear: Hear | None = None) -> list[Validated]:
    """The same on a cluster that is emulated on this machine: network namespaces as nodes. Raises UserError."""
    here = [profile_of(job) for job in jobs]
    loopbacks = [job.cluster.node.loopback for job in jobs]
    jobs = [ready(emulation.on(job), emulated=True) for job in jobs]
    with cluster(emulation) as nodes:
        carried = min(launch(probe, len(nodes), PROBE, nodes=nodes))
        done = execute(jobs, seconds, hear, nodes)
    said = emulation.said(carried)
    answer = []
    for job, execution, profile, loopback in zip(jobs, done, here, loopbacks, strict=True):
        summary = predict(job, emulation.priced(profile, loopback))
        answer.append(_beside(job, replace(execution, notes=(said, *execution.notes)), summary))
    return answer


def validate(jobs: Sequence[Job], seconds: float, hear: Hear | None = None) -> list[Validated]:
    """Execute and simulate each job; empty on ranks other than 0 under a launcher. Raises UserError as `execute` does."""
    jobs = [ready(job) for job in jobs]
    done = execute(jobs, seconds, hear)
    return [_beside(job, execution, predict(job)) for job, execution in zip(jobs, done, strict=False)]


def _beside(job: Job, execution: Execution, summary: Summary) -> Validated:
    times = execution.times
    rows = [Row(job.name, "step", "", summary.step_seconds, times["step"])] if times else []
    for axis, size in execution.volume.items():
        volume = summary.volume.get(axis)
        rows.append(Row(job.name, "volume", axis, volume.bytes if volume else 0.0, size))
    for stage, peak in sorted(execution.memory.items()):
        # tensors alone: contexts and communicators are outside of what was measured
        most = max(one.peak - one.overhead for one in summary.memory if one.stage == stage)
        rows.append(Row(job.name, "memory", str(stage), most, peak))
    return Validated(job, execution, summary, tuple(rows))
