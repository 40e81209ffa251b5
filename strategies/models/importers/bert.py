"""BERT and what is built like it: encoders with learned positions, a norm after each block, and heads for their tasks."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type, sizes
from topologies.reading import UserError


def head_of(config: Reader, family: str, default: str, next_sentence: bool) -> dict[str, Any]:
    """Fields of the head that `architectures` names. next_sentence: the family has BERT's second task of pretraining."""
    name = config.architecture or family + default
    heads: dict[str, dict[str, Any]] = {
        "Model": {"pooler": True},
        "ForMaskedLM": {"head": True, "head_bias": True, "head_transform": True},
        "ForSequenceClassification": {"pooler": True, "pooler_classes": config.labels},
    }
    if next_sentence:
        heads["ForPreTraining"] = heads["ForMaskedLM"] | {"pooler": True, "pooler_classes": 2}
        heads["ForNextSentencePrediction"] = {"pooler": True, "pooler_classes": 2}
    task = name.removeprefix(family)
    if task not in heads or not name.startswith(family):
        known = ", ".join(family + task for task in heads)
        raise UserError(f"{config.where}: architectures[0]='{name}' is not read; known: {known}")
    return {"head": False, **heads[task]}


def _encoder(config: Reader) -> dict[str, Any]:
    """Fields that BERT and RoBERTa have in common."""
    positions = config.value("position_embedding_type", "absolute")
    if positions not in (None, "absolute") or config.flag("is_decoder", False):
        said = "is_decoder=true" if positions in (None, "absolute") else f"position_embedding_type='{positions}'"
        raise UserError(f"{config.where}: {said}: only encoders with absolute positions are read")
    return {
        "family": "encoder",
        **sizes(config),
        "tied": config.flag("tie_word_embeddings", True),
        "embedding_norm": True,
        "final_norm": False,
        "dropout": config.rate("hidden_dropout_prob", 0.1),
        "attention_dropout": config.rate("attention_probs_dropout_prob", 0.1),
    }


@model_type("bert")
def bert(config: Reader) -> dict[str, Any]:
    """BERT with the head that `architectures` names; without one, that of pre-training (masked tokens and next sentence)."""
    config.harmless("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")  # of nothing
    fields = _encoder(config) | head_of(config, "Bert", "ForPreTraining", next_sentence=True)
    return fields | {"token_types": config.optional("type_vocab_size", 2)}


@model_type("roberta")
def roberta(config: Reader) -> dict[str, Any]:
    """RoBERTa: of the rows of positions, those up to the padding token's are of no token (514 rows, 512 tokens)."""
    return _roberta(config, "Roberta")


@model_type("xlm-roberta")
def xlm_roberta(config: Reader) -> dict[str, Any]:
    """XLM-R: RoBERTa with a vocabulary of a hundred languages."""
    return _roberta(config, "XLMRoberta")


@model_type("camembert")
def camembert(config: Reader) -> dict[str, Any]:
    """CamemBERT: RoBERTa in French."""
    return _roberta(config, "Camembert")


def _roberta(config: Reader, family: str) -> dict[str, Any]:
    fields = _encoder(config) | head_of(config, family, "ForMaskedLM", next_sentence=False)
    rows, padding = fields["context"], config.optional("pad_token_id", 1) or 0
    if rows <= padding + 1:
        raise UserError(f"{config.where}: max_position_embeddings={rows} leaves no position after pad_token_id={padding}")
    types = config.optional("type_vocab_size", 2)
    return fields | {"token_types": types, "position_rows": rows, "context": rows - padding - 1}


@model_type("distilbert")
def distilbert(config: Reader) -> dict[str, Any]:
    """DistilBERT: BERT without segments and pooler."""
    name = config.architecture or "DistilBertForMaskedLM"
    heads: dict[str, dict[str, Any]] = {
        "DistilBertModel": {"head": False},
        "DistilBertForMaskedLM": {"head": True, "head_bias": True, "head_transform": True},
        "DistilBertForSequenceClassification": {"head": False, "pooler": True, "pooler_classes": config.labels},
    }
    if name not in heads:
        raise UserError(f"{config.where}: architectures[0]='{name}' is not read; known: {', '.join(heads)}")
    config.harmless("qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")
    return {
        "family": "encoder",
        "hidden": config.integer("dim"),
        "layers": config.integer("n_layers"),
        "heads": config.integer("n_heads"),
        "ffn": config.integer("hidden_dim"),
        "vocabulary": config.integer("vocab_size"),
        "context": config.integer("max_position_embeddings"),
        "tied": config.flag("tie_word_embeddings", True),
        "embedding_norm": True,
        "final_norm": False,
        "dropout": config.rate("dropout", 0.1),
        "attention_dropout": config.rate("attention_dropout", 0.1),
        **heads[name],
    }
