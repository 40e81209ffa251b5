"""Which price moves a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, ORANGE, figure
from reports.formatting import PRICED, seconds
from strategies.planner.sensitivity import PriceSwing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEN = 1e-3  # of the step
Answer = tuple[str, float, Sequence[PriceSwing]]  # the job's name, its step in seconds, the strongest effect first


@figure("tornado")
def tornado(data: Answer) -> Figure:
    """The step with each price lower and higher, as bars around the answer; of what moves it so little that nobody would see it,
    only the number.
    """
    from matplotlib.figure import Figure

    name, step, every = data
    swings = [swing for swing in every if swing.width >= SEEN * step] or list(every[:1])
    left = len(every) - len(swings)
    drawing = Figure(figsize=(9, 1.2 + 0.27 * len(swings)), layout="constrained")
    axes = drawing.subplots()
    places = range(len(swings))
    for ends, colour, label in (([e.low for e in swings], BLUE, "shorter"), ([e.high for e in swings], ORANGE, "longer")):
        axes.barh(places, [100 * (end / step - 1) for end in ends], color=colour, label=label)
    axes.axvline(0, color=DARK, lw=1)
    same = len({round(e.factor, 6) for e in swings}) == 1
    axes.set_yticks(places, [PRICED.get(e.name, e.name) + ("" if same else f" ×{e.factor:.2f}") for e in swings])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.invert_yaxis()
    axes.set_xlabel("change of the step time (%)" + (f"; {left} more move it by less than {100 * SEEN:g} %" if left else ""))
    axes.set_title(f"{name}: which price moves the step of {seconds(step)}")
    by = f" (÷ and × {swings[0].factor:.3g})" if same and swings else ""
    axes.legend(loc="lower right", title=f"time of each{by}")
    return drawing
