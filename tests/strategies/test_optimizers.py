"""Optimizers: bytes of their states, what an update moves and multiplies, and where they are read and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Block, Kernel
from strategies.lowering.lower import lower
from strategies.lowering.optimizer_step import passes_of
from strategies.optimizers import matrices_of, optimizer_called, optimizers
from strategies.optimizers.muon import orthogonalised
from strategies.optimizers.shampoo import blocks_of, iterations, preconditioned, preconditioners
from strategies.plan.plan import Plan
from topologies.reading import UserError

LLAMA: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "dgx-h100"}


def job(**plan: Any) -> Job:
    return read_job(None, plan={"global_batch": 8, "sequence": 2048, "data_parallel": "zero1", **plan}, **LLAMA)


@pytest.mark.parametrize(
    ("name", "mixed", "full"),
    [  # bytes per parameter besides weight and gradient: with fp32 masters of bf16 weights, and in fp32
        ("adam", 12, 8),
        ("adamw", 12, 8),
        ("lamb", 12, 8),
        ("adam8bit", 4 + 2 * (1 + 4 / 256), 2 * (1 + 4 / 256)),
        ("lion", 8, 4),
        ("muon", 8, 4),
        ("shampoo", 12, 8),
        ("momentum", 8, 4),
        ("adafactor", 4, 0),
        ("sgd", 4, 0),
    ],
)
def test_bytes_of_states(name: str, mixed: float, full: float) -> None:
    assert Plan(optimizer=name).bytes_per_optimizer_state == mixed
    assert Plan(optimizer=name, precision="fp32").bytes_per_optimizer_state == full


def test_what_an_update_moves_by_hand() -> None:
    """In fp32: the gradient is read for its norm; then gradient, weight and states are read, weight and states written; and
    Megatron-LM's buffer of gradients is set to zero.
    """

    def passes(optimizer: str, **plan: bool) -> list[tuple[str, float]]:
        norm, *update, zeroing = passes_of(Plan(optimizer=optimizer, precision="fp32", **plan))
        assert (norm, zeroing) == (("gradient norm", 4), ("gradient zeroing", 4))
        return update

    assert passes("lion") == [("lion", 4 + 2 * 4 + 2 * 4)]
    assert passes("adam8bit")[0] == ("adam8bit", 4 + 8 + 2 * 2 * (1 + 4 / 256))
    assert passes("lamb") == [("lamb", 4 + 8 + 16), ("lamb norms", 8), ("lamb update", 16)]
    assert sum(moved for _, moved in passes("adafactor")) == 4 * 19
    assert len(passes("lion", fused_optimizer=False)) == 7


def test_memory_of_states_emerges() -> None:
    """8.03 · 10⁹ parameters over 8 ranks: Lion spares 4 bytes of each, and 8-bit Adam 6 less scales."""
    states = {name: summarise(simulate(job(optimizer=name))).worst.kinds["optimizer"] for name in ("adam", "lion", "adam8bit")}
    psi = job().model.parameters / 8
    assert states["adam"] - states["lion"] == pytest.approx(4 * psi, rel=1e-6)
    assert states["adam"] - states["adam8bit"] == pytest.approx((8 - 2 * (1 + 4 / 256)) * psi, rel=1e-6)


def test_products_of_muon_by_hand() -> None:
    """Five iterations of 4·m²·n + 2·m³ FLOPs; 7 matrices of a shape among 4 ranks are at most 2 on one of them."""
    matrices = matrices_of([(64, 256)] * 5 + [(256, 64)] * 2 + [(64,)])
    assert matrices == {(64, 256): 7}
    (run,) = orthogonalised(matrices, 4)
    assert run.times == 2
    products = [item for item in run.items if isinstance(item, Kernel) and item.kind == "gemm"]
    assert sum(kernel.flops for kernel in products) == 5 * (4 * 64**2 * 256 + 2 * 64**3)
    # by PyTorch's own counter
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.zeros(64, 256, device="meta")
    with FlopCounterMode(display=False) as counter:
        for _ in range(5):
            a = x @ x.T
            x = x + (a + a @ a) @ x
    assert counter.get_total_flops() == sum(kernel.flops for kernel in products)


def test_products_of_shampoo_by_hand() -> None:
    """Of 7 matrices of 64 × 256 among 4 ranks 2 on one of them: sums of both factors and products with both roots, by PyTorch's
    counter. The roots of 2 matrices are 2 · 19 · 4 products of each
    side, of which a step has the hundredth part: 1.52, as whole products 2.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    each, roots = preconditioned(matrices_of([(64, 256)] * 5 + [(256, 64)] * 2 + [(64,)]), 4)
    g, left, right = (torch.zeros(*size, device="meta") for size in ((64, 256), (64, 64), (256, 256)))
    with FlopCounterMode(display=False) as counter:
        left = left + g @ g.T
        right = right + g.T @ g
        left @ g @ right
    assert each.times == roots.times == 2
    assert sum(item.flops for item in each.items if isinstance(item, Kernel)) == counter.get_total_flops()
    assert iterations() == 19
    assert [item.flops for item in roots.items if isinstance(item, Kernel)] == [2 * 64**3, 2 * 256**3]


def test_iterations_of_a_root_are_those_that_it_takes() -> None:
    """The coupled Newton iteration in numpy on eigenvalues from 10⁻⁶ to 1: to fp32's rounding."""
    import numpy as np

    eigenvalues = np.geomspace(1e-6, 1, 40)
    z = (1 + 4) / 2  # relative to the norm, so that all eigenvalues converge
    m, root, steps = eigenvalues * z, np.full(40, z**0.25), 0
    while np.abs(m - 1).max() > 2**-23:
        factor = (5 - m) / 4
        root, m, steps = root * factor, m * factor**4, steps + 1
    assert np.allclose(root, eigenvalues**-0.25)
    assert steps == iterations()


def test_blocks_and_states_of_shampoo() -> None:
    """10,000 × 20,000 is two by three blocks; a factor and its root each in fp32 for both sides of every block."""
    assert blocks_of(matrices_of([(20_000, 10_000)])) == {
        (8192, 8192): 2,
        (1808, 8192): 2,
        (3616, 8192): 1,
        (1808, 3616): 1,
    }
    assert preconditioners((64, 256)) == 2 * 4 * (64**2 + 256**2)
    assert preconditioners((10_000, 8192)) == 8 * (2 * 8192**2 + 1808**2 + 8192**2)


def test_shampoo_in_a_step() -> None:
    """Ranks share out matrices and their preconditioners; of Llama's layers those of 4096 × 6144, 4096², 28672 and 14336."""
    alone, shared = (simulate(job(optimizer="shampoo", data_parallel=hook)) for hook in ("ddp", "zero1"))
    adam = summarise(simulate(job(optimizer="adam"))).worst.kinds["optimizer"]
    states = 32 * sum(preconditioners((4096, columns)) for columns in (6144, 4096, 28672, 14336))
    assert summarise(shared).worst.kinds["optimizer"] - adam == pytest.approx(states / 8, rel=1e-6)
    first, eighth = (summarise(each).breakdown["optimizer"] for each in (alone, shared))
    assert first > 4 * eighth
    assert muon_flops(job(optimizer="shampoo", data_parallel="ddp")) > 30 * 32 * 4096 * 4096 * 28672


def muon_flops(asked: Job) -> float:
    """Of a rank's update."""
    program = lower(asked.model, asked.resolve())
    blocks = [op.work for op in program.cohorts[0].ops if isinstance(op.work, Block) and op.work.name == "optimizer"]
    runs = [run for block in blocks for run in block.runs]
    return sum(run.times * sum(item.flops for item in run.items if isinstance(item, Kernel)) for run in runs)


def test_muon_in_a_step() -> None:
    """Ranks that shard states share out the matrices; Adam's second moment of the embedding, the head and norms comes besides."""
    alone, shared = (muon_flops(job(optimizer="muon", data_parallel=hook)) for hook in ("ddp", "zero1"))
    # of 32 layers qkv 4096 × 6144, output 4096², up 4096 × 28672 and down 4096 × 14336
    columns = [6144, 4096, 28672, 14336]
    assert alone == 32 * 5 * sum(4 * 4096**2 * n + 2 * 4096**3 for n in columns)
    assert shared == alone / 8
    muon, adam = (summarise(simulate(job(optimizer=name))) for name in ("muon", "adam"))
    assert muon.step_seconds > adam.step_seconds
    matrices = 32 * 4096 * sum(columns)
    spared = adam.worst.kinds["optimizer"] - muon.worst.kinds["optimizer"]
    assert spared == pytest.approx(4 * matrices / 8, rel=1e-3)


def test_experts_are_dealt_out_among_the_ranks_that_have_them() -> None:
    """Mixtral on 16 GPUs with ep = 4: of 8 experts in 32 layers a rank has 2, with matrices of 4096 × 28672 (gate and up) and
    4096 × 14336; four ranks have the same experts.
    """
    plan = {"global_batch": 16, "sequence": 2048, "ep": 4, "optimizer": "muon"}
    jobs = (
        read_job(model="mixtral-8x7b", cluster="dgx-h100", nodes=2, plan=plan | {"data_parallel": hook})
        for hook in ("ddp", "zero1")
    )
    (alone, shared), every = map(muon_flops, jobs), [4096, 14336, 28672]
    each = {columns: 5 * (4 * 4096**2 * columns + 2 * 4096**3) for columns in every}
    qkv, output = (5 * (4 * 4096**2 * columns + 2 * 4096**3) for columns in (6144, 4096))
    experts = 32 * 2 * (each[28672] + each[14336])
    router = 5 * (4 * 8**2 * 4096 + 2 * 8**3)
    assert alone == 32 * (qkv + output + router) + experts
    assert shared == 32 * (qkv + output + router) / 16 + experts / 4


@pytest.mark.parametrize(
    ("kind", "params", "plan"),
    [
        ("Lion", {}, {"optimizer": "lion"}),
        ("Muon", {}, {"optimizer": "muon"}),
        ("AdamW", {}, {"optimizer": "adam"}),
        ("SGD", {"momentum": 0.9}, {"optimizer": "momentum", "fused_optimizer": False}),
        ("SGD", {}, {"optimizer": "sgd", "fused_optimizer": False}),
    ],
)
def test_the_optimizer_of_a_ds_config_is_honoured(
    tmp_path: Path, kind: str, params: dict[str, Any], plan: dict[str, Any]
) -> None:
    path = tmp_path / "ds_config.json"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": kind, "params": params},
    }
    path.write_text(json.dumps(config | {"bf16": {"enabled": True}}))
    asked = read_job(None, from_deepspeed=path, **LLAMA)
    assert {field: getattr(asked.plan, field) for field in plan} == plan


@pytest.mark.parametrize(
    ("plan", "states", "traffic"),
    [
        # fp32 gradient, two states and the master read and written; its copy; the norm, and fp16's scale
        ({"kernels": "apex", "precision": "fp16"}, 12, (2 + 4) + 2 * 4 + 4 + (4 + 2 * 12) + (4 + 2)),
        # Apex's FusedAdam keeps fp32 states of what it is given: the gradient read, states and weights read and written
        ({"kernels": "apex", "precision": "fp16", "master_weights": False}, 8, 2 + (2 + 2 * 8 + 2 * 2)),
        # PyTorch's keeps states of the weights' type; it scales gradients in every step
        ({"kernels": "torch", "master_weights": False}, 4, 2 + 2 * 2 + (2 + 2 * 4 + 2 * 2)),
        ({"kernels": "torch", "master_weights": False, "optimizer": "momentum"}, 2, 2 + 2 * 2 + (2 + 2 * 2 + 2 * 2)),
    ],
)
def test_weights_of_16_bits_are_updated_as_they_are(plan: dict[str, Any], states: float, traffic: float) -> None:
    asked = Plan(**plan)
    assert (asked.bytes_per_optimizer_state, sum(moved for _, moved in passes_of(asked))) == (states, traffic)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"master_weights": False, "precision": "fp32"}, "master_weights=false contradicts precision=fp32"),
        ({"master_weights": False, "data_parallel": "zero1"}, "master_weights=false contradicts data_parallel=zero1"),
        (
            {"master_weights": False, "data_parallel": "ddp", "gradients": "fp32"},
            "master_weights=false contradicts gradients=fp32",
        ),
        ({"master_weights": False, "deepspeed": {}}, "master_weights=false contradicts deepspeed"),
        (
            {"master_weights": False, "data_parallel": "ddp", "optimizer": "muon"},
            "master_weights=false is not simulated with optim",
        ),
        (
            {"master_weights": False, "data_parallel": "ddp", "kernels": "torch", "exp_avg_dtype": "fp32"},
            "exp_avg_dtype=fp32 contradicts master_weights=false",
        ),
        ({"optimizer": "adm"}, "'adm'; did you mean 'adam'"),
        ({"optimizer": "muon", "tp": 2}, "optimizer=muon with tp=2 is not simulated: it orthogonalises whole matrices"),
        ({"optimizer": "muon", "data_parallel": "zero3"}, "optimizer=muon with data_parallel=zero3 is not simulated"),
        ({"optimizer": "shampoo", "tp": 2}, "optimizer=shampoo with tp=2 .* it multiplies whole matrices by its preconditioners"),
        ({"optimizer": "shampoo", "data_parallel": "zero3"}, "optimizer=shampoo with data_parallel=zero3 is not simulated"),
        ({"optimizer": "lamb"}, "optimizer=lamb with data_parallel=zero1 is not simulated: it takes sums over whole tensors"),
        ({"optimizer": "adafactor", "data_parallel": "ddp", "fused_optimizer": True}, "which no framework has in one kernel"),
        ({"optimizer": "muon", "offload": {"optimizer": "cpu"}}, "optimizer=muon with offload is not simulated"),
        ({"optimizer": "lion", "exp_avg_dtype": "bf16"}, "exp_avg_dtype=bf16 contradicts optimizer=lion"),
    ],
)
def test_what_is_not_simulated_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        simulate(job(**plan))
    assert "\n" not in str(caught.value)


def test_every_optimizer_has_its_source() -> None:
    for name in optimizers:
        assert optimizer_called(name).operators
        assert any(mark in (optimizers[name].__doc__ or "") for mark in ("arXiv:", "torch/optim", "SGD with momentum"))
