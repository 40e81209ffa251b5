"""Llama 4: attention within chunks in three of four layers, a mixture with one shared expert in all or in every second."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import CHUNKED, FULL, kinds_of, known, per_layer
from strategies.models.importers.llama import grouped_heads, llama_like
from topologies.reading import UserError, shown


@model_type("llama4")
def llama4(config: Reader) -> dict[str, Any]:
    """The language model of Llama 4 Scout and Maverick; `intermediate_size` is an expert's, `intermediate_size_mlp` a dense
    layer's. Layers without rotary positions attend to all tokens, and do not norm queries and keys.
    """
    config.harmless("attention_chunk_size", "attn_temperature_tuning", "attn_scale", "for_llm_compressor")
    fields = llama_like(config) | grouped_heads(config, kv_heads=8, head_dim=128)
    bias, layers, expert = config.flag("attention_bias", False), fields["layers"], fields["ffn"]
    fields |= {"attention_bias": bias, "output_bias": bias, "ffn": config.optional("intermediate_size_mlp", 16384)}
    fields["qk_norm"] = "unweighted" if config.flag("use_qk_norm", True) else False
    experts, chosen = config.optional("num_local_experts", 16), config.optional("num_experts_per_tok", 1)
    fields["experts"] = {"experts": experts, "chosen": chosen, "ffn": expert, "shared": 1}
    step = config.optional("interleave_moe_layer_step", 1) or 1
    mixtures = config.value("moe_layers") or list(range(step - 1, layers, step))
    if not isinstance(mixtures, list):
        raise UserError(f"{config.where}: moe_layers={shown(mixtures)} must be a list of layers")
    every = config.optional("no_rope_layer_interval", 4) or 4
    turned = per_layer(config, "no_rope_layers", layers, [int((layer + 1) % every != 0) for layer in range(layers)])
    attends = per_layer(config, "layer_types", layers, [CHUNKED if rope else FULL for rope in turned])
    known(config, "layer_types", attends, (CHUNKED, FULL))
    chunk = config.optional("attention_chunk_size", 8192)
    names, kinds = [], dict[str, dict[str, Any]]()
    for layer in range(layers):
        rope, within, dense = bool(turned[layer]), attends[layer] == CHUNKED, layer not in mixtures
        kind: dict[str, Any] = ({"chunk": chunk} if within and chunk else {}) | ({"dense": True} if dense else {})
        kind |= {} if rope else {"positions": "none", "qk_norm": False}
        name = f"{'dense' if dense else 'mixture'}, {'chunked' if within else 'full'}{'' if rope else ', no positions'}"
        names.append(name)
        kinds[name] = kind
    return fields | kinds_of(names, kinds)
