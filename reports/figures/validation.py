"""The figure of a validation: predicted against measured step times, with the line where they are equal and 10 % around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import BLUE, DARK, GREY, figure
from reports.formatting import seconds
from reports.tables.execution import CLOSE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from calibration.validate import Validated


@figure("validation")
def validation(data: Sequence[Validated]) -> Figure:
    """One dot per job, numbered; the legend names them. Both axes logarithmic, in seconds."""
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    rows = [row for validated in data for row in validated.rows if row.what == "step"]
    times = [value for row in rows for value in (row.predicted, row.measured)]
    ends = np.array([min(times) / 1.3, max(times) * 1.3])
    drawn = Figure(figsize=(9.6, 5.6), layout="constrained")
    ax = drawn.add_subplot()
    ax.fill_between(ends, ends * (1 - CLOSE), ends * (1 + CLOSE), color=GREY, alpha=0.4, linewidth=0, label=f"±{CLOSE:.0%}")
    ax.plot(ends, ends, color=DARK, linewidth=1, label="equal")
    for number, row in enumerate(rows, 1):
        ax.plot(
            row.measured, row.predicted, "o", color=BLUE, markersize=5, label=f"{number}  {row.job}  {100 * row.error:+.0f} %"
        )
        ax.annotate(str(number), (row.measured, row.predicted), xytext=(4, -10), textcoords="offset points", fontsize=8)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured step", ylabel="predicted step", aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
    ax.set_title(f"{data[0].job.model.name} on {data[0].execution.ranks} processes, prices {data[0].summary.profile}")
    ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, handlelength=1.2)
    return drawn
