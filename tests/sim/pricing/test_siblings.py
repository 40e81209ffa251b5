"""Sibling groups that differ: each has the algorithm of its own place, ranks that differ have lanes of their own."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from sim.engine.player import run
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.pricing.transfers import algorithm_choice
from sim.pricing.transfers.aggregation import serves
from sim.pricing.transfers.algorithm_choice import AlgorithmChoice
from sim.pricing.transfers.link_merging import wire
from sim.pricing.transfers.loads import _loads
from sim.pricing.transfers.sibling_groups import Membership, lanes, placements
from sim.pricing.transfers.traffic import Traffic
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.pricing.transfers.wiring import endpoints
from sim.program import Block, Cohort, Collective, Kernel, Op, Program, Ref, Run, Send
from sim.timeline import Timeline
from strategies.job import Job
from strategies.predict import simulate
from strategies.read_job import read_job
from topologies.cluster_files import cluster_names, load_cluster
from topologies.reading import UserError

MODEL: dict[str, Any] = {
    "name": "odd",
    "hidden": 1152,
    "layers": 12,
    "heads": 144,
    "ffn": 2304,
    "vocabulary": 4608,
    "context": 144,
}
AXES = ("tp", "cp", "ep", "dp", "pp")
ONE = Block("forward", (Run(1, (Kernel("memory", "1 s", "forward", 0.0, 1e12),)),))


def job(cluster: str, nodes: int, node: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **plan: Any) -> Job:
    changed = {"based_on": cluster, "node": node} if node else cluster
    return read_job(model=model or MODEL, cluster=changed, nodes=nodes, plan={"microbatch": 1} | plan)


def played(timeline: Timeline) -> set[tuple[str, tuple[int, ...]]]:
    """Algorithms, each with the numbers of the sibling groups that are played together by it."""
    return {(cost.traffic.algorithm, cost.traffic.groups) for cost in timeline.cost if isinstance(cost, TransferCost)}


def talking(work: Collective, **degrees: int) -> Program:
    return Program(Grid.of(**degrees), [Cohort({}, [Op(work.axis, work), Op("compute", ONE, (Ref(0, 0),))])], 1, 1, "bf16", 1, 1)


# -- applicability ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "nodes", "plan"),
    [
        ("gb200-nvl72", 2, {"tp": 16}),  # the fifth group is on two nodes
        ("aws-p5", 3, {"tp": 6, "order": "dp-tp-pp-cp-ep"}),
        ("dgx-h100", 3, {"tp": 6}),
        ("dgx-h100", 3, {"tp": 2, "order": "dp-tp-pp-cp-ep"}),  # dp ranks 0 … 11, then 12 … 23
    ],
)
def test_later_groups_on_several_switches_play(cluster, nodes, plan) -> None:
    assert simulate(job(cluster, nodes, **plan)).step > 0


def test_each_group_has_the_algorithm_of_its_own_place(toy_cluster, toy_prices) -> None:
    """tp=5 on nodes of 8 with a switch that adds: four of eight groups are below one switch, the others are spread 3 + 2, 1 + 4,
    4 + 1 and 2 + 3 over two nodes.
    """
    program = talking(Collective("all_reduce", 1e9, "tp", "sums", algorithm="in_switch,ring"), tp=5, dp=8)
    prices = toy_prices(protocols={"in_switch": {"base": "0 s", "links": {"nvlink": {"efficiency": 1.0, "latency": "0 s"}}}})
    timeline = run(program, toy_cluster(8, 5, multicast=True).topology(), prices)
    ring = "all_reduce/ring"
    assert played(timeline) == {("all_reduce/in_switch", (0, 2, 5, 7)), (ring, (1,)), (ring, (3,)), (ring, (4,)), (ring, (6,))}


def test_an_algorithm_that_is_asked_for_must_work_for_all_groups(toy_cluster, toy_prices) -> None:
    program = talking(Collective("all_reduce", 1e9, "tp", "sums", algorithm="in_switch"), tp=5, dp=8)
    with pytest.raises(UserError, match="the members are below 2 switches, not one"):
        run(program, toy_cluster(8, 5, multicast=True).topology(), toy_prices())


def test_whatever_resolves_plays() -> None:
    """Random degrees and orders on every cluster of the catalogue: each group finds an algorithm."""
    random, steps = Random(15), []
    for cluster in [name for name in cluster_names() for _ in range(8)]:
        pp, cp = random.choice([1, 2, 3, 4]), random.choice([1, 1, 2, 3])
        plan = dict(
            tp=random.choice([2, 3, 4, 6, 8, 9, 12, 16]),
            cp=cp,
            pp=pp,
            accumulation=pp,
            data_parallel=random.choice(["ddp", "zero1", "zero3"]),
            order="-".join(random.sample(AXES, len(AXES))),
            precision="fp32" if "cpu" in cluster else "fp16",
        )
        try:
            asked = job(cluster, random.choice([1, 2, 3]), model=MODEL | {"layers": pp}, **plan)
            asked.resolve()
        except UserError:
            continue
        steps.append(simulate(asked).step)
    assert len(steps) > 40
    assert min(steps) > 0


# -- lanes -----------------------------------------------------------------------------------------------------------------


def test_groups_that_differ_take_their_own_time(toy_cluster, toy_prices) -> None:
    """tp=2 on nodes of 3 GPUs: groups 0 and 2 gather inside a node at 1 GB/s, group 1 between nodes at 0.5 GB/s."""
    program = talking(Collective("all_gather", 2e9, "tp", "gather"), tp=2, dp=3)
    timeline = run(program, toy_cluster(3, 2, nic="0.5 GB/s").topology(), toy_prices())
    assert [(lane.rank, lane.ranks) for lane in timeline.lanes] == [(0, 4), (2, 2)]
    assert [(row.start, row.end) for row in timeline.rows()] == [(0, 1), (1, 2), (0, 2), (2, 3)]
    note = "ranks of a stage are not alike on this cluster: one of each kind is played, 2 per stage"
    assert note in timeline.op_costs.notes


def test_too_many_kinds_are_as_slow_as_the_slowest(toy_cluster, toy_prices, monkeypatch) -> None:
    monkeypatch.setattr("sim.engine.folding.MAX_UNFOLDED_OPS", 3)
    program = talking(Collective("all_gather", 2e9, "tp", "gather"), tp=2, dp=3)
    timeline = run(program, toy_cluster(3, 2, nic="0.5 GB/s").topology(), toy_prices())
    assert [(row.start, row.end) for row in timeline.rows()] == [(0, 2), (2, 3)]
    assert any("as in its slowest group" in note for note in timeline.op_costs.notes)


@pytest.mark.parametrize(
    ("cluster", "nodes", "node", "plan", "number", "near"),
    [
        ("dgx-a100", 4, {"gpus": 6, "nics": 6}, {"tp": 4, "sequence_parallel": True}, 4, 0.0),
        ("dgx-a100", 3, None, {"tp": 3, "data_parallel": "zero1"}, 9, 2e-3),  # traffic of one kind that meets unequal traffic
        ("dgx-h100", 3, None, {"tp": 6, "data_parallel": "zero3"}, 9, 2e-3),
        ("perlmutter", 3, None, {"tp": 6, "accumulation": 2}, 2, 0.0),
        ("perlmutter", 12, None, {"tp": 2, "pp": 4, "accumulation": 4}, 3, 0.0),
    ],
)
def test_one_of_each_kind_stands_for_all(cluster, nodes, node, plan, number, near) -> None:
    """The same times as with a lane for every rank, to the bit where traffic of one kind meets equal traffic."""
    asked = job(cluster, nodes, node, MODEL | {"layers": 4}, **plan)
    folded, unfolded = (simulate(asked, fold=fold) for fold in (True, False))
    assert len(folded.lanes) == number * plan.get("pp", 1)
    assert len(unfolded.lanes) == asked.cluster.gpus
    assert sum(lane.ranks for lane in folded.lanes) == asked.cluster.gpus
    ends = {lane.rank: [unfolded.end[op] for op, _ in unfolded.ops(number)] for number, lane in enumerate(unfolded.lanes)}
    for number, lane in enumerate(folded.lanes):
        assert [folded.end[op] for op, _ in folded.ops(number)] == pytest.approx(ends[lane.rank], rel=near, abs=0.0)


def test_ranks_are_alike_that_meet_alike() -> None:
    """Six ranks in three pairs, of which the second is of another kind, and in two triples of equal kind."""
    pairs = Membership(np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0]))
    triples = Membership(np.array([0, 1, 0, 1, 0, 1]), np.array([0, 0]))
    assert list(lanes([pairs, triples], np.zeros(6, np.int64), 6)) == [0, 0, 1, 1, 0, 0]
    unequal = Membership(np.array([0, 1, 0, 1, 0, 1]), np.array([0, 1]))
    assert list(lanes([pairs, unequal], np.zeros(6, np.int64), 6)) == [0, 1, 2, 3, 0, 1]
    assert lanes([pairs, unequal], np.zeros(6, np.int64), 3) is None


def test_lanes_split_until_groups_bring_together_the_same() -> None:
    """A chain of pairs: the odd kind of the first tells the second pair's ranks apart, and so on to the end."""
    even = Membership(np.array([0, 0, 1, 1, 2, 2]), np.array([1, 0, 0]))
    odd = Membership(np.array([0, 1, 1, 2, 2, 3]), np.array([0, 0, 0, 0]))
    assert list(lanes([even, odd], np.zeros(6, np.int64), 6)) == [0, 1, 2, 3, 4, 5]


def test_placements_are_ways_to_be_spread_over_nodes(toy_cluster) -> None:
    grid, topology = Grid.of(tp=4, dp=6), toy_cluster(6, 4).topology()
    assert placements(topology, grid, Traffic("", ("tp",), ())) == ((0, 2, 3, 5), (1, 4))
    assert placements(topology, grid, Traffic("", ("dp",), ())) == ((0, 1), (2, 3))
    assert placements(toy_cluster(4, 6).topology(), grid, Traffic("", ("tp",), ())) == ((),)


def test_groups_that_take_nearly_as_long_are_one_kind() -> None:
    """Of the 8 nodes of a stage some send to their own leaf of 20 and some to the next, which takes 1 % longer at most."""
    timeline = simulate(read_job(model="gpt3-175b", cluster="dgx-a100", nodes=64, plan=dict(tp=4, pp=8, accumulation=8)))
    assert len(timeline.lanes) == 8


@pytest.mark.parametrize(
    ("cluster", "nodes", "plan"),
    [
        ("aws-p4d", 3, {"tp": 2, "cp": 4}),  # two GPUs share a NIC
        ("aws-p4d", 4, {"pp": 8, "data_parallel": "zero1", "deepspeed": {}, "accumulation": 2, "order": "dp-tp-pp-cp-ep"}),
        ("aws-p4d", 4, {"tp": 8, "pp": 4, "data_parallel": "local_sgd", "local_steps": 3}),
        ("pcie-l40s", 2, {"tp": 2, "data_parallel": "diloco", "local_steps": 2, "accumulation": 2}),  # four share a PCIe switch
        (
            "perlmutter",
            8,
            {"tp": 4, "data_parallel": "zero_redundancy_optimizer", "accumulation": 3},
        ),
        ("perlmutter", 8, {"tp": 4, "pp": 4, "data_parallel": "zero3", "accumulation": 4, "order": "tp-cp-ep-pp-dp"}),
        ("dgx-2", 2, {"tp": 2, "data_parallel": "zero_redundancy_optimizer", "precision": "fp16"}),
    ],
    ids=str,
)
def test_folded_equals_unfolded_where_groups_share_links(cluster, nodes, plan) -> None:
    """What sibling groups share is in the price of each: a message that is cut in pieces fills its path the slower the less of a
    link it has.
    """
    asked = job(cluster, nodes, **plan)
    folded, unfolded = (simulate(asked, fold=fold) for fold in (True, False))
    assert len(unfolded.lanes) > len(folded.lanes)
    assert unfolded.step == folded.step


def test_a_long_chain_whose_hops_are_told_apart_by_siblings_plays_rank_by_rank() -> None:
    """72 ranks in a chain: hops beside those of the other chain are of other sorts, of which it has fewer when alone."""
    plan = {"tp": 2, "data_parallel": "zero_redundancy_optimizer", "order": "dp-tp-pp-cp-ep"}
    asked = job("dgx-a100", 24, {"gpus": 6, "nics": 1}, MODEL | {"layers": 2}, **plan)
    folded, unfolded = (simulate(asked, fold=fold) for fold in (True, False))
    assert unfolded.step == pytest.approx(folded.step, rel=0.05)


def test_links_of_equal_load_and_capacity_stay_apart_by_their_kind(toy_cluster) -> None:
    """A send between nodes crosses PCIe and NICs; where both have 1 GB/s they still have prices of their own."""
    topology = toy_cluster(1, nodes=2, pcie="1 GB/s", nic="1 GB/s").topology()
    wiring = wire(topology, Grid.of(pp=2), (Traffic("send/direct", (), (("pp", 0),), (("pp", 1),)),))
    assert sorted(set(wiring.kind)) == ["nic", "pcie"]
    assert len(wiring.kind) == len(set(zip(wiring.kind, wiring.capacity, strict=True)))
    assert set(wiring.capacity) == {1e9}


def test_switches_take_part_where_they_add_up(toy_cluster) -> None:
    """Of a ring of 8 GPUs only the ranks; where the switch of a node sums, it too, one for both groups of four."""
    topology = toy_cluster(8, multicast=True).topology()
    for tp, groups in ((8, 1), (4, 2)):
        grid = Grid.of(tp=tp, dp=8 // tp)
        assert endpoints(topology, grid, Traffic("all_reduce/ring", ("tp",), ())).shape == (groups, tp)
        summed = endpoints(topology, grid, Traffic("all_reduce/in_switch", ("tp",), ()))
        assert summed.shape == (groups, tp + 1)
        assert set(summed[:, -1].tolist()) == set(topology.switch_of(np.arange(8)).tolist())


PODS = {"fabric": {"kind": "fat_tree", "leaf_nodes": 4, "pod_nodes": 8, "oversubscription": 2}}
STAGES: list[tuple[str, int, dict[str, Any]]] = [
    ("dgx-h100", 64, {}),
    ("dgx-a100", 48, {}),
    ("aws-p4d", 6, {}),
    ("hgx-h200", 40, PODS),
]


@pytest.mark.parametrize(("name", "nodes", "changes"), STAGES, ids=[f"{name}-{nodes}" for name, nodes, _ in STAGES])
@pytest.mark.parametrize(("tp", "pp"), [(8, 8), (2, 16), (4, 2), (1, 4), (8, 3)])
def test_stages_that_are_shifted_by_whole_periods_choose_alike(name, nodes, changes, tp, pp, monkeypatch) -> None:
    """Each stage's groups and sends have the choices that are made for them alone; fewer are made."""
    cluster = load_cluster(name, nodes, changes)
    dp, left = divmod(cluster.gpus, tp * pp)
    if left:
        pytest.skip("the GPUs are not divided")
    grid = Grid.of(tp=tp, dp=dp, pp=pp)
    works = [Collective("all_reduce", 1e8, "dp", "g"), Collective("all_gather", 1e7, "tp", "a"), Send(1e7, 1, "x")]

    def choices() -> tuple[list[Any], int]:
        pricing = AlgorithmChoice(cluster.topology(), grid, Prices(load_profile("h100"), cluster.node.gpu))
        result = []
        for stage in range(pp):
            at = (("pp", stage),)
            for work in works[: 3 if stage + 1 < pp else 2]:
                if isinstance(work, Send):
                    siblings = Traffic("send/direct", (), at, (("pp", stage + 1),))
                else:
                    siblings = Traffic("", work.axes, at)
                result.append(pricing.choose(work, siblings))
        return result, len(pricing._known.laid)

    shared, few = choices()
    monkeypatch.setattr(algorithm_choice, "first_alike", lambda topology, grid, siblings: siblings)
    own, many = choices()
    assert shared == own
    assert few < many


# -- links and switches of groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 10**7])
def test_chunks_that_cross_each_link(first: int) -> None:
    """Links are counted wherever their numbers are; what carries nothing loads none."""
    routes, carried = np.array([[0, 3], [3, -1], [2, -1], [1, 3]]), np.array([5, 2, 0, 1])
    crossed, load = _loads(np.where(routes < 0, -1, routes + first * (routes > 1)), carried)
    assert (crossed.tolist(), load.tolist()) == ([0, 1, 3 + first], [5.0, 1.0, 8.0])
    crossed, load = _loads(routes, np.array([2, 2, 2, 2]))
    assert (crossed.tolist(), load.tolist()) == ([0, 1, 2, 3], [2.0, 2.0, 2.0, 6.0])


@pytest.mark.parametrize(
    ("leaf", "nic", "second", "third"),
    [
        ([[0, 0], [1, 1]], [[0, 1], [2, 3]], True, True),  # a leaf for each group
        ([[0, 0], [0, 0]], [[0, 1], [2, 3]], False, True),  # one leaf for two trees
        ([[0, 0], [1, 1]], [[0, 1], [1, 2]], False, False),  # a NIC in two groups
        ([[0, 0], [1, 1]], [[0, 0], [2, 2]], True, True),  # both members by one NIC
    ],
)
def test_trees_that_fit_switches_that_add(leaf: list[list[int]], nic: list[list[int]], second: bool, third: bool) -> None:
    """Two groups of two members on nodes of their own. SHARPv2 has a tree at a time per switch, SHARPv3 per port."""
    node = np.array([[0, 1], [2, 3]])
    assert [serves(version, node, np.array(leaf), np.array(nic)) for version in (2, 3)] == [second, third]


def test_a_node_with_two_nics_below_one_leaf_needs_two_trees() -> None:
    node, leaf = np.array([[0, 0, 1, 1]]), np.array([[0, 0, 0, 0]])
    assert serves(2, node, leaf, np.array([[0, 0, 1, 1]]))
    assert not serves(2, node, leaf, np.array([[0, 1, 2, 3]]))
    assert serves(3, node, leaf, np.array([[0, 1, 2, 3]]))
    assert serves(2, node, np.array([[0, 1, 0, 1]]), np.array([[0, 1, 2, 3]]))  # a leaf for each of a node's NICs
