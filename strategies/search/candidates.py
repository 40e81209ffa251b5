"""The plans of one site (one cluster and model): a space's combinations as arrays, without those that break a rule.

A rule is what `Job.resolve` checks. It is asked once for every combination of the fields that rules look at.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.job import Job
from strategies.plan import Plan
from strategies.resolved import Resolved
from strategies.search.space import MOST, Axis, Changes, Space
from topologies.reading import UserError, build

Ids = NDArray[np.int64]
# Fields that no rule looks at, and that change neither grid nor layers.
FREE = frozenset({"recompute", "overlap", "overlap_p2p", "bucket", "algorithm", "optimizer", "gradients", "dropout"})


@dataclass
class Candidates:
    """The allowed plans of `job`'s model and cluster. Plan i has choice `choices[a][i]` on axis a and is `resolved[rule[i]]` but
    for the fields that no rule looks at.

    number: of each plan, its place in the product of the axes; refused: reasons with counts, and for each an example.
    """

    job: Job
    axes: tuple[Axis, ...]
    number: Ids
    choices: list[Ids]
    rule: Ids
    resolved: list[Resolved]
    refused: Counter[str]
    examples: dict[str, str]

    def __len__(self) -> int:
        return len(self.number)

    def changes(self, plan: int) -> dict[str, Any]:
        """The fields of plan i on the axes."""
        chosen = [axis.choices[int(column[plan])] for axis, column in zip(self.axes, self.choices, strict=True)]
        return {field: value for choice in chosen for field, value in choice.items()}

    def job_of(self, plan: int) -> Job:
        """The job with plan i."""
        return replace(self.job, plan=changed(self.job.plan, self.changes(plan)))

    def only(self, kept: NDArray[np.bool_]) -> Candidates:
        """Those that are kept."""
        columns = [column[kept] for column in self.choices]
        return replace(self, number=self.number[kept], choices=columns, rule=self.rule[kept])

    @cached_property
    def microbatches(self) -> Ids:
        """Of each plan."""
        return np.array([one.microbatches for one in self.resolved], dtype=np.int64)[self.rule]


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
    number = np.arange(count)
    choices = [column.astype(np.int64) for column in np.unravel_index(number, shape)] if shape else []
    ruled = [i for i, axis in enumerate(axes) if any(_field(f) not in FREE for choice in axis.choices for f in choice)]
    keys = np.zeros(count, dtype=np.int64)
    for i in ruled:
        keys = keys * shape[i] + choices[i]
    _, first, rule = np.unique(keys, return_index=True, return_inverse=True)
    resolved: list[Resolved] = []
    place = np.full(len(first), -1, dtype=np.int64)
    reasons: list[str] = []
    examples: dict[str, str] = {}
    for one, example in enumerate(first.tolist()):
        update = {f: v for i in ruled for f, v in axes[i].choices[int(choices[i][example])].items()}
        try:
            found = replace(job, plan=changed(job.plan, update)).resolve()
            place[one] = len(resolved)
            resolved.append(found)
            reasons.append("")
        except UserError as error:
            text = str(error).removeprefix(f"{job.where}: ")
            reasons.append(pattern(text))
            examples.setdefault(reasons[-1], text)
    counts = np.bincount(rule, minlength=len(first))
    refused: Counter[str] = Counter()
    for reason, plans in zip(reasons, counts.tolist(), strict=True):
        if reason:
            refused[reason] += plans
    whole = Candidates(job, axes, number, choices, place[rule], resolved, refused, examples)
    return whole.only(whole.rule >= 0)


def pattern(reason: str) -> str:
    """A reason without its numbers, by which it is counted: "tp=3 does not divide 32 …" and "tp=5 does not …" are one."""
    return re.sub(r"\d[\d,.·]*", "#", reason)


def _field(name: str) -> str:
    return name.removeprefix("plan.")


def _validated(axis: Axis) -> Axis:
    """The axis with values as the plan holds them ("25 MiB" as bytes)."""
    choices = []
    for choice in axis.choices:
        plan = build(Plan, {_field(field): value for field, value in choice.items()}, f"{axis.name} of the space")
        choices.append({field: getattr(plan, _field(field)) for field in choice})
    return Axis(axis.name, tuple(choices))
