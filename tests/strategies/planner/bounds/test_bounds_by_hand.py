"""Parts of bounds, by hand: what streams of the first rank exchange, what passes NICs, what is held when passes begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sim.analysis.summary import summarise
from sim.grid import Grid
from sim.program import CACHED, COMPUTE, Block, Cohort, Collective, Memory, Op, Program, Ref, Run
from strategies.planner.bounds.critical_path import critical
from strategies.planner.bounds.every_plan import SLACK
from strategies.planner.bounds.exchange_bound import Exchange
from strategies.planner.bounds.layer_cost_table import inside, priced_on, pricing_of
from strategies.planner.bounds.layer_layout import Layout, layout_of
from strategies.planner.bounds.memory_bound import least_memory
from strategies.planner.bounds.network_bound import Crossings, hosted_update
from strategies.planner.bounds.symmetric_groups import alike
from strategies.predict import prices_of, program_of, simulate
from strategies.read_job import read_job
from tests.sim.conftest import block
from tests.strategies.planner.bounds.test_bounds import CPU

# two chunks: seconds of streams in the first forward pass, another, a backward pass, the last one, the update; first gathers of
# each kind of pass
EXCHANGE = Exchange(
    begin=({"dp": 3.0}, {"dp": 4.0, "to host": 8.0}),
    forward=({"dp": 1.0}, {"dp": 2.0, "to host": 8.0}),
    backward=({"dp": 10.0}, {"dp": 20.0}),
    final=({"dp": 100.0, "pp": 5.0}, {"dp": 200.0}),
    updates=({"dp": 1000.0, "nvme read": 7000.0}, {"dp": 2000.0, "replica": 3000.0, "from host": 9000.0}),
    first=((3.0, 4.0), (6.0, 5.0)),
)


def plan(**fields: Any) -> Any:
    usual = {"schedule": "1f1b", "pp": 1, "microbatches": 5, "chunks": 1, "syncs_gradients": "every", "reshard": True}
    asked = usual | fields
    return SimpleNamespace(keeps_parameters=asked["syncs_gradients"] == "last", **asked)


def test_seconds_that_each_stream_is_busy() -> None:
    """Of 5 microbatches: 5 forward passes, 4 backward passes and the last one, an update; where gradients are reduced in the last
    microbatch only, forward passes gather once and parameters stay.
    """
    assert EXCHANGE.busy(plan()) == {
        "dp": 7 + 4 * 3 + 4 * 30 + 300 + 3000,
        "pp": 5.0,
        "to host": 40.0,
        "from host": 9000.0,
        "nvme read": 7000.0,
        "replica": 3000.0,
    }
    late = EXCHANGE.busy(plan(syncs_gradients="last"))
    assert (late["dp"], late["to host"]) == (7 + 120 + 300 + 3000, 8.0)
    both_ways = EXCHANGE.busy(plan(schedule="chimera", pp=2, microbatches=10))  # 5 of them through each copy
    assert both_ways["dp"] == 7 + 4 * 3 + 4 * 30 + 300 + 3000


def test_seconds_in_which_passes_wait_for_their_first_gather() -> None:
    """Every pass gathers; with gradients reduced last all but one of each two passes find the parameters there."""
    assert EXCHANGE.waiting(plan()) == 5 * (3 + 4 + 6 + 5)
    assert EXCHANGE.waiting(plan(syncs_gradients="last")) == (5 + 1) * (3 + 5)
    assert EXCHANGE.waiting(plan(syncs_gradients="last", reshard=False)) == 3 + 6
    assert EXCHANGE.waiting(plan(reshard=False, chunks=1)) == 5 * 3  # F B F B …: each forward pass gathers, no backward pass does


def test_seconds_of_the_update() -> None:
    """The busiest stream between ranks; after the last chunk's update its streams follow each other; hosts are beside."""
    assert EXCHANGE.updating == 3000.0
    assert EXCHANGE.last == 5000.0


def test_what_passes_the_nics_of_a_node(toy_job: Any, toy_profile: Any) -> None:
    """8 ranks on 2 nodes of 4: half of each byte comes from outside, through 4 NICs of 1 GB/s; of two groups (tp=2) through 2
    NICs each, of four (tp=4) through one each.
    """
    for degrees, groups in (({}, 1), ({"tp": 2}, 2), ({"tp": 4}, 4)):
        job = toy_job(4, 2, data_parallel="zero3", **degrees)
        dense, experts, alone, experts_alone = Crossings(job, toy_profile()).of(job.resolve())
        assert dense == pytest.approx(groups * 0.5 / (4 * 1e9))
        assert alone == pytest.approx(0.5 / (4 / groups * 1e9))
        assert (experts, experts_alone) == (0.0, 0.0)
    inside = toy_job(8, 1, data_parallel="zero3")
    assert Crossings(inside, toy_profile()).of(inside.resolve()) == (0, 0, 0, 0)


def test_few_nics_are_shared_and_many_are_all_used(toy_job: Any, toy_profile: Any) -> None:
    """8 ranks on 2 nodes of 4 GPUs: with one NIC all of it passes that; with 8 NICs every GPU has two."""
    for nics, rate in ((1, 1e9), (2, 2e9), (8, 8e9)):
        job = toy_job(4, 2, node={"nics": nics}, data_parallel="zero3")
        dense, _, alone, _ = Crossings(job, toy_profile()).of(job.resolve())
        assert dense == alone == pytest.approx(0.5 / rate)


def test_experts_pass_the_nics_by_groups_of_their_own(toy_job: Any, toy_profile: Any) -> None:
    """ep=4 in each of two nodes: the two ranks that have the same experts are on different nodes, a NIC for each of 4 groups."""
    experts = {"experts": 8, "chosen": 2, "ffn": 64}
    job = toy_job(4, 2, model={"experts": experts}, ep=4, data_parallel="zero3")
    dense, spread, alone, spread_alone = Crossings(job, toy_profile()).of(job.resolve())
    assert (dense, alone) == (pytest.approx(0.5 / 4e9), pytest.approx(0.5 / 4e9))
    assert (spread, spread_alone) == (pytest.approx(4 * 0.5 / 4e9), pytest.approx(0.5 / 1e9))


def test_cpus_of_a_node_are_shared_by_its_ranks(toy_job: Any) -> None:
    """Adam moves 28 bytes per parameter: gradient, weight, and states there and back; 4 ranks one after the other."""
    seconds = {}
    for gpus, pp in ((1, 1), (4, 1), (4, 4)):
        node, plan = {"cpu": CPU | {"efficiency": 0.5}}, {"data_parallel": "zero1", "offload": {"optimizer": "cpu"}, "pp": pp}
        job = toy_job(gpus, 1, {"tied": False}, node, **plan)
        seconds[gpus, pp] = hosted_update(job, job.resolve())
    assert seconds[1, 1] * 20e9 * 0.5 == pytest.approx(28.0)
    assert seconds[4, 1] == pytest.approx(4 * seconds[1, 1])
    assert seconds[4, 4] == pytest.approx(seconds[1, 1])  # the first stage is one rank
    plain = toy_job(4, 1, node={"cpu": CPU}, data_parallel="zero1")
    assert hosted_update(plain, plain.resolve()) == 0.0


def test_layers_are_priced_on_the_axes_along_which_they_communicate(toy_job: Any) -> None:
    """tp=2 beside dp=4: groups of 2; norms that are synchronised over dp bring all 8 in."""
    assert inside(toy_job(8, tp=2).resolve()).world == 2
    assert inside(toy_job(8).resolve()).world == 1


def test_groups_that_are_not_alike_are_priced_by_the_quickest() -> None:
    """tp=4 on two nodes of 6: ranks 4 to 7 meet over the NICs, the other two groups inside a node, as on one node of 4."""
    seconds = {}
    for gpus, nodes in ((4, 1), (6, 2)):
        job = read_job(
            overrides={"cluster.node.gpus": gpus, "cluster.node.nics": gpus},
            model={"name": "small", "hidden": 64, "layers": 4, "heads": 8, "vocabulary": 512, "context": 32},
            cluster="dgx-a100",
            nodes=nodes,
            plan={"tp": 4, "accumulation": 1},
        )
        grid, alone = priced_on(job.cluster, job.resolve())
        assert alone == (gpus == 6)
        tensor = Block("layer", (Run(1, (Collective("all_reduce", 1e8, "tp", "activations"),)),))
        seconds[gpus] = pricing_of(job, grid, alone, [Op(COMPUTE, tensor)], prices_of(job)).block(tensor, 0).busy
    assert seconds[6] == pytest.approx(seconds[4], rel=1e-9)


# -- memory ----------------------------------------------------------------------------------------------------------------


def held(ops: list[Op], toy_profile: Any, resident: Memory = (), reserve: float = 0.0) -> float:
    profile = toy_profile(overhead={"context": "0 B", "communicator": "0 B", "reserve": reserve})
    cohort = Cohort({}, ops, resident=resident)
    program = Program(Grid.of(), [cohort], 1, 1, "bf16", 1, 1)
    return least_memory(program, SimpleNamespace(profile=profile)) / (1 - SLACK)  # type: ignore[arg-type]


def compute(*after: int, take: float = 0.0, free: float = 0.0) -> Op:
    refs = tuple(Ref(0, number) for number in after)
    return Op(COMPUTE, block(1.0), refs, (("activation", take),), (("activation", free),))


def other(*after: int, take: float = 0.0, free: float = 0.0) -> Op:
    refs = tuple(Ref(0, number) for number in after)
    return Op("dp", block(1.0), refs, (("temporary", take),), (("temporary", free),))


def test_passes_take_and_give_back_in_their_order(toy_profile: Any) -> None:
    """10 stay; 5 and 7 are there at once, then 12 after 7 is gone; the largest moment is 10 + 5 + 12."""
    ops = [compute(take=5.0), compute(take=7.0, free=7.0), compute(take=12.0, free=12.0), compute(take=1.0)]
    assert held(ops, toy_profile, (("parameter", 10.0), (CACHED, 99.0))) == pytest.approx(27.0)
    assert held([], toy_profile, (("parameter", 10.0),)) == pytest.approx(10.0)
    assert held(ops, toy_profile, (("parameter", 10.0),), reserve=0.5) == pytest.approx(1.5 * 27.0)


def test_what_communication_takes_counts_from_the_pass_that_waits_for_it(toy_profile: Any) -> None:
    """A gather of 8 may begin late: it is there for the pass that waits for it, and for all that follow until it is freed."""
    gather = other(take=8.0)
    assert held([gather, compute(take=1.0, free=1.0)], toy_profile) == pytest.approx(1.0)
    assert held([gather, compute(0, take=1.0, free=9.0), compute(take=2.0)], toy_profile) == pytest.approx(9.0)
    assert held([gather, compute(take=5.0, free=5.0), compute(0, take=1.0)], toy_profile) == pytest.approx(9.0)


def test_what_communication_gives_back_is_gone_when_what_it_waits_for_is_over(toy_profile: Any) -> None:
    """A reduction after the first pass that frees its 8: they may be gone before the second pass begins."""
    first = compute(take=8.0)
    assert held([first, other(0, free=8.0), compute(take=3.0)], toy_profile) == pytest.approx(8.0)
    assert held([first, compute(take=3.0), other(1, free=8.0), compute(take=4.0)], toy_profile) == pytest.approx(11.0)
    assert held([first, other(0, take=6.0, free=8.0), compute(1, take=3.0)], toy_profile) == pytest.approx(8 + 6 - 8 + 3)


# -- passes ----------------------------------------------------------------------------------------------------------------


def test_a_pipeline_of_two_by_hand(toy_job: Any) -> None:
    """1F1B of 2 ranks and 2 microbatches. Forward 1 and 2 s, backward 3 and 5 s. Rank 1: F 1–3, B 3–8, F 8–10, B 10–15; rank 0:
    F 0–1, F 1–2, B 8–11, B 15–18.
    """
    resolved = toy_job(2, 1, pp=2, accumulation=2).resolve()
    layout = layout_of(resolved)
    tables = {"forward": [[1.0, 2.0]], "backward": [[3.0, 5.0]], "input": [[9.0, 9.0]], "weight": [[9.0, 9.0]]}
    paths = critical(resolved, layout, {name: np.array(table) for name, table in tables.items()})
    assert (paths.end.tolist(), paths.first.tolist()) == ([18.0], [18.0])
    assert (paths.final.tolist(), paths.chunks) == ([[15.0]], (0,))
    assert layout == Layout((0, 2, 4), ((0,), (1,)), False)
    assert (layout.ranks, layout.last) == (2, 1)


def test_results_are_sent_one_after_the_other_beside_passes() -> None:
    """Two stages, two microbatches, forward 1 s and backward 2 s, 1F1B: the last stage is done after 7 s, the first after 9. Sent
    forward in 3 s each, results are there after 4 and 7 s, not 5: passes of the last stage end after 5, 7, 8 and 10 s. Sent back
    in 1 s each, theirs are there after 8 and 11 s.
    """
    order, layout = plan(pp=2, microbatches=2), Layout((0, 1, 2), ((0,), (1,)))
    time = {"forward": np.ones((1, 2)), "backward": 2 * np.ones((1, 2)), "input": np.zeros((1, 2)), "weight": np.zeros((1, 2))}
    for sends, there, here in (({}, 7.0, 9.0), ({("F", 0): 3.0, ("B", 1): 1.0}, 10.0, 13.0)):
        paths = critical(order, layout, time, sends)
        assert (float(paths.end[0]), float(paths.first[0])) == (max(there, here), here)


def test_parameters_of_the_last_part_of_each_stage() -> None:
    """Three layers of 10 parameters, an embedding of 3 and a head of 4, over three stages: the first has two layers, or none."""
    kind: Any = SimpleNamespace(
        ends={"parameters": (3.0, 4.0), "experts": (0.0, 0.0)},
        sums={"parameters": np.array([0.0, 10.0, 20.0, 30.0]), "experts": np.zeros(4)},
    )
    stages = ((0,), (1,), (2,))
    assert Layout((0, 2, 3, 3), stages).last_part([kind]).tolist() == [[10.0, 10.0, 4.0]]
    assert Layout((0, 0, 2, 3), stages).last_part([kind]).tolist() == [[3.0, 10.0, 4.0]]


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [({"tp": 4}, True), ({"tp": 8}, True), ({"tp": 2, "dp": 4}, True), ({"tp": 3}, False), ({"tp": 6, "dp": 2}, False)],
)
def test_groups_of_a_switch_are_alike_where_they_do_not_straddle_nodes(
    toy_cluster: Any, degrees: dict[str, int], expected: bool
) -> None:
    world = 12 if 3 in degrees.values() or 6 in degrees.values() else 8
    grid = Grid.of(**degrees | ({} if "dp" in degrees else {"dp": world // degrees["tp"]}))
    assert alike(toy_cluster(4, world // 4), grid) is expected


def test_where_no_nic_is_between_nodes_nothing_is_bounded_by_nics() -> None:
    """A torus of GPUs whose links go from node to node."""
    job = read_job(
        model="gpt2-1.5b", cluster="examples/clusters/tpu-v4.yaml", plan={"global_batch": 4096, "data_parallel": "zero1"}
    )
    assert job.cluster.fabric.direct
    assert Crossings(job, prices_of(job).profile).of(job.resolve()) == (0.0, 0.0, 0.0, 0.0)


def test_segments_that_grow_need_no_reserve() -> None:
    """The bound of memory is of tensors alone, but for the context and communicators; otherwise a share of them more."""
    asked = {grows: {"auto": False, "global_batch": 8, "expandable_segments": grows} for grows in (True, False)}
    grown, lost = (read_job(model="gpt2-1.5b", cluster="dgx-h100", plan=plan) for plan in asked.values())
    prices = prices_of(grown)
    least, more = (least_memory(program_of(job.model, job.resolve()), prices) for job in (grown, lost))
    overhead = prices.profile.overhead
    fixed = (overhead.context + overhead.communicator) * (1 - SLACK)
    assert overhead.reserve > 0
    assert more - fixed == pytest.approx((least - fixed) * (1 + overhead.reserve), rel=1e-9)
    assert 0.9 < least / summarise(simulate(grown)).worst.peak <= 1
