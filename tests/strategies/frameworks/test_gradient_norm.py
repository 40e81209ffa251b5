"""Megatron-LM's host reads the norm of all gradients, and then launches the rest of the update tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sim.program import Block, Collective, Kernel
from strategies.lowering.lower import lower
from strategies.predict import played
from topologies.cluster_files import load_cluster

LAYERS, TENSORS = 4, 4 * 12 + 4  # of a layer two norms and four matrices, each with a bias; embedding, positions, last norm


def updates(job) -> list[tuple[bool, list[tuple[int, Kernel | Collective]]]]:
    """The ops of the update: whether the host waits before it launches them, and what they run how often."""
    ops = lower(job.model, job.resolve()).cohorts[0].ops
    first = next(number for number, op in enumerate(ops) if isinstance(op.work, Block) and op.work.name == "optimizer")
    works = [(op.held, op.work) for op in ops[first:] if not (isinstance(op.work, Collective) and op.work.label == "parameters")]
    return [(held, list(work.items()) if isinstance(work, Block) else [(1, work)]) for held, work in works]


@pytest.mark.parametrize(
    ("plan", "along"),
    [({}, ()), ({"tp": 2}, ("tp",)), ({"data_parallel": "zero1"}, ("dp",)), ({"data_parallel": "zero1", "tp": 2}, ("tp", "dp"))],
)
def test_the_host_waits_for_the_norm_of_what_ranks_hold_parts_of(toy_job, plan, along) -> None:
    """Along dp it is an op of its own: ranks that meet inside a block would be replayed as one."""
    (first, before), *sums, (last, after) = updates(toy_job(8, **plan))
    assert (first, last) == (False, True)
    labels = [item.label for _, item in before if isinstance(item, Kernel)]
    assert labels[-2:] == ["gradient copy", "gradient norm"]
    every = [item for item in (before[-1][1], *(item for _, ((_, item),) in sums)) if isinstance(item, Collective)]
    assert [(item.axes, item.bytes) for item in every] == [((axis,), 4) for axis in along]
    assert bool(sums) == ("dp" in along)
    assert [item.label for _, item in after] == ["adam", "parameter copy", "gradient zeroing"]


def test_of_fp16_it_first_reads_whether_there_are_infinities(toy_job) -> None:
    """An all-reduce of that, too (optimizer.py, _unscale_main_grads_and_check_for_nan)."""
    pieces = [(held, [item.label for _, item in items]) for held, items in updates(toy_job(8, tp=2, precision="fp16"))]
    assert (pieces[0][0], pieces[0][1][-2:]) == (False, ["loss unscaling"] * 2)
    assert pieces[1] == (True, ["gradient norm"] * 2)
    assert pieces[2] == (True, ["adam", "parameter copy", "gradient zeroing"])


@pytest.mark.parametrize(
    "plan", [{"clip_gradients": False}, {"kernels": "torch"}, {"pp": 2}, {"data_parallel": "zero1", "deepspeed": {}}]
)
def test_no_host_waits_where_none_reads_the_norm(toy_job, plan) -> None:
    assert [held for held, _ in updates(toy_job(8, **plan))] == [False]


def test_copies_are_launched_one_by_one_from_python(toy_job) -> None:
    """Of every tensor; of a bucket that eight ranks share out each has 1/8, and of one more where a tensor ends; so of embedding,
    layers and head where whole parts of the model are sharded.
    """
    parts = (1 + 1 / 8) + LAYERS * (1 + 11 / 8) + (1 + 1 / 8)
    for plan, tensors in (
        ({}, TENSORS),
        ({"data_parallel": "zero1"}, 1 + (TENSORS - 1) / 8),
        ({"data_parallel": "zero3"}, parts),
    ):
        times = {item.label: times for _, items in updates(toy_job(8, **plan)) for times, item in items}
        assert times["gradient copy"] == times["parameter copy"] == math.ceil(tensors)
        assert times["adam"] == 1


def test_parameters_in_fp16_are_copied_at_once_unless_they_are_sharded(toy_job) -> None:
    """_multi_tensor_copy_this_to_that has a kernel for fp16, none for bf16; the distributed optimizer has loops."""
    for plan, at_once in (({}, True), ({"data_parallel": "zero1"}, False)):
        every = updates(toy_job(8, precision="fp16", **plan))
        times = {item.label: times for _, items in every for times, item in items}
        assert times["gradient copy"] > 1
        assert (times["parameter copy"] == 1) == at_once


@pytest.mark.parametrize(("scaling", "maxima"), [("tensorwise", 1), ("delayed", 0)])
def test_weights_in_fp8_are_cast_one_by_one_when_ranks_agree_on_their_maxima(toy_job, scaling, maxima) -> None:
    """Of four matrices of a layer, without biases and a head's; the cast reads bf16 and writes fp8."""
    fp8 = {"scaling": scaling, "gather": True}
    job = replace(toy_job(8, data_parallel="zero1", fp8=fp8), cluster=load_cluster("dgx-h100"))
    items = [each for _, items in updates(job) for each in items]
    labels = [item.label for _, item in items]
    assert labels.index("parameter copy") < labels.index("fp8 maxima") < labels.index("weight cast")
    (agreed,) = [item for _, item in items if item.label == "fp8 maxima"]
    assert (agreed.bytes, set(agreed.axes)) == (4 * 4 * LAYERS, {"dp"})
    (cast,) = [(times, item) for times, item in items if item.label == "weight cast"]
    weights = LAYERS * 12 * 64**2 / 8
    assert cast[0] * cast[1].bytes == pytest.approx(weights * 3)
    assert labels.count("weight maxima") == maxima


def test_a_graph_leaves_the_update_to_the_host_by_hand(toy_job) -> None:
    """Adam, a copy of each tensor and zeros, launched from Python one after the other when the norm is read: the last one begins
    with the last launch.
    """
    timeline = played(toy_job(8, cuda_graph=True))
    update = [row for row in timeline.rows() if row.kind == "optimizer"]
    host = (1 + TENSORS + 1) * timeline.prices(0).profile.eager
    last = timeline.op_costs.prices.seconds(Kernel("optimizer", "gradient zeroing", "optimizer", 0.0, 2.0, "fp32"))
    read = max(row.end for row in update if row.end <= update[-1].start)
    assert timeline.step - read == pytest.approx(host + last, rel=1e-3)
