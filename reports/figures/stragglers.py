"""Which workers of a job are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reports.figures import figure, ink
from sim.replay.graph import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from calibration.stragglers.analysis import Analysis

NUMBERED = 16  # dp ranks or stages up to which cells have their numbers


@figure("stragglers")
def stragglers(analysis: Analysis) -> Figure:
    """A map of dp rank × stage: the score of each worker, the smaller slowdown of its dp rank alone and its stage alone; of ranks
    where nothing else is known.
    """
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    scores, stages, columns = _scores(analysis)
    size = max(6.0, min(14.0, 2.5 + 0.6 * len(columns))), max(2.6, 1.2 + 0.45 * len(stages))
    drawn = Figure(figsize=size, layout="constrained")
    ax = drawn.subplots()
    image = ax.imshow(scores, cmap="cividis", vmin=1.0, vmax=max(1.05, float(scores.max())), aspect="auto")
    if max(scores.shape) <= NUMBERED:
        for (y, x), score in np.ndenumerate(scores):
            colour = ink(to_hex(image.to_rgba(score)))  # type: ignore[arg-type]
            ax.text(x, y, f"{score:.2f}", ha="center", va="center", fontsize=8.5, color=colour)
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(stages)), stages)
    axes = ("dp rank", "stage") if analysis.stages else ("rank", "")
    ax.set(xlabel=axes[0], ylabel=axes[1], title=f"stragglers make a step {analysis.slowdown:.2f} times as long")
    ax.tick_params(length=0)
    drawn.colorbar(image, ax=ax, label="slowdown by the worker")
    return drawn


def _scores(analysis: Analysis) -> tuple[Floats, list[str], list[str]]:
    """(score of each worker, names of rows, names of columns)."""
    if not analysis.stages:
        workers = sorted(analysis.workers, key=lambda worker: worker.rank)
        return np.array([[worker.score for worker in workers]]), [""], [worker.name for worker in workers]
    stages, dp_ranks = (sorted(parts, key=lambda part: int(part.name)) for parts in (analysis.stages, analysis.dp_ranks))
    scores = np.minimum.outer([part.slowdown for part in stages], [part.slowdown for part in dp_ranks])
    return scores, [part.name for part in stages], [part.name for part in dp_ranks]
