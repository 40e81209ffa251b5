"""What the GPU that holds most holds over the step, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reports.figures import MEMORY, RED, canvas, figure, time_unit
from reports.figures.timeline_bars import played_as
from reports.formatting import gigabytes
from sim.analysis.memory import Ledger, ledger, tensor_capacity
from sim.program import MEMORY_KINDS
from sim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.pricing.transfers.path_latency import Floats

SMALL = 0.3  # of the room: what holds less is drawn at its own scale
MOMENTS = 1500  # drawn of longer ledgers: the fullest of each of so many slices of time


@figure("memory over time")
def memory_over_time(timeline: Timeline) -> Figure:
    """A stack of what one lane holds, over the step, and the GPU's capacity without context and reserve."""
    books = [ledger(timeline, lane) for lane in range(len(timeline.lanes))]
    lane = max(range(len(books)), key=lambda number: books[number].peak)
    times, held = thinned(books[lane], timeline.step)
    unit, name = time_unit(timeline.step)
    drawn, ax = canvas(12, 3.4)
    used = [place for place in range(len(MEMORY_KINDS)) if held[:, place].any()]
    kinds = [MEMORY_KINDS[place] for place in used]
    ax.stackplot(times * unit, (held[:, used] / 1e9).T, colors=[MEMORY[kind] for kind in kinds], labels=kinds, step="post")
    free = tensor_capacity(timeline)
    top, above = max(free, books[lane].peak), ""
    if books[lane].peak < SMALL * free:  # too flat to be read otherwise
        top, above = 1.15 * books[lane].peak, ", far above"
    ax.axhline(free / 1e9, color=RED, linestyle="--", linewidth=1.5, label=f"room for tensors {gigabytes(free)} GB{above}")
    moment, op = books[lane].when
    ax.annotate(
        f"peak during {op}",
        (max(0.0, moment) * unit, books[lane].peak / 1e9),
        (0, 6),
        textcoords="offset points",
        ha="left" if moment < timeline.step / 2 else "right",
        fontsize=9,
    )
    ax.set(xlim=(0, timeline.step * unit), ylim=(0, 1.15 * top / 1e9), ylabel="GB", xlabel=f"time ({name})")
    ax.set_title(f"What a GPU of stage {timeline.stage(lane)} holds over the step{played_as(timeline)}")
    handles, labels = ax.get_legend_handles_labels()
    drawn.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=9)
    return drawn


def thinned(book: Ledger, step: float) -> tuple[Floats, Floats]:
    """Times (t,) and bytes by kind (t, kinds) with at most some MOMENTS moments; a peak is never left out."""
    times, held = np.clip(book.times, 0, step), book.held
    if len(times) > MOMENTS:
        total, slot = held.sum(axis=1), np.minimum((times / step * MOMENTS).astype(int), MOMENTS - 1)
        order = np.lexsort((-total, slot))
        kept = np.sort(order[np.unique(slot[order], return_index=True)[1]])
        times, held = times[kept], held[kept]
    return np.append(times, step), np.vstack([held, held[-1]])
