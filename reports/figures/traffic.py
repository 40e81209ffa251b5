"""Who sends how much to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reports.figures import DARK, LIGHT, canvas, figure
from sim.analysis.link_load import matrix, node_of_rank
from sim.timeline import Timeline
from topologies.reading import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = 256  # shown one by one; of more, nodes are shown
MOST = 8192


@figure("traffic")
def traffic(timeline: Timeline) -> Figure:
    """Bytes from rank to rank (or node to node) in a step, colours on a logarithmic scale; lines between nodes.

    Raises UserError above MOST ranks.
    """
    from matplotlib.colors import LogNorm

    world = timeline.program.grid.world
    if world > MOST:
        raise UserError(f"a matrix of {world} ranks is too large to draw; at most {MOST}")
    sent, node = matrix(timeline) / 1e9, node_of_rank(timeline)
    what, edges = "rank", np.flatnonzero(np.diff(node)) + 0.5
    if world > RANKS:
        count = int(node.max()) + 1
        each = np.zeros((count, world))
        each[node, np.arange(world)] = 1.0
        sent, what, edges = each @ sent @ each.T, "node", np.empty(0)
    drawn, ax = canvas(6.4, 5.4)
    ax.set_facecolor(LIGHT)
    if sent.any():
        least, most = sent[sent > 0].min(), sent.max()
        room = 1.001 if most > 2 * least else 2.0  # a scale needs two ends
        shades = LogNorm(least / room, most * room)
        image = ax.imshow(np.ma.masked_equal(sent, 0), cmap="cividis", norm=shades, interpolation="none")
        bar = drawn.colorbar(image, ax=ax, label="GB in a step")
        ends = shades.vmin or least, shades.vmax or most
        parts = (1, 2, 5) if ends[1] > 10 * ends[0] else (1, 1.5, 2, 3, 4, 5, 6, 7, 8)
        ticks = [times * 10.0**power for power in range(-9, 7) for times in parts]
        bar.set_ticks(plain := [tick for tick in ticks if ends[0] <= tick <= ends[1]] or [most], labels=[f"{t:g}" for t in plain])
        bar.ax.minorticks_off()
    for end in edges if len(edges) <= 40 else ():
        ax.axhline(end, color=DARK, linewidth=0.5)
        ax.axvline(end, color=DARK, linewidth=0.5)
    ax.set(xlabel=f"to {what}", ylabel=f"from {what}")
    for spine in ax.spines.values():
        spine.set_visible(True)
    ax.set_title("Who sends how much to whom" + ("" if sent.any() else ": nobody sends"))
    return drawn
