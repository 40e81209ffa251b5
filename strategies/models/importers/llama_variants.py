"""Families that differ from Llama in biases, gates or norms: Arcee, Seed-OSS, ERNIE 4.5, Nemotron, Granite MoE, EXAONE 4 …"""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import attention_kinds
from strategies.models.importers.llama import grouped_heads, llama, llama_like, partial_rotary


@model_type("arcee")
def arcee(config: Reader) -> dict[str, Any]:
    """Arcee: Llama with an MLP of two matrices (the square of a ReLU between)."""
    return llama(config) | {"gated": False}


@model_type("seed_oss")
def seed_oss(config: Reader) -> dict[str, Any]:
    """Seed-OSS: biases of queries, keys and values by default, a flag of its own for the output's."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=8, head_dim=128)
    fields |= {"attention_bias": config.flag("attention_bias", True), "output_bias": config.flag("attention_out_bias", False)}
    return fields | {"mlp_bias": config.flag("mlp_bias", False), "dropout": config.rate("residual_dropout", 0.1)}


@model_type("ernie4_5")
def ernie(config: Reader) -> dict[str, Any]:
    """ERNIE 4.5, dense: one flag for all biases."""
    bias = config.flag("use_bias", False)
    fields = llama_like(config, tied=True) | grouped_heads(config, kv_heads=2, head_dim=128)
    return fields | {"attention_bias": bias, "output_bias": bias, "mlp_bias": bias}


@model_type("helium")
def helium(config: Reader) -> dict[str, Any]:
    """Helium: Llama without a bias of the output."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=20, head_dim=128)
    return fields | {"attention_bias": config.flag("attention_bias", False), "mlp_bias": config.flag("mlp_bias", False)}


@model_type("nemotron")
def nemotron(config: Reader) -> dict[str, Any]:
    """Nemotron 3 and 4, Minitron: layernorms, no gate, positions of half of each head."""
    fields = llama(config) | {"gated": False, "norm": "layernorm"}
    return fields | partial_rotary(config, fields, 0.5)


@model_type("granitemoe")
def granite_mixture(config: Reader) -> dict[str, Any]:
    """Granite 3 MoE: a mixture in every layer; `intermediate_size` is that of one expert."""
    config.harmless("attention_multiplier", "logits_scaling", "residual_multiplier")
    fields = llama_like(config) | grouped_heads(config)
    bias = config.flag("attention_bias", False)
    routed = {"experts": config.optional("num_local_experts", 8), "chosen": config.optional("num_experts_per_tok", 2)}
    fields |= {"attention_bias": bias, "output_bias": bias, "embedding_scale": True}
    return fields | {"experts": {**routed, "ffn": fields["ffn"]}}


@model_type("granitemoeshared")
def granite_shared(config: Reader) -> dict[str, Any]:
    """Granite MoE with a shared expert."""
    fields = granite_mixture(config)
    shared = config.optional("shared_intermediate_size", 0)
    return fields | {"experts": fields["experts"] | ({"shared": 1, "shared_ffn": shared} if shared else {})}


@model_type("exaone4")
def exaone(config: Reader) -> dict[str, Any]:
    """EXAONE 4: norms after the blocks and of queries and keys; windows in three of four layers, in the fourth no positions."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=32) | {"qk_norm": True}
    config.value("sliding_window_pattern")  # which `layer_types` says too
    if config.optional("sliding_window", 4096) is None:
        config.value("layer_types")
        return fields
    return fields | attention_kinds(config, fields["layers"], every=4, window=4096, positions="none")


@model_type("hunyuan_v1_dense")
def hunyuan(config: Reader) -> dict[str, Any]:
    """Hunyuan, dense: Llama with norms of queries and keys."""
    config.only(use_cla=False, use_qk_norm=True)
    config.harmless("cla_share_factor", "class_num", "dense_list", "enable_lm_head_fp32", "org_vocab_size")
    return llama(config) | {"qk_norm": True}
