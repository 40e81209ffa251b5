"""When the host launches each op."""

from __future__ import annotations

from collections.abc import Iterator

from sim.clock import on_grid
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import Op
from sim.timeline import Timeline


def host_launches(timeline: Timeline, lane: int) -> Iterator[tuple[Op, float, float]]:
    """Each op of a lane with the start and end of its launch, in seconds; equal where launching takes no time (a CPU)."""
    per_launch = on_grid(timeline.prices(lane).profile.launching(timeline.program.eager))
    for number, op in timeline.ops(lane):
        cost, launched = timeline.cost[number], timeline.launched[number]
        # a block is launched from `launched` on, a collective or send has been launched by then
        start, end = (launched - per_launch, launched) if isinstance(cost, TransferCost) else (launched, launched + cost.host)
        yield op, start, end
