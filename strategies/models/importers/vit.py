"""Vision transformers: patches of an image in place of tokens, an encoder that norms before each block."""

from __future__ import annotations

from typing import Any

from strategies.models.importers import Reader, model_type
from strategies.models.parts import Patches
from topologies.reading import UserError


@model_type("vit")
def vit(config: Reader) -> dict[str, Any]:
    """ViT (arXiv:2010.11929) with the classifier or the pooler that `architectures` names."""
    name = config.architecture or "ViTForImageClassification"
    if name not in ("ViTForImageClassification", "ViTModel"):
        raise UserError(f"{config.where}: architectures[0]='{name}' is not read; known: ViTForImageClassification, ViTModel")
    config.harmless("pooler_output_size", "encoder_stride", "pooler_act")
    patches = {key: config.integer(f"{key}_size", size) for key, size in (("image", 224), ("patch", 16))}
    images = {"image": patches["image"], "size": patches["patch"], "channels": config.integer("num_channels", 3)}
    hidden, bias = config.optional("hidden_size", 768), config.flag("qkv_bias", True)
    return {
        "family": "encoder",
        "hidden": hidden,
        "layers": config.optional("num_hidden_layers", 12),
        "heads": config.optional("num_attention_heads", 12),
        "ffn": config.optional("intermediate_size", 3072),
        "vocabulary": 0,
        "patches": images,
        "context": Patches.model_validate(images).tokens,
        "attention_bias": bias,
        "tied": False,
        "head": False,
        "pooler": name == "ViTModel",
        "classes": config.labels if name != "ViTModel" else 0,
        "dropout": config.rate("hidden_dropout_prob"),
        "attention_dropout": config.rate("attention_probs_dropout_prob"),
    }
