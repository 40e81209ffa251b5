"""Mixtures of experts against torch.utils.flop_counter, published sizes and volumes, and counts by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sim.program import Collective, Kernel
from strategies.layers import Items, Part, parts, saved_tensors
from strategies.model import Model, load_model
from strategies.plan import Plan, Resolved

DATA = Path(__file__).parents[1] / "data" / "models"
MOE: dict[str, Any] = {
    "name": "moe", "hidden": 64, "layers": 4, "heads": 8, "vocabulary": 512, "context": 32, "gated": True, "ffn": 96,
    "positions": "rotary", "norm": "rmsnorm", "tied": False, "attention_bias": False, "output_bias": False, "mlp_bias": False,
    "experts": {"experts": 8, "chosen": 2, "ffn": 32, "shared": 1, "first_dense": 1},
}  # fmt: skip


def resolved(model: Model, **plan: Any) -> Resolved:
    return Plan(**plan).resolve(model, math.prod(plan.get(axis, 1) for axis in ("tp", "cp", "ep")))


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

    def whole(part: Part) -> int:
        return plan.get("tp", 1) * (part.parameters - part.replicated) + part.replicated

    assert [whole(work.layer(i)) for i in range(model.layers)] == [model.layer_parameters(i) for i in range(model.layers)]
    if plan.get("recompute") == "full":
        assert flops(work.layer(1).recompute) == flops(work.layer(1).forward)


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_work_divides(plan) -> None:
    """All but the router, which without sequence parallelism every tp rank runs on all tokens."""
    model = Model(**MOE)
    one, many = (parts(model, resolved(model, **given)).layer(1) for given in ({}, plan))

    def sums(items: Items) -> float:
        return sum(item.flops for item in items if isinstance(item, Kernel) and "router" not in item.label)

    assert sums(one.forward) == 2 * sums(many.forward)
    assert sums(one.backward) == 2 * sums(many.backward)
    assert one.model_flops == many.model_flops


def test_activations_one_by_one() -> None:
    """32 tokens of 64 features; 2 experts of 32 gated columns for each, 8 experts, one shared."""
    model = Model(**MOE)
    dense, saved = (saved_tensors(model, resolved(model), layer=layer) for layer in (0, 1))
    assert {name: size for name, size in saved.items() if name not in dense} == {
        "mlp input": 2 * 32 * 64, "router scores": 2 * 32 * 8, "expert up input": 2 * 64 * 64,
        "expert up output": 2 * 64 * 64, "expert down input": 2 * 64 * 32, "expert results": 2 * 64 * 64,
        "shared up output": 2 * 32 * 64, "shared down input": 2 * 32 * 32,
    }  # fmt: skip


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
