"""Multiples of what a job has, as `nodes=x2` or `cluster.node.nic=x0.5`, turned into values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, BeforeValidator

from strategies.planner.search.space import Axis
from strategies.resilience.settings import RunSettings
from topologies.costs import mean_rates
from topologies.documents.units import duration, flops, rate, seconds, show, size
from topologies.reading import UserError

if TYPE_CHECKING:
    from strategies.job import Job

_MULTIPLE = re.compile(r"[x×](\d+\.?\d*|\.\d+)")
_UNITS = {size: "B", rate: "B/s", seconds: "s", duration: "s", flops: "FLOP/s"}


def absolute(axis: Axis, job: Job, price: float | None = None) -> Axis:
    """The axis with values in place of multiples. Raises UserError for a multiple of what is no number."""
    return replace(
        axis,
        choices=tuple({field: _value(field, value, job, price) for field, value in choice.items()} for choice in axis.choices),
    )


def own_value(field: str, job: Job, price: float | None = None) -> Any:
    """The number that the job has for a field, as it is written; None where it is no number."""
    try:
        (choice,) = absolute(Axis(field, ({field: "x1"},)), job, price).choices
    except UserError:
        return None
    return choice[field]


def rounded(axis: Axis, job: Job) -> Iterator[str]:
    """What is to be said of multiples of nodes that are no whole number."""
    for choice in axis.choices:
        match = _MULTIPLE.fullmatch(str(choice.get("nodes")))
        if match and not (exact := job.cluster.nodes * float(match[1])).is_integer():
            yield f"nodes={choice['nodes']}: {job.cluster.nodes} times {match[1]} is {exact:g}, rounded to {round(exact)}"


def _value(field: str, value: Any, job: Job, price: float | None) -> Any:
    match = _MULTIPLE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        return value
    own, unit = _own(field, job, price)
    if isinstance(own, bool) or not isinstance(own, int | float):
        what = "not set" if own is None else repr(own) if isinstance(own, bool | str) else "no number"
        raise UserError(f"--vary {field}={value}: {field} is {what} here, of which there is no multiple")
    result = own * float(match[1])
    if unit:
        return show(result, unit, 6)
    if isinstance(own, float):
        return result
    if result < 1 or not (result.is_integer() or field == "nodes"):  # nodes are rounded: see `rounded`
        raise UserError(f"--vary {field}={value}: {field}={own} times {match[1]} is no whole number of at least 1")
    return round(result)


def _own(field: str, job: Job, price: float | None) -> tuple[Any, str]:
    """What the job has, and the unit that it is written in."""
    if field == "price":
        return mean_rates(job.cluster, price).usd, ""
    room, _, rest = ("cluster.nodes" if field == "nodes" else field).partition(".")
    resolved = job.resolve()
    filled = {"sequence": resolved.sequence, "global_batch": resolved.global_batch, "accumulation": resolved.microbatches}
    if room == "plan" and rest in filled:
        return filled[rest], ""
    here: Any = {
        "plan": job.plan,
        "model": job.model,
        "cluster": job.cluster,
        "run": (job.run or RunSettings()).on(job.cluster),
    }.get(room)
    annotation: Any = None
    for name in rest.split("."):
        if isinstance(here, Mapping) and name in here:
            here = here[name]
        elif isinstance(here, BaseModel) and name in type(here).model_fields:
            known = type(here).model_fields[name]
            annotation, here = (known.annotation, *known.metadata), getattr(here, name)
        else:
            return None, ""
    return here, _unit(annotation)


def _unit(annotation: Any) -> str:
    """The unit of a field by how it is read; "" of a plain number."""
    if isinstance(annotation, BeforeValidator):
        return next((unit for reader, unit in _UNITS.items() if annotation.func is reader), "")
    inside = annotation if isinstance(annotation, tuple) else (*get_args(annotation), *getattr(annotation, "__metadata__", ()))
    return next(filter(None, map(_unit, inside)), "")
