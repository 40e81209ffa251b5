"""One step, second by second."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from reports.figures import COLOURS, DARK, HATCHES, LANES, NUMBERED, WHITE, canvas, figure, ink, patch, time_unit
from reports.figures.timeline_bars import Strips, chosen, lane_names, strips
from reports.formatting import seconds
from sim.analysis.breakdown import AXES, PHASES
from sim.program import CPU
from sim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DELAYS = ("launch", "slowdown")  # within a pass: no kernel is launched yet, or communication slows it


@figure("gantt")
def gantt(timeline: Timeline) -> Figure:
    """One step: a row per stage (or rank), with passes and, in strips below, the transfers of each axis.

    The height of a colour in a pass is its share of the pass's time, because kernels and collectives alternate too fast to draw.
    """
    lanes = chosen(timeline, LANES)
    rows = [strips(timeline, lane) for lane in lanes]
    axes = [axis for axis in AXES if any(axis in row.transfers for row in rows)]
    drawn, ax = canvas(12, 1.3 + len(rows) * min(0.75, max(0.22, 9 / len(rows))))
    unit, name = time_unit(timeline.step)
    numbered = len(rows) <= 16 and max((bar.microbatch for row in rows for bar in row.passes), default=-1) < NUMBERED
    for y, row in enumerate(rows):
        _passes(ax, y, row, unit, timeline.step if numbered else float("inf"))
        for place, axis in enumerate(axes):
            height = min(0.12, 0.22 / len(axes))
            least = timeline.step / 1200  # what can be seen
            spans = [(bar.start * unit, max(least, bar.end - bar.start) * unit) for bar in row.transfers.get(axis, ())]
            ax.broken_barh(spans, (y + 0.18 + place * height, 0.9 * height), facecolor=COLOURS[axis], linewidth=0)
    names = lane_names(timeline)
    ax.set_yticks([y - 0.1 for y in range(len(rows))], [names[lane] for lane in lanes])
    ax.set(xlim=(0, timeline.step * unit), ylim=(len(rows) - 0.5, -0.5), xlabel=f"time ({name})")
    ax.tick_params(axis="y", length=0)
    shown = "" if len(lanes) == len(timeline.lanes) else f", {len(lanes)} of {len(timeline.lanes)} rows shown"
    alike = ", all GPUs alike" if any(timeline.variability) else ""
    ax.set_title(f"One step{alike}: {seconds(timeline.step)}{shown}")
    ax.set_title("height of a colour: its share of the time; strips below: transfers", loc="right", fontsize=8.5, color=DARK)
    handles = _legend(rows, axes, timeline.step)
    drawn.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), fontsize=9)
    return drawn


def _legend(rows: list[Strips], axes: list[str], step: float) -> list[Any]:
    """What can be seen."""
    totals = Counter[str]()
    for row in rows:
        for bar in row.passes:
            totals.update(bar.shares)
    shown = {key for key, seconds in totals.items() if key not in DELAYS or seconds > 0.002 * len(rows) * step}
    handles = [patch(key, key) for key in (*PHASES, *DELAYS) if key in shown]
    names = {axis: "update on the CPUs" if axis == CPU else f"{axis} communication" for axis in AXES}
    return [*handles, *(patch(axis, name) for axis, name in names.items() if axis in shown or axis in axes)]


def _passes(ax: Axes, y: int, row: Strips, unit: float, step: float) -> None:
    """Bars of the compute stream, each cut in height by what its time went to; numbered where they are wide enough for `step`."""
    upper, height = (y - 0.42, 0.57) if row.transfers else (y - 0.42, 0.84)
    spans: dict[str, list[tuple[float, float, float, float]]] = {}
    for bar in row.passes:
        whole, bottom, wide = bar.whole or sum(bar.shares.values()), upper + height, bar.end - bar.start > 0.012 * step
        for name in (key for key in (*PHASES, *AXES, *DELAYS) if bar.shares.get(key)):
            part = height * bar.shares[name] / whole
            spans.setdefault(name, []).append((bar.start * unit, bottom, (bar.end - bar.start) * unit, part))
            if wide and bar.microbatch >= 0 and bar.shares[name] == max(bar.shares.values()):
                colour, x = ink(COLOURS[name]), (bar.start + bar.end) / 2 * unit
                ax.text(x, bottom - part / 2, str(bar.microbatch), ha="center", va="center", fontsize=8.5, color=colour)
            bottom -= part
        if wide:  # on a narrow bar a separator would cover too much
            ax.plot([bar.end * unit] * 2, [upper, upper + height], color=WHITE, linewidth=0.8, solid_capstyle="butt")
    for name, rectangles in spans.items():
        _rectangles(ax, rectangles, name)


def _rectangles(ax: Axes, spans: list[tuple[float, float, float, float]], name: str) -> None:
    """Many rectangles of one colour: (left, lower edge, width, height), y growing downwards."""
    from matplotlib.collections import PolyCollection

    corners = [[(x, y), (x + width, y), (x + width, y - height), (x, y - height)] for x, y, width, height in spans]
    ax.add_collection(PolyCollection(corners, facecolor=COLOURS[name], linewidth=0, edgecolor="none", hatch=HATCHES.get(name)))
