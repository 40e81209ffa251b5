"""GPT-NeoX (Pythia) and GPT-J: blocks in parallel, rotary positions of a part of each head."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type, sizes
from strategies.models.importers.gpt2 import gpt_sizes
from strategies.models.importers.llama import partial_rotary


@model_type("gpt_neox")
def gpt_neox(config: Reader) -> dict[str, Any]:
    """GPT-NeoX 20B and Pythia; `rotary_pct` is the part of a head that is turned."""
    config.harmless("classifier_dropout")
    bias = config.flag("attention_bias", True)
    fields = {
        **sizes(config),
        "attention_bias": bias,
        "output_bias": bias,
        "parallel": config.flag("use_parallel_residual", True),
        "tied": config.flag("tie_word_embeddings", False),
        "positions": "rotary",
        "head": config.has_language_head,
        "dropout": config.rate("hidden_dropout"),
        "attention_dropout": config.rate("attention_dropout"),
    }
    return fields | partial_rotary(config, fields, 0.25, "rotary_pct")


@model_type("gptj")
def gptj(config: Reader) -> dict[str, Any]:
    """GPT-J: one norm before both blocks, no biases in attention, one in the head."""
    head = config.has_language_head
    turned = config.optional("rotary_dim", 64)
    return {
        **gpt_sizes(config),
        "norms": 1,
        "parallel": True,
        "attention_bias": False,
        "output_bias": False,
        "positions": "rotary",
        "tied": config.flag("tie_word_embeddings", False),
        "head": head,
        "head_bias": head,
        "dropout": config.rate("resid_pdrop"),
        "attention_dropout": config.rate("attn_pdrop"),
        **({"rotary_dim": turned} if turned else {}),
    }
