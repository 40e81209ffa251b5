"""Parameter servers: how much gets through, and how stale it is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure
from reports.formatting import plural
from strategies.lowering.parameter_servers import Answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)


@figure("staleness")
def staleness(answers: Mapping[str, Answer]) -> Figure:
    """Name -> answer: on the left gradients per second and the most that the servers let through, on the right how many
    updates of others gradients missed, cumulated.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(2, 3))
    names = [f"at most {plural(int(name), 'step')} ahead" if name.isdigit() else name for name in answers]
    for number, (name, answer) in enumerate(zip(names, answers.values(), strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        left.bar(number, answer.most, width=0.7, color="none", edgecolor=GREY, linestyle="--")
        left.bar(number, answer.played.gradients_per_second, width=0.7, color=colour, edgecolor=DARK, linewidth=0.5)
        counts = answer.played.staleness.histogram
        span = range(max(counts) + 1)
        below = accumulate(100 * counts.get(value, 0) / sum(counts.values()) for value in span)
        right.step([-0.5, *span, span[-1] + 0.5], [0, *below, 100], where="post", color=colour, linewidth=1.8, label=name)
    left.set_xticks(range(len(answers)), names)
    left.set_xlim(min(-0.5, len(answers) / 2 - 1.5), max(len(answers) - 0.5, len(answers) / 2 + 0.5))
    left.set(ylabel="gradients per second, all workers")
    left.set_title("Dashed: what the servers let through at most", fontsize=10)
    right.set(xlabel="updates that a gradient missed", ylabel="gradients that missed at most so many (%)", ylim=(0, 103))
    right.set_xlim(left=-0.3, right=max(1.0, right.get_xlim()[1]))  # where nothing is missed the line is at 0
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_title("Staleness of gradients")
    right.legend(fontsize=9)
    return drawn
