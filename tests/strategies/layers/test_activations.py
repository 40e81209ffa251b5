"""Tensors kept for the backward pass, against Korthikanti et al. 2022 (arXiv:2205.05198), autograd, and counts by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.program import Kernel
from strategies.layers.model_costs import parts, restored_tensors, saved_tensors
from strategies.models.model import Model, load_model
from tests.strategies.layers.conftest import GPT, KORTHIKANTI, LLAMA, Torch, flops, resolved


@pytest.mark.parametrize(("name", "scores"), [("gpt3-175b", 80), ("mt-nlg-530b", 64)])  # 5·a·s/h, section 5 of the paper
@pytest.mark.parametrize("batch", [1, 4])
def test_activations_of_korthikanti_2022(name: str, scores: int, batch: int) -> None:
    """Table 2: bytes of one layer in units of s·b·h."""
    model, _ = load_model(name)
    unit = 2048 * batch * model.hidden

    def units(**plan: Any) -> float:
        return sum(saved_tensors(model, resolved(model, microbatch=batch, sequence=2048, **KORTHIKANTI, **plan)).values()) / unit

    assert units() == 34 + scores
    assert units(tp=8) == 10 + 24 / 8 + scores / 8
    assert units(tp=8, sequence_parallel=True) == (34 + scores) / 8
    assert units(tp=8, recompute="selective") == 10 + 24 / 8
    assert units(tp=8, sequence_parallel=True, recompute="selective") == 34 / 8
    assert units(recompute="full") == units(tp=8, recompute="full") == 2
    assert units(tp=8, sequence_parallel=True, recompute="full") == 2 / 8


def test_activations_one_by_one() -> None:
    """2 sequences of 32 tokens, 64 features, 8 heads: 64·64 = 4096 elements, scores of 2·8·32·32 = 16384."""
    model = Model(**GPT)
    assert saved_tensors(model, resolved(model, microbatch=2, **KORTHIKANTI)) == {
        "layer input": 8192,
        "qkv input": 8192,
        "queries": 8192,
        "keys": 8192,
        "values": 8192,
        "probabilities": 32768,
        "attention dropout mask": 16384,
        "dropped probabilities": 32768,
        "attention output input": 8192,
        "attention residual dropout mask": 4096,
        "mlp norm input": 8192,
        "mlp up input": 8192,
        "mlp up output": 32768,
        "mlp down input": 32768,
        "mlp residual dropout mask": 4096,
    }


def test_flash_attention_keeps_no_scores_but_the_log_sum_exp() -> None:
    model, _ = load_model("gpt3-175b")
    for tp in (1, 8):
        plan = resolved(model, tp=tp, dropout=True)
        assert sum(saved_tensors(model, plan).values()) == 2048 * (12288 * (10 + 24 / tp) + 96 / tp * 4)
        selective = resolved(model, tp=tp, dropout=True, recompute="selective")
        assert sum(saved_tensors(model, selective).values()) == 2048 * 12288 * (10 + 24 / tp)
        assert restored_tensors(model, selective) == {"log-sum-exp": 2048 * 96 / tp * 4}


def test_precision_dropout_gate_and_shared_heads() -> None:
    model, llama = Model(**GPT), Model(**LLAMA)
    half = saved_tensors(model, resolved(model, **KORTHIKANTI))
    full = saved_tensors(model, resolved(model, precision="fp32", **KORTHIKANTI))
    assert full == {name: size if "mask" in name else 2 * size for name, size in half.items()}
    plain = saved_tensors(model, resolved(model, attention="materialised"))
    assert half.keys() - plain.keys() == {name for name in half if "mask" in name or name == "dropped probabilities"}
    flash = saved_tensors(llama, resolved(llama))
    assert flash["keys"] == flash["values"] == flash["queries"] / 4
    assert flash["mlp up output"] == 2 * flash["mlp down input"] == 2 * 32 * 96 * 2  # gate and up; their product
    written = saved_tensors(llama, resolved(llama, attention="materialised"))
    assert written["repeated keys"] == written["queries"]
    assert "keys" not in written
    assert saved_tensors(llama, resolved(llama, attention="materialised", recompute="selective"))["keys"] == flash["keys"]


@pytest.mark.parametrize("fields", [GPT, LLAMA])
@pytest.mark.parametrize("attention", ["flash", "materialised"])
def test_recomputation_restores_what_it_does_not_keep(fields: dict[str, Any], attention: str) -> None:
    model = Model(**fields)
    part = {r: parts(model, resolved(model, attention=attention, recompute=r)).layer(0) for r in ("none", "selective", "full")}
    assert part["none"].restored == 0
    assert part["none"].recompute == ()
    assert part["full"].saved + part["full"].restored == part["none"].saved
    assert flops(part["full"].recompute) == flops(part["full"].forward)
    assert flops(part["selective"].recompute) == 4 * 32 * 32 * 64 * (0.5 if attention == "flash" else 1)
    assert {item.phase for item in part["selective"].recompute if isinstance(item, Kernel)} == {"recompute"}
    full = part["full"]
    assert Counter(full.backward) == Counter(full.recompute + full.input_gradient + full.weight_gradient)


@pytest.mark.parametrize("shared", [8, 2])
def test_activations_as_autograd_keeps_them(shared: int) -> None:
    """Every tensor that PyTorch saves for backward, counted once, without weights and without statistics of norms."""
    from torch.autograd.graph import saved_tensors_hooks

    model = Model(**GPT, kv_heads=shared)
    net, kept = Torch(model, 1, 3, 32), {}
    weights = {w.untyped_storage()._cdata for w in [*net.weights.values(), *net.norms]}

    def keep(tensor: Any) -> Any:
        if tensor.untyped_storage()._cdata not in weights and tensor.shape[-1] > 1:
            kept[tensor.untyped_storage()._cdata, tensor.storage_offset()] = tensor
        return tensor

    x = net.tensor(3, 32, 64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = net.layer(x)
    assert y.grad_fn is not None
    saved = saved_tensors(model, resolved(model, microbatch=3, attention="materialised"))
    assert sum(t.numel() * t.element_size() for t in kept.values()) == sum(saved.values())


def test_head_keeps_fp32_probabilities() -> None:
    """arXiv:2205.05198 section 4.3: 4·s·b·h for norm and head inputs and 4·s·b·v for the logits in fp32."""
    model = Model(**GPT)
    assert parts(model, resolved(model)).head.saved == 32 * (4 * 64 + 4 * 512)
    assert parts(model, resolved(model, tp=2, dropout=True)).head.saved == 32 * (4 * 64 + 4 * 256)
    assert parts(model, resolved(model, dropout=True)).embedding.saved == 32 * 64
    assert parts(model, resolved(model)).head.temporary >= 32 * 512 * 2
