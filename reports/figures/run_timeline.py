"""One run over its days: what the job did when, and its longest interruption seen closely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from reports.figures import BLACK, BLUE, DARK, GREEN, GREY, LIGHT, ORANGE, PURPLE, RED, SKY, WHITE, YELLOW, figure
from sim.runs import ledger
from sim.runs.record import Span, costliest
from sim.runs.run import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INDIGO, BROWN = "#200080", "#7A4419"
CAUSES = {
    ledger.PRODUCTIVE: GREEN,
    ledger.WASTED: RED,
    ledger.SAVE: BLUE,
    ledger.RESTORE: SKY,
    ledger.INITIALIZATION: ORANGE,
    ledger.DETECTION: PURPLE,
    ledger.DIAGNOSIS: YELLOW,
    ledger.REPLACEMENT: DARK,
    ledger.SLOW: GREY,
    ledger.REDUCED: BROWN,
    ledger.EVALUATION: LIGHT,
    ledger.REDUCTION: INDIGO,
    ledger.LOADING: BLACK,
    ledger.SPARES: WHITE,
}
ROWS = 8  # of the overview
THIN = 1 / 1200  # of a row's width: what takes less time is drawn so wide, or it could not be seen
AROUND = 0.35  # of an interruption's length that is shown before and after it
PAUSES = 12  # that are shown where nothing was interrupted
FINE = 2000  # pieces of the close view at most
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@figure("run_timeline")
def run_timeline(outcome: Outcome) -> Figure:
    """outcome: a run with its timeline."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 4.8), layout="constrained")
    grid = drawn.add_gridspec(2, 1, height_ratios=(5, 1))
    overview(drawn.add_subplot(grid[0]), outcome)
    close(drawn.add_subplot(grid[1]), outcome)
    return drawn


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit in which so long a time is a number of at least 2."""
    return next(((size, name) for size, name in UNITS if seconds >= 2 * size), UNITS[-1])


def overview(axes: Axes, outcome: Outcome) -> None:
    """The run in rows of equal length one below the other."""
    row = outcome.seconds / ROWS
    size, unit = unit_of(outcome.seconds)
    for number in range(ROWS):
        begin, end = number * row, (number + 1) * row
        _bar(axes, number, ((max(s.start, begin), min(s.end, end), s.cause) for s in outcome.timeline), begin, row, size)
    axes.set_yticks(range(ROWS), [f"{number * row / size:.3g}" for number in range(ROWS)])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlabel=f"{unit} from the row's beginning", ylabel=f"row begins ({unit})", xlim=(0, row / size))
    failures = sum(outcome.failures.values())
    what = f"{failures:,} failure{'s' * (failures != 1)}"
    axes.set_title(f"One run: {what}, goodput {100 * outcome.goodput:.1f} %")
    legend(axes, outcome.timeline, -0.19)


def legend(axes: Axes, timeline: Iterable[Span], below: float) -> None:
    """The causes that a timeline has, pauses of training included, under the axes."""
    from matplotlib.patches import Patch

    shown = dict.fromkeys(cause for span in timeline for cause in (span.cause, *_paused(span)))
    handles = [
        Patch(facecolor=colour, edgecolor=DARK, linewidth=0.4, label="training" if cause == ledger.PRODUCTIVE else cause)
        for cause, colour in CAUSES.items()
        if cause in shown
    ]
    axes.legend(
        handles=handles, ncols=len(handles), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, below), columnspacing=1.2
    )


def _paused(span: Span) -> list[str]:
    if span.segment is None:
        return []
    lasting = zip(span.pauses, span.segment.pauses, strict=True)
    return [cause for cause, pause in lasting if pause.seconds and span.segment.left(pause.steps) < span.end - span.origin]


def close(axes: Axes, outcome: Outcome) -> None:
    """The longest interruption: the last saves before it, what was lost, how the job came back."""
    interruption = costliest(outcome.timeline)
    axes.set_yticks([])
    if interruption is None:
        begin, (left, right) = None, _training(outcome)
    else:
        begin, end = interruption
        margin = max(AROUND * (end - begin), 60.0)
        left, right = max(0.0, begin - margin), min(outcome.seconds, end + margin)
    size, unit = unit_of(right - left)
    pieces = [piece for span in outcome.timeline for piece in span.pieces(left, right)]
    if len(pieces) > FINE:
        pieces = [(s.start, s.end, s.cause) for s in outcome.timeline if s.end > left and s.start < right]
        pieces = [(max(left, start), min(right, stop), cause) for start, stop, cause in pieces]
    _bar(axes, 0, pieces, left, right - left, size)
    axes.set(xlim=(0, (right - left) / size), xlabel=f"{unit}, from {left / 86400:.4g} days on")
    if begin is None:
        axes.set_title("Never interrupted; a part of it, closely", fontsize=10)
        return
    axes.axvline((begin - left) / size, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_title("Its longest interruption, closely: dotted where the last useful step ended", fontsize=10)


def _training(outcome: Outcome) -> tuple[float, float]:
    """A part of the longest stretch of training, with some of its most frequent pauses."""
    stretch = max(outcome.timeline, key=lambda span: (span.segment is not None, span.end - span.start))
    every = [pause.steps * stretch.segment.step for pause in stretch.segment.pauses if pause.seconds] if stretch.segment else []
    middle = (stretch.start + stretch.end) / 2
    half = min(PAUSES * min(every, default=900.0), stretch.end - stretch.start) / 2
    return middle - half, middle + half


def _bar(axes: Axes, y: float, pieces: Iterable[tuple[float, float, str]], begin: float, length: float, unit: float) -> None:
    """Pieces beside each other at height `y`; training first, so that what is short lies over it."""
    from matplotlib.collections import PolyCollection

    thin, corners, colours = THIN * length, [], []
    for start, end, cause in sorted(pieces, key=lambda piece: piece[2] != ledger.PRODUCTIVE):
        if end <= start:
            continue
        left = min(start, begin + length - thin) - begin
        right = max(left + thin, end - begin)
        corners.append([(x / unit, y + side) for x, side in ((left, -0.4), (left, 0.4), (right, 0.4), (right, -0.4))])
        colours.append(CAUSES[cause])
    axes.add_collection(PolyCollection(corners, facecolors=colours, linewidths=0))
    axes.set_ylim(min(axes.get_ylim()[0], y - 0.5), max(axes.get_ylim()[1], y + 0.5))
