"""What is asked of many plans is asked once for each combination of the fields that it looks at; the answers are each plan's."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from strategies.plan.resolved import Resolved
from strategies.planner.applicable import applicable
from strategies.planner.search.by_fields import STATED, ByFields, Looked
from strategies.planner.search.candidates import candidates
from strategies.planner.search.space import read_space
from tests.strategies.planner.conftest import read
from topologies.reading import UserError

SPACE = {
    "plan.tp": [1, 2, 4],
    "plan.pp": [1, 2, 3],
    "plan.data_parallel": ["ddp", "zero1", {"plan.data_parallel": "zero3", "plan.reshard": False}],
    "plan.schedule": ["1f1b", {"plan.schedule": "interleaved", "plan.chunks": 2}],
    "plan.microbatch": [1, 2],
}


def test_a_function_is_called_once_for_each_combination_that_it_looks_at() -> None:
    """tp of plans without a pipeline, else the hook: 3 · 1 + 3 · 1 leaves at most, of some hundred plans."""
    plans, asked = candidates(read({}), read_space(SPACE, "space")), list[tuple[int, str]]()

    def ask(plan: Resolved) -> object:
        asked.append((plan.pp, str(plan.tp if plan.pp == 1 else plan.data_parallel)))
        return asked[-1]

    answers, which = plans.each(ask)
    assert len(asked) == len(set(asked)) < len(plans.resolved) / 4
    assert [answers[number] for number in which] == [ask(plan) for plan in plans.resolved]
    assert which[0] == 0  # answers are in the order of the plans that have them


def test_whole_plans_are_looked_at_when_they_are_compared_copied_or_written() -> None:
    plans = candidates(read({}), read_space(SPACE, "space"))
    for ask in (hash, lambda plan: plan.model_copy(update={"tp": 64}).model_dump_json(), lambda plan: dict(plan)):
        answers, which = plans.each(ask)
        assert [answers[number] for number in which] == [ask(plan) for plan in plans.resolved]
        assert len(answers) == len(plans.resolved)


def test_what_plans_state_is_kept_once() -> None:
    """Fields of the job that do not apply are left out time and again: of plans without a pipeline its layers and schedule."""
    job = read({}, pp=2, schedule="gpipe", layers_per_stage=[3, 5], reshard=False, data_parallel="zero3")
    space = {"plan.tp": [1, 2, 4], "plan.pp": [1, 2, 4], "plan.data_parallel": ["ddp", "zero1", "zero3"]}
    values = candidates(job, read_space(space, "space")).columns.varied[STATED].values
    assert all(isinstance(value, frozenset) for value in values)
    assert 1 < len(values) == len(set(values)) < 20


def test_values_that_change_are_asked_for_anew() -> None:
    """A plan with another tp is asked for again, and only if nobody has asked for that before."""
    columns, asked = candidates(read({}), read_space({"plan.tp": [1, 2, 4]}, "space")).columns, list[int]()

    def ask(looked: Looked) -> int:
        asked.append(looked.plan.tp)
        return 10 * asked[-1]

    question, every = ByFields(columns, ask), np.arange(3)
    assert [question.answers[number] for number in question.of(every)] == [10, 20, 40]
    columns.varied["tp"].put(every[:2], [4, 8], np.array([0, 1]))
    assert [question.answers[number] for number in question.of(every)] == [40, 80, 40]
    assert sorted(asked) == [1, 2, 4, 8]


def test_plans_resolved_together_are_those_resolved_one_by_one() -> None:
    """Fields that the job states, which do not apply to some of them, are left out of these."""
    own = {
        "plan.sequence_parallel": True,
        "plan.overlap_tp": "weight_gradient",
        "plan.fp8": {"scaling": "delayed", "gather": True},
    }
    job = read(own | {"plan.tp": 2})
    plans = candidates(job, read_space(SPACE | {"plan.tp": [{"plan.tp": 1}, {"plan.tp": 2}, {"plan.tp": 3}]}, "space"))
    found = {repr(sorted(plans.changes(plan).items(), key=str)): plans.resolved[plans.rule[plan]] for plan in range(len(plans))}
    refused = 0
    for chosen in product(*(axis.choices for axis in plans.axes)):
        changes: dict[str, Any] = {name: value for choice in chosen for name, value in choice.items()}
        try:
            applied = applicable(job, {name.removeprefix("plan."): value for name, value in changes.items()})
        except UserError:
            refused += 1
            continue
        changes |= {f"plan.{name}": value for name, value in applied.dropped.items()}
        resolved = found.get(repr(sorted(changes.items(), key=str)))
        assert resolved is None or (
            resolved == applied.resolved and resolved.model_fields_set == applied.resolved.model_fields_set
        )
        found.pop(repr(sorted(changes.items(), key=str)), None)
    assert not found
    assert refused == plans.refused.total() > 0
