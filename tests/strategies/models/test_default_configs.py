"""Configurations as transformers itself saves them: read with all their keys, or refused without a hint that misleads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategies.models.importers import model_type
from strategies.models.model import load_model
from topologies.reading import UserError

CLASSES = {
    "arcee": "ArceeForCausalLM",
    "bamba": "BambaForCausalLM",
    "camembert": "CamembertForMaskedLM",
    "codegen": "CodeGenForCausalLM",
    "cwm": "CwmForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm": "GlmForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "mt5": "MT5ForConditionalGeneration",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "zamba2": "Zamba2ForCausalLM",
}
CHANGES: dict[str, dict[str, Any]] = {
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},  # without, the class cannot be made
    "granitemoeshared": {"shared_intermediate_size": 512},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_transformers_saves_is_read(kind: str, tmp_path: Path) -> None:
    """Every key that its configuration class writes, Infinity among them, and the parameters of its class."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(kind, **CHANGES.get(kind, {}))
    data = config.to_dict() | {"architectures": [CLASSES[kind]], "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(data, default=str))
    with torch.device("meta"):
        module = getattr(transformers, CLASSES[kind])(config)
    assert load_model(str(tmp_path))[0].parameters == sum(parameter.numel() for parameter in module.parameters())


def test_other_types_are_not_taken_for_misspellings(tmp_path: Path) -> None:
    """Of all that transformers has: a model with a name of its own is not another one."""
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known, path = set(model_type), tmp_path / "config.json"
    others = {name.removesuffix("_text") for name in CONFIG_MAPPING_NAMES} - known
    assert len(others) > 200
    for name in sorted(others):
        path.write_text(json.dumps({"model_type": name}))
        with pytest.raises(UserError) as caught:
            load_model(str(path))
        assert "did you mean" not in str(caught.value)


def test_infinity_is_no_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": Infinity}')
    with pytest.raises(UserError, match=r"hidden_size='?Infinity'? must be a whole number"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("last", "mixtures"), [(-1, [False, True, True, True]), (2, [False, True, True, False]), (1, [False, True, False, False])]
)
def test_layers_of_ernie_that_are_mixtures(last: int, mixtures: list[bool], tmp_path: Path) -> None:
    """From the second to the last that is said; −1 is the last of all."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {"vocab_size": 100, "max_position_embeddings": 128}
    data = {"model_type": "ernie4_5_moe", "moe_layer_end_index": last} | sizes
    (tmp_path / "config.json").write_text(json.dumps(data))
    model = load_model(str(tmp_path / "config.json"))[0]
    assert [model.is_mixture(layer) for layer in range(4)] == mixtures
    for wrong in ("all", True, 1.5):
        (tmp_path / "config.json").write_text(json.dumps(data | {"moe_layer_end_index": wrong}))
        with pytest.raises(UserError, match="moe_layer_end_index=.* must be a whole number"):
            load_model(str(tmp_path / "config.json"))
