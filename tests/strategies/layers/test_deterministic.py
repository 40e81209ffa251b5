"""The same bits in every run: what PyTorch fills before it is made, and kernels that add in a fixed order."""

from __future__ import annotations

import pytest

from sim.program import Kernel
from strategies.layers.model_costs import parts
from topologies.reading import UserError

TOKENS, HIDDEN, VOCABULARY = 32, 64, 512  # of the toy job


def part_of(toy_job, name: str, **plan):
    model = {"vocabulary": VOCABULARY} | ({"tied": False, "gated": False} if name == "head" else {})
    job = toy_job(plan.get("tp", 1) * plan.get("cp", 1), model=model, precision="bf16", **plan)
    all_parts = parts(job.model, job.resolve())
    return all_parts.head if name == "head" else all_parts.layer(0)


def fills(items) -> float:
    return sum(item.bytes for item in items if isinstance(item, Kernel) and item.label.endswith(" fill"))


def products(items) -> float:
    """Bytes of the products' results in 16 bits."""
    return sum(2.0 * item.shape[1] * item.shape[2] for item in items if isinstance(item, Kernel) and item.kind == "gemm")


def test_results_of_products_norms_and_attention_are_filled_first(toy_job) -> None:
    layer, stream = part_of(toy_job, "layer", deterministic=True, accumulation_fusion=False), 2 * TOKENS * HIDDEN
    assert fills(layer.forward) == products(layer.forward) + 2 * stream + stream  # two norms, the attention's result
    gradients = 3 * stream  # of queries, keys and values
    assert fills(layer.backward) == products(layer.backward) + 2 * stream + gradients


def test_gradients_that_the_product_adds_up_are_not_new(toy_job) -> None:
    fused, apart = (part_of(toy_job, "layer", deterministic=True, accumulation_fusion=each) for each in (True, False))
    assert fills(apart.backward) - fills(fused.backward) == 2 * sum(
        item.shape[1] * item.shape[2] for item in fused.weight_gradient if isinstance(item, Kernel) and item.kind == "gemm"
    )


def test_query_gradients_are_added_in_order(toy_job) -> None:
    layer = part_of(toy_job, "layer", deterministic=True)
    (kernel,) = (item for item in layer.backward if isinstance(item, Kernel) and item.kind == "attention_backward")
    assert kernel.ordered
    assert not any(item.ordered for item in part_of(toy_job, "layer").backward if isinstance(item, Kernel))


def test_the_loss_is_operator_by_operator_and_its_casts_are_filled(toy_job) -> None:
    head, plain = part_of(toy_job, "head", deterministic=True), part_of(toy_job, "head", loss="operators")
    logits = TOKENS * VOCABULARY
    moved = [item.bytes / logits for item in plain.forward if isinstance(item, Kernel) and item.label == "loss"]
    assert moved == [2 + 4, 4, 8, 8, 4, 8]  # cast, maximum, difference, exponential, sum, quotient
    assert fills(item for item in head.forward if item.label == "loss fill") == 4 * logits
    assert fills(item for item in head.backward if item.label == "loss fill") == 2 * logits


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (dict(loss="fused"), "deterministic=true contradicts loss=fused"),
        (dict(tp=2, sequence_parallel=True, overlap_tp="pieces"), "deterministic=true contradicts overlap_tp=pieces"),
        (dict(kernels="torch"), "deterministic=true is not simulated with kernels=torch"),
        (dict(attention="materialised"), "deterministic=true is not simulated with attention=materialised"),
        (dict(cp=2, tp=2), "deterministic=true is not simulated with cp=2"),
    ],
)
def test_what_is_not_deterministic_or_not_simulated_is_refused(toy_job, plan, why) -> None:
    with pytest.raises(UserError, match=why):
        part_of(toy_job, "layer", deterministic=True, **plan)
