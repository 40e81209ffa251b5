"""OLMo 1 to 3 and OLMoE: open models of Ai2."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import attention_kinds
from strategies.models.importers.llama import grouped_heads, llama_like


def _olmo(config: Reader) -> dict[str, Any]:
    config.harmless("clip_qkv")
    bias = config.flag("attention_bias", False)
    return llama_like(config) | grouped_heads(config) | {"attention_bias": bias, "output_bias": bias}


@model_type("olmo")
def olmo(config: Reader) -> dict[str, Any]:
    """OLMo: layernorms without parameters."""
    return _olmo(config) | {"norm": "layernorm", "norm_weights": False}


@model_type("olmo2")
def olmo2(config: Reader) -> dict[str, Any]:
    """OLMo 2: norms after the blocks, and of queries and keys over all heads together."""
    return _olmo(config) | {"qk_norm": "whole"}


@model_type("olmo3")
def olmo3(config: Reader) -> dict[str, Any]:
    """OLMo 3: OLMo 2 with windows in three of four layers."""
    fields = _olmo(config) | {"qk_norm": "whole"}
    return fields | attention_kinds(config, fields["layers"], every=4, window=4096)


@model_type("olmoe")
def olmoe(config: Reader) -> dict[str, Any]:
    """OLMoE: a mixture in every layer; `intermediate_size` is that of one expert."""
    fields = _olmo(config) | {"qk_norm": "whole"}
    experts, chosen = config.optional("num_experts", 64), config.optional("num_experts_per_tok", 8)
    return fields | {"experts": {"experts": experts, "chosen": chosen, "ffn": fields["ffn"]}}


@model_type("flex_olmo")
def flex_olmo(config: Reader) -> dict[str, Any]:
    """FlexOlmo: OLMo 2 with a mixture in every layer."""
    fields = olmo2(config)
    experts, chosen = config.optional("num_experts", 7), config.optional("num_experts_per_tok", 5)
    return fields | {"experts": {"experts": experts, "chosen": chosen, "ffn": fields["ffn"]}}
