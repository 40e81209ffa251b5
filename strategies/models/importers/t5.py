"""T5, T5 v1.1, Flan-T5 and mT5: an encoder and a decoder with relative positions."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.importers.layer_types import kinds_of
from topologies.reading import UserError

TOKENS = 512  # of a sequence in pretraining (arXiv:1910.10683, section 3.1.1), where a file does not say n_positions


@model_type("t5")
def t5(config: Reader) -> dict[str, Any]:
    """T5: `feed_forward_proj` tells v1.1's gated blocks from the first version's; `tie_word_embeddings` false (v1.1 and later) is
    a head of its own, as the published weights have it. Both sequences have as many tokens, unless `model.targets` says
    otherwise.
    """
    name = config.architecture
    if name and not name.endswith(("ForConditionalGeneration", "WithLMHeadModel", "Model")):
        raise UserError(f"{config.where}: architectures[0]='{name}': only T5ForConditionalGeneration and T5Model are read")
    config.harmless("classifier_dropout", "relative_attention_max_distance", "dense_act_fn", "output_past")
    layers = config.integer("num_layers")
    decoders = config.optional("num_decoder_layers") or layers
    names = ["encoder"] * layers + ["first decoder"] + ["decoder"] * (decoders - 1)
    kinds: dict[str, dict[str, Any]] = {
        "encoder": {"family": "encoder"},
        "first decoder": {"family": "decoder", "cross": True, "joins": True},
        "decoder": {"family": "decoder", "cross": True},
    }
    return {
        "family": "encoder_decoder",
        "hidden": config.integer("d_model"),
        "layers": layers + decoders,
        "heads": config.integer("num_heads"),
        "head_dim": config.optional("d_kv", 64),
        "ffn": config.integer("d_ff"),
        "gated": _gated(config, "relu"),
        "vocabulary": config.integer("vocab_size"),
        "context": config.optional("n_positions", TOKENS),
        "positions": "relative",
        "position_rows": config.optional("relative_attention_num_buckets", 32),
        "norm": "rmsnorm",
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "head": name.endswith(("ForConditionalGeneration", "WithLMHeadModel")) or not name,
        "tied": config.flag("tie_word_embeddings", True),
        "dropout": config.rate("dropout_rate", 0.1),
        "attention_dropout": config.rate("dropout_rate", 0.1),
        **kinds_of(names, kinds),
    }


@model_type("mt5")
def mt5(config: Reader) -> dict[str, Any]:
    """mT5: T5 v1.1 with a larger vocabulary and a head of its own."""
    tied = config.flag("tie_word_embeddings", False)
    return t5(config) | {"tied": tied, "gated": _gated(config, "gated-gelu")}


def _gated(config: Reader, absent: str) -> bool:
    """Whether blocks have a gate: `is_gated_act` where the file has it, or the name of the activation."""
    return config.flag("is_gated_act", str(config.value("feed_forward_proj", absent)).startswith("gated"))
