"""GPT-2 and what is built like it: learned positions, layernorm, biases everywhere, tied head."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type


def gpt_sizes(config: Reader) -> dict[str, Any]:
    """Sizes by GPT-2's keys; `n_inner` null means 4 · n_embd."""
    hidden = config.integer("n_embd")
    return {
        "hidden": hidden,
        "layers": config.integer("n_layer"),
        "heads": config.integer("n_head"),
        "ffn": config.optional("n_inner") or 4 * hidden,
        "vocabulary": config.integer("vocab_size"),
        "context": config.integer("n_positions"),
    }


@model_type("gpt2")
def gpt2(config: Reader) -> dict[str, Any]:
    """GPT-2 of any size. The defaults of `Model` are GPT-2's."""
    return {
        **gpt_sizes(config),
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "dropout": config.rate("resid_pdrop", 0.1),
        "attention_dropout": config.rate("attn_pdrop", 0.1),
    }


@model_type("gpt_bigcode")
def gpt_bigcode(config: Reader) -> dict[str, Any]:
    """StarCoder: GPT-2 with one head of keys and values."""
    config.value("num_key_value_heads")  # which transformers derives from multi_query
    config.harmless("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size")
    return gpt2(config) | ({"kv_heads": 1} if config.flag("multi_query", True) else {})
