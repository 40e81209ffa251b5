"""Bytes and elements that ranks send in a step, by axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from sim.analysis.link_load import transfers
from sim.pricing.transfers.traffic import members
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.pricing.transfers.wiring import schedule
from sim.program import CPU, Block, Op
from sim.timeline import Timeline


def volumes(timeline: Timeline) -> list[dict[str, tuple[float, float]]]:
    """Per lane: axis -> (bytes, elements) that one of its ranks sends in the step."""
    result: list[dict[str, tuple[float, float]]] = [{} for _ in timeline.lanes]
    for lane, number, op, count in timeline.distinct:
        volume = result[lane]
        for axis, size, elements in _sent(timeline, number, op, timeline.lanes[lane].cohort):
            before = volume.get(axis, (0.0, 0.0))
            volume[axis] = (before[0] + count * size, before[1] + count * elements)
    return result


def together(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Axis -> (bytes, elements) that all ranks send in the step, added up; what switches send on is not counted."""
    topology, grid = timeline.op_costs.topology, timeline.program.grid
    result: dict[str, tuple[float, float]] = {}
    for traffic, buffer, work in transfers(timeline):
        if work.axis == CPU:
            continue
        groups, ranks = members(grid, traffic).shape
        size = buffer * groups * float(schedule(topology, grid, traffic).sent(ranks).sum())
        before = result.get(work.axis, (0.0, 0.0))
        result[work.axis] = (before[0] + size, before[1] + size / work.width)
    return result


def _sent(timeline: Timeline, number: int, op: Op, cohort: int) -> Iterator[tuple[str, float, float]]:
    """(axis, bytes, elements) of each communication of an op."""
    if isinstance(op.work, Block):
        for repeats, collective in op.work.collectives:
            size = repeats * timeline.op_costs.collective(collective, cohort).sent
            yield collective.axis, size, size / collective.width
    elif op.work.axis != CPU:
        size = cast(TransferCost, timeline.cost[number]).sent
        yield op.work.axis, size, size / op.work.width
