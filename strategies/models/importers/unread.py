"""Keys of a `config.json` that an importer does not read: which are harmless, and which may change a model's size.

A key that nobody reads may be a note, a setting of generation, or what makes this model another one (a qwen3_moe that is called a
mixtral has `num_experts`). Which it is, its name tells: names of PretrainedConfig and of the families that are read are known
(github.com/huggingface/transformers, `configuration_utils.py`, `models/*/configuration_*.py`); of others those with a word for a
size or a part of a model are taken for what changes it, unless they are switched off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Words for sizes and parts of a model.
STRUCTURAL = frozenset(
    {
        "attention",
        "attn",
        "bias",
        "block",
        "blocks",
        "conv",
        "cross",
        "depth",
        "dim",
        "dims",
        "embd",
        "expert",
        "experts",
        "ff",
        "ffn",
        "gated",
        "glu",
        "head",
        "heads",
        "hidden",
        "inner",
        "intermediate",
        "interval",
        "kv",
        "latent",
        "layer",
        "layers",
        "lora",
        "mamba",
        "mlp",
        "moe",
        "mtp",
        "nextn",
        "qk",
        "rank",
        "shared",
        "size",
        "sizes",
        "sparse",
        "ssm",
        "width",
        "window",
        "windows",
    }
)
# Names with one of these words that change neither parameters nor matrix products.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "attention_multiplier",
        "attention_softmax_in_fp32",
        "attn_implementation",
        "attn_logit_softcapping",
        "block_size",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "hidden_act",
        "hidden_activation",
        "hidden_dropout",
        "hidden_dropout_prob",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "no_repeat_ngram_size",
        "output_hidden_states",
        "pipeline_parallel_size",
        "reorder_and_upcast_attn",
        "rotary_dim",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "tensor_parallel_size",
        "use_flash_attention",
        "use_flash_attention_2",
        "use_flash_attn",
    }
)
# Families whose layers are recurrent or state-space scans: classes of transformers dispatch a loop over tokens without a GPU.
RECURRENT = frozenset(
    """bailing_hybrid glm5_next kimi_linear lara_mini minimax olmo_hybrid qwen4_exp
    recurrent_gemma rwkv xlstm zamba""".split()
)
# Families that no importer reads, and why.
NOT_READ = {
    **dict.fromkeys(RECURRENT, "it has recurrent or state-space layers, whose kernels no profile has measured"),
    "gemma3n": "its per-layer embeddings and alternating updates are not simulated",
    "deepseek_v32": "its sparse attention has an indexer that is not simulated",
    "albert": "its layers share one set of parameters, which is not simulated",
    "whisper": "its encoder reads spectrograms through convolutions, which are not simulated",
    "deit": "it has a distillation token besides the class token, which is not simulated",
    "clip": "it trains two encoders on one loss, which is not simulated",
}
# Types that are read, and whose classes run other kernels on GPUs than they dispatch without one.
OTHER_KERNELS = frozenset(
    """mamba mamba2 falcon_mamba jamba bamba falcon_h1 granitemoehybrid nemotron_h
    qwen3_next qwen3_5 qwen3_5_moe zamba2""".split()
)
# Types of transformers whose names are close to one that is read, and whose models are not.
OTHERS = frozenset("ernie4_5_vl_moe ibert mllama molmo2 pixtral umt5 vilt vits xglm xlm-roberta-xl".split())
# One size by several names: harmless where it agrees with the one that was read.
ALIASES = (
    frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers"}),
    frozenset({"hidden_size", "n_embd", "d_model", "dim"}),
    frozenset({"num_attention_heads", "n_head", "n_heads", "num_heads"}),
    frozenset({"intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"}),
    frozenset({"head_dim", "attention_head_dim"}),
    frozenset({"sliding_window", "sliding_window_size"}),
)


def may_change_sizes(key: str, data: Mapping[str, Any], read: set[str], harmless: set[str]) -> bool:
    """Whether an unread key may change parameters or matrix products. harmless: what the model's family says does not."""
    if not data[key] or key in HARMLESS or key in harmless:
        return False
    same = next((names for names in ALIASES if key in names), frozenset())
    if any(data[name] == data[key] for name in same & read if name in data):
        return False
    return bool(STRUCTURAL & set(key.lower().split("_")))
