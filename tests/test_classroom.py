"""Numbers that every course on distributed training derives on the blackboard come out of the simulation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sim.analysis.breakdown import breakdowns
from sim.analysis.memory import ledger
from sim.analysis.summary import Summary, summarise
from sim.engine.player import run
from sim.program import MEMORY_KINDS, Block, Kernel, Program, Run, Send
from sim.timeline import Timeline
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from strategies.models.counting_rules import GIB, activations_by_zero
from strategies.models.model import load_model


@pytest.fixture
def played(toy_job, toy_prices):
    """played(gpus, nodes, **plan): the timeline of the small model on toy hardware, without four bytes of the gradient norm."""

    def play(gpus: int = 8, nodes: int = 1, prices: dict | None = None, **plan) -> Timeline:
        job = toy_job(gpus, nodes, **{"clip_gradients": False} | plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(**(prices or {})))

    return play


def answer(timeline: Timeline) -> Summary:
    return summarise(timeline)


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(("hook", "factor"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_volumes_in_units_of_psi(played, hook, factor, gpus) -> None:
    """DDP 2Ψ, ZeRO-1/2 2Ψ, ZeRO-3 3Ψ, each times (n − 1)/n, in elements that one rank sends."""
    volume = answer(played(gpus, data_parallel=hook, bucket="20 kB")).volume["dp"]
    padded = 5e-3 if hook == "zero1" else 1e-6  # Megatron-LM fills buckets of its distributed optimizer up to 128 elements
    assert volume.psi == pytest.approx(factor * (gpus - 1) / gpus, rel=padded)
    assert volume.bytes == pytest.approx(2 * volume.elements)  # bf16


def test_hybrid_sharding(played) -> None:
    """HSDP: ZeRO-3 inside groups of k, gradient shards all-reduced between r groups: 3Ψ(k−1)/k + 2Ψ/k·(r−1)/r; states over k."""
    timeline = played(4, 2, data_parallel="zero3", shard=4)
    volume, psi = answer(timeline).volume, timeline.program.parameters
    assert volume["dp"].psi == pytest.approx(3 * 3 / 4)
    assert volume["replica"].psi == pytest.approx(2 * (1 / 4) * (1 / 2))
    assert dict(timeline.program.cohorts[0].resident)["optimizer"] / psi == pytest.approx(12 / 4)


def test_without_resharding(played) -> None:
    """FSDP2 with reshard_after_forward=False: parameters are gathered once, 2Ψ, and stay until the backward pass."""
    kept, released = (played(8, data_parallel="zero3", reshard=reshard) for reshard in (False, True))
    assert answer(kept).volume["dp"].psi == pytest.approx(2 * 7 / 8)
    assert answer(kept).memory[0].peak > answer(released).memory[0].peak


@pytest.mark.parametrize(("hook", "shards"), [("ddp", 1), ("zero1", 1), ("zero2", 8), ("zero3", 8)])
def test_gradients_that_a_rank_has_are_set_to_zero(played, hook, shards) -> None:
    """Megatron-LM's distributed optimizer updates its shard and zeroes a whole buffer of gradients."""
    timeline = played(8, data_parallel=hook, gradients="fp32")
    blocks = [op.work for _, op in timeline.ops(0) if isinstance(op.work, Block)]
    moved = sum(item.bytes for block in blocks for _, item in block.items() if item.label == "gradient zeroing")
    assert moved == pytest.approx(4 * timeline.program.parameters / shards)


def test_whole_gradients_are_searched_and_scaled_before_they_are_scattered(played) -> None:
    timeline = played(8, data_parallel="zero1", gradients="fp32")
    blocks = [op.work for _, op in timeline.ops(0) if isinstance(op.work, Block)]
    moved = sum(item.bytes for block in blocks for _, item in block.items() if item.label in ("gradient check", "gradient scale"))
    assert moved == pytest.approx((4 + 8) * timeline.program.parameters)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_without_resharding_has_parameters_whole_once(played, schedule) -> None:
    """Forward passes find what those before them gathered: however many are under way, a stage is there once, 2Ψ/p bytes."""
    deep = {"pp": 2, "schedule": schedule, "accumulation": 8}
    kept, released = (played(8, data_parallel="zero3", reshard=reshard, **deep) for reshard in (False, True))
    whole = 2 * sum(size for kind, size in kept.program.cohorts[0].resident if kind == "parameter") * 4 / 2
    more = answer(kept).memory[0].allocated - answer(released).memory[0].allocated
    assert 0 < more < whole
    assert answer(kept).volume["dp"].psi == pytest.approx(answer(released).volume["dp"].psi * 2 / 3)


def test_gradient_accumulation(played) -> None:
    """DDP and ZeRO-1 reduce once per step, ZeRO-2 and ZeRO-3 in every microbatch (as DeepSpeed and FSDP do)."""
    psi = {
        hook: answer(played(8, data_parallel=hook, accumulation=4)).volume["dp"].psi
        for hook in ("ddp", "zero1", "zero2", "zero3")
    }
    assert psi == pytest.approx({"ddp": 2 * 7 / 8, "zero1": 2 * 7 / 8, "zero2": (4 + 1) * 7 / 8, "zero3": 3 * 4 * 7 / 8})


@pytest.mark.parametrize(
    ("hook", "states"),
    [("ddp", (2, 2, 12)), ("zero1", (2, 2, 12 / 8)), ("zero2", (2, 2 / 8, 12 / 8)), ("zero3", (2 / 8,) * 2 + (12 / 8,))],
)
def test_states_by_zero_stage(played, hook, states) -> None:
    """(2 + 2 + 12)Ψ, divided by the dp degree stage by stage: figure 1 of Rajbhandari et al. 2020."""
    timeline = played(8, data_parallel=hook)
    held = dict(timeline.program.cohorts[0].resident)
    psi = timeline.program.parameters
    assert (held["parameter"] / psi, held["gradient"] / psi, held["optimizer"] / psi) == pytest.approx(states)


@pytest.mark.parametrize(("hook", "each"), [("ddp", 16), ("zero1", 4 + 12 / 64), ("zero2", 2 + 14 / 64), ("zero3", 16 / 64)])
def test_the_course_shows_bytes_per_parameter_by_zero_stage(hook, each) -> None:
    """On 64 GPUs, as the page of ZeRO has them, and what they are by the closed form; Megatron-LM's padding is no hundredth."""
    page = (Path(__file__).parents[1] / "docs/course/zero.md").read_text()
    (shown,) = re.findall(rf"^{hook} +([\d.]+) bytes per parameter", page, re.MULTILINE)
    assert float(shown) == pytest.approx(each, abs=0.005)


def test_gpt2_in_fp32() -> None:
    """GPT-2 1.5B, batch 32, context 1024: 6 + 6 + 18 GB of states and 56.4 of activations, 87 in all, by their own rules.

    States: 4 + 4 + 12 bytes per parameter in GB; activations by the ZeRO paper's rule in GiB.
    """
    model = load_model("gpt2-1.5b")[0]
    states = [width * model.parameters / 1e9 for width in (4, 4, 12)]
    assert [int(size) for size in states] == [6, 6, 18]
    activations = activations_by_zero(model, 32, 1024) / GIB
    assert round(activations, 1) == 56.4
    assert int(sum(states) + activations) == 87


def equal_stages(program: Program) -> Program:
    """The lowered program with a forward pass of 1 s and a backward pass of 2 s on every stage, and free transfers."""
    seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 0.0}
    blocks = {name: Block(name, (Run(1, (Kernel("memory", name, name, 0.0, time * 1e12),)),)) for name, time in seconds.items()}
    for cohort in program.cohorts:
        sends: dict[int, Send] = {}
        for op in cohort.ops:
            if isinstance(op.work, Block):
                op.work = blocks[op.work.name]
            elif isinstance(op.work, Send):
                op.work = sends.setdefault(op.work.to, replace(op.work, bytes=0.0))
    return program


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 4), (4, 1), (4, 4), (4, 8), (4, 64)])
def test_bubble_of_1f1b(p, m, toy_job, toy_prices) -> None:
    """(p − 1)/(m + p − 1) of the step with equal stages (Narayanan et al. 2021, arXiv:2104.04473)."""
    job = toy_job(p, pp=p, accumulation=m, model={"tied": False})
    timeline = run(equal_stages(lower(job.model, job.resolve())), job.cluster.topology(), toy_prices())
    assert timeline.step == 3 * (m + p - 1)
    assert summarise(timeline).bubble == pytest.approx((p - 1) / (m + p - 1))
    for lane in breakdowns(timeline):
        assert lane["bubble"] == 3 * (p - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 2)])
def test_naive_model_parallelism_works_on_one_stage_at_a_time(p, m, toy_job, toy_prices) -> None:
    job = toy_job(p, pp=p, accumulation=m, model={"tied": False}, schedule="naive")
    timeline = run(equal_stages(lower(job.model, job.resolve())), job.cluster.topology(), toy_prices())
    assert timeline.step == 3 * m * p
    assert summarise(timeline).bubble == pytest.approx(1 - 1 / p)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 2), (2, 4)])
def test_activations_in_flight(p, m, toy_job, toy_prices) -> None:
    """1F1B keeps min(p − s, m) microbatches of activations on stage s: those of a middle layer count."""
    job = toy_job(p, pp=p, accumulation=m, model={"layers": p, "tied": False})
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    layer = parts(job.model, job.resolve()).layer(0).saved
    for stage in range(1, p - 1):
        most = ledger(timeline, stage).held[:, MEMORY_KINDS.index("activation")].max()
        assert most == pytest.approx(min(p - stage, m) * layer)


def test_memory_and_time_emerge_from_the_schedule_that_ran(played) -> None:
    """More microbatches: smaller bubble, same memory on the first stage once the pipeline is full."""
    few, many = (answer(played(4, pp=4, accumulation=m)) for m in (4, 16))
    assert many.bubble < few.bubble
    assert many.memory[0].peak == few.memory[0].peak
    assert many.tokens_per_second > few.tokens_per_second
