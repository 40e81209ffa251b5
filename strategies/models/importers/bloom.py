"""BLOOM and MPT: GPTs with ALiBi in place of learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.models.importers import Reader, model_type
from topologies.reading import UserError, shown


@model_type("bloom")
def bloom(config: Reader) -> dict[str, Any]:
    """BLOOM: a norm after the embedding, biases everywhere. Files say no longest sequence: it was trained on 2,048 tokens
    (arXiv:2211.05100, table 3).
    """
    config.harmless("n_inner", "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion", "offset_alibi")
    config.harmless("skip_bias_add", "skip_bias_add_qkv", "unk_token_id")
    hidden = config.optional("hidden_size") or config.integer("n_embed")
    if config.optional("n_embed", hidden) not in (None, hidden):
        raise UserError(f"{config.where}: n_embed={config.value('n_embed')} contradicts hidden_size={hidden}")
    return {
        "hidden": hidden,
        "layers": config.optional("n_layer") or config.integer("num_hidden_layers"),
        "heads": config.optional("n_head") or config.integer("num_attention_heads"),
        "vocabulary": config.integer("vocab_size"),
        "context": config.optional("seq_length", 2048),
        "positions": "alibi",
        "embedding_norm": True,
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "dropout": config.rate("hidden_dropout"),
        "attention_dropout": config.rate("attention_dropout"),
    }


@model_type("mpt")
def mpt(config: Reader) -> dict[str, Any]:
    """MPT 7B and 30B: no biases at all, tied head."""
    attention = config.value("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise UserError(f"{config.where}: attn_config={shown(attention)} must be a mapping")
    for name, only in (("qk_ln", False), ("attn_type", "multihead_attention"), ("alibi", True), ("prefix_lm", False)):
        if attention.get(name, only) != only:
            raise UserError(f"{config.where}: attn_config.{name}={shown(attention[name])} is not simulated: only {only} is")
    if not config.flag("no_bias", True):
        raise UserError(f"{config.where}: no_bias=false is not read: transformers' MPT has no biases")
    config.harmless("learned_pos_emb", "embedding_fraction", "emb_pdrop")
    hidden = config.integer("d_model")
    return {
        "hidden": hidden,
        "layers": config.integer("n_layers"),
        "heads": config.integer("n_heads"),
        "ffn": (config.optional("expansion_ratio", 4) or 4) * hidden,
        "vocabulary": config.integer("vocab_size"),
        "context": config.integer("max_seq_len"),
        "positions": "alibi",
        "norm_bias": False,
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "dropout": config.rate("resid_pdrop"),
        "attention_dropout": bool(attention.get("attn_pdrop", 0)),
    }
