"""One step, second by second."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from reports.figures import (
    COLOURS,
    DARK,
    DIGIT,
    HATCHES,
    LANES,
    WHITE,
    canvas,
    chunk_patch,
    columns,
    figure,
    ink,
    pale,
    patch,
    time_unit,
)
from reports.figures.timeline_bars import WEIGHT, Bar, Strips, chosen, lane_names, played_as, strips
from reports.formatting import digits, seconds
from sim.analysis.breakdown import AXES
from sim.program import COMPUTE, CPU, Block
from sim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MANY, KEPT = 40, 12  # microbatches from which on a step is drawn in two parts, and of these about the first and the last
ROUNDS = 2  # local steps drawn at the beginning and at the end of so many
PASSES = ("forward", "backward", WEIGHT, "recompute", "optimizer")
DELAYS = ("launch", "slowdown")  # within a pass: no kernel is launched yet, or communication slows it


@figure("gantt", sweeps=True)
def gantt(timeline: Timeline) -> Figure:
    """One step: a row per stage (or rank), with passes and, in strips below, the transfers of each axis.

    The height of a colour in a pass is its share of the pass's time, because kernels and collectives alternate too fast to draw.
    Of many microbatches or local steps the first and the last are drawn, and how many are left out between them.
    """
    lanes, (windows, left_out) = chosen(timeline, LANES), _windows(timeline)
    rows = [[strips(timeline, lane, window=window) for lane in lanes] for window in windows]
    every = [row for part in rows for row in part]
    axes = [axis for axis in AXES if any(axis in row.transfers for row in every)]
    rows = [[row._replace(transfers={axis: row.transfers.get(axis, []) for axis in axes}) for row in part] for part in rows]
    drawn, _ = canvas(12, 1.3 + len(lanes) * min(0.75, max(0.22, 9 / len(lanes))))
    drawn.clear()
    widths = [last - first for first, last in windows]
    parts = drawn.subplots(1, len(windows), sharey=True, squeeze=False, width_ratios=widths)[0]
    unit, name = time_unit(timeline.step)
    numbered = len(lanes) <= 16
    for ax, window, part in zip(parts, windows, rows, strict=True):
        for y, row in enumerate(part):
            draw_passes(ax, y, row, unit, sum(widths) if numbered else float("inf"))
            draw_transfers(ax, y, row, axes, unit, sum(widths))
        ax.set(xlim=(window[0] * unit, window[1] * unit), ylim=(len(lanes) - 0.5, -0.5))
        ax.tick_params(axis="y", length=0)
    names = lane_names(timeline)
    parts[0].set_yticks([y - 0.1 for y in range(len(lanes))], [names[lane] for lane in lanes])
    shown = "" if len(lanes) == len(timeline.lanes) else f", {len(lanes)} of {len(timeline.lanes)} rows shown"
    parts[0].set_title(f"One step{played_as(timeline)}: {seconds(timeline.step)}{shown}")
    about = "height of a colour: its share of the time; strips below: transfers"
    if left_out:
        between = (windows[1][0] - windows[0][1]) * unit
        parts[1].set_title(f"⋯ {left_out} alike, {digits(between)} {name}, are left out", loc="right", fontsize=10)
        parts[1].spines["left"].set_linestyle((0, (3, 3)))
        parts[0].set_xlabel(f"time ({name})")
        parts[1].set_xlabel(about, color=DARK)
    else:
        parts[0].set_xlabel(f"time ({name})")
        parts[0].set_title(about, loc="right", fontsize=8.5, color=DARK)
    handles = entries(every, axes, timeline.step)
    drawn.legend(handles=handles, loc="outside lower center", ncols=columns(len(handles)), fontsize=9)
    return drawn


def _windows(timeline: Timeline) -> tuple[list[tuple[float, float]], str]:
    """What of a step is drawn: all, or of more than MANY microbatches or local steps the beginning and the end, and what is left
    out between them.
    """
    starts = dict[int, float]()  # of each microbatch's first pass, on any row
    ends = dict[int, float]()
    for row in timeline.rows():
        if row.op.stream == COMPUTE and row.op.microbatch >= 0:
            starts[row.op.microbatch] = min(row.start, starts.get(row.op.microbatch, row.start))
            ends[row.op.microbatch] = max(row.end, ends.get(row.op.microbatch, row.end))
    count = len(starts)
    if timeline.program.cohorts[0].steady:
        return [(0.0, timeline.step)], ""
    if len(updates := _updates(timeline)) > MANY:
        first, last, what = updates[ROUNDS - 1], updates[-ROUNDS - 1], f"{len(updates) - 2 * ROUNDS} local steps"
    elif count > MANY:
        first, last = starts[KEPT], ends[count - KEPT - 1]
        what = f"{sum(first < starts[each] and ends[each] < last for each in starts)} microbatches"
    else:
        return [(0.0, timeline.step)], ""
    if not 0 < first < last < timeline.step or timeline.step - last + first > 0.7 * timeline.step:
        return [(0.0, timeline.step)], ""
    return [(0.0, first), (last, timeline.step)], what


def _updates(timeline: Timeline) -> list[float]:
    """When the first row has updated its parameters by itself, between its passes: ends of local steps."""
    ends = list[float]()
    updated = False
    for row in timeline.rows_of(0, timeline.every_op(0)):
        if row.op.stream != COMPUTE or not isinstance(row.op.work, Block):
            continue
        if row.op.microbatch >= 0:
            updated = False
        elif row.kind == "optimizer":  # and no compression of gradients, nor parameters that are unpacked
            ends[len(ends) - updated :] = [row.end]
            updated = True
    return ends


def draw_transfers(ax: Axes, y: int, row: Strips, axes: list[str], unit: float, shown: float) -> None:
    """Strips below the passes of a row, an axis each."""
    for place, axis in enumerate(axes):
        height = min(0.12, 0.22 / len(axes))
        least = shown / 1200  # what can be seen
        spans = [(bar.start * unit, max(least, bar.end - bar.start) * unit) for bar in row.transfers.get(axis, ())]
        ax.broken_barh(
            spans, (y + 0.18 + place * height, 0.9 * height), facecolor=COLOURS[axis], hatch=HATCHES.get(axis), linewidth=0
        )


def entries(rows: list[Strips], axes: list[str], step: float) -> list[Any]:
    """What can be seen."""
    totals = Counter[str]()
    for row in rows:
        for bar in row.passes:
            totals.update(bar.shares)
    shown = {key for key, seconds in totals.items() if key not in DELAYS or seconds > 0.002 * len(rows) * step}
    handles = [patch(key, key) for key in (*PASSES, *DELAYS) if key in shown]
    if any(bar.pale for row in rows for bar in row.passes):
        handles.append(chunk_patch())
    names = {axis: "update on the CPUs" if axis == CPU else f"{axis} communication" for axis in AXES}
    return [*handles, *(patch(axis, name) for axis, name in names.items() if axis in shown or axis in axes)]


def draw_passes(ax: Axes, y: int, row: Strips, unit: float, step: float) -> None:
    """Bars of the compute stream, each cut in height by what its time went to; numbered where they are wide enough for `step`."""
    upper, height = (y - 0.42, 0.57) if row.transfers else (y - 0.42, 0.84)
    spans: dict[tuple[str, bool], list[tuple[float, float, float, float]]] = {}
    for bar in row.passes:
        whole, bottom, wide = bar.whole or sum(bar.shares.values()), upper + height, bar.end - bar.start > 0.012 * step
        for name in (key for key in (*PASSES, *AXES, *DELAYS) if bar.shares.get(key)):
            part = height * bar.shares[name] / whole
            spans.setdefault((name, bar.pale), []).append((bar.start * unit, bottom, (bar.end - bar.start) * unit, part))
            if wide and bar.microbatch >= 0 and bar.shares[name] == max(bar.shares.values()):
                _number(ax, bar, bottom - part / 2, unit, step, ink(_colour(name, bar.pale)))
            bottom -= part
        if wide:  # on a narrow bar a separator would cover too much
            ax.plot([bar.end * unit] * 2, [upper, upper + height], color=WHITE, linewidth=0.8, solid_capstyle="butt")
    for (name, is_pale), rectangles in spans.items():
        _rectangles(ax, rectangles, name, is_pale)


def _colour(name: str, is_pale: bool) -> str:
    return pale(COLOURS[name]) if is_pale else COLOURS[name]


def _number(ax: Axes, bar: Bar, y: float, unit: float, step: float, colour: str) -> None:
    """The microbatch of a bar that has room for it."""
    text, x = str(bar.microbatch), (bar.start + bar.end) / 2 * unit
    if bar.end - bar.start > (DIGIT * len(text) + 0.002) * step:
        ax.text(x, y, text, ha="center", va="center", fontsize=8.5, color=colour, clip_on=True)


def _rectangles(ax: Axes, spans: list[tuple[float, float, float, float]], name: str, is_pale: bool) -> None:
    """Many rectangles of one colour: (left, lower edge, width, height), y growing downwards."""
    from matplotlib.collections import PolyCollection

    corners = [[(x, y), (x + width, y), (x + width, y - height), (x, y - height)] for x, y, width, height in spans]
    ax.add_collection(PolyCollection(corners, facecolor=_colour(name, is_pale), lw=0, edgecolor="none", hatch=HATCHES.get(name)))
