"""Linear layers in fp8: which products are, what is cast, moved and kept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

from sim.program import COMPUTE, Collective, Kernel, Op
from strategies.layers.fp8 import Fp8Products
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts, saved_tensors
from strategies.layers.rank_shapes import RankShapes, accumulation
from strategies.lowering.lower import lower
from strategies.predict import predict
from strategies.read_job import read_job
from topologies.reading import UserError

HIDDEN, FFN, KEYS, TOKENS = 4096, 14336, 1024, 8192  # Llama-3.1 8B


def job(cluster: str = "dgx-h100", **plan: Any) -> Any:
    return read_job(None, {"plan": {"auto": False, "sequence": TOKENS, **plan}}, model="llama-3.1-8b", cluster=cluster, nodes=1)


def layer(cluster: str = "dgx-h100", **plan: Any) -> LayerCost:
    asked = job(cluster, **plan)
    return parts(asked.model, asked.resolve()).layer(0)


def kernels(part: LayerCost, dtype: str, kind: str = "gemm") -> list[Kernel]:
    return [
        item for item in part.forward + part.backward if isinstance(item, Kernel) and (item.kind, item.dtype) == (kind, dtype)
    ]


MEGATRON: dict[str, Any] = {"kernels": "megatron", "fp8": {"scaling": "delayed"}}
TORCHAO: dict[str, Any] = {"kernels": "compiled", "data_parallel": "zero3", "fp8": {"scaling": "tensorwise"}}


@pytest.mark.parametrize(("plan", "matrices"), [(MEGATRON, 4), (TORCHAO, 7)])
def test_matrices_three_ways_are_fp8_and_attention_and_head_are_not(plan: dict[str, Any], matrices: int) -> None:
    part, asked = layer(**plan), job(**plan)
    assert len(kernels(part, "fp8")) == matrices * 3
    assert {kernel.dtype for kernel in part.forward if isinstance(kernel, Kernel) and kernel.kind == "attention_forward"} == {
        "bf16"
    }
    head = parts(asked.model, asked.resolve()).head
    assert not kernels(head, "fp8")
    assert part.fp8_parameters == 2 * HIDDEN**2 + 2 * HIDDEN * KEYS + 3 * HIDDEN * FFN


def test_work_is_the_same_and_operands_are_half() -> None:
    wide, narrow = kernels(layer(), "bf16"), kernels(layer(**MEGATRON), "fp8")
    assert sum(kernel.flops for kernel in wide) == sum(kernel.flops for kernel in narrow)
    up = next(kernel for kernel in narrow if kernel.label == "mlp up" and kernel.phase == "forward")
    assert up.bytes == TOKENS * HIDDEN + HIDDEN * 2 * FFN + 2 * TOKENS * 2 * FFN


def test_what_is_kept_in_fewer_bits() -> None:
    """Attention's own result in 16 bits beside the product's fp8 input, or 12 bits for both; an activation's input in 16 or 8."""
    asked = {
        name: job(**MEGATRON | {"fp8": fp8})
        for name, fp8 in {"engine": {}, "less": {"attention_output": "e5m6", "activation_func_input_store": True}}.items()
    }
    engine, less = (saved_tensors(each.model, each.resolve()) for each in asked.values())
    assert (engine["attention result"], engine["attention output input"]) == (2 * TOKENS * HIDDEN, TOKENS * HIDDEN)
    assert ("attention result" in less, less["attention output input"]) == (False, 1.5 * TOKENS * HIDDEN)
    assert (engine["mlp up output"], less["mlp up output"]) == (2 * TOKENS * 2 * FFN, TOKENS * 2 * FFN)
    assert "attention result" not in saved_tensors(job().model, job().resolve())  # in bf16 it is the product's input


def test_transformer_engine_keeps_fp8_inputs_and_torchao_16_bits() -> None:
    def kept(**plan: Any) -> float:
        asked = job(**plan)
        return saved_tensors(asked.model, asked.resolve())["mlp down input"]

    assert kept(**MEGATRON) == TOKENS * FFN
    assert kept(**TORCHAO) == kept() == 2 * TOKENS * FFN


def test_scales_of_the_tensor_now_read_it_once_more() -> None:
    def cast(scaling: str) -> float:
        works = layer(kernels="megatron", fp8={"scaling": scaling}).forward
        return sum(kernel.bytes for kernel in works if isinstance(kernel, Kernel) and kernel.label == "mlp down input in fp8")

    assert cast("delayed") == cast("mxfp8") == TOKENS * FFN * 4  # two read, two copies written
    assert cast("tensorwise") == TOKENS * FFN * 6


def test_rowwise_scales_are_applied_after_backward_products() -> None:
    """torchao's addmm_float8_unwrapped: `output *= post_inverse_scale` of every matrix's gradient, read and written in 16 bits,
    and of the gradient that attention's kernel takes; others are added up or read by the activation's.
    """
    part, usual = (layer(**TORCHAO | {"fp8": {"scaling": scaling}}) for scaling in ("rowwise", "tensorwise"))
    found = [kernel for kernel in part.backward if isinstance(kernel, Kernel) and kernel.label.endswith("scales in fp8")]
    weights = [kernel.bytes for kernel in found if "weight" in kernel.label]
    assert (len(weights), sum(weights)) == (7, 4 * part.fp8_parameters)
    assert [kernel.bytes for kernel in found if "weight" not in kernel.label] == [4 * TOKENS * HIDDEN]
    assert not [kernel for kernel in usual.backward if isinstance(kernel, Kernel) and "scales" in kernel.label]


def gathered(**plan: Any) -> float:
    asked = job(**plan)
    works = [op.work for op in lower(asked.model, asked.resolve()).cohorts[0].ops if isinstance(op.work, Collective)]
    return sum(work.bytes * work.repeat for work in works if work.operation == "all_gather")


@pytest.mark.parametrize(
    ("hook", "times", "kernels"), [("zero1", 1, "megatron"), ("zero3", 2, "megatron"), ("zero3", 2, "compiled")]
)
def test_matrices_of_layers_are_gathered_in_a_byte(hook: str, times: int, kernels: str) -> None:
    plan = {"kernels": kernels, "data_parallel": hook, "accumulation": 1}
    wide, narrow = gathered(**plan), gathered(**plan, fp8={"gather": True})
    assert wide == times * 2 * job().model.parameters
    assert wide - narrow == pytest.approx(times * 32 * layer(**MEGATRON).fp8_parameters, rel=1e-9)


def test_tp_ranks_gather_fp8() -> None:
    """Inputs of qkv and of mlp up forward; beside them backward the gradients of attention output and mlp down."""
    tp: dict[str, Any] = {"tp": 8, "sequence_parallel": True}

    def moved(**plan: Any) -> float:
        part = layer(**tp, **plan)
        return sum(item.bytes for item in part.forward if isinstance(item, Collective) and item.operation == "all_gather")

    assert moved() == 2 * 2 * TOKENS * HIDDEN
    assert moved(**MEGATRON) == 2 * TOKENS * HIDDEN


@pytest.mark.parametrize(
    ("cluster", "scaling", "local", "all_tokens"),
    [("dgx-h100", "delayed", 3, 2), ("dgx-h100", "tensorwise", 5, 2), ("hgx-b200", "delayed", 3, 0), ("hgx-b200", "mxfp8", 4, 0)],
)
def test_what_came_by_rows_is_turned_on_every_rank(cluster: str, scaling: str, local: int, all_tokens: int) -> None:
    """Of the rank's own tokens 2 bytes are read (2 more for the maximum) and 1 or 2 copies written, of all that were gathered one
    is read by rows and written by columns, which Hopper needs. With scales that are known (delayed) the norm writes fp8.
    """
    tp: dict[str, Any] = {"tp": 8, "sequence_parallel": True, "kernels": "megatron", "fp8": {"scaling": scaling}}
    part = layer(cluster=cluster, **tp)

    def moved(label: str, items: Iterable[Any]) -> float:
        return float(sum(item.bytes for item in items if isinstance(item, Kernel) and item.label == label))

    size = TOKENS * HIDDEN
    assert moved("mlp down gradient in fp8", part.backward) == size / 8 * local + size * all_tokens
    for name in "qkv", "mlp up":
        assert moved(f"{name} input in fp8", part.forward) == (0 if scaling == "delayed" else size / 8 * local)
        assert moved(f"{name} input in fp8", part.backward) == size * all_tokens
    assert moved("mlp norm", part.forward) == size / 8 * (3 if scaling == "delayed" else 4)


def test_a_norm_that_another_reads_too_writes_16_bits() -> None:
    """Adapters read its result, too; and PyTorch's modules are norms by themselves."""

    def norms(**plan: Any) -> list[float]:
        return [item.bytes for item in layer(**plan).forward if isinstance(item, Kernel) and item.label == "mlp norm"]

    size = TOKENS * HIDDEN
    assert norms(**MEGATRON) == [3 * size]
    assert norms(**MEGATRON, lora={"rank": 16, "targets": ["q_proj"]}) == norms() == [4 * size]
    assert norms(kernels="torch", fp8={"scaling": "delayed"}) == norms(kernels="torch")


def test_rows_are_scaled_when_all_tokens_are_there() -> None:
    """torchtitan gathers 16 bits where scales belong to rows, and ranks cast all tokens; of whole tensors they cast their own."""
    tp: dict[str, Any] = {"tp": 8, "sequence_parallel": True, **TORCHAO, "recompute": "operators"}

    def cast(scaling: str) -> dict[str, float]:
        part = layer(**tp | {"fp8": {"scaling": scaling}})
        labels = ("mlp up input in fp8", "mlp down gradient in fp8")
        return {label: sum(item.bytes for item in part.forward + part.backward if item.label == label) for label in labels}

    size = TOKENS * HIDDEN
    assert cast("rowwise")["mlp up input in fp8"] == size * (3 + 3 + 2 + 3)  # rows, rows again, maxima of columns, columns
    assert cast("rowwise")["mlp down gradient in fp8"] == size * (3 + 2 + 3)
    assert cast("tensorwise")["mlp up input in fp8"] == size / 8 * (2 + 3 + 3) + size * 2  # maximum, cast, cast again; turned
    assert cast("tensorwise")["mlp down gradient in fp8"] == size / 8 * (2 + 3 + 2)


def test_asynchronous_tensor_parallelism_gathers_no_rows_in_pieces() -> None:
    """What is cast after a gather is no product that it could be joined with (github.com/pytorch/torchtitan issue 866)."""
    tp: dict[str, Any] = {"tp": 8, "sequence_parallel": True, "overlap_tp": "pieces", **TORCHAO}

    def whole(scaling: str) -> int:
        part = layer(**tp | {"fp8": {"scaling": scaling}})
        return sum(isinstance(item, Collective) and item.operation == "all_gather" for item in part.forward + part.backward)

    assert (whole("rowwise"), whole("tensorwise")) == (4, 0)


def test_copies_of_weights_stay_beside_16_bits() -> None:
    def held(**plan: Any) -> float:
        asked = job(data_parallel="zero1", **plan)
        return sum(size for kind, size in lower(asked.model, asked.resolve()).cohorts[0].resident if kind == "parameter")

    assert held(**MEGATRON) - held() == 2 * 32 * layer(**MEGATRON).fp8_parameters


@pytest.mark.parametrize(
    ("cluster", "plan", "said"),
    [
        ("dgx-a100", MEGATRON, "a100-sxm-80gb computes in"),
        ("dgx-h100", {"kernels": "apex", "fp8": {}}, "needs kernels=megatron or torch"),
        ("dgx-h100", {"fp8": {"scaling": "rowwise"}}, "fp8.scaling=rowwise contradicts kernels=megatron"),
        ("dgx-h100", {**TORCHAO, "fp8": {"scaling": "delayed"}}, "which has tensorwise, rowwise, mxfp8"),
        ("dgx-h100", {**TORCHAO, "fp8": {"scaling": "rowwise", "gather": True}}, "torchao gathers tensorwise only"),
        ("dgx-h100", {"fp8": {"gather": True}}, "fp8.gather=true contradicts data_parallel=ddp"),
        ("dgx-h100", {"precision": "fp32", "fp8": {}}, "contradicts precision=fp32"),
    ],
)
def test_what_frameworks_have_not_is_refused(cluster: str, plan: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        job(cluster, **plan).resolve()


@pytest.mark.parametrize(("cluster", "noted"), [("dgx-h100", True), ("mi300x", True), ("hgx-b200", False), ("mi355x", False)])
def test_mxfp8_without_its_products_is_said(cluster: str, noted: bool) -> None:
    """From Blackwell on (nvidia.github.io/TransformerEngine/support_matrix.html), and from CDNA 4 on
    (rocm.blogs.amd.com/software-tools-optimization/matrix-cores-cdna: instructions with block scaling).
    """
    notes = job(cluster, **{**MEGATRON, "fp8": {"scaling": "mxfp8"}}).notes
    assert any("fp8.scaling=mxfp8 on" in note for note in notes) == noted


def test_mfu_is_of_the_bf16_peak() -> None:
    """As torchtitan counts. Where fp8 is ten times as fast, a step may pass it, and says why."""
    gpu = {"based_on": "h100-sxm", "peak": {"bf16": "200 TFLOP/s", "fp32": "67 TFLOP/s", "fp8": "1979 TFLOP/s"}}
    plan = {"sequence": 4096, **MEGATRON}
    answer = predict(read_job(model="llama-3.1-8b", cluster={"based_on": "dgx-h100", "node": {"gpu": gpu}}, plan=plan))
    assert answer.peak_dtype == "bf16"
    assert answer.mfu == pytest.approx(answer.model_flops_per_gpu / 200e12)
    assert answer.hfu > 1
    assert answer.notes[0] == "HFU above 100 %: it is of the bf16 peak, and products are in fp8"


NVFP4: dict[str, Any] = {"kernels": "megatron", "fp8": {"scaling": "nvfp4"}}
NUMBER = 9 / 16  # bytes: 16 numbers of 4 bits have a scale of 8 bits (NVFP4BlockScaling)


def test_nvfp4_operands_have_4_bits_and_a_scale_of_8_per_16() -> None:
    """All three products, and what backward keeps of a matrix's input; work and parameters are those of 16 bits."""
    asked = job(cluster="hgx-b200", **NVFP4)
    part = parts(asked.model, asked.resolve()).layer(0)
    narrow, wide = kernels(part, "fp4"), kernels(layer(), "bf16")
    assert len(narrow) == 4 * 3
    assert sum(kernel.flops for kernel in narrow) == sum(kernel.flops for kernel in wide)
    up = next(kernel for kernel in narrow if kernel.label == "mlp up" and kernel.phase == "forward")
    assert up.bytes == NUMBER * (TOKENS * HIDDEN + HIDDEN * 2 * FFN) + 2 * TOKENS * 2 * FFN
    kept = saved_tensors(asked.model, asked.resolve())
    assert kept["mlp up input"] == NUMBER * TOKENS * HIDDEN


def test_an_operand_is_there_twice_while_its_products_run() -> None:
    """By rows and by columns: NVFP4's 4 bits with a scale of 8 for 16 numbers, twice; nothing where operands have 16 bits.

    Where a tensor has one scale, Blackwell multiplies it either way.
    """
    b200, h100 = "hgx-b200", "dgx-h100"
    mx, tensors = {"fp8": {"scaling": "mxfp8"}}, {"fp8": {"scaling": "tensorwise"}}
    cases = (b200, NVFP4, 2 * NUMBER), (b200, mx, 2.0), (b200, tensors, 1.0), (h100, tensors, 2.0), (b200, {}, 0.0)
    for cluster, plan, each in cases:
        asked = job(cluster=cluster, **plan)
        assert Fp8Products(RankShapes(asked.model, asked.resolve()), "mlp up", FFN, HIDDEN).copies(1000) == 1000 * each


def test_nvfp4_casts_read_all_for_the_maximum_and_write_two_copies() -> None:
    """Two passes per operand: 2 bytes read; 2 read and two copies written. Of every input, gradient and (once) weight."""
    asked = job(cluster="hgx-b200", **NVFP4)
    part = parts(asked.model, asked.resolve()).layer(0)
    casts = [item for item in part.forward if isinstance(item, Kernel) and item.label == "mlp up input in fp8"]
    elements = TOKENS * HIDDEN
    assert [(item.kind, item.bytes) for item in casts] == [("reduction", 2 * elements), ("memory", (2 + 2 * NUMBER) * elements)]


def test_nvfp4_products_are_faster_by_no_more_than_the_peaks() -> None:
    """B200: 9 PFLOP/s dense in 4 bits, 4.5 in 8."""
    plan = {"kernels": "megatron", "global_batch": 16}
    four, eight = (predict(job("hgx-b200", fp8={"scaling": scaling}, **plan)) for scaling in ("nvfp4", "mxfp8"))
    assert 1 < eight.step_seconds / four.step_seconds < 2
    assert not any("fp4 was not measured" in note for note in four.notes)


def test_nvfp4_parameters_that_are_gathered_have_4_bits() -> None:
    """Megatron-LM's --fp4-param-gather: linear layers' parameters move in 9/16 of a byte, others in two; only one copy is made of
    what came, of 4 bits.
    """
    plan: dict[str, Any] = {"cluster": "hgx-b200", "kernels": "megatron", "data_parallel": "zero1", "global_batch": 16}
    wide, narrow = (job(**plan, fp8={"scaling": "nvfp4", "gather": gather}) for gather in (False, True))
    part = parts(narrow.model, narrow.resolve()).layer(0)
    moved = [predict(asked).volume["dp"].bytes for asked in (wide, narrow)]
    assert moved[0] - moved[1] == pytest.approx(32 * part.fp8_parameters * (2 - NUMBER) * 7 / 8, rel=1e-6)
    (cast,) = (item for item in part.forward if isinstance(item, Kernel) and item.label == "mlp up weight in fp8")
    assert cast.bytes == 2 * NUMBER * HIDDEN * 2 * FFN / narrow.resolve().microbatches


def test_nvfp4_needs_a_gpu_that_has_it() -> None:
    with pytest.raises(UserError, match=r"fp8.scaling=nvfp4 is not possible: h100-sxm computes in"):
        job(**NVFP4).resolve()
    with pytest.raises(UserError, match=r"fp8.dispatch=true contradicts fp8.scaling=nvfp4"):
        job("hgx-b200", kernels="megatron", fp8={"scaling": "nvfp4", "dispatch": True}).resolve()


ENDS: dict[str, Any] = {"layers_at_start_in_bf16": 2, "layers_at_end_in_bf16": 1}


@pytest.mark.parametrize("scaling", ["delayed", "nvfp4"])
def test_first_and_last_layers_in_16_bits_are_those_without_fp8(scaling: str) -> None:
    """Of 32 layers the first two and the last are a bf16 model's, the others as they are in fp8 or NVFP4."""
    cluster = "dgx-h100" if scaling == "delayed" else "hgx-b200"
    fp8 = {"scaling": scaling}
    ends, low, wide = (job(cluster, **plan) for plan in ({"fp8": fp8 | ENDS}, {"fp8": fp8}, {}))
    work, every, none = (parts(asked.model, asked.resolve()) for asked in (ends, low, wide))
    for index in range(32):
        expected = (none if index in (0, 1, 31) else every).layer(index)
        assert work.layer(index).forward == expected.forward
        assert work.layer(index).saved == expected.saved
        assert work.layer(index).fp8_parameters == expected.fp8_parameters
    assert saved_tensors(ends.model, ends.resolve(), 0) == saved_tensors(wide.model, wide.resolve(), 0)
    assert saved_tensors(ends.model, ends.resolve(), 2) == saved_tensors(low.model, low.resolve(), 2)


def test_a_step_with_ends_in_16_bits_is_between() -> None:
    """Three of 32 layers are as slow as in bf16, and the copies of their weights are not there."""
    steps = [predict(job(cluster="dgx-h100", **plan)) for plan in ({}, {"fp8": {"scaling": "delayed"} | ENDS}, MEGATRON)]
    seconds = [step.step_seconds for step in steps]
    assert seconds[0] > seconds[1] > seconds[2]
    assert (seconds[1] - seconds[2]) / (seconds[0] - seconds[2]) == pytest.approx(3 / 32, rel=0.3)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"fp8": {"layers_at_start_in_bf16": 16, "layers_at_end_in_bf16": 16}}, "leave none of 32 layers in fp8"),
        ({**TORCHAO, "fp8": {"layers_at_end_in_bf16": 1}}, "contradict kernels=compiled: Megatron-LM has them"),
        (
            {"fp8": {"layers_at_end_in_bf16": 1}, "lora": {"rank": 4, "targets": ["q_proj"], "weights": "fp8"}},
            "contradict lora.weights=fp8",
        ),
    ],
)
def test_layers_in_16_bits_are_refused_where_they_say_nothing(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        job(**plan).resolve()


def test_plans_that_cast_weights_at_other_times_are_told_apart() -> None:
    """Bounds price layers once for all plans whose `accumulation` is equal: parts of parameters are cast in each microbatch."""
    whole, parted = (
        {"data_parallel": name, "gradient_sync": "last", "accumulation": 4} | MEGATRON for name in ("zero2", "zero3")
    )
    assert layer(**whole) != layer(**parted)
    assert accumulation(job(**whole).resolve()) != accumulation(job(**parted).resolve())


LOW: dict[str, Any] = {"kernels": "megatron", "fp8": {"scaling": "delayed", "attention": True}}


def test_attention_in_fp8_casts_what_it_multiplies_and_keeps_a_byte() -> None:
    """Transformer Engine's fp8_dpa with delayed scales: queries, keys and values are cast in one pass, the result is cast back,
    and their gradients are the other way round; all four are kept in fp8, and the kernels read and write bytes.
    """
    asked, part, wide = job(**LOW), layer(**LOW), layer(**MEGATRON)
    given, results = TOKENS * (HIDDEN + 2 * KEYS), TOKENS * HIDDEN
    kept = saved_tensors(asked.model, asked.resolve())
    assert [kept[name] for name in ("queries", "keys", "values")] == [TOKENS * HIDDEN, TOKENS * KEYS, TOKENS * KEYS]
    assert kept["attention result"] == results
    works = [
        item for item in part.forward + part.backward if isinstance(item, Kernel) and item.label.startswith("attention cast")
    ]
    assert [(item.label, item.phase, item.bytes) for item in works] == [
        ("attention cast", "forward", 3 * given),
        ("attention cast back", "forward", 3 * results),
        ("attention cast", "backward", 3 * results),
        ("attention cast back", "backward", 3 * given),
    ]
    for kind, times in (("attention_forward", 2), ("attention_backward", 4)):
        (low,), (high,) = kernels(part, "fp8", kind), kernels(wide, "bf16", kind)
        assert (low.flops, low.shape) == (high.flops, high.shape)
        assert high.bytes - low.bytes == times * TOKENS * (HIDDEN + KEYS)
    assert part.model_flops == wide.model_flops


def test_scales_of_attention_now_are_found_by_reading_it_first() -> None:
    plan = {"kernels": "megatron", "fp8": {"scaling": "tensorwise", "attention": True}}
    works = [item for item in layer(**plan).forward if isinstance(item, Kernel) and item.label == "attention maximum"]
    assert [(item.kind, item.bytes) for item in works] == [("reduction", 2 * TOKENS * (HIDDEN + 2 * KEYS))]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (TORCHAO | {"fp8": {"attention": True}}, "fp8.attention contradicts kernels=compiled"),
        ({"fp8": {"scaling": "blockwise", "attention": True}}, "it is written down for delayed, tensorwise and nvfp4"),
        (LOW | {"fp8": {"attention": True, "attention_output": "e5m6"}}, "the core keeps its result in fp8"),
        (LOW | {"attention": "flash2"}, "is not simulated with attention=flash2"),
        (LOW | {"cp": 2}, "is not simulated with cp=2"),
        (LOW | {"recompute": "selective"}, "is not simulated with recompute_modules=[core_attn]"),
    ],
)
def test_attention_in_fp8_that_is_not_written_down_is_refused(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        job(**plan).resolve()


def test_attention_in_fp8_without_a_price_is_refused() -> None:
    with pytest.raises(UserError, match=r"fp8.attention: profile 'l40s' has no price of it; leave it out"):
        predict(read_job(model="gpt2-1.5b", cluster="pcie-l40s", plan=LOW))


def maxima(**plan: Any) -> list[tuple[Op, Collective]]:
    """What the first pipeline rank of two nodes agrees on maxima with."""
    given = {"kernels": "megatron", "sequence": TOKENS, "tp": 2, "pp": 2, "accumulation": 4, **plan}
    asked = read_job(None, {"plan": given}, model="llama-3.1-8b", cluster="dgx-h100", nodes=2)
    ops = lower(asked.model, asked.resolve()).cohorts[0].ops
    return [(op, op.work) for op in ops if isinstance(op.work, Collective) and op.work.label == "fp8 maxima"]


@pytest.mark.parametrize(
    ("fp8", "along"),
    [({}, ("tp", "dp")), ({"amax_reduction": "tp"}, ("tp",)), ({"amax_reduction": "none"}, None)],
)
def test_delayed_scales_need_maxima_of_all_ranks_after_every_pass(fp8: dict[str, Any], along: tuple[str, ...] | None) -> None:
    """Transformer Engine: 16 layers of four products, of each in fp32 the maxima of input, weight and output forward, of the
    output's and the input's gradient backward; four microbatches.
    """
    found = maxima(fp8={"scaling": "delayed", **fp8})
    assert {work.along for _, work in found} == ({along} if along else set())
    assert sorted(work.bytes for _, work in found) == ([512.0] * 4 + [768.0] * 4 if along else [])


def test_passes_wait_for_the_maxima_of_the_pass_before() -> None:
    asked = read_job(
        None,
        {"plan": {"kernels": "megatron", "sequence": TOKENS, "tp": 8, "accumulation": 2, "fp8": {"scaling": "delayed"}}},
        model="llama-3.1-8b",
        cluster="dgx-h100",
        nodes=2,
    )
    ops = lower(asked.model, asked.resolve()).cohorts[0].ops
    passes = [number for number, op in enumerate(ops) if op.microbatch >= 0 and op.stream == COMPUTE]
    agreed = [number for number, op in enumerate(ops) if isinstance(op.work, Collective) and op.work.label == "fp8 maxima"]
    for before in agreed[:-1]:
        following = next(number for number in passes if number > before)
        assert before in {ref.op for ref in ops[following].after}


def test_maxima_are_of_delayed_scaling_only() -> None:
    assert maxima(fp8={"scaling": "tensorwise"}) == []
    with pytest.raises(UserError, match=r"amax_reduction=tp contradicts fp8.scaling=tensorwise"):
        maxima(fp8={"scaling": "tensorwise", "amax_reduction": "tp"})
    assert maxima(fp8={"scaling": "delayed"}, tp=1, pp=16) == []
