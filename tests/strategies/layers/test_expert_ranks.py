"""Which ranks share the experts of a layer: Megatron-Core's grid of experts has no cp, its ranks come before those of dp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.analysis.summary import summarise
from sim.analysis.volume import volumes
from sim.engine.player import run
from strategies.lowering.lower import lower
from topologies.reading import UserError

MOE: dict[str, Any] = {"experts": {"experts": 16, "chosen": 2, "ffn": 32}, "gated": True, "mlp_bias": False}


def of_megatron(world: int, pp: int, ep: int, expert_tp: int) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of ep ranks (with whole experts or cut ones), and of ranks with the same experts, in the order tp-cp-ep-dp-pp:
    megatron/core/parallel_state.py, RankGenerator(tp=expert_tp, ep=ep, dp=world / (expert_tp · ep · pp), pp=pp, cp=1).
    """
    ranks = np.arange(world).reshape(pp, -1, ep, expert_tp)
    alike = ranks.transpose(0, 2, 3, 1).reshape(ep * expert_tp * pp, -1)
    return ranks.transpose(0, 1, 3, 2).reshape(-1, ep).tolist(), alike.tolist()


@pytest.mark.parametrize(
    "plan",
    [
        {"cp": 2, "ep": 2},
        {"cp": 2, "ep": 8, "pp": 2},
        {"cp": 4, "ep": 16},
        {"ep": 4, "pp": 2},
        {"cp": 2, "ep": 4, "tp": 2, "sequence_parallel": True},
        {"cp": 2, "ep": 8, "tp": 2, "sequence_parallel": True, "expert_tp": 1, "pp": 2},
        {"cp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "expert_tp": 1},
        {"cp": 4, "ep": 2},
        {"cp": 8, "ep": 2, "pp": 2},
        {"cp": 4, "ep": 2, "tp": 2, "sequence_parallel": True},
        {"cp": 4, "ep": 4, "tp": 2, "sequence_parallel": True, "expert_tp": 1, "pp": 2},
    ],
)
def test_groups_are_those_of_megatron(toy_job, plan) -> None:
    resolved = toy_job(8, 4, model=MOE, **plan).resolve()
    exchanging, alike = of_megatron(32, plan.get("pp", 1), plan["ep"], plan.get("expert_tp", plan.get("tp", 1)))
    grid = resolved.grid
    assert sorted(grid.groups(resolved.spreading).tolist()) == sorted(exchanging)
    assert sorted(grid.groups(resolved.expert_sharing).tolist()) == sorted(alike)
    assert resolved.expert_copies == len(alike[0])


def test_experts_of_the_cp_ranks_of_a_node_are_exchanged_inside_it(toy_job, toy_prices) -> None:
    """cp = ep = 8 on nodes of 8: each of 256 tokens goes to 2 experts and back, forward and backward, in each of 4 layers; 7 of 8
    copies leave the GPU, over NVLink with 1 GB/s, however slow NICs are.
    """
    job = toy_job(8, 4, model=MOE | {"context": 2048}, sequence=2048, cp=8, ep=8, node={"nic": "1 MB/s"})
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    assert summarise(timeline).breakdown["ep exposed"] == pytest.approx(4 * 4 * 7 / 8 * 256 * 2 * 64 * 2 / 1e9, rel=1e-6)


def test_two_ep_ranks_of_four_cp_ranks(toy_job, toy_prices) -> None:
    """Volumes in elements, of 8 tokens a rank: half of the copies leave for the neighbour and back, forward and backward; keys
    and values go round all 4 cp ranks; gradients of what all 8 ranks have, and of experts that 4 of them have.
    """
    job = toy_job(8, 1, model=MOE | {"tied": False}, cp=4, ep=2, data_parallel="ddp", clip_gradients=False)
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    sent = {axis: elements for axis, (_, elements) in volumes(timeline)[0].items()}
    layers, tokens, hidden = job.model.layers, 8, 64
    experts = layers * 8 * 3 * 64 * 32
    dense = job.model.parameters - 2 * experts
    assert sent["ep"] == layers * 4 * tokens * 2 * hidden / 2
    assert sent["cp"] == pytest.approx(layers * 3 * 3 * 2 * tokens * hidden)
    assert sent["dp"] == pytest.approx(2 * dense * 7 / 8 + 2 * experts * 3 / 4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"cp": 4, "ep": 6}, "ep=6 must be a multiple of cp=4 or divide it: ep ranks in several rows of cp ranks are not"),
        ({"cp": 2, "tp": 2, "sequence_parallel": True, "expert_tp": 1, "ep": 6}, "ep=6 must be a multiple of tp·cp=4 or divide"),
        ({"cp": 4, "pp": 4, "ep": 16}, "ep=16 does not divide cp·dp = 4·2 = 8 ranks: 8 % 16 = 8"),
        ({"cp": 2, "ep": 4, "ep_nodes": 4, "routed_nodes": 2}, "ep_nodes=4 does not divide ep/cp = 2"),
    ],
)
def test_what_is_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(8, 4, model=MOE, **plan).resolve()
