"""Models against published parameter counts, hand computation, and PyTorch's own count of FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.models.model import Model, load_model, model_names
from tests.conftest import LLAMA_LAYER
from tests.strategies.models.conftest import FILES, HUB, SMALL, hugging_face
from topologies.reading import build

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

LLAMA: dict[str, Any] = SMALL | {
    "kv_heads": 2,
    "ffn": 80,
    **LLAMA_LAYER,
}

EXPERTS: dict[str, Any] = {"experts": 8, "chosen": 2, "ffn": 32, "shared": 2, "first_dense": 1}


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
    ahead = build(Model, LLAMA | {"experts": EXPERTS, "layers": 2, "mtp": 1}, "moe")  # predicted by a layer like the last
    assert ahead.parameters - ahead.active_parameters == 2 * (8 - 2) * 3 * 48 * 32
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


@pytest.mark.parametrize("local", ["window", "chunk"])
def test_attention_within_a_window_counts_its_keys(local: str) -> None:
    """A token of a sequence of 256 attends to 64 in place of all; of a shorter sequence to all."""
    whole, within = (build(Model, LLAMA | more, "small") for more in ({}, {local: 64}))
    counts = [[model.forward_flops(3, sequence, causal=False) for model in (whole, within)] for sequence in (256, 64)]
    assert counts[0][0] - counts[0][1] == 4.0 * whole.layers * 3 * 256 * (256 - 64) * whole.hidden
    assert counts[1][0] == counts[1][1]


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
