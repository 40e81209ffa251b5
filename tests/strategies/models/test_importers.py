"""Readers of Hugging Face config.json: what is read, ignored and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategies.models.model import Model, load_model
from tests.strategies.models.conftest import FILES, HUB, SMALL, hugging_face
from topologies.reading import UserError, build


def test_every_key_that_was_not_read_is_listed() -> None:
    known = ["activation_function", "bos_token_id", "embd_pdrop", "eos_token_id", "initializer_range", "layer_norm_epsilon"]
    assert load_model(str(FILES / "gpt2.json"))[1] == [*known, "n_ctx"]
    assert "num_nextn_predict_layers (model.mtp=1 has them)" in load_model(str(FILES / "deepseek-v3.json"))[1]
    assert load_model("llama-3.1-8b")[1] == []


def test_defaults_of_absent_keys_are_those_of_transformers(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "tie_word_embeddings", "sliding_window")
    llama, mistral = (hugging_face(tmp_path, name, absent)[0] for name in ("llama-3.1-8b", "mistral-7b-v0.1"))
    assert (llama.kv_heads, llama.head_dim, llama.tied, llama.window) == (32, 128, False, None)
    assert (mistral.kv_heads, mistral.window) == (8, 4096)
    assert hugging_face(tmp_path, "mistral-7b-v0.1", num_key_value_heads=None, sliding_window=None)[0].kv_heads == 32
    assert hugging_face(tmp_path, "qwen3-8b", ("head_dim",))[0].head_dim == 128
    assert hugging_face(tmp_path, "gpt2", n_inner=1000, tie_word_embeddings=False)[0].tied is False
    assert hugging_face(tmp_path, "deepseek-v3", n_routed_experts=None)[0].experts is None


def test_model_type_from_architecture_and_text_config(tmp_path: Path) -> None:
    for name in ("gpt2", "llama-2-7b", "deepseek-v2-lite", "deepseek-v3", "qwen3-0.6b"):
        assert hugging_face(tmp_path, name, ("model_type",))[0].parameters == HUB[name]
    text = json.loads((FILES / "qwen3-0.6b.json").read_text())
    del text["architectures"], text["tie_word_embeddings"]  # said by the outer file
    outer = {"model_type": "seen", "architectures": ["SeenForConditionalGeneration"], "vision_config": {}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(outer | {"text_config": text | {"model_type": "qwen3_text"}, "tie_word_embeddings": True}))
    model, ignored = load_model(str(tmp_path))
    assert (model.name, model.parameters) == (tmp_path.name, HUB["qwen3-0.6b"])
    assert {"vision_config (the language model alone is simulated)", "text_config.rope_theta"} <= set(ignored)
    assert "text_config.hidden_size" not in ignored


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("llama-2-7b", {"model_type": "lama"}, "unknown model type 'lama'; did you mean 'llama'?"),
        ("vit-base-patch16-224", {"image_size": None}, "image_size=None must be a positive whole number"),
        ("vit-base-patch16-224", {"num_channels": 0}, "num_channels=0 must be a positive whole number"),
        ("llama-2-7b", {"hidden_size": "big"}, "hidden_size='big' must be a whole number"),
        ("llama-2-7b", {"num_hidden_layers": 0}, "num_hidden_layers=0 must be a positive whole number"),
        (
            "llama-2-7b",
            {"architectures": ["LlamaForTokenClassification"]},
            "architectures.0.='LlamaForTokenClassification': only",
        ),
        ("llama-3.1-8b", {"num_key_value_heads": 5}, "kv_heads=5 must divide heads=32: 32 % 5 = 2"),
        ("llama-3.1-8b", {"num_attention_heads": 24}, "heads=24 must divide hidden=4096 when head_dim is not given"),
        ("llama-3.1-8b", {"text_config": 3}, "text_config=3 must be a mapping"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "experts.chosen=9: must be at most experts.experts=8"),
        ("deepseek-v3", {"first_k_dense_replace": 62}, "experts.first_dense=62 must be at most layers=61"),
        ("bert-base-uncased", {"architectures": ["BertForMultipleChoice"]}, "'BertForMultipleChoice' is not read; known: BertM"),
    ],
)
def test_mistakes_in_a_hub_file_are_one_line(tmp_path: Path, file: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        hugging_face(tmp_path, file, **changes)
    assert str(caught.value).startswith(str(tmp_path / "changed.json"))
    assert "\n" not in str(caught.value)


QWEN3_30B = {  # huggingface.co/Qwen/Qwen3-30B-A3B, config.json
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("kind", "key"), [("mixtral", "decoder_sparse_step"), ("qwen3", "decoder_sparse_step"), ("llama", "decoder")]
)
def test_a_model_by_another_name_is_refused(tmp_path: Path, kind: str, key: str) -> None:
    """A mixtral has no num_experts: it would run with 8 experts of 6,144 in place of 128 of 768."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_30B | {"model_type": kind}))
    with pytest.raises(UserError, match=f"config.json: {key}.* is not known of a '{kind}', and may change its size"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("mixtral-8x7b", {"num_experts": 128}),
        ("llama-2-7b", {"num_local_experts": 8}),
        ("llama-2-7b", {"kv_lora_rank": 512}),
        ("qwen2-7b", {"shared_expert_intermediate_size": 20480}),
        ("deepseek-v3", {"index_n_heads": 64}),
        ("gpt2", {"num_layers": 24}),
        ("mistral-7b-v0.1", {"layer_types": ["sliding_attention", "full_attention"] * 16}),
        ("gpt2", {"add_cross_attention": True}),
        ("llama-2-7b", {"layer_types": ["sliding_attention"] * 32}),
        ("bert-base-uncased", {"position_embedding_type": "relative_key"}),
        ("bert-base-uncased", {"is_decoder": True}),
        ("llama-2-7b", {"cla_layers": 16}),
    ],
)
def test_a_key_that_changes_a_models_size_is_refused(tmp_path: Path, file: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(changes))) as caught:
        hugging_face(tmp_path, file, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (
            "llama-3.1-8b",
            {
                "head_dim": 128,
                "rope_parameters": {"rope_type": "llama3"},
                "dtype": "bfloat16",
                "pad_token_id": 0,
                "_name_or_path": "x",
                "transformers_version": "4.57.1",
                "attn_implementation": "sdpa",
                "num_experts": None,
                "is_llama_config": True,
                "rope_interleaved": False,
                "transformers.js_config": {"dtype": "q4"},
                "quantization_config": {"quant_method": "fp8"},
                "max_sequence_length": 2048,
                "num_layers": 32,
            },
        ),
        ("qwen3-8b", {"layer_types": ["full_attention"] * 36}),
        ("qwen2-7b", {"use_mrope": False, "attention_bias": True}),
        ("mixtral-8x7b", {"router_jitter_noise": 0.0, "head_dim": None, "output_hidden_states": False}),
        ("mistral-7b-v0.1", {"layer_types": ["sliding_attention"] * 32}),
        (
            "deepseek-v3",
            {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True, "pretraining_tp": 1, "auto_map": {"a": "b"}},
        ),
        (
            "gpt2",
            {
                "reorder_and_upcast_attn": False,
                "scale_attn_weights": True,
                "summary_type": "cls_index",
                "hidden_size": 768,
                "task_specific_params": {"text-generation": {"do_sample": True}},
            },
        ),
        (
            "bert-base-uncased",
            {
                "classifier_dropout": None,
                "position_embedding_type": "absolute",
                "pooler_fc_size": 768,
                "pooler_num_attention_heads": 12,
                "gradient_checkpointing": False,
                "directionality": "bidi",
            },
        ),
    ],
)
def test_harmless_keys_are_ignored_and_listed(tmp_path: Path, file: str, changes: dict[str, Any]) -> None:
    model, ignored = hugging_face(tmp_path, file, **changes)
    assert model.parameters == load_model(str(FILES / f"{file}.json"))[0].parameters
    assert "initializer_range" in ignored


def test_other_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"changed.json: field 'hidden_size' is required"):
        hugging_face(tmp_path, "llama-2-7b", ("hidden_size",))
    with pytest.raises(UserError, match="unknown model 'lama-3.1-8b'; did you mean 'llama-3.1-8b'"):
        load_model("lama-3.1-8b")
    with pytest.raises(UserError, match=r"nowhere.json: cannot be read"):
        load_model(str(tmp_path / "nowhere.json"))
    with pytest.raises(UserError, match="small: unknown field 'hiden'; did you mean 'hidden'"):
        build(Model, SMALL | {"hiden": 3}, "small")
    with pytest.raises(UserError, match="small: pooler_classes=2 needs pooler=True"):
        build(Model, SMALL | {"pooler_classes": 2}, "small")


def test_layers_that_are_not_alike_are_told_apart(tmp_path: Path) -> None:
    model, _ = hugging_face(tmp_path, "qwen2-7b", use_sliding_window=True, max_window_layers=14, sliding_window=4096)
    assert [own.window for own in model.layer_models] == [None] * 14 + [4096] * 14
    gemma, _ = load_model(str(FILES / "gemma-2-2b.json"))
    assert [own.window for own in gemma.layer_models] == [4096, None] * 13
    assert gemma.pattern == ("sliding_attention", "full_attention")
    oss, _ = load_model(str(FILES / "gpt-oss-20b.json"))
    assert [own.window for own in oss.layer_models] == [128, None] * 12
    maverick, _ = load_model(str(FILES / "llama-4-maverick.json"))
    assert [maverick.is_mixture(layer) for layer in range(6)] == [False, True] * 3
    assert [own.chunk for own in maverick.layer_models[:4]] == [8192, 8192, 8192, None]
    moe, _ = hugging_face(tmp_path, "qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[1])
    assert [moe.is_mixture(layer) for layer in range(6)] == [False, False, False, True, False, True]
    all_alike, _ = hugging_face(tmp_path, "gemma-2-2b", layer_types=["full_attention"] * 26)
    assert all_alike.pattern == ()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("rwkv", "it has recurrent or state-space layers, whose kernels no profile has measured"),
        ("recurrent_gemma", "it has recurrent or state-space layers, whose kernels no profile has measured"),
        ("gemma3n", "its per-layer embeddings and alternating updates are not simulated"),
        ("llama9", "no importer reads it"),
        ("my_model", "no importer reads it"),
    ],
)
def test_a_type_that_is_not_read_is_no_misspelling(tmp_path: Path, kind: str, why: str) -> None:
    with pytest.raises(UserError, match=f"unknown model type '{kind}': {why}; (--input|describe)") as caught:
        hugging_face(tmp_path, "llama-2-7b", model_type=kind)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("gemma-2-2b", {"layer_types": ["linear_attention"] * 26}, "layer_types has 'linear_attention', which is not simulated"),
        ("gemma-2-2b", {"layer_types": ["full_attention"] * 3}, "must be a list of num_hidden_layers=26 entries"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true: tokens that attend to later"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "an embedding narrower than hidden_size=768"),
        (
            "roberta-base",
            {"architectures": ["RobertaForQuestionAnswering"]},
            "is not read; known: RobertaModel, RobertaForMaskedLM",
        ),
        ("roberta-base", {"max_position_embeddings": 1}, "max_position_embeddings=1 leaves no position after pad_token_id=1"),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln=True is not simulated"),
        ("t5-small", {"architectures": ["T5EncoderModel2"]}, "only T5ForConditionalGeneration and T5Model are read"),
        ("vit-base-patch16-224", {"model_type": "deit"}, "it has a distillation token"),
        ("stablelm-3b", {"qk_layernorm": True}, "qk_layernorm=true: norms with weights of their own"),
        ("glm-4-9b-0414", {"partial_rotary_factor": 2}, "partial_rotary_factor=2 must be a number above 0 and at most 1"),
    ],
)
def test_what_a_family_may_say_and_is_not_read_is_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        hugging_face(tmp_path, file, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": [{"name": "a"}]}, "kinds: 'a' must be in pattern"),
        ({"parallel": True, "norms": 4}, "parallel=True is for dense layers with 1 or 2 norms"),
        ({"vocabulary": 0}, "vocabulary=0: must be 0 for images"),
        ({"family": "encoder_decoder"}, "family=encoder_decoder needs kinds of both families"),
        ({"targets": 9}, "targets, cross and joins are for family=encoder_decoder"),
        ({"positions": "relative"}, "positions=relative needs position_rows"),
        ({"position_rows": 39}, "position_rows=39 must be at least context=40"),
        ({"rotary_dim": 9}, "rotary_dim=9 must be at most head_dim=8"),
        ({"window": 3, "chunk": 3}, "window and chunk exclude each other"),
        ({"pattern": ["a"], "kinds": [{"name": "a", "kv_heads": 4}]}, "'a': kv_heads=4 must divide heads=6: 6 % 4 = 2"),
    ],
)
def test_fields_of_a_description_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Model, SMALL | changes, "small")


def test_smollm3_has_no_positions_in_every_fourth_layer_unless_it_says_otherwise(tmp_path: Path) -> None:
    config = json.loads((Path("tests/data/models") / "smollm3-3b.json").read_text())
    config.pop("no_rope_layers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    published, _ = load_model("tests/data/models/smollm3-3b.json")
    assert load_model(str(file))[0].model_dump(exclude={"name"}) == published.model_dump(exclude={"name"})


SAID = [  # keys of files as they are published, and one that says otherwise
    ("gemma-2-9b", {"sliding_window_size": 4096}, {"sliding_window_size": 1024}),  # google/gemma-2-9b
    ("phi-3-mini", {"full_attn_mod": 1, "interpolate_factor": 1, "mlp_bias": False}, {"full_attn_mod": 2}),  # Phi-4-mini
    ("qwen3-30b-a3b", {"use_qk_norm": True, "qkv_bias": False}, {"use_qk_norm": False}),  # Qwen3-Coder-480B-A35B
]


@pytest.mark.parametrize(("name", "said", "otherwise"), SAID, ids=[name for name, *_ in SAID])
def test_what_published_files_say_of_all_models_of_their_type(
    name: str, said: dict[str, Any], otherwise: dict[str, Any], tmp_path: Path
) -> None:
    """It changes no parameter; another value is no model that is known, and refused by its name."""
    assert hugging_face(tmp_path, name, **said)[0].parameters == HUB[name]
    with pytest.raises(UserError, match=f"{next(iter(otherwise))}="):
        hugging_face(tmp_path, name, **said | otherwise)


def test_a_published_file_of_minimax_m2(tmp_path: Path) -> None:
    """Its keys as MiniMaxAI/MiniMax-M2 has them; 62 layers of 256 experts of which 8 are chosen: 229 billion parameters."""
    data: dict[str, Any] = {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    model = load_model(str(path))[0]
    attention = 3072 * (48 + 2 * 8) * 128 + 48 * 128 * 3072 + (48 + 8) * 128
    layer = attention + 2 * 3072 + 256 * (3072 + 3 * 3072 * 1536)
    assert model.parameters == 62 * layer + 2 * 200064 * 3072 + 3072
