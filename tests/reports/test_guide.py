"""The pages about strategies say what the program does."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.guide import GROUPS, ROOT, combinations, combined, example, examples, hook_plans, schedule_plans
from strategies.data_parallel import hooks
from strategies.schedules import schedules
from topologies.reading import UserError


def test_the_page_of_combinations_is_what_trying_gives() -> None:
    assert (ROOT / "docs/combinations.md").read_text(encoding="utf-8") == combinations(), "run `make docs`"


def test_every_strategy_has_an_example_with_its_paragraph_and_its_picture() -> None:
    every = [example for group in (*GROUPS, "servers") for example in examples(group)]
    assert all(example.title and len(example.text) > 80 for example in every)
    plans = [example.job.plan for example in every]
    assert {plan.data_parallel for plan in plans} == set(hooks)
    assert {plan.schedule for plan in plans} >= {name for name in schedules if not name.endswith(".csv")}
    guide = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    for shown in every:
        assert f"### {shown.title}\n" in guide, "run `make docs`"
        assert (ROOT / f"docs/strategies/{shown.path.stem}.png").exists()


def test_what_cannot_be_combined_says_why() -> None:
    assert combined(schedule_plans()["1f1b"], hook_plans()["zero1"]) == ""
    assert "cp=2 contradicts" in combined(hook_plans()["dataparallel"], dict(cp=2))


def test_an_example_without_a_paragraph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: llama-3.1-8b\n")
    with pytest.raises(UserError, match="begins with a comment"):
        example(tmp_path / "job.yaml")
