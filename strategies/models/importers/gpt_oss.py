"""gpt-oss: a mixture in every layer, sliding windows in every second, attention sinks."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import attention_kinds
from strategies.models.importers.llama import grouped_heads, llama_like


@model_type("gpt_oss")
def gpt_oss(config: Reader) -> dict[str, Any]:
    """gpt-oss 20B and 120B; `intermediate_size` is that of one expert. MXFP4 is how files are stored: training is in 16 bits."""
    config.harmless("swiglu_limit", "experts_per_token", "initial_context_length")
    fields = llama_like(config) | grouped_heads(config, kv_heads=8, head_dim=64)
    bias = config.flag("attention_bias", True)
    experts = config.optional("num_local_experts", 128)
    fields |= {"attention_bias": bias, "output_bias": bias, "mlp_bias": True, "sinks": True}
    chosen = config.optional("num_experts_per_tok", 4)
    fields["experts"] = {"experts": experts, "chosen": chosen, "ffn": fields["ffn"], "router_bias": True}
    return fields | attention_kinds(config, fields["layers"], every=2, window=128)
