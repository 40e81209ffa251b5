"""Multimodal files: the language model is what its part says, the file says for it, and its class has by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from strategies.models import importers
from strategies.models.importers.nested import completed
from strategies.models.model import Model, load_model
from tests.strategies.models.conftest import FILES, HUB
from topologies.reading import UserError

DEFAULTS: dict[str, dict[str, int]] = yaml.safe_load((Path(importers.__file__).with_name("nested_defaults.yaml")).read_text())
LLAVA = {  # huggingface.co/llava-hf/llava-1.5-7b-hf, config.json: sizes are left to LlamaConfig
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {"hidden_size": 1024, "model_type": "clip_vision_model", "num_hidden_layers": 24},
    "vision_feature_layer": -2,
}


def read(tmp_path: Path, data: dict[str, Any]) -> tuple[Model, list[str]]:
    """The model in a file with these contents."""
    (tmp_path / "config.json").write_text(json.dumps(data))
    return load_model(str(tmp_path))


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_the_classes(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoConfig.for_model(kind).get_text_config().to_dict()
    assert {key: own[key] for key in DEFAULTS[kind]} == DEFAULTS[kind]


def test_sizes_that_a_part_leaves_out_are_its_class_s(tmp_path: Path) -> None:
    """Vicuna is Llama 2 7B; LLaVA has 64 tokens more, in the embedding and in the head."""
    model, ignored = read(tmp_path, LLAVA)
    assert model.parameters == HUB["llama-2-7b"] + 2 * 64 * 4096
    assert (model.layers, model.context, model.head) == (32, 4096, True)
    assert "vision_config (the language model alone is simulated)" in ignored


def test_what_the_file_says_of_others_is_not_the_language_model_s(tmp_path: Path) -> None:
    """MusicFlamingo's head_dim is its audio tower's."""
    assert read(tmp_path, LLAVA | {"head_dim": 256, "num_key_value_heads": 1})[0].parameters == HUB["llama-2-7b"] + 2 * 64 * 4096
    assert completed({"head_dim": 256, "vocab_size": 7}, {"model_type": "my"}) == {"model_type": "my", "vocab_size": 7}


@pytest.mark.parametrize(("file", "part", "tied"), [(True, False, True), (False, True, False), (None, True, True)])
def test_whether_the_head_is_tied_is_asked_of_the_file(tmp_path: Path, file: bool | None, part: bool, tied: bool) -> None:
    """As transformers' class does: the head is the outer model's."""
    text = LLAVA["text_config"] | {"tie_word_embeddings": part}  # type: ignore[operator]
    outer = {key: value for key, value in LLAVA.items() if key != "tie_word_embeddings"}
    model, ignored = read(tmp_path, outer | {"text_config": text} | ({} if file is None else {"tie_word_embeddings": file}))
    assert model.tied is tied
    assert any("tie_word_embeddings of the file itself holds" in key for key in ignored) == (file is not None)


def test_the_tied_head_of_the_class_is_the_file_s() -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model("llava", text_config={"model_type": "llama", "num_hidden_layers": 1})
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = True, False
    with torch.device("meta"):
        module = transformers.LlavaForConditionalGeneration(config)
    assert module.lm_head.weight is module.get_input_embeddings().weight


@pytest.mark.parametrize("name", ["llm_config", "language_config", "thinker_config.text_config"])
def test_other_names_of_the_part(tmp_path: Path, name: str) -> None:
    inner: Any = json.loads((FILES / "qwen3-0.6b.json").read_text())
    for key in reversed(name.split(".")):
        inner = {key: inner}
    model, ignored = read(tmp_path, {"model_type": "my_chat", "architectures": ["MyChatModel"], "vit_config": {"a": 1}} | inner)
    assert model.parameters == HUB["qwen3-0.6b"]
    assert model.head
    assert "vit_config (the language model alone is simulated)" in ignored
    assert f"{name}.rope_theta" in ignored


def test_sizes_at_the_top_of_older_files(tmp_path: Path) -> None:
    """Qwen2-VL's files had no parts for text: they are Qwen 2's with a vision_config beside (hub: Qwen/Qwen2-VL-2B-Instruct)."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    more = {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    kind = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 32}}
    model, ignored = read(tmp_path, kind | sizes | more)
    attention = 1536 * (1536 + 2 * 256) + 1536 + 2 * 256 + 1536**2
    assert model.parameters == 151936 * 1536 + 28 * (attention + 3 * 1536 * 8960 + 2 * 1536) + 1536
    assert ignored == ["vision_config (the language model alone is simulated)"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 3}, "text_config=3 must be a mapping"),
        (
            {"text_config": json.loads((FILES / "bert-base-uncased.json").read_text())},
            r"text_config is an encoder \('bert'\) beside another, and both train on one loss, .*: --input with the inputs",
        ),
        ({"text_config": LLAVA["text_config"] | {"moe_layers": [1]}}, "moe_layers=.1. is not known of a 'llama'"),  # type: ignore[operator]
        (
            {"text_config": {"model_type": "kimi_linear_text"}},
            "unknown model type 'kimi_linear': it has recurrent or state-space layers",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, LLAVA | changes)
    assert "\n" not in str(caught.value)


def test_a_class_that_a_file_brings_along_is_named_as_a_module(tmp_path: Path) -> None:
    code = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "auto_map": {"AutoConfig": "a.B"}}
    with pytest.raises(
        UserError, match=r"code that it brings along \(auto_map\), .*: name a function .* as FILE.py:NAME"
    ) as caught:
        read(tmp_path, code)
    assert "transformers' own class" not in str(caught.value)
