"""Recomputing some of the layers of a stage: what is kept, made anew and run again, counted by hand."""

from __future__ import annotations

import pytest

from shardyard import simulate, summarise
from sim.program import Collective, Kernel
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from tests.conftest import LLAMA_LAYER
from topologies.reading import UserError


def stage(toy_job, layers: int = 6, model=None, **plan):
    job = toy_job(1, model={"layers": layers} | (model or {}), **plan)
    return parts(job.model, job.resolve()).stage(0, layers)


@pytest.fixture
def full(toy_job):
    return stage(toy_job, recompute="full")[0]


@pytest.fixture
def none(toy_job):
    return stage(toy_job)[0]


@pytest.mark.parametrize(
    ("method", "number", "again"),
    [
        ("block", 2, [0, 1]),
        ("block", 6, range(6)),
        ("every", 2, [1, 3, 5]),
        ("every", 4, [3]),
        ("every", 1, range(6)),
    ],
)
def test_these_layers_are_recomputed_and_the_others_kept(toy_job, full, none, method, number, again) -> None:
    """Megatron-LM's block: the first ones; torchtitan's option: each so many-th."""
    chosen = stage(toy_job, recompute="full", recompute_method=method, recompute_layers=number)
    assert chosen == [full if layer in again else none for layer in range(6)]


@pytest.mark.parametrize(("number", "chunks"), [(1, [1] * 6), (2, [2] * 3), (4, [4, 2]), (6, [6])])
def test_uniform_keeps_one_input_for_so_many_layers(toy_job, full, none, number, chunks) -> None:
    """Megatron-LM's uniform: 1/number of the inputs are kept, and the activations of so many layers exist at a time."""
    chosen = stage(toy_job, recompute="full", recompute_method="uniform", recompute_layers=number)
    for part, count in zip(chosen, chunks, strict=True):
        assert part.saved == full.saved
        assert part.saved + part.restored == count * none.saved
        assert (part.parameters, part.model_flops) == (count * full.parameters, count * full.model_flops)
        assert part.recompute == count * full.recompute
        assert part.backward == count * full.recompute + count * none.backward


def test_torch_repeats_no_last_product(toy_job) -> None:
    """Of two layers that are recomputed together, the first is repeated to its end, which is the input of the second."""
    ours = {"recompute": "full", "kernels": "torch"}
    stopped = stage(toy_job, **ours)[0]
    two = stage(toy_job, recompute_method="uniform", recompute_layers=2, **ours)[0]
    assert [item.label for item in stopped.forward[len(stopped.recompute) :]] == ["mlp down", "mlp residual"]
    assert [item.label for item in two.recompute] == [item.label for item in stopped.forward + stopped.recompute]


def test_time_and_memory_emerge(toy_job) -> None:
    """Between none and full in both; hardware FLOPs count what runs again."""

    def peaks(**plan):
        job = toy_job(2, model={"layers": 8}, pp=2, accumulation=4, microbatch=4, **plan)
        timeline = simulate(job)
        return timeline.step, summarise(timeline).worst.kinds["activation"], lower(job.model, job.resolve()).hardware_flops

    none, half, full = peaks(), peaks(recompute="full", recompute_method="block", recompute_layers=2), peaks(recompute="full")
    assert none[0] < half[0] < full[0]
    assert none[1] > half[1] > full[1]
    assert half[2] == pytest.approx((none[2] + full[2]) / 2)


LLAMA = {
    "kv_heads": 4,
    "ffn": 96,
    **LLAMA_LAYER,
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_of_products_every_second_runs_again(toy_job, kernels, gated, tp) -> None:
    """Of queries, keys and values the keys; the attention output; of gate and up the latter; never the last. What is kept: the
    layer's input, queries, values, the attention's result with a float per row, the first product of the MLP, and the sum of
    the attention output where that is a reduce-scatter. An eager layer also keeps the seventh product before any sum.
    """
    job = toy_job(2, 1, LLAMA | {"gated": gated}, recompute="operators", kernels=kernels, tp=tp, sequence_parallel=tp > 1)
    layer = parts(job.model, job.resolve()).layer(0)
    tokens, hidden, keys, ffn, eager, scattered = 32, 64, 32, 96, kernels == "torch", tp > 1
    again = {"qkv": keys // tp, "attention output": hidden, "mlp up": ffn // tp}
    if not gated:
        del again["mlp up"]
    if scattered and not eager:
        del again["attention output"]  # nothing needs it besides its sum, which is kept
    products = [item for item in layer.recompute if isinstance(item, Kernel) and item.kind == "gemm"]
    assert [(item.label, item.shape[2]) for item in products] == list(again.items())
    columns = {"qkv": keys, "attention output": hidden, "mlp up": ffn}
    assert layer.recomputed_flops == 2 * tokens * hidden * sum(columns[label] for label in again)
    gathered = ["qkv input", "mlp up input"] if scattered else []
    assert [item.label for item in layer.recompute if isinstance(item, Collective)] == gathered
    local_tokens = tokens * hidden // tp
    kept = local_tokens + tokens * (hidden + keys + hidden + ffn) // tp + local_tokens * scattered
    last = tokens * hidden + local_tokens * scattered if eager and gated else 0
    assert layer.saved == 2 * (kept + last) + 4 * tokens * 8 // tp


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        ({}, {"kernels": "megatron"}, "contradicts kernels=megatron"),
        ({}, {"attention": "materialised"}, "needs fused attention, and attention=materialised"),
        *(({bias: True}, {}, "with biases, which small has") for bias in ("attention_bias", "output_bias", "mlp_bias")),
    ],
)
def test_every_second_product_is_refused_where_nobody_counts_them(toy_job, model, plan, message) -> None:
    job = toy_job(2, 1, LLAMA | model, **{"recompute": "operators", "kernels": "torch"} | plan)
    with pytest.raises(UserError, match=message):
        parts(job.model, job.resolve())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"recompute": "full", "recompute_method": "block"}, "recompute_method=block needs recompute_layers"),
        ({"early_stop": False}, "early_stop=false needs recompute=full"),
        ({"recompute": "full", "recompute_layers": 2}, "recompute_layers=2 needs recompute_method"),
        ({"recompute_method": "block", "recompute_layers": 2}, "recompute_method=block needs recompute=full"),
        ({"recompute": "full", "recompute_method": "block", "recompute_layers": 5}, "recompute_layers=5 exceeds the 4 layers"),
        ({"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2, "data_parallel": "zero3"}, "one layer at a"),
    ],
)
def test_what_makes_no_sense_is_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(1, **plan).resolve()


MOE = {
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "ffn": 96,
    **LLAMA_LAYER,
    "context": 32,
    "latent": {"q_rank": 32, "kv_rank": 16, "nope_head_dim": 16, "rope_head_dim": 8, "v_head_dim": 16},
    "experts": {"experts": 8, "chosen": 2, "ffn": 32, "shared": 1, "first_dense": 1},
}
WIDTH, TOKENS = 2, 32  # bytes of an element, tokens of a microbatch
RESTORED = [  # module, layer, elements per token that are made anew
    ("layernorm", 0, 2 * 64),
    ("layernorm", 1, 2 * 64),
    ("mla_up_proj", 1, 32 + 16 + 4 * (24 + 24 + 16)),  # both latents after their norms; queries, keys and values of 4 heads
    ("mlp", 0, 2 * 96 + 96),
    ("moe_act", 1, 2 * 32),
    ("shared_experts", 1, 2 * 32 + 32),
]


@pytest.mark.parametrize(("module", "layer", "elements"), RESTORED)
def test_what_a_module_makes_is_made_anew(toy_job, module, layer, elements) -> None:
    """As Megatron-LM's --recompute-modules: what goes into a module stays, what it makes inside or puts out does not."""
    none, some = (
        stage(toy_job, 2, model=MOE, **plan)[layer] for plan in ({}, dict(recompute="selective", recompute_modules=[module]))
    )
    assert some.restored == WIDTH * TOKENS * elements
    assert some.saved == none.saved - some.restored
    assert some.backward[len(some.recompute) :] == none.backward


def test_a_module_is_recomputed_by_its_own_kernels(toy_job) -> None:
    def again(layer: int, *modules: str) -> list[str]:
        part = stage(toy_job, 2, model=MOE, recompute="selective", recompute_modules=list(modules))[layer]
        assert {item.phase for item in part.recompute} <= {"recompute"}
        return [item.label for item in part.recompute]

    assert again(1, "layernorm", "moe_act") == ["attention norm", "mlp norm", "expert activation"]
    assert again(1, "mla_up_proj") == ["query norm", "query up", "key value norm", "key value up", "rotary", "keys"]
    assert again(0, "mlp") == ["mlp up", "activation", "mlp down"]
    assert again(0, "moe") == []
    assert list(dict.fromkeys(again(1, "moe")))[:4] == ["router", "router softmax", "routing", "dispatch"]


def test_all_of_a_mixture_is_recomputed_from_its_input(toy_job) -> None:
    """What is kept of the second half of the layer is what the norm reads and makes."""
    from strategies.layers.model_costs import saved_tensors

    job = toy_job(1, model=MOE, recompute="selective", recompute_modules=["core_attn", "moe"])
    names = list(saved_tensors(job.model, job.resolve(), layer=1))
    assert names[names.index("mlp norm input") :] == ["mlp norm input", "mlp input"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(recompute_modules=["mlp"]), "recompute_modules=\\[mlp\\] needs recompute=selective, and recompute=none"),
        (dict(recompute="selective", recompute_modules=[]), "name at least one"),
        (dict(recompute="selective", recompute_modules=["moe_act"]), "needs a mixture of experts, and small has none"),
        (dict(recompute="selective", recompute_modules=["mla_up_proj"]), "needs latent attention, and small has none"),
        (dict(exp_avg_dtype="bf16", optimizer="sgd"), "exp_avg_dtype=bf16 contradicts optimizer=sgd"),
        (dict(exp_avg_sq_dtype="bf16", fused_optimizer=False), "exp_avg_sq_dtype=bf16 contradicts fused_optimizer=false"),
    ],
)
def test_what_is_not_there_is_not_recomputed(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        stage(toy_job, **plan)


def test_moments_in_16_bits(toy_job) -> None:
    """Adam in mixed precision: 4 bytes of the master and 2 + 2 of the moments, read and written."""
    job = toy_job(1, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert job.plan.bytes_of_states["optimizer"] == 8
    from strategies.lowering.optimizer_step import passes_of

    assert dict(passes_of(job.plan))["adam"] == 4 + 2 * 8
