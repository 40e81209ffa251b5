"""What a budget is good for."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

import shardyard
from shardyard import predict, read_job
from strategies.job import Job
from strategies.planner.spending.budget import MOST_MFU, Budgeted, budget, most_tokens

SMALL = ("--cluster", "dgx-h100", "--workers", "2", "--set", "plan.sequence=1024", "--set", "run.failures=none")


def call(*words: str) -> list[dict]:
    result = CliRunner().invoke(shardyard.main, ("budget", *words, "--json"))
    assert result.exit_code == 0, result.output
    answer: list[dict] = json.loads(result.stdout)
    return answer


def test_tokens_of_one_model() -> None:
    """A day of 8 GPUs without failures: as many tokens as steps of the best plan make, after the first start."""
    (answer,) = call(*SMALL, "--gpus", "8", "--days", "1", "--model", "gpt2-1.5b", "--set", "run.initialization=0 s")
    job = read_job(model="gpt2-1.5b", cluster="dgx-h100", nodes=1, plan=answer["plan"])
    summary = predict(job)
    assert answer["step_seconds"] == summary.step_seconds
    own = ["plan.sequence=1024", *shlex.split(answer["arguments"])[1::2]]
    assert read_job(None, own, model="gpt2-1.5b", cluster="dgx-h100", nodes=1).plan == job.plan
    assert answer["tokens"]["mean"] == pytest.approx(summary.tokens_per_second * 86400, rel=1e-3)
    assert answer["enough"] == (answer["tokens"]["mean"] >= 20 * answer["parameters"])
    assert answer["tokens"]["mean"] < answer["tokens_most"]


def test_the_largest_model_comes_first_and_the_search_ends_with_it() -> None:
    models = call(*SMALL, "--gpus", "8", "--days", "2", "--price", "2")
    sizes = [each["parameters"] for each in models]
    assert sizes == sorted(sizes, reverse=True)
    assert [each["enough"] for each in models] == [False] * (len(models) - 1) + [True]
    assert all(each["tokens_most"] < each["tokens_needed"] or "tokens" in each or each["refused"] for each in models)
    assert models[-1]["usd"]["mean"] == pytest.approx(8 * 48 * 2)


def test_dollars_are_days() -> None:
    words = (*SMALL, "--gpus", "8", "--model", "gpt2-1.5b", "--price", "2")
    assert call(*words, "--dollars", "384") == call(*words, "--days", "1")


def test_most_tokens_by_hand() -> None:
    """6 FLOPs per parameter and token, attention and the like apart: 8 GPUs of 989 TFLOP/s for a day."""
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan={"data_parallel": "zero3"})
    matrices = job.model.parameters - job.model.vocabulary * job.model.hidden
    assert most_tokens(job, 1.0) == pytest.approx(MOST_MFU * 8 * 989.4e12 * 86400 / (6 * matrices), rel=0.01)


def test_one_model_is_simulated_however_large_it_is_and_of_several_only_what_could_be_enough() -> None:
    """An hour of 8 H100 is 2e19 FLOPs at most: gpt2-1.5b on 31 billion tokens would take 3e20."""

    def read(name: str) -> Job:
        return read_job(model=name, cluster="dgx-h100", nodes=1, plan={"auto": False, "global_batch": 32, "sequence": 512})

    def asked(*names: str) -> list[Budgeted]:
        return budget(names, read, 1 / 24, 20.0, None, map, map)

    (alone,) = asked("gpt2-1.5b")
    assert alone.answer is not None
    assert alone.answer.tokens.mean < alone.most < alone.needed == 20 * alone.parameters
    assert [each.refused for each in asked("gpt2-1.5b", "gpt-7.5b")] == ["not within these days at any speed"] * 2


def test_mistakes_are_one_line() -> None:
    for words, message in (
        (("--gpus", "12"), "--gpus 12: must be a multiple of the 8 GPUs of a node"),
        (("--gpus", "8", "--nodes", "1"), "only one of them says how many there are"),
        (("--days", "3", "--dollars", "5"), "only one of them is the budget"),
        (("--days", "0"), "--days=0: must be greater than 0"),
        (("--model", "gpt-9"), "unknown model 'gpt-9'"),
    ):
        result = CliRunner().invoke(shardyard.main, ("budget", "--cluster", "dgx-h100", *words))
        assert result.exit_code == 2, result.output
        assert message in result.output
    nothing = CliRunner().invoke(shardyard.main, ("budget", "--cluster", "dgx-h100", "--gpus", "8", "--days", "0.001"))
    assert nothing.exit_code == 2
    assert "no model is trained on 20 tokens per parameter" in nothing.output
