"""1F1B whose forward and backward passes go in pairs that hide each other's collectives, as the all-to-alls of experts.

Megatron-LM's --overlap-moe-expert-parallel-comm: a rank warms up with one forward pass more, so that the two passes of a turn are
of different microbatches. Megatron-LM asks for several chunks when there is a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.schedules import schedule
from strategies.schedules.dualpipe import NOTE
from strategies.schedules.interleaved import passes
from strategies.schedules.order import Action


@schedule("1f1b-overlapped", notes=(f"1f1b-overlapped: {NOTE}",))
def overlapped(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """As pairs take turns in step on all ranks, 2·(ranks − rank) − 1 forward passes come first."""
    once = [(microbatch, 0) for microbatch in range(microbatches)]
    return _pairs(once, once, 2 * (ranks - 1 - rank) + 1)


@schedule("interleaved-overlapped", chunks=None, notes=(f"interleaved-overlapped: {NOTE}",))
def interleaved_overlapped(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B with one more forward pass in the warm-up."""
    forward, backward = (passes(ranks, microbatches, chunks, back) for back in (False, True))
    size = microbatches // max(1, microbatches // ranks)
    return _pairs(forward, backward, (chunks - 1) * size + 2 * (ranks - 1 - rank) + 1)


def _pairs(forward: list[tuple[int, int]], backward: list[tuple[int, int]], warm_up: int) -> Iterator[Action]:
    warm_up = min(warm_up, len(forward))
    for microbatch, chunk in forward[:warm_up]:
        yield Action("F", microbatch, chunk)
    for front, back in zip(forward[warm_up:], backward, strict=False):
        yield Action("F", *front, beside=True)
        yield Action("B", *back)
    for back in backward[len(forward) - warm_up :]:
        yield Action("B", *back)
