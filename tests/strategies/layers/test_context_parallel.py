"""Context parallelism: volumes of the papers, work and memory that divide, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import read_job
from sim.analysis.breakdown import breakdown
from sim.analysis.volume import volumes
from sim.engine.player import run
from sim.program import Kernel
from sim.timeline import Timeline
from strategies.layers.model_costs import parts, restored_tensors, saved_tensors
from strategies.layers.tensor_overlap import Items
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

GPT: dict[str, Any] = {"name": "gpt", "hidden": 64, "layers": 4, "heads": 8, "kv_heads": 4, "vocabulary": 512, "context": 32}
GATHER = {"cp": 4, "cp_method": "all_gather"}
PLANS = [
    {"cp": 2},
    {"cp": 4},
    {"cp": 2, "cp_method": "ulysses"},
    {"cp": 2, "tp": 2, "cp_method": "ulysses"},
    {"cp": 4, "tp": 2},
    GATHER,
]


@pytest.fixture
def play(toy_job, toy_prices):
    def player(gpus: int = 8, **plan: Any) -> Timeline:
        job = toy_job(gpus, model=GPT, **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return player


def resolved(model: Model, **plan: Any) -> Resolved:
    return Resolved.of(Plan(**plan), model, plan.get("tp", 1) * plan.get("cp", 1))


def flops(items: Items) -> float:
    return sum(item.flops for item in items if isinstance(item, Kernel))


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ring_passes_a_block_of_keys_and_values_on_cp_minus_one_times(play, cp) -> None:
    """arXiv:2310.01889 section 3: each turn sends a block of keys and values; forward, backward, and their gradients."""
    block = 2 * (32 // cp) * 4 * 8  # elements: keys and values of 4 heads of 8 features
    timeline = play(cp=cp, accumulation=3)
    assert volumes(timeline)[0]["cp"][1] == pytest.approx(3 * 4 * 3 * (cp - 1) * block)  # 3 microbatches, 4 layers, 3 turns


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_gathered_keys_and_values_are_as_many_as_those_of_a_ring(play, toy_job, toy_prices, cp) -> None:
    """arXiv:2407.21783 section 3.3.2: gathered forward and backward, gradients scattered; all of it is waited for."""
    block = 2 * (32 // cp) * 4 * 8  # elements: keys and values of 4 heads of 8 features
    timeline = play(cp=cp, cp_method="all_gather", accumulation=3)
    assert volumes(timeline)[0]["cp"][1] == pytest.approx(3 * 4 * 3 * (cp - 1) * block)
    assert breakdown(timeline)["cp exposed"] == pytest.approx(3 * 4 * 3 * (cp - 1) * 2 * block / 1e9)


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_sends_four_tensors_each_way(play, cp) -> None:
    """arXiv:2309.14509 section 3.2: all-to-alls of 4·N·h/P elements per layer; fewer key and value heads are as much less."""
    tokens, elements = 32 // cp, (2 * 8 + 2 * 4) * 8  # queries and result of 8 heads, keys and values of 4
    sent = tokens * elements * (cp - 1) / cp
    assert volumes(play(cp=cp, cp_method="ulysses"))[0]["cp"][1] == pytest.approx(2 * 4 * sent)


@pytest.mark.parametrize("plan", [{"cp": 2}, {"cp": 4, "cp_method": "ulysses"}, {"cp": 8}])
@pytest.mark.parametrize(("hook", "factor"), [("ddp", 2), ("zero1", 2), ("zero3", 3)])
def test_gradients_are_reduced_over_dp_and_cp_together(play, plan, hook, factor) -> None:
    """Parameters are replicated along cp: the volumes of arXiv:1910.02054 section 7 with n = dp·cp = 8 ranks."""
    psi = Model(**GPT).parameters
    timeline = play(**plan, data_parallel=hook, clip_gradients=False)
    assert volumes(timeline)[0]["dp"][1] == pytest.approx(factor * psi * 7 / 8)
    assert timeline.program.tokens == 32 * 8 / plan["cp"]
    resident = dict(timeline.program.cohorts[0].resident)
    assert resident["optimizer"] == 12 * psi / (1 if hook == "ddp" else 8)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["decoder", "encoder"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_work_and_activations_divide(plan, family, recompute) -> None:
    model = Model(**GPT, family=family)
    tp = {"tp": plan["tp"]} if "tp" in plan else {}
    alone, many = (parts(model, resolved(model, recompute=recompute, **given)) for given in (tp, plan))
    for left, right in ((alone.layer(0), many.layer(0)), (alone.head, many.head), (alone.embedding, many.embedding)):
        for a, b in ((left.forward, right.forward), (left.backward, right.backward), (left.recompute, right.recompute)):
            assert flops(a) == plan["cp"] * flops(b)
        assert (left.model_flops, left.recomputed_flops) == (right.model_flops, right.recomputed_flops)
        assert left.parameters == right.parameters
    small, whole = (saved_tensors(model, resolved(model, recompute=recompute, **given)) for given in (plan, tp))
    result = small.pop("attention result", 0)  # that of Ulysses before it is exchanged back
    assert {name: size * plan["cp"] for name, size in small.items()} == whole
    restored = restored_tensors(model, resolved(model, recompute=recompute, **plan))
    assert result + restored.get("attention result", 0) == (whole_queries(plan) if plan.get("cp_method") == "ulysses" else 0)


def whole_queries(plan: dict[str, Any]) -> float:
    return 2 * 32 * 64 / plan["cp"] / plan.get("tp", 1)


@pytest.mark.parametrize("tokens", [256, 2048])
def test_transformer_engine_sends_a_block_on_while_it_attends_to_it(toy_job, toy_prices, tokens) -> None:
    """AttnFuncWithCPAndKVP2P, four ranks: forward each of three exchanges of keys and values is beside a block; backward four
    are, of keys and values, twice of these with gradients, of gradients. A block of n tokens is 128·n bytes over 1 GB/s and
    128·n² FLOPs at 1 TFLOP/s, 2.5 times as many backward. PyTorch waits, and sums gradients in fp32.
    """
    sent, attended = 128 * tokens / 1e9, 128 * tokens**2 / 1e12
    forward = 3 * max(0.0, sent - attended)
    backward = sum(max(0.0, times * sent - 2.5 * attended) for times in (1, 2, 2, 1))
    for kernels, expected in (("megatron", forward + backward), ("compiled", 12 * sent)):
        job = toy_job(4, model=GPT | {"positions": "rotary", "context": 8192}, cp=4, sequence=4 * tokens, kernels=kernels)
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
        assert breakdown(timeline)["cp exposed"] == pytest.approx(4 * expected, abs=1e-9)


def test_zig_zag_blocks_are_half_of_all_products() -> None:
    """A causal block of 8 × 8 and three times half of one: 8·8/2 + 3·8·4 = 32·8/2 pairs of tokens."""
    model = Model(**GPT)
    kernels = [
        k for k in parts(model, resolved(model, cp=4)).layer(0).forward if isinstance(k, Kernel) and k.label == "attention"
    ]
    assert [kernel.shape[3:] for kernel in kernels] == [(8, 8, 8, 1)] + [(8, 4, 8, 0)] * 3
    assert sum(kernel.flops for kernel in kernels) == 4 * 64 * 32 * 8 / 2


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_blocks_are_merged_by_the_passes_of_pytorch(precision: str) -> None:
    """Bytes of the tensors that PyTorch's own merger of ring attention's results reads and writes, at full size."""
    torch = pytest.importorskip("torch")
    attention = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    overrides = pytest.importorskip("torch.utils._python_dispatch")
    shape = (1, 8, 8, 8)  # sequences, heads, tokens of a rank, features

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]

    class Counted(overrides.TorchDispatchMode):
        moved = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            tensors = [each for each in (*args, made) if isinstance(each, torch.Tensor) and each.numel() == 8**3]
            Counted.moved += sum(each.numel() * each.element_size() for each in tensors)
            return made

    merger = attention._SDPAMerger(True, seq_dim=2)
    with Counted():
        for _ in range(4):
            merger.step(torch.empty(shape, dtype=dtype), torch.empty(shape[:-1]), partial=False)
        merger.results()
    made = 4 * dtype.itemsize * 8**3  # by torch.empty
    ours = parts(Model(**GPT), resolved(Model(**GPT), cp=4, kernels="torch", precision=precision)).layer(0).forward
    merged = [item.bytes for item in ours if isinstance(item, Kernel) and item.label == "merge"]
    joined = 3 * [2 * 2 * dtype.itemsize * 8 * 4 * 8]  # keys and values of 4 heads, read and written
    assert merged[:3] == joined
    assert sum(merged[3:]) == Counted.moved - made


MISTAKES = [
    (dict(cp=2, tp=4, pp=2, dp=3), "tp·cp·pp·dp = 4·2·2·3 = 48 ≠ 32 GPUs"),
    (dict(cp=4, sequence=1004), "2·cp = 2·4 does not divide sequence=1004, which cp_method=ring needs"),
    (dict(cp=4, cp_method="ulysses", sequence=1002), "cp = 4 does not divide sequence=1002"),
    (dict(cp=4, tp=4, cp_method="ulysses"), "tp·cp = 4·4 = 16 does not divide 8 key-value heads"),
    (dict(cp=2, cp_method="all_gather", kernels="compiled"), "cp_method=all_gather contradicts kernels=compiled"),
    (dict(cp=2, attention="materialised"), "cp=2 needs attention=flash, and attention=materialised"),
    (dict(cp=2, tp=8, sequence_parallel=True, sequence=1000), "tp=8 does not divide sequence/cp = 1000/2 tokens"),
]


@pytest.mark.parametrize(("plan", "message"), MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_one_line_with_the_rule(plan, message) -> None:
    with pytest.raises(UserError) as caught:
        read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=4, plan=plan).resolve()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
