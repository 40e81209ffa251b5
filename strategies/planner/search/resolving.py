"""Plans resolved together: each step of `Job.steps` is asked once for every combination of the fields that it looks at.

What the job says of a plan and does not apply to other choices is left out, as `strategies.planner.applicable` does it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies.job import Job
from strategies.layers.model_costs import check
from strategies.plan.plan import Plan
from strategies.plan.resolved import FILLED, Step
from strategies.planner.applicable import ONE_STAGE, Changes, default_of, without
from strategies.planner.search.by_fields import STATED, ByFields, Column, Columns, Ids, Looked
from strategies.planner.search.space import Axis
from topologies.reading import UserError

NEVER = -1  # a reason of what is not refused


class Resolving:
    """Combinations of choices on axes, `count` of them. own: what the job's plan states and no axis does; chosen: by axis, the
    choice of each combination.

    reason: of each combination, the number in `reasons` of what refuses it, or NEVER; groups: what of the job is left out, and
    `group`, which of these each combination has.
    """

    def __init__(self, job: Job, own: Sequence[str], axes: Sequence[Axis], chosen: Sequence[Ids], count: int) -> None:
        self._job, self._own, self._target = job, list(own), job.target
        names = dict.fromkeys(name for axis in axes for name in sorted(axis.fields))
        fields = {name: _column(name, getattr(job.plan, name), axes, chosen, count) for name in names}
        fields |= {name: Column.alike(getattr(job.plan, name), count) for name in own}
        self._plan = fields | {STATED: _stated(job.plan, axes, chosen, count)}
        self._filled = {step.field: Column.alike(None, count) for step in job.steps if step.field}
        asked, resolved = Columns(job.plan, self._plan, self._filled), Columns(job.plan, self._resolved, {})
        rules = Step("", lambda plan, *_: check(job.model, plan))
        steps = [(step, asked) for step in job.steps] + [(rules, resolved)]
        self._steps = [(step, ByFields(columns, self._caught(step))) for step, columns in steps]
        self.reasons: dict[str, int] = {}
        self.reason: Ids = np.full(count, NEVER)
        self.groups: list[Changes] = [{}]
        self._numbers = {_told({}): 0}
        self.group = np.zeros(count, dtype=np.int64)
        single = {name: default_of(name) for name in ONE_STAGE if name in own}
        if single:
            pp = _column("pp", None, axes, chosen, count)
            self._leave_out(np.flatnonzero(np.array([value == 1 for value in pp.values])[pp.number]), single)
        self._resolve(np.arange(count))

    @property
    def _resolved(self) -> dict[str, Column]:
        return self._plan | {name: self._filled[name] for name in FILLED}

    def columns(self, members: Ids) -> Columns:
        """Some of the combinations as resolved plans."""
        return Columns(self._job.plan, {name: column.at(members) for name, column in self._resolved.items()}, {})

    def refused(self, weight: Ids) -> tuple[Counter[str], dict[str, str]]:
        """Patterns of reasons with the weight of what they refuse, and an example of each: that of the first combination."""
        refused, examples = Counter[str](), dict[str, str]()
        texts = list(self.reasons)
        numbers, first = np.unique(self.reason, return_index=True)
        weights = np.bincount(self.reason + 1, weight, len(self.reasons) + 1)[1:]
        for number in numbers[np.argsort(first)].tolist():
            if number != NEVER:
                text = texts[number].removeprefix(f"{self._job.where}: ")
                refused[pattern(text)] += int(weights[number])
                examples.setdefault(pattern(text), text)
        return refused, examples

    def _caught(self, step: Step) -> Any:
        """A step that returns why it refuses a plan, by its number, beside what it fills in."""

        def of(looked: Looked) -> tuple[int, Any]:
            try:
                return NEVER, step.of(looked.plan, looked, self._target)
            except UserError as error:
                return self.reasons.setdefault(str(error), len(self.reasons)), None

        return of

    def _resolve(self, members: Ids) -> None:
        """Find what refuses each of them: without what does not apply to it, if that is what refuses it."""
        while len(members):
            self._ask(members)
            wrong = members[self.reason[members] != NEVER]
            again, texts = [members[:0]], list(self.reasons)
            kinds, which = np.unique(self.group[wrong] * len(self.reasons) + self.reason[wrong], return_inverse=True)
            for number, kind in enumerate(kinds.tolist()):
                group, reason = divmod(kind, len(self.reasons))
                less = self._less(self.groups[group], texts[reason])
                if less is not None:
                    again.append(wrong[which == number])
                    self._leave_out(again[-1], self.groups[group] | less)
            members = np.sort(np.concatenate(again))

    def _ask(self, members: Ids) -> None:
        """The first reason of each member."""
        left = members
        for step, question in self._steps:
            which = question.of(left)
            reasons = np.array([reason for reason, _ in question.answers], dtype=np.int64)[which]
            self.reason[left] = reasons
            left, which = left[reasons == NEVER], which[reasons == NEVER]
            if not len(left):
                return
            if step.field:
                self._filled[step.field].put(left, [value for _, value in question.answers], which)

    def _less(self, group: Changes, reason: str) -> Changes | None:
        """What of the job's plan a reason names, without it; None where it names nothing that may be left out."""
        if not self._own:
            return None
        plan = self._job.plan.model_copy(update=group)
        return next(without(plan, reason.removeprefix(self._job.where), self._own), None)

    def _leave_out(self, members: Ids, changes: Changes) -> None:
        """Combinations without fields of the job's plan."""
        self.group[members] = self._numbers.setdefault(_told(changes), len(self.groups))
        if len(self._numbers) > len(self.groups):
            self.groups.append(changes)
        for name, value in changes.items():
            self._plan[name].put(members, [value])
        stated = self._plan[STATED]
        stated.put(members, [names.union(changes) for names in stated.values], stated.number[members])


def _told(changes: Changes) -> str:
    """Changes as text: two that are alike have the same; groups of fields also differ in what they state."""
    return repr([(name, value, sorted(getattr(value, STATED, ()))) for name, value in changes.items()])


def _column(name: str, default: Any, axes: Sequence[Axis], chosen: Sequence[Ids], count: int) -> Column:
    """A field of combinations: as the last axis says that says anything."""
    column, key = Column.alike(default, count), f"plan.{name}"
    for axis, choice in zip(axes, chosen, strict=True):
        if name in axis.fields:
            numbers = np.array([column.number_of(each[key]) if key in each else NEVER for each in axis.choices])[choice]
            column.number[:] = np.where(numbers == NEVER, column.number, numbers)
    return column


def _stated(plan: Plan, axes: Sequence[Axis], chosen: Sequence[Ids], count: int) -> Column:
    """Which fields each combination states."""
    column = Column.alike(frozenset(plan.model_fields_set), count)
    for axis, choice in zip(axes, chosen, strict=True):
        each = Column([], choice)
        says = np.array([each.number_of(frozenset(name.removeprefix("plan.") for name in some)) for some in axis.choices])
        every = [names | fields for names in tuple(column.values) for fields in each.values]
        column.put(np.arange(count), every, column.number * len(each.values) + says[choice])
    return column


def pattern(reason: str) -> str:
    """A reason without its numbers, by which it is counted: "tp=3 does not divide 32 …" and "tp=5 does not …" are one."""
    return re.sub(r"\d[\d,.·]*", "#", reason)
