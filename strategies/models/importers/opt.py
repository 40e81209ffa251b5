"""OPT: GPT-3's layers with ReLU, and two more rows of learned positions than tokens."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from topologies.reading import UserError


@model_type("opt")
def opt(config: Reader) -> dict[str, Any]:
    """OPT of any size but 350M, whose embedding is narrower than its layers."""
    hidden, context = config.integer("hidden_size"), config.integer("max_position_embeddings")
    narrow = config.optional("word_embed_proj_dim", hidden)
    if narrow not in (None, hidden):
        rule = f"an embedding narrower than hidden_size={hidden} (OPT-350M's) is not simulated: describe a model without it"
        raise UserError(f"{config.where}: word_embed_proj_dim={narrow}: {rule}")
    bias, before = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    return {
        "hidden": hidden,
        "layers": config.integer("num_hidden_layers"),
        "heads": config.integer("num_attention_heads"),
        "ffn": config.integer("ffn_dim"),
        "vocabulary": config.integer("vocab_size"),
        "context": context,
        "position_rows": context + 2,  # OPTLearnedPositionalEmbedding.offset
        "norm_weights": config.flag("layer_norm_elementwise_affine", True),
        "final_norm": before and not config.flag("_remove_final_layer_norm", False),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "dropout": config.rate("dropout", 0.1),
        "attention_dropout": config.rate("attention_dropout"),
    }
