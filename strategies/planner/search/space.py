"""The space of a search: axes, each with the choices of one field or of several that go together.

As YAML, an axis is the list of a field's values; a choice that is a mapping sets several fields at once:

plan.tp: [1, {plan.tp: 8, plan.sequence_parallel: true}]
plan.schedule: [1f1b, {plan.schedule: interleaved, plan.chunks: 4}]
nodes: [256, 512]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.frameworks import sets_with
from strategies.job import FIELDS, Job
from strategies.plan.plan import SEQUENCE, Plan
from strategies.planner.tiles import with_tiles
from strategies.schedules import schedules
from topologies.reading import UserError, load_yaml, nearest, parse_value, plain, shown

Ids = NDArray[np.int64]
Changes = Mapping[str, Any]  # field, as `--set` names it -> value
MOST = 20_000_000  # combinations
LONGEST = 4096  # values of an axis
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Axis:
    """One thing that varies. `name` is the field that it is listed under."""

    name: str
    choices: tuple[Changes, ...]

    @property
    def fields(self) -> frozenset[str]:
        """The fields that its choices set; those of the plan without "plan."."""
        return frozenset(field.removeprefix("plan.") for choice in self.choices for field in choice)

    @property
    def of_plan(self) -> bool:
        """Whether it changes the plan only; otherwise the cluster, the model or the prices."""
        return all(field.startswith("plan.") for choice in self.choices for field in choice)


@dataclass(frozen=True)
class Space:
    """The product of its axes."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Number of combinations."""
        return math.prod(len(axis.choices) for axis in self.axes)

    @property
    def plan_axes(self) -> tuple[Axis, ...]:
        """Those that change the plan."""
        return tuple(axis for axis in self.axes if axis.of_plan)

    def sites(self) -> Iterator[dict[str, Any]]:
        """Every combination of what changes the cluster, the model or the prices."""
        others = [axis.choices for axis in self.axes if not axis.of_plan]
        for chosen in product(*others):
            yield {field: value for choice in chosen for field, value in choice.items()}

    def varied(self, others: Iterable[Axis]) -> Space:
        """The same with `others` in place of the axes that name one of their fields first, or added."""
        axes = list(self.axes)
        for other in others:
            at = next((i for i, axis in enumerate(axes) if axis.name == other.name), len(axes))
            axes[at : at + 1] = [other]
        return Space(tuple(axes))

    def without(self, fields: Iterable[str]) -> Space:
        """The same with these fields left as the job has them."""
        fixed = set(fields)
        return Space(tuple(axis for axis in self.axes if axis.name not in fixed))


def column(field: str, plan: Plan, axes: Sequence[Axis], choices: Sequence[Ids], count: int) -> Ids:
    """A field of each of `count` combinations as a number: of what is none, 1 where there is something and 0 where not.

    plan: where no axis says otherwise; choices: of each axis, the number of each combination's choice.
    """
    result = np.full(count, _number(getattr(plan, field)), dtype=np.int64)
    for axis, chosen in zip(axes, choices, strict=True):
        if field in axis.fields:
            says = np.array([f"plan.{field}" in choice for choice in axis.choices])
            table = np.array([_number(choice.get(f"plan.{field}")) for choice in axis.choices], dtype=np.int64)
            result = np.where(says[chosen], table[chosen], result)
    return result


def _number(value: Any) -> int:
    return value if isinstance(value, int) else int(value is not None)


def read_space(data: Mapping[str, Any], where: str) -> Space:
    """A space as YAML describes it. Raises UserError for what is no axis."""
    return Space(tuple(_axis(str(name), values, where) for name, values in data.items()))


def load_space(path: str) -> Space:
    """The space in a YAML file."""
    return read_space(load_yaml(Path(path)), path)


def parse_axis(text: str) -> Axis:
    """`plan.tp=1,2,4` or `plan.tp=[1, {…}]` as on the command line."""
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise UserError(f"--vary {text}: expected FIELD=VALUE,VALUE,…, such as plan.tp=1,2,4,8")
    where = f"--vary {text}"
    return _axis(name, parse_value(values if values.startswith("[") else f"[{values}]", where), where)


def known_field(field: str, where: str) -> None:
    """Raises UserError, with the nearest name, for what is no field of a job or of its plan, nor the price."""
    root, _, rest = field.partition(".")
    if field == "price":
        return
    if root not in FIELDS or root == "name":
        raise UserError(f"{where}: unknown field '{field}'{nearest(root, FIELDS)}")
    name = rest.partition(".")[0]
    if root == "plan" and sets_with([name]):
        raise UserError(f"{where}: {field} is an option of the framework: name values of plan.framework, such as {{{name}: …}}")
    if root == "plan" and name not in Plan.model_fields:
        hint = nearest(rest, Plan.model_fields).replace("mean '", "mean 'plan.")  # to be pasted as it is
        raise UserError(f"{where}: unknown field '{field}'{hint}")


def _axis(name: str, values: Any, where: str) -> Axis:
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}: {name}={shown(values)}: expected a list of at least one value")
    if len(values) > LONGEST:
        raise UserError(f"{where}: {name}: has {len(values):,} values, more than {LONGEST:,}")
    choices: list[Changes] = []
    for value in values:
        choice = {str(k): v for k, v in value.items()} if _several(value) else {name: value}
        for field in choice:
            known_field(field, where)
        if name == "plan.tp" and "plan.sequence_parallel" not in choice and isinstance(value, int):
            choice["plan.sequence_parallel"] = value > 1  # it goes with tensor parallelism unless an axis says otherwise
        if choice in choices:
            raise UserError(f"{where}: {name} has {shown(value)} twice")
        choices.append(choice)
    return Axis(name, tuple(choices))


def _several(value: Any) -> bool:
    return isinstance(value, Mapping) and all(str(field).split(".")[0] in (*FIELDS, "price") for field in value)


def default_space(job: Job) -> Space:
    """What people vary: degrees up to a node's GPUs (tp), the layers (pp), the experts (ep); schedules, microbatches,
    recomputation, what dp ranks shard, whether pipeline neighbours are placed nearer than dp neighbours, whether gradients and
    parameters travel beside compute, and what lies on the CPUs; matrices in tiles where the largest layer needs them; on each
    axis also what the job says.
    """
    model, cluster = job.model, job.cluster
    tp = [{"plan.tp": d, "plan.sequence_parallel": d > 1} for d in doubling(min(cluster.node.gpus, model.heads))]
    longest = max(8, job.plan.sequence_of(model) // SEQUENCE)  # ranks that share a sequence, with SEQUENCE tokens each
    contexts = doubling(min(longest, cluster.gpus)) if model.latent is None and job.plan.fused_attention else [1]
    orders = [_schedule("1f1b"), *(_schedule("interleaved", chunks) for chunks in (2, 4, 8))]
    orders += [_schedule(name) for name in ("zb-h1", "zb-v")] + [_schedule("interleaved-zb", 2)]
    sharding = [_sharding(name) for name in ("ddp", "zero1", "zero2", "zero3")] + [_sharding("zero3", reshard=False)]
    if 1 < cluster.node.gpus < cluster.gpus:
        sharding.append(_sharding("zero3", shard=cluster.node.gpus))
    axes: dict[str, Sequence[Changes]] = {
        "plan.tp": tp,
        "plan.pp": _each("plan.pp", doubling(min(model.layers, cluster.gpus))),
        "plan.cp": _each("plan.cp", contexts),
        "plan.ep": _each("plan.ep", doubling(model.experts.experts) if model.experts else [1]),
        "plan.schedule": orders,
        "plan.microbatch": _each("plan.microbatch", MICROBATCHES),
        "plan.recompute": _each("plan.recompute", ["none", "selective", "full"]),
        "plan.data_parallel": sharding,
        "plan.order": _each("plan.order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]),
        "plan.overlap": _each("plan.overlap", [True, False]),
        "plan.offload": _places(job),
    }
    if tiled := with_tiles(job):
        axes["plan.deepspeed"] = _each("plan.deepspeed", [None, tiled])
    return Space(tuple(Axis(name, tuple(_with_own(job.plan, choices))) for name, choices in axes.items()))


def _with_own(plan: Plan, choices: Sequence[Changes]) -> list[Changes]:
    """Choices of one axis, and what the plan says of its fields if none of them is that."""
    fields = dict.fromkeys(field for choice in choices for field in choice)
    said = {field: plain(getattr(plan, field.removeprefix("plan."))) for field in fields}
    if said.get("plan.chunks", 0) is None and schedules[plan.schedule].chunks is None:
        said["plan.chunks"] = 2  # its default
    every = [{field: plain(value) for field, value in choice.items()} for choice in choices]
    return [*choices, *([said] if said not in every else [])]


def _places(job: Job) -> list[Changes]:
    """What may be kept outside of the GPUs: nothing, and states on the CPUs if there are any."""
    places: list[Any] = [None]
    if job.cluster.topology().cpu is not None:
        places += [{"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}]
    return _each("plan.offload", places)


def _each(field: str, values: Iterable[Any]) -> list[Changes]:
    return [{field: value} for value in values]


def doubling(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [2**i for i in range(most.bit_length())]


def _schedule(name: str, chunks: int | None = None) -> Changes:
    return {"plan.schedule": name, "plan.chunks": chunks}


def _sharding(name: str, reshard: bool = True, shard: int | None = None) -> Changes:
    return {"plan.data_parallel": name, "plan.reshard": reshard, "plan.shard": shard}
