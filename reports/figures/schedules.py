"""Pipeline schedules under each other on one scale of time: passes of a unit's length, microbatch numbers, what is idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.figures import COLOURS, DARK, DIGIT, LIGHT, canvas, chunk_patch, figure, ink, pale
from reports.figures.timeline_bars import WEIGHT
from reports.formatting import percent
from strategies.schedules.unit_play import Pass, UnitPlay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": WEIGHT}  # drawn as what is played


@figure("schedules", sweeps=True)
def schedules(plays: Sequence[UnitPlay]) -> Figure:
    """A panel per schedule: a row per rank, grey where it is idle; chunks of a rank alternate between full and pale colours."""
    longest = max(play.length for play in plays)
    rows = sum(play.ranks for play in plays)
    drawn, _ = canvas(12, 0.7 + 0.62 * len(plays) + 0.26 * rows)
    drawn.clear()
    axes = drawn.subplots(len(plays), 1, sharex=True, squeeze=False, height_ratios=[play.ranks + 1.4 for play in plays])[:, 0]
    for ax, play in zip(axes, plays, strict=True):
        _panel(ax, play, longest)
    axes[-1].set_xlabel("time, in forward passes of a microbatch through a rank")
    used = {KINDS[each.kind] for play in plays for each in play.passes}
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLOURS[name], label=name) for name in dict.fromkeys(KINDS.values()) if name in used]
    handles.append(Patch(facecolor=LIGHT, label="idle"))
    if any(play.chunks > 1 for play in plays):
        handles.append(chunk_patch())
    drawn.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=9)
    return drawn


def _panel(ax: Axes, play: UnitPlay, longest: float) -> None:
    for rank in range(play.ranks):
        ax.broken_barh([(0, play.length)], (rank - 0.45, 0.9), facecolor=LIGHT)
    for each in play.passes:
        _bar(ax, each, longest)
    idle = f"bubble {percent(play.bubble)} of the step"
    if play.gaps < play.bubble - 1e-9:
        idle += f", {percent(play.gaps)} between a rank's own passes"
    held = ", ".join(f"{play.held(rank):.3g}" for rank in range(play.ranks))
    ax.set_title(f"{play.name}: {play.length:.4g} long, {idle}; microbatches held by rank: {held}", fontsize=10)
    ax.set(xlim=(0, longest), ylim=(play.ranks - 0.45, -0.55))
    ax.set_yticks(range(play.ranks), [f"rank {rank}" for rank in range(play.ranks)])
    ax.tick_params(axis="both", length=0)
    ax.spines[["left", "bottom"]].set_visible(False)


def _bar(ax: Axes, each: Pass, longest: float) -> None:
    colour = COLOURS[KINDS[each.kind]]
    colour = pale(colour) if each.chunk % 2 else colour
    width = each.end - each.start
    ax.broken_barh([(each.start, width)], (each.rank - 0.45, 0.9), facecolor=colour, edgecolor=DARK, linewidth=0.4)
    if width > DIGIT * longest * len(str(each.microbatch)):
        middle = (each.start + each.end) / 2
        ax.text(middle, each.rank, str(each.microbatch), ha="center", va="center", fontsize=7.5, color=ink(colour), clip_on=True)
