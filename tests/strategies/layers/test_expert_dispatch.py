"""Capacity, whole experts and exchanges across nodes: copies and volumes counted by hand; and norms over all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import read_job, simulate
from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import Block, Collective, Join, Kernel, Run, Start
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.plan.rules.experts import experts as rules
from topologies.reading import UserError

MOE: dict[str, Any] = {
    "name": "moe",
    "hidden": 64,
    "layers": 4,
    "heads": 8,
    "vocabulary": 512,
    "context": 32,
    "gated": True,
    "ffn": 96,
    "tied": False,
    "mlp_bias": False,
    "experts": {"experts": 8, "chosen": 2, "ffn": 32},
}
TOKENS, HIDDEN, BYTES = 32, 64, 2


def layer(gpus: int = 8, **plan: Any) -> LayerCost:
    model = Model(**MOE)
    return parts(model, Resolved.of(Plan(**plan), model, gpus)).layer(1)


def rows(part: LayerCost) -> float:
    """Tokens that the rank's experts compute."""
    up = next(item for item in part.forward if isinstance(item, Kernel) and item.label == "expert up")
    return up.flops / (2 * HIDDEN * 64)


def exchanged(part: LayerCost) -> float:
    """Bytes of the first exchange's buffer."""
    return next(item.bytes for item in part.forward if isinstance(item, Collective) and item.axis == "ep")


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"ep": 4}, 4),
        ({"ep": 4, "imbalance": 2.0}, 4),
        ({"ep": 2, "cp": 2}, 2),
        ({"ep": 2, "tp": 2, "sequence_parallel": True}, 4),
        ({"ep": 4, "tp": 2, "sequence_parallel": True, "expert_tp": 1}, 4),
        ({"tp": 2, "sequence_parallel": True}, 2),
    ],
)
def test_all_tokens_are_gathered_and_their_sums_scattered(toy_job, toy_prices, plan, ranks) -> None:
    """megatron/core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher: hidden states of the tp and ep ranks are
    gathered, forward and for the gradient of the sums, which are reduce-scattered, and so back; the map (a byte each) and the
    weights of all experts go with them. Of n ranks each sends n − 1 parts.
    """
    job = toy_job(8, 1, model=MOE, token_dispatcher="allgather", clip_gradients=False, **plan)
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    tokens = TOKENS // plan.get("cp", 1) // plan.get("tp", 1)
    per_token = BYTES * (4 * HIDDEN + 2 * 8) + 8
    label = {"dispatch", "combine", "routing map", "routing weights"}
    works = [item for op in timeline.program.cohorts[0].ops if isinstance(op.work, Block) for item in op.work.items()]
    sent = sum(
        times * work.bytes * (ranks - 1) / ranks for times, work in works if isinstance(work, Collective) and work.label in label
    )
    assert sent == pytest.approx(4 * (ranks - 1) * tokens * per_token)
    if "ep" in plan:
        assert volumes(timeline)[0]["ep"][0] == pytest.approx(sent)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"ep": 4, "capacity_factor": 1.5}, "token_dispatcher=allgather contradicts capacity_factor=1.5: take alltoall"),
        ({"ep": 4, "kernels": "compiled"}, "token_dispatcher=allgather contradicts kernels=compiled"),
        ({"ep": 4, "dispatcher_sms": 4}, "dispatcher_sms=4 needs token_dispatcher=deepep or hybridep"),
        ({"tp": 2}, "token_dispatcher=allgather with tp=2 needs sequence_parallel=true, as in Megatron-LM"),
        ({}, "token_dispatcher=allgather needs ep > 1: with ep=1 nothing is exchanged"),
    ],
)
def test_what_gathers_no_tokens(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(8, 1, model=MOE, token_dispatcher="allgather", **plan).resolve()


@pytest.mark.parametrize(
    ("plan", "load"),
    [
        ({}, 1.0),
        ({"imbalance": 1.5}, 1.5),
        ({"imbalance": 1.5, "capacity_factor": 1.25}, 1.25),
        ({"capacity_factor": 1.25}, 1.0),
        ({"capacity_factor": 1.25, "pad_to_capacity": True}, 1.25),
        ({"capacity_factor": 0.5}, 0.5),
    ],
)
def test_an_expert_takes_no_more_than_its_capacity(plan, load) -> None:
    """GShard, arXiv:2006.16668: what exceeds the capacity is dropped; Megatron-LM can pad all experts to it."""
    part = layer(ep=4, **plan)
    assert rows(part) == TOKENS * 2 * load
    assert exchanged(part) == TOKENS * 2 * load * HIDDEN * BYTES
    assert layer(ep=4).model_flops == part.model_flops


def test_whole_experts_are_spread_over_tp_ranks_too() -> None:
    """2 tp and 2 dp ranks: cut experts are gathered for over tp; whole ones are on 4 ranks, with one exchange among these."""
    common = {"tp": 2, "sequence_parallel": True}
    cut, whole = layer(**common, ep=2), layer(**common, ep=4, expert_tp=1)
    assert (cut.experts, whole.experts) == (4 * 3 * HIDDEN * 32 // 2, 2 * 3 * HIDDEN * 32)
    assert cut.parameters == whole.parameters
    assert rows(cut) == rows(whole) == TOKENS  # half of the columns for all 64 copies, or all of them for half
    forward = [item for item in whole.forward if isinstance(item, Collective)]
    assert [item.axes for item in forward if item.axis == "ep"] == [("tp", "ep")] * 2
    labels = {item.label for item in forward if item.axis == "tp"}
    assert "dispatch" in {item.label for item in cut.forward if isinstance(item, Collective) and item.axis == "tp"}
    assert not labels & {"dispatch", "combine"}
    assert sum(i.flops for i in cut.backward if isinstance(i, Kernel)) == sum(
        i.flops for i in whole.backward if isinstance(i, Kernel)
    )


@pytest.fixture
def play(toy_job, toy_prices):
    def player(**plan: Any):
        job = toy_job(4, 4, model=MOE, **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return player


def test_whole_experts_are_played(play) -> None:
    """All-to-all among 8 ranks of 16 tokens, two copies each: 4 layers, there and back, forward and backward."""
    volume = volumes(play(tp=2, ep=8, dp=8, sequence_parallel=True, expert_tp=1, clip_gradients=False))[0]["ep"][1]
    assert volume == pytest.approx(4 * 4 * (16 * 2 * HIDDEN) * 7 / 8)


def test_experts_on_all_tp_and_dp_ranks(toy_job, toy_prices) -> None:
    """Megatron-LM's --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 with tp 2 and dp 16: a rank has one of 32
    experts, no rank has the same, and every copy of a token goes to one of 32 ranks.
    """
    moe = MOE | {"experts": {"experts": 32, "chosen": 2, "ffn": 32}}
    job = toy_job(8, 4, model=moe, tp=2, ep=32, expert_tp=1, sequence_parallel=True, clip_gradients=False)
    plan = job.resolve()
    assert (plan.dp, plan.expert_copies) == (16, 1)
    assert parts(job.model, plan).layer(1).experts == 3 * HIDDEN * 32
    timeline = run(lower(job.model, plan), job.cluster.topology(), toy_prices())
    assert volumes(timeline)[0]["ep"][1] == pytest.approx(4 * 4 * (16 * 2 * HIDDEN) * 31 / 32)
    assert sorted(rank for group in plan.grid.groups(("tp", "ep")) for rank in group) == list(range(32))
    assert len(plan.grid.groups(("tp", "ep"))) == 1


@pytest.mark.parametrize("routed", [1, 2])
def test_tokens_cross_to_a_node_once(play, routed: int) -> None:
    """DeepSeek-V3: `routed` copies of a token cross the network of 4 nodes, then `chosen` go on among the 2 ranks of a node."""
    timeline = play(ep=8, ep_nodes=4, routed_nodes=routed, order="tp-cp-ep-dp-pp", clip_gradients=False)
    assert volumes(timeline)[0]["ep"][1] == pytest.approx(4 * 4 * TOKENS * HIDDEN * (routed * 3 / 4 + 2 * 1 / 2))
    items = layer(gpus=16, ep=8, ep_nodes=4, routed_nodes=routed).input_gradient
    exchanges = [item for item in items if isinstance(item, Start | Join) or (isinstance(item, Collective) and item.axis == "ep")]
    assert [type(item) for item in exchanges] == [Start, Collective, Join] * 2  # both steps at once, which is waited for
    assert [item.collective.axes for item in exchanges[::3]] == [("ep_node",)] * 2
    assert timeline.program.grid.sizes[2:5] == (("ep", 2), ("ep_node", 4), ("dp", 2))


def test_nodes_pass_on_what_has_come_while_more_is_on_its_way(play) -> None:
    """Of the steps across nodes and inside them the longer counts."""
    plan = {"ep": 8, "ep_nodes": 4, "routed_nodes": 2, "order": "tp-cp-ep-dp-pp"}
    timeline, part, seconds = play(**plan), layer(gpus=16, **plan), dict[str, float]()
    for item in part.forward:
        work = item.collective if isinstance(item, Start) else item
        if isinstance(work, Collective) and work.axis == "ep":
            seconds[work.label] = timeline.op_costs.collective(work, 0).alone
    assert len(seconds) == 4
    block = timeline.op_costs.block(Block("forward", (Run(1, part.forward),)), 0)
    waited = sum(value for (axis, _), value in block.parts.items() if axis == "ep")
    assert waited == pytest.approx(sum(max(seconds[name], seconds[f"{name} across nodes"]) for name in ("dispatch", "combine")))


@pytest.mark.parametrize(("nodes", "dispatch", "combine"), [(2, 90e9, 81e9), (4, 61e9, 61e9)])
def test_exchanges_across_nodes_are_priced_as_deepep_measured_them(nodes: int, dispatch: float, combine: float) -> None:
    """github.com/deepseek-ai/DeepEP, H100 and ConnectX-7, fp8 dispatch and bf16 combine: bytes per second of what each token
    sends to all of its nodes, its own too. Prices are of NCCL, and were not fitted to it.
    """
    fp8, ep = {"dispatch": True}, 8 * nodes
    plan = {"ep": ep, "ep_nodes": nodes, "routed_nodes": nodes, "data_parallel": "zero1", "sequence": 4096, "fp8": fp8}
    job = read_job(model="deepseek-v3", cluster="dgx-h100", nodes=nodes, plan=plan, overrides={"model.layers": 4})
    timeline, rates = simulate(job), dict[str, float]()
    for item in parts(job.model, job.resolve()).layer(3).forward:
        if isinstance(item, Start):
            rates[item.collective.label] = item.collective.bytes / timeline.op_costs.collective(item.collective, 0).alone
    measured = {"dispatch across nodes": dispatch, "combine across nodes": combine}
    assert rates == {name: pytest.approx(rate, rel=0.18) for name, rate in measured.items()}


@pytest.mark.parametrize("fp8", [{}, {"dispatch": True}])
def test_tokens_are_sent_in_fp8_and_results_in_16_bits(fp8) -> None:
    """DeepSeek-V3, arXiv:2412.19437, section 3.3.2: forward dispatch, and backward the gradient of combine."""
    part = layer(ep=4, fp8=fp8)
    width = {
        name: [item.bytes / (TOKENS * 2 * HIDDEN) for item in items if isinstance(item, Collective) and item.axis == "ep"]
        for name, items in (("forward", part.forward), ("backward", part.input_gradient))
    }
    assert width == dict.fromkeys(("forward", "backward"), [1, 2] if fp8 else [2, 2])


def test_gradients_of_all_but_experts_are_summed_across_ep_nodes_too(play) -> None:
    """Two ways to lay out the same ranks reduce the same gradients."""
    flat, routed = play(ep=8), play(ep=8, ep_nodes=4, routed_nodes=2)
    assert volumes(flat)[0]["dp"] == pytest.approx(volumes(routed)[0]["dp"])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"pad_to_capacity": True}, "pad_to_capacity=true needs capacity_factor"),
        ({"expert_tp": 4, "tp": 2}, "expert_tp=4 is not simulated: only tp=2 and 1 are"),
        ({"expert_tp": 1, "tp": 2}, "expert_tp=1 with tp=2 needs sequence_parallel=true"),
        ({"expert_tp": 1, "tp": 4, "ep": 16, "sequence_parallel": True}, "ep=16 does not divide 8 experts: 8 % 16 = 8"),
        ({"expert_tp": 1, "tp": 4, "ep": 2, "sequence_parallel": True}, "ep=2 with expert_tp=1 must be a multiple of tp=4"),
        ({"expert_tp": 1, "tp": 2, "pp": 4, "ep": 8, "sequence_parallel": True}, "ep=8 does not divide tp·dp = 2·2 = 4 ranks"),
        ({"ep": 4, "ep_nodes": 2}, "ep_nodes=2 needs routed_nodes: to how many of these nodes each token goes"),
        ({"ep": 4, "routed_nodes": 2}, "routed_nodes=2 needs ep_nodes above 1"),
        ({"ep": 4, "ep_nodes": 3, "routed_nodes": 2}, "ep_nodes=3 does not divide ep=4"),
        ({"ep": 4, "ep_nodes": 4, "routed_nodes": 3}, "routed_nodes=3 exceeds 2"),
    ],
)
def test_what_makes_no_sense_is_refused(plan, message) -> None:
    with pytest.raises(UserError, match=message):
        layer(gpus=16, **plan)


def test_whole_experts_are_spread_over_tp_ranks_before_dp_ranks() -> None:
    """ep 8 with tp 4: with whole experts 2 dp ranks have those of 8 ranks; cut ones are on 8 dp ranks."""
    fields: dict[str, Any] = {"tp": 4, "sequence_parallel": True, "ep": 8}
    assert Plan(**fields, expert_tp=1).ep_of_dp == 2
    assert Plan(**fields).ep_of_dp == Plan(**fields, expert_tp=4).ep_of_dp == 8
    assert Plan(ep=8, expert_tp=1).ep_of_dp == 8
    assert Plan(**fields, expert_tp=1).whole_experts
    assert not Plan(ep=8, expert_tp=1).whole_experts  # of one tp rank every expert is whole


def test_tp_divides_the_columns_of_experts_that_are_cut() -> None:
    """8 ranks: routed experts of 36 columns, unless each is whole on its rank; two shared ones of 18 are one of 36."""

    def broken(plan: dict[str, Any], **experts: int) -> list[str]:
        moe = MOE["experts"] | {"ffn": 32} | experts
        fields = {"tp": 8, "sequence_parallel": True} | plan
        return list(rules(Model(**MOE | {"experts": moe}), Plan(**fields), dp=1))

    message = ["tp=8 does not divide 36 columns of an expert"]
    whole = {"expert_tp": 1, "ep": 8}
    assert broken({}) == broken(whole) == broken(whole, ffn=36) == []
    assert broken({}, ffn=36) == message
    assert broken({}, shared=2, shared_ffn=18) == broken(whole, shared=2, shared_ffn=18) == message
    assert broken({}, shared=2, shared_ffn=20) == []


@pytest.mark.parametrize("field", [{"capacity_factor": 1.25}, {"expert_tp": 1}])
def test_a_dense_model_has_no_experts(toy_job, field) -> None:
    with pytest.raises(UserError, match="needs a mixture of experts, and small has none"):
        toy_job(8, **field).resolve()


# norms over all ranks


@pytest.mark.parametrize("plan", [{"dp": 4}, {"dp": 2, "cp": 2}])
def test_norms_exchange_what_torch_exchanges(toy_job, toy_prices, plan) -> None:
    """torch.nn.SyncBatchNorm of C features on n ranks: an all-gather of n·(2C + 1) numbers, backward an all-reduce of 2C."""
    norms, features, n = 2 * 4 + 1, 64, 4  # of 4 layers, and the final one

    def sent(sync: bool) -> float:
        job = toy_job(4, **plan, sync_norm=sync)
        return volumes(run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices()))[0]["dp"][1]

    expected = norms * ((n - 1) * (2 * features + 1) + 2 * (n - 1) / n * 2 * features)
    assert sent(True) - sent(False) == pytest.approx(expected)


def test_norms_are_over_several_ranks_of_whole_features(toy_job) -> None:
    with pytest.raises(UserError, match="sync_norm=true needs dp or cp above 1"):
        toy_job(1, sync_norm=True).resolve()
    with pytest.raises(UserError, match="sync_norm=true with sequence_parallel=true is not simulated"):
        toy_job(4, tp=2, sequence_parallel=True, sync_norm=True).resolve()
