"""Which of several plans is the best: one order for `advise`, `compare`, `plan` and the page, ties included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.analysis.summary import Summary
from strategies.plan.plan import Plan
from topologies.reading import plain

Key = tuple[bool, float, int, float, str]
HEADROOM = 0.05  # part of a GPU's memory that a recommended plan keeps free: allocators fragment, inputs differ (assumed)
FILLED = ("dp", "sequence", "global_batch", "accumulation", "layers_per_stage")  # what `resolve` fills in is no sign of a plan


def order(fits: bool, value: float, plan: Mapping[str, Any], memory: float, identity: str) -> Key:
    """By what plans are sorted, the best first: what fits; the least value (seconds of a step, GPU-seconds of a token, dollars);
    of equals the one with fewest fields that are not at their defaults; then with least memory; then by its hash.
    """
    odd = sum(
        plain(plan[field]) != plain(info.default)
        for field, info in Plan.model_fields.items()
        if field in plan and field not in FILLED
    )
    return not fits, value, odd, memory, identity


def rank(summary: Summary, plan: Mapping[str, Any], identity: str) -> Key:
    """The place of a simulated job by GPU-seconds per token; its plan's fields, its hash."""
    return order(summary.fits, 1 / summary.tokens_per_second_per_gpu, plan, summary.worst.peak, identity)


def rank_row(row: Mapping[str, Any], value: float) -> Key:
    """The place of a row of a search or sweep, by `value`."""
    plan = {name.removeprefix("plan."): field for name, field in row["changes"].items() if name.startswith("plan.")}
    return order(bool(row["fits"]), value, plan, row["memory"], row["hash"])
