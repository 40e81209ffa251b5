"""Llama as it is written in PyTorch: a matrix for each of q, k, v, gate and up; complex rotary positions; repeated keys."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import read_job
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from strategies.frameworks import kernel_set
from strategies.frameworks.pytorch.options import PyTorchOptions
from strategies.layers.attention.self_attention import attention
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts
from strategies.layers.rank_shapes import RankShapes
from topologies.cluster_files import load_gpu
from topologies.reading import UserError

HIDDEN, FFN, KEYS, TOKENS = 4096, 14336, 1024, 2048  # Llama-3.1 8B


def layer(**plan: Any) -> LayerCost:
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan={"auto": False, "sequence": TOKENS, **plan})
    return parts(job.model, job.resolve()).layer(0)


def products(part: LayerCost) -> list[tuple[int, ...]]:
    return [item.shape[1:] for item in part.forward if isinstance(item, Kernel) and item.kind == "gemm"]


def test_a_product_for_each_matrix() -> None:
    widths = [(HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)]
    assert products(layer(kernels="compiled")) == products(layer(kernels="torch")) == [(TOKENS, n, k) for n, k in widths]
    joined = [(HIDDEN + 2 * KEYS, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
    assert products(layer()) == products(layer(kernels="torch", joined_products=True)) == [(TOKENS, n, k) for n, k in joined]


def test_they_do_the_same_work() -> None:
    """FLOPs, parameters, and what a backward pass cut in two holds: the input of the products is one tensor."""
    apart, joined = layer(kernels="compiled"), layer(kernels="compiled", joined_products=True)
    for name in ("parameters", "model_flops", "held", "saved"):
        assert getattr(apart, name) == getattr(joined, name)
    separate, other = (sum(item.flops for item in part.backward if isinstance(item, Kernel)) for part in (apart, joined))
    assert separate == other


def test_torch_adds_up_the_gradients_of_their_input() -> None:
    """Read, read, write for each but the first; in a compiled layer the kernel that takes them reads more."""
    size = 2 * TOKENS * HIDDEN

    def summed(kernels: str) -> list[float]:
        items = layer(kernels=kernels).backward
        return sorted(
            item.bytes for item in items if isinstance(item, Kernel) and item.label in ("qkv gradients", "mlp up gradients")
        )

    assert summed("torch") == [3 * size] * 3
    assert summed("compiled") == [size, 2 * size]
    assert summed("megatron") == [size * (HIDDEN + 2 * KEYS) / HIDDEN * 2]  # joined instead


def test_complex_rotary_as_torch_dispatches_it() -> None:
    """Bytes that the operators of torchtitan's apply_rotary_emb read and write, those of the small table apart."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if not func.is_view and out.data_ptr() != args[0].data_ptr():
                seen.append(args[0].numel() * args[0].element_size() + out.numel() * out.element_size())
            return out

    x = torch.randn(2, 64, 4, 8, dtype=torch.bfloat16)
    turns = torch.polar(torch.ones(1, 64, 1, 4), torch.randn(1, 64, 1, 4))
    with Counting():
        turned = torch.view_as_real(torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turns).flatten(3)
        turned.type_as(x)
    options = PyTorchOptions.model_validate({"complex_rotary": True})
    for kernels in ("torch", "compiled"):
        assert [way.moved * x.numel() for way in kernel_set(kernels, options).rotary(2.0).forward] == seen


def test_repeated_keys_are_written_for_each_query_head() -> None:
    def moved(kernels: str) -> float:
        with_, without = (layer(kernels=kernels, repeated_keys=repeated) for repeated in (True, False))
        more, less = (sum(item.bytes for item in part.forward if isinstance(item, Kernel)) for part in (with_, without))
        return more - less

    assert moved("torch") == 2 * 2 * TOKENS * (KEYS + HIDDEN)  # keys and values: read, written four times as large
    assert moved("compiled") == 2 * 2 * TOKENS * HIDDEN  # the reading kernel is there already


def test_repeated_keys_and_values_are_there_while_they_are_made() -> None:
    """Both as large as the queries, in bf16, for as long as the copies run."""
    job = read_job(
        model="llama-3.1-8b", cluster="dgx-h100", nodes=1, plan={"sequence": TOKENS, "kernels": "torch", "repeated_keys": True}
    )
    pieces = attention(RankShapes(job.model, job.resolve()))
    (copies,) = [
        piece for piece in pieces if any(getattr(item, "label", "") == "repeat keys and values" for item in piece.forward)
    ]
    assert copies.temporary == 2 * 2 * TOKENS * HIDDEN


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"complex_rotary": True}, "complex_rotary=true contradicts kernels=megatron"),
        ({"repeated_keys": True}, "repeated_keys=true contradicts kernels=megatron"),
        ({"repeated_keys": True, "kernels": "torch", "attention": "materialised"}, "repeats them anyway"),
        ({"kernels": "torch", "joined_products": True, "recompute": "operators"}, "with joined_products=true"),
    ],
)
def test_what_makes_no_sense_is_refused(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        layer(**plan)


def test_sums_of_asynchronous_tensor_parallelism_are_slow() -> None:
    """torch.sum of as many numbers as there are ranks: 23 to 43 % of the bandwidth (github.com/pytorch/pytorch pull 191803)."""
    part = layer(kernels="compiled", tp=8, sequence_parallel=True, overlap_tp="pieces")
    added = next(item for item in part.forward if isinstance(item, Kernel) and item.label == "mlp down sums")
    read_and_written = 2 * TOKENS * HIDDEN * (1 + 1 / 8)
    gpu = load_gpu("h100-sxm")
    assert 0.23 < read_and_written / Prices(load_profile("h100"), gpu).seconds(added) / gpu.memory_bandwidth < 0.43
