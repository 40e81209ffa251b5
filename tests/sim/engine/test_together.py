"""Programs side by side on one network, with times worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine.player import run
from sim.engine.together import play_together
from sim.program import Block, Cohort, Collective, Op, Program, Ref, Run
from sim.replay.step import StepReplay
from sim.timeline import Timeline
from tests.sim.conftest import block, kernel, program
from topologies.fabric import read_fabric
from topologies.links.placed import PlacedTopology
from topologies.reading import UserError


def ring(compute: float = 0.0) -> Program:
    """A ring of two ranks, which sends 1 GB each way, after some compute."""
    sync = Collective("all_reduce", 1e9, "dp", "gradients")
    ops = [Op("compute", block(compute)), Op("dp", sync, (Ref(0, 0),))] if compute else [Op("dp", sync)]
    return program(Cohort({}, ops), dp=2)


def test_two_rings_over_one_nic_get_half_each(toy_cluster, toy_prices) -> None:
    topology = toy_cluster(2, 2, nics=1).topology()
    jobs = [(ring(), PlacedTopology(topology, [0, 2])), (ring(), PlacedTopology(topology, [1, 3]))]
    assert play_together(jobs[:1], toy_prices(), 3).steps == [[1.0, 1.0, 1.0]]
    both = play_together(jobs, toy_prices(), 3)
    assert both.steps == [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    assert both.kinds == [("nic",), ("nic",)]


def test_a_job_that_computes_too_is_slowed_down_where_it_sends(toy_cluster, toy_prices) -> None:
    """One second alone on the NIC, in which the other has a step to itself, and two in which each has half."""
    topology = toy_cluster(2, 2, nics=1).topology()
    jobs = [(ring(1.0), PlacedTopology(topology, [0, 2])), (ring(), PlacedTopology(topology, [1, 3]))]
    computing, sending = play_together(jobs, toy_prices(), 4).steps
    assert computing == [3.0] * 4
    assert sending == [1.0, 2.0] * 4


def test_an_oversubscribed_uplink_is_shared(toy_cluster, toy_prices) -> None:
    """Two nodes below a leaf whose uplink has the rate of one NIC."""
    fabric = read_fabric({"kind": "fat_tree", "leaf_nodes": 2, "oversubscription": 2, "hop_latency": "0 s"})
    topology = toy_cluster(1, 4).model_copy(update={"fabric": fabric}).topology()
    apart = [(ring(), PlacedTopology(topology, [0, 2])), (ring(), PlacedTopology(topology, [1, 3]))]
    beside = [(ring(), PlacedTopology(topology, [0, 1])), (ring(), PlacedTopology(topology, [2, 3]))]
    assert play_together(apart, toy_prices(), 2) == ([[2.0, 2.0], [2.0, 2.0]], [("spine",), ("spine",)])
    assert play_together(beside, toy_prices(), 2) == ([[1.0, 1.0], [1.0, 1.0]], [(), ()])


def test_collectives_inside_blocks_meet_the_other_job(toy_cluster, toy_prices) -> None:
    """The same ring inside a block is played item by item when another job uses its links: 0.5 s, 1 GB, 0.5 s."""
    topology = toy_cluster(2, 2, nics=1).topology()
    inside = Block("forward", (Run(1, (kernel(0.5), Collective("all_reduce", 1e9, "dp", "x"), kernel(0.5))),))
    mine = program(Cohort({}, [Op("compute", inside)]), dp=2)
    jobs = [(mine, PlacedTopology(topology, [0, 2])), (ring(), PlacedTopology(topology, [1, 3]))]
    assert play_together(jobs[:1], toy_prices(), 1).steps == [[2.0]]
    first, _ = play_together(jobs, toy_prices(), 2).steps
    assert first == [3.0, 3.0]


def test_three_jobs_get_a_third(toy_cluster, toy_prices) -> None:
    topology = toy_cluster(3, 2, nics=1).topology()
    jobs = [(ring(), PlacedTopology(topology, [gpu, gpu + 3])) for gpu in range(3)]
    assert play_together(jobs, toy_prices(), 2).steps == [[3.0, 3.0]] * 3


def test_hosts_begin_each_step_anew(toy_cluster, toy_prices) -> None:
    """Launches of 0.2 s hold up kernels of 0.1 s in every step, not only in the first."""
    topology = toy_cluster(1, 2).topology()
    step = program(Cohort({}, [Op("compute", Block("forward", (Run(5, (kernel(0.1),)),)))]), dp=1)
    jobs = [(step, PlacedTopology(topology, [gpu])) for gpu in range(2)]
    for each in play_together(jobs, toy_prices(launch="200 ms"), 3).steps:
        assert each == pytest.approx([1.1] * 3, abs=1e-9)


def test_a_job_on_its_own_gpus_is_the_step_that_is_simulated(toy_cluster, toy_prices) -> None:
    topology = toy_cluster(4, 4).topology()
    sync = Collective("all_reduce", 1e9, "dp", "x")
    step = program(Cohort({}, [Op("compute", block(1.0)), Op("dp", sync, (Ref(0, 0),))]), tp=4, dp=2)
    placed = PlacedTopology(topology, range(8, 16))
    usual = run(step, toy_cluster(4, 2).topology(), toy_prices()).step
    assert play_together([(step, placed)], toy_prices(), 1).steps == [[usual]]


def test_timelines_of_all_steps_begin_at_their_own_start(toy_cluster, toy_prices) -> None:
    """Of a host that is held up, too: columns and resumptions of the third step are those of the first, and its replay."""
    topology = toy_cluster(1, 2).topology()
    ops = [Op("compute", block(1.0)), Op("dp", Collective("all_reduce", 1e9, "dp", "x"), (Ref(0, 0),), held=True)]
    step = program(Cohort({}, [*ops, Op("compute", block(0.5), (Ref(0, 1),))]), dp=2)
    timelines: list[Timeline] = []

    def keep(job: int, timeline: Timeline) -> float:
        assert job == 0
        timelines.append(timeline)
        return timeline.step

    (seconds,) = play_together([(step, PlacedTopology(topology, [0, 1]))], toy_prices(launch="1 ms"), 3, keep).steps
    assert seconds == pytest.approx([2.502] * 3, abs=1e-9)  # each block is launched 1 ms after its host may
    first, _, third = timelines
    for name in ("start", "end", "launched", "resumptions"):
        assert getattr(first, name) == getattr(third, name)
    assert first.resumptions
    assert StepReplay(third).times().steps.tolist() == [third.step]


def test_a_placed_topology_has_the_routes_of_its_gpus(toy_cluster) -> None:
    whole = toy_cluster(4, 4, multicast=True).topology()
    placed = PlacedTopology(whole, [5, 9, 6, 14])
    assert placed.node_of(np.arange(4)).tolist() == [1, 2, 1, 3]
    assert (placed.routes(np.array([0, 1]), np.array([2, 3])) == whole.routes(np.array([5, 9]), np.array([6, 14]))).all()
    switch = placed.switch_of(np.array([0]))
    assert (placed.routes(np.array([0]), switch) == whole.routes(np.array([5]), whole.switch_of(np.array([5])))).all()


def test_a_program_that_waits_for_itself_is_refused(toy_cluster, toy_prices) -> None:
    topology = toy_cluster(1, 2).topology()
    stuck = program(Cohort({}, [Op("a", block(1.0), (Ref(0, 1),)), Op("b", block(1.0), (Ref(0, 0),))]), dp=1)
    jobs = [(stuck, PlacedTopology(topology, [0]))]
    with pytest.raises(UserError, match="do not go on together"):
        play_together(jobs, toy_prices(), 1)
