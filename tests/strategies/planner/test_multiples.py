"""Multiples of what a job has, such as `nodes=x2`: the job's own values are known."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.job import Job
from strategies.planner.multiples import absolute, own_value
from strategies.planner.search.space import Axis, parse_axis
from strategies.read_job import read_job
from topologies.reading import UserError


def job() -> Job:
    """2 nodes of 8 A100, 312 TFLOP/s in bf16; a NIC has 200 Gb/s. 48 layers."""
    return read_job(
        model="gpt2-1.5b",
        cluster="dgx-a100",
        nodes=2,
        plan={"global_batch": 64, "data_parallel": "zero1"},
    )


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("nodes=x0.5,x2,8", [1, 4, 8]),
        ("nodes=x.5,x1.,x1.5", [1, 2, 3]),
        ("cluster.nodes=x2", [4]),
        ("cluster.node.nic=x2,25 GB/s", ["50 GB/s", "25 GB/s"]),  # 200 Gb/s
        ("cluster.node.gpu.peak.bf16=×2", ["624 TFLOP/s"]),
        ("cluster.node.cpu.disk=x0.5", ["15.35 TB"]),  # 30.7 TB
        ("cluster.fabric.hop_latency=x2", ["300 ns"]),  # 150 ns of any switch
        ("plan.global_batch=x4", [256]),
        ("plan.accumulation=x2", [8]),  # 64 of 16 ranks, one at a time
        ("plan.sequence=x2", [2048]),  # of a plan that leaves it to the model
        ("cluster.node.cpu.efficiency=x0.5", [0.2]),  # of 0.4: a number without a unit need not be whole
        ("model.layers=x0.5", [24]),
        ("price=x2", [4.0]),
    ],
)
def test_multiples_are_of_what_the_job_has(axis: str, values: list[Any]) -> None:
    parsed = parse_axis(axis)
    assert [choice[parsed.name] for choice in absolute(parsed, job(), 2.0).choices] == values


def test_only_multiples_are_replaced() -> None:
    """Texts that hold a multiple, and other fields of a choice, are left as they are."""
    choices = ({"model.name": "x2 wide", "nodes": "x2"}, {"model.name": "mix2", "nodes": 2})
    expected = ({"model.name": "x2 wide", "nodes": 4}, {"model.name": "mix2", "nodes": 2})
    assert absolute(Axis("both", choices), job()) == Axis("both", expected)


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        ("nodes=x0.3", "nodes=2 times 0.3 is no whole number of at least 1"),
        ("nodes=x0", "nodes=2 times 0 is no whole number of at least 1"),
        ("plan.tp=x0.5", "plan.tp=1 times 0.5 is no whole number of at least 1"),
        ("plan.data_parallel=x2", "plan.data_parallel is 'zero1' here, of which there is no multiple"),
        ("run.failures=x2", "run.failures is no number here, of which there is no multiple"),
        ("plan.overlap=x2", "plan.overlap is True here, of which there is no multiple"),
        ("cluster.node.network=x2", "cluster.node.network is not set here"),
    ],
)
def test_multiples_that_cannot_be_are_refused(axis: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        absolute(parse_axis(axis), job())


def test_what_the_job_has_is_said_as_it_is_written() -> None:
    assert own_value("cluster.node.nic", job()) == "25 GB/s"
    assert own_value("plan.global_batch", job()) == 64
    assert own_value("plan.data_parallel", job()) is None
