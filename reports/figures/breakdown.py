"""Where the step goes, added up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reports.figures import COLOURS, DARK, HATCHES, canvas, figure, ink, patch, time_unit
from reports.formatting import components, percent, seconds
from sim.analysis.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@figure("breakdown")
def breakdown(summaries: Mapping[str, Summary]) -> Figure:
    """A stacked bar per run (name -> summary); the segments of a bar add up to its step."""
    runs = list(summaries.values())
    longest = max(run.step_seconds for run in runs)
    unit, unit_name = time_unit(longest)
    drawn, ax = canvas(7.2, 2.4 + 0.5 * len(runs))
    ends, handles = [0.0] * len(runs), []
    for component in components(run.breakdown for run in runs):
        key = component.removesuffix(" exposed")
        widths = [run.breakdown.get(component, 0.0) for run in runs]
        ax.barh(
            range(len(runs)),
            [width * unit for width in widths],
            left=[end * unit for end in ends],
            height=0.62,
            color=COLOURS[key],
            hatch=HATCHES.get(key),
            edgecolor=DARK,
            linewidth=0.5,
            clip_on=False,
        )
        for y, (run, width) in enumerate(zip(runs, widths, strict=True)):
            if width > 0.068 * longest:
                _share(ax, (ends[y] + width / 2) * unit, y, width / run.step_seconds, key)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
        if any(width >= 0.0005 * run.step_seconds for run, width in zip(runs, widths, strict=True)):  # else it cannot be seen
            handles.append(patch(key, component if len(runs) > 1 else f"{component}  {seconds(widths[0])}"))
    ax.set_yticks(range(len(runs)), list(summaries) if len(runs) > 1 else [""])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, longest * unit), xlabel=f"time per step ({unit_name}), mean over ranks")
    step = "expected step" if all(run.variability for run in runs) else "step"
    ax.set_title(f"Where the {step} goes" + (f": {seconds(longest)}" if len(runs) == 1 else ""))
    drawn.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=9)
    return drawn


def _share(ax: Axes, x: float, y: float, fraction: float, key: str) -> None:
    """A percentage in a segment, readable on a hatch."""
    box = {"facecolor": COLOURS[key], "edgecolor": "none", "pad": 1.5} if key in HATCHES else None
    ax.text(x, y, percent(fraction), ha="center", va="center", fontsize=9, color=ink(COLOURS[key]), bbox=box)
