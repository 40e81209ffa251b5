"""Falcon: blocks in parallel, one or a few heads of keys and values, rotary positions or ALiBi."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from topologies.reading import UserError


@model_type("falcon")
def falcon(config: Reader) -> dict[str, Any]:
    """Falcon 7B (one norm before both blocks), 40B and 180B (`new_decoder_architecture`: a norm for each), and the RW models,
    whose blocks follow each other.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    new, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    parallel, multi_query = config.flag("parallel_attn", True), config.flag("multi_query", True)
    kv_heads = config.optional("num_kv_heads") if new else 1 if multi_query else None
    if not new:
        config.harmless("num_kv_heads")  # which it has only with the new architecture
    norms = (config.optional("num_ln_in_parallel_attn") or 2) if new else 1 if parallel else 2
    if new and not parallel:
        raise UserError(f"{config.where}: parallel_attn=false with new_decoder_architecture=true is not read: no model has both")
    return {
        "hidden": hidden,
        "layers": config.integer("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads or heads,
        "ffn": config.optional("ffn_hidden_size") or 4 * hidden,
        "vocabulary": config.integer("vocab_size"),
        "context": config.optional("max_position_embeddings", 2048),
        "norms": norms,
        "parallel": parallel or new,
        "positions": "alibi" if config.flag("alibi", False) else "rotary",
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "dropout": config.rate("hidden_dropout"),
        "attention_dropout": config.rate("attention_dropout"),
    }
