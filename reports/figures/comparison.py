"""Runs beside each other: where their steps go, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reports.figures import COLOURS, DARK, HATCHES, MEMORY, RED, figure, patch, time_unit
from reports.formatting import KINDS, components, gigabytes, held, seconds
from sim.analysis.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE = 38  # letters of a name on one line


@figure("comparison")
def comparison(summaries: Mapping[str, Summary]) -> Figure:
    """Name -> summary: on the left a step by component, on the right the peak by kind; what does not fit is faint and says so."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    runs = list(summaries.values())
    names = [broken(name) for name in summaries]
    drawn = Figure(figsize=(12, 2.2 + sum(max(0.42, 0.17 * (1 + name.count("\n"))) for name in names)), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    shown = _steps(left, runs)
    kinds = _peaks(right, runs)
    left.set_yticks(range(len(runs)), names)
    left.invert_yaxis()
    for ax in (left, right):
        ax.tick_params(axis="y", length=0)
    handles = [patch(name.removesuffix(" exposed"), name) for name in shown]
    drawn.legend(handles=handles, loc="outside lower left", ncols=min(5, len(handles)), fontsize=8.5)
    blocks = [Patch(facecolor=MEMORY[kind], edgecolor=DARK, linewidth=0.5, label=kind) for kind in kinds]
    drawn.legend(handles=blocks, loc="outside lower right", ncols=4, fontsize=8.5)
    return drawn


def broken(name: str) -> str:
    """A long name on several lines, which end behind commas and spaces where they can."""
    lines = [""]
    for word in re.findall(r"[^, ]+[, ]*", name):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > LINE:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _steps(ax: Axes, runs: list[Summary]) -> list[str]:
    """Stacked bars of the step; returns the components that can be seen."""
    longest = max(run.step_seconds for run in runs)
    unit, name = time_unit(longest)
    ends, seen = [0.0] * len(runs), []
    for component in components(run.breakdown for run in runs):
        key, widths = component.removesuffix(" exposed"), [run.breakdown.get(component, 0.0) for run in runs]
        bars = ax.barh(
            range(len(runs)),
            [width * unit for width in widths],
            left=[end * unit for end in ends],
            height=0.66,
            color=COLOURS[key],
            hatch=HATCHES.get(key),
            edgecolor=DARK,
            linewidth=0.5,
        )
        for bar, run in zip(bars, runs, strict=True):
            bar.set_alpha(1.0 if run.fits else 0.35)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
        seen += [component] * (max(widths) >= 0.002 * longest)
    for y, run in enumerate(runs):
        label = seconds(run.step_seconds) + ("" if run.fits else ", does not fit")
        ax.text(run.step_seconds * unit, y, f" {label}", va="center", fontsize=9)
    ax.set(xlim=(0, 1.22 * longest * unit), xlabel=f"time per step ({name})")
    ax.set_title("Where the step goes")
    return seen


def _peaks(ax: Axes, runs: list[Summary]) -> list[str]:
    """Stacked bars of the fullest stage's peak; returns the kinds that are there."""
    ends, seen = [0.0] * len(runs), []
    for kind in KINDS:
        sizes = [held(run.worst)[kind] / 1e9 for run in runs]
        ax.barh(range(len(runs)), sizes, left=ends, height=0.66, color=MEMORY[kind], edgecolor=DARK, linewidth=0.5)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        seen += [kind] * any(sizes)
    for capacity in sorted({run.memory_capacity for run in runs}):
        ax.axvline(capacity / 1e9, color=RED, linestyle="--", linewidth=1.5)
        ax.text(
            capacity / 1e9,
            1.01,
            f"{gigabytes(capacity)} GB",
            color=RED,
            ha="center",
            va="bottom",
            fontsize=8.5,
            transform=ax.get_xaxis_transform(),
        )
    ax.set(xlabel="peak memory of the fullest GPU (GB)")
    return seen
