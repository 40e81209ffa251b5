"""How a collective's time grows with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reports.figures import BLACK, BLUE, BROWN, GREEN, ORANGE, PURPLE, RED, SKY, figure, log_ticks
from reports.formatting import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, BROWN, BLACK)
MARKERS = "os^Dv<>P"
PANELS = 4  # sizes that are drawn: the smallest, the largest, and what is evenly between

Points = Sequence[tuple[int, float]]


class Growth(NamedTuple):
    """Lines of (ranks, seconds) by size and algorithm."""

    title: str
    sizes: Mapping[str, Mapping[str, Points]]


@figure("growth")
def growth(data: Growth) -> Figure:
    """A panel per size: time against ranks on logarithmic axes, a colour and a mark per algorithm, the slowest told first."""
    from matplotlib.figure import Figure

    sizes = _chosen(list(data.sizes))
    drawn = Figure(figsize=(2.6 + 3.4 * len(sizes), 4.4), layout="constrained")
    panels = drawn.subplots(1, len(sizes), squeeze=False)[0]
    last = {name: points[-1][1] for name, points in data.sizes[sizes[-1]].items()}
    algorithms = sorted(last, key=last.__getitem__, reverse=True)
    for ax, size in zip(panels, sizes, strict=True):
        lines = data.sizes[size]
        for number, name in enumerate(algorithms):
            if name in lines:
                _line(ax, name, lines[name], number)
        _axes(ax, size, sorted({ranks for points in lines.values() for ranks, _ in points}))
    panels[0].set_ylabel("time")
    drawn.suptitle(data.title, x=0.01, ha="left", fontsize=11)
    handles, labels = panels[-1].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right upper", fontsize=9, title="slowest first")
    return drawn


def _chosen(sizes: list[str]) -> list[str]:
    if len(sizes) <= PANELS:
        return sizes
    return [sizes[round(at * (len(sizes) - 1) / (PANELS - 1))] for at in range(PANELS)]


def _line(ax: Axes, name: str, points: Points, number: int) -> None:
    ranks, times = zip(*points, strict=True)
    style = "solid" if number < len(COLOURS) else "dashed"
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    ax.plot(ranks, times, marker=marker, markersize=4, color=colour, linestyle=style, label=name.replace("_", " "))


def _axes(ax: Axes, size: str, ranks: list[int]) -> None:
    """Both logarithmic: ranks as they are, times with their units."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    step = -(-len(ranks) // 6)
    ax.set_xticks(ranks[::step], [f"{count:,}" for count in ranks[::step]])
    ax.xaxis.set_minor_locator(NullLocator())
    log_ticks(ax.yaxis, *ax.get_ylim(), seconds)
    ax.grid(alpha=0.3)
    ax.set_xlabel("ranks")
    ax.set_title(size)
