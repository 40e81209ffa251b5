"""Mixtures of experts against torch.utils.flop_counter, published sizes and volumes, and counts by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shardyard import read_job
from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import Collective, Kernel
from sim.timeline import Timeline
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts, saved_tensors
from strategies.layers.tensor_overlap import Items
from strategies.lowering.lower import lower
from strategies.models.model import Model, load_model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from tests.conftest import LLAMA_LAYER
from topologies.reading import UserError

DATA = Path(__file__).parents[2] / "data" / "models"
MOE: dict[str, Any] = {
    "name": "moe",
    "hidden": 64,
    "layers": 4,
    "heads": 8,
    "vocabulary": 512,
    "context": 32,
    **LLAMA_LAYER,
    "ffn": 96,
    "experts": {"experts": 8, "chosen": 2, "ffn": 32, "shared": 1, "first_dense": 1},
}


def resolved(model: Model, **plan: Any) -> Resolved:
    return Resolved.of(Plan(**plan), model, math.prod(plan.get(axis, 1) for axis in ("tp", "cp", "ep")))


def flops(items: Items) -> float:
    return sum(item.flops for item in items if isinstance(item, Kernel))


def torch_flops(model: Model, tokens: int) -> tuple[int, int]:
    """(forward, backward) of router, routed and shared experts, each expert applied to as many tokens as the others."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    moe, functional = model.experts, torch.nn.functional
    assert moe

    def tensor(*size: int) -> Any:
        return torch.empty(*size, device="meta", requires_grad=True)

    def mlp(x: Any, ffn: int) -> Any:
        gate, up = functional.linear(x, tensor(2 * ffn, model.hidden)).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, tensor(model.hidden, ffn))

    x = tensor(tokens, model.hidden)
    with FlopCounterMode(display=False) as forward:
        weights, _ = functional.linear(x, tensor(moe.experts, model.hidden)).softmax(-1).topk(moe.chosen)
        copies = x.repeat_interleave(moe.chosen, 0).view(moe.experts, -1, model.hidden)
        routed = torch.cat([mlp(copies[expert], moe.ffn) for expert in range(moe.experts)])
        y = (routed.view(tokens, moe.chosen, -1) * weights[..., None]).sum(1) + mlp(x, moe.shared * moe.shared_ffn)
    with FlopCounterMode(display=False) as backward:
        y.backward(torch.empty_like(y))
    return forward.get_total_flops(), backward.get_total_flops()


def test_flops_as_torch_counts_them() -> None:
    model = Model(**MOE)
    part = parts(model, resolved(model, microbatch=3)).layer(1)
    attention = ("attention", "qkv", "attention output", "qkv weight", "attention output weight")
    forward, backward = (
        sum(i.flops for i in items if isinstance(i, Kernel) and i.label not in attention)
        for items in (part.forward, part.backward)
    )
    assert (forward, backward) == torch_flops(model, 3 * 32)


@pytest.mark.parametrize("name", ["mixtral", "small"])
@pytest.mark.parametrize("plan", [{}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"recompute": "full"}, {"cp": 2}])
def test_flops_and_parameters_are_the_models(name, plan) -> None:
    model = Model(**MOE) if name == "small" else load_model(str(DATA / "mixtral-8x7b.json"))[0]
    work = parts(model, resolved(model, microbatch=2, sequence=32, **plan))
    total = work.embedding.model_flops + sum(work.layer(i).model_flops for i in range(model.layers)) + work.head.model_flops
    assert total == 3 * model.forward_flops(2, 32, causal=False)

    def whole(part: LayerCost) -> int:
        return plan.get("tp", 1) * (part.parameters - part.replicated) + part.replicated

    assert [whole(work.layer(i)) for i in range(model.layers)] == [model.layer_parameters(i) for i in range(model.layers)]
    if plan.get("recompute") == "full":
        assert flops(work.layer(1).recompute) == flops(work.layer(1).forward)


@pytest.mark.parametrize(
    ("plan", "replicated"),
    [
        ({}, 9 * 64),
        ({"tp": 2}, 9 * 64),
        ({"tp": 2, "sequence_parallel": True}, 9 * 64),
        ({"tp": 2, "sequence_parallel": True, "ep": 2, "expert_tp": 1}, 64),
    ],
)
def test_biases_behind_matrices_that_are_cut_by_rows_are_on_every_tp_rank(plan, replicated) -> None:
    """8 routed experts and a shared one of 64 features; whole experts, half of them on each rank, have each bias once."""
    biased, plain = (
        parts(m, resolved(m, **plan)).layer(1) for m in (Model(**MOE | {"mlp_bias": bias}) for bias in (True, False))
    )
    tp, whole = plan.get("tp", 1), plan.get("expert_tp") == 1
    assert biased.replicated - plain.replicated == replicated
    routed = 8 * (64 + 2 * 32)  # biases of the second and of the first, gated matrix
    more = routed // 2 if whole else 8 * (64 + 2 * 32 // tp)
    assert biased.parameters - plain.parameters == more + 64 + 2 * 32 // tp


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_work_divides(plan) -> None:
    """All but the router, which without sequence parallelism every tp rank runs on all tokens."""
    model = Model(**MOE)
    alone, many = (parts(model, resolved(model, **given)).layer(1) for given in ({}, plan))

    def sums(items: Items) -> float:
        return sum(item.flops for item in items if isinstance(item, Kernel) and "router" not in item.label)

    assert sums(alone.forward) == 2 * sums(many.forward)
    assert sums(alone.backward) == 2 * sums(many.backward)
    assert alone.model_flops == many.model_flops


def test_a_tp_rank_has_its_part_of_the_shared_gate_and_up() -> None:
    """A shared expert of 32 columns on 2 ranks: 16 of the gate's and 16 of up's, one product or, in PyTorch, two."""
    model = Model(**MOE)

    def shapes(kernels: str) -> list[tuple[int, ...]]:
        layer = parts(model, resolved(model, tp=2, kernels=kernels)).layer(1)
        return [item.shape for item in layer.forward if isinstance(item, Kernel) and item.label == "shared up"]

    assert shapes("megatron") == [(1, 32, 16 + 16, 64)]
    assert shapes("compiled") == [(1, 32, 16, 64), (1, 32, 16, 64)]


def test_activations_one_by_one() -> None:
    """32 tokens of 64 features; 2 experts of 32 gated columns for each, 8 experts, one shared."""
    model = Model(**MOE)
    dense, saved = (saved_tensors(model, resolved(model), layer=layer) for layer in (0, 1))
    assert {name: size for name, size in saved.items() if name not in dense} == {
        "mlp input": 2 * 32 * 64,
        "router scores": 2 * 32 * 8,
        "expert up input": 2 * 64 * 64,
        "expert up output": 2 * 64 * 64,
        "expert down input": 2 * 64 * 32,
        "shared up output": 2 * 32 * 64,
        "shared down input": 2 * 32 * 32,
    }


def test_who_weighs_results_keeps_them() -> None:
    """Megatron-LM's experts weigh in their activation; torch.compile's combine needs the results for the weights' gradient."""
    model = Model(**MOE)
    weighed = saved_tensors(model, resolved(model, kernels="compiled"), layer=1)
    assert weighed["expert results"] == 2 * 64 * 64


def test_experts_are_one_batched_product() -> None:
    """3 tokens with 2 experts each of 8 make 6 copies: at most 6 experts work. FLOPs are of the copies, rounded rows or not."""
    model = Model(**MOE)
    for tokens, shape in ((3, (6, 1, 64, 64)), (32, (8, 8, 64, 64)), (30, (8, 8, 64, 64))):
        part = parts(model, resolved(model, sequence=tokens)).layer(1)
        up = next(item for item in part.forward if isinstance(item, Kernel) and item.label == "expert up")
        assert (up.shape, up.flops) == (shape, 2 * tokens * 2 * 64 * 64)


def test_a_mixture_has_dense_layers_too() -> None:
    model = Model(**MOE)
    work = parts(model, resolved(model))
    assert work.kinds == (0, 1, 1, 1)
    assert "mlp up" in {item.label for item in work.layer(0).forward}


def test_collectives_of_a_layer_with_tp() -> None:
    """As of a dense layer, and with sequence parallelism `chosen` times the tokens around the experts."""
    model = Model(**MOE | {"experts": MOE["experts"] | {"shared": 0}})
    size = 2 * 32 * 64

    def sizes(**plan: Any) -> list[tuple[str, float]]:
        items = parts(model, resolved(model, tp=2, **plan)).layer(1).forward
        return [(item.operation, item.bytes) for item in items if isinstance(item, Collective)]

    assert sizes() == [("all_reduce", size)] * 2
    two = [("all_gather", size), ("reduce_scatter", size), ("all_gather", 2 * size), ("reduce_scatter", 2 * size)]
    assert sizes(sequence_parallel=True) == two


# expert parallelism

PSI = Model(**MOE).parameters
EXPERTS = 3 * 8 * 3 * 64 * 32  # elements of the routed experts: 3 layers, 8 experts, 3 matrices
TOKENS = 32 * 64  # elements of a microbatch's residual stream


@pytest.fixture
def play(toy_job, toy_prices):
    def player(fold: bool = True, **plan: Any) -> Timeline:
        job = toy_job(8, model=MOE, **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(), fold=fold)

    return player


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_copies_of_tokens_are_exchanged_four_times(play, ep) -> None:
    """GShard, arXiv:2006.16668: to the experts and back, (ep − 1)/ep of chosen · tokens · hidden; and backward."""
    assert volumes(play(ep=ep, clip_gradients=False))[0]["ep"][1] == pytest.approx(3 * 4 * 2 * TOKENS * (ep - 1) / ep)
    uneven = play(ep=ep, imbalance=1.5, clip_gradients=False)
    assert volumes(uneven)[0]["ep"][1] == pytest.approx(1.5 * 3 * 4 * 2 * TOKENS * (ep - 1) / ep)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize(("hook", "factor"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
@pytest.mark.parametrize("plan", [{}, {"cp": 2}, {"overlap": False}, {"bucket": "10 kB"}])
def test_experts_are_reduced_over_the_ranks_that_have_them(play, ep, hook, factor, plan) -> None:
    """Volumes of arXiv:1910.02054 section 7: over n = 8 ranks for what all hold, over n = 8 / ep for 1/ep of the experts.

    All shapes are multiples of 64 elements, so that Megatron-LM fills up a bucket of its distributed optimizer by 64 or by none.
    """
    if ep * plan.get("cp", 1) > 8:
        pytest.skip("more than 8 GPUs")
    timeline = play(ep=ep, data_parallel=hook, clip_gradients=False, **plan)
    same = 8 // ep  # ranks with the same experts
    expected = factor * ((PSI - EXPERTS) * 7 / 8 + EXPERTS / ep * (same - 1) / same)
    buckets = sum(isinstance(op.work, Collective) and op.work.label == "gradients" for op in timeline.program.cohorts[0].ops)
    gaps = (volumes(timeline)[0]["dp"][1] - expected) / factor
    assert -1e-6 <= gaps <= 64 * buckets * (hook == "zero1")


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_all_states_of_all_ranks_are_the_models(play, ep) -> None:
    """Sharded over all of their copies, states are there once, whatever ep is; whole, experts are there 8 / ep times."""
    sharded, whole = (dict(play(ep=ep, data_parallel=hook).program.cohorts[0].resident) for hook in ("zero3", "ddp"))
    assert 8 * sharded["optimizer"] == pytest.approx(12 * PSI)
    assert 8 * sharded["parameter"] == pytest.approx(2 * PSI)
    assert 8 * whole["parameter"] == pytest.approx(2 * (8 * (PSI - EXPERTS) + 8 / ep * EXPERTS))


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_experts_work_divides_and_the_busiest_rank_counts(ep) -> None:
    """ep ranks have ep times the tokens of one, and 1/ep of the experts each: as many products."""
    model = Model(**MOE)
    alone, many, busy = (
        parts(model, resolved(model, **plan)).layer(1) for plan in ({}, {"ep": ep}, {"ep": ep, "imbalance": 1.25})
    )
    assert flops(alone.forward) == flops(many.forward)
    assert flops(alone.backward) == flops(many.backward)
    assert alone.model_flops == many.model_flops == busy.model_flops
    assert flops(busy.forward) - flops(many.forward) == 0.25 * 3 * 2 * 32 * 2 * 64 * 32
    up = next(item for item in many.forward if isinstance(item, Kernel) and item.label == "expert up")
    assert up.shape == (8 // ep, 8 * ep, 64, 64)
    assert alone.parameters - many.parameters == EXPERTS // 3 * (ep - 1) // ep


PLANS = [
    {"ep": 4},
    {"ep": 2, "cp": 2, "data_parallel": "zero2"},
    {"ep": 2, "tp": 2, "sequence_parallel": True},
    {"ep": 2, "pp": 2, "data_parallel": "zero3", "accumulation": 4, "recompute": "full"},
    {"ep": 4, "data_parallel": "zero1"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_folded_equals_unfolded(play, plan) -> None:
    folded, unfolded = (play(fold=fold, algorithm="ring", **plan) for fold in (True, False))
    assert unfolded.step == pytest.approx(folded.step, rel=1e-3)
    assert volumes(unfolded)[0].keys() == volumes(folded)[0].keys() >= {"ep"}
    for axis, sizes in volumes(folded)[0].items():
        assert volumes(unfolded)[0][axis] == pytest.approx(sizes)


MISTAKES = [
    (dict(ep=3, dp=8), "ep=3 does not divide 8 experts: 8 % 3 = 2"),
    (dict(ep=8, pp=2), "ep=8 does not divide dp=4: 4 % 8 = 4"),
    (dict(ep=2, tp=2), "ep=2 with tp=2 needs sequence_parallel=true"),
    (dict(imbalance=1.5), "imbalance=1.5 needs ep > 1"),
    (dict(ep=2, shard=4, data_parallel="zero3"), "shard=4 with ep=2 is not simulated yet"),
    (dict(imbalance=0.5), "imbalance=0.5: input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("plan", "message"), MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_one_line_with_the_rule(plan, message) -> None:
    with pytest.raises(UserError) as caught:
        read_job(model=str(DATA / "mixtral-8x7b.json"), cluster="dgx-h100", plan=plan).resolve()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(UserError, match="ep=2 needs a mixture of experts, and llama-3.1-8b has none"):
        read_job(model="llama-3.1-8b", cluster="dgx-h100", plan={"ep": 2}).resolve()


FP8: dict[str, Any] = {"fp8": {"scaling": "mxfp8"}}


def padding(**plan: Any) -> dict[str, list[float]]:
    """Bytes of the copies with padding or without it in a layer's forward and in its backward pass, 32 tokens of 64 features."""
    model = Model(**MOE)
    layer = parts(model, resolved(model, **plan)).layer(1)
    return {
        phase: [item.bytes for item in items if isinstance(item, Kernel) and item.label == "expert padding"]
        for phase, items in (("forward", layer.forward), ("backward", layer.backward))
    }


def test_experts_in_fp8_have_padded_rows() -> None:
    """TEGroupedMLP: tokens and their weights in fp32, and results, each read and written; gradients the other way round."""
    tokens, weights = (2 * width * 32 * 2 for width in (2 * 64, 4))
    assert padding(**FP8) == {"forward": [tokens, weights, tokens], "backward": [tokens, tokens, weights]}
    assert padding(**FP8, ep=4, token_dispatcher="deepep")["forward"] == [tokens, weights, tokens]


@pytest.mark.parametrize(
    "plan",
    [
        {},
        FP8 | {"ep": 4, "token_dispatcher": "hybridep"},
        {"fp8": {"dispatch": True}, "ep": 4},
        FP8 | {"capacity_factor": 1.0, "pad_to_capacity": True},
    ],
)
def test_rows_of_experts_that_need_no_padding(plan) -> None:
    """In bf16; where HybridEP, or what brings them in fp8, has padded them; where all have their capacity."""
    assert padding(**plan) == {"forward": [], "backward": []}


def test_fused_routing_takes_few_kernels() -> None:
    """transformer_engine/pytorch/router.py: a kernel for the scores that are chosen from, one for those of the loss, one for the
    loss; PyTorch adds up the map.
    """
    model = Model(**MOE)

    def kernels(**plan: Any) -> tuple[int, int]:
        layer = parts(model, resolved(model, **plan)).layer(1)
        names = "router softmax", "routing"
        forward, backward = (
            sum(isinstance(item, Kernel) and item.label in names for item in items) for items in (layer.forward, layer.backward)
        )
        return forward, backward

    assert kernels() == (1 + 16 + 14 + 5, 1 + 16)
    assert kernels(router_fusion=True) == (1 + 3 + 11 + 5, 1 + 2)
