"""How far does it scale?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reports.figures import BLUE, DARK, GREY, ORANGE, WHITE, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Point = tuple["Size", float]  # and its share in %
INKS = (BLUE, "#8A5F00")  # of labels: the lines' colours, dark enough to read


class Size(NamedTuple):
    """One number of GPUs."""

    gpus: int
    rate: float  # tokens/s/GPU
    fits: bool = True


class Scaling(NamedTuple):
    """Lines by name, "weak" and "strong" for example; boundaries: name -> the most GPUs that are still inside one; unit: what is
    counted of what is trained on.
    """

    lines: Mapping[str, Sequence[Size]]
    boundaries: Mapping[str, int]
    unit: str = "tokens"

    @property
    def shares(self) -> dict[str, list[float]]:
        """tokens/s/GPU of each point relative to that on the fewest GPUs that fit (on the fewest, when nothing fits)."""
        firsts = {name: next((size for size in line if size.fits), line[0]) for name, line in self.lines.items()}
        return {name: [size.rate / firsts[name].rate for size in line] for name, line in self.lines.items()}


@figure("efficiency")
def efficiency(data: Scaling) -> Figure:
    """tokens/s/GPU against its value on the fewest GPUs that fit, a line per way of scaling; what does not fit is hollow."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    drawn = Figure(figsize=(9, 3.8), layout="constrained")
    ax = drawn.subplots()
    every = sorted({size.gpus for line in data.lines.values() for size in line})
    ax.set_xscale("log", base=2)
    ax.set_xticks(every, [f"{gpus:,}" for gpus in every])
    ax.minorticks_off()
    ax.axhline(100, color=GREY, linewidth=1.2, linestyle="--", label="ideal")
    points = {
        name: [(size, 100 * share) for size, share in zip(line, data.shares[name], strict=True)]
        for name, line in data.lines.items()
    }
    for number, (name, line) in enumerate(points.items()):
        _line(ax, name, line, (BLUE, ORANGE)[number % 2], "os"[number % 2])
    _labels(ax, list(points.values()))
    for name, gpus in data.boundaries.items():
        if every and every[0] <= gpus < every[-1]:
            ax.axvline(gpus * 2**0.5, color=DARK, linewidth=0.8, linestyle=":")
            ax.annotate(
                f"within a {name} ",
                (gpus * 2**0.5, 0.02),
                xycoords=("data", "axes fraction"),
                ha="right",
                fontsize=8.5,
                color=DARK,
            )
    highest = max((share for line in points.values() for _, share in line), default=100.0)
    ax.set(xlabel="GPUs", ylabel=f"% of {data.unit}/s/GPU\non the fewest that fit", ylim=(0, max(125, highest + 20)))
    ax.set_xlim(every[0] / 1.3, every[-1] * 1.3)
    ax.set_title(f"Efficiency: {data.unit}/s/GPU against the fewest GPUs that fit")
    handles = ax.get_legend_handles_labels()[0]
    if any(not size.fits for line in data.lines.values() for size in line):
        handles.append(Line2D([], [], linestyle="", marker="o", color=WHITE, markeredgecolor=DARK, label="out of memory"))
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    return drawn


def _line(ax: Axes, name: str, line: Sequence[Point], colour: str, mark: str) -> None:
    ax.plot([size.gpus for size, _ in line], [share for _, share in line], color=colour, marker=mark, markersize=6, label=name)
    hollow = [(size.gpus, share) for size, share in line if not size.fits]
    if hollow:
        ax.plot(*zip(*hollow, strict=True), linestyle="", marker=mark, markersize=6, color=WHITE, markeredgecolor=colour)


def _labels(ax: Axes, lines: Sequence[Sequence[Point]]) -> None:
    """A percentage at every point: above the higher line, below the lower one."""
    at: dict[int, list[tuple[float, str]]] = {}
    for line, colour in zip(lines, INKS, strict=False):
        for size, share in line:
            at.setdefault(size.gpus, []).append((share, colour))
    for gpus, shares in at.items():
        if len({share for share, _ in shares}) == 1:
            continue  # the reference of both
        for place, (share, colour) in enumerate(sorted(shares, reverse=True)):
            ax.annotate(
                f"{share:.0f} %",
                (gpus, share),
                (0, 8 if place == 0 else -15),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=colour,
            )
