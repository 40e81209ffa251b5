"""BERT: an encoder with learned positions, a norm after each block, and heads for its pre-training tasks."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type, sizes
from topologies.reading import UserError

# architecture -> (masked-token head, pooler, next-sentence classes)
_HEADS = {
    "BertModel": (False, True, 0),
    "BertForMaskedLM": (True, False, 0),
    "BertForPreTraining": (True, True, 2),
    "BertForNextSentencePrediction": (False, True, 2),
}


@model_type("bert")
def bert(config: Reader) -> dict[str, Any]:
    """BERT with the head that `architectures` names; without one, that of pre-training (masked tokens and next sentence)."""
    name = config.architecture or "BertForPreTraining"
    if name not in _HEADS:
        raise UserError(f"{config.where}: architectures[0]='{name}' is not read; known: {', '.join(_HEADS)}")
    head, pooler, classes = _HEADS[name]
    positions = config.value("position_embedding_type", "absolute")
    if positions not in (None, "absolute") or config.flag("is_decoder", False):
        said = "is_decoder=true" if positions in (None, "absolute") else f"position_embedding_type='{positions}'"
        raise UserError(f"{config.where}: {said}: only encoders with absolute positions are read")
    config.harmless("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")  # of nothing
    return {
        "family": "encoder",
        **sizes(config),
        "token_types": config.optional("type_vocab_size", 2),
        "tied": config.flag("tie_word_embeddings", True),
        "embedding_norm": True,
        "final_norm": False,
        "head": head,
        "head_bias": head,
        "head_transform": head,
        "pooler": pooler,
        "pooler_classes": classes,
        "dropout": config.rate("hidden_dropout_prob", 0.1),
        "attention_dropout": config.rate("attention_probs_dropout_prob", 0.1),
    }
