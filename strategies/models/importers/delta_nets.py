"""Gated delta nets beside gated attention: Qwen3-Next, and the language models of Qwen3.5, dense and mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import FULL, kinds_of, known, per_layer
from strategies.models.importers.llama import grouped_heads, llama_like, partial_rotary
from strategies.models.importers.mamba import OLDER
from topologies.reading import UserError, shown

LINEAR = "linear_attention"
_HARMLESS = (
    "attn_output_gate",
    "mamba_ssm_dtype",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
)


@model_type("qwen3_next")
def qwen3_next(config: Reader) -> dict[str, Any]:
    """Qwen3-Next: a mixture with a weighted shared expert in layers i with (i + 1) % `decoder_sparse_step` = 0 that are not in
    `mlp_only_layers`.
    """
    fields = _fields(config, vocab_size=151936, hidden_size=2048, num_hidden_layers=48, intermediate_size=5632)
    fields |= grouped_heads(config, kv_heads=2, head_dim=256)
    layers, step, dense = fields["layers"], config.optional("decoder_sparse_step", 1) or 1, config.value("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UserError(f"{config.where}: mlp_only_layers={shown(dense)} must be a list of layers")
    experts = config.optional("num_experts", 512)
    mixtures = [bool(experts) and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    return fields | _experts(config, experts, 10) | _layers(config, mixtures)


@model_type("qwen3_5")
def qwen3_5(config: Reader) -> dict[str, Any]:
    """Qwen3.5's dense language models."""
    fields = _fields(config, vocab_size=248320, hidden_size=4096, num_hidden_layers=32, intermediate_size=12288)
    config.harmless("mlp_only_layers")
    return fields | grouped_heads(config, kv_heads=4, head_dim=256) | _layers(config, [False] * fields["layers"])


@model_type("qwen3_5_moe")
def qwen3_5_mixture(config: Reader) -> dict[str, Any]:
    """Qwen3.5's mixtures: each layer has experts, one of them shared."""
    config.harmless("mlp_only_layers", "intermediate_size", "decoder_sparse_step")
    fields = _fields(config, vocab_size=248320, hidden_size=2048, num_hidden_layers=40, intermediate_size=512)
    fields |= grouped_heads(config, kv_heads=2, head_dim=256)
    return fields | _experts(config, config.optional("num_experts", 256), 8) | _layers(config, [True] * fields["layers"])


def _fields(config: Reader, **absent: int) -> dict[str, Any]:
    """What all three have; absent: defaults."""
    config.harmless(*_HARMLESS)
    fields = llama_like(config, False, num_attention_heads=16, max_position_embeddings=32768, **absent)
    bias = config.flag("attention_bias", False)
    head_dim = config.optional("head_dim", 256) or 256
    fields |= partial_rotary(config, {**fields, "head_dim": head_dim}, 0.25)
    net = {
        "key_heads": config.optional("linear_num_key_heads", 16),
        "value_heads": config.optional("linear_num_value_heads", 32),
        "key_head_dim": config.optional("linear_key_head_dim", 128),
        "value_head_dim": config.optional("linear_value_head_dim", 128),
        "conv": config.optional("linear_conv_kernel_dim", 4),
    }
    return fields | {
        "attention_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
        "attention_gate": True,
        "delta_net": net,
    }


def _experts(config: Reader, experts: int | None, chosen: int) -> dict[str, Any]:
    """Routed experts and one that every token passes through, weighted by a number per token; numbers are defaults."""
    shared, ffn = config.optional("shared_expert_intermediate_size", 512), config.optional("moe_intermediate_size", 512)
    each = config.optional("num_experts_per_tok", chosen)
    if not experts:
        return {}
    if not shared:
        raise UserError(f"{config.where}: shared_expert_intermediate_size={shared} must be a positive whole number")
    routed = {"experts": experts, "chosen": each, "ffn": ffn, "shared": 1, "shared_ffn": shared, "shared_gate": True}
    return {"experts": routed}


def _layers(config: Reader, mixtures: Sequence[bool]) -> dict[str, Any]:
    """Kinds of layers: delta nets, and attention in each `full_attention_interval`-th unless `layer_types` says otherwise."""
    layers, every = len(mixtures), config.optional("full_attention_interval", 4) or 4
    absent = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
    listed = [
        OLDER.get(name, name) if isinstance(name, str) else name for name in per_layer(config, "layer_types", layers, absent)
    ]
    mixers, names = known(config, "layer_types", listed, (LINEAR, FULL)), list[str]()
    kinds, mixed = dict[str, Mapping[str, Any]](), len(set(mixtures)) > 1
    for mixer, mixture in zip(mixers, mixtures, strict=True):
        names.append(mixer + (", mixture" if mixture else ", dense") * mixed)
        net = {"mixer": "delta_net"} if mixer == LINEAR else {}
        kinds[names[-1]] = net | ({"dense": True} if mixed and not mixture else {})
    return kinds_of(names, kinds)
