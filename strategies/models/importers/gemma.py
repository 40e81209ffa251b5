"""Gemma 1 to 3: wide heads, embeddings that are scaled, and from the second on norms around both blocks and sliding windows."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import attention_kinds
from strategies.models.importers.llama import grouped_heads, llama_like
from topologies.reading import UserError

# defaults of Gemma3TextConfig, which files on the hub leave out
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


def _gemma(config: Reader, **absent: int) -> dict[str, Any]:
    config.harmless("query_pre_attn_scalar", "final_logit_softcapping")
    if config.flag("use_bidirectional_attention", False):
        rule = "tokens that attend to later ones are not simulated here: --input 2048:int64 traces transformers' own class"
        raise UserError(f"{config.where}: use_bidirectional_attention=true: {rule}")
    bias = config.flag("attention_bias", False)
    fields = llama_like(config, tied=True, **absent) | grouped_heads(config, kv_heads=4, head_dim=256)
    return fields | {"attention_bias": bias, "output_bias": bias, "embedding_scale": True}


@model_type("gemma")
def gemma(config: Reader) -> dict[str, Any]:
    """Gemma 2B and 7B: Llama with heads of 256 features."""
    return _gemma(config) | grouped_heads(config, kv_heads=16, head_dim=256)


@model_type("gemma2")
def gemma2(config: Reader) -> dict[str, Any]:
    """Gemma 2: every second layer has a window; scores and logits pass through a tanh (that of scores is in the fused kernel)."""
    fields = _gemma(config) | {"norms": 4, "logit_softcap": bool(config.value("final_logit_softcapping", 30.0))}
    return fields | attention_kinds(config, fields["layers"], every=2, window=4096)


@model_type("gemma3")
def gemma3(config: Reader) -> dict[str, Any]:
    """Gemma 3's language model: five layers with a window for one without, norms of queries and keys."""
    fields = _gemma(config, **_GEMMA3) | {"norms": 4, "qk_norm": True}
    fields["logit_softcap"] = bool(config.value("final_logit_softcapping"))
    every = config.optional("sliding_window_pattern") or config.optional("_sliding_window_pattern") or 6
    return fields | attention_kinds(config, fields["layers"], every=every, window=4096)
