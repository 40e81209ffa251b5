"""Latent attention: FLOPs and parameters of DeepSeek's published sizes, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sim.program import Collective, Kernel, SharedItems
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts, saved_tensors
from strategies.models.model import Model, load_model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved

DATA = Path(__file__).parents[2] / "data" / "models"


def model_of(name: str) -> Model:
    return load_model(str(DATA / f"{name}.json"))[0]


def resolved(model: Model, **plan: Any) -> Resolved:
    return Resolved.of(Plan(**plan), model, math.prod(plan.get(axis, 1) for axis in ("tp", "cp", "ep")))


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
@pytest.mark.parametrize(
    "plan", [{}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"recompute": "full"}, {"attention": "materialised"}]
)
def test_flops_and_parameters_are_the_models(name, plan) -> None:
    model = model_of(name)
    work = parts(model, resolved(model, microbatch=2, sequence=64, **plan))
    total = work.embedding.model_flops + sum(work.layer(i).model_flops for i in range(model.layers)) + work.head.model_flops
    assert total == 3 * model.forward_flops(2, 64, causal=False)

    def whole(part: LayerCost) -> int:
        return plan.get("tp", 1) * (part.parameters - part.replicated) + part.replicated

    assert [whole(work.layer(i)) for i in range(model.layers)] == [model.layer_parameters(i) for i in range(model.layers)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kernels_execute_the_models_products(tp) -> None:
    """Causal attention executes half of its products; with sequence parallelism no matrix runs twice."""
    model = model_of("deepseek-v3")
    part = parts(model, resolved(model, tp=tp, sequence_parallel=tp > 1, sequence=64)).layer(0)
    executed = sum(item.flops for item in part.forward if isinstance(item, Kernel))
    half = 64 * 64 * model.heads * (192 + 128)
    assert tp * executed + half == part.model_flops / 3
    gathers = [item.bytes for item in part.forward if isinstance(item, Collective) and item.operation == "all_gather"]
    assert gathers == ([2 * 64 * size for size in (1536, 512, 7168)] if tp > 1 else [])  # both latents, the MLP's input


def test_a_ring_passes_on_values_that_are_narrower_than_keys() -> None:
    """Transformer Engine joins keys and values, whatever the features of each (torch.cat((k.view(-1), v.view(-1))) in
    AttnFuncWithCPAndKVP2P): 128 heads of 192 + 128 features go round, their gradients too.
    """
    model = model_of("deepseek-v3")
    part = parts(model, resolved(model, cp=4, sequence=64)).layer(0)
    block = 2 * 64 // 4 * 128 * (192 + 128)  # bytes of a rank's tokens
    every = (SharedItems(items).collectives for items in (part.forward, part.backward))
    sent = [sum(work.bytes * work.repeat for work in works) for works in every]
    assert sent == pytest.approx([4 * block, 2 * 4 * block])  # full buffers


def test_ulysses_exchanges_results_of_the_width_of_values() -> None:
    """All-to-alls of queries, keys, values and results: 128 heads of 192, 192, 128 and 128 features a token."""
    model = model_of("deepseek-v3")
    part = parts(model, resolved(model, cp=4, cp_method="ulysses", sequence=64)).layer(0)
    sizes = [item.bytes for item in part.forward if isinstance(item, Collective)]
    assert sizes == [2 * 64 // 4 * 128 * features for features in (192, 192, 128, 128)]


def test_heads_that_nobody_shares_are_not_repeated() -> None:
    """torchtitan's repeat_kv with as many key and value heads as queries keeps and sends what there is."""
    model, kept = model_of("deepseek-v3"), []
    for options in ({}, {"framework": {"repeated_keys": True}}):
        plan = resolved(model, cp=2, sequence=64, kernels="compiled", **options)
        kept.append((saved_tensors(model, plan), [(type(item), item.bytes) for item in _collectives(model, plan)]))
    assert kept[0] == kept[1]


def _collectives(model: Model, plan: Resolved) -> list[Collective]:
    return [item for item in parts(model, plan).layer(0).forward if isinstance(item, Collective)]


def test_activations_one_by_one() -> None:
    """DeepSeek-V3: 128 heads of 192 = 128 + 64 for queries and keys, 128 for values; ranks 1536 and 512. One token, bf16."""
    model = model_of("deepseek-v3")
    saved = saved_tensors(model, resolved(model, sequence=1))
    elements = {name: size / 2 for name, size in saved.items() if name != "log-sum-exp"}
    assert elements == {
        "layer input": 7168,
        "qkv input": 7168,
        "query norm input": 1536,
        "query up input": 1536,
        "key value norm input": 512,
        "key value up input": 512,
        "queries": 128 * 192,
        "keys": 128 * 192,
        "values": 128 * 128,
        "attention output input": 128 * 128,
        "mlp norm input": 7168,
        "mlp up input": 7168,
        "mlp up output": 2 * 18432,
        "mlp down input": 18432,
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_rotary_features_and_keys_by_hand(tp) -> None:
    """DeepSeek-V3: 64 features of each head's query and of the one key are turned; keys are 128 features of each head and these
    64, of which every head gets a copy. Two bytes each, read and written.
    """
    heads, tokens, element = 128 // tp, 16, 2
    model = model_of("deepseek-v3")
    part = parts(model, resolved(model, sequence=tokens, tp=tp, sequence_parallel=tp > 1)).layer(0)
    moved = {item.label: item.bytes for item in part.forward if isinstance(item, Kernel) and item.label in ("rotary", "keys")}
    assert moved["rotary"] == 2 * element * tokens * (heads * 64 + 64)
    assert moved["keys"] == element * tokens * (heads * 128 + 64 + heads * 192)
    back = {item.label: item.bytes for item in part.input_gradient if isinstance(item, Kernel)}
    assert back["keys"] == moved["keys"]
    assert back["qkv input sum"] == 3 * element * tokens * 7168 // tp  # of the gradients of the two ways into latents
