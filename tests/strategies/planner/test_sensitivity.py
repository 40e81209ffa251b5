"""Sensitivities of long steps are worked out from two short ones."""

from __future__ import annotations

from typing import Any

import pytest

from sim.engine.player import run
from sim.grid import Grid
from sim.program import Block, Cohort, Kernel, Op, Program, Run
from strategies.planner.sensitivity import _brief, kernels_of
from strategies.predict import simulate


def shares(job: Any) -> list[tuple[float, int]]:
    """Weights of the steps that stand for a job's, and how many microbatches each has."""
    return [(weight, brief.resolve().microbatches) for weight, brief in _brief(job)]


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 100), (2, 64), (4, 200)])
def test_two_short_steps_stand_for_a_long_one(toy_job: Any, pp: int, microbatches: int) -> None:
    """Their weights add up to one step, and to as many microbatches."""
    (less, short), (more, longer) = shares(toy_job(pp, pp=pp, accumulation=microbatches))
    assert less + more == pytest.approx(1)
    assert less * short + more * longer == pytest.approx(microbatches)
    assert short < longer < microbatches / 2
    assert short % pp == longer % pp == 0


def test_their_weighted_sum_is_the_step(toy_job: Any) -> None:
    job = toy_job(2, pp=2, accumulation=60)
    brief = sum(weight * simulate(short).step for weight, short in _brief(job))
    assert brief == pytest.approx(simulate(job).step, rel=1e-5)


@pytest.mark.parametrize(
    "plan",
    [{"accumulation": 4}, {"accumulation": 100, "data_parallel": "local_sgd", "local_steps": 2}],
    ids=["short", "local steps"],
)
def test_steps_that_are_short_or_follow_each_other_are_played_whole(toy_job: Any, plan: dict[str, Any]) -> None:
    assert shares(toy_job(2, **plan)) == [(1.0, plan["accumulation"])]


def test_seconds_of_a_kernel_are_those_of_all_blocks_that_run_it(toy_cluster, toy_prices) -> None:
    """1 TB at 1 TB/s is a second: three times in a block that runs twice, and once in another cohort's."""
    kernel = Kernel("memory", "copy", "forward", 0.0, 1e12)
    often, once = (Block("forward", (Run(times, (kernel,)),)) for times in (3, 1))
    cohorts = [Cohort({"pp": 0}, [Op("compute", often), Op("compute", often)]), Cohort({"pp": 1}, [Op("compute", once)])]
    program = Program(Grid.of(pp=2), cohorts, 1, 1, "bf16", 1, 1)
    assert kernels_of(run(program, toy_cluster(2).topology(), toy_prices())) == {kernel: pytest.approx(7.0)}
