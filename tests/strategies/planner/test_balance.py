"""Stages that are given what they can do in the same time."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import shardyard
from strategies.job import Job
from strategies.planner.balance import _shared_out, allotted, balanced
from strategies.read_job import read_job


def job(**plan: object) -> Job:
    return read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"pp": 4, "global_batch": 16, "data_parallel": "zero1"} | plan)


def test_a_head_of_three_layers_takes_three_layers_from_the_last_stage() -> None:
    """32 layers of 1 s and a head of 3 s are 35 s: four stages of 9, 9, 9 and 8 s."""
    other = balanced(job(), [8.0, 8.0, 8.0, 11.0])
    assert other is not None
    layers = other.resolve().layers
    assert layers[-1] == 5
    assert sorted(layers[:-1]) == [9, 9, 9]


def test_a_head_that_outweighs_all_layers_has_its_stage_for_itself() -> None:
    """32 layers of 1 s and a head of 20 s: three stages of 11, 11 and 10 s, and the head's 20 s."""
    other = balanced(job(), [8.0, 8.0, 8.0, 28.0])
    assert other is not None
    assert other.resolve().layers[-1] == 0
    assert sorted(other.resolve().layers) == [0, 10, 11, 11]


def test_a_stage_between_others_keeps_a_layer_however_slow_it_is() -> None:
    """32 layers of 1 s, and 50 s of something else on the third of four stages."""
    other = balanced(job(), [8.0, 8.0, 58.0, 8.0])
    assert other is not None
    assert sorted(other.resolve().layers) == [1, 10, 10, 11]
    assert other.resolve().layers[2] == 1


def test_stages_alike_but_for_their_layers_get_equal_layers() -> None:
    """A second for each of 10, 6, 8 and 8 layers: 8 seconds on each of four stages."""
    other = balanced(job(layers_per_stage=[10, 6, 8, 8]), [10.0, 6.0, 8.0, 8.0])
    assert other is not None
    assert other.resolve().layers == (8, 8, 8, 8)


@pytest.mark.parametrize("plan", [{"schedule": "interleaved"}, {"pp": 1}, {}], ids=str)
def test_nothing_to_balance(plan: dict) -> None:
    stages = 4 if "pp" not in plan else 1
    assert balanced(job(**plan), [8.0] * stages) is None


def test_waiting_for_uneven_stages_is_told_and_even_ones_are_faster() -> None:
    """Without a head stages are even, and the bubble is that of the schedule alone."""
    options = ["simulate", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--set", "plan.pp=8", "--json"]
    options += ["--set", "plan.global_batch=32", "--set", "plan.data_parallel=zero1"]
    answer = json.loads(CliRunner().invoke(shardyard.main, options).output)
    assert 0.05 < answer["uneven"] < answer["bubble"]
    assert "waiting for uneven stages: stage 7 is busy" in answer["notes"][0]
    setting = answer["notes"][0].partition("--set '")[2].partition("'")[0]
    assert json.loads(CliRunner().invoke(shardyard.main, [*options, "--set", setting]).output)["uneven"] < answer["uneven"] / 2
    even = json.loads(CliRunner().invoke(shardyard.main, [*options, "--set", "model.head=false"]).output)
    assert even["uneven"] < 0.05


def test_a_stage_on_a_gpu_of_half_the_speed_gets_half_the_layers() -> None:
    """32 layers that take 2 s on the first stage's GPU and 1 s elsewhere: 4 + 3 · 9.33 layers."""
    other = balanced(job(), [16.0, 8.0, 8.0, 8.0], [2.0, 1.0, 1.0, 1.0])
    assert other is not None
    assert other.resolve().layers[0] == 5
    assert sorted(other.resolve().layers[1:]) == [9, 9, 9]


def test_microbatches_in_the_ratio_of_speeds_are_found_by_playing() -> None:
    mixed = read_job("examples/mixed-gpus.yaml", {"plan.microbatches_per_replica": [16] * 4})
    equal = shardyard.simulate(mixed)
    better = allotted(mixed, equal, shardyard.simulate)
    assert better is not None
    other, timeline = better
    counts = other.plan.microbatches_per_replica
    assert counts is not None
    assert sum(counts) == 64
    assert counts[0] == counts[1] < counts[2] == counts[3]
    assert timeline.step == shardyard.simulate(read_job("examples/mixed-gpus.yaml")).step < 0.65 * equal.step
    for fewer in (counts[0] - 1, counts[0] + 1):  # no neighbour is better
        near = read_job("examples/mixed-gpus.yaml", {"plan.microbatches_per_replica": [fewer] * 2 + [32 - fewer] * 2})
        assert shardyard.simulate(near).step > timeline.step


def test_the_answer_says_what_would_balance_unlike_gpus() -> None:
    found = CliRunner().invoke(
        shardyard.main, ["simulate", "examples/mixed-gpus.yaml", "--set", "plan.microbatches_per_replica=[16, 16, 16, 16]"]
    )
    assert "plan.microbatches_per_replica=[9, 9, 23, 23]' the step takes" in found.output
    stages = ["--set", "plan.order=tp-cp-ep-dp-pp", "--set", "plan.global_batch=64"]
    found = CliRunner().invoke(
        shardyard.main, ["simulate", "examples/mixed-gpus.yaml", "--set", "plan.microbatches_per_replica=null", *stages]
    )
    assert "plan.layers_per_stage=[23, 57]' the step takes" in found.output


def test_microbatches_are_whole_and_everybody_has_one() -> None:
    assert _shared_out(10, [9.0, 1.0]) == [9, 1]
    assert _shared_out(10, [99.0, 1.0]) == [9, 1]
    assert _shared_out(7, [2.0, 1.0]) == [5, 2]
    assert _shared_out(3, [1.0, 1.0, 1.0]) == [1, 1, 1]
