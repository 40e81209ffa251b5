"""What a checkpoint is, by the plan: bytes in all, and what each node writes, holds and reads.

Saved are weights as they are computed with, and the optimizer's states with the master weights: 14 bytes per parameter for Adam
in mixed precision. Of frozen parameters there are weights alone, and with LoRA these are not saved again (PEFT's
save_pretrained), but read on a restart. What several ranks have is saved once. With `parallel` saves every rank writes a part
of what it shares with others (torch.distributed.checkpoint, Megatron-LM's --ckpt-fully-parallel-save); otherwise the first of
those ranks writes all of it, and of sharded states each rank its shard (torch.save, Megatron-LM before).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.job import Job
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import ModelCosts, parts
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
    grid, copies = resolved.grid, resolved.copies
    weight = float(resolved.bytes_per_element)
    states = float(resolved.bytes_per_optimizer_state + resolved.hook.outer)
    sharded = resolved.shards if "optimizer" in resolved.hook.shards else 1
    whole = resolved.shards if "parameter" in resolved.hook.shards else 1
    write, read = np.zeros(grid.world), np.zeros(grid.world)
    total = 0.0
    stages = _by_rank(resolved, parts(job.model, resolved))
    still = _frozen(job, resolved, stages)
    for rank, stage in enumerate(stages):
        experts = sum(part.experts for part in stage)
        replicated = sum(part.replicated for part in stage)
        dense = sum(part.parameters for part in stage) - experts - replicated
        spread = max(1, resolved.ep_of_copies)
        unique = dense * resolved.tp + replicated + experts * resolved.tp * spread
        total += unique * (weight + states) + still[rank]
        ranks = grid.groups(("dp", "cp", "tp", "ep", "ep_node", "replica"), {"pp": rank}).ravel()
        frozen = sum(part.frozen_bytes for part in stage)
        read[ranks] = frozen / whole
        for shards, size in ((whole, weight), (sharded, states)):  # fewer ranks share an expert
            read[ranks] += ((dense + replicated) / shards + experts / max(1, shards // spread)) * size
        if parallel:
            write[ranks] = (unique * (weight + states) + still[rank]) / len(ranks)
        else:
            writing = ranks if whole > 1 else grid.groups(("dp", "cp", "replica"), {"pp": rank})[:, 0]
            write[writing] += still[rank] / len(writing)
            one, shared = dense + replicated / resolved.tp, ("dp", "cp", "replica")
            alike = (*resolved.expert_sharing, "replica")
            for elements, axes, equal in ((one, (*shared, "ep", "ep_node"), copies), (experts, alike, copies // spread)):
                first = grid.groups(axes, {"pp": rank})[:, 0]  # of the ranks with equal parameters
                write[first] += elements * (weight + (states if sharded == 1 else 0.0))
                write[ranks] += elements * states / equal if sharded > 1 else 0.0
    per_node = job.cluster.node.gpus
    return CheckpointSize(total, _nodes(write, per_node), _nodes(read, per_node), float(write.max()), job.model.parameters)


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
