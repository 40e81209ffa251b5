"""Combinations that are one plan told in several ways: where a degree is 1, how its ranks work together means nothing.

Of such twins the one that leaves these fields at their defaults stands for all: no pipeline is interleaved on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.grid import ORDER
from strategies.plan import Plan
from strategies.search.space import Axis, column

Ids = NDArray[np.int64]
# Fields, and what must be more than 1 (offload: anything) for any of them to mean something.
MEANING = {
    "schedule": ("pp",), "chunks": ("pp",), "overlap_p2p": ("pp",), "scatter_gather": ("pp",), "sequence_parallel": ("tp",),
    "overlap_tp": ("tp",), "cp_method": ("cp",), "data_parallel": ("dp", "cp", "offload"), "reshard": ("dp", "cp", "offload"),
    "shard": ("dp", "cp", "offload"), "overlap": ("dp", "cp", "offload"), "bucket": ("dp", "cp", "offload"),
}  # fmt: skip


def twins(plan: Plan, gpus: int, axes: Sequence[Axis], choices: Sequence[Ids]) -> Ids:
    """Of each combination, the number of the plainest of its twins among the combinations, itself if it has none.

    plan: what holds where no axis says otherwise; choices: of each axis, which choice each combination has. Combinations are
    numbered as np.ravel_multi_index does it.
    """
    many = _many(plan, gpus, axes, choices)
    plainest = [
        _order(axis, chosen, many) if axis.name == "plan.order" else _plain(plan, axis, chosen, many)
        for axis, chosen in zip(axes, choices, strict=True)
    ]
    result: Ids = np.ravel_multi_index(plainest, [len(axis.choices) for axis in axes]).astype(np.int64)
    return result


def _many(plan: Plan, gpus: int, axes: Sequence[Axis], choices: Sequence[Ids]) -> dict[str, NDArray[np.bool_]]:
    """Of each combination, which degrees are more than 1, and whether anything is offloaded."""
    degree = {name: column(name, plan, axes, choices, len(choices[0])) for name in ("tp", "cp", "ep", "pp")}
    degree["dp"] = gpus // (degree["tp"] * degree["cp"] * degree["pp"])
    many = {name: values > 1 for name, values in degree.items()}
    return many | {"offload": column("offload", plan, axes, choices, len(choices[0])) > 0}


def _plain(plan: Plan, axis: Axis, chosen: Ids, many: Mapping[str, NDArray[np.bool_]]) -> Ids:
    """The choice of defaults in place of those that mean nothing."""
    fields = axis.fields
    if not fields <= MEANING.keys():
        return chosen
    default = {field: Plan.model_fields[field].default for field in fields}
    told = [{field: choice.get(f"plan.{field}", getattr(plan, field)) for field in fields} for choice in axis.choices]
    if default not in told:
        return chosen
    means = np.logical_or.reduce([many[name] for field in fields for name in MEANING[field]])
    return np.where(means, chosen, told.index(default))


def _order(axis: Axis, chosen: Ids, many: Mapping[str, NDArray[np.bool_]]) -> Ids:
    """The first of the orders that differ only in axes of degree 1."""
    key = sum((many[name].astype(np.int64) << bit for bit, name in enumerate(ORDER)), np.zeros_like(chosen))
    first = np.zeros((1 << len(ORDER), len(axis.choices)), dtype=np.int64)
    for present in np.unique(key).tolist():
        names = {name for bit, name in enumerate(ORDER) if present >> bit & 1}
        seen: dict[tuple[str, ...], int] = {}
        for number, choice in enumerate(axis.choices):
            told = tuple(name for name in choice["plan.order"].split("-") if name in names)
            first[present, number] = seen.setdefault(told, number)
    result: Ids = first[key, chosen]
    return result
