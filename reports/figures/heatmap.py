"""Where in the space of degrees the good plans are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from reports.figures import DARK, GREY, LIGHT, WHITE, figure, ink
from reports.formatting import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels in a row
MANY = 6  # columns of a panel from which on only two stand in a row


class Cell(NamedTuple):
    """The best plan of a tp and pp: tokens/s/GPU; None where every one that was asked for is refused."""

    value: float | None
    fits: bool = True


Panel = Mapping[tuple[int, int], Cell]  # (tp, pp) -> its best plan; what is missing was not simulated


class Maps(NamedTuple):
    """A panel per setting of data parallelism. unit: what is counted of what plans train on."""

    panels: Mapping[str, Panel]
    unit: str = "tokens"


@figure("heatmap")
def heatmap(data: Maps) -> Figure:
    """A map of tp × pp per setting of data parallelism: tokens/s/GPU in each cell, one scale of colours for all maps.

    Hatched: out of memory. Grey: refused. Empty: not simulated. A star: the best of all that fits.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = data.panels
    tps, pps = (sorted({key[place] for panel in panels.values() for key in panel}) for place in range(2))
    values = [cell.value for panel in panels.values() for cell in panel.values() if cell.value is not None]
    shades = ScalarMappable(Normalize(min(values, default=0.0), max(values, default=1.0)), "cividis")
    across = min(ACROSS if len(pps) < MANY else 2, len(panels))
    down = -(-len(panels) // across)
    size = across * (1.1 + 0.62 * len(pps)) + 1.0, down * (0.9 + 0.42 * len(tps)) + 0.6
    drawn = Figure(figsize=(max(7.2, size[0]), max(2.6, size[1])), layout="constrained")
    grid = drawn.subplots(down, across, squeeze=False)
    ranked = [(cell.value, name, at) for name, panel in panels.items() for at, cell in panel.items() if cell.value and cell.fits]
    best = max(ranked, default=(0.0, "", (0, 0)))[1:]
    for place, ax in enumerate(grid.flat):
        if place >= len(panels):
            ax.set_axis_off()
            continue
        name = list(panels)[place]
        _map(ax, panels[name], (tps, pps), shades, best[1] if best[0] == name else None)
        ax.set_title(name)
    drawn.colorbar(shades, ax=grid, label=f"{data.unit}/s/GPU", shrink=0.9)
    cells = [panel.get((tp, pp)) for panel in panels.values() for tp in tps for pp in pps]
    marks: dict[str, dict[str, Any]] = {
        "out of memory": {"facecolor": LIGHT, "edgecolor": DARK, "hatch": "////"},
        "refused (–)": {"facecolor": GREY},
        "not simulated": {"facecolor": WHITE, "edgecolor": GREY},
    }
    there = any(c and c.value is not None and not c.fits for c in cells), any(c and c.value is None for c in cells), None in cells
    handles = [Patch(label=name, **look) for (name, look), present in zip(marks.items(), there, strict=True) if present]
    if handles:
        drawn.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return drawn


def _map(ax: Axes, panel: Panel, sides: tuple[list[int], list[int]], shades: object, best: tuple[int, int] | None) -> None:
    """One map: tp downwards, pp to the right."""
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    tps, pps = sides
    for y, tp in enumerate(tps):
        for x, pp in enumerate(pps):
            cell = panel.get((tp, pp))
            known = cell is not None and cell.value is not None
            colour = WHITE if cell is None else GREY if not known else LIGHT
            text, text_colour = "" if cell is None else "–", DARK
            if cell is not None and cell.value is not None:
                text = count(cell.value)
                if cell.fits:
                    colour = to_hex(shades.to_rgba(cell.value))  # type: ignore[attr-defined]
                    text_colour = ink(colour)
            hatch = "////" if known and cell is not None and not cell.fits else None
            ax.add_patch(
                Rectangle(
                    (x - 0.5, y - 0.5),
                    1,
                    1,
                    facecolor=colour,
                    edgecolor=DARK if hatch else WHITE,
                    hatch=hatch,
                    linewidth=0 if hatch else 1,
                )
            )
            box = {"facecolor": LIGHT, "edgecolor": "none", "pad": 1.0} if hatch else None
            star = best == (tp, pp)
            ax.text(
                x,
                y,
                ("★ " if star else "") + text,
                ha="center",
                va="center",
                fontsize=8.5,
                color=text_colour,
                bbox=box,
                fontweight="bold" if star else "normal",
            )
    ax.set(xlim=(-0.5, len(pps) - 0.5), ylim=(len(tps) - 0.5, -0.5), xlabel="pp", ylabel="tp")
    ax.set_xticks(range(len(pps)), [str(pp) for pp in pps])
    ax.set_yticks(range(len(tps)), [str(tp) for tp in tps])
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set(visible=True, color=GREY)
