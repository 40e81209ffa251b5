"""Plans carried out by PyTorch itself.

Its modules import torch (but `limits` and this one, which start them): import them inside the function that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibration.devices import ComputeDevice, Kind, class_of
from calibration.execute.limits import compared_in_parts, ready, throttled
from calibration.execute.traced.limits import EXACTLY, EXCHANGED
from calibration.launch.launcher import under_launcher
from calibration.launch.place import Hear, crowded, find_device, need_torch
from calibration.launch.ranks import launch
from calibration.machine import another_gpu
from strategies.job import Job
from topologies.reading import UserError


@dataclass(frozen=True)
class Execution:
    """What a job did when PyTorch carried it out. Seconds, bytes; times and distances as in `timing` and `compare`."""

    name: str
    ranks: int
    compared: dict[str, Any]  # distances from one process on the same data
    times: dict[str, Any] | None
    memory: dict[int, float]  # by pipeline rank, the peak of the rank with most; none where it cannot be followed
    volume: dict[str, float]  # by axis, sent in a step by the rank that sends most
    wire: dict[str, float] | None  # by axis: bytes that gloo's algorithms put on the wire
    operations: list[dict[str, Any]]  # of rank 0
    machine: dict[str, Any]  # where, with which versions, when
    notes: tuple[str, ...]
    anchors: tuple[dict[str, float], ...] = ()  # of calibration/drift.py: seconds before, between and after the timed blocks

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return asdict(self)


def execute(jobs: Sequence[Job], seconds: float, hear: Hear | None = None, nodes: Sequence[str] = ()) -> list[Execution]:
    """Carry out jobs one after the other on the same processes, timing each for about `seconds` (0: not at all).

    hear: called with {"done": number, "job": name, "execution": Execution} as soon as a job is done, so that nothing is lost
    when a later one is not. nodes: network namespaces that are the nodes, see `calibration.launch.emulation`. Empty on ranks
    other than 0 under a launcher.

    Raises UserError for a job that cannot be executed, before any is, and for one that differs from one process in its losses,
    gradients or parameters.
    """
    jobs = [ready(job, bool(nodes)) for job in jobs]
    ranks = jobs[0].cluster.gpus
    if any(job.cluster.gpus != ranks for job in jobs):
        raise UserError("jobs that are executed together must have as many processes")
    speeds = throttled(jobs[0])
    if any(throttled(job) != speeds for job in jobs):
        raise UserError("jobs that are executed together must have the same effects")
    need_torch()
    device = device_of(jobs[0])
    kind = class_of(device)
    if kind.ordered and not under_launcher() and kind().count() < ranks:  # one process may drive them all, too
        raise UserError(f"{jobs[0].where}: needs {ranks} GPUs, and torch finds {kind().count()} on this machine")
    streamed = room(jobs, device)
    processes = 1 if jobs[0].plan.data_parallel == "dataparallel" else ranks

    from calibration.execute.worker import work
    from strategies.predict import profiles_of

    drifting = [any(profile.anchors for profile in profiles_of(job)) for job in jobs]
    done: list[Execution] = []

    def heard(message: dict[str, Any]) -> None:
        done.append(_execution(jobs[len(done)], message.pop("ranks"), device))
        if hear:
            hear(message | {"execution": done[-1]})

    launch(work, processes, jobs, seconds, streamed, drifting, device=device, hear=heard, nodes=nodes, speeds=speeds)
    return done


def device_of(job: Job) -> Kind:
    """The cluster's; this machine must have it."""
    gpu = job.cluster.node.gpu
    if gpu.sms == 0:
        return "cpu"
    kind = find_device()
    if not class_of(kind).ordered:
        raise UserError(
            f"{job.where}: cluster {job.cluster.name} has GPUs ({gpu.name}) and torch finds none on this machine; "
            "take --cluster cpu-gloo for its cores"
        )
    if another := another_gpu(job.cluster, kind):
        raise UserError(f"{job.where}: {another}: nothing that is measured here could be compared with its prediction")
    return kind


def room(jobs: Sequence[Job], device: Kind) -> list[bool]:
    """For each job whether the process that it is compared with must do with one layer at a time, because this machine's memory
    does not hold the whole model beside the larger of a rank's peak and its states. Under a launcher each rank answers for
    its own.

    Raises UserError where there is no room for that either.
    """
    from calibration.execute.reference.streamed import needed as least
    from strategies.predict import predict

    kind, streamed = class_of(device), []
    for job in jobs:
        ranks = min(job.cluster.node.gpus, job.cluster.gpus)
        peak, alone, free = predict(job).worst.peak, _alone(job), _free(kind, ranks)
        # a GPU has a rank of its own, which computes what one process would while its own states are still there
        whole = peak + alone if kind.ordered else max(peak, alone)
        streamed.append(whole > free)
        if whole <= free:
            continue
        in_parts = compared_in_parts(job)
        needed = peak + least(job) if in_parts else whole
        if needed > free or job.plan.hook.local:
            why = f"; data_parallel={job.plan.data_parallel} needs the whole model in one process" if job.plan.hook.local else ""
            who = "a GPU needs" if kind.ordered else f"each of {ranks} processes needs"
            how = "layer by layer " if in_parts else ""
            smaller = "scale the model down" + (", such as --set model.layers=2" if job.model.module is None else "")
            raise UserError(
                f"{job.where}: {who} {needed / 1e9:.1f} GB, also to compare {how}with one process, and has "
                f"{free / 1e9:.1f} GB left{why}; {smaller}"
            )
    return streamed


def _free(kind: type[ComputeDevice], ranks: int) -> float:
    """Bytes that each of the ranks on this machine may take, of GPUs that of them which has least; under a launcher this one."""
    if under_launcher():
        return kind.of_rank(int(os.environ["LOCAL_RANK"])).free(ranks)
    own = range(min(ranks, kind().count())) if kind.ordered else range(1)
    return min(kind(index).free(ranks) for index in own)


def _alone(job: Job) -> float:
    """Bytes of one process's model states, and of its parameters before and after in fp32; of a traced module in fp64."""
    wide = 2 if job.model.module is not None else 1  # compared in fp64
    return float((sum(job.plan.bytes_of_states.values()) * wide + 2 * 4) * job.model.parameters)


def _execution(job: Job, ranks: Sequence[dict[str, Any]], device: Kind) -> Execution:
    first = ranks[0]
    memory: dict[int, float] = {}
    for rank in ranks:
        if rank["memory"] is None:
            continue
        memory[rank["stage"]] = max(memory.get(rank["stage"], 0.0), rank["memory"])
    layers = "one process does not hold the model: the first step was compared with one that has a layer at a time"
    exactly = EXACTLY if job.model.module is not None else None
    norms = EXCHANGED if job.plan.sync_norm and not class_of(device).batch_norm and len(ranks) > 1 else None
    said = (crowded(len(ranks), device), layers if first["compared"]["streamed"] else None, norms, exactly)
    return Execution(
        name=job.name,
        ranks=len(ranks),
        compared=first["compared"],
        times=first["times"],
        memory=memory,
        volume=_most([rank["volume"] for rank in ranks]),
        wire=_most([rank["wire"] for rank in ranks]) if class_of(device).backend == "gloo" else None,
        operations=first["operations"],
        machine=first["machine"],
        notes=tuple(filter(None, said)),
        anchors=tuple(first["anchors"]),
    )


def _most(volumes: Sequence[dict[str, float]]) -> dict[str, float]:
    return {axis: max(volume[axis] for volume in volumes) for axis in volumes[0]}
