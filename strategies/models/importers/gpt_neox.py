"""GPT-NeoX (Pythia), GPT-J and CodeGen: blocks in parallel, rotary positions of a part of each head; GPT-Neo before them."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type, sizes
from strategies.models.importers.gpt2 import gpt_sizes
from strategies.models.importers.layer_types import kinds_of, known
from strategies.models.importers.llama import partial_rotary
from topologies.reading import UserError, shown


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


@model_type("codegen")
def codegen(config: Reader) -> dict[str, Any]:
    """CodeGen: GPT-J with one matrix for queries, keys and values."""
    return gptj(config)


@model_type("gpt_neo")
def gpt_neo(config: Reader) -> dict[str, Any]:
    """GPT-Neo: GPT-2 with a window in every second layer, and no biases of queries, keys and values."""
    layers, types = config.integer("num_layers", 24), config.value("attention_types")
    config.value("attention_layers")  # which transformers derives from attention_types
    pairs: Any = types if types is not None else [[["global", "local"], layers // 2]]
    try:
        names = [name for kinds, count in pairs for _ in range(int(count)) for name in kinds]
    except (TypeError, ValueError):
        raise UserError(f"{config.where}: attention_types={shown(types)} must be lists of names, each with a number") from None
    if len(names) != layers:
        raise UserError(f"{config.where}: attention_types names {len(names)} layers, num_layers={layers}")
    kinds: dict[str, dict[str, Any]] = {"global": {}, "local": {"window": config.optional("window_size", 256)}}
    hidden = config.integer("hidden_size", 2048)
    return {
        "hidden": hidden,
        "layers": layers,
        "heads": config.integer("num_heads", 16),
        "ffn": config.optional("intermediate_size") or 4 * hidden,
        "vocabulary": config.integer("vocab_size", 50257),
        "context": config.integer("max_position_embeddings", 2048),
        "attention_bias": False,
        "tied": config.flag("tie_word_embeddings", True),
        "head": config.has_language_head,
        "dropout": config.rate("resid_dropout"),
        "attention_dropout": config.rate("attention_dropout"),
        **kinds_of(known(config, "attention_types", names, kinds), kinds),
    }
