"""Zero-bubble schedules: weight gradients, which nobody waits for, fill the bubble. Qi et al. 2023, arXiv:2401.10241."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.schedules import schedule
from strategies.schedules.interleaved import passes
from strategies.schedules.order import Action


def _split(forward: list[tuple[int, int]], backward: list[tuple[int, int]], warm_up: int, delay: int) -> Iterator[Action]:
    """Warm up, then forward, input gradient and the weight gradient of `delay` passes ago in turns; the rest at the end."""
    warm_up = min(warm_up, len(forward))
    for microbatch, chunk in forward[:warm_up]:
        yield Action("F", microbatch, chunk)
    for turn, back in enumerate(backward):
        if warm_up + turn < len(forward):
            yield Action("F", *forward[warm_up + turn])
        yield Action("I", *back)
        if turn >= delay:
            yield Action("W", *backward[turn - delay])
    for back in backward[max(0, len(backward) - delay) :]:
        yield Action("W", *back)


@schedule("zb-h1")
def h1(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """1F1B's order and peak memory, a third of its bubble: rank r puts off weight gradients by r microbatches (section 2.1)."""
    once = [(microbatch, 0) for microbatch in range(microbatches)]
    return _split(once, once, ranks - 1 - rank, rank)


@schedule("zb-h2", settled=2)
def h2(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """About twice the activations of 1F1B and no bubble in the steady state (section 2.2)."""
    once = [(microbatch, 0) for microbatch in range(microbatches)]
    return _split(once, once, 2 * (ranks - 1 - rank), 2 * rank)


@schedule("interleaved-zb", chunks=None)
def interleaved_zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B with split backward passes, as PyTorch's ScheduleInterleavedZeroBubble runs it."""
    forward, backward = (passes(ranks, microbatches, chunks, back) for back in (False, True))
    size = microbatches // max(1, microbatches // ranks)
    return _split(forward, backward, (chunks - 1) * size + ranks - 1 - rank, rank)


@schedule("zb-v", chunks=2, placement="v", settled=2)
def v(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Two chunks per rank in a V: the rank that starts a microbatch ends it; 1F1B's memory without its bubble (section 6).

    With fewer than 2·ranks − 1 microbatches, those that are missing are left out of the order for that many.
    """
    total = max(microbatches, 2 * ranks - 1)
    count = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def run(*steps: tuple[str, int]) -> Iterator[Action]:
        for kind, chunk in steps:
            microbatch = count[kind, chunk]
            if microbatch < (total if kind == "F" else count["F" if kind == "I" else "I", chunk]):
                count[kind, chunk] += 1
                if microbatch < microbatches:
                    yield Action(kind, microbatch, chunk)

    yield from run(*[("F", 0)] * (2 * (ranks - rank) - 1))
    yield from run(*[("F", 1), ("F", 0)] * rank)
    yield from run(*[("F", 1), ("I", 1), ("W", 1)] * (ranks - rank))
    while count["F", 1] < count["F", 0] or count["F", 0] < total:
        yield from run(("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    yield from run(*[("I", 0), ("I", 1)] * rank)
    yield from run(*[("I", 0), ("W", 0)] * (ranks - rank))
    yield from run(*[("W", 1)] * total, *[("W", 0)] * total)
