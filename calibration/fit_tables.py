"""Tables of measured collectives: sizes interpolated, with the error on sizes that were left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibration.collective_rows import Row
from calibration.samples import Merged
from sim.tables import CollectiveTable, Entry

GLOO = {  # what gloo runs (its sources; counted on its sockets); its reduce-scatter is a whole all-reduce inside
    "all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "broadcast": "binomial", "reduce": "chain",
    "all_to_all": "direct", "gather": "flat", "scatter": "flat", "send": "direct", "barrier": "dissemination",
}  # fmt: skip


class Point(NamedTuple):
    """A price beside the measurement that was not used for it; bytes of the full buffer, seconds."""

    series: str
    bytes: float
    measured: float
    predicted: float
    heldout: bool

    @property
    def error(self) -> float:
        """Predicted over measured − 1."""
        return self.predicted / self.measured - 1


def collectives(merged: Iterable[Merged]) -> dict[tuple[str, int, int], dict[str, dict[float, float]]]:
    """(operation, ranks, nodes) -> context -> bytes -> seconds."""
    found: dict[tuple[str, int, int], dict[str, dict[float, float]]] = {}
    for one in merged:
        if one.part == "collective":
            key = str(one.case["operation"]), int(one.case["ranks"]), int(one.case["nodes"])
            found.setdefault(key, {}).setdefault(one.context, {})[float(one.case["bytes"])] = one.value
    return found


def tables(merged: Iterable[Merged]) -> list[CollectiveTable]:
    """A table of each series that was measured in both contexts."""
    result = []
    for (operation, ranks, nodes), contexts in collectives(merged).items():
        step, alone = (contexts.get(name, {}) for name in ("step", "alone"))
        entries = tuple(Entry.model_construct(bytes=at, step=step[at], alone=alone[at]) for at in sorted(set(step) & set(alone)))
        if entries:
            made: dict[str, Any] = {
                "operation": operation,
                "algorithm": GLOO[operation],
                "ranks": ranks,
                "nodes": nodes,
                "prices": entries,
            }
            result.append(CollectiveTable.model_construct(**made))
    return result


def leave_out(table: CollectiveTable) -> list[Point]:
    """Every other size of a table, but never its ends, priced by the others."""
    left = table.prices[1:-1:2]
    rest = table.model_copy(update={"prices": tuple(entry for entry in table.prices if entry not in left)})
    name = f"{table.operation} {table.ranks}" + (f" on {table.nodes} nodes" if table.nodes > 1 else "")
    return [
        Point(name, entry.bytes, entry.step, (rest if entry in left else table).seconds(entry.bytes), entry in left)
        for entry in table.prices
    ]


def rows(merged: Iterable[Merged]) -> list[Row]:
    """In-step prices for the formula that takes over where no table is: sizes of more than a few bytes."""
    return [
        Row(f"{operation} {ranks} {nodes}", operation, ranks, nodes, size, seconds)
        for (operation, ranks, nodes), contexts in collectives(merged).items()
        if operation != "barrier"
        for size, seconds in sorted(contexts.get("step", {}).items())
    ]


def errors(points: Sequence[Point]) -> dict[str, float]:
    """Median of the absolute errors on left-out sizes by series, and over all of them the median and 90th percentile."""
    found: dict[str, list[float]] = {}
    for point in points:
        if point.heldout:
            found.setdefault(point.series, []).append(abs(point.error))
    every = [error for those in found.values() for error in those]
    result = {name: float(np.median(those)) for name, those in found.items()}
    return result | ({"all": float(np.median(every)), "p90": float(np.quantile(every, 0.9))} if every else {})
