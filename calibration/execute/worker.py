"""What one rank does for each job: steps whose memory is followed, comparison with one process, a counted step, timed steps.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist

from calibration.execute.data_parallel import hook_class
from calibration.execute.measured.counting import Counting, Moved, copies_counted, threads_counted
from calibration.execute.measured.timing import measure
from calibration.execute.reference.compare import distance, exactly, expected, mean_loss
from calibration.execute.reference.stale import stale
from calibration.execute.reference.streamed import distance as distance_streamed
from calibration.execute.runner import Runner
from calibration.execute.setup import Setup
from calibration.launch.launcher import under_launcher
from calibration.launch.place import Place
from calibration.machine import describe
from strategies.job import Job
from topologies.reading import UserError

GLOO = {"reduce_scatter": 2.0}  # gloo's is a whole ring all-reduce inside (counted at its sockets); others send what is asked for
NORM = "norm"  # stands for the axis of what is not of a plan's axes, and not predicted: 8 bytes that clipping adds up
CHECKED = 3  # steps that are compared with one process; the memory is that of the last one


def work(place: Place, jobs: Sequence[Job], seconds: float, streamed: Sequence[bool] = (), drifting: Sequence[bool] = ()) -> None:
    """Carry out `jobs`. Rank 0 tells of each as soon as it is done: plain data of every rank, of which times and distances are
    the same; without `seconds` there are no times. streamed: jobs whose model one process cannot hold. drifting: those whose
    profile has anchors.

    Raises UserError for a job that cannot be executed, before any begins, and for one that computes something else.
    """
    for job in jobs:
        reason = hook_class(job.plan).reason(job, job.resolve())
        if reason:
            raise UserError(f"{job.where}: not executed: {reason}")
    _laid_out(place, jobs)
    streamed = _agreed(place, streamed)
    gc.freeze()  # what torch has imported stays, and is left out below
    for number, job in enumerate(jobs, 1):
        every: list[Any] = [None] * place.world
        partly, drifts = (number <= len(marks) and marks[number - 1] for marks in (streamed, drifting))
        if job.plan.kernel_set.compiled:
            torch.compiler.reset()  # a job's layers are not compiled where those of one before were
        dist.gather_object(_execution(place, job, seconds, partly, drifts), every if place.rank == 0 else None)
        gc.collect()  # modules and their hooks are cycles
        if place.rank == 0:
            place.tell({"done": number, "job": job.name, "ranks": every})


def _laid_out(place: Place, jobs: Sequence[Job]) -> None:
    """Under a launcher: refuse a job whose nodes are not the launcher's, on all ranks alike."""
    if not under_launcher():
        return
    local: list[Any] = [None] * place.world
    dist.all_gather_object(local, place.local_rank)
    for job in jobs:
        each = job.cluster.node.gpus
        wrong = next((rank for rank, number in enumerate(local) if number != rank % each), None)
        if wrong is not None and job.plan.data_parallel != "dataparallel":
            raise UserError(
                f"{job.where}: nodes of {each} processes, but the launcher started rank {wrong} as number {local[wrong]} of its "
                f"node; --nodes {local.count(0)} and --set cluster.node.gpus={place.world // local.count(0)} describe its nodes"
            )


def _agreed(place: Place, streamed: Sequence[bool]) -> Sequence[bool]:
    """Under a launcher each rank has seen what memory its own device has left: one that lacks it decides for all."""
    if not under_launcher():
        return streamed
    every: list[Any] = [None] * place.world
    dist.all_gather_object(every, list(streamed))
    return [any(marks) for marks in zip(*every, strict=True)]


def _execution(place: Place, job: Job, seconds: float, streamed: bool, drifts: bool) -> dict[str, Any]:
    setup = Setup.of(place, job)
    losses = []
    # a core's memory is followed by a dispatch mode, under which nothing is compiled
    followed = place.compute.ordered or not setup.plan.kernel_set.compiled
    memory = place.compute.memory()
    with memory if followed else nullcontext():
        runner = Runner(setup)
        for number in range(CHECKED):
            if followed and number == CHECKED - 1:
                setup.barrier()
                memory.mark()
            losses.append(mean_loss(setup, runner.step()))
            if streamed and not number:
                first = distance_streamed(runner, losses)
    if setup.job.model.module is not None:
        compared = exactly(setup, CHECKED, losses[0])
    elif streamed:
        compared = replace(first, losses=losses)
    else:
        compared = distance(runner, losses, CHECKED, expected if runner.versions is None else stale)
    if compared.wrong:
        raise UserError(f"{job.name}: executed, but {compared.wrong}")
    with Counting() as counting, copies_counted(counting), threads_counted(counting):
        runner.step()
    drifts = drifts and bool(seconds) and not job.effects  # a rank that is throttled is slow on purpose
    anchors = None
    if drifts:
        from calibration.measure.anchors import Readings

        anchors = Readings(place)
    times = asdict(measure(runner, seconds, anchors.visit if anchors else _nothing)) if seconds else None
    runner.finish()
    stamp = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    steps = setup.resolved.local_steps
    sent = [(axis_of(setup, moved), moved.operation, moved.sent / steps) for moved in counting.moved]
    return {
        "compared": asdict(compared),
        "times": times,
        "anchors": anchors.seconds if anchors else [],
        "stage": setup.at["pp"],
        "memory": memory.peak if followed else None,
        "volume": _volumes(setup, sent, {}),
        "wire": _volumes(setup, sent, GLOO),
        "operations": _operations(sent),
        "machine": describe(place.device, place.world) | stamp,
    }


def _nothing() -> None:
    """Visits no anchors."""


def _volumes(setup: Setup, sent: Sequence[tuple[str, str, float]], factors: Mapping[str, float]) -> dict[str, float]:
    """Bytes that this rank sent in a step along each axis that has more than one rank."""
    result = {axis: 0.0 for axis, degree in setup.grid.sizes if degree > 1}
    if setup.resolved.copies > setup.resolved.replicas:
        result.setdefault("dp", 0.0)
    for axis, operation, size in sent:
        if axis != NORM:
            result[axis] += size * factors.get(operation, 1.0)
    return result


def axis_of(setup: Setup, moved: Moved) -> str:
    """The axis along which the ranks of a group differ (of tied embeddings: pp, though only two of its ranks), dp where they hold
    the same parameters, or NORM for what clipping adds up over all ranks: a number, or one of each dp rank that trains alone.
    """
    numbers = (4, 8) if setup.plan.deepspeed is not None else (8 * setup.norms,)  # DeepSpeed's are of fp32, in ZeRO-3 two
    if moved.operation == "all_reduce" and len(moved.ranks) == setup.place.world and moved.bytes in numbers:
        return NORM
    if setup.copies is not None and moved.group == setup.copies.group_name:
        return "dp"
    for axis, degree in setup.grid.sizes:
        if degree > 1 and any(set(moved.ranks) <= set(group) for group in setup.groups(axis)):
            return axis
    raise ValueError(f"{moved.operation} among ranks {moved.ranks}, which are no group of the plan")


def _operations(sent: Sequence[tuple[str, str, float]]) -> list[dict[str, Any]]:
    """How often each operation was asked for along each axis in a step (or round), and what was sent."""
    result: dict[tuple[str, str], dict[str, Any]] = {}
    for axis, operation, size in sent:
        entry = result.setdefault((axis, operation), {"axis": axis, "operation": operation, "count": 0, "sent": 0.0})
        entry["count"] += 1
        entry["sent"] += size
    return list(result.values())
