"""Mamba-2, and hybrids of its layers with attention: Bamba, Granite 4, Nemotron-H, Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import kinds_of, known, per_layer
from strategies.models.importers.llama import grouped_heads, llama_like
from topologies.reading import UserError, shown

ATTENTION, SCAN, MLP, MOE = "full_attention", "linear_attention", "mlp", "moe"
OLDER = {"attention": ATTENTION, "mamba": SCAN}  # names of layers in files that are older than transformers 5
UNBOUND = 2**20  # tokens: a state has no longest sequence
_HARMLESS = ("mamba_expand", "expand", "time_step_rank", "rescale_prenorm_residual", "residual_in_fp32", "num_logits_to_keep")


@model_type("mamba2")
def mamba2(config: Reader) -> dict[str, Any]:
    """Mamba-2: norm and mixer in each layer, no feed-forward block, no positions."""
    config.harmless(*_HARMLESS, "norm_before_gate", "rms_norm", "head_dim")
    bias = config.flag("use_bias", False)
    own = {
        "heads": config.integer("num_heads", 128),
        "head_dim": config.integer("head_dim", 64),
        "state": config.optional("state_size", 128),
        "groups": config.optional("n_groups", 8),
        "conv": config.optional("conv_kernel", 4),
        "conv_bias": config.flag("use_conv_bias", True),
        "bias": bias,
        "output_bias": bias,
        "chunk": config.optional("chunk_size", 256),
    }
    _agree(config, own, config.optional("expand", 2), config.integer("hidden_size", 4096))
    return _no_mlp() | {
        "hidden": config.integer("hidden_size", 4096),
        "layers": config.integer("num_hidden_layers", 64),
        "heads": own["heads"],
        "head_dim": own["head_dim"],
        "vocabulary": config.integer("vocab_size", 32768),
        "context": UNBOUND,
        "tied": config.flag("tie_word_embeddings", False),
        "head": config.has_language_head,
        "state_space": own,
    }


@model_type("bamba")
def bamba(config: Reader) -> dict[str, Any]:
    """Bamba: state space or attention, and an MLP in each layer; positions of half of each head."""
    fields = llama_like(config) | grouped_heads(config, kv_heads=8)
    bias = config.flag("attention_bias", False)
    fields |= {"attention_bias": bias, "output_bias": bias, "mlp_bias": config.flag("mlp_bias", False)}
    indices = config.value("attn_layer_indices") or []
    if not isinstance(indices, list):
        raise UserError(f"{config.where}: attn_layer_indices={shown(indices)} must be a list of layers")
    config.harmless(*_HARMLESS, "layers_block_type", "layer_types")
    names = [ATTENTION if layer in indices else SCAN for layer in range(fields["layers"])]
    config.value("partial_rotary_factor"), config.value("layer_types")  # which the class does not ask
    fields |= {"rotary_dim": (fields.get("head_dim") or fields["hidden"] // fields["heads"]) // 2}
    return fields | {"state_space": _sizes(config, fields["hidden"], 1)} | _mixed(names)


@model_type("granitemoehybrid")
def granite_hybrid(config: Reader) -> dict[str, Any]:
    """Granite 4: state space or attention, and in each layer a mixture with a shared expert, or that expert alone."""
    config.harmless(*_HARMLESS, "attention_multiplier", "logits_scaling", "residual_multiplier", "rope_theta", "init_method")
    config.harmless("layers_block_type", "normalization_function", "intermediate_size")
    fields = llama_like(config) | grouped_heads(config)
    bias = config.flag("attention_bias", False)
    fields |= {"attention_bias": bias, "output_bias": bias, "embedding_scale": True}
    if config.value("position_embedding_type") != "rope":
        fields["positions"] = "none"
    shared = config.optional("shared_intermediate_size", 1024)
    experts = config.optional("num_local_experts", 8)
    if experts:
        chosen = config.optional("num_experts_per_tok", 2)
        fields["experts"] = {"experts": experts, "chosen": chosen, "ffn": fields["ffn"], "shared": 1, "shared_ffn": shared}
    else:
        config.harmless("num_experts_per_tok")
        fields["ffn"] = shared
    layers = fields["layers"]
    names = _names(config, "layer_types", per_layer(config, "layer_types", layers, [SCAN] * layers), (ATTENTION, SCAN))
    return fields | {"state_space": _sizes(config, fields["hidden"], 1)} | _mixed(names)


@model_type("nemotron_h")
def nemotron_h(config: Reader) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3: each layer has one block: state space, attention, an MLP without a gate, or a mixture."""
    config.harmless(*_HARMLESS, "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    config.harmless("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "use_mamba_kernels", "attention_bias", "n_group")
    config.harmless(
        "mamba_hidden_act", "mlp_hidden_act", "sliding_window", "num_hidden_layers", "hidden_dropout", "attention_head_dim"
    )
    names = _pattern(config)
    width = {"conv": "conv_kernel", "groups": "n_groups", "conv_bias": "use_conv_bias", "chunk": "chunk_size"}
    older = {"conv": "mamba_d_conv", "groups": "mamba_n_groups", "conv_bias": "mamba_conv_bias", "chunk": "mamba_chunk_size"}
    keys = {field: older[field] if config.value(older[field]) is not None else key for field, key in width.items()}
    own = {
        "heads": config.optional("mamba_num_heads", 128),
        "head_dim": config.optional("mamba_head_dim", 64),
        "state": config.optional("ssm_state_size", 128),
        "groups": config.optional(keys["groups"], 8),
        "conv": config.optional(keys["conv"], 4),
        "conv_bias": config.flag(keys["conv_bias"], True),
        "bias": config.flag("use_bias", False),
        "output_bias": config.flag("use_bias", False),
        "chunk": config.optional(keys["chunk"], 128),
    }
    fields = llama_like(
        config,
        num_hidden_layers=len(names),
        num_attention_heads=32,
        intermediate_size=21504,
        vocab_size=131072,
        max_position_embeddings=4096,
        hidden_size=4096,
    )
    fields |= grouped_heads(config, kv_heads=8, head_dim=128)
    fields |= {"layers": len(names), "gated": False, "positions": "none", "mlp_bias": config.flag("mlp_bias", False)}
    if MOE in names:
        if fields["mlp_bias"]:
            raise UserError(f"{config.where}: mlp_bias=true is not read of a mixture: routed experts have none")
        if config.optional("moe_latent_size") is not None:
            raise UserError(f"{config.where}: moe_latent_size: experts in a latent space are not simulated")
        fields["experts"] = {
            "experts": config.optional("n_routed_experts", 8),
            "chosen": config.optional("num_experts_per_tok", 2),
            "ffn": config.optional("moe_intermediate_size", 7688),
            "shared": 1,
            "shared_ffn": config.optional("moe_shared_expert_intermediate_size", 7688),
        }
        config.value("n_shared_experts")  # of the size above, whatever their number
    else:
        config.harmless(*(f"moe_{name}" for name in ("intermediate_size", "latent_size", "shared_expert_intermediate_size")))
        config.harmless("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    kinds: dict[str, Mapping[str, Any]] = {
        SCAN: {"mixer": "state_space", "feed_forward": False, "dense": True},
        ATTENTION: {"feed_forward": False, "dense": True},
        MLP: {"mixer": "none", "dense": True},
        MOE: {"mixer": "none"},
    }
    return fields | {"state_space": own} | kinds_of(names, kinds)


@model_type("falcon_h1")
def falcon_h1(config: Reader) -> dict[str, Any]:
    """Falcon-H1: attention and state space side by side, then an MLP."""
    config.harmless(*_HARMLESS, "key_multiplier", "mlp_multipliers", "ssm_multipliers", "mamba_norm_before_gate", "mamba_use_mlp")
    config.harmless("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")
    config.harmless("attn_layer_indices", "layers_block_type", "layer_types", "mlp_expansion_factor", "lm_head_multiplier")
    fields = llama_like(config) | grouped_heads(config, kv_heads=8)
    bias = config.flag("attention_bias", False)
    own = _sizes(config, fields["hidden"], 1, config.optional("mamba_d_ssm", 1024))
    own |= {"norm": config.flag("mamba_rms_norm", False), "output_bias": config.flag("projectors_bias", False)}
    mlp_bias = config.flag("mlp_bias", False)
    return fields | {
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": mlp_bias,
        "embedding_scale": True,
        "state_space": own,
        "mixer": "both",
    }


def _no_mlp() -> dict[str, Any]:
    """What layers of a mixer alone do not have."""
    without = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), False)
    return without | {"mixer": "state_space", "feed_forward": False, "norm": "rmsnorm", "positions": "none"}


def _sizes(config: Reader, hidden: int, groups: int, channels: int | None = None) -> dict[str, Any]:
    """Sizes of the mixer by the names that Bamba, Granite and Falcon use. channels: where they are not a multiple of hidden."""
    expand, heads = config.optional("mamba_expand", 2) or 2, config.optional("mamba_n_heads", 128) or 128
    channels = channels or expand * hidden
    dim = config.value("mamba_d_head", "auto")
    if isinstance(dim, bool) or not (dim in ("auto", None) or isinstance(dim, int)):
        raise UserError(f"{config.where}: mamba_d_head={shown(dim)} must be a whole number or auto")
    dim = dim if isinstance(dim, int) else channels // heads
    own = {
        "heads": heads,
        "head_dim": dim,
        "state": config.optional("mamba_d_state", 256),
        "groups": config.optional("mamba_n_groups", groups),
        "conv": config.optional("mamba_d_conv", 4),
        "conv_bias": config.flag("mamba_conv_bias", True),
        "bias": config.flag("mamba_proj_bias", False),
        "chunk": config.optional("mamba_chunk_size", 256),
    }
    own["output_bias"] = own["bias"]
    if heads * dim != channels:
        rule = f"must be the {channels} channels of the mixer"
        raise UserError(f"{config.where}: mamba_n_heads·mamba_d_head = {heads}·{dim} {rule}")
    return own


def _agree(config: Reader, own: Mapping[str, Any], expand: int | None, hidden: int) -> None:
    if own["heads"] * own["head_dim"] != (expand or 2) * hidden:
        found = f"num_heads·head_dim = {own['heads']}·{own['head_dim']}"
        raise UserError(f"{config.where}: {found} must be expand·hidden_size = {expand}·{hidden}")


def _names(config: Reader, key: str, names: Sequence[Any], kinds: Sequence[str]) -> list[str]:
    """Names of layers as they are called today."""
    return known(config, key, [OLDER.get(name, name) if isinstance(name, str) else name for name in names], kinds)


def _mixed(names: Sequence[str]) -> dict[str, Any]:
    """Layers that differ in their mixer alone."""
    return kinds_of(names, {ATTENTION: {}, SCAN: {"mixer": "state_space"}})


def _pattern(config: Reader) -> list[str]:
    """Layers of Nemotron-H: a list of names, or a letter each (M, *, -, E)."""
    listed = config.value("layers_block_type") or config.value("layer_types")
    letters = {"M": SCAN, "*": ATTENTION, "-": MLP, "E": MOE}
    if listed is None:
        text = config.value("hybrid_override_pattern")
        if not isinstance(text, str) or not text or set(text) - letters.keys():
            raise UserError(f"{config.where}: hybrid_override_pattern={shown(text)} must have a letter of M, *, -, E per layer")
        return [letters[letter] for letter in text]
    config.value("hybrid_override_pattern")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{config.where}: layers_block_type={shown(listed)} must be a list of names")
    return _names(config, "layers_block_type", listed, (SCAN, ATTENTION, MLP, MOE))
