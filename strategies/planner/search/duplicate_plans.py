"""Combinations that are one plan told in several ways: where a degree is 1, how its ranks work together means nothing.

Of such twins the one that leaves these fields at their defaults stands for all. Schedules of a pipeline without a second stage do
not play alike (gpipe keeps more activations), but they are no pipelines, and left out where there is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.grid import ORDER
from strategies.frameworks import kernel_set
from strategies.plan.plan import Plan
from strategies.planner.search.space import Axis, column
from strategies.schedules import schedules

Ids = NDArray[np.int64]
# Fields, and what must be there (of axes: more than one rank) for any of them to mean something.
SHARED = "dp", "cp", "offload", "copies", "fsdp"
MEANING = {
    "schedule": ("pp",),
    "chunks": ("pp",),
    "overlap_p2p": ("pp",),
    "scatter_gather": ("pp",),
    "sequence_parallel": ("tp",),
    "overlap_tp": ("tp",),
    "cp_method": ("cp",),
    "data_parallel": SHARED,
    "reshard": SHARED,
    "shard": SHARED,
    "overlap": SHARED,
    "bucket": SHARED,
}


def twins(plan: Plan, gpus: int, axes: Sequence[Axis], choices: Sequence[Ids]) -> list[Ids]:
    """The choices, by axis, of the plainest of each combination's twins, its own if it has none.

    plan: what holds where no axis says otherwise; choices: of each axis, which choice each combination has.
    """
    many = _many(plan, gpus, axes, choices)
    return [
        _order(axis, chosen, many) if axis.name == "plan.order" else _plain(plan, axis, chosen, many)
        for axis, chosen in zip(axes, choices, strict=True)
    ]


def _many(plan: Plan, gpus: int, axes: Sequence[Axis], choices: Sequence[Ids]) -> dict[str, NDArray[np.bool_]]:
    """Of each combination, which degrees are more than 1, and what else may be shared or sharded: states outside of the GPUs,
    copies of stages, parameters whose strategy matters on one rank, too (PyTorch's FSDP keeps fp32 masters alone; zero3 casts to
    fp8 in every microbatch).
    """
    count = len(choices[0])
    degree = {name: column(name, plan, axes, choices, count) for name in ("tp", "cp", "ep", "pp")}
    degree["dp"] = gpus // (degree["tp"] * degree["cp"] * degree["pp"])

    def is_so(field: str, test: Callable[[Any], bool]) -> NDArray[np.bool_]:
        result = np.full(count, test(getattr(plan, field)))
        for axis, chosen in zip(axes, choices, strict=True):
            if field in axis.fields:
                says = np.array([f"plan.{field}" in choice for choice in axis.choices])
                value = np.array([says[i] and test(choice[f"plan.{field}"]) for i, choice in enumerate(axis.choices)])
                result = np.where(says[chosen], value[chosen], result)
        return result

    return {name: values > 1 for name, values in degree.items()} | {
        "offload": is_so("offload", bool),
        "copies": is_so("schedule", lambda name: schedules[name].copies > 1) & (degree["pp"] > 1),
        "fsdp": is_so("fp8", bool) | is_so("kernels", lambda name: kernel_set(name).of_pytorch),
    }


def _plain(plan: Plan, axis: Axis, chosen: Ids, many: Mapping[str, NDArray[np.bool_]]) -> Ids:
    """The choice of defaults in place of those that mean nothing."""
    fields = axis.fields
    if not fields <= MEANING.keys():
        return chosen
    default = {field: Plan.model_fields[field].default for field in fields}
    values = [{field: choice.get(f"plan.{field}", getattr(plan, field)) for field in fields} for choice in axis.choices]
    if default not in values:
        return chosen
    means = np.logical_or.reduce([many[name] for field in fields for name in MEANING[field]])
    return np.where(means, chosen, values.index(default))


def _order(axis: Axis, chosen: Ids, many: Mapping[str, NDArray[np.bool_]]) -> Ids:
    """The first of the orders that differ only in axes of degree 1."""
    key = sum((many[name].astype(np.int64) << bit for bit, name in enumerate(ORDER)), np.zeros_like(chosen))
    first = np.zeros((1 << len(ORDER), len(axis.choices)), dtype=np.int64)
    for present in np.unique(key).tolist():
        names = {name for bit, name in enumerate(ORDER) if present >> bit & 1}
        seen: dict[tuple[str, ...], int] = {}
        for number, choice in enumerate(axis.choices):
            order = tuple(name for name in choice["plan.order"].split("-") if name in names)
            first[present, number] = seen.setdefault(order, number)
    result: Ids = first[key, chosen]
    return result
