"""Proofs hold where ranks are not alike: nodes of 6 and 3 GPUs, odd degrees and orders, uneven trees, shuffled lists."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from sim.analysis.summary import summarise
from sim.grid import Grid
from sim.pricing.op_costs import OpCosts
from sim.program import Cohort, Collective, Op, Program
from strategies.job import Job
from strategies.planner.bounds.longest_path import longest_path
from strategies.planner.bounds.symmetric_groups import OfOne, _fits, alike, stages_alike, stages_like
from strategies.planner.search.candidates import candidates
from strategies.planner.search.objective import objective
from strategies.planner.search.search import Search
from strategies.planner.search.site import Site, started
from strategies.planner.search.space import Axis, Space
from strategies.planner.search.workers.executors import Engine
from strategies.predict import prices_of, simulate
from strategies.read_job import read_job
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.costs import rates
from topologies.reading import UserError

MODEL = {"name": "odd", "hidden": 720, "layers": 4, "heads": 24, "ffn": 2880, "vocabulary": 5040, "context": 252}
TREE = {"kind": "fat_tree", "leaf_nodes": 3, "oversubscription": 4}
CLUSTERS: list[tuple[dict[str, Any], int]] = [
    ({"based_on": "dgx-a100", "node": {"gpus": 6, "nics": 6}}, 2),
    ({"based_on": "dgx-h100", "node": {"gpus": 6, "nics": 3}}, 4),
    ({"based_on": "dgx-a100", "node": {"gpus": 3, "nics": 1}}, 4),
    ({"based_on": "dgx-h100", "node": {"gpus": 2, "nics": 2}, "fabric": TREE}, 6),
    ({"based_on": "dgx-h100", "node": {"gpus": 3, "nics": 1}, "fabric": TREE | {"kind": "rail"}}, 4),
    ({"based_on": "pcie-l40s"}, 3),
    ({"based_on": "dgx-h100", "node": {"gpus": 2, "nics": 2}, "fabric": TREE | {"leaf_nodes": 4}}, 6),  # a leaf and a half
]
VALUES: dict[str, list[Any]] = {
    "tp": [2, 3, 4, 6],
    "pp": [1, 2, 3, 4],
    "cp": [1, 2, 3],
    "data_parallel": ["ddp", "zero1", "zero2", "zero3"],
    "order": ["tp-cp-ep-dp-pp", "dp-tp-pp-cp-ep", "pp-tp-cp-ep-dp", "cp-dp-tp-ep-pp"],
    "recompute": ["none", "full"],
    "overlap": [True, False],
    "schedule": ["1f1b", "gpipe", "zb-h1"],
}


class Inline(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass
class Drawn:
    """A cluster, and a space on it."""

    cluster: dict[str, Any]
    nodes: int
    axes: dict[str, list[Any]]

    def read(self, changes: dict[str, Any]) -> Job:
        job = {"model": MODEL, "cluster": self.cluster, "nodes": self.nodes, "plan": {"microbatch": 1}}
        return read_job(job, {"plan.global_batch": 2 * read_job(job).cluster.gpus} | changes)

    @property
    def space(self) -> Space:
        return Space(tuple(Axis(f"plan.{name}", tuple(choices(name, values))) for name, values in self.axes.items()))

    def best_row(self) -> Any:
        answer = Search(self.read, self.space, objective("step"), Engine(Inline())).run()
        assert answer.proven
        return answer.best

    def site(self) -> Site:
        job = started(self.read({}))
        return Site.of(job, {}, candidates(job, self.space), 1e9, rates(job.cluster.node.gpu, 1.0))


def choices(name: str, values: list[Any]) -> list[dict[str, Any]]:
    more = {"plan.sequence_parallel": True} if name == "tp" else {}
    return [{f"plan.{name}": value} | more for value in values]


def draw(random: Random, cluster: dict[str, Any], nodes: int) -> Drawn:
    """A space of 4 to 8 plans."""
    while True:
        names = ["tp", *random.sample(sorted(VALUES.keys() - {"tp"}), 2)]
        drawn = Drawn(cluster, nodes, {name: random.sample(VALUES[name], 2) for name in names})
        try:
            if len(drawn.site().plans) >= 4:
                return drawn
        except UserError:
            continue


def bounds_of(site: Site) -> dict[str, list[float]]:
    """Of each plan by its hash: bounds of the step and of memory."""
    result = {}
    for plan in range(len(site.plans)):
        job = site.plans.job_of(plan)
        longest, held = longest_path(job, site.refiner.resolved(plan), prices_of(job))
        steps = site.limits.step[plan], site.refiner.passes(plan), site.refiner.exchange(plan), longest
        result[job.hash] = [*map(float, steps), float(site.limits.memory[plan]), held]
    return result


@pytest.mark.parametrize(("number", "ops"), [*((number, 500_000) for number in range(len(CLUSTERS))), (2, 0)])
def test_proofs_hold_where_ranks_are_unlike(number: int, ops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound exceeds the simulation, the best that is searched is the best of all; shuffled, the same. ops: up to which ranks
    that differ are played by themselves.
    """
    monkeypatch.setattr("sim.engine.folding.MAX_UNFOLDED_OPS", ops)
    random = Random(number)
    drawn = draw(random, *CLUSTERS[number])
    site, steps = drawn.site(), []
    bounds = bounds_of(site)
    for plan in range(len(site.plans)):
        job = site.plans.job_of(plan)
        played, (*least, rough, held) = summarise(simulate(job)), bounds[job.hash]
        assert max(least) <= played.step_seconds, site.plans.changes(plan)
        assert max(rough, held) <= played.worst.peak, site.plans.changes(plan)
        steps.append(played.step_seconds)
    best = drawn.best_row()
    assert best["step"] == min(steps)
    names = random.sample(list(drawn.axes), len(drawn.axes))
    shuffled = Drawn(drawn.cluster, drawn.nodes, {name: random.sample(drawn.axes[name], len(drawn.axes[name])) for name in names})
    assert bounds_of(shuffled.site()) == {plan: pytest.approx(each, rel=1e-9) for plan, each in bounds.items()}
    assert shuffled.best_row()["hash"] == best["hash"]


def test_the_longest_path_is_that_of_the_ranks_that_communicate_longest() -> None:
    """tp=4 on nodes of 6 GPUs: of three groups one is on two nodes."""
    plan = {"tp": 4, "sequence_parallel": True, "data_parallel": "zero1", "microbatch": 4, "global_batch": 24}
    model = MODEL | {"hidden": 3072, "ffn": 12288, "layers": 2, "context": 2048}
    job = read_job(model=model, cluster={"based_on": "dgx-a100", "node": {"gpus": 6, "nics": 6}}, nodes=2, plan=plan)
    longest, _ = longest_path(job, job.resolve(), prices_of(job))
    step = simulate(job).step
    assert 0.9 * step < longest <= step


# -- which groups are alike ------------------------------------------------------------------------------------------------


def cluster(name: str, nodes: int, **fields: Any) -> Cluster:
    return load_cluster(name, nodes=nodes, overrides=fields)


@pytest.mark.parametrize(
    ("wires", "degrees", "expected"),
    [
        (cluster("dgx-a100", 4), {"tp": 4, "dp": 4, "pp": 2}, True),
        (cluster("dgx-a100", 3), {"tp": 8, "dp": 3}, True),
        (cluster("dgx-a100", 3), {"tp": 4, "dp": 3, "pp": 2}, False),  # a stage is one node and a half
        (cluster("dgx-a100", 3), {"tp": 3, "dp": 8}, False),  # the third group is on two nodes
        (cluster("dgx-1v", 1), {"tp": 2, "dp": 4}, False),  # GPUs 0 and 1 have one NVLink, 2 and 3 have two
        (cluster("dgx-1v", 1), {"tp": 8}, True),
    ],
)
def test_groups_are_alike_where_nodes_cut_no_axis(wires: Cluster, degrees: dict[str, int], expected: bool) -> None:
    assert alike(wires, Grid.of(**degrees)) == expected


@pytest.mark.parametrize(("degrees", "size", "fits"), [({"tp": 3, "dp": 2}, 8, True), ({"tp": 3, "dp": 8}, 8, False)])
def test_ranks_that_are_all_in_one_block_fit_it_whatever_their_groups(degrees: dict[str, int], size: int, fits: bool) -> None:
    """Six ranks behind one leaf of eight GPUs, in groups of three; of 24 ranks the third group lies behind two leaves."""
    assert _fits(Grid.of(**degrees), size) is fits


def test_stages_differ_on_an_uneven_tree() -> None:
    """Stages of two nodes below leaves of three: the second one is on two leaves."""
    grid, inner = Grid.of(tp=16, pp=3), Grid.of(tp=16)
    assert not stages_alike(cluster("dgx-h100", 6, **{"fabric": TREE}), grid, inner)
    assert stages_alike(cluster("dgx-h100", 6, **{"fabric": TREE | {"leaf_nodes": 2}}), grid, inner)
    assert stages_alike(cluster("dgx-h100", 6, **{"fabric": TREE}), Grid.of(tp=8, pp=6), Grid.of(tp=8))


def test_groups_that_no_switch_cuts_are_alike_though_the_last_switch_is_not_full() -> None:
    """Groups of two nodes below leaves of four, of which the second has two: none is on two leaves. Groups of four nodes: nor is
    one of these. Of three: the second is.
    """
    wires = cluster("dgx-h100", 6, **{"fabric": TREE | {"leaf_nodes": 4}})
    assert stages_alike(wires, Grid.of(tp=8, cp=2, dp=3), Grid.of(tp=8, cp=2))
    assert not stages_alike(wires, Grid.of(tp=8, cp=3, dp=2), Grid.of(tp=8, cp=3))
    gather = Collective("all_gather", 4e9, "cp", "gather", algorithm="ring")
    for grid, count in ((Grid.of(tp=8, cp=2, pp=3), 1), (Grid.of(tp=8, cp=3, pp=2), 2)):
        cohorts = [Cohort({"pp": stage}, [Op("cp", gather)]) for stage in range(grid.degree("pp"))]
        job = read_job(model="gpt2-1.5b", cluster="dgx-h100", plan={})
        played = OpCosts(Program(grid, cohorts, 1, 1, "bf16", 1, 1), wires.topology(), prices_of(job))
        assert len({played.collective(gather, stage).alone for stage in range(len(cohorts))}) == count


def test_stages_that_begin_at_different_places() -> None:
    """Stages of one node below leaves of three, or of two; of half a node; all of them where no period is known."""
    nodes, half = Grid.of(tp=8, pp=6), Grid.of(tp=4, pp=4)
    assert stages_like(cluster("dgx-h100", 6, **{"fabric": TREE}), nodes) == (0, 1, 2, 0, 1, 2)
    assert stages_like(cluster("dgx-h100", 6, **{"fabric": TREE | {"leaf_nodes": 2}}), nodes) == (0, 1, 0, 1, 0, 1)
    pods = cluster("dgx-h100", 6, **{"fabric": TREE | {"leaf_nodes": 2, "pod_nodes": 4}})
    assert stages_like(pods, nodes) == (0, 1, 2, 3, 0, 1)
    assert stages_like(cluster("pcie-l40s", 2), half) == (0, 1, 0, 1)  # nodes are alike, halves of one are not
    ring = {"kind": "torus", "dims": [6], "link": "25 GB/s"}
    assert stages_like(cluster("pcie-l40s", 6, **{"fabric": ring}), nodes) == tuple(range(6))
    assert not stages_alike(cluster("pcie-l40s", 6, **{"fabric": ring}), Grid.of(tp=16, pp=3), Grid.of(tp=16))


def test_what_is_said_to_be_alike_is_played_as_one() -> None:
    """Random degrees and orders on every kind of node."""
    random, count = Random(3), 0
    for name in 20 * ("dgx-1v", "dgx-a100", "pcie-l40s", "perlmutter", "gb200-nvl72"):
        plan = {
            "tp": random.choice([1, 2, 3, 4, 6]),
            "pp": random.choice([1, 2, 3, 4]),
            "cp": random.choice([1, 1, 2]),
            "order": "-".join(random.sample(["tp", "cp", "ep", "dp", "pp"], 5)),
            "accumulation": 1,
            "precision": "fp16",
        }
        try:
            job = read_job(model=MODEL, cluster=name, nodes=random.choice([1, 2, 3]), plan=plan)
            grid = job.resolve().grid
        except UserError:
            continue
        if alike(job.cluster, grid):
            count += 1
            assert simulate(job).op_costs.alike
    assert count > 10


def test_a_collective_of_each_rank_alone_takes_the_seconds_of_its_group(toy_cluster: Any, toy_prices: Any) -> None:
    """tp=4 on nodes of 6 GPUs: the second of three groups is on two nodes and gathers through two NICs of
    a quarter of its rate each.
    """
    gather = Collective("all_gather", 4e9, "tp", "gather", algorithm="ring")
    program = Program(Grid.of(tp=4, dp=3), [Cohort({}, [Op("tp", gather)])], 1, 1, "bf16", 1, 1)
    every = OfOne(program, toy_cluster(6, 2, nic="0.25 GB/s").topology(), toy_prices())
    alone = [every.of(rank).collective(gather, 0).alone for rank in range(12)]
    assert alone == pytest.approx([3.0] * 4 + [6.0] * 4 + [3.0] * 4)
    assert not every.alike
    assert every.of(5).of(0).collective(gather, 0).alone == pytest.approx(3.0)
