"""A model as pretrain_gpt.py's arguments describe it, read and written.

Defaults are Megatron-LM's (megatron/training/arguments.py): biases, learned positions, dropout 0.1 and a vocabulary padded to
128·tp unless told otherwise.
"""

from __future__ import annotations

import re
from typing import Any

from strategies.frameworks.settings import Keys
from strategies.models.model import Model
from topologies.reading import UserError, shown

Flags = list[tuple[str, Any]]  # an argument and its value, None for a switch

_SIZES = {
    "layers": "num-layers",
    "hidden": "hidden-size",
    "ffn": "ffn-hidden-size",
    "heads": "num-attention-heads",
    "head_dim": "kv-channels",
    "vocabulary": "vocab-size",
    "context": "max-position-embeddings",
}
_LATENT = {
    "q_rank": "q-lora-rank",
    "kv_rank": "kv-lora-rank",
    "nope_head_dim": "qk-head-dim",
    "rope_head_dim": "qk-pos-emb-head-dim",
    "v_head_dim": "v-head-dim",
}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}


def read_model(flags: Keys) -> dict[str, Any]:
    """Fields of a model, when the file has its sizes."""
    model: dict[str, Any] = {field: value for field, name in _SIZES.items() if (value := flags.optional(name)) is not None}
    if not {"layers", "hidden", "heads"} <= model.keys():
        return {}
    model.setdefault("context", flags.optional("seq-length") or 1024)
    model.setdefault("vocabulary", 50257)  # of the GPT-2 tokenizer, whose size the script does not say
    linear_bias = not flags.flag("disable-bias-linear", False)
    model |= {
        "name": "megatron",
        "gated": flags.flag("swiglu", False),
        "tied": not flags.flag("untie-embeddings-and-output-weights", False),
        "norm": flags.choice("normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "LayerNorm"),
        "positions": flags.choice("position-embedding-type", _POSITIONS, "learned_absolute"),
        "attention_bias": linear_bias or flags.flag("add-qkv-bias", False),
        "output_bias": linear_bias,
        "mlp_bias": linear_bias,
        "qk_norm": flags.flag("qk-layernorm", False),
        "dropout": _rate(flags, "hidden-dropout"),
        "attention_dropout": _rate(flags, "attention-dropout"),
        "vocabulary_multiple": (flags.optional("make-vocab-size-divisible-by") or 128)
        * (flags.optional("tensor-model-parallel-size") or 1),
    }
    if flags.flag("group-query-attention", False):
        model["kv_heads"] = flags.integer("num-query-groups")
    if experts := flags.optional("num-experts"):
        ffn = flags.optional("moe-ffn-hidden-size") or model.get("ffn", 4 * model["hidden"])
        shared = flags.optional("moe-shared-expert-intermediate-size")
        model["experts"] = {"experts": experts, "chosen": flags.optional("moe-router-topk", 2), "ffn": ffn}
        model["experts"] |= {"shared": 1, "shared_ffn": shared} if shared else {}
        model["experts"] |= {
            "first_dense": _first_dense(flags),
            "router_bias": flags.flag("moe-router-enable-expert-bias", False),
        }
    if depth := flags.optional("mtp-num-layers"):
        model["mtp"] = depth
    if flags.flag("multi-latent-attention", False):
        model["latent"] = {field: value for field, name in _LATENT.items() if (value := flags.optional(name)) is not None}
        model.pop("head_dim", None)
    return model


def _first_dense(flags: Keys) -> int:
    """Dense layers before the first with experts, as "([0]*3+[1]*58)" has them. Raises UserError for any other order."""
    text = str(flags.value("moe-layer-freq", 1)).replace(" ", "").strip("()")
    match = re.fullmatch(r"\[0\]\*?(\d{0,9})\+\[1\](\*\d+)?", text)
    if not match and text not in ("1", "[1]"):
        raise UserError(f"{flags.where}: --moe-layer-freq {text}: only dense layers before all with experts are simulated")
    return int(match[1] or 1) if match else 0


def _rate(flags: Keys, name: str) -> bool:
    return number(flags, name, flags.value(name, 0.1)) > 0


def number(flags: Keys, name: str, value: Any) -> float:
    """The value of an argument as a number. Raises UserError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{flags.where}: --{name}={shown(value)} must be a number") from None


# what pretrain_gpt.py's arguments do not say, or say in ways that are not written down here
_WITHOUT = {
    "window": None,
    "chunk": None,
    "sinks": False,
    "rotary_dim": None,
    "position_rows": None,
    "norm_weights": True,
    "norm_bias": True,
    "parallel": False,
    "embedding_scale": False,
    "logit_softcap": False,
    "patches": None,
    "pattern": (),
    "classes": 0,
    "state_space": None,
    "delta_net": None,
    "attention_gate": False,
}


def _refuse_unsaid(model: Model) -> None:
    """Raise UserError for what would be lost."""
    for field, usual in _WITHOUT.items():
        if (value := getattr(model, field)) != usual:
            raise UserError(
                f"model {model.name}: {field}={shown(value)} is not written as arguments of Megatron-LM: only {usual} is"
            )
    if model.qk_norm not in (True, False) or model.positions not in _POSITIONS.values():
        raise UserError(
            f"model {model.name}: qk_norm={model.qk_norm}, positions={model.positions} have no arguments of Megatron-LM"
        )
    if model.norms != 2 or (model.experts and (model.experts.shared_gate or model.experts.every != 1)):
        raise UserError(f"model {model.name}: its norms or experts are not written as arguments of Megatron-LM")


def model_flags(model: Model, tp: int) -> Flags:
    """Arguments that describe the model to tp ranks. Raises UserError for a model that they do not describe."""
    _refuse_unsaid(model)
    flags: Flags = [("--" + name, getattr(model, field)) for field, name in _SIZES.items()]
    flags.append(("--make-vocab-size-divisible-by", max(1, model.vocabulary_multiple // tp)))
    if model.kv_heads != model.heads:
        flags += [("--group-query-attention", None), ("--num-query-groups", model.kv_heads)]
    flags += [("--position-embedding-type", "rope" if model.positions == "rotary" else "learned_absolute")]
    flags += [("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm")]
    said = {
        "swiglu": model.gated,
        "untie-embeddings-and-output-weights": not model.tied,
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.attention_bias and not model.mlp_bias,
        "qk-layernorm": model.qk_norm,
    }
    flags += [("--" + name, None) for name, wanted in said.items() if wanted]
    if model.experts:
        flags += [
            ("--num-experts", model.experts.experts),
            ("--moe-router-topk", model.experts.chosen),
            ("--moe-ffn-hidden-size", model.experts.ffn),
            ("--moe-token-dispatcher-type", "alltoall"),
        ]
        if model.experts.shared:
            flags.append(("--moe-shared-expert-intermediate-size", model.experts.shared * model.experts.shared_ffn))
        flags += [("--moe-router-enable-expert-bias", None)] * model.experts.router_bias
        if model.experts.first_dense:
            dense = model.experts.first_dense
            flags.append(("--moe-layer-freq", f'"([0]*{dense}+[1]*{model.layers - dense})"'))
    flags += [("--mtp-num-layers", model.mtp)] if model.mtp else []
    if model.latent:
        flags.append(("--multi-latent-attention", None))
        flags += [("--" + name, value) for field, name in _LATENT.items() if (value := getattr(model.latent, field)) is not None]
    return flags
