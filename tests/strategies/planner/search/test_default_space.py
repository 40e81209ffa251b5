"""What is searched when nothing is said: the choices of each axis, and what the job itself says on top."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.planner.search.space import default_space, doubling
from strategies.read_job import read_job


def choices(nodes: int = 2, model: str = "llama-3.1-8b", cluster: str = "dgx-h100", **plan: Any) -> dict[str, list[Any]]:
    """By axis; of a choice of several fields the tuple of their values."""
    job = read_job(model=model, cluster=cluster, nodes=nodes, plan=plan)
    values = ((axis.name, [tuple(choice.values()) for choice in axis.choices]) for axis in default_space(job).axes)
    return {name: [value[0] if len(value) == 1 else value for value in every] for name, every in values}


def test_powers_of_two_up_to_a_number() -> None:
    assert [doubling(most) for most in (1, 2, 7, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_degrees_go_up_to_nodes_layers_contexts_and_experts() -> None:
    """Llama-3.1 8B: 32 layers and 32 heads on 16 GPUs, 8 of them in a node; Mixtral has 8 experts."""
    usual = choices()
    assert usual["plan.tp"] == [(1, False), (2, True), (4, True), (8, True)]  # with sequence parallelism
    assert usual["plan.pp"] == [1, 2, 4, 8, 16]
    assert choices(nodes=8)["plan.pp"] == [1, 2, 4, 8, 16, 32]
    assert usual["plan.ep"] == [1]
    assert choices(model="mixtral-8x7b")["plan.ep"] == [1, 2, 4, 8]


def test_ranks_that_share_a_sequence() -> None:
    """8, or as many as leave each 8,192 tokens; none where context parallelism is not simulated."""
    assert choices(nodes=16, sequence=8192)["plan.cp"] == [1, 2, 4, 8]
    assert choices(nodes=16, sequence=131072)["plan.cp"] == [1, 2, 4, 8, 16]
    assert choices(nodes=1, sequence=131072)["plan.cp"] == [1, 2, 4, 8]
    assert choices(attention="materialised")["plan.cp"] == [1]
    assert choices(model="deepseek-v3")["plan.cp"] == [1]


def test_schedules_with_their_chunks() -> None:
    interleaved = [("interleaved", chunks) for chunks in (2, 4, 8)]
    every = [("1f1b", None), *interleaved, ("zb-h1", None), ("zb-v", None), ("interleaved-zb", 2)]
    assert choices()["plan.schedule"] == every
    assert choices(pp=2, schedule="interleaved", chunks=3)["plan.schedule"] == [*every, ("interleaved", 3)]
    assert choices(pp=2, schedule="interleaved")["plan.schedule"] == every  # of 2 chunks by default
    assert choices(pp=2, schedule="gpipe")["plan.schedule"] == [*every, ("gpipe", None)]


def test_sharding_within_a_node_where_there_are_several() -> None:
    plain = [(hook, True, None) for hook in ("ddp", "zero1", "zero2", "zero3")] + [("zero3", False, None)]
    assert choices(nodes=1)["plan.data_parallel"] == plain
    assert choices(nodes=2)["plan.data_parallel"] == [*plain, ("zero3", True, 8)]
    assert choices(nodes=2, data_parallel="diloco", local_steps=2)["plan.data_parallel"] == [
        *plain,
        ("zero3", True, 8),
        ("diloco", True, None),
    ]


def test_the_other_axes_and_what_the_job_says_on_each() -> None:
    usual = choices(microbatch=3, recompute="operators", kernels="compiled")
    assert usual["plan.microbatch"] == [1, 2, 4, 3]
    assert usual["plan.recompute"] == ["none", "selective", "full", "operators"]
    assert usual["plan.order"] == ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]
    assert usual["plan.overlap"] == [True, False]
    assert usual["plan.offload"] == [None, {"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}]
    assert choices(overlap=False)["plan.overlap"] == [True, False]


@pytest.mark.parametrize(("gpus", "nodes", "shards"), [(1, 4, {None}), (8, 1, {None}), (8, 4, {None, 8})])
def test_parameters_are_shared_by_a_node_where_it_has_several_gpus_and_is_one_of_several(
    gpus: int, nodes: int, shards: set[int | None]
) -> None:
    cluster = {"based_on": "dgx-h100", "node": {"gpus": gpus, "nics": gpus}}
    space = default_space(read_job(model="llama-3.1-8b", cluster=cluster, nodes=nodes, plan={}))
    (axis,) = [axis for axis in space.axes if axis.name == "plan.data_parallel"]
    assert {choice["plan.shard"] for choice in axis.choices} == shards
