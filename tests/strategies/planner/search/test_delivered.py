"""Searches for what a training delivers: equal to trying all plans, and never better than steps alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardyard
from strategies.planner.search.delivered import evaluate_run
from strategies.planner.search.objective import Limits, Scale, objective
from strategies.planner.search.results import Results
from strategies.planner.search.search import Search
from strategies.planner.search.space import read_space
from strategies.planner.search.workers.executors import Engine
from tests.strategies.planner.conftest import here, read
from topologies.costs import Rates
from topologies.reading import UserError

TOKENS = 3e10
RUN = {"failures": {"parts": {"node": {"mtbf": "4 hours"}}}, "checkpoint": {"interval": "2 min"}}
SPACE = {"nodes": [1, 2, 8], "plan.tp": [1, 2], "plan.data_parallel": ["ddp", "zero1", "zero3"]}


def failing(changes: dict[str, Any]) -> Any:
    return read({"run": RUN, **changes})


def found(goal: str, runs: Engine | None = None, **options: Any) -> Any:
    return Search(failing, read_space(SPACE, "space"), objective(goal), runs or here(), tokens=TOKENS, **options).run()


def test_the_best_is_that_of_all_plans() -> None:
    answer = found("goodput")
    every = [
        evaluate_run(failing({"nodes": nodes, "plan.tp": tp, "plan.data_parallel": hook}), TOKENS)
        for nodes in SPACE["nodes"]
        for tp in SPACE["plan.tp"]
        for hook in SPACE["plan.data_parallel"]
    ]
    assert answer.proven
    assert answer.best["value"] == min(row["run_days"] for row in every if row.get("fits"))
    assert all(row["stretch"] > 1.0 for row in every if row.get("fits"))
    assert answer.best["goodput"] < 1.0


def test_where_nodes_fail_often_fewer_of_them_are_cheaper() -> None:
    """64 GPUs deliver sooner than 8, at more GPU-hours of failures; steps alone do not see that."""
    cheapest = found("goodput-cost", price=2.0)
    assert cheapest.best["changes"]["nodes"] == 1
    assert cheapest.best["value"] == pytest.approx(2.0 * cheapest.best["run_gpu_hours"])
    assert found("goodput").best["changes"]["nodes"] > 1


def test_limits_are_of_what_is_delivered(tmp_path: Path) -> None:
    """Days that steps alone would keep to, and failures do not."""
    best = found("goodput").best
    ideal = best["run_days"] / best["stretch"]
    tight = found("goodput", limits=Limits(days=(ideal + best["run_days"]) / 2))
    assert tight.best is None or tight.best["run_days"] <= (ideal + best["run_days"]) / 2
    assert "days" in tight.pruned


def test_kept_results_without_runs_are_simulated_again(tmp_path: Path) -> None:
    path = str(tmp_path / "plans.jsonl")
    found("step", results=Results(path))
    answer = found("goodput", results=Results(path))
    assert answer.counts["known"] == 0
    again = found("goodput", results=Results(path))
    assert (again.counts["simulated"], again.best["value"]) == (0, answer.best["value"])


def test_the_command_needs_tokens_and_shows_goodput() -> None:
    job = str(Path(__file__).parents[4] / "examples" / "run-llama-3.1-405b.yaml")
    words = ["plan", job, "--objective", "goodput", "--workers", "1"]
    vary = [f"--vary=plan.{name}" for name in ("tp=8", "pp=16", "cp=1", "microbatch=1", "schedule=1f1b", "recompute=full")]
    vary += [
        f"--vary=plan.{name}" for name in ("data_parallel=zero1", "order=tp-cp-ep-dp-pp", "offload=[null]", "overlap=true,false")
    ]
    assert "--objective goodput is of a whole training" in CliRunner().invoke(shardyard.main, [*words, *vary]).output
    answer = CliRunner().invoke(shardyard.main, [*words, *vary, "--tokens", "1e11"])
    assert answer.exit_code == 0, answer.output
    assert "days to train all tokens, failures and checkpoints included" in answer.output
    assert "goodput" in answer.output.splitlines()[4]


def test_costs_need_a_price() -> None:
    free = Scale(8, 1e6, TOKENS, Rates(None, "no price of own is listed: give one", 700.0, ""))
    with pytest.raises(UserError, match="no price of own"):
        objective("goodput-cost").of({"run_gpu_hours": 3.0}, free)
    assert objective("goodput").of({"run_days": 3.0}, free) == 3.0
