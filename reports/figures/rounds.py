"""All-reduces round by round: a row of small pictures for each algorithm, ranks on a circle and arrows for what they send."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, cos, pi, sin
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, GREEN, LIGHT, ORANGE, figure
from reports.formatting import digits, plural
from sim.analysis.collective_rounds import Round, Rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

ROW = 7  # rounds beside each other
SIDE = 1.55  # inches of a round
RADIUS = 0.24  # of a rank, where the circle of ranks has radius 1


@figure("rounds")
def rounds(plays: Sequence[Rounds]) -> Figure:
    """A panel per round; ranks are filled as far as they have the finished sum, arrows are as wide as what they carry."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = min(ROW, max(len(play.rounds) for play in plays))
    lines = [ceil(len(play.rounds) / columns) for play in plays]
    drawn = Figure(figsize=(max(7.0, SIDE * columns), sum(SIDE * each + 0.45 for each in lines) + 0.4), layout="constrained")
    parts = drawn.subfigures(len(plays), 1, height_ratios=[SIDE * each + 0.45 for each in lines], squeeze=False)[:, 0]
    for part, play, high in zip(parts, plays, lines, strict=True):
        _algorithm(part, play, high, columns)
    handles = [Patch(facecolor=ORANGE, label="sent and added"), Patch(facecolor=BLUE, label="sent and kept")]
    handles.append(Patch(facecolor=GREEN, label="part of the finished sum that a rank has"))
    drawn.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return drawn


def _algorithm(part: SubFigure, play: Rounds, high: int, columns: int) -> None:
    most = f"a rank sends at most {digits(play.sent.max())} S and receives at most {digits(play.received.max())} S"
    title = f"{play.name}, {play.ranks} ranks: {plural(len(play.rounds), 'round')}; {most}; all send {digits(play.sent.sum())} S"
    part.suptitle(title, x=0.01, ha="left", fontsize=10)
    grid = part.subplots(high, columns, squeeze=False)
    for number, ax in enumerate(grid.ravel()):
        ax.set_axis_off()
        if number < len(play.rounds):
            _round(ax, play.rounds[number], play.ranks)
            ax.set_title(str(number + 1), fontsize=8, loc="center", pad=1)


def _round(ax: Axes, shown: Round, ranks: int) -> None:
    from matplotlib.patches import Circle, Wedge

    radius = min(RADIUS, 0.75 * pi / ranks)
    places = [(sin(2 * pi * rank / ranks), cos(2 * pi * rank / ranks)) for rank in range(ranks)]
    colour = ORANGE if shown.reduce else BLUE
    for source, destination, share in zip(shown.source, shown.destination, shown.share, strict=True):
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 0.8 + 2.6 * share, "shrinkA": 0, "shrinkB": 0}
        start, end = places[source], places[destination]
        length = ((start[0] - end[0]) ** 2 + (start[1] - end[1]) ** 2) ** 0.5
        inset = [(b - a) / length * (radius + 0.03) for a, b in zip(start, end, strict=True)]
        tip, tail = (end[0] - inset[0], end[1] - inset[1]), (start[0] + inset[0], start[1] + inset[1])
        ax.annotate("", tip, tail, arrowprops=arrow | {"connectionstyle": "arc3,rad=0.22", "mutation_scale": 8})
    for rank, place in enumerate(places):
        ax.add_patch(Circle(place, radius, facecolor=LIGHT, edgecolor=DARK, linewidth=0.6))
        if shown.has[rank] > 0:
            ax.add_patch(Wedge(place, radius, 90 - 360 * shown.has[rank], 90, facecolor=GREEN, linewidth=0))
        ax.text(*place, str(rank), ha="center", va="center", fontsize=7.5)
    ax.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
