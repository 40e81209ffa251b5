"""How a collective's time grows with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reports.figures import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, SKY, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = ("solid", "dashed", "dotted", "dashdot")


class Growth(NamedTuple):
    """Lines of (ranks, seconds) by name, "algorithm, size"."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float]]]


@figure("growth")
def growth(data: Growth) -> Figure:
    """Time against ranks on logarithmic axes: a colour per algorithm, a style per size."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 4.6), layout="constrained")
    axes = drawn.subplots()
    algorithms = list(dict.fromkeys(name.split(", ")[0] for name in data.lines))
    sizes = list(dict.fromkeys(name.split(", ")[1] for name in data.lines))
    colours = (ORANGE, BLUE, GREEN, PURPLE, SKY, RED, DARK)
    for name, points in data.lines.items():
        algorithm, size = name.split(", ")
        axes.plot(
            [ranks for ranks, _ in points],
            [time for _, time in points],
            marker="o",
            markersize=3.5,
            label=name,
            color=colours[algorithms.index(algorithm) % len(colours)],
            linestyle=STYLES[sizes.index(size) % len(STYLES)],
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("time (s)")
    axes.grid(alpha=0.3)
    axes.set_title(data.title)
    drawn.legend(loc="outside right upper", fontsize=9)
    return drawn
