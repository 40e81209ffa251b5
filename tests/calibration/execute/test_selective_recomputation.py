"""`recompute: operators` beside PyTorch's own selective checkpointing of a Llama layer: what runs again, and what is kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from sim.program import Collective, Kernel
from strategies.layers.model_costs import parts
from topologies.reading import UserError

BATCH, TOKENS, HIDDEN, FFN, HEADS, KV = 2, 64, 32, 48, 4, 2
SIZES = dict(hidden=HIDDEN, ffn=FFN, heads=HEADS, kv_heads=KV, gated=True, norm="rmsnorm", positions="rotary", layers=2)
PLAIN = dict(attention_bias=False, output_bias=False, mlp_bias=False)
PLAN = dict(recompute="operators", microbatch=BATCH, sequence=TOKENS)


class Layer(nn.Module):
    """Seven matrices, in torchtitan's order."""

    def __init__(self) -> None:
        super().__init__()
        keys = KV * HIDDEN // HEADS
        sizes = [(HIDDEN, HIDDEN), (HIDDEN, keys), (HIDDEN, keys), (HIDDEN, HIDDEN), (HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN)]
        self.matrices = nn.ModuleList(nn.Linear(rows, columns, bias=False) for rows, columns in sizes)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, o, gate, up, down = self.matrices
        normed = self.norms[0](x)
        heads = [matrix(normed).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for matrix in (q, k, v)]
        heads[:2] = [head * 0.5 for head in heads[:2]]  # in place of rotary positions
        core = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + o(core.transpose(1, 2).flatten(-2))
        normed = self.norms[1](x)
        return x + down(functional.silu(gate(normed)) * up(normed))


def tensors() -> dict[int, int]:
    """Bytes of every storage, by its address."""
    gc.collect()
    storages = [tensor.untyped_storage() for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, nn.Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.fixture
def ran() -> Iterator[tuple[float, float]]:
    """FLOPs of products that run again, and bytes kept between the passes."""
    seen = {False: 0, True: 0}

    def policy(ctx, func, *args, **kwargs) -> CheckpointPolicy:
        seen[ctx.is_recompute] += func == torch.ops.aten.mm.default
        second = func == torch.ops.aten.mm.default and seen[ctx.is_recompute] % 2 == 0
        saved = func == torch.ops.aten.mm.default or "scaled_dot_product" in str(func)
        return CheckpointPolicy.MUST_SAVE if saved and not second else CheckpointPolicy.PREFER_RECOMPUTE

    layer = Layer()
    others = tensors()
    x = torch.randn(BATCH, TOKENS, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = checkpoint(
            layer,
            x,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
        )
    result = out.untyped_storage().data_ptr()
    kept = sum(size for place, size in tensors().items() if place not in others and place != result)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    product = torch.ops.aten.mm
    counted = [counter.get_flop_counts()["Global"][product] for counter in (forward, backward)]
    return counted[1] - 2 * counted[0], kept


def layer_of(toy_job, **plan):
    job = toy_job(plan.get("tp", 1), model=SIZES | PLAIN, **PLAN | plan)
    return parts(job.model, job.resolve()).layer(0)


def products(items) -> float:
    return sum(item.flops for item in items if isinstance(item, Kernel) and item.kind == "gemm")


def test_pytorch_runs_the_same_again(toy_job, ran) -> None:
    part = layer_of(toy_job, kernels="torch", precision="fp32")
    assert products(part.recompute) == ran[0]
    assert not any(item.kind.startswith("attention") for item in part.recompute if isinstance(item, Kernel))


def test_pytorch_keeps_the_same(toy_job, ran) -> None:
    seed_and_offset = 16  # of the attention kernel's dropout
    assert layer_of(toy_job, kernels="torch", precision="fp32").saved == ran[1] - seed_and_offset


def test_a_reduce_scatter_is_kept_so_compiled_layers_repeat_no_attention_output(toy_job) -> None:
    alone, cut = (layer_of(toy_job, kernels="compiled", **more) for more in ({}, dict(tp=2, sequence_parallel=True)))
    labels = [[item.label for item in part.recompute] for part in (alone, cut)]
    assert "attention output" in labels[0]
    assert "attention output" not in labels[1]
    gathers = [item.label for item in cut.recompute + cut.backward if isinstance(item, Collective) and "gather" in item.operation]
    assert gathers.count("qkv input") == 2  # once in the list of what is repeated, once in the whole backward that contains it


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (dict(kernels="megatron"), "contradicts kernels=megatron"),
        (dict(kernels="compiled", attention="materialised"), "needs fused attention"),
    ],
)
def test_what_the_policy_does_not_say_is_refused(toy_job, plan, why) -> None:
    with pytest.raises(UserError, match=why):
        layer_of(toy_job, **plan)
