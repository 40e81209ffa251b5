"""Kernels, traffic, collectives and parameters of layers, counted by hand; laws of tensor parallelism; what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.program import Collective, Kernel, Start
from strategies.frameworks.pytorch.operators import rotary
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts
from strategies.layers.model_ends import patch_embedding
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.models.model import Model, load_model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from tests.strategies.layers.conftest import GPT, KORTHIKANTI, LLAMA, flops, resolved
from topologies.reading import UserError


def operations(items: Items) -> dict[str, int]:
    every = (item.collective if isinstance(item, Start) else item for item in items)
    return dict(Counter(item.operation for item in every if isinstance(item, Collective)))


def moved(items: Items) -> dict[str, float]:
    return {item.label: item.bytes for item in items if isinstance(item, Kernel) and item.kind != "gemm"}


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
        plan = {"kernels": kernels, "accumulation_fusion": fusion}
        plan |= {"framework": {"joined_products": True}} if kernels == "torch" else {}
        apart = parts(model, resolved(model, accumulation=2, gradients="fp32", **plan)).layer(0)
        weight_bytes = {item.label: item.bytes for item in apart.weight_gradient if item.label.startswith("qkv weight")}
        assert weight_bytes == {"qkv weight": operands + 2 * weight, "qkv weight sum": (2 + 4 + 4) * weight}
    first = parts(model, resolved(model, kernels="torch")).layer(0)
    assert not any(item.label.endswith("sum") for item in first.weight_gradient)  # nothing to add to


@pytest.mark.parametrize("kernels", ["megatron", "apex", "torch"])
@pytest.mark.parametrize("hook", ["zero2", "zero3"])
def test_gradients_that_every_microbatch_reduces_are_made_anew(hook: str, kernels: str) -> None:
    """There is nothing to add to (ZeRO, arXiv:1910.02054): a backward pass moves what that of a single microbatch does."""
    model = Model(**GPT)

    def moved(accumulation: int, **plan: Any) -> float:
        plan_of_rank = Resolved.of(Plan(kernels=kernels, accumulation=accumulation, **plan), model, 4)
        return sum(item.bytes for item in parts(model, plan_of_rank).layer(0).backward if isinstance(item, Kernel))

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
    costs = parts(model, resolved(model, **common))
    many = parts(model, resolved(model, tp=tp, sequence_parallel=parallel, **common))
    for left, right in zip((costs.layer(0), costs.head), (many.layer(0), many.head), strict=True):
        for a, b in ((left.forward, right.forward), (left.backward, right.backward), (left.recompute, right.recompute)):
            assert flops(a) == tp * flops(b)
        assert left.model_flops == right.model_flops
        assert right.saved <= left.saved <= tp * right.saved
        assert right.restored <= left.restored <= tp * right.restored
    if parallel:
        assert costs.layer(0).saved == tp * many.layer(0).saved
    halves = parts(model, resolved(model, **(common | {"microbatch": 2 * batch})))
    assert halves.layer(0).saved == 2 * costs.layer(0).saved
    assert flops(halves.layer(0).forward) == 2 * flops(costs.layer(0).forward)


@pytest.mark.parametrize(("fields", "rule"), [({"norms": 3}, "2 or 4 norms"), ({"norms": 1}, "2 or 4 norms")])
def test_what_is_not_simulated_is_refused(fields: dict[str, Any], rule: str) -> None:
    model = Model(**GPT, **fields)
    with pytest.raises(UserError, match=rule) as error:
        parts(model, resolved(model))
    assert str(error.value).startswith(f"model gpt: norms={fields['norms']} is not simulated")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4)])
def test_collectives_know_the_width_of_their_elements(precision: str, width: int) -> None:
    """Volumes are also told in elements; the loss is in fp32 whatever the precision."""
    work = parts(Model(**GPT), resolved(Model(**GPT), tp=2, precision=precision))
    widths = {i.label: i.width for part in (work.layer(0), work.head) for i in part.forward if isinstance(i, Collective)}
    assert widths.pop("loss sum") == widths.pop("loss maximum") == widths.pop("loss target") == 4
    assert set(widths.values()) == {width}


def test_the_parallel_loss_of_pytorch_passes_over_logits() -> None:
    """Bytes per logit of a tp rank, in fp32 (torch.distributed.tensor.parallel.loss_parallel): a maximum reads them; exponentials
    are subtracted, exponentiated and summed; a log-softmax is written. Logits in bf16 are cast before and their gradient after.
    """
    model = Model(**GPT)
    head = parts(model, resolved(model, tp=2, kernels="torch")).head
    logits = 32 * model.padded_vocabulary / 2
    names = ("logits in fp32", "loss maximum", "loss exponential", "log-softmax", "loss")
    ahead, back = (
        [(item.label, item.bytes / logits) for item in items if isinstance(item, Kernel) and item.label in names]
        for items in (head.forward, head.input_gradient)
    )
    assert [size for label, size in ahead] == [6, 4, 8, 8, 4, 8]
    assert [label for label, _ in ahead] == [names[0], names[1], *3 * [names[2]], names[3]]
    assert back == [("loss", 4), ("log-softmax", 8), ("log-softmax", 12), ("log-softmax", 8), ("logits in fp32", 6)]


def test_megatron_of_2021_adds_the_bias_of_queries_keys_and_values_by_a_kernel_of_its_own() -> None:
    """Queries, keys and values of half of 8 heads of 8 features, for 32 tokens in bf16: read and written."""
    model = Model(**GPT)

    def bias(kernels: str, tp: int) -> list[float]:
        layer = parts(model, resolved(model, kernels=kernels, tp=tp)).layer(0)
        return [item.bytes for item in layer.forward if isinstance(item, Kernel) and item.label == "qkv bias"]

    assert bias("apex", 2) == [2 * 2 * 32 * 3 * 4 * 8]
    assert bias("megatron", 2) == bias("torch", 1) == []


def test_a_class_token_is_a_row_of_its_own_and_one_of_the_positions() -> None:
    """ViT: images of 32 by 32 pixels in patches of 8, 64 features; the embedding is a matrix of 8 · 8 · 3 rows and its bias."""
    fields = GPT | {"hidden": 64, "heads": 4, "vocabulary": 0}
    sizes = {}
    for token in (True, False):
        patches, context = {"image": 32, "size": 8, "class_token": token}, 16 + token
        model = Model.model_validate(
            fields
            | {"context": context, "family": "encoder", "patches": patches, "positions": "learned", "classes": 10, "head": False}
        )
        sizes[token] = model.parameters, parts(model, resolved(model)).embedding.parameters
    assert sizes[True][1] == 64 * (8 * 8 * 3 + 1) + 64 + 17 * 64
    assert [with_token - without for with_token, without in zip(*sizes.values(), strict=True)] == [2 * 64, 2 * 64]


@pytest.mark.parametrize("token", [True, False])
def test_patches_of_images_are_a_product_with_a_row_for_each(token: bool) -> None:
    """Two images of 32 by 32 pixels, in bf16, in 16 patches of 8 · 8 · 3 = 192 numbers each, which become 64."""
    patches = {"image": 32, "size": 8, "class_token": token}
    fields = {"hidden": 64, "heads": 4, "vocabulary": 0, "context": 16 + token, "positions": "learned", "classes": 10}
    model = Model.model_validate(GPT | fields | {"family": "encoder", "patches": patches, "head": False})
    matrix, *more = patch_embedding(RankShapes(model, resolved(model, microbatch=2)))
    ends = 2 * (32 * 64 + 32 * 192 + 64 * 192)
    kernels = [(item.kind, item.label, item.bytes) for item in (*matrix.forward, *matrix.weight_gradient)]
    assert kernels == [
        ("memory", "image patches", 2 * 2 * 32 * 192),
        ("gemm", "patch embedding", ends),
        ("gemm", "patch embedding weight", ends),
        ("reduction", "patch embedding bias", 2 * 32 * 64),
    ]
    assert matrix.flops == matrix.forward[1].flops == 2 * 32 * 64 * 192
    assert (matrix.saved, matrix.temporary) == ({"images": 2 * 2 * 3 * 32 * 32}, 2 * 32 * 192)
    assert (matrix.shapes, matrix.replicated) == (((64, 192), (64,)), 64 * 192 + 64)
    kernels = [(item.label, item.bytes) for each in more for item in (*each.forward, *each.weight_gradient)]
    assert kernels == [("class token", 2 * 2 * 32 * 64), ("class token", 2 * 2 * 64)] * token  # of both images, added up
    assert [(each.shapes, each.replicated) for each in more] == [(((64,),), 64)] * token


def test_rotary_positions_of_pytorch_need_three_tensors_meanwhile() -> None:
    """x · cosine, the rotated halves of x, and these · sine, before they are added."""
    model = Model(**LLAMA)
    rank = RankShapes(model, resolved(model, kernels="torch"))
    elements = 1000
    assert rotary(rank, elements).temporary == 3 * rank.element * elements
