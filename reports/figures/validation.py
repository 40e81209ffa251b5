"""The figure of a validation: a line per job with its predicted and measured step and peak memory, and how far they are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, GREY, LIGHT, RED, at_the_right, figure, log_ticks
from reports.figures.comparison import broken
from reports.formatting import seconds, signed, size
from reports.tables.execution import CLOSE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibration.validate import Row, Validated

WIDE_RANGE = 10.0  # largest over smallest value from which an axis is logarithmic
Line = tuple["Row | None", Sequence[float]]  # a job's numbers, None if it has none; the step in each of its launches


@figure("validation")
def validation(data: Sequence[Validated]) -> Figure:
    """A job per line: on the left its step, on the right the peak of its fullest stage; errors beside both."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps: list[Line] = [(_fullest(validated, "step"), validated.launches) for validated in data]
    peaks: list[Line] = [(_fullest(validated, "memory"), ()) for validated in data]
    panels: list[tuple[list[Line], str, Callable[[float], str]]] = [(steps, "time per step", seconds)]
    if any(row for row, _ in peaks):
        panels.append((peaks, "peak memory of the fullest stage", size))
    drawn = Figure(figsize=((8.0, 12.8)[len(panels) - 1], 2.1 + 0.3 * len(data)), layout="constrained")
    for ax, (lines, label, text) in zip(drawn.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        low, high = _dumbbells(ax, lines)
        ax.set_xlabel(label)
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
        if high > WIDE_RANGE * low:
            ax.set_xscale("log")
            log_ticks(ax.xaxis, low, high, text)
        ax.set_yticks(range(len(data)), [broken(validated.job.name) for validated in data])
        ax.set_ylim(len(data) - 0.4, -0.6)
    drawn.suptitle(_title(data), x=0.01, ha="left", fontsize=11)
    drawn.legend(handles=_handles(any(len(times) > 1 for _, times in steps)), loc="outside lower left", ncols=5, fontsize=9)
    return drawn


def _fullest(validated: Validated, what: str) -> Row | None:
    """The row with most that was measured: the fullest stage's memory."""
    return max((row for row in validated.rows if row.what == what), key=lambda row: row.measured, default=None)


def _dumbbells(ax: Axes, lines: Sequence[Line]) -> tuple[float, float]:
    """Draws predicted and measured values, joined, over what is within `CLOSE` of the measured one; returns the axis's ends."""
    values = [value for row, times in lines if row for value in (row.predicted, row.measured, *times)]
    low, high = min(values), max(values)
    for y, (row, times) in enumerate(lines):
        ax.axhline(y, color=LIGHT, lw=0.8, zorder=0)
        if row is None:
            continue
        close = abs(row.error) <= CLOSE
        ax.barh(y, 2 * CLOSE * row.measured, left=(1 - CLOSE) * row.measured, height=0.62, color=GREY, alpha=0.5, lw=0, zorder=1)
        if len(times) > 1:
            ax.plot([min(times), max(times)], [y, y], color=DARK, lw=5, alpha=0.45, solid_capstyle="butt", zorder=2)
        ax.plot([row.measured, row.predicted], [y, y], color=BLUE if close else RED, lw=1.6, zorder=3)
        ax.plot(row.measured, y, "|", color=DARK, ms=12, mew=2.2, zorder=4)
        ax.plot(row.predicted, y, "o", color=BLUE if close else RED, ms=6.5, zorder=5)
        at_the_right(ax, y, signed(row.error), 40, color=DARK if close else RED)
    room = 0.04 * (high - low) or 0.1 * high
    ax.set_xlim(max(low - 3 * room, 0.7 * low), high + 2 * room)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return low, high


def _title(data: Sequence[Validated]) -> str:
    """What ran where, by which prices, and how far the steps are off."""
    from statistics import median

    off = [abs(row.error) for validated in data for row in validated.rows if row.what == "step"]
    volumes = [row for validated in data for row in validated.rows if row.what == "volume"]
    equal = sum(abs(row.predicted - row.measured) < 1 for row in volumes)
    return (
        f"{data[0].job.model.name} on {data[0].execution.ranks} processes, prices {data[0].summary.profile}\n"
        f"step off by {100 * median(off):.1f} % in the median, {100 * max(off):.1f} % at most; "
        f"bytes sent equal in {equal} of {len(volumes)}"
    )


def _handles(several: bool) -> list[object]:
    """Entries of the legend; several: launches of each job, of which the median counts."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spread = [Line2D([], [], color=DARK, lw=5, alpha=0.45, label="fastest to slowest launch")] * several
    return [
        Line2D([], [], color=BLUE, marker="o", ms=6.5, lw=1.6, label="predicted"),
        Line2D([], [], color=RED, marker="o", ms=6.5, lw=1.6, label=f"off by more than {100 * CLOSE:.0f} %"),
        Line2D([], [], color=DARK, marker="|", ms=12, mew=2.2, lw=0, label="measured"),
        Patch(facecolor=GREY, alpha=0.5, label=f"±{100 * CLOSE:.0f} % of it"),
        *spread,
    ]
