"""Models against published parameter counts, hand computation, and PyTorch's own count of FLOPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.models.model import Model, load_model, model_names
from topologies.reading import UserError, build

FILES = Path(__file__).parents[2] / "data" / "models"

# Parameters of the weights on huggingface.co as transformers builds them, without buffers. deepseek-v3: the main model, "671B" of
# the 685B in its README (the rest is the prediction layer), with the router's correction bias, which its files hold too
HUB = {
    "gpt2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v2-lite": 15_706_484_224,
}
# the same sizes as models of transformers: BertModel, BertForMaskedLM, BertForPreTraining
BERT = {
    "bert-base-uncased": {"BertModel": 109_482_240, "BertForMaskedLM": 109_514_298, "BertForPreTraining": 110_106_428},
    "bert-large-uncased": {"BertModel": 335_141_888, "BertForMaskedLM": 335_174_458, "BertForPreTraining": 336_226_108},
}
# gpt2-xl and Llama 3.1 on huggingface.co; BertForPreTraining
PRESETS = {
    "deepseek-v3": 671_026_419_200,  # 671B without multi-token prediction, arXiv:2412.19437
    "mixtral-8x7b": 46_702_792_704,
    "gpt2-1.5b": 1_557_611_200,
    "bert-large": 336_226_108,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}
# billions: Narayanan et al. 2021, arXiv:2104.04473, Tables 1 and 2; Turing-NLG: "17 billion" (ZeRO, arXiv:1910.02054)
BILLIONS = {
    "gpt-1.7b": "1.7",
    "gpt-3.6b": "3.6",
    "gpt-7.5b": "7.5",
    "gpt-18b": "18.4",
    "gpt-39b": "39.1",
    "gpt-76b": "76.1",
    "gpt-145b": "145.6",
    "gpt-310b": "310.1",
    "mt-nlg-530b": "529.6",
    "gpt-1t": "1008.0",
    "gpt3-175b": "174.6",
    "turing-nlg-17b": "17.2",
}
SMALL: dict[str, Any] = {"name": "small", "hidden": 48, "layers": 3, "heads": 6, "vocabulary": 101, "context": 40}
LLAMA: dict[str, Any] = SMALL | {
    "kv_heads": 2,
    "ffn": 80,
    "gated": True,
    "positions": "rotary",
    "norm": "rmsnorm",
    "tied": False,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
}
EXPERTS: dict[str, Any] = {"experts": 8, "chosen": 2, "ffn": 32, "shared": 2, "first_dense": 1}


def hugging_face(tmp_path: Path, file: str, drop: tuple[str, ...] = (), **changes: Any) -> tuple[Model, list[str]]:
    """The model in a changed copy of one of the files of tests/data/models."""
    data = json.loads((FILES / f"{file}.json").read_text())
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({key: value for key, value in (data | changes).items() if key not in drop}))
    return load_model(str(path))


@pytest.mark.parametrize("name", HUB)
def test_parameters_are_those_of_the_hub(name: str) -> None:
    assert load_model(str(FILES / f"{name}.json"))[0].parameters == HUB[name]


@pytest.mark.parametrize("name", BERT)
def test_bert_has_the_head_that_its_architecture_names(tmp_path: Path, name: str) -> None:
    for architecture, count in BERT[name].items():
        assert hugging_face(tmp_path, name, architectures=[architecture])[0].parameters == count


def test_presets_have_their_published_sizes() -> None:
    presets = {name: load_model(name)[0] for name in model_names()}
    assert {name: presets[name].parameters for name in PRESETS} == PRESETS
    assert {name: presets[name].parameters / 1e9 for name in BILLIONS} == pytest.approx(
        {name: float(billions) for name, billions in BILLIONS.items()}, abs=0.05
    )
    assert set(presets) == set(PRESETS) | set(BILLIONS)
    assert all(model.source and model.name == name for name, model in presets.items())


def test_preset_and_hub_file_of_the_same_model_agree() -> None:
    preset, file = load_model("llama-3.1-8b")[0], load_model(str(FILES / "llama-3.1-8b.json"))[0]
    assert preset.model_copy(update={"source": ""}) == file


@pytest.mark.parametrize(("name", "active"), [("mixtral-8x7b", 12.9), ("deepseek-v3", 37.6), ("deepseek-v2-lite", 2.7)])
def test_active_parameters(name: str, active: float) -> None:
    """12.9B: arXiv:2401.04088. "37B" and "2.4B" of DeepSeek leave out the input embedding: 0.93B and 0.21B."""
    assert load_model(str(FILES / f"{name}.json"))[0].active_parameters / 1e9 == pytest.approx(active, abs=0.05)


def test_parts_of_a_small_model_by_hand() -> None:
    model = build(Model, SMALL, "small")
    assert (model.kv_heads, model.head_dim, model.ffn) == (6, 8, 192)
    assert model.embedding_parameters == 101 * 48 + 40 * 48
    assert model.layer_parameters(0) == 12 * 48**2 + 13 * 48  # Narayanan et al. 2021, equation 2
    assert model.head_parameters == 2 * 48
    assert model.parameters == model.active_parameters == (101 + 40) * 48 + 3 * (12 * 48**2 + 13 * 48) + 96
    padded = build(Model, SMALL | {"vocabulary_multiple": 64, "tied": False}, "small")
    assert padded.padded_vocabulary == 128
    assert padded.parameters == model.parameters + (27 + 128) * 48


def test_parts_of_a_mixture_by_hand() -> None:
    model = build(Model, LLAMA | {"experts": EXPERTS}, "moe")
    attention = 48 * 48 * 2 + 2 * 48 * 16
    assert [model.is_mixture(layer) for layer in range(3)] == [False, True, True]
    assert model.layer_parameters(0) == attention + 3 * 48 * 80 + 2 * 48
    assert model.layer_parameters(1) == attention + 48 * 8 + (8 + 2) * 3 * 48 * 32 + 2 * 48
    assert model.parameters - model.active_parameters == 2 * (8 - 2) * 3 * 48 * 32
    with pytest.raises(IndexError, match="layer 3 of a model with 3 layers"):
        model.is_mixture(3)


def test_matrices_say_how_tensor_parallelism_cuts_them() -> None:
    cuts = {m.name: m.split for m in build(Model, LLAMA | {"experts": EXPERTS}, "moe").matrices(1)}
    columns = ["query", "key", "value", "expert gate", "expert up", "shared gate", "shared up"]
    assert cuts == dict.fromkeys(columns, "columns") | dict.fromkeys(["output", "expert down", "shared down"], "rows") | {
        "router": "none"
    }


def test_latent_attention_by_hand() -> None:
    latent = {"q_rank": 24, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 10}
    model = build(Model, {**LLAMA, "kv_heads": 6, "latent": latent}, "mla")
    queries, keys = 48 * 24 + 24 + 24 * 6 * 12, 48 * (16 + 4) + 16 + 16 * 6 * (8 + 10)
    assert model.layer_parameters(0) == queries + keys + 6 * 10 * 48 + 3 * 48 * 80 + 2 * 48
    full = build(Model, {**LLAMA, "kv_heads": 6, "latent": latent | {"q_rank": None}}, "mla")
    assert full.layer_parameters(0) - model.layer_parameters(0) == 48 * 6 * 12 - queries


def test_every_key_that_was_not_read_is_listed() -> None:
    known = ["activation_function", "bos_token_id", "embd_pdrop", "eos_token_id", "initializer_range", "layer_norm_epsilon"]
    assert load_model(str(FILES / "gpt2.json"))[1] == [*known, "n_ctx"]
    assert "num_nextn_predict_layers" in load_model(str(FILES / "deepseek-v3.json"))[1]
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
    assert {"vision_config", "text_config.rope_theta"} <= set(ignored)
    assert "text_config.hidden_size" not in ignored


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("llama-2-7b", {"model_type": "lama"}, "unknown model type 'lama'; did you mean 'llama'?"),
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
        (
            "qwen2-7b",
            {"use_sliding_window": True, "max_window_layers": 14},
            "max_window_layers=14: a sliding window in only some",
        ),
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


def flops_of_torch(model: Model, batch: int, sequence: int) -> int:
    """FLOPs that PyTorch counts in a forward pass of the model built from linear layers on the meta device."""
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention
    from torch.utils.flop_counter import FlopCounterMode

    def through(x: Any, outputs: int) -> Any:
        return linear(x, torch.empty(outputs, x.shape[-1], device="meta"))

    def attention(x: Any) -> Any:
        sizes = [model.heads] + 2 * [model.kv_heads]
        q, k, v = (through(x, n * model.head_dim).view(batch, sequence, n, model.head_dim).transpose(1, 2) for n in sizes)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=model.family == "decoder", enable_gqa=True)
        return through(mixed.transpose(1, 2).reshape(batch, sequence, -1), model.hidden)

    def block(x: Any, ffn: int) -> Any:
        up = through(x, ffn)
        return through(up * through(x, ffn) if model.gated else up, model.hidden)

    def feed_forward(x: Any, layer: int) -> Any:
        moe = model.experts
        if moe is None or layer < moe.first_dense:
            return block(x, model.ffn)
        through(x, moe.experts)
        return sum(block(x, moe.ffn) for _ in range(moe.chosen)) + block(x, moe.shared * moe.ffn)

    with FlopCounterMode(display=False) as counter:
        x = torch.empty(batch, sequence, model.hidden, device="meta")
        for layer in range(model.layers):
            x = feed_forward(attention(x), layer)
        if model.pooler:
            through(through(x[:, 0], model.hidden), model.pooler_classes)
        through(through(x, model.hidden) if model.head_transform else x, model.vocabulary)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "fields",
    [
        SMALL,
        LLAMA,
        LLAMA | {"head_dim": 16},
        LLAMA | {"experts": EXPERTS},
        SMALL | {"family": "encoder", "head_transform": True, "pooler": True, "pooler_classes": 2},
    ],
    ids=["gpt", "llama", "wide heads", "experts", "bert"],
)
def test_forward_flops_are_those_that_torch_counts(fields: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    model = build(Model, fields, "small")
    assert model.forward_flops(3, 20, causal=False) == flops_of_torch(model, 3, 20)


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 64), sequence=st.integers(1, 8192), window=st.integers(1, 8192))
def test_causal_flops_count_half_or_the_window(batch: int, sequence: int, window: int) -> None:
    model = build(Model, LLAMA, "small")
    full, causal = (model.forward_flops(batch, sequence, causal=c) for c in (False, True))
    scores = 4.0 * model.layers * batch * sequence**2 * model.hidden
    assert full - causal == scores / 2
    assert full - model.forward_flops(batch, sequence, causal=False, head=False) == 2 * batch * sequence * 48 * 101
    within = build(Model, LLAMA | {"window": window}, "small").forward_flops(batch, sequence, causal=True)
    assert within == causal if window >= sequence else within < causal


def test_latent_attention_flops_by_hand() -> None:
    latent = {"q_rank": 24, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 10}
    model = build(Model, LLAMA | {"kv_heads": 6, "layers": 1, "latent": latent}, "mla")
    weights = 48 * 24 + 24 * 72 + 48 * 20 + 16 * 108 + 60 * 48 + 3 * 48 * 80
    assert model.forward_flops(2, 10, causal=False, head=False) == 2 * 20 * weights + 2 * 2 * 6 * 100 * (12 + 10)


def test_a_gpt_step_costs_what_megatron_says() -> None:
    """Narayanan et al. 2021, equation 3 without recomputation: 72·B·s·l·h²·(1 + s/(6h) + V/(12lh)) forward and backward."""
    model, batch, s = load_model("gpt3-175b")[0], 4, 2048
    h, layers, v = 12288, 96, 51200
    step = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert 3 * model.forward_flops(batch, s, causal=False) == pytest.approx(step, rel=1e-12)
