"""All-reduces round by round: a row of small pictures for each algorithm, ranks on a circle and arrows for what they send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, cos, pi, sin
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, GREEN, LIGHT, ORANGE, figure
from reports.formatting import digits, plural
from sim.analysis.collective_rounds import Round, Rounds

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.patches import Patch
    from numpy.typing import NDArray

    from reports.figures.film import Frame

ROW = 7  # rounds beside each other
STEPS, MOVING, AFTER = 6, 90, 700  # frames of a round, milliseconds of each, and when it is over
SIDE = 1.55  # inches of a round
RADIUS = 0.24  # of a rank, where the circle of ranks has radius 1


def _film(plays: Sequence[Rounds]) -> Iterator[Frame]:
    """Algorithms beside each other, a round at a time: what is sent is on its way as a dot, as large as what it carries. A
    round of one takes as long on the screen as one of another.
    """
    from matplotlib.figure import Figure

    from reports.figures.film import HOLD, Frame, rendered

    last = max(len(play.rounds) for play in plays)
    for number in range(last):
        for step in range(STEPS + 1):
            drawn = Figure(figsize=(3.2 * len(plays), 3.6), layout="constrained")
            panels = drawn.subplots(1, len(plays), squeeze=False)[0]
            for ax, play in zip(panels, plays, strict=True):
                ax.set_axis_off()
                at = min(number, len(play.rounds) - 1)
                over = number >= len(play.rounds)
                _moment(ax, play, at, 1.0 if over else step / STEPS)
                done = over or (at == len(play.rounds) - 1 and step == STEPS)
                ends = "done" if done else f"round {at + 1} of {len(play.rounds)}"
                ax.set_title(f"{play.name}\n{ends}", fontsize=9)
            drawn.legend(handles=_entries(), loc="outside lower center", ncols=3, fontsize=8)
            pause = HOLD if number == last - 1 else AFTER
            yield Frame(rendered(drawn), pause if step == STEPS else MOVING)


def _moment(ax: Axes, play: Rounds, number: int, way: float) -> None:
    """A round of which what is sent has gone a part of its way."""
    shown = play.rounds[number]
    before = play.rounds[number - 1].has if number else [0.0] * play.ranks
    places = _places(play.ranks)
    _ranks(ax, play.ranks, shown.has if way == 1.0 else before)
    if way < 1.0:
        for source, destination, share in zip(shown.source, shown.destination, shown.share, strict=True):
            (x, y), (u, v) = places[source], places[destination]
            at, size = (x + way * (u - x), y + way * (v - y)), 5 + 9 * float(share) ** 0.5
            ax.plot((x, u), (y, v), color=LIGHT, linewidth=1, zorder=0)
            ax.plot(*at, marker="o", markersize=size, color=ORANGE if shown.reduce else BLUE, markeredgecolor=DARK, zorder=3)


@figure("rounds", film=_film)
def rounds(plays: Sequence[Rounds]) -> Figure:
    """A panel per round; ranks are filled as far as they have the finished sum, arrows are as wide as what they carry."""
    from matplotlib.figure import Figure

    columns = min(ROW, max(len(play.rounds) for play in plays))
    lines = [ceil(len(play.rounds) / columns) for play in plays]
    drawn = Figure(figsize=(max(7.0, SIDE * columns), sum(SIDE * each + 0.45 for each in lines) + 0.4), layout="constrained")
    parts = drawn.subfigures(len(plays), 1, height_ratios=[SIDE * each + 0.45 for each in lines], squeeze=False)[:, 0]
    for part, play, high in zip(parts, plays, lines, strict=True):
        _algorithm(part, play, high, columns)
    drawn.legend(handles=_entries(), loc="outside lower center", ncols=3, fontsize=9)
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


def _entries() -> list[Patch]:
    from matplotlib.patches import Patch

    sent = [Patch(facecolor=ORANGE, label="sent and added"), Patch(facecolor=BLUE, label="sent and kept")]
    return [*sent, Patch(facecolor=GREEN, label="part of the finished sum that a rank has")]


def _places(ranks: int) -> list[tuple[float, float]]:
    return [(sin(2 * pi * rank / ranks), cos(2 * pi * rank / ranks)) for rank in range(ranks)]


def _radius(ranks: int) -> float:
    return min(RADIUS, 0.75 * pi / ranks)


def _round(ax: Axes, shown: Round, ranks: int) -> None:
    radius, places = _radius(ranks), _places(ranks)
    colour = ORANGE if shown.reduce else BLUE
    for source, destination, share in zip(shown.source, shown.destination, shown.share, strict=True):
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 0.8 + 2.6 * share, "shrinkA": 0, "shrinkB": 0}
        start, end = places[source], places[destination]
        length = ((start[0] - end[0]) ** 2 + (start[1] - end[1]) ** 2) ** 0.5
        inset = [(b - a) / length * (radius + 0.03) for a, b in zip(start, end, strict=True)]
        tip, tail = (end[0] - inset[0], end[1] - inset[1]), (start[0] + inset[0], start[1] + inset[1])
        ax.annotate("", tip, tail, arrowprops=arrow | {"connectionstyle": "arc3,rad=0.22", "mutation_scale": 8})
    _ranks(ax, ranks, shown.has)


def _ranks(ax: Axes, ranks: int, has: Sequence[float] | NDArray[np.float64]) -> None:
    """Circles with their numbers, filled as far as they have the sum, and the room around them."""
    from matplotlib.patches import Circle, Wedge

    radius = _radius(ranks)
    for rank, place in enumerate(_places(ranks)):
        ax.add_patch(Circle(place, radius, facecolor=LIGHT, edgecolor=DARK, linewidth=0.6))
        if has[rank] > 0:
            ax.add_patch(Wedge(place, radius, 90 - 360 * has[rank], 90, facecolor=GREEN, linewidth=0))
        ax.text(*place, str(rank), ha="center", va="center", fontsize=7.5)
    ax.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
