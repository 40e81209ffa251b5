"""Steps on clusters of GPUs that differ, with times worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.analysis.breakdown import breakdowns
from sim.analysis.summary import summarise
from sim.engine.effects import read_effects
from sim.engine.player import run
from sim.pricing.fleet_prices import FleetPrices
from sim.pricing.prices import Prices
from sim.program import Block, Cohort, Collective, Kernel, Op, Program, Ref, Run, Send
from sim.timeline import Timeline
from tests.conftest import GPU, NONE
from tests.sim.conftest import block, kernel, program
from topologies.cluster import Cluster
from topologies.cluster_files import inline_cluster

FAST = GPU | {"name": "fast", "memory_bandwidth": "2 TB/s", "peak": {"bf16": "2 TFLOP/s"}, "memory": "2 PB"}


def cluster(gpus: int = 1, slow: int = 1, fast: int = 1, fast_first: bool = False) -> Cluster:
    """Nodes with links of 1 GB/s, then (or before) nodes of GPUs that are twice as fast, with links of 2 GB/s."""
    usual = {"gpus": gpus, "wiring": "switch", "pcie": "1 TB/s", "nics": gpus, "latency": NONE}
    groups = [
        {"count": count, "node": usual | {"gpu": gpu, "nvlink": rate, "nic": rate}}
        for count, gpu, rate in ((slow, GPU, "1 GB/s"), (fast, FAST, "2 GB/s"))
    ]
    groups = groups[::-1] if fast_first else groups
    return inline_cluster({"nodes": groups, "fabric": {"kind": "single", "hop_latency": "0 s"}}, "mixed")


@pytest.fixture
def fleet(toy_profile) -> Callable[..., FleetPrices]:
    """Prices of both; keyword arguments replace fields of the fast GPU's profile."""

    def make(**fast: Any) -> FleetPrices:
        kinds = cluster().gpu_kinds
        return FleetPrices(
            [Prices(toy_profile(), kinds[0]), Prices(toy_profile(**{"name": "fast", "gpu": "fast"} | fast), kinds[1])]
        )

    return make


def ends(timeline: Timeline) -> dict[int, list[float]]:
    """When the ops of each lane end, by its first rank."""
    for parts in breakdowns(timeline):
        assert sum(parts.values()) == timeline.step
    numbers = {lane.rank: [number for number, _ in timeline.ops(at)] for at, lane in enumerate(timeline.lanes)}
    return {rank: [timeline.end[number] for number in each] for rank, each in numbers.items()}


def two_replicas() -> Program:
    """Four seconds of compute on the slow GPU, then an all-reduce of 2 GB."""
    sync = Collective("all_reduce", 2e9, "dp", "gradients")
    return program(Cohort({}, [Op("compute", block(4.0)), Op("dp", sync, (Ref(0, 0),))]), dp=2)


def test_the_fast_replica_waits_and_the_slow_nic_decides(fleet) -> None:
    timeline = run(two_replicas(), cluster().topology(), fleet())
    assert ends(timeline) == {0: [4.0, 6.0], 1: [2.0, 6.0]}  # a ring of two sends S each way: 2 GB at 1 GB/s
    slow, fast = summarise(timeline).gpu_kinds
    assert (slow.gpu, slow.ranks, slow.idle, slow.node) == ("toy", 1, 2.0, 0)
    assert (fast.gpu, fast.ranks, fast.idle, fast.node) == ("fast", 1, 4.0, 1)


def test_mfu_is_of_the_peaks_of_all_gpus(fleet) -> None:
    step = two_replicas()
    step.model_flops = 9e12
    assert summarise(run(step, cluster().topology(), fleet())).mfu == 9e12 / (1e12 + 2e12) / 6.0


def test_lanes_are_as_many_as_ranks_that_differ(fleet) -> None:
    """64 nodes are played as two lanes, equal to 512 to the bit."""
    sum_up, sync = Collective("all_reduce", 8e9, "tp", "tp"), Collective("all_reduce", 2e9, "dp", "gradients")
    layer = Block("forward", (Run(3, (kernel(1.0), sum_up)),))
    step = program(Cohort({}, [Op("compute", layer), Op("dp", sync, (Ref(0, 0),))]), tp=8, dp=64)
    place = cluster(8, 32, 32).topology()
    folded = run(step, place, fleet())
    assert [(lane.rank, lane.ranks) for lane in folded.lanes] == [(0, 256), (256, 256)]
    # a ring of eight sends 2·7/8 of 8 GB: 14 s at 1 GB/s, 7 s at 2 GB/s
    assert [folded.end[0], folded.end[2]] == [3 * (1 + 14.0), 3 * (0.5 + 7.0)]
    unfolded = run(step, place, fleet(), fold=False)
    assert unfolded.step == folded.step
    assert {(unfolded.end[2 * rank], unfolded.end[2 * rank + 1]) for rank in range(256)} == {(folded.end[0], folded.end[1])}
    assert {(unfolded.end[2 * rank], unfolded.end[2 * rank + 1]) for rank in range(256, 512)} == {(folded.end[2], folded.end[3])}


def test_each_group_inside_a_layer_has_its_own_links(toy_profile) -> None:
    """The fast node comes first: its ranks gather 8 GB at 2 GB/s in 3.5 s, and the slow node's at 1 GB/s in 7 s."""
    place = cluster(8, fast_first=True)
    fast, slow = place.gpu_kinds
    prices = FleetPrices([Prices(toy_profile(name="fast", gpu="fast"), fast), Prices(toy_profile(), slow)])
    layer = Block("forward", (Run(3, (kernel(1.0), Collective("all_gather", 8e9, "tp", "gather"))),))
    timeline = run(program(Cohort({}, [Op("compute", layer)]), tp=8, dp=2), place.topology(), prices)
    assert ends(timeline) == {0: [3 * (0.5 + 3.5)], 8: [3 * (1.0 + 7.0)]}


def test_stages_of_a_pipeline_on_different_gpus(fleet) -> None:
    send = Send(2e9, 1, "activations")
    first = Cohort({"pp": 0}, [Op("compute", block(4.0)), Op("pp", send, (Ref(0, 0),))])
    second = Cohort({"pp": 1}, [Op("compute", block(4.0), (Ref(0, 1),))])
    timeline = run(program(first, second, pp=2), cluster().topology(), fleet())
    assert ends(timeline) == {0: [4.0, 6.0], 1: [8.0]}


def test_launches_are_those_of_each_host(fleet) -> None:
    """Ten kernels of 0.1 s (0.05 s on the fast GPU), launched in no time and in 0.2 s."""
    step = program(Cohort({}, [Op("compute", Block("forward", (Run(10, (kernel(0.1),)),)))]), dp=2)
    timeline = run(step, cluster().topology(), fleet(launch="200 ms"))
    assert timeline.end == pytest.approx([1.0, 10 * 0.2 + 0.05], abs=1e-9)


def test_protocols_are_those_that_all_of_a_group_have(fleet, toy_profile) -> None:
    """LL128 only among GPUs of one architecture, and what each group starts with is its own GPUs'."""
    quick = {"base": "0 s", "links": {kind: {"efficiency": 1.0, "latency": "0 s"} for kind in ("nvlink", "nic")}}
    prices = fleet(protocols={"ll128": quick}, collective_launch="3 s")
    one, two = cluster(2).topology(), cluster().topology()
    both = Cohort({}, [Op("dp", Collective("all_reduce", 1e9, "dp", "x"))])
    inside = Cohort({}, [Op("tp", Collective("all_reduce", 1e9, "tp", "x"))])
    assert run(program(both, dp=2), two, prices).step == 3.0 + 1.0  # the most of both
    assert ends(run(program(inside, tp=2, dp=2), one, prices)) == {0: [1.0], 2: [0.5]}  # LL128 among fast GPUs


def test_memory_is_of_each_ranks_own_gpu(fleet) -> None:
    step = program(Cohort({}, [Op("compute", block(1.0))], resident=(("parameter", 1.5e15),)), dp=2)
    summary = summarise(run(step, cluster().topology(), fleet()))
    assert not summary.fits
    assert (summary.memory_capacity, summary.worst.rank) == (1e15, 0)
    assert "out of memory only on toy (rank 0 on node 0)" in summary.notes
    smaller = program(Cohort({}, [Op("compute", block(1.0))], resident=(("parameter", 0.9e15),)), dp=2)
    assert summarise(run(smaller, cluster().topology(), fleet())).fits


@pytest.mark.parametrize("missing", [False, True])
def test_a_missing_nic_is_the_effect_of_a_lost_one(toy_cluster, toy_prices, missing: bool) -> None:
    """Four dp groups of two nodes; two of them share a NIC: 1 GB by each over it take 2 s."""
    sync = Collective("all_reduce", 1e9, "dp", "gradients")
    step = program(Cohort({}, [Op("dp", sync)]), tp=4, dp=2)
    usual = toy_cluster(4, 2, nvlink="1 TB/s")
    lost = [{"count": 1}, {"count": 1, "missing": ["nic 2"]}]
    data = {"node": usual.node.model_copy(), "nodes": lost, "fabric": {"kind": "single", "hop_latency": "0 s"}}
    if missing:
        timeline = run(step, inline_cluster(data, "lost").topology(), toy_prices())
    else:
        timeline = run(step, usual.topology(), toy_prices(), effects=read_effects("node 1 nic 2: lost", "effects"))
    assert timeline.step == pytest.approx(2.0, rel=0.003)


def test_a_lower_clock_slows_down_arithmetic_and_not_memory(toy_profile) -> None:
    """A product of 1e12 FLOPs and a kernel of 1 TB of traffic, at half the clock and at all of it."""
    node = {
        "gpu": GPU,
        "gpus": 1,
        "wiring": "switch",
        "nvlink": "1 GB/s",
        "pcie": "1 TB/s",
        "nics": 1,
        "nic": "1 GB/s",
        "latency": NONE,
    }
    groups = [{"count": 1, "node": node}, {"count": 1, "node": node, "clock": 0.5}]
    clocked = inline_cluster({"nodes": groups, "fabric": {"kind": "single", "hop_latency": "0 s"}}, "clocked")
    assert [gpu.name for gpu in clocked.gpu_kinds] == ["toy", "toy at 0.5"]
    product = Kernel("gemm", "product", "forward", 1e12, 0.0, "bf16", (1, 1000, 1000, 500_000))
    prices = FleetPrices([Prices(toy_profile(), gpu) for gpu in clocked.gpu_kinds])
    step = program(Cohort({}, [Op("compute", Block("forward", (Run(1, (product, kernel(3.0))),)))]), dp=2)
    timeline = run(step, clocked.topology(), prices)
    assert timeline.end == pytest.approx([1.0 + 3.0, 2.0 + 3.0], rel=1e-6)
