"""DeepSeek V2 and V3: latent attention, shared and routed experts, leading dense layers."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.llama import llama_like


@model_type("deepseek_v2")
def deepseek_v2(config: Reader) -> dict[str, Any]:
    """DeepSeek-V2 and V2-Lite (`q_lora_rank` null: full query matrix)."""
    return _deepseek(config, "greedy")


@model_type("kimi_k2")
@model_type("deepseek_v3")
def deepseek_v3(config: Reader) -> dict[str, Any]:
    """DeepSeek-V3, R1 and Kimi K2 without the prediction layers, as transformers builds them."""
    return _deepseek(config, "noaux_tc")


def _deepseek(config: Reader, routing: str) -> dict[str, Any]:
    config.harmless("num_nextn_predict_layers", "ep_size")
    for derived in ("num_key_value_heads", "head_dim", "qk_head_dim"):
        config.value(derived)  # latent attention has no heads of keys and values, and its heads are those of the ranks below
    bias = config.flag("attention_bias", False)
    latent = {
        "q_rank": config.optional("q_lora_rank", 1536),
        "kv_rank": config.integer("kv_lora_rank"),
        "nope_head_dim": config.integer("qk_nope_head_dim"),
        "rope_head_dim": config.integer("qk_rope_head_dim"),
        "v_head_dim": config.integer("v_head_dim"),
    }
    fields = llama_like(config) | {"latent": latent, "attention_bias": bias, "output_bias": bias}
    routed = config.optional("n_routed_experts")
    if routed is None:  # null: every layer is dense
        config.harmless("moe_intermediate_size", "n_shared_experts", "num_experts_per_tok", "moe_layer_freq")
        return fields
    experts = {
        "experts": routed,
        "chosen": config.integer("num_experts_per_tok"),
        "ffn": config.integer("moe_intermediate_size"),
        "shared": config.optional("n_shared_experts") or 0,
        "first_dense": config.optional("first_k_dense_replace", 0),
        "every": config.optional("moe_layer_freq", 1),
        "router_bias": config.value("topk_method", routing) == "noaux_tc",
    }
    return fields | {"experts": experts}
