"""Local SGD and DiLoCo: rounds of local steps."""

from __future__ import annotations

import pytest

from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.timeline import Timeline
from strategies.lowering.lower import lower
from topologies.reading import UserError


@pytest.fixture
def played(toy_job, toy_prices):
    def play(gpus: int = 8, fold: bool = True, **plan) -> Timeline:
        job = toy_job(gpus, 1, **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(), fold=fold)

    return play


@pytest.mark.parametrize("hook", ["local_sgd", "diloco"])
@pytest.mark.parametrize("steps", [1, 4, 10])
def test_volume_is_shared_out_over_the_round(played, hook, steps) -> None:
    """2Ψ·(n − 1)/n per round: DiLoCo's "H times less communication"."""
    summary = summarise(played(data_parallel=hook, local_steps=steps))
    assert summary.volume["dp"].psi == pytest.approx(2 * 7 / 8 / steps)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_mean_step(played, steps) -> None:
    """A step of one GPU, and an H-th of an all-reduce of the parameters: 2·S·(n − 1)/n at 1 GB/s."""
    alone = played(1)
    timeline = played(data_parallel="local_sgd", local_steps=steps, algorithm="ring")
    reduce = 2 * 2 * timeline.program.parameters * 7 / 8 / 1e9
    summary = summarise(timeline)
    assert summary.step_seconds == pytest.approx(alone.step + reduce / steps)
    assert sum(summary.breakdown.values()) == pytest.approx(summary.step_seconds, rel=1e-12)
    assert summary.breakdown["dp exposed"] == pytest.approx(reduce / steps)
    assert summary.tokens_per_second == pytest.approx(8 * 32 / summary.step_seconds)
    assert any(f"{steps} local steps" in note for note in summary.notes) == (steps > 1)


def test_memory(played) -> None:
    """DiLoCo keeps the start of the round and an outer momentum in fp32; local SGD nothing more than DDP."""
    states = {
        hook: dict(played(data_parallel=hook, **more).program.cohorts[0].resident)
        for hook, more in (("ddp", {}), ("local_sgd", {"local_steps": 2}), ("diloco", {"local_steps": 2}))
    }
    psi = played(1).program.parameters
    assert states["local_sgd"] == states["ddp"]
    assert states["diloco"]["optimizer"] / psi == 12 + 8


def test_rounds_of_a_pipeline(played) -> None:
    """Every local step is a whole pipeline flush: without dp, H of them take H times as long."""
    shape = {"pp": 4, "accumulation": 3, "data_parallel": "local_sgd", "gpus": 4}
    every, five = (played(local_steps=steps, **shape) for steps in (1, 5))
    assert summarise(five).step_seconds <= summarise(every).step_seconds
    assert five.step > 4 * every.step
    assert played(local_steps=2, fold=False, **shape | {"gpus": 8}).step == played(local_steps=2, **shape | {"gpus": 8}).step


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"data_parallel": "diloco"}, "data_parallel=diloco needs local_steps"),
        ({"local_steps": 4}, "local_steps=4 contradicts data_parallel=ddp"),
        ({"data_parallel": "diloco", "local_steps": 10**7}, "less than or equal to 10000"),
    ],
)
def test_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(8, 1, **plan).resolve()


@pytest.mark.parametrize("hook", ["local_sgd", "diloco"])
def test_cp_ranks_sum_gradients_in_every_step(played, hook) -> None:
    """Of 8 ranks 2 share each sequence: 2Ψ·(2 − 1)/2 in each step, and between the 4 that train by themselves 2Ψ·3/4 a round."""
    for fold in (True, False):
        volume = summarise(played(data_parallel=hook, local_steps=4, cp=2, fold=fold)).volume["dp"]
        assert volume.psi == pytest.approx(2 * 1 / 2 + 2 * 3 / 4 / 4)


def test_ranks_that_share_experts_do_not_train_by_themselves(toy_job) -> None:
    experts = {"experts": {"experts": 8, "chosen": 2, "ffn": 64}}
    with pytest.raises(UserError, match="ep=2 is not simulated: dp ranks that share experts"):
        toy_job(8, model=experts, ep=2, data_parallel="local_sgd", local_steps=2).resolve()
