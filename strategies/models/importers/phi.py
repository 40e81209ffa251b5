"""Phi 1.5 and 2, whose blocks are parallel, and Phi 3 and 4, which are Llamas."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.llama import grouped_heads, llama_like, partial_rotary


@model_type("phi")
def phi(config: Reader) -> dict[str, Any]:
    """Phi 1, 1.5 and 2: one layernorm before both blocks, biases everywhere, also of the head."""
    fields = llama_like(config) | grouped_heads(config) | {"norm": "layernorm", "norms": 1, "parallel": True, "gated": False}
    fields |= {"attention_bias": True, "output_bias": True, "mlp_bias": True, "head_bias": fields["head"]}
    fields |= {"qk_norm": config.flag("qk_layernorm", False), "dropout": config.rate("resid_pdrop")}
    return fields | partial_rotary(config, fields, 0.5)


@model_type("phi3")
def phi3(config: Reader) -> dict[str, Any]:
    """Phi 3, 3.5 and 4: queries, keys and values are one matrix, and so are gate and up."""
    fields = llama_like(config) | grouped_heads(config) | {"dropout": config.rate("resid_pdrop")}
    config.only(full_attn_mod=1)  # every layer attends alike (Phi-4-mini)
    window = config.optional("sliding_window")
    return fields | partial_rotary(config, fields, 1.0) | ({"window": window} if window else {})


@model_type("phimoe")
def phimoe(config: Reader) -> dict[str, Any]:
    """Phi 3.5 MoE: layernorms, a mixture in every layer, of which `intermediate_size` is one expert's."""
    config.harmless("input_jitter_noise", "router_jitter_noise")
    bias = config.flag("attention_bias", False)
    fields = llama_like(config) | grouped_heads(config, kv_heads=8) | {"norm": "layernorm"}
    fields |= {"attention_bias": bias, "output_bias": bias, "head_bias": fields["head"] and config.flag("lm_head_bias", False)}
    window = config.optional("sliding_window")
    experts, chosen = config.optional("num_local_experts", 16), config.optional("num_experts_per_tok", 2)
    fields["experts"] = {"experts": experts, "chosen": chosen, "ffn": fields["ffn"]}
    return fields | ({"window": window} if window else {})
