"""Chimera: two copies of the model in opposite directions, whose bubbles fill each other. Li and Hoefler 2021, arXiv:2107.06925.

The first copy's stages are on the ranks in order, the second's in reverse; half of the microbatches goes each way. Where all
passes take as long, ranks wait 2·(ranks/2 − 1) passes. Gradients of the two copies of a stage are summed over the two ranks that
have it. One pair of copies; the paper's forward doubling and backward halving for more microbatches than ranks are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from strategies.schedules import schedule
from strategies.schedules.order import Action
from topologies.reading import UserError


@schedule("chimera", chunks=2, placement="mirror")
def chimera(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """1F1B in both directions, merged as if each pass took one slot of time."""
    if ranks % 2 or microbatches % 2:
        raise UserError(f"plan: schedule=chimera needs even pp and microbatches, and has pp={ranks}, microbatches={microbatches}")
    return iter(_merged(ranks, microbatches // 2)[rank])


@lru_cache(maxsize=8)
def _merged(ranks: int, half: int) -> tuple[tuple[Action, ...], ...]:
    """Every rank's passes. In each slot a rank runs what is ready: backward before forward, earlier microbatches first; at most
    ranks / 2 microbatches of each copy are in flight.
    """
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    ended: dict[tuple[str, int, int, int], int] = {}  # kind, copy, stage, microbatch -> slot
    following = {(kind, copy, rank): 0 for kind in "FB" for copy in (0, 1) for rank in range(ranks)}

    def ready(kind: str, copy: int, rank: int, slot: int) -> bool:
        stage, microbatch = (ranks - 1 - rank if copy else rank), following[kind, copy, rank]
        if microbatch == half:
            return False
        if kind == "F":
            full = microbatch - following["B", copy, rank] >= ranks // 2
            return not full and (stage == 0 or ended.get(("F", copy, stage - 1, microbatch), slot) < slot)
        source = ("F", copy, stage, microbatch) if stage == ranks - 1 else ("B", copy, stage + 1, microbatch)
        return ended.get(source, slot) < slot

    slot = 0
    while any(len(order) < 4 * half for order in orders):
        for rank, order in enumerate(orders):
            able = [
                (kind != "B", following[kind, copy, rank], copy, kind)
                for kind in "BF"
                for copy in (0, 1)
                if ready(kind, copy, rank, slot)
            ]
            if able:
                _, microbatch, copy, kind = min(able)
                following[kind, copy, rank] += 1
                ended[kind, copy, ranks - 1 - rank if copy else rank, microbatch] = slot
                order.append(Action(kind, microbatch + copy * half, copy))
        slot += 1
    return tuple(map(tuple, orders))
