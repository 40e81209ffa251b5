"""Which matrices of a model have adapters, and how many elements these are.

Each routed expert has adapters of its own beside its matrices, as the modules of PEFT's experts have; torchtune's
LoRAGroupedExperts multiplies them in groups, as it is simulated. Shared experts have adapters of their joint size.
"""

from __future__ import annotations

from typing import NamedTuple

from strategies.models.model import Model
from strategies.plan.fine_tuning import trained_parts
from strategies.plan.plan import Plan

DENSE = {"mlp up": "mlp up", "mlp down": "mlp down"}  # labels of products: those of a dense layer with the same matrices
MIXTURE = {f"{kind} {way}": f"mlp {way}" for kind in ("expert", "shared") for way in ("up", "down")}
COLUMNS, ROWS = ("qkv", "mlp up"), ("attention output", "mlp down")  # of whose matrices tp cuts so


class Wrapped(NamedTuple):
    """A matrix with an adapter: its name, and its sizes on all tp ranks together."""

    name: str
    inputs: int
    outputs: int


def wrapped(model: Model, ffn: int, apart: bool) -> dict[str, list[Wrapped]]:
    """By the label of a product the matrices of a dense layer that it multiplies by. ffn: of its MLP. apart: queries, keys,
    values, gate and up are modules of their own.
    """
    width, shared, hidden = model.query_features, model.kv_heads * model.head_dim, model.hidden
    parts = [Wrapped("linear_q", hidden, width), Wrapped("linear_k", hidden, shared), Wrapped("linear_v", hidden, shared)]
    up = [Wrapped("linear_fc1_gate", hidden, ffn), Wrapped("linear_fc1_up", hidden, ffn)]
    if not model.gated:
        up = [Wrapped("linear_fc1", hidden, ffn)]
    result = {
        "mlp up": up if apart or not model.gated else [Wrapped("linear_fc1", hidden, 2 * ffn)],
        "mlp down": [Wrapped("linear_fc2", ffn, hidden)],
        "attention output": [Wrapped("linear_proj", model.heads * model.v_head_dim, hidden)],
    }
    if model.latent is None:
        result["qkv"] = parts if apart else [Wrapped("linear_qkv", hidden, width + 2 * shared)]
    return result


def chosen(plan: Plan, model: Model, label: str) -> list[Wrapped]:
    """The matrices of a product that `plan.lora` gives adapters, by name; of one expert where there are several."""
    assert plan.lora is not None
    dense = MIXTURE.get(label, label)
    ffn = _ffn(model, label)
    fused, single = (wrapped(model, ffn, apart).get(dense, []) for apart in (False, True)) if ffn else ([], [])
    if {"qkv": "linear_qkv", "mlp up": "linear_fc1"}.get(dense) in plan.lora.targets:
        return single if plan.kernel_set.separate_products else fused
    return sorted(module for module in {*fused, *single} if module.name in plan.lora.targets)


def _ffn(model: Model, label: str) -> int:
    """Features between the matrices of the block that a product belongs to."""
    if label not in MIXTURE or model.experts is None:
        return model.ffn
    return model.experts.ffn if label.startswith("expert") else model.experts.shared * model.experts.shared_ffn


def adapter_parameters(plan: Plan, model: Model) -> int:
    """Elements of all adapters: r · (in + out) of each, and with DoRA its magnitudes."""
    if plan.lora is None:
        return 0
    trained, total = trained_parts(plan, model.layers), 0
    for layer, own in enumerate(model.layer_models):
        if not trained.layers[layer].adapters:
            continue
        for label in ("qkv", "attention output", *(MIXTURE if model.is_mixture(layer) else DENSE)):
            copies = own.experts.experts if own.experts and label.startswith("expert") else 1
            for module in chosen(plan, own, label):
                total += copies * (plan.lora.rank * (module.inputs + module.outputs) + module.outputs * plan.lora.dora)
    return total
