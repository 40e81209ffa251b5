"""What a checkpoint is, by the plan: bytes in all, and what each node writes, holds and reads.

Saved are weights as they are computed with, and the optimizer's states with the master weights: 14 bytes per parameter for Adam
in mixed precision, 12 where PyTorch's FSDP has masters alone. Second copies of a tied embedding and of stages (Chimera, DualPipe)
are not saved again, but read. Of frozen parameters, and of those that the optimizer is not given, there are weights alone, and
with LoRA frozen ones are not saved again (PEFT's save_pretrained), but read on a restart. What several ranks have is saved once.
With `parallel` saves every rank writes a part of what it shares with others (torch.distributed.checkpoint, Megatron-LM's
--ckpt-fully-parallel-save); otherwise the first of those ranks writes all of it, and of sharded states each rank its shard
(torch.save, Megatron-LM before).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.job import Job
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import ModelCosts, parts
from strategies.lowering.optimizer_step import states_beside
from strategies.plan.resolved import Resolved
from strategies.schedules import schedules

Bytes = NDArray[np.float64]


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes. total: of a checkpoint; write: that each node writes; read: that each node reads on a restart; largest_rank: that
    the busiest GPU copies to its host for a save.
    """

    total: float
    write: Bytes
    read: Bytes
    largest_rank: float
    parameters: int

    @property
    def busiest_node(self) -> float:
        """Bytes that a node writes at most."""
        return float(self.write.max())


def checkpoint_size(job: Job, parallel: bool = True) -> CheckpointSize:
    """The checkpoint of a job."""
    resolved = job.resolve()
    grid, copies, work = resolved.grid, resolved.copies, parts(job.model, resolved)
    weight = float(resolved.bytes_of_states["parameter"])
    states = float(resolved.bytes_of_states["optimizer"] + resolved.hook.outer)
    sharded = resolved.shards if "optimizer" in resolved.hook.shards else 1
    whole = resolved.shards if "parameter" in resolved.hook.shards else 1
    spread = max(1, resolved.ep_of_copies)
    write, total = np.zeros(grid.world), 0.0
    loads = [0.0] * resolved.pp  # bytes that each rank reads
    stages = _by_rank(resolved, work)
    still = _frozen(job, resolved, stages)
    for rank, stage in enumerate(stages):
        experts = sum(part.experts for part in stage)
        replicated = sum(part.replicated for part in stage)
        dense = sum(part.parameters for part in stage) - experts - replicated
        beside = states_beside(resolved, stage)
        outside = [part for part in stage if part.name in resolved.outside_optimizer]
        again = sum(part.replicated for part in outside)
        stateless = sum(part.parameters for part in outside) - again + again / resolved.tp  # of each tp rank
        unique = dense * resolved.tp + replicated + experts * resolved.tp * spread
        saved = (
            unique * (weight + states) - stateless * resolved.tp * states + beside.dense + beside.experts * spread + still[rank]
        )
        total += saved
        loads[rank] += sum(part.frozen_bytes for part in stage) / whole
        loads[rank] += (dense + replicated) * weight / whole + experts * weight / max(1, whole // spread)
        loads[rank] -= sum(part.parameters for part in outside) * states / sharded
        loads[rank] += (dense + replicated) * states / sharded + experts * states / max(1, sharded // spread)
        loads[rank] += beside.sharded(resolved, sharded)
        ranks = grid.groups(("dp", "cp", "tp", "ep", "ep_node", "replica"), {"pp": rank}).ravel()
        if parallel:
            write[ranks] = saved / len(ranks)
        else:
            writing = ranks if whole > 1 else grid.groups(("dp", "cp", "replica"), {"pp": rank})[:, 0]
            write[writing] += still[rank] / len(writing)
            one, shared = dense + replicated / resolved.tp, ("dp", "cp", "replica")
            for elements, more, axes, equal in (
                (one, beside.dense - stateless * states, (*shared, "ep", "ep_node"), copies),
                (experts, beside.experts, (*resolved.expert_sharing, "replica"), copies // spread),
            ):
                first = grid.groups(axes, {"pp": rank})[:, 0]  # of the ranks with equal parameters
                whole_states = elements * weight * (whole == 1) + (elements * states + more) * (sharded == 1)
                write[first] += whole_states
                write[ranks] += (elements * (weight + states) + more - whole_states) / equal
    if schedules[resolved.schedule].copies > 1:
        loads = [own + other for own, other in zip(loads, reversed(loads), strict=True)]
    elif work.tied and (last := _apart(resolved)) is not None:
        loads[last] += work.tied * (weight / whole + (0.0 if work.tied_is_frozen else states / sharded))
    read = np.zeros(grid.world)
    for rank, load in enumerate(loads):
        read[grid.groups(("dp", "cp", "tp", "ep", "ep_node", "replica"), {"pp": rank})] = load
    per_node = job.cluster.node.gpus
    return CheckpointSize(total, _nodes(write, per_node), _nodes(read, per_node), float(write.max()), job.model.parameters)


def _apart(resolved: Resolved) -> int | None:
    """The pipeline rank of the last stage, where it is not the first stage's."""
    schedule, last = schedules[resolved.schedule], len(resolved.layers) - 1
    places = {schedule.stage(rank, resolved.pp, chunk): rank for rank in range(resolved.pp) for chunk in range(resolved.chunks)}
    return None if places[0] == places[last] else places[last]


def _frozen(job: Job, resolved: Resolved, stages: list[list[LayerCost]]) -> list[float]:
    """Bytes of the weights that each pipeline rank saves though they are not trained."""
    on_ranks = [sum(part.frozen for part in stage) for stage in stages]
    if resolved.lora is not None or not sum(on_ranks):
        return [0.0] * len(stages)
    spread, tp = max(1, resolved.ep_of_copies), resolved.tp
    trained = sum(
        (part.parameters - part.experts - part.replicated) * tp + part.replicated + part.experts * tp * spread
        for stage in stages
        for part in stage
    )
    size = float((job.model.parameters - trained) * resolved.bytes_per_element)
    return [size * each / sum(on_ranks) for each in on_ranks]


def _nodes(ranks: Bytes, per_node: int) -> Bytes:
    """Sums over the ranks of each node, which follow each other."""
    starts = np.arange(0, len(ranks), per_node)
    sums: Bytes = np.add.reduceat(ranks, starts)
    return sums


def _by_rank(resolved: Resolved, work: ModelCosts) -> list[list[LayerCost]]:
    """The parts of the model that each pipeline rank saves; of a second copy (Chimera, DualPipe) nothing."""
    schedule, result = schedules[resolved.schedule], list[list[LayerCost]]()
    last = len(resolved.layers) - 1
    for rank in range(resolved.pp):
        chosen: list[LayerCost] = []
        for chunk in range(resolved.chunks):
            number = schedule.stage(rank, resolved.pp, chunk)
            if number > last:
                continue
            chosen += work.stage(sum(resolved.layers[:number]), resolved.layers[number])
            chosen += [work.embedding] * (number == 0) + [work.head] * (number == last)
        result.append(chosen)
    return result
