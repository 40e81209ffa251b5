"""Mamba, Falcon Mamba and Jamba, a hybrid of Mamba's layers with attention and mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import kinds_of, known, per_layer
from strategies.models.importers.llama import grouped_heads, llama_like
from strategies.models.importers.mamba import ATTENTION, OLDER, SCAN, UNBOUND
from topologies.reading import UserError, shown

_NOTES = """fused_add_norm rms_norm rescale_prenorm_residual residual_in_fp32 use_mambapy use_associative_scan time_step_scale
pad_vocab_size_multiple d_model d_inner n_layer mixer_rms_eps use_mamba_kernels""".split()


@model_type("falcon_mamba")
def falcon_mamba(config: Reader) -> dict[str, Any]:
    """Falcon Mamba: Mamba with norms of steps, B and C without parameters, and a head of its own."""
    fields = mamba(config) | {"tied": config.flag("tie_word_embeddings", True)}
    return fields | {"state_space": fields["state_space"] | {"step_norms": "unweighted"}}


@model_type("mamba")
def mamba(config: Reader) -> dict[str, Any]:
    """Mamba: norm and mixer in each layer, no feed-forward block, no positions."""
    config.harmless(*_NOTES)
    if config.value("ssm_cfg"):
        raise UserError(f"{config.where}: ssm_cfg={shown(config.value('ssm_cfg'))}: sizes under it are not read")
    hidden, bias = config.integer("hidden_size", 768), config.flag("use_bias", False)
    expanded = (config.optional("expand", 2) or 2) * hidden
    channels = config.optional("intermediate_size") or expanded  # of which transformers takes the first, too, where a file has it
    state, conv = config.optional("state_size", 16), config.optional("conv_kernel", 4)
    own = _sizes(config, hidden, channels, "time_step_rank") | {"state": state, "conv": conv}
    own |= {"conv_bias": config.flag("use_conv_bias", True), "bias": bias, "output_bias": bias}
    return {
        **dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), False),
        "mixer": "state_space",
        "feed_forward": False,
        "norm": "rmsnorm",
        "positions": "none",
        "hidden": hidden,
        "layers": config.integer("num_hidden_layers", 32),
        "heads": channels,
        "head_dim": 1,
        "vocabulary": config.integer("vocab_size", 50280),
        "context": UNBOUND,
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "state_space": own,
    }


@model_type("jamba")
def jamba(config: Reader) -> dict[str, Any]:
    """Jamba (arXiv:2403.19887): attention in one of eight layers, Mamba's mixer in the others, a mixture in every second."""
    config.harmless(*_NOTES, "num_logits_to_keep", "calc_logits_for_entire_prompt", "mamba_inner_layernorms")
    fields = llama_like(config) | grouped_heads(config, kv_heads=8) | {"positions": "none"}
    hidden, layers, bias = fields["hidden"], fields["layers"], config.flag("mamba_proj_bias", False)
    own = _sizes(config, hidden, (config.optional("mamba_expand", 2) or 2) * hidden, "mamba_dt_rank")
    own |= {"state": config.optional("mamba_d_state", 16), "conv": config.optional("mamba_d_conv", 4), "step_norms": True}
    own |= {"conv_bias": config.flag("mamba_conv_bias", True), "bias": bias, "output_bias": bias}
    attends = {layer for layer in range(layers) if _in_turn(config, "attn_layer", layer, 8, 4)}
    by_number = [ATTENTION if layer in attends else SCAN for layer in range(layers)]
    listed = per_layer(config, "layers_block_type", layers, by_number)
    mixers = known(config, "layers_block_type", [OLDER.get(str(name), name) for name in listed], (ATTENTION, SCAN))
    config.value("layer_types")  # the same by its name of today
    experts = config.optional("num_experts", 16) or 1
    if experts > 1:
        chosen = config.optional("num_experts_per_tok", 2)
        fields["experts"] = {"experts": experts, "chosen": chosen, "ffn": fields["ffn"]}
    else:
        config.harmless("num_experts_per_tok", "expert_layer_period", "expert_layer_offset")
    sparse = [experts > 1 and _in_turn(config, "expert_layer", layer, 2, 1) for layer in range(layers)]
    names, kinds = [], dict[str, Mapping[str, Any]]()
    for mixer, mixture in zip(mixers, sparse, strict=True):
        name = f"{mixer}, {'mixture' if mixture else 'dense'}"
        names.append(name)
        scans = {"mixer": "state_space"} if mixer == SCAN else {}
        kinds[name] = scans | ({} if mixture or experts == 1 else {"dense": True})
    return fields | {"state_space": own} | kinds_of(names, kinds)


def _in_turn(config: Reader, key: str, layer: int, period: int, offset: int) -> bool:
    """Whether a layer is one of those of `KEY_period` and `KEY_offset`; both numbers are defaults."""
    period, offset = config.integer(f"{key}_period", period), config.optional(f"{key}_offset", offset) or 0
    return layer % period == offset


def _sizes(config: Reader, hidden: int, channels: int, rank: str) -> dict[str, Any]:
    """Sizes of Mamba's mixer: a head per channel; `rank` may be "auto"."""
    steps = config.value(rank, "auto")
    steps = math.ceil(hidden / 16) if steps in ("auto", None) else config.integer(rank)
    return {"heads": channels, "head_dim": 1, "groups": 1, "norm": False, "step_rank": steps}
