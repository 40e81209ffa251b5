"""A played step worked out anew: equal to the player's where nothing is perturbed, and close to it where something is."""

from __future__ import annotations

import gc
from weakref import ref

import numpy as np
import pytest

from shardyard import UserError, read_job, simulate
from sim.engine.effects import read_effects
from sim.engine.player import run
from sim.program import Cohort, Collective, Op, Ref, Send
from sim.replay.step import StepReplay, replay_of
from tests.sim.conftest import block, program

SMALL = {"name": "small", "hidden": 1024, "layers": 8, "heads": 16, "vocabulary": 32000, "context": 2048}
TALL = SMALL | {"heads": 24, "hidden": 1536, "vocabulary": 24000}
MIXTURE = SMALL | {"experts": {"experts": 8, "chosen": 2, "ffn": 512}, "gated": True}
JOBS = {
    "zero1 in a pipeline": dict(model=SMALL, nodes=2, plan=dict(tp=2, pp=2, accumulation=4, data_parallel="zero1")),
    "zero3": dict(model=SMALL, nodes=2, plan=dict(accumulation=2, data_parallel="zero3")),
    "interleaved": dict(model=SMALL, nodes=1, plan=dict(pp=4, schedule="interleaved", chunks=2, accumulation=8)),
    "the host waits": dict(model=SMALL, nodes=2, plan=dict(pp=4, tp=2, overlap_p2p=False, accumulation=6)),
    "groups that are not alike": dict(model=TALL, nodes=3, plan=dict(tp=3, pp=2, accumulation=4)),
    "tied embeddings": dict(model=SMALL | {"tied": True}, nodes=1, plan=dict(pp=4, accumulation=6)),
    "experts": dict(model=MIXTURE, nodes=2, plan=dict(ep=4, tp=2, sequence_parallel=True, accumulation=2)),
    "copies of stages": dict(model=SMALL, nodes=1, plan=dict(pp=4, schedule="chimera", accumulation=8)),
    "uneven batches": dict(model=SMALL, nodes=1, plan=dict(tp=2, pp=2, microbatches_per_replica=[3, 5], data_parallel="zero1")),
    "ranks that joined": dict(model=SMALL, nodes=1, plan=dict(pp=2, global_batch=10, uneven_batch="join")),
    "offload": dict(model=SMALL, nodes=1, plan=dict(data_parallel="zero3", offload={"optimizer": "cpu"}, accumulation=2)),
}


def job(name: str, **more: object):
    given = JOBS[name]
    return read_job(
        model=given["model"],
        cluster="dgx-h100",
        nodes=given["nodes"],
        plan=given["plan"] | {"auto": False, "sequence": 1024},
        **more,
    )


@pytest.mark.parametrize("name", JOBS)
def test_unperturbed_it_is_the_played_step(name: str) -> None:
    timeline = simulate(job(name))
    replayed = StepReplay(timeline).times()
    assert replayed.steps.tolist() == [timeline.step]
    for lane, each in enumerate(timeline.lanes):
        ops = range(timeline.offset[lane], timeline.offset[lane] + len(timeline.cohort(lane).ops))
        assert replayed.ends[each.rank, 0] == max(timeline.end[number] for number in ops)


@pytest.mark.parametrize(
    "name", ["zero1 in a pipeline", "zero3", "interleaved", "the host waits", "tied embeddings", "uneven batches"]
)
def test_slower_gpus_take_as_long_as_when_they_are_played(name: str) -> None:
    """Kernels take another factor on every GPU; prices of blocks follow it in a line, to 0.1 % of the step."""
    ideal = simulate(job(name))
    factors = np.exp(0.05 * np.random.default_rng(7).standard_normal(ideal.program.grid.world)).clip(1.0)
    effects = [f"gpu {gpu}: speed {float(1 / factor)!r}" for gpu, factor in enumerate(factors)]
    played = simulate(job(name, effects=effects)).step
    replayed = StepReplay(ideal).times(factors[:, None]).steps[0]
    assert played > ideal.step
    assert replayed == pytest.approx(played, rel=1e-3)


def test_a_pipeline_of_two_by_hand(toy_cluster, toy_prices) -> None:
    """Stage 0 computes 2 s and sends 1 GB at 1 GB/s, stage 1 computes 3 s, twice. With kernels of stage 0 twice as slow: 4 and
    8 s, sent by 5 and 9 s: 9 + 3 s. With sends four times as slow: 2 + 4 and 6 + 4 s, 10 + 3 s.
    """
    first = [Op("compute", block(2.0)), Op("send", Send(1e9, 1, "x"), (Ref(0, 0),))]
    first += [Op("compute", block(2.0)), Op("send", Send(1e9, 1, "x"), (Ref(0, 2),))]
    second = [Op("compute", block(3.0), (Ref(0, 1),)), Op("compute", block(3.0), (Ref(0, 3),))]
    played = program(Cohort({"pp": 0}, first), Cohort({"pp": 1}, second), pp=2)
    replay = StepReplay(run(played, toy_cluster(2).topology(), toy_prices()))
    assert replay.times().steps.tolist() == [9.0]
    assert replay.times(np.array([[1.0, 2.0, 1.0], [1.0, 1.0, 2.0]])).steps.tolist() == [9.0, 12.0, 15.0]
    assert replay.times(transfers=lambda op, places: np.array([[1.0, 4.0]])).steps.tolist() == [9.0, 13.0]


def test_ranks_meet_in_their_own_groups(toy_cluster, toy_prices) -> None:
    """Two groups of two dp ranks: rank 0 is late, so that rank 2, which meets it, waits; ranks 1 and 3 do not."""
    gather = Collective("all_gather", 2e9, "dp", "gather")
    cohort = Cohort({}, [Op("compute", block(1.0)), Op("dp", gather, (Ref(0, 0),))])
    played = program(cohort, tp=2, dp=2)
    replay = StepReplay(run(played, toy_cluster(4).topology(), toy_prices()))
    late = replay.times(np.array([[3.0], [1.0], [1.0], [1.0]]))
    assert late.ends[:, 0].tolist() == [4.0, 2.0, 4.0, 2.0]


def test_of_two_ranks_the_late_one_is_waited_for(toy_cluster, toy_prices) -> None:
    """2 GB gathered over two links of 1 GB/s take a second from when the later rank has computed."""
    gather = Collective("all_gather", 2e9, "dp", "gather")
    cohort = Cohort({}, [Op("compute", block(1.0)), Op("dp", gather, (Ref(0, 0),))])
    replay = StepReplay(run(program(cohort, dp=2), toy_cluster(2).topology(), toy_prices()))
    assert replay.times(np.array([[1.0], [3.0]])).ends[:, 0].tolist() == [4.0, 4.0]
    assert replay.times(np.array([[5.0, 1.0], [3.0, 1.0]])).ends.tolist() == [[6.0, 2.0], [6.0, 2.0]]


def test_stages_that_meet_wait_for_the_later_one(toy_cluster, toy_prices) -> None:
    """The ends of a pipeline sum the gradients of a tied embedding, 1 GB: after 3 s of the last stage, in a second."""

    def stage(number: int, seconds: float) -> Cohort:
        summed = Collective("all_reduce", 1e9, "pp", "embedding", cohorts=(0, 1))
        return Cohort({"pp": number}, [Op("compute", block(seconds)), Op("pp", summed, (Ref(number, 0),))])

    played = run(program(stage(0, 1.0), stage(1, 3.0), pp=2), toy_cluster(2).topology(), toy_prices())
    assert max(played.end) == 4.0
    replay = StepReplay(played)
    assert replay.times().ends[:, 0].tolist() == [4.0, 4.0]
    assert replay.times(np.array([[6.0], [1.0]])).ends[:, 0].tolist() == [7.0, 7.0]


def test_effects_stay_as_they_were_played(toy_cluster, toy_prices) -> None:
    played = program(Cohort({}, [Op("compute", block(2.0))]))
    effects = read_effects("gpu 0: speed 0.5", "effects")
    replay = StepReplay(run(played, toy_cluster(1).topology(), toy_prices(), effects=effects))
    assert replay.times().steps.tolist() == [4.0]


def test_a_steady_state_is_refused() -> None:
    plan = dict(pp=2, schedule="pipedream", accumulation=4, sequence=1024)
    untied = SMALL | {"tied": False}
    with pytest.raises(UserError, match="steady state"):
        StepReplay(simulate(read_job(model=untied, cluster="dgx-h100", plan=plan)))


def test_every_one_of_16384_ranks_may_differ() -> None:
    """One numpy operation per op, whatever the number of ranks and samples."""
    plan = dict(tp=8, pp=4, accumulation=4, data_parallel="zero1", sequence=1024)
    timeline = simulate(read_job(model=SMALL, cluster="dgx-h100", nodes=2048, plan=plan))
    replay = StepReplay(timeline)
    assert (replay.graph.count, replay.places.count) == (len(timeline.end), 512)
    factors = np.ones((16384, 3))
    factors[4321, 1:] = 1.5, 3.0
    steps = replay.times(factors).steps
    assert timeline.step == steps[0] < steps[1] < steps[2]


def test_a_timeline_and_its_replay_go_when_nobody_has_them() -> None:
    """No circle of references, which would stay until the garbage collector comes."""
    timeline = simulate(job("zero1 in a pipeline"))
    replay_of(timeline)
    gone = ref(timeline)
    gc.disable()
    try:
        del timeline
        assert gone() is None
    finally:
        gc.enable()
