"""Memory-centric tiling as a way to make a job fit: how many tiles its largest layer needs (`deepspeed.tiles`)."""

from __future__ import annotations

from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.job import Job

PART = 4  # of a GPU's memory that a layer may take: it, the one that is gathered ahead, and their activations share the rest
MOST = 64


def tiles_of(job: Job) -> int:
    """Tiles, a power of 2, with which the gathered parameters and the gradients of the largest layer take at most 1/PART of a
    GPU's memory; 1 where whole layers do, or where matrices in tiles are not simulated.
    """
    plan, model = job.plan, job.model
    if model.module is not None or model.experts or not plan.trains_all or plan.fp8 is not None:
        return 1
    largest = max(model.layer_parameters(layer) for layer, _ in model.layer_kinds)
    room = min(group.node.gpu.memory for group in job.cluster.groups) / PART
    tiles = 1
    while tiles < MOST and largest * (plan.bytes_per_element + plan.bytes_per_gradient) / tiles > room:
        tiles *= 2
    return tiles


def with_tiles(job: Job) -> DeepSpeed | None:
    """DeepSpeed's options of the job with the tiles that its largest layer needs; None where it needs none, or has as many."""
    own, tiles = job.plan.deepspeed, tiles_of(job)
    if tiles <= (own.tiles if own else 1):
        return None
    said = own.model_dump(exclude_unset=True) if own else {}
    return DeepSpeed.model_validate(said | {"tiles": tiles})
