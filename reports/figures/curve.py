"""An answer over one input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reports.figures import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, SKY, WHITE, canvas, figure
from reports.formatting import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LABELLED = 12  # points of the only line, up to which each has its number


class Curve(NamedTuple):
    """Lines of (value of the field, tokens/s/GPU, whether it fits) by plan."""

    field: str
    lines: Mapping[str, Sequence[tuple[float, float, bool]]]
    label: str = "tokens/s/GPU"


@figure("curve")
def curve(data: Curve) -> Figure:
    """tokens/s/GPU (over days: delivered) over a field of numbers, one line per plan; what does not fit is hollow."""
    from matplotlib.ticker import FuncFormatter

    drawn, ax = canvas(8.4, 4.4)
    colours = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
    for number, (name, points) in enumerate(data.lines.items()):
        colour = colours[number % len(colours)]
        ax.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", color=colour, label=name)
        hollow = [(x, y) for x, y, fits in points if not fits]
        if hollow:
            ax.plot(*zip(*hollow, strict=True), "o", color=WHITE, markeredgecolor=colour)
    if any(not fits for points in data.lines.values() for *_, fits in points):
        ax.plot([], [], "o", color=WHITE, markeredgecolor=DARK, label="out of memory")
    highest = max(y for points in data.lines.values() for _, y, _ in points)
    if len(data.lines) == 1 and len(points) <= LABELLED:
        for x, y, _ in points:
            ax.annotate(_number(y, highest), (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=DARK)
    ax.set_title(f"{data.label} over {data.field}")
    ax.set(xlabel=data.field, ylabel=data.label, ylim=(0, 1.12 * highest))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _number(y, highest)))
    _values(ax, sorted({x for points in data.lines.values() for x, _, _ in points}))
    ax.grid(axis="y", alpha=0.3)
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(loc="lower left")
    return drawn


def _number(value: float, highest: float) -> str:
    return digits(value) if highest < 10 else f"{value:,.0f}"


def _values(ax: Axes, values: list[float]) -> None:
    """Ticks at the values that were asked for; a logarithmic axis where they span more than a factor of four."""
    from matplotlib.ticker import NullLocator

    if values[0] > 0 and values[-1] >= 4 * values[0]:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
    step = -(-len(values) // 10)
    ax.set_xticks(values[::step], [f"{value:,.6g}" if value < 1e6 else f"{value / 1e9:.6g} × 10⁹" for value in values[::step]])
