"""Several steps under each other on one scale of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reports.figures import LANES, canvas, columns, figure, time_unit
from reports.figures.gantt import draw_passes, draw_transfers, entries
from reports.figures.timeline_bars import chosen, lane_names, played_as, strips
from reports.formatting import seconds
from sim.analysis.breakdown import AXES
from sim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 8  # rows of one step


@figure("steps", sweeps=True)
def steps(timelines: Mapping[str, Timeline]) -> Figure:
    """Name -> step: a panel each, with passes and the transfers below them, all on the scale of the longest."""
    longest = max(timeline.step for timeline in timelines.values())
    unit, name = time_unit(longest)
    rows = {key: {lane: strips(timeline, lane) for lane in chosen(timeline, LANES)[:MOST]} for key, timeline in timelines.items()}
    every = [row for lanes in rows.values() for row in lanes.values()]
    axes = [axis for axis in AXES if any(axis in row.transfers for row in every)]
    heights = [len(lanes) + 0.8 for lanes in rows.values()]
    drawn, _ = canvas(12, 0.9 + 0.62 * sum(heights))
    drawn.clear()
    panels = drawn.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (key, lanes) in zip(panels, rows.items(), strict=True):
        for y, row in enumerate(lanes.values()):
            draw_passes(ax, y, row, unit, longest)
            draw_transfers(ax, y, row, axes, unit, longest)
        names = lane_names(timelines[key])
        ax.set_yticks([y - 0.1 for y in range(len(lanes))], [names[lane] for lane in lanes])
        ax.set(xlim=(0, longest * unit), ylim=(len(lanes) - 0.5, -0.5))
        ax.tick_params(axis="both", length=0)
        ax.spines["bottom"].set_visible(False)
        ax.axvline(timelines[key].step * unit, color="black", linewidth=1)
        ax.set_title(f"{key}: {seconds(timelines[key].step)}{played_as(timelines[key])}")
    panels[-1].set_xlabel(f"time ({name}); strips below passes: transfers")
    handles = entries(every, axes, longest)
    drawn.legend(handles=handles, loc="outside lower center", ncols=columns(len(handles)), fontsize=9)
    return drawn
