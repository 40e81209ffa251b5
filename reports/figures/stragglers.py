"""Which workers of a job are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reports.figures import figure, ink

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from calibration.stragglers.analysis import Analysis

NUMBERED = 16  # dp ranks or stages up to which cells have their numbers


@figure("stragglers")
def stragglers(analysis: Analysis) -> Figure:
    """A map of dp rank × stage: the score of each worker, the smaller slowdown of its dp rank alone and its stage alone."""
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    stages, dp_ranks = (sorted(parts, key=lambda part: int(part.name)) for parts in (analysis.stages, analysis.dp_ranks))
    scores = np.minimum.outer([part.slowdown for part in stages], [part.slowdown for part in dp_ranks])
    drawn = Figure(
        figsize=(max(6.0, min(14.0, 2.5 + 0.6 * len(dp_ranks))), max(2.6, 1.2 + 0.45 * len(stages))), layout="constrained"
    )
    ax = drawn.subplots()
    image = ax.imshow(scores, cmap="cividis", vmin=1.0, vmax=max(1.05, float(scores.max())), aspect="auto")
    if max(scores.shape) <= NUMBERED:
        for (y, x), score in np.ndenumerate(scores):
            colour = ink(to_hex(image.to_rgba(score)))  # type: ignore[arg-type]
            ax.text(x, y, f"{score:.2f}", ha="center", va="center", fontsize=8.5, color=colour)
        ax.set_xticks(range(len(dp_ranks)), [part.name for part in dp_ranks])
        ax.set_yticks(range(len(stages)), [part.name for part in stages])
    ax.set(xlabel="dp rank", ylabel="stage", title=f"stragglers make a step {analysis.slowdown:.2f} times as long")
    ax.tick_params(length=0)
    drawn.colorbar(image, ax=ax, label="slowdown by the worker")
    return drawn
