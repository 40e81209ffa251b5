"""Mixtures of experts that are otherwise like Llama: ERNIE 4.5, dots.llm1, MiniMax M2, EXAONE MoE, DeepSeek-MoE."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import attention_kinds, kinds_of
from strategies.models.importers.llama import grouped_heads, llama, llama_like, partial_rotary
from topologies.reading import UserError, shown


@model_type("ernie4_5_moe")
def ernie_mixture(config: Reader) -> dict[str, Any]:
    """ERNIE 4.5: layers from `moe_layer_start_index` to `moe_layer_end_index` are mixtures, each `moe_layer_interval`-th."""
    bias = config.flag("use_bias", False)
    if bias:
        raise UserError(f"{config.where}: use_bias=true is not read of a mixture: experts have none, and other matrices have")
    fields = llama_like(config, tied=True) | grouped_heads(config, kv_heads=4)
    config.harmless(
        "moe_norm_min", "moe_num_experts_per_tok", "moe_use_aux_free", "moe_capacity", "moe_gate", "num_nextn_predict_layers"
    )
    first, last = config.optional("moe_layer_start_index", 1) or 0, config.value("moe_layer_end_index", 27)
    every, layers = config.optional("moe_layer_interval", 1) or 1, fields["layers"]
    if not isinstance(last, int) or isinstance(last, bool):
        raise UserError(f"{config.where}: moe_layer_end_index={shown(last)} must be a whole number")
    last = layers - 1 if last == -1 else last
    names = ["mixture" if (layer + 1) % every == 0 and first <= layer <= last else "dense" for layer in range(layers)]
    ffn, chosen = config.optional("moe_intermediate_size", 1536), config.optional("moe_k", 6)
    experts: dict[str, Any] = {"experts": config.optional("moe_num_experts", 64), "chosen": chosen, "ffn": ffn}
    experts["router_bias"] = True  # moe_statics.e_score_correction_bias, a parameter of the class
    experts["shared"] = config.optional("moe_num_shared_experts", 2)
    return fields | {"experts": experts} | kinds_of(names, {"dense": {"dense": True}, "mixture": {}})


@model_type("dots1")
def dots(config: Reader) -> dict[str, Any]:
    """dots.llm1: norms of queries and keys; the router's correction bias is a buffer, which no gradient changes."""
    bias = config.flag("attention_bias", False)
    fields = llama_like(config) | grouped_heads(config, kv_heads=32)
    fields |= {"qk_norm": True, "attention_bias": bias, "output_bias": bias}
    config.harmless("sliding_window", "max_window_layers")
    return fields | _routed(config) | attention_kinds(config, fields["layers"], window=4096)


@model_type("deepseek")
def deepseek_moe(config: Reader) -> dict[str, Any]:
    """DeepSeek-MoE 16B (arXiv:2401.06066), whose class is code on the hub: Llama with fine-grained and shared experts."""
    return llama(config) | _routed(config)


@model_type("exaone_moe")
def exaone_mixture(config: Reader) -> dict[str, Any]:
    """K-EXAONE: norms of queries and keys, windows in three of four layers."""
    config.harmless("num_nextn_predict_layers")
    config.value("sliding_window_pattern"), config.value("mlp_layer_types")  # which layer_types and first_k_dense_replace say too
    fields = llama_like(config) | grouped_heads(config, kv_heads=32) | {"qk_norm": True}
    routed = _routed(config, "num_experts", "num_shared_experts", experts=64, chosen=8, ffn=1024, shared=1, dense=1)
    return fields | routed | attention_kinds(config, fields["layers"], every=4, window=4096)


@model_type("minimax_m2")
def minimax(config: Reader) -> dict[str, Any]:
    """MiniMax M2: norms of queries and keys over all heads, positions of half of each head."""
    config.harmless("num_mtp_modules", "mtp_transformer_layers", "use_mtp", "attn_type_list", "shared_intermediate_size")
    config.harmless("use_qk_norm", "qk_norm_type", "shared_moe_mode", "layernorm_full_attention_beta", "layernorm_mlp_beta")
    config.harmless("layernorm_linear_attention_beta", "mlp_intermediate_size")  # of MiniMax M1's layers
    config.harmless("use_routing_bias")  # a buffer of the class
    fields = llama_like(config) | grouped_heads(config, kv_heads=8, head_dim=128) | {"qk_norm": "whole"}
    experts, chosen = config.optional("num_local_experts", 256), config.optional("num_experts_per_tok", 8)
    fields |= {"experts": {"experts": experts, "chosen": chosen, "ffn": fields["ffn"]}}
    turned = config.optional("rotary_dim")
    return fields | ({"rotary_dim": turned} if turned else partial_rotary(config, fields, 1.0))


def _routed(
    config: Reader, of: str = "n_routed_experts", beside: str = "n_shared_experts", **absent: int
) -> dict[str, dict[str, Any]]:
    """Experts by DeepSeek's keys, where the class has no layers of its own for them; absent: defaults. A file without routed
    experts has dense layers alone.
    """
    routed = config.optional(of, absent.get("experts"))
    if routed is None:
        config.harmless("moe_intermediate_size", beside, "num_experts_per_tok", "moe_layer_freq", "first_k_dense_replace")
        return {}
    experts = {
        "experts": routed,
        "chosen": config.integer("num_experts_per_tok", absent.get("chosen")),
        "ffn": config.integer("moe_intermediate_size", absent.get("ffn")),
        "shared": config.optional(beside, absent.get("shared")) or 0,
        "first_dense": config.optional("first_k_dense_replace", absent.get("dense", 0)),
        "every": config.optional("moe_layer_freq", 1) or 1,
    }
    return {"experts": experts}
