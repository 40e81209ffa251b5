"""Qwen 2 and 3, dense and mixtures of experts: Llama with biases of queries, keys and values, or norms of queries and keys."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import FULL, SLIDING, kinds_of, known, per_layer
from strategies.models.importers.llama import grouped_heads, llama_like
from topologies.reading import UserError, shown


@model_type("qwen2_5_vl")
@model_type("qwen2_vl")
@model_type("qwen2")
def qwen2(config: Reader) -> dict[str, Any]:
    """Qwen 2 and 2.5, and the language models of their VL: query, key and value always have biases, the output never."""
    config.harmless("attention_bias")  # which Qwen 2 does not have
    fields = llama_like(config) | grouped_heads(config, kv_heads=32) | {"attention_bias": True}
    return fields | _windows(config, fields["layers"])


@model_type("qwen3_vl")
@model_type("qwen3")
def qwen3(config: Reader) -> dict[str, Any]:
    """Qwen 3 and the language model of its VL: queries and keys are normed; `attention_bias` covers all four matrices."""
    bias = config.flag("attention_bias", False)
    fields = llama_like(config) | grouped_heads(config, kv_heads=32, head_dim=128)
    fields |= {"qk_norm": True, "attention_bias": bias, "output_bias": bias}
    return fields | _windows(config, fields["layers"])


@model_type("qwen2_moe")
def qwen2_moe(config: Reader) -> dict[str, Any]:
    """Qwen 1.5 and 2 MoE: one shared expert of its own size, weighted by a number per token."""
    config.harmless("attention_bias")
    fields = llama_like(config) | grouped_heads(config, kv_heads=16) | {"attention_bias": config.flag("qkv_bias", True)}
    shared = config.optional("shared_expert_intermediate_size", 5632)
    beside = {"shared": 1, "shared_ffn": shared, "shared_gate": True} if shared else {}
    return fields | _mixture(config, fields["layers"], 60, 4, 1408, beside)


@model_type("qwen3_vl_moe")
@model_type("qwen3_moe")
def qwen3_moe(config: Reader) -> dict[str, Any]:
    """Qwen 3 MoE: no shared expert; `intermediate_size` is that of dense layers, which the released models do not have."""
    config.only(use_qk_norm=True, qkv_bias=False)  # Qwen3-Coder says so
    bias = config.flag("attention_bias", False)
    fields = llama_like(config) | grouped_heads(config, kv_heads=4) | {"attention_bias": bias, "output_bias": bias}
    return fields | {"qk_norm": True} | _mixture(config, fields["layers"], 128, 8, 768, {})


def _mixture(config: Reader, layers: int, experts: int, chosen: int, ffn: int, shared: dict[str, Any]) -> dict[str, Any]:
    """Layers i with (i + 1) % `decoder_sparse_step` = 0 that are not in `mlp_only_layers`; numbers are defaults."""
    if config.flag("use_sliding_window", False):
        raise UserError(f"{config.where}: use_sliding_window=true is not read of a mixture: no released model has it")
    config.harmless("sliding_window", "max_window_layers", "layer_types")
    step, dense = config.optional("decoder_sparse_step", 1) or 1, config.value("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UserError(f"{config.where}: mlp_only_layers={shown(dense)} must be a list of layers")
    names = ["dense" if layer in dense or (layer + 1) % step else "mixture" for layer in range(layers)]
    routed = {
        "experts": config.optional("num_experts") or config.optional("num_local_experts", experts),
        "chosen": config.optional("num_experts_per_tok", chosen),
        "ffn": config.optional("moe_intermediate_size", ffn),
    }
    return {"experts": routed | shared} | kinds_of(names, {"dense": {"dense": True}, "mixture": {}})


def _windows(config: Reader, layers: int) -> dict[str, Any]:
    """Qwen's window holds from layer `max_window_layers` on, and only with `use_sliding_window`."""
    in_use, first = config.flag("use_sliding_window", False), config.optional("max_window_layers", 28) or 0
    window = config.optional("sliding_window", 4096)
    window = window if in_use else None
    default = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    kinds: dict[str, dict[str, Any]] = {FULL: {}, SLIDING: {"window": window} if window else {}}
    return kinds_of(known(config, "layer_types", per_layer(config, "layer_types", layers, default), kinds), kinds)
