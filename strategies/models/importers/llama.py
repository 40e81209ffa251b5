"""Llama and the decoders built like it: rotary positions, rmsnorm, gated feed-forward, grouped key and value heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.models.importers import Reader, model_type, sizes
from strategies.models.importers.layer_types import FULL, SLIDING, attention_kinds
from topologies.reading import UserError, shown


def llama_like(config: Reader, tied: bool = False, **absent: int) -> dict[str, Any]:
    """Fields that Llama, Mistral, Mixtral, Qwen, DeepSeek and others say with the same keys; no biases. The arguments are
    transformers' defaults of absent keys.
    """
    return {
        **sizes(config, absent),
        "tied": config.flag("tie_word_embeddings", tied),
        "attention_dropout": config.rate("attention_dropout"),
        "head": config.has_language_head,
        "gated": True,
        "norm": "rmsnorm",
        "positions": "rotary",
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
    }


def grouped_heads(config: Reader, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, int]:
    """Key and value heads and head size where the file gives them; the arguments are transformers' defaults of absent keys."""
    fields = {
        "kv_heads": config.optional("num_key_value_heads", kv_heads),
        "head_dim": config.optional("head_dim", head_dim),
    }
    return {field: value for field, value in fields.items() if value is not None}


def partial_rotary(
    config: Reader, fields: Mapping[str, Any], absent: float, key: str = "partial_rotary_factor"
) -> dict[str, Any]:
    """`rotary_dim` where not all features of a head have rotary positions: the part lies under `key` or in `rope_parameters`."""
    nested = config.value("rope_parameters") or {}
    part = config.value(key, nested.get("partial_rotary_factor", absent) if isinstance(nested, Mapping) else absent)
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise UserError(f"{config.where}: {key}={shown(part)} must be a number above 0 and at most 1")
    dim = fields.get("head_dim") or fields["hidden"] // fields["heads"]
    return {"rotary_dim": int(dim * part)} if part < 1 else {}


@model_type("llama")
def llama(config: Reader) -> dict[str, Any]:
    """Llama 1, 2 and 3; `attention_bias` covers query, key, value and output."""
    bias = config.flag("attention_bias", False)
    biases = {"attention_bias": bias, "output_bias": bias, "mlp_bias": config.flag("mlp_bias", False)}
    return llama_like(config) | grouped_heads(config) | biases


@model_type("mistral")
def mistral(config: Reader) -> dict[str, Any]:
    """Mistral: Llama with a sliding window (4096 unless the file says null)."""
    return llama_like(config) | grouped_heads(config, kv_heads=8) | {"window": config.optional("sliding_window", 4096)}


@model_type("mixtral")
def mixtral(config: Reader) -> dict[str, Any]:
    """Mixtral: Mistral with experts in every layer; `intermediate_size` is that of one expert."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=8) | {"window": config.optional("sliding_window")}
    experts = config.optional("num_local_experts", 8)
    return fields | {"experts": {"experts": experts, "chosen": config.optional("num_experts_per_tok", 2), "ffn": fields["ffn"]}}


@model_type("ministral")
def ministral(config: Reader) -> dict[str, Any]:
    """Ministral: Mistral with windows in the layers that `layer_types` names, by default in all."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=8)
    return fields | attention_kinds(config, fields["layers"], window=4096, absent=[SLIDING] * fields["layers"])


@model_type("ministral3")
def ministral3(config: Reader) -> dict[str, Any]:
    """Ministral 3 and the language model of Mistral Small 3.2 and later: Mistral without windows."""
    config.harmless("sliding_window")
    return llama_like(config) | grouped_heads(config, kv_heads=8, head_dim=128)


@model_type("cwm")
def cwm(config: Reader) -> dict[str, Any]:
    """Code World Model: Llama with a window in three of four layers, of which the first has none."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=8, head_dim=128)
    names = [FULL if layer % 4 == 0 else SLIDING for layer in range(fields["layers"])]
    return fields | {"mlp_bias": config.flag("mlp_bias", False)} | attention_kinds(config, len(names), window=8192, absent=names)
