"""The host of a mixture of experts: it waits for counts of tokens, and launches every expert's products."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from shardyard import read_job
from sim.pricing.op_costs import OpCosts
from sim.program import COMPUTE, Block, Collective, Join, Kernel, Op, Run, SharedItems, Start
from strategies.layers.model_costs import parts
from strategies.layers.tensor_overlap import Items
from strategies.lowering.blocks import at_waits
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.predict import played
from tests.strategies.layers.test_mixture_of_experts import MOE

FIRST, WAITS, LAST = (Kernel("memory", name, "forward", 0.0, 1.0, waits=name == "waits") for name in ("first", "waits", "last"))
SWAP = Collective("all_to_all", 1.0, "ep", "dispatch")


def passes(**plan: Any) -> list[list[Op]]:
    """Ops of the compute stream of a forward and of a backward pass, of four layers of which three have experts."""
    model = Model(**MOE)
    ranks = math.prod(plan.get(axis, 1) for axis in ("tp", "ep", "pp"))
    resolved = Resolved.of(Plan(**plan), model, ranks)
    cohort = lower(model, resolved).cohorts[0]
    begins = [*cohort.passes, len(cohort.ops)]
    every = [cohort.ops[begin:end] for begin, end in pairwise(begins)]
    return [[op for op in ops if op.stream == COMPUTE and op.microbatch >= 0] for ops in every]


def test_a_block_ends_where_the_host_waits() -> None:
    items = SharedItems((FIRST, WAITS, SWAP, LAST))
    begin, *middle, end = at_waits(Block("forward", (Run(2, (FIRST,)), Run(3, items), Run(1, (LAST,)))))
    assert [run.items for run in begin.runs] == [(FIRST,), (FIRST, WAITS)]
    assert middle[0] is middle[1]  # equal layers share it
    assert [run.items for run in middle[0].runs] == [(SWAP, LAST), (FIRST, WAITS)]
    assert [run.items for run in end.runs] == [(SWAP, LAST), (LAST,)]
    assert begin.runs[0].times == 2


def test_a_block_is_not_cut_beside_a_collective() -> None:
    """What has been started there is joined in the same block."""
    block = Block("pair", (Run(1, (Start(SWAP), WAITS, Join(SWAP), LAST)),))
    assert at_waits(block) == (block,)


def test_the_host_waits_once_in_every_layer_with_experts_forward() -> None:
    forward, backward = passes()
    assert [op.held for op in forward] == [False, True, True, True]
    assert len(backward) == 1  # the counts are there
    assert not any(op.allocate for op in forward[1:])
    assert not any(op.free for op in forward[:-1])


def test_what_is_recomputed_waits_again() -> None:
    assert [len(ops) for ops in passes(recompute="full")] == [4, 4]
    assert [len(ops) for ops in passes(recompute="selective", recompute_modules=["moe"])] == [4, 4]


def test_experts_that_are_padded_to_their_capacity_have_known_counts() -> None:
    assert [len(ops) for ops in passes(capacity_factor=1.0, pad_to_capacity=True)] == [1, 1]


def test_torchtitan_waits_for_the_sizes_of_an_exchange_only() -> None:
    """torchtitan/distributed/expert_parallel.py: "this would incur a device-to-host sync"; otherwise offsets stay on the GPU."""
    assert [len(ops) for ops in passes(kernels="compiled")] == [1, 1]
    assert [len(ops) for ops in passes(kernels="compiled", ep=2)] == [4, 1]


def host_seconds(items: Items, costs: OpCosts) -> float:
    """Of the launches of experts' products, casts and activation."""
    profile = costs.prices.profile
    chosen = [item for item in items if isinstance(item, Kernel) and item.label.startswith("expert ")]
    copies = "expert order", "expert padding"
    return sum(costs.launching(profile) + costs.wrapping(item) for item in chosen if item.label not in copies)


def test_experts_take_the_host_as_long_as_transformer_engine_measured() -> None:
    """github.com/NVIDIA/TransformerEngine issue 2897: 64 experts on a GB200 with 128 features, in mxfp8 with fused kernels, take
    the CPU some 1.2 ms forward and 2.1 ms backward.
    """
    model = {**MOE, "hidden": 128, "experts": {"experts": 64, "chosen": 2, "ffn": 128}}
    plan = {"fp8": {"scaling": "mxfp8"}, "dp": 72, "global_batch": 72}
    job = read_job(None, {}, model=model, cluster="gb200-nvl72", nodes=1, plan=plan)
    resolved = job.resolve()
    layer = parts(job.model, resolved).layer(1)
    costs = played(job).op_costs
    assert host_seconds(layer.forward, costs) == pytest.approx(1.2e-3, rel=0.2)
    assert host_seconds(layer.backward, costs) == pytest.approx(2.1e-3, rel=0.2)


def test_a_step_without_waiting_is_shorter_where_hosts_are_slow(toy_job) -> None:
    """Padded to a capacity of all tokens, the host runs ahead of the GPU; otherwise each layer begins with an idle GPU."""
    fields = {name: value for name, value in MOE.items() if name != "name"}
    steps = [
        played(toy_job(1, model=fields, global_batch=4, **more)).ends.max()
        for more in ({"capacity_factor": 1.0, "pad_to_capacity": True}, {})
    ]
    assert steps[0] < steps[1]
