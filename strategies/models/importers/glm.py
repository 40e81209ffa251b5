"""GLM-4 and its successors: half of each head has rotary positions, two heads of keys and values."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.deepseek import deepseek_v3
from strategies.models.importers.layer_types import known, per_layer
from strategies.models.importers.llama import grouped_heads, llama_like, partial_rotary
from topologies.reading import UserError, shown


@model_type("glm")
def glm(config: Reader) -> dict[str, Any]:
    """GLM-4-9B as transformers has it; query, key and value have biases, the output none."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=2, head_dim=128)
    fields["attention_bias"] = config.flag("attention_bias", True)
    return fields | partial_rotary(config, fields, 0.5)


@model_type("glm4")
def glm4(config: Reader) -> dict[str, Any]:
    """GLM-4-0414: GLM with norms around both blocks."""
    return glm(config) | {"norms": 4}


@model_type("glm4v_moe")
@model_type("glm4_moe")
def glm4_moe(config: Reader) -> dict[str, Any]:
    """GLM-4.5 and 4.6 without the prediction layer. The router's correction bias is a buffer, which no gradient changes."""
    config.harmless("num_nextn_predict_layers", "num_mtp_layers")
    fields = llama_like(config) | grouped_heads(config, kv_heads=8)
    fields |= {"attention_bias": config.flag("attention_bias", False), "qk_norm": config.flag("use_qk_norm", False)}
    experts = {
        "experts": config.optional("n_routed_experts", 128),
        "chosen": config.optional("num_experts_per_tok", 8),
        "ffn": config.optional("moe_intermediate_size", 1408),
        "shared": config.optional("n_shared_experts", 1),
        "first_dense": config.optional("first_k_dense_replace", 1),
    }
    return fields | {"experts": experts} | partial_rotary(config, fields, 0.5)


@model_type("glm4v")
def glm4v(config: Reader) -> dict[str, Any]:
    """The language model of GLM-4.1V, GLM-4 with biases of query, key and value."""
    return glm4(config) | {"attention_bias": True}


@model_type("glm4_moe_lite")
def glm4_moe_lite(config: Reader) -> dict[str, Any]:
    """GLM-4.7 Flash: DeepSeek-V3's layers; `mlp_layer_types` says which are dense, by default the first."""
    config.integer("n_routed_experts")  # which DeepSeek's may leave out
    fields = deepseek_v3(config)
    names = per_layer(config, "mlp_layer_types", fields["layers"], ["dense"] + ["sparse"] * (fields["layers"] - 1))
    dense = known(config, "mlp_layer_types", names, ("dense", "sparse")).count("dense")
    if names != ["dense"] * dense + ["sparse"] * (len(names) - dense):
        raise UserError(f"{config.where}: mlp_layer_types={shown(names)}: dense layers must come first")
    return fields | {"experts": fields["experts"] | {"first_dense": dense, "router_bias": False}}
