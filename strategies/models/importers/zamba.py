"""Zamba2: Mamba-2 layers, some of them after a block of attention and feed-forward block that they share."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type, sizes
from strategies.models.importers.layer_types import kinds_of, known, per_layer
from topologies.reading import UserError, shown

MAMBA, HYBRID = "mamba", "hybrid"
RENAMED = "linear_attention"  # as transformers 5 writes the first
DEFAULT = [MAMBA] + [*[MAMBA] * 5, HYBRID] * 7 + [*[MAMBA] * 4, HYBRID] + [*[MAMBA] * 3, HYBRID] + [MAMBA] * 2


@model_type("zamba2")
def zamba2(config: Reader) -> dict[str, Any]:
    """Hybrid layers take `num_mem_blocks` blocks in turn, each with adapters of its own (models/zamba2/modular_zamba2.py)."""
    config.harmless("attention_hidden_size", "attention_head_dim", "mamba_headdim", "kv_channels", "num_logits_to_keep")
    config.harmless("use_mamba_kernels", "use_conv_bias", "use_shared_mlp_adapter")
    config.harmless("mamba_time_step_limit")  # which the class does not ask
    hidden = config.integer("hidden_size", 2560)
    absent = {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "num_hidden_layers": 54}
    fields = sizes(config, absent | {"hidden_size": 2560, "intermediate_size": 4 * hidden})
    listed_layers = per_layer(config, "layers_block_type", fields["layers"], DEFAULT)
    listed_layers = [MAMBA if name == RENAMED else name for name in listed_layers]
    names = known(config, "layers_block_type", listed_layers, (MAMBA, HYBRID))
    hybrids, listed = [layer for layer, name in enumerate(names) if name == HYBRID], config.value("hybrid_layer_ids")
    if listed is not None and listed != hybrids:
        raise UserError(f"{config.where}: hybrid_layer_ids={shown(listed)} must be the hybrid layers of layers_block_type")
    blocks = config.integer("num_mem_blocks", 1)
    if blocks > max(1, len(hybrids)):
        raise UserError(f"{config.where}: num_mem_blocks={blocks} must be at most the {len(hybrids)} hybrid layers")
    head_dim = 2 * hidden // fields["heads"]
    kv_heads = config.optional("num_key_value_heads") or fields["heads"]
    fields |= {"kv_heads": kv_heads, "head_dim": head_dim}
    adapters = config.flag("use_shared_attention_adapter", False)
    if adapters and kv_heads != fields["heads"]:
        raise UserError(f"{config.where}: use_shared_attention_adapter=true needs num_key_value_heads={fields['heads']}")
    bias = config.flag("add_bias_linear", False)
    if config.flag("use_long_context", False):
        fields["context"] = 16384
    shared = {
        "heads": fields["heads"],
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": fields["ffn"],
        "bias": bias,
        "rotary": config.flag("use_mem_rope", False),
        "adapter_rank": config.integer("adapter_rank", 128),
        "attention_adapters": adapters,
    }
    without = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), False)
    fields |= without | {"gated": True, "norm": "rmsnorm", "positions": "none", "mixer": "state_space", "feed_forward": False}
    fields |= {"tied": config.flag("tie_word_embeddings", True), "head": config.has_language_head}
    kinds = dict.fromkeys(range(len(names)), "mamba") | dict.fromkeys(hybrids, "block")
    kinds |= dict.fromkeys(hybrids[:blocks], "own block")
    of_kind = {"mamba": {}, "own block": {"shared_block": "own"}, "block": {"shared_block": "again"}}
    fields |= {"state_space": _mixer(config, hidden, bias), "shared_blocks": shared if hybrids else None}
    return fields | kinds_of(list(kinds.values()), of_kind)


def _mixer(config: Reader, hidden: int, bias: bool) -> dict[str, Any]:
    """Sizes of Mamba-2's mixer."""
    heads, channels = config.integer("n_mamba_heads", 8), config.integer("mamba_expand", 2) * hidden
    if channels % heads:
        raise UserError(f"{config.where}: n_mamba_heads={heads} must divide mamba_expand·hidden_size = {channels}")
    return {
        "heads": heads,
        "head_dim": channels // heads,
        "state": config.integer("mamba_d_state", 64),
        "groups": config.integer("mamba_ngroups", 1),
        "conv": config.integer("mamba_d_conv", 4),
        "bias": bias,
        "output_bias": bias,
        "chunk": config.integer("chunk_size", 256),
    }
