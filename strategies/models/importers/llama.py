"""Llama and the decoders built like it: rotary positions, rmsnorm, gated feed-forward, grouped key and value heads."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type, sizes
from topologies.reading import UserError


def llama_like(config: Reader) -> dict[str, Any]:
    """Fields that Llama, Mistral, Mixtral, Qwen and DeepSeek say with the same keys; no biases."""
    return {
        **sizes(config),
        "tied": config.flag("tie_word_embeddings", False),
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


@model_type("qwen2")
def qwen2(config: Reader) -> dict[str, Any]:
    """Qwen 2 and 2.5: query, key and value always have biases, the output never."""
    config.harmless("attention_bias")  # which Qwen 2 does not have
    fields = llama_like(config) | grouped_heads(config, kv_heads=32) | {"attention_bias": True}
    return fields | {"window": _qwen_window(config, fields["layers"])}


@model_type("qwen3")
def qwen3(config: Reader) -> dict[str, Any]:
    """Qwen 3: queries and keys are normed; `attention_bias` covers query, key, value and output."""
    bias = config.flag("attention_bias", False)
    fields = llama_like(config) | grouped_heads(config, kv_heads=32, head_dim=128)
    fields |= {"qk_norm": True, "attention_bias": bias, "output_bias": bias}
    return fields | {"window": _qwen_window(config, fields["layers"])}


def _qwen_window(config: Reader, layers: int) -> int | None:
    """Qwen's window holds from layer `max_window_layers` on, and only with `use_sliding_window`."""
    in_use, first = config.flag("use_sliding_window", False), config.optional("max_window_layers", 28) or 0
    window = config.optional("sliding_window", 4096)
    if not in_use or first >= layers:
        return None
    if first > 0:
        rule = f"a sliding window in only some of num_hidden_layers={layers} is not supported"
        raise UserError(f"{config.where}: max_window_layers={first}: {rule}")
    return window
