"""Families that differ from Llama in a field or two: Granite, SmolLM 3, StarCoder 2, StableLM."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import kinds_of, per_layer
from strategies.models.importers.llama import grouped_heads, llama, llama_like, partial_rotary
from topologies.reading import UserError


@model_type("granite")
def granite(config: Reader) -> dict[str, Any]:
    """Granite 3: Llama with factors of the embedding, the residual stream and the logits."""
    return llama(config) | {"embedding_scale": True}


@model_type("smollm3")
def smollm3(config: Reader) -> dict[str, Any]:
    """SmolLM 3: Llama without positions in every fourth layer."""
    if config.flag("use_sliding_window", False):
        raise UserError(f"{config.where}: use_sliding_window=true is not read of a smollm3: no released model has it")
    config.harmless("sliding_window", "layer_types", "max_window_layers")
    config.value("layer_types")
    fields = llama(config) | {"tied": config.flag("tie_word_embeddings", True)}
    fields |= grouped_heads(config, kv_heads=4)
    layers, every = fields["layers"], config.optional("no_rope_layer_interval", 4) or 4
    turned = per_layer(config, "no_rope_layers", layers, [(layer + 1) % every for layer in range(layers)])
    names = ["rotary" if rope else "no positions" for rope in turned]
    return fields | kinds_of(names, {"rotary": {}, "no positions": {"positions": "none"}})


@model_type("starcoder2")
def starcoder2(config: Reader) -> dict[str, Any]:
    """StarCoder 2: layernorms, an MLP without a gate, biases everywhere."""
    bias = config.flag("use_bias", True)
    fields = llama_like(config, tied=True) | grouped_heads(config, kv_heads=2)
    fields |= {"norm": "layernorm", "gated": False, "attention_bias": bias, "output_bias": bias, "mlp_bias": bias}
    config.harmless("embedding_dropout", "mlp_type", "norm_type", "scale_attention_softmax_in_fp32")
    window = config.optional("sliding_window")
    return fields | {"dropout": config.rate("residual_dropout")} | ({"window": window} if window else {})


@model_type("stablelm")
def stablelm(config: Reader) -> dict[str, Any]:
    """StableLM 2 and 3B: layernorms, rotary positions of a quarter of each head."""
    if config.flag("qk_layernorm", False):
        raise UserError(f"{config.where}: qk_layernorm=true: norms with weights of their own for every head are not simulated")
    parallel = config.flag("use_parallel_residual", False)
    fields = llama_like(config) | grouped_heads(config, kv_heads=32) | {"norm": "layernorm", "parallel": parallel}
    fields |= {"norms": 1 if parallel else 2, "attention_bias": config.flag("use_qkv_bias", False)}
    return fields | {"dropout": config.rate("hidden_dropout")} | partial_rotary(config, fields, 0.25)
