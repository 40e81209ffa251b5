"""Steps of many microbatches, of which only some are played, are those of a full play, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from calibration.published import published
from shardyard import UserError, read_job, simulate, summarise
from strategies.predict import from_some_microbatches, predict, prices_of

SMALL = {"name": "small", "hidden": 512, "layers": 8, "heads": 8, "vocabulary": 8000, "context": 1024}
WIDE = SMALL | {"name": "wide", "hidden": 4096, "heads": 32}


def job(microbatches: int, model: dict[str, Any] = SMALL, nodes: int = 1, effects: str = "", **plan: Any):
    return read_job(
        model=model,
        cluster="dgx-h100",
        nodes=nodes,
        plan=dict(sequence=512, accumulation=microbatches) | plan,
        effects=effects or None,
        variability=0,
    )


def some_microbatches(asked: Any):
    return from_some_microbatches(asked, asked.resolve(), prices_of(asked))


SETTLING = [
    dict(),
    dict(pp=4),
    dict(
        pp=4, tp=2, data_parallel="zero1", microbatch=4
    ),  # of one sequence hosts hold up the GPUs, and no two microbatches are alike
    dict(data_parallel="zero3"),
    dict(tp=2, fp8={}),
    dict(pp=4, schedule="interleaved", chunks=2),
    dict(pp=4, schedule="dualpipe"),
    dict(tp=2, recompute="full", kernels="torch"),
]


@pytest.mark.parametrize("plan", SETTLING, ids=str)
def test_what_settles_is_not_played_to_its_end(plan: dict[str, Any]) -> None:
    asked = job(160, WIDE, **plan)
    timeline, full = some_microbatches(asked), simulate(asked)
    assert timeline is not None
    assert len(timeline.start) < 0.25 * len(full.start)
    assert timeline.step == full.step
    assert summarise(timeline).to_dict() == summarise(full).to_dict()


BESIDE: dict[str, Any] = dict(pp=4, tp=4, microbatch=8, sequence_parallel=True)  # two stages on each node


@pytest.mark.parametrize("effect", ["gpu 3: speed 0.5", "node 0 nic 1 out: rate 0.1", "gpu 5: jitter 0.1 per step"])
def test_effects_that_are_there_all_the_time_settle(effect: str) -> None:
    asked = job(120, WIDE, nodes=2, effects=effect, **BESIDE)
    timeline, full = some_microbatches(asked), simulate(asked)
    assert timeline is not None
    assert len(timeline.start) < 0.25 * len(full.start)
    assert summarise(timeline).to_dict() == summarise(full).to_dict()


@pytest.mark.parametrize(
    "effect",
    ["gpu 3: speed 0.9 from 10 ms", "gpu 3: speed 0.9 to 10 ms", "gpu 5: jitter 0.1", "node 0 nic 1: background 0.5 at 1 ms"],
)
def test_effects_that_come_and_go_are_played(effect: str) -> None:
    assert some_microbatches(job(240, WIDE, nodes=2, effects=effect, **BESIDE)) is None


def test_microbatches_that_repeat_in_pairs_settle() -> None:
    """Ten layers on four stages: neighbours are equally slow, and each second microbatch is alike. One step of 10 is played."""
    asked = job(120, WIDE | {"layers": 10}, nodes=2, pp=4, tp=2, microbatch=4, sequence_parallel=True)
    timeline, full = some_microbatches(asked), simulate(asked)
    assert timeline is not None
    assert max(op.microbatch for op in timeline.cohort(0).ops) + 1 == 14
    assert timeline.periods == 53
    assert timeline.events == full.events
    assert summarise(timeline).to_dict() == summarise(full).to_dict()


@pytest.mark.parametrize(("hook", "microbatches"), [("zero2", 6), ("zero3", 16)])
def test_reductions_in_every_microbatch_settle(hook: str, microbatches: int) -> None:
    """ZeRO-2's update waits for the reductions of all microbatches, but only for the last by itself. ZeRO-3's gathers slow down
    the kernels that decide when they start: distances approach each other, and are equal on the grid after 16 of 64.
    """
    asked = job(64, WIDE, pp=2, data_parallel=hook, microbatch=4)
    timeline, full = some_microbatches(asked), simulate(asked)
    assert timeline is not None
    assert max(op.microbatch for op in timeline.cohort(0).ops) + 1 == microbatches
    assert timeline.events == full.events
    assert summarise(timeline).to_dict() == summarise(full).to_dict()


def test_periods_are_of_as_many_microbatches_as_ranks_whatever_their_number() -> None:
    """GPT-3 on 8 ranks, its first and last a little slower: seven microbatches at one distance, the eighth at another."""
    asked = read_job(model="gpt3-175b", cluster="dgx-h100", nodes=8, plan=dict(tp=8, pp=8, accumulation=200, sequence=2048))
    timeline, full = some_microbatches(asked), simulate(asked)
    assert timeline is not None
    assert max(op.microbatch for op in timeline.cohort(0).ops) + 1 == 24
    assert timeline.periods == 22
    assert timeline.events == full.events
    assert summarise(replace(timeline, variability=())).to_dict() == summarise(replace(full, variability=())).to_dict()


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2]),
            "pp": st.sampled_from([1, 2, 4]),
            "schedule": st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved", "chimera", "dualpipe"]),
            "data_parallel": st.sampled_from(["ddp", "zero1", "zero2", "zero3", "dataparallel"]),
            "overlap_p2p": st.booleans(),
            "kernels": st.sampled_from(["megatron", "torch"]),
            "recompute": st.sampled_from(["none", "full"]),
        }
    ),
    st.sampled_from([SMALL, WIDE]),
    st.sampled_from([96, 100, 126]),
)
@example(  # ranks are idle for different times before and after a period begins
    {"tp": 1, "pp": 2, "schedule": "1f1b", "data_parallel": "ddp", "overlap_p2p": True, "kernels": "torch", "recompute": "full"},
    SMALL,
    96,
)
@example(  # the last period ends with a gap before another op than the others
    dict(tp=1, pp=1, schedule="1f1b", data_parallel="zero3", overlap_p2p=False, kernels="megatron", recompute="none"),
    SMALL,
    96,
)
def test_any_step_is_that_of_a_full_play(plan: dict[str, Any], model: dict[str, Any], microbatches: int) -> None:
    """Bound by its host, by a stage or by the network: what does not settle is played."""
    chunks = {"interleaved": {"chunks": 2}}.get(plan["schedule"], {})
    try:
        asked = job(microbatches, model, **plan, **chunks)
        full = summarise(simulate(asked))
    except UserError:
        return
    assert predict(asked).to_dict() == full.to_dict()


def test_hosts_that_are_held_up_settle_too() -> None:
    """DeepSpeed's pipeline engine waits for what it receives, and launches the pass only then."""
    row = next(row for row in published(("jeanzay-v100-2021",)) if row.name.endswith("/0021"))
    asked = row.job()
    timeline, full = some_microbatches(asked), simulate(asked)
    assert full.resumptions
    assert timeline is not None
    assert len(timeline.start) < 0.25 * len(full.start)
    assert summarise(replace(timeline, variability=())).to_dict() == summarise(replace(full, variability=())).to_dict()


def test_a_few_microbatches_are_played() -> None:
    assert some_microbatches(job(16, pp=4)) is None


def test_hosts_that_gain_on_their_devices_are_not_steady() -> None:
    """The replicas of torch.nn.DataParallel wait for one thread that launches for all of them, and end with their last pass."""
    asked = job(96, data_parallel="dataparallel")
    assert predict(asked).to_dict() == summarise(simulate(asked)).to_dict()
