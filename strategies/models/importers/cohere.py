"""Command R and R+ and their successors: blocks in parallel behind one layernorm without bias."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import attention_kinds
from strategies.models.importers.llama import grouped_heads, llama_like


def _cohere(config: Reader) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    fields = llama_like(config, tied=True) | grouped_heads(config) | {"attention_bias": bias, "output_bias": bias}
    return fields | {"norm": "layernorm", "norm_bias": False, "norms": 1, "parallel": True}


@model_type("cohere")
def cohere(config: Reader) -> dict[str, Any]:
    """Command R; R+ norms queries and keys with weights for every head."""
    return _cohere(config) | {"qk_norm": "whole" if config.flag("use_qk_norm", False) else False}


@model_type("cohere2")
def cohere2(config: Reader) -> dict[str, Any]:
    """Command R7B and A: windows in three of four layers, and no positions in the fourth."""
    config.harmless(
        "layer_switch",
        "order_of_interleaved_layers",
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
        "use_parallel_embedding",
    )
    fields = _cohere(config)
    every = config.optional("sliding_window_pattern") or config.optional("_sliding_window_pattern") or 4
    return fields | attention_kinds(config, fields["layers"], every=every, window=4096, positions="none")
