"""The figures. Each is one function that draws and is registered by its decorator; colours are safe for colour-blind eyes.

The same data give the same bytes: no dates, no random ids, the font that comes with matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.lanes import Strips, chosen, lane_names, strips
from reports.words import KINDS, components, gigabytes, held, percent, seconds, stages
from sim.summary import Summary
from sim.timeline import AXES, PHASES, Timeline
from topologies.registry import Registry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008, "Color Universal Design", jfly.uni-koeln.de/color
BLUE, ORANGE, GREEN, SKY, YELLOW, PURPLE, RED = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#F0E442", "#CC79A7", "#D55E00"
GREY, DARK, WHITE, LIGHT = "#BBBBBB", "#555555", "#FFFFFF", "#E8E8E8"

COLOURS = {"forward": BLUE, "backward": ORANGE, "recompute": YELLOW, "optimizer": GREEN, "launch": GREY, "slowdown": DARK,
           "bubble": WHITE, "wait": LIGHT, "tp": PURPLE, "cp": YELLOW, "ep": GREEN, "dp": RED,
           "replica": YELLOW, "pp": SKY, "host": GREY, "nvme": DARK, "cpu": ORANGE}  # fmt: skip
HATCHES = {
    "tp": "////",
    "cp": "xxxx",
    "ep": "....",
    "dp": "\\\\\\\\",
    "replica": "++++",
    "pp": "----",
    "host": "oo",
    "nvme": "OO",
    "cpu": "**",
}
MEMORY = dict(zip(KINDS, (BLUE, ORANGE, GREEN, SKY, YELLOW, PURPLE, GREY), strict=True))

LANES = 32  # rows of a Gantt chart
NUMBERED = 16  # microbatches up to which passes are numbered

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "hatch.linewidth": 0.6, "hatch.color": "#00000066", "svg.hashsalt": "shardyard", "svg.fonttype": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A registered figure: `draw` makes it from its data; calling it saves it, as PNG or SVG by the name of the file."""

    draw: Callable[[Any], Figure]

    def __call__(self, data: Any, path: Path) -> Path:
        import matplotlib

        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]
            metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            self.draw(data).savefig(path, dpi=130, metadata=metadata)
        return path


figures: Registry[Drawing] = Registry("figure")


def figure(name: str) -> Callable[[Callable[[Any], Figure]], Drawing]:
    """Decorator: registers a function from data to a Figure."""

    def register(draw: Callable[[Any], Figure]) -> Drawing:
        return figures(name)(Drawing(draw))

    return register


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of `width` × `height` inches. Not by pyplot, whose state is global."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    return drawn, drawn.add_subplot()


def _patch(name: str, label: str) -> Any:
    """A legend entry."""
    from matplotlib.patches import Patch

    return Patch(facecolor=COLOURS[name], hatch=HATCHES.get(name), edgecolor=DARK, linewidth=0.5, label=label)


# -- where the step goes, second by second -----------------------------------------------------------------------------------


@figure("gantt")
def gantt(timeline: Timeline) -> Figure:
    """One step: a row per stage (or rank), with passes and, in strips below, the transfers of each axis.

    The height of a colour in a pass is its share of the pass's time, because kernels and collectives alternate too fast to draw.
    """
    lanes = chosen(timeline, LANES)
    rows = [strips(timeline, lane) for lane in lanes]
    axes = [axis for axis in AXES if any(axis in row.transfers for row in rows)]
    drawn, ax = canvas(12, 1.3 + len(rows) * min(0.75, max(0.22, 9 / len(rows))))
    unit, name = _time_unit(timeline.step)
    numbered = len(rows) <= 16 and max((bar.microbatch for row in rows for bar in row.passes), default=-1) < NUMBERED
    for y, row in enumerate(rows):
        _passes(ax, y, row, unit, timeline.step if numbered else float("inf"))
        for place, axis in enumerate(axes):
            height = min(0.12, 0.22 / len(axes))
            spans = [(bar.start * unit, (bar.end - bar.start) * unit) for bar in row.transfers.get(axis, ())]
            ax.broken_barh(spans, (y + 0.18 + place * height, 0.9 * height), facecolor=COLOURS[axis], linewidth=0)
    names = lane_names(timeline)
    ax.set_yticks([y - 0.1 for y in range(len(rows))], [names[lane] for lane in lanes])
    ax.set(xlim=(0, timeline.step * unit), ylim=(len(rows) - 0.5, -0.5), xlabel=f"time ({name})")
    ax.tick_params(axis="y", length=0)
    shown = "" if len(lanes) == len(timeline.lanes) else f", {len(lanes)} of {len(timeline.lanes)} rows shown"
    ax.set_title(f"One step: {seconds(timeline.step)}{shown}")
    ax.set_title("height of a colour: its share of the time; strips below: transfers", loc="right", fontsize=8.5, color=DARK)
    inside = {key for row in rows for bar in row.passes for key in bar.shares}
    handles = [_patch(key, key) for key in PHASES if key in inside]
    handles += [_patch(key, f"{key} communication") for key in AXES if key in inside or key in axes]
    drawn.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), fontsize=9)
    return drawn


def _time_unit(step: float) -> tuple[float, str]:
    """(factor from seconds, name of the unit)."""
    if step >= 1:
        return 1.0, "s"
    return (1e3, "ms") if step >= 1e-3 else (1e6, "µs")


def _passes(ax: Axes, y: int, row: Strips, unit: float, step: float) -> None:
    """Bars of the compute stream, each cut in height by what its time went to; numbered where they are wide enough for `step`."""
    upper, height = (y - 0.42, 0.57) if row.transfers else (y - 0.42, 0.84)
    spans: dict[str, list[tuple[float, float, float, float]]] = {}
    for bar in row.passes:
        whole, bottom, wide = bar.whole or sum(bar.shares.values()), upper + height, bar.end - bar.start > 0.012 * step
        for name in (key for key in (*PHASES, *AXES) if bar.shares.get(key)):
            part = height * bar.shares[name] / whole
            spans.setdefault(name, []).append((bar.start * unit, bottom, (bar.end - bar.start) * unit, part))
            if wide and bar.microbatch >= 0 and bar.shares[name] == max(bar.shares.values()):
                colour, x = WHITE if name == "forward" else "black", (bar.start + bar.end) / 2 * unit
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


# -- where the step goes, added up -------------------------------------------------------------------------------------------


@figure("breakdown")
def breakdown(summaries: Mapping[str, Summary]) -> Figure:
    """A stacked bar per run (name -> summary); the segments of a bar add up to its step."""
    runs = list(summaries.values())
    longest = max(run.step_seconds for run in runs)
    unit, unit_name = _time_unit(longest)
    drawn, ax = canvas(7.2, 2.4 + 0.5 * len(runs))
    ends, handles = [0.0] * len(runs), []
    for component in components(run.breakdown for run in runs):
        key = component.removesuffix(" exposed")
        widths = [run.breakdown.get(component, 0.0) for run in runs]
        ax.barh(range(len(runs)), [width * unit for width in widths], left=[end * unit for end in ends], height=0.62,
                color=COLOURS[key], hatch=HATCHES.get(key), edgecolor=DARK, linewidth=0.5, clip_on=False)  # fmt: skip
        for y, (run, width) in enumerate(zip(runs, widths, strict=True)):
            if width > 0.068 * longest:
                _share(ax, (ends[y] + width / 2) * unit, y, width / run.step_seconds, key)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
        if any(width >= 0.0005 * run.step_seconds for run, width in zip(runs, widths, strict=True)):  # else it cannot be seen
            handles.append(_patch(key, component if len(runs) > 1 else f"{component}  {seconds(widths[0])}"))
    ax.set_yticks(range(len(runs)), list(summaries) if len(runs) > 1 else [""])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, longest * unit), xlabel=f"time per step ({unit_name}), mean over ranks")
    ax.set_title("Where the step goes" + (f": {seconds(longest)}" if len(runs) == 1 else ""))
    drawn.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=9)
    return drawn


def _share(ax: Axes, x: float, y: float, fraction: float, key: str) -> None:
    """A percentage in a segment, readable on a hatch."""
    dark = key in ("forward", "slowdown")
    box = {"facecolor": COLOURS[key], "edgecolor": "none", "pad": 1.5} if key in HATCHES else None
    ax.text(x, y, percent(fraction), ha="center", va="center", fontsize=9, color=WHITE if dark else "black", bbox=box)


# -- memory ------------------------------------------------------------------------------------------------------------------


@figure("memory")
def memory(summary: Summary) -> Figure:
    """Peak memory of each stage by kind, and the GPU's capacity."""
    entries = stages(summary)
    drawn, ax = canvas(7.2, 3.6)
    bottom = [0.0] * len(entries)
    for kind in KINDS:
        sizes = [held(entry)[kind] / 1e9 for entry in entries]
        if any(sizes):
            ax.bar(range(len(entries)), sizes, bottom=bottom, width=0.7, color=MEMORY[kind], edgecolor=DARK,
                   linewidth=0.5 if len(entries) <= 32 else 0, label=kind)  # fmt: skip
        bottom = [low + more for low, more in zip(bottom, sizes, strict=True)]
    capacity = summary.memory_capacity / 1e9
    highest = max(*bottom, capacity) * 1.1
    ax.axhline(capacity, color=RED, linestyle="--", linewidth=1.5, label=f"capacity {gigabytes(summary.memory_capacity)} GB")
    if len(entries) <= 16:
        for x, entry in enumerate(entries):
            ax.text(x, bottom[x] + 0.01 * highest, gigabytes(entry.peak), ha="center", va="bottom", fontsize=9)
    names = [f"stage {entry.stage}" if len(entries) <= 8 else str(entry.stage) for entry in entries]
    every = max(1, -(-len(entries) // 16))
    ax.set_xticks(range(0, len(entries), every), names[::every])
    room = max(0.0, (4 - len(entries)) / 2)
    ax.set(xlim=(-0.6 - room, len(entries) - 0.4 + room), ylim=(0, highest), ylabel="GB")
    ax.set_xlabel("" if len(entries) <= 8 else "stage")
    ax.set_title("Peak memory of one GPU")
    handles, labels = ax.get_legend_handles_labels()
    drawn.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=9)
    return drawn
