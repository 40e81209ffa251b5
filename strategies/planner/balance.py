"""Layers for the stages of a pipeline so that all have about as much to do, from how busy each was when the job was played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strategies.job import Job


def balanced(job: Job, busy: Sequence[float]) -> Job | None:
    """The job with other layers per stage; None where they are as even as whole layers can be, or ranks have several stages.

    busy: seconds of each stage's compute stream in a step. What a stage has besides its layers (embedding, head) stays where it
    is: a layer takes what it takes on the stage that spends least per layer.
    """
    plan = job.resolve()
    layers = plan.layers
    if len(busy) < 2 or len(layers) != len(busy):
        return None
    each = min(seconds / count for seconds, count in zip(busy, layers, strict=True) if count)
    load = [seconds - each * count for seconds, count in zip(busy, layers, strict=True)]
    new = [0] * len(layers)
    for stage in range(1, len(layers) - 1):  # only the first and the last may have none
        _give(new, load, stage, each)
    while sum(new) < sum(layers):
        _give(new, load, min(range(len(load)), key=lambda stage: (load[stage], stage)), each)
    if tuple(new) == layers:
        return None
    other = {"layers_per_stage": tuple(new), "first_stage_layers": None, "last_stage_layers": None}
    even = {"embedding_as_layer": False, "loss_as_layer": False}
    return replace(job, plan=job.plan.model_copy(update=other | even))


def _give(layers: list[int], load: list[float], stage: int, each: float) -> None:
    layers[stage] += 1
    load[stage] += each
