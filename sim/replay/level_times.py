"""A played step worked out anew for all ranks at once, level by level."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sim.op_columns import Integers
from sim.replay.block_times import DrawnBlocks
from sim.replay.graph import Late
from sim.replay.node_times import NodeTimes
from sim.replay.places import Floats
from sim.replay.program_levels import ProgramLevels

HELD = 2**24  # ends that are held at once: 128 MiB


def ends_by_levels(
    levels: ProgramLevels, nodes: NodeTimes, drawn: DrawnBlocks, marks: list[int]
) -> tuple[list[Floats], dict[int, Floats]]:
    """By cohort, when it is through, and when the ops `marks` end: shape (1, samples)."""
    busy, block = np.concatenate(drawn.busy), levels.block
    transfers, row = np.unique(np.array(nodes.transfers), return_inverse=True)
    table = np.concatenate((busy, np.broadcast_to(transfers[:, None], (len(transfers), busy.shape[1]))))
    row = np.where(block >= 0, block, len(busy) + row.ravel())
    late, last = _late(levels, nodes, drawn), levels.last()
    launched, is_block = np.array(nodes.launched)[late], block[late] >= 0
    critical = np.zeros(busy.shape)
    for number in np.flatnonzero(np.bincount(block[late][is_block])).tolist():  # np.unique would import numpy.ma
        critical[number] = drawn.critical(number)
    of, parts = np.concatenate((*last, np.array(marks, np.int64))), []
    width = max(1, HELD // levels.graph.count)
    for first in range(0, table.shape[1], width):
        mine = slice(first, first + width)
        soonest = np.where(is_block[:, None], launched[:, None] + critical[block[late], mine], 0.0)
        parts.append(levels.graph.ends(of, table[:, mine], row, Late(late, np.where(is_block, 0.0, launched), soonest)))
    ends = np.concatenate(parts, axis=1)
    edges = np.cumsum([0, *map(len, last)]).tolist()
    through = [ends[first:end].max(axis=0, keepdims=True, initial=0.0) for first, end in pairwise(edges)]
    return through, dict(zip(marks, ends[edges[-1] :, None], strict=True))


def _late(levels: ProgramLevels, nodes: NodeTimes, drawn: DrawnBlocks) -> Integers:
    """Ops that may start, or end, when their launch lets them."""
    block = levels.block
    least, late = (np.where(block >= 0, np.array(each)[block], 0.0) for each in (drawn.least, drawn.late))
    return np.flatnonzero(np.array(nodes.launched) + late > levels.graph.times(least).end)
