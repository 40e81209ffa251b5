"""GPT-2: learned positions, layernorm, biases everywhere, tied head."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type


@model_type("gpt2")
def gpt2(config: Reader) -> dict[str, Any]:
    """GPT-2 of any size; `n_inner` null means 4 · n_embd. The defaults of `Model` are GPT-2's."""
    hidden = config.integer("n_embd")
    return {
        "hidden": hidden,
        "layers": config.integer("n_layer"),
        "heads": config.integer("n_head"),
        "ffn": config.optional("n_inner") or 4 * hidden,
        "vocabulary": config.integer("vocab_size"),
        "context": config.integer("n_positions"),
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "dropout": config.rate("resid_pdrop", 0.1),
        "attention_dropout": config.rate("attn_pdrop", 0.1),
    }
