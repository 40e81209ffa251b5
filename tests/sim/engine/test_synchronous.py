"""A CPU runs what it launches before it goes on; a GPU's host launches ahead of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.engine.player import run
from sim.program import Block, Cohort, Collective, Kernel, Op, Ref, Run
from tests.sim.conftest import block, kernel, program

WRAPPING = {"dp/all_gather": {"fixed": "250 ms"}}
# 4 ranks of 1 GB/s gather 4 GB: 3 rounds of 1 GB
GATHER = Collective("all_gather", 4e9, "dp", "gather", "ring/simple")


def ends(toy_cluster: Any, toy_prices: Any, ops: list[Op], **fields: Any) -> list[float]:
    return run(program(Cohort({}, ops), dp=4), toy_cluster(4).topology(), toy_prices(**fields)).end


def test_a_wrapper_of_a_collective_delays_a_cpu_and_is_hidden_by_a_gpu(toy_cluster: Any, toy_prices: Any) -> None:
    """After a second of compute: 3 s of transfers; a CPU is in PyTorch's wrapper for 0.25 s of them, a GPU's host was before."""
    ops = [Op("compute", block(1.0)), Op("dp", GATHER, (Ref(0, 0),))]
    assert ends(toy_cluster, toy_prices, ops) == pytest.approx([1.0, 4.0])
    assert ends(toy_cluster, toy_prices, ops, wrapping=WRAPPING) == pytest.approx([1.0, 4.0])
    assert ends(toy_cluster, toy_prices, ops, wrapping=WRAPPING, synchronous=True) == pytest.approx([1.0, 4.25])


def test_a_wrapper_is_launched_before_the_collective_that_nothing_hides(toy_cluster: Any, toy_prices: Any) -> None:
    """As the first op of a step it starts 0.25 s late, plus the launch of 0.1 s."""
    ops = [Op("dp", GATHER)]
    assert ends(toy_cluster, toy_prices, ops, wrapping=WRAPPING) == pytest.approx([3.25])
    assert ends(toy_cluster, toy_prices, ops, wrapping=WRAPPING, launch="100 ms") == pytest.approx([3.35])


def test_a_launch_is_part_of_each_kernel_of_a_cpu(toy_cluster: Any, toy_prices: Any) -> None:
    """Three kernels of 1 s, launched in 0.1 s each: one after the other on a CPU; a GPU waits for the first launch only."""
    ops = [Op("compute", block(1.0, 1.0, 1.0))]
    assert ends(toy_cluster, toy_prices, ops, launch="100 ms") == pytest.approx([3.1])
    assert ends(toy_cluster, toy_prices, ops, launch="100 ms", synchronous=True) == pytest.approx([3.3])


def test_a_collective_inside_a_block_takes_its_wrapper_with_it(toy_cluster: Any, toy_prices: Any) -> None:
    """Kernels of 1 s around a gather of 3 s whose wrapper takes 2.5 s: a GPU's host starts it at 2.5 s, a CPU 1 + 5.5 + 1 s."""
    slow = {"dp/all_gather": {"fixed": "2500 ms"}}
    ops = [Op("compute", Block("work", (Run(1, (kernel(1.0), GATHER, kernel(1.0))),)))]
    assert ends(toy_cluster, toy_prices, ops) == pytest.approx([5.0])
    assert ends(toy_cluster, toy_prices, ops, wrapping=slow) == pytest.approx([6.5])
    assert ends(toy_cluster, toy_prices, ops, wrapping=slow, synchronous=True) == pytest.approx([7.5])


def test_autograd_is_asked_for_each_matrix_of_a_split_backward_pass(toy_cluster: Any, toy_prices: Any) -> None:
    """Two gradients of 1 s, with outputs' gradients of 2 GB that were kept for them: 0.5 s for the call, 0.5 s at 4 GB/s. A GPU
    waits for the first call.
    """
    split = {"pp/weight_gradient": {"fixed": "500 ms", "rate": "4 GB/s"}}
    gradient = Kernel("memory", "qkv weight", "backward", 0.0, 1e12, kept=2e9)
    ops = [Op("compute", Block("weight gradient", (Run(2, (gradient,)),)))]
    assert ends(toy_cluster, toy_prices, ops) == pytest.approx([2.0])
    assert ends(toy_cluster, toy_prices, ops, wrapping=split) == pytest.approx([3.0])
    assert ends(toy_cluster, toy_prices, ops, wrapping=split, synchronous=True) == pytest.approx([4.0])
    whole = [Op("compute", Block("backward", (Run(2, (replace(gradient, kept=0.0),)),)))]
    assert ends(toy_cluster, toy_prices, whole, wrapping=split, synchronous=True) == pytest.approx([2.0])
