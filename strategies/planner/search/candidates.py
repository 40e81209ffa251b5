"""The plans of one site (one cluster and model): a space's combinations as arrays, without those that break a rule.

A rule is what `Job.resolve` checks. It is asked once for every combination of the fields that rules look at.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.planner.applicable import Applied, applicable, stated
from strategies.planner.search.duplicate_plans import twins
from strategies.planner.search.space import MOST, Axis, Changes, Space, column
from topologies.reading import UserError, build

Ids = NDArray[np.int64]
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
ORDER = frozenset({"order"})  # which changes the grid, and at which only rules on DeepSpeed's settings look


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
    resolved: list[Resolved]
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
        kinds: dict[str, int] = {}
        without = np.array([kinds.setdefault(repr(dropped), len(kinds)) for dropped in self.dropped], dtype=np.int64)[self.rule]
        for axis, chosen in zip(self.axes, self.choices, strict=True):
            if axis.fields == {field.removeprefix("plan.")} and {field: value} in axis.choices:
                stride = math.prod(len(other.choices) for other in self.axes if other.name > axis.name)
                wanted = self.number + (axis.choices.index({field: value}) - chosen) * stride
                place = np.minimum(np.searchsorted(self.number, wanted), len(self) - 1)
                there = (self.number[place] == wanted) & (wanted != self.number) & (without[place] == without)
                positions = np.where(there, place, -1)
        return positions

    @cached_property
    def microbatches(self) -> Ids:
        """Of each plan."""
        return np.array([plan.microbatches for plan in self.resolved], dtype=np.int64)[self.rule]


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
    chosen = [choices[i][first].tolist() for i in ruled]
    place, applied, reasons, examples = _resolved(asked, own, [axes[i] for i in ruled], chosen)
    refused: Counter[str] = Counter()
    for reason, plans in zip(reasons, np.bincount(rule, minlength=len(first)).tolist(), strict=True):
        if reason:
            refused[reason] += plans
    allowed = (place >= 0)[rule]
    plain = twins(job.plan, job.cluster.gpus, axes, choices) if shape else []
    plainest = (
        np.ravel_multi_index([plain[i] for i in by_name], [shape[i] for i in by_name]).astype(np.int64) if shape else number
    )
    same = allowed & (plainest != number) & allowed[plainest]
    kept = allowed & ~same
    used, rule = np.unique(place[rule[kept]], return_inverse=True)
    columns, resolved = [column[kept] for column in choices], [applied[i].resolved for i in used.tolist()]
    dropped: list[Changes] = [{f"plan.{field}": value for field, value in applied[i].dropped.items()} for i in used.tolist()]
    return Candidates(job, axes, number[kept], columns, rule, resolved, dropped, refused, examples, int(same.sum()))


def _free(plan: Plan, axes: Sequence[Axis]) -> frozenset[str]:
    """The fields at which no rule looks in this space."""
    varied = {field for axis in axes for field in axis.fields}
    usual = {field for fields in FREE.values() for field in fields if getattr(plan, field) == Plan.model_fields[field].default}
    return frozenset(field for field, wakers in FREE.items() if wakers <= usual - varied)


def _resolved(
    job: Job, own: Sequence[str], axes: Sequence[Axis], chosen: Sequence[Sequence[int]]
) -> tuple[Ids, list[Applied], list[str], dict[str, str]]:
    """Each combination of choices on axes that rules look at: its number among those that break none (−1), these, its reason
    (""), and an example of each reason. own: what the job's plan states and no axis does.
    """
    updates = [[{_field(f): value for f, value in choice.items()} for choice in axis.choices] for axis in axes]
    place: list[int] = []
    applied: list[Applied] = []
    reasons: list[str] = []
    examples: dict[str, str] = {}
    known: dict[tuple[int, ...], Applied | str] = {}  # by the choices on axes whose fields rules look at
    ruled = job.plan.deepspeed is not None or any("deepspeed" in axis.fields for axis in axes)
    others = [number for number, axis in enumerate(axes) if ruled or axis.fields != ORDER]
    for combination in zip(*chosen, strict=True) if axes else [()]:
        update: dict[str, Any] = {}
        for changes, choice in zip(updates, combination, strict=True):
            update |= changes[choice]
        key = tuple(combination[number] for number in others)
        if key not in known:
            known[key] = _applied(job, update, own)
        answer = known[key]
        if isinstance(answer, str):
            place.append(-1)
            reasons.append(pattern(answer))
            examples.setdefault(reasons[-1], answer)
            continue
        if len(others) < len(axes):
            answer = answer._replace(resolved=answer.resolved.model_copy(update={"order": update["order"]}))
        place.append(len(applied))
        reasons.append("")
        applied.append(answer)
    return np.array(place, dtype=np.int64), applied, reasons, examples


def _applied(job: Job, update: dict[str, Any], own: Sequence[str]) -> Applied | str:
    """The job with changes of its plan, or the reason why it is refused."""
    try:
        return applicable(job, update, own)
    except UserError as error:
        return str(error).removeprefix(f"{job.where}: ")


def pattern(reason: str) -> str:
    """A reason without its numbers, by which it is counted: "tp=3 does not divide 32 …" and "tp=5 does not …" are one."""
    return re.sub(r"\d[\d,.·]*", "#", reason)


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
