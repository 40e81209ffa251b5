"""Sequences with collectives beside kernels: the fused numbers against counts by hand and against playing item by item."""

from __future__ import annotations

from typing import Any

import pytest

from sim.analysis.breakdown import breakdown
from sim.clock import on_grid
from sim.engine.blocks.splitting import expand
from sim.engine.player import run
from sim.pricing.block_costs import fused
from sim.program import COMPUTE, Block, Cohort, Collective, Item, Join, Kernel, Op, Program, Run, Start

RING = Collective("all_reduce", 8e9, "tp", "ring", "ring")


def kernel(seconds: float) -> Kernel:
    """On the toy GPU of 1 TB/s."""
    return Kernel("memory", "kernel", "forward", 0.0, seconds * 1e12)


def play(items: tuple[Item, ...], seconds: dict[type, float], launch: float = 0.0, slowdown: float = 1.0) -> Any:
    return fused([(item, seconds.get(type(item), 0.0)) for item in items], launch, slowdown)


@pytest.mark.parametrize(("compute", "communication"), [(3.0, 2.0), (2.0, 3.0)])
def test_a_kernel_hides_a_collective_or_a_part_of_it(compute: float, communication: float) -> None:
    done = play((Start(RING), kernel(1), Join(RING)), {Start: communication, Kernel: compute})
    assert done.busy == max(compute, communication)
    assert done.parts.get(("tp", "ring"), 0.0) == max(0.0, communication - compute)
    assert sum(done.parts.values()) == done.busy


def test_a_collective_beside_slows_kernels_down() -> None:
    """1.25 times slower: 2 s of communication do 1.6 s of the kernel's 4 s; all of 1 s takes 1.25 s."""
    both = play((Start(RING), kernel(1), Join(RING)), {Start: 2.0, Kernel: 4.0}, slowdown=1.25)
    assert both.busy == pytest.approx(2.0 + 4.0 - 1.6)
    assert both.kernels == pytest.approx(2.4)
    short = play((Start(RING), kernel(1), Join(RING)), {Start: 2.0, Kernel: 1.0}, slowdown=1.25)
    assert (short.busy, short.kernels, short.parts["slowdown", "kernel"]) == (2.0, 0.0, 0.25)
    half = play((Start(RING), kernel(1), Join(RING)), {Start: 2.0, Kernel: 3.0}, slowdown=2.0)  # 2 s do 1 s of the 3
    assert (half.busy, half.kernels, half.parts["slowdown", "kernel"]) == (4.0, 2.0, 1.0)
    never = play((Start(RING), kernel(1), Join(RING)), {Start: 2.0, Kernel: 3.0})
    assert (never.busy, never.kernels) == (3.0, 3.0)


def test_a_collective_waits_for_what_was_launched_before() -> None:
    """1 s, then 2 s beside another 1 s: 3 s; the same started first: 2 s."""
    seconds = {Start: 2.0, Kernel: 1.0}
    assert play((kernel(1), Start(RING), kernel(1), Join(RING)), seconds).busy == 3.0
    assert play((Start(RING), kernel(1), kernel(1), Join(RING)), seconds).busy == 2.0


def test_collectives_beside_follow_each_other() -> None:
    other = Collective("all_gather", 1.0, "tp", "other")
    items = (Start(RING), Start(other), kernel(1), Join(RING), kernel(1), Join(other))
    assert play(items, {Start: 2.0, Kernel: 1.0}).busy == 4.0


def test_the_host_launches_one_after_the_other() -> None:
    """A GPU that never waits takes 2 s; one that the host is late for starts the collective after 1 s, the kernel after 2 s."""
    done = play((Start(RING), kernel(1), Join(RING)), {Start: 2.0, Kernel: 0.5}, launch=1.0)
    assert (done.busy, done.critical, done.host) == (2.0, 3.0, 2.0)


def test_a_collective_may_slow_kernels_by_a_factor_of_its_own() -> None:
    """1.25 in place of 2: 2 s of it do 1.6 s of the kernel's 4 s; then one of NCCL's slows by 2 again."""
    other = Collective("all_to_all", 8e9, "ep", "exchange", "ring", sms=20)
    items = (Start(other), kernel(1), Join(other), Start(RING), kernel(1), Join(RING))
    works = [(item, {Start: 2.0, Kernel: 4.0}.get(type(item), 0.0)) for item in items]
    assert fused(works, 0.0, 2.0, slowing={other: 1.25}).parts["slowdown", "kernel"] == pytest.approx(0.4 + 1.0)
    assert fused(works, 0.0, 2.0, slowing={other: 1.0}).parts["slowdown", "kernel"] == 1.0


@pytest.mark.parametrize("slowdown", [1.0, 1.2])
@pytest.mark.parametrize("launch", ["0 s", "10 ms"])
@pytest.mark.parametrize("sms", [None, 0])
def test_fused_is_what_playing_item_by_item_gives(toy_job, toy_prices, slowdown: float, launch: str, sms: int | None) -> None:
    other = Collective("all_gather", 1e9, "tp", "other", "ring", sms=sms)
    items = (
        kernel(0.5),
        Start(RING),
        kernel(3),
        Join(RING),
        RING,
        Start(other),
        Start(other),
        kernel(0.2),
        Join(other),
        Join(other),
    )
    job = toy_job(8, tp=8)

    def program() -> Program:
        cohort = Cohort({})
        for _ in range(2):
            cohort.add(Op(COMPUTE, Block("forward", (Run(3, items), Run(1, (kernel(1),)))), free=(("temporary", 1.0),)))
        return Program(job.resolve().grid, [cohort], 0.0, 0.0, "bf16", 1.0, 1)

    prices = toy_prices(slowdown=slowdown, launch=launch)
    whole, cut = (run(variant, job.cluster.topology(), prices) for variant in (program(), expand(program(), {0})))
    assert cut.step == pytest.approx(whole.step, abs=10 * on_grid(2**-39))
    assert len(cut.end) > len(whole.end)
    for name, seconds in breakdown(whole).items():
        assert breakdown(cut)[name] == pytest.approx(seconds, abs=1e-9), name
