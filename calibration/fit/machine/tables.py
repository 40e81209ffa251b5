"""Tables of measured collectives: sizes interpolated, with the error on sizes that were left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibration.fit.published_collectives.rows import Row
from calibration.samples import Merged
from sim.pricing.transfers.measured_tables import CollectiveTable, Entry

GLOO = {  # what gloo runs (its sources; counted on its sockets); its reduce-scatter is a whole all-reduce inside
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "broadcast": "binomial",
    "reduce": "chain",
    "all_to_all": "direct",
    "gather": "flat",
    "scatter": "flat",
    "send": "direct",
    "barrier": "dissemination",
}


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
    sizes: dict[tuple[str, int, int], dict[str, dict[float, float]]] = {}
    for sample in merged:
        if sample.part == "collective" and "dtype" not in sample.case:
            key = str(sample.case["operation"]), int(sample.case["ranks"]), int(sample.case["nodes"])
            sizes.setdefault(key, {}).setdefault(sample.context, {})[float(sample.case["bytes"])] = sample.value
    return sizes


def tables(merged: Iterable[Merged]) -> list[CollectiveTable]:
    """A table of each series that was measured in both contexts."""
    return [_table(key, contexts, sizes) for key, contexts, sizes in _both(merged)]


Contexts = dict[str, dict[float, float]]
Key = tuple[str, int, int]


def _both(merged: Iterable[Merged]) -> Iterator[tuple[Key, Contexts, list[float]]]:
    for key, contexts in collectives(merged).items():
        sizes = sorted(set(contexts.get("step", {})) & set(contexts.get("alone", {})))
        if sizes:
            yield key, contexts, sizes


def _table(key: Key, contexts: Contexts, sizes: Sequence[float]) -> CollectiveTable:
    step, alone = (ascending([contexts[name][at] for at in sizes]) for name in ("step", "alone"))
    entries = tuple(Entry.model_construct(bytes=at, step=s, alone=a) for at, s, a in zip(sizes, step, alone, strict=True))
    operation, ranks, nodes = key
    fields: dict[str, Any] = {"operation": operation, "algorithm": GLOO[operation], "ranks": ranks, "nodes": nodes}
    return CollectiveTable.model_construct(prices=entries, **fields)


def ascending(seconds: Sequence[float]) -> list[float]:
    """The nearest prices (in logarithms) that never fall as sizes grow: where they do, it is noise, and neighbours share it."""
    from scipy.optimize import isotonic_regression

    return [float(value) for value in np.exp(isotonic_regression(np.log(seconds)).x)] if len(seconds) else []


def narrow_sum(merged: Sequence[Merged]) -> float:
    """Seconds by which a 16-bit number takes longer to add up than its bytes take: of all-reduces back to back, beside those of
    as many bytes of fp32; the largest group's.
    """
    known = {(table.operation, table.ranks, table.nodes): table for table in tables(merged)}
    result = 0.0
    for sample in sorted(merged, key=lambda sample: float(sample.case.get("ranks", 0))):
        ranks, size = int(sample.case.get("ranks", 0)), float(sample.case.get("bytes", 0))
        table = known.get(("all_reduce", ranks, int(sample.case.get("nodes", 1))))
        if sample.part == "collective" and sample.case.get("dtype") == "fp16" and table is not None:
            result = max(0.0, sample.value - table.seconds(size, alone=True)) / (size / 2 * (ranks - 1) / ranks)
    return result


def series_name(operation: str, ranks: int, nodes: int) -> str:
    """`"all_reduce 2"`, `"all_reduce 16 on 2 nodes"`."""
    return f"{operation} {ranks}" + (f" on {nodes} nodes" if nodes > 1 else "")


def every_other(sizes: Sequence[float]) -> set[float]:
    """Sizes of a series that are kept out, to be priced by those beside them: never its ends."""
    return set(sizes[1:-1:2])


def leave_out(merged: Iterable[Merged]) -> list[Point]:
    """What was measured in a step, by the table; every other size of a series, but never its ends, by a table without them."""
    result = []
    for key, contexts, sizes in _both(merged):
        left = every_other(sizes)
        whole, rest = _table(key, contexts, sizes), _table(key, contexts, [at for at in sizes if at not in left])
        for at in sizes:
            price = (rest if at in left else whole).seconds(at)
            result.append(Point(series_name(*key), at, contexts["step"][at], price, at in left))
    return result


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
    by_group: dict[str, list[float]] = {}
    for point in points:
        if point.heldout:
            by_group.setdefault(point.series, []).append(abs(point.error))
    every = [error for values in by_group.values() for error in values]
    result = {name: float(np.median(values)) for name, values in by_group.items()}
    return result | ({"all": float(np.median(every)), "p90": float(np.quantile(every, 0.9))} if every else {})
