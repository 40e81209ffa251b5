"""An answer over one input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reports.figures import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, WHITE, canvas, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """Lines of (value of the field, tokens/s/GPU, whether it fits) by plan."""

    field: str
    lines: Mapping[str, Sequence[tuple[float, float, bool]]]
    label: str = "tokens/s/GPU"


@figure("curve")
def curve(data: Curve) -> Figure:
    """tokens/s/GPU (over days: delivered) over a field of numbers, one line per plan; what does not fit is hollow."""
    drawn, ax = canvas(7.2, 4.0)
    colours = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
    for number, (name, points) in enumerate(data.lines.items()):
        colour = colours[number % len(colours)]
        ax.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", color=colour, label=name)
        hollow = [(x, y) for x, y, fits in points if not fits]
        if hollow:
            ax.plot(*zip(*hollow, strict=True), "o", color=WHITE, markeredgecolor=colour)
    ax.set(xlabel=data.field, ylabel=data.label, ylim=(0, None))
    ax.legend()
    return drawn
