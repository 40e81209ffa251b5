"""The plans of one site (one cluster and model): a space's combinations as arrays, without those that break a rule.

A rule is what `Job.resolve` checks (see `strategies.planner.search.resolving`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.planner.applicable import stated
from strategies.planner.search.by_fields import ByFields, Columns, Ids, ResolvedPlans
from strategies.planner.search.duplicate_plans import twins
from strategies.planner.search.resolving import NEVER, Resolving
from strategies.planner.search.space import MOST, Axis, Changes, Space, column
from topologies.reading import UserError, build

T = TypeVar("T")
# Fields that change neither grid nor layers nor `strategies.planner.bounds.plan_features`, and at which rules look only where one
# of those named with them is set.
FREE: dict[str, frozenset[str]] = {
    "recompute": frozenset(
        {
            *("early_stop", "deepspeed", "offload_activations", "lora", "freeze"),
            *(name for name in Plan.model_fields if name.startswith("recompute_")),
        }
    ),
    "overlap": frozenset({"framework"}),
    "overlap_p2p": frozenset({"framework"}),
    "bucket": frozenset(),
    "algorithm": frozenset(),
    "dropout": frozenset(),
}


@dataclass
class Candidates:
    """The allowed plans of `job`'s model and cluster. Plan i has choice `choices[a][i]` on axis a and is `resolved[rule[i]]` but
    for the fields that no rule looks at.

    number: of each plan, its place in the product of the axes by name, so that neither the order of axes nor that of their values
    changes which plan comes first; dropped: of each of `resolved`, what of the job does not apply
    (`strategies.planner.applicable`); refused: reasons with counts, and for each an example; same: combinations left out because
    they are another one (`strategies.planner.search.duplicate_plans`).
    """

    job: Job
    axes: tuple[Axis, ...]
    number: Ids
    choices: list[Ids]
    rule: Ids
    columns: Columns
    dropped: list[Changes]
    refused: Counter[str]
    examples: dict[str, str]
    same: int

    def __len__(self) -> int:
        return len(self.number)

    def changes(self, plan: int) -> dict[str, Any]:
        """The fields of plan i on the axes, and those of the job that do not apply to it."""
        chosen = [axis.choices[int(column[plan])] for axis, column in zip(self.axes, self.choices, strict=True)]
        return {field: value for choice in (*chosen, self.dropped[int(self.rule[plan])]) for field, value in choice.items()}

    def job_of(self, plan: int) -> Job:
        """The job with plan i."""
        return replace(self.job, plan=changed(self.job.plan, self.changes(plan)))

    def column(self, field: str) -> Ids:
        """A field of each plan as a number (see `column`)."""
        return column(field, self.job.plan, self.axes, self.choices, len(self))

    def kinds(self, fields: frozenset[str]) -> Ids:
        """A number of each plan; plans that are alike in these fields have the same."""
        kinds = np.zeros(len(self), dtype=np.int64)
        for axis, chosen in zip(self.axes, self.choices, strict=True):
            if axis.fields & fields:
                kinds = kinds * len(axis.choices) + chosen
        return kinds

    def at_choice(self, field: str, value: Any) -> Ids:
        """Of each plan, the plan that has this value of a field and else the same fields; −1: none, or itself."""
        positions = np.full(len(self), -1, dtype=np.int64)
        without = self.lacking()[self.rule]
        for axis, chosen in zip(self.axes, self.choices, strict=True):
            if axis.fields == {field.removeprefix("plan.")} and {field: value} in axis.choices:
                stride = math.prod(len(other.choices) for other in self.axes if other.name > axis.name)
                wanted = self.number + (axis.choices.index({field: value}) - chosen) * stride
                place = np.minimum(np.searchsorted(self.number, wanted), len(self) - 1)
                there = (self.number[place] == wanted) & (wanted != self.number) & (without[place] == without)
                positions = np.where(there, place, -1)
        return positions

    @cached_property
    def resolved(self) -> ResolvedPlans:
        """What rules look at of plans, with all defaults."""
        return self.columns.resolved()

    def each(self, ask: Callable[[Resolved], T]) -> tuple[list[T], Ids]:
        """What a function makes of `resolved`: its answers in the order of the first plans that have them, and which is whose."""
        asked = ByFields(self.columns, lambda looked: ask(looked.plan))
        _, first, which = np.unique(asked.of(np.arange(len(self.dropped))), return_index=True, return_inverse=True)
        order = np.argsort(first)
        return [asked.answers[number] for number in order.tolist()], np.argsort(order)[which]

    def lacking(self, elsewhere: frozenset[str] = frozenset()) -> Ids:
        """A number of each of `resolved`; those that lack the same fields of the job, but for `elsewhere`, have the same."""
        numbers: dict[str, int] = {}
        known = {
            id(dropped): repr([change for change in dropped.items() if _field(change[0]) not in elsewhere])
            for dropped in self.dropped
        }
        return np.array([numbers.setdefault(known[id(dropped)], len(numbers)) for dropped in self.dropped], dtype=np.int64)

    @cached_property
    def microbatches(self) -> Ids:
        """Of each plan."""
        answers, which = self.each(lambda plan: plan.microbatches)
        return np.array(answers, dtype=np.int64)[which][self.rule]


def changed(plan: Plan, changes: Changes) -> Plan:
    """The plan with other values of fields; they were validated before."""
    return plan.model_copy(update={field.removeprefix("plan."): value for field, value in changes.items()})


def candidates(job: Job, space: Space) -> Candidates:
    """All plans of the space on `job`'s model and cluster. Raises UserError for values that no plan can have."""
    axes = tuple(_validated(axis) for axis in space.plan_axes)
    shape = [len(axis.choices) for axis in axes]
    count = int(np.prod(shape, dtype=np.float64))
    if count > MOST:
        raise UserError(f"the space has {count:,} combinations: more than {MOST:,} are not searched; name fewer values")
    number, by_name = np.arange(count), sorted(range(len(axes)), key=lambda i: axes[i].name)
    places = np.unravel_index(number, [shape[i] for i in by_name]) if shape else ()
    choices = [places[by_name.index(i)].astype(np.int64) for i in range(len(axes))]
    free = _free(job.plan, axes) - (frozenset({"recompute"}) if job.model.module is not None else frozenset())
    ruled = [i for i, axis in enumerate(axes) if axis.fields - free]
    keys = np.zeros(count, dtype=np.int64)
    for i in ruled:
        keys = keys * shape[i] + choices[i]
    _, first, rule = np.unique(keys, return_index=True, return_inverse=True)
    given = {field: value for axis in axes if axis.fields <= free for field, value in axis.choices[0].items()}
    asked = replace(job, plan=changed(job.plan, given))  # rules may look at which fields were given
    own = [field for field in stated(job.plan) if all(field not in axis.fields for axis in axes)]
    found = Resolving(asked, own, [axes[i] for i in ruled], [choices[i][first] for i in ruled], len(first))
    refused, examples = found.refused(np.bincount(rule, minlength=len(first)))
    allowed = (found.reason == NEVER)[rule]
    plain = twins(job.plan, job.cluster.gpus, axes, choices) if shape else []
    plainest = (
        np.ravel_multi_index([plain[i] for i in by_name], [shape[i] for i in by_name]).astype(np.int64) if shape else number
    )
    same = allowed & (plainest != number) & allowed[plainest]
    kept = allowed & ~same
    used, rule = np.unique(rule[kept], return_inverse=True)
    columns = [column[kept] for column in choices]
    groups: list[Changes] = [{f"plan.{field}": value for field, value in group.items()} for group in found.groups]
    dropped = [groups[i] for i in found.group[used].tolist()]
    return Candidates(job, axes, number[kept], columns, rule, found.columns(used), dropped, refused, examples, int(same.sum()))


def _free(plan: Plan, axes: Sequence[Axis]) -> frozenset[str]:
    """The fields at which no rule looks in this space."""
    varied = {field for axis in axes for field in axis.fields}
    usual = {field for fields in FREE.values() for field in fields if getattr(plan, field) == Plan.model_fields[field].default}
    return frozenset(field for field, wakers in FREE.items() if wakers <= usual - varied)


def _field(name: str) -> str:
    return name.removeprefix("plan.")


def _validated(axis: Axis) -> Axis:
    """The axis with values as the plan holds them ("25 MiB" as bytes), the plainest first, then by size, then by name."""
    choices = []
    for choice in axis.choices:
        plan = build(Plan, {_field(field): value for field, value in choice.items()}, f"{axis.name} of the space")
        choices.append({field: getattr(plan, _field(field)) for field in choice})
    return Axis(axis.name, tuple(sorted(choices, key=_standing)))


def _standing(choice: Changes) -> tuple[Any, ...]:
    odd = sum(value != Plan.model_fields[_field(field)].default for field, value in choice.items())
    return odd, [(value, "") if isinstance(value, (int, float)) else (0, str(value)) for _, value in sorted(choice.items())]
