"""What each stage holds at its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.figures import DARK, MEMORY, RED, canvas, figure
from reports.formatting import KINDS, gigabytes, held, stages
from sim.analysis.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@figure("memory")
def memory(summary: Summary) -> Figure:
    """Peak memory of each stage by kind, and the GPU's capacity."""
    entries = stages(summary)
    drawn, ax = canvas(7.2, 3.6)
    bottom = [0.0] * len(entries)
    for kind in KINDS:
        sizes = [held(entry)[kind] / 1e9 for entry in entries]
        if any(sizes):
            ax.bar(
                range(len(entries)),
                sizes,
                bottom=bottom,
                width=0.7,
                color=MEMORY[kind],
                edgecolor=DARK,
                linewidth=0.5 if len(entries) <= 32 else 0,
                label=kind,
            )
        bottom = [low + more for low, more in zip(bottom, sizes, strict=True)]
    capacity = summary.memory_capacity / 1e9
    highest = max(*bottom, capacity) * 1.1
    ax.axhline(capacity, color=RED, linestyle="--", linewidth=1.5)
    if len(entries) <= 16:
        for x, entry in enumerate(entries):
            ax.text(x, bottom[x] + 0.01 * highest, gigabytes(entry.peak), ha="center", va="bottom", fontsize=9)
    names = [f"stage {entry.stage}" if len(entries) <= 8 else str(entry.stage) for entry in entries]
    every = max(1, -(-len(entries) // 16))
    ax.set_xticks(range(0, len(entries), every), names[::every])
    room = max(0.0, (4 - len(entries)) / 2)
    ax.set(xlim=(-0.6 - room, len(entries) - 0.4 + room), ylim=(0, highest), ylabel="GB")
    named, across = f"capacity {gigabytes(summary.memory_capacity)} GB", ax.get_yaxis_transform()
    ax.text(1.0, capacity + 0.01 * highest, named, color=RED, fontsize=9, ha="right", va="bottom", transform=across)
    ax.set_xlabel("" if len(entries) <= 8 else "stage")
    ax.set_title("Peak memory of one GPU")
    handles, labels = ax.get_legend_handles_labels()
    drawn.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=9)
    return drawn
