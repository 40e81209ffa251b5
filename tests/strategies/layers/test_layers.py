"""Layer work against Korthikanti et al. 2022 (arXiv:2205.05198), torch.utils.flop_counter, autograd, and counts by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.program import Block, Collective, Kernel, Start
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts, restored_tensors, saved_tensors
from strategies.layers.tensor_overlap import Items
from strategies.lowering.lower import lower
from strategies.models.model import Model, load_model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

GPT: dict[str, Any] = {"name": "gpt", "hidden": 64, "layers": 3, "heads": 8, "vocabulary": 512, "context": 32}
LLAMA: dict[str, Any] = GPT | {
    "name": "llama",
    "kv_heads": 2,
    "ffn": 96,
    "gated": True,
    "positions": "rotary",
    "norm": "rmsnorm",
    "tied": False,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
}
KORTHIKANTI: dict[str, Any] = {"attention": "materialised", "dropout": True}


def resolved(model: Model, **plan: Any) -> Resolved:
    return Resolved.of(Plan(**plan), model, plan.get("tp", 1))


def flops(items: Items) -> float:
    return sum(item.flops for item in items if isinstance(item, Kernel))


def operations(items: Items) -> dict[str, int]:
    every = (item.collective if isinstance(item, Start) else item for item in items)
    return dict(Counter(item.operation for item in every if isinstance(item, Collective)))


def moved(items: Items) -> dict[str, float]:
    return {item.label: item.bytes for item in items if isinstance(item, Kernel) and item.kind != "gemm"}


# activations


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


# FLOPs


class Torch:
    """One tp rank's layer and head, written with plain torch functions on the meta device."""

    def __init__(self, model: Model, tp: int, batch: int, sequence: int) -> None:
        import torch

        self.heads, self.kv, self.dim = model.heads // tp, max(1, model.kv_heads // tp), model.head_dim
        self.model, self.torch, self.shape = model, torch, (batch, sequence)
        hidden, ffn = model.hidden, model.ffn // tp
        sizes = {
            "qkv": (hidden, (self.heads + 2 * self.kv) * self.dim),
            "output": (self.heads * self.dim, hidden),
            "up": (hidden, ffn * (1 + model.gated)),
            "down": (ffn, hidden),
            "head": (hidden, model.padded_vocabulary // tp),
        }
        self.weights = {name: self.tensor(size[1], size[0]) for name, size in sizes.items()}
        self.norms = [self.tensor(hidden) for _ in range(4)]

    def tensor(self, *size: int) -> Any:
        return self.torch.empty(*size, device="meta", dtype=self.torch.bfloat16, requires_grad=True)

    def layer(self, x: Any) -> Any:
        functional, (batch, sequence) = self.torch.nn.functional, self.shape
        y = functional.layer_norm(x, x.shape[-1:], self.norms[0], self.norms[1])
        widths = [self.heads * self.dim, self.kv * self.dim, self.kv * self.dim]
        q, k, v = (
            t.view(batch, sequence, -1, self.dim).transpose(1, 2)
            for t in functional.linear(y, self.weights["qkv"]).split(widths, -1)
        )
        if self.kv < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        y = (q @ k.transpose(2, 3) / math.sqrt(self.dim)).softmax(-1) @ v
        x = x + functional.linear(y.transpose(1, 2).reshape(batch, sequence, -1), self.weights["output"])
        y = functional.linear(functional.layer_norm(x, x.shape[-1:], self.norms[2], self.norms[3]), self.weights["up"])
        if self.model.gated:
            gate, up = y.chunk(2, -1)
            return x + functional.linear(functional.silu(gate) * up, self.weights["down"])
        return x + functional.linear(functional.gelu(y), self.weights["down"])


def torch_flops(model: Model, tp: int, batch: int, sequence: int, head: bool) -> tuple[int, int]:
    from torch.utils.flop_counter import FlopCounterMode

    net = Torch(model, tp, batch, sequence)
    x = net.tensor(batch, sequence, model.hidden)
    with FlopCounterMode(display=False) as forward:
        y = net.torch.nn.functional.linear(x, net.weights["head"]) if head else net.layer(x)
    with FlopCounterMode(display=False) as backward:
        y.backward(net.torch.empty_like(y))
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("fields", [GPT, LLAMA])
@pytest.mark.parametrize("tp", [1, 2])
def test_flops_as_torch_counts_them(fields: dict[str, Any], tp: int) -> None:
    model = Model(**fields)
    work = parts(model, resolved(model, tp=tp, microbatch=3, attention="materialised"))
    for part, head in ((work.layer(0), False), (work.head, True)):
        forward, backward = torch_flops(model, tp, 3, 32, head)
        assert flops(part.forward) == forward
        assert flops(part.input_gradient) + flops(part.weight_gradient) == backward == 2 * forward
        assert flops(part.input_gradient) > flops(part.weight_gradient) or head  # attention has no weights


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


@pytest.mark.parametrize("name", ["gpt3-175b", "llama-3.1-8b", "bert-large"])
@pytest.mark.parametrize("plan", [{}, {"tp": 4}, {"tp": 4, "sequence_parallel": True}, {"recompute": "full"}])
def test_model_flops_follow_the_rule(name: str, plan: dict[str, Any]) -> None:
    model, _ = load_model(name)
    work = parts(model, resolved(model, microbatch=2, sequence=512, **plan))
    total = work.embedding.model_flops + sum(work.layer(i).model_flops for i in range(model.layers)) + work.head.model_flops
    assert total == 3 * model.forward_flops(2, 512, causal=False)


def test_model_flops_of_megatron() -> None:
    """arXiv:2205.05198, appendix A: 72·B·L·s·h²·(1 + s/(6h) + v/(12hL))."""
    model, _ = load_model("gpt3-175b")
    work = parts(model, resolved(model, tp=8))
    s, h, layers, v = 2048, 12288, 96, 51200
    expected = 72 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert layers * work.layer(0).model_flops + work.head.model_flops == pytest.approx(expected, rel=1e-12)


def test_flash_moves_what_it_reads_and_writes() -> None:
    """Two sequences of 32 tokens, 8 heads of 8 elements for queries and results, 2 for keys and values, 2 bytes each; the
    log-sum-exp in 4 bytes a row. Forward reads three and writes one; backward reads five and writes three.
    """
    model = Model(**LLAMA)
    part = parts(model, resolved(model, microbatch=2)).layer(0)
    queries, keys, sums = 2 * 32 * 8 * 8 * 2, 2 * 32 * 2 * 8 * 2, 2 * 32 * 8 * 4
    (forward,), (backward,) = (
        [item.bytes for item in items if isinstance(item, Kernel) and item.kind.startswith("attention")]
        for items in (part.forward, part.backward)
    )
    assert (forward, backward) == (2 * (queries + keys) + sums, 4 * (queries + keys) + sums)


def test_causal_flash_executes_half() -> None:
    model, encoder = Model(**GPT), Model(**GPT, family="encoder")
    kernels = {}
    for m in (model, encoder):
        part = parts(m, resolved(m, microbatch=2, tp=2)).layer(0)
        kernels[m.family] = [i for i in part.forward + part.backward if isinstance(i, Kernel) and i.kind.startswith("attention")]
    forward, backward = kernels["decoder"]
    assert (forward.kind, forward.shape, forward.flops) == (
        "attention_forward",
        (2, 4, 4, 32, 32, 8, 1),
        4 * 2 * 4 * 32 * 32 * 8 / 2,
    )
    assert backward.flops == 2.5 * forward.flops
    assert kernels["encoder"][0].flops == 2 * forward.flops
    assert kernels["encoder"][0].shape[-1] == 0


# kernels and collectives


def test_memory_traffic_by_hand() -> None:
    """bf16, one sequence of 32 tokens: 2048 elements of the residual stream, 8·32·32 = 8192 scores, 8192 MLP elements."""
    model = Model(**GPT)
    part = parts(model, resolved(model, **KORTHIKANTI)).layer(0)
    assert moved(part.forward) == {
        "attention norm": 2 * 4096,
        "softmax": 16384 // 2 + 16384,  # causal: half is read
        "attention dropout": 2 * 16384 + 8192,
        "context copy": 2 * 4096,
        "attention residual": 3 * 4096 + 2048,
        "mlp norm": 2 * 4096,
        "activation": 2 * 16384,
        "mlp residual": 3 * 4096 + 2048,
    }
    assert moved(part.input_gradient) == {
        "mlp residual": 2 * 4096 + 2048,
        "activation": 3 * 16384,
        "mlp norm": 3 * 4096,
        "mlp norm residual": 3 * 4096,
        "attention residual": 2 * 4096 + 2048,
        "attention dropout": 2 * 16384 + 8192,
        "context copy": 2 * 4096,
        "softmax": 2 * 16384 // 2 + 16384,
        "qkv gradients": 2 * 3 * 4096,
        "attention norm": 3 * 4096,
        "attention norm residual": 3 * 4096,
    }
    assert moved(part.weight_gradient) == {
        "mlp down bias": 4096,
        "mlp up bias": 16384,
        "attention output bias": 4096,
        "qkv bias": 3 * 4096,
    }


def test_gradients_are_accumulated_in_their_type() -> None:
    model = Model(**GPT)
    weight, tokens = 64 * 192, 32

    def traffic(**plan: Any) -> float:
        part = parts(model, resolved(model, **plan)).layer(0)
        return next(item.bytes for item in part.weight_gradient if item.label == "qkv weight")

    operands = 2 * tokens * (64 + 192)
    assert traffic() == operands + 2 * weight
    assert traffic(accumulation=2) == operands + 2 * 2 * weight
    assert traffic(accumulation=2, gradients="fp32") == operands + 2 * 4 * weight
    for kernels, fusion in (("torch", None), ("megatron", False)):
        plan = {"kernels": kernels, "accumulation_fusion": fusion, "joined_products": True}
        apart = parts(model, resolved(model, accumulation=2, gradients="fp32", **plan)).layer(0)
        found = {item.label: item.bytes for item in apart.weight_gradient if item.label.startswith("qkv weight")}
        assert found == {"qkv weight": operands + 2 * weight, "qkv weight sum": (2 + 4 + 4) * weight}
    first = parts(model, resolved(model, kernels="torch")).layer(0)
    assert not any(item.label.endswith("sum") for item in first.weight_gradient)  # nothing to add to


@pytest.mark.parametrize("kernels", ["megatron", "apex", "torch"])
@pytest.mark.parametrize("hook", ["zero2", "zero3"])
def test_gradients_that_every_microbatch_reduces_are_made_anew(hook: str, kernels: str) -> None:
    """There is nothing to add to (ZeRO, arXiv:1910.02054): a backward pass moves what that of a single microbatch does."""
    model = Model(**GPT)

    def moved(accumulation: int, **plan: Any) -> float:
        one = Resolved.of(Plan(kernels=kernels, accumulation=accumulation, **plan), model, 4)
        return sum(item.bytes for item in parts(model, one).layer(0).backward if isinstance(item, Kernel))

    assert moved(3, data_parallel=hook) == moved(1, data_parallel=hook)
    assert moved(3, data_parallel="zero1") > moved(1, data_parallel="zero1")


def test_collectives_of_a_layer() -> None:
    """Two all-reduces each way (arXiv:1909.08053 section 3); with sequence parallelism their halves, and two more gathers."""
    model = Model(**GPT)
    alone = parts(model, resolved(model))
    assert not any(operations(p.forward + p.backward) for p in (alone.embedding, alone.layer(0), alone.head))
    plain = parts(model, resolved(model, tp=2, microbatch=2)).layer(0)
    assert operations(plain.forward) == {"all_reduce": 2}
    assert operations(plain.input_gradient) == {"all_reduce": 2}
    assert operations(plain.weight_gradient) == {}
    split = parts(model, resolved(model, tp=2, microbatch=2, sequence_parallel=True, recompute="full")).layer(0)
    assert operations(split.forward) == operations(split.recompute) == {"all_gather": 2, "reduce_scatter": 2}
    assert operations(split.input_gradient) == {"all_gather": 2, "reduce_scatter": 2}
    assert operations(split.weight_gradient) == {"all_gather": 2}
    for part in (plain, split):
        sizes = {(item.axis, item.bytes) for item in part.forward + part.backward if isinstance(item, Collective)}
        assert sizes == {("tp", 2 * 32 * 64 * 2)}


def test_collectives_of_embedding_and_head() -> None:
    model = Model(**GPT)
    plain, split = (parts(model, resolved(model, tp=2, sequence_parallel=sp)) for sp in (False, True))
    assert operations(plain.embedding.forward) == {"all_reduce": 1}
    assert operations(plain.embedding.backward) == {}
    assert operations(split.embedding.forward) == {"reduce_scatter": 1}
    assert operations(split.embedding.backward) == {"all_gather": 1}
    loss = [item.bytes for item in plain.head.forward if isinstance(item, Collective)]
    assert loss == [32 * 4] * 3
    assert operations(plain.head.backward) == {"all_reduce": 1}
    assert operations(split.head.forward) == {"all_gather": 1, "all_reduce": 3}
    assert operations(split.head.backward) == {"reduce_scatter": 1, "all_gather": 1}


def test_the_embedding_reads_and_writes_a_row_for_each_token() -> None:
    """32 tokens of 64 features in bf16 are 4096 bytes, each of them read and written; with positions, added to what is there."""
    model = Model(**GPT)
    embedding = parts(model, resolved(model)).embedding
    assert moved(embedding.forward) == {"token embedding": 2 * 4096, "position embedding": 2 * 4096 + 4096}


def test_head_keeps_fp32_probabilities() -> None:
    """arXiv:2205.05198 section 4.3: 4·s·b·h for norm and head inputs and 4·s·b·v for the logits in fp32."""
    model = Model(**GPT)
    assert parts(model, resolved(model)).head.saved == 32 * (4 * 64 + 4 * 512)
    assert parts(model, resolved(model, tp=2, dropout=True)).head.saved == 32 * (4 * 64 + 4 * 256)
    assert parts(model, resolved(model, dropout=True)).embedding.saved == 32 * 64
    assert parts(model, resolved(model)).head.temporary >= 32 * 512 * 2


def test_full_program_order_of_a_forward_pass() -> None:
    model = Model(**LLAMA)
    labels = [item.label for item in parts(model, resolved(model, tp=2)).layer(0).forward]
    assert labels[:7] == [
        "attention norm",
        "qkv",
        "rotary",
        "attention",
        "attention output",
        "attention output",
        "attention residual",
    ]
    assert labels[7:] == ["mlp norm", "mlp up", "activation", "mlp down", "mlp down", "mlp residual"]


# parameters


@pytest.mark.parametrize("name", ["gpt3-175b", "llama-3.1-8b", "bert-large"])
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_of_all_ranks_are_the_model(name: str, tp: int) -> None:
    """Ranks' parameters, with those that all ranks hold counted once, are the model's Ψ."""
    model, _ = load_model(name)
    work = parts(model, resolved(model, tp=tp, sequence=512))

    def whole(part: LayerCost) -> int:
        return tp * (part.parameters - part.replicated) + part.replicated

    assert whole(work.layer(0)) == model.layer_parameters(0)
    assert whole(work.embedding) == model.embedding_parameters
    assert whole(work.head) == model.head_parameters
    assert work.tied == (model.padded_vocabulary * model.hidden // tp if model.tied else 0)


# laws


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([2, 4, 8]),
    batch=st.integers(1, 3),
    sequence=st.sampled_from([8, 16, 32]),
    attention=st.sampled_from(["flash", "materialised"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    parallel=st.booleans(),
    gated=st.booleans(),
    dropout=st.booleans(),
)
def test_tensor_parallelism_divides_work(
    tp: int, batch: int, sequence: int, attention: str, recompute: str, parallel: bool, gated: bool, dropout: bool
) -> None:
    model = Model(**GPT, gated=gated)
    common: dict[str, Any] = {
        "microbatch": batch,
        "sequence": sequence,
        "attention": attention,
        "recompute": recompute,
        "dropout": dropout,
    }
    one = parts(model, resolved(model, **common))
    many = parts(model, resolved(model, tp=tp, sequence_parallel=parallel, **common))
    for left, right in zip((one.layer(0), one.head), (many.layer(0), many.head), strict=True):
        for a, b in ((left.forward, right.forward), (left.backward, right.backward), (left.recompute, right.recompute)):
            assert flops(a) == tp * flops(b)
        assert left.model_flops == right.model_flops
        assert right.saved <= left.saved <= tp * right.saved
        assert right.restored <= left.restored <= tp * right.restored
    if parallel:
        assert one.layer(0).saved == tp * many.layer(0).saved
    halves = parts(model, resolved(model, **(common | {"microbatch": 2 * batch})))
    assert halves.layer(0).saved == 2 * one.layer(0).saved
    assert flops(halves.layer(0).forward) == 2 * flops(one.layer(0).forward)


def test_more_ranks_than_key_heads_repeat_them() -> None:
    model = Model(**LLAMA)
    four = parts(model, resolved(model, tp=4)).layer(0)
    qkv = next(item for item in four.forward if isinstance(item, Kernel) and item.label == "qkv")
    assert qkv.shape == (1, 32, (2 + 2) * 8, 64)  # 2 query heads, one key head and one value head of 8


# refusals


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"norms": 4}, "model gpt: norms=4 is not simulated yet"),
        ({"window": 16}, "model gpt: window=16: a sliding window shorter than sequence=32 is not simulated yet"),
    ],
)
def test_what_is_not_simulated_is_refused(fields: dict[str, Any], text: str) -> None:
    model = Model(**GPT, **fields)
    with pytest.raises(UserError, match="not simulated yet") as error:
        parts(model, resolved(model))
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4)])
def test_collectives_know_the_width_of_their_elements(precision: str, width: int) -> None:
    """Volumes are also told in elements; the loss is in fp32 whatever the precision."""
    work = parts(Model(**GPT), resolved(Model(**GPT), tp=2, precision=precision))
    widths = {i.label: i.width for part in (work.layer(0), work.head) for i in part.forward if isinstance(i, Collective)}
    assert widths.pop("loss sum") == widths.pop("loss maximum") == widths.pop("loss target") == 4
    assert set(widths.values()) == {width}


# Megatron-LM before Transformer Engine


def kernels(items: Items, label: str) -> list[Kernel]:
    return [item for item in items if isinstance(item, Kernel) and item.label == label]


def test_every_step_of_the_loss_was_a_kernel() -> None:
    """megatron/mpu/cross_entropy.py: cast, maximum, difference, exponential, sum, quotient; back a product and a cast. Bytes per
    logit: 6 + 4 + 8 + 8 + 4 + 8, and 8 + 6.
    """
    model = Model(**GPT)
    head, logits = parts(model, resolved(model, kernels="apex")).head, 32 * 512
    assert [kernel.bytes / logits for kernel in kernels(head.forward, "loss")] == [6, 4, 8, 8, 4, 8]
    assert [kernel.bytes / logits for kernel in kernels(head.backward, "loss")] == [8, 6]


@pytest.mark.parametrize(("tp", "batch", "passes"), [(1, 1, 1), (2, 1, 1), (4, 1, 4), (4, 2, 1), (8, 1, 4)])
def test_the_fused_softmax_takes_four_heads_at_a_time(tp: int, batch: int, passes: int) -> None:
    """8 heads: other numbers of rows are left to PyTorch's operators (megatron/model/fused_softmax.py, is_kernel_available)."""
    model = Model(**GPT)
    layer = parts(model, resolved(model, kernels="apex", attention="materialised", tp=tp, microbatch=batch)).layer(0)
    assert len(kernels(layer.forward, "softmax")) == passes


@pytest.mark.parametrize(("microbatches", "count"), [(1, 0), (2, 8)])
def test_gradients_of_vectors_are_added_one_by_one(microbatches: int, count: int) -> None:
    """Four biases, and weight and bias of two norms, once there is a gradient to add to."""
    model = Model(**GPT)
    layer = parts(model, resolved(model, kernels="apex", accumulation=microbatches)).layer(0)
    small = [item for item in layer.backward if isinstance(item, Kernel) and item.label.endswith(" sum") and item.bytes < 3000]
    assert len(small) == count


def test_megatron_of_2021_launched_small_kernels_for_batch_and_loss() -> None:
    """Twelve for a batch, which every stage gets for itself; the embedding's masks only with tp; later versions have none."""
    model = Model(**GPT)
    for tp, masks in ((1, 0), (2, 7)):
        work = parts(model, resolved(model, kernels="apex", tp=tp))
        assert len(work.batch) == 12
        assert len(kernels(work.embedding.forward, "token mask")) == masks
        assert [len(kernels(work.head.forward, label)) for label in ("loss targets", "mean loss")] == [12, 10]
    assert not parts(model, resolved(model)).batch
    program = lower(model, Resolved.of(Plan(kernels="apex", pp=2), model, 2))
    first = [next(op.work for op in cohort.ops if isinstance(op.work, Block)) for cohort in program.cohorts]
    assert [len(kernels(block.runs[0].items, "batch")) for block in first] == [12, 12]


def test_alibi_is_written_to_every_score_and_read_by_the_product(toy_job) -> None:
    """torch.baddbmm with an operand: two bytes a score to copy it there, and two to read it again; two heads of 32 × 32 scores.
    Recomputed, it is all done once more.
    """
    plan = dict(attention="materialised", recompute="full", tp=4)
    jobs = [toy_job(4, model={"positions": positions}, **plan) for positions in ("rotary", "alibi")]
    without, with_it = (parts(job.model, job.resolve()).layers[0] for job in jobs)
    for direction in ("forward", "recompute"):
        product = [[item.bytes for item in getattr(part, direction) if item.label == "scores"] for part in (without, with_it)]
        assert product[1][0] - product[0][0] == 2 * 2 * 32 * 32
        assert [item.bytes for item in getattr(with_it, direction) if item.label == "alibi"] == [2 * 2 * 32 * 32]
    assert jobs[0].model.parameters == jobs[1].model.parameters
