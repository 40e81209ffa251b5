"""A law over configurations: whichever key of a file changes, the importer counts the class's parameters or refuses the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strategies.models.model import load_model
from topologies.reading import UserError

transformers = pytest.importorskip("transformers")

CLASSES = {
    "gemma2": "Gemma2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "jamba": "JambaForCausalLM",
    "llama": "LlamaForCausalLM",
    "mamba": "MambaForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
SMALL = {  # sizes by the names that families have for them
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 256),
    **dict.fromkeys(("intermediate_size", "d_ff"), 512),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 8),
    **{"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1000},
}
UNTIED = ("nemotron_h", "tie_word_embeddings")  # the class of 5.23 does not tie what its file says is tied


def changed(said: dict[str, Any], small: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each key with other values of its kind."""
    for key, value in said.items():
        if isinstance(value, bool):
            yield key, not value
        elif isinstance(value, int) and not key.endswith("_token_id"):
            own = small.get(key, value)
            yield from ((key, 2 * own), (key, max(1, own // 2)))
        elif value is None:
            yield key, 16


@pytest.mark.parametrize("kind", CLASSES)
def test_parameters_are_the_class_s_or_the_file_is_refused(kind: str, tmp_path: Path) -> None:
    import torch

    said = transformers.AutoConfig.for_model(kind).to_dict()
    small = {key: value for key, value in SMALL.items() if key in said}
    compared = 0
    for key, value in changed(said, small):
        try:
            config = transformers.AutoConfig.for_model(kind, **small | {key: value})
            with torch.device("meta"):
                module = getattr(transformers, CLASSES[kind])(config)
        except Exception:  # the class itself refuses it, in ways of its own
            continue
        data = config.to_dict() | {"model_type": kind, "architectures": [CLASSES[kind]]}
        (tmp_path / "config.json").write_text(json.dumps(data, default=str))
        try:
            model = load_model(str(tmp_path))[0]
        except UserError:
            continue
        own = sum(parameter.numel() for parameter in module.parameters())
        assert model.parameters == own or (kind, key) == UNTIED, f"{key}={value}"
        compared += 1
    assert compared > 15
