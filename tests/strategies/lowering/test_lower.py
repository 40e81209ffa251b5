"""What the stages of a pipeline exchange, and what waits for it."""

from __future__ import annotations

import pytest

from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.pricing.prices import Prices
from sim.program import PIPELINE_PASS, Block, Collective, Kernel, Ref, Send
from strategies.lowering.lower import lower
from strategies.schedules import actions


@pytest.mark.parametrize(("hook", "shards"), [("ddp", 1), ("zero1", 1), ("zero2", 4), ("zero3", 4)])
def test_both_ends_sum_the_gradients_of_a_tied_embedding_that_they_hold(toy_job, hook: str, shards: int) -> None:
    """512 rows of 64 in bf16 on the first and on the last of 2 stages; of 4 dp ranks each has all of them, or a quarter."""
    job = toy_job(8, pp=2, data_parallel=hook)
    cohorts = lower(job.model, job.resolve()).cohorts
    sums = [
        [op.work.bytes for op in cohort.ops if isinstance(op.work, Collective) and op.work.axis == "pp"] for cohort in cohorts
    ]
    assert sums == [[512 * 64 * 2 / shards]] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe", "dualpipe-v", "1f1b-overlapped", "interleaved-overlapped"])
def test_a_pass_waits_for_every_result_that_is_sent_to_its_rank(toy_job, schedule: str) -> None:
    """One of two passes in turns, too."""
    job = toy_job(4, model={"layers": 8, "tied": False}, pp=4, accumulation=8, schedule=schedule)
    cohorts = lower(job.model, job.resolve()).cohorts
    sent = {
        Ref(rank, number): op.work.to
        for rank, cohort in enumerate(cohorts)
        for number, op in enumerate(cohort.ops)
        if isinstance(op.work, Send)
    }
    assert all(any(ref in op.after for op in cohorts[to].ops) for ref, to in sent.items())


@pytest.mark.parametrize(
    ("kernels", "schedule", "asked", "held"),
    [
        ("torch", "1f1b", ["backward 0", "backward 1", "backward 2"], ["forward 1", "forward 2", "forward 3"]),
        ("torch", "gpipe", ["forward 0", "forward 1", "forward 2"], []),
        ("torch", "naive", [], []),
        ("megatron", "1f1b", [], []),
    ],
)
def test_pytorch_asks_for_a_result_when_it_needs_it(
    toy_job, kernels: str, schedule: str, asked: list[str], held: list[str]
) -> None:
    """The last of 2 stages: after which of its passes it asks for the activations of microbatches 1, 2, 3, which cannot begin to
    come before; and which passes wait until the gradients are gone that it sends beside.
    """
    job = toy_job(2, 1, model={"tied": False}, pp=2, accumulation=4, schedule=schedule, kernels=kernels)
    first, last = lower(job.model, job.resolve()).cohorts
    name = [f"{getattr(op.work, 'name', 'send')} {op.microbatch}" for op in last.ops]
    sends = [op for op in first.ops if isinstance(op.work, Send)]
    assert [name[ref.op] for op in sends for ref in op.after if ref.cohort == 1] == asked
    passes = [(name[number], ref) for number, op in enumerate(last.ops) if isinstance(op.work, Block) for ref in op.after]
    assert [mine for mine, ref in passes if ref.cohort == 1 and name[ref.op].startswith("send")] == held


@pytest.mark.parametrize(
    ("kernels", "schedule", "hook", "called"),
    [
        ("torch", "1f1b", "ddp", True),
        ("torch", "gpipe", "zero3", True),
        ("compiled", "interleaved", "zero1", True),
        ("torch", "zb-v", "ddp", True),
        ("torch", "dualpipe-v", "ddp", True),
        ("torch", "pipedream", "ddp", False),
        ("megatron", "1f1b", "ddp", False),
    ],
)
def test_each_pass_is_called_once_by_the_pipeline_runtime(toy_job, kernels: str, schedule: str, hook: str, called: bool) -> None:
    """However many ops a pass is cut into, and where two passes take turns."""
    plan = {"schedule": schedule, "data_parallel": hook, "kernels": kernels, "bucket": "4 KiB"} | (
        {"chunks": 2} if schedule == "interleaved" else {}
    )
    plan |= {"bucket": None} if hook == "zero3" else {}
    job = toy_job(4, 1, model={"tied": False}, pp=2, accumulation=4, **{key: value for key, value in plan.items() if value})
    resolved = job.resolve()
    for rank, cohort in enumerate(lower(job.model, resolved).cohorts):
        blocks = [op.work for op in cohort.ops if isinstance(op.work, Block)]
        calls = sum(
            times for block in blocks for times, item in block.items() if isinstance(item, Kernel) and item.calls == PIPELINE_PASS
        )
        passes = len(list(actions(schedule, rank, 2, 4, resolved.chunks)))
        assert calls == (passes if called else 0)


@pytest.mark.parametrize("synchronous", [True, False])
def test_what_the_pipeline_runtime_takes_is_between_passes(toy_job, toy_profile, synchronous: bool) -> None:
    """One of two stages computes at a time: forward and backward of 4 microbatches on each. A host that goes ahead of its GPU
    loses it only where it has nothing to launch meanwhile, with passes of next to nothing.
    """
    job = toy_job(2, 1, model={"tied": False}, pp=2, accumulation=4, schedule="naive", kernels="torch")
    program, topology = lower(job.model, job.resolve()), job.cluster.topology()
    steps = []
    for fixed in ("0 s", "1 ms"):
        profile = toy_profile(synchronous=synchronous, wrapping={PIPELINE_PASS: {"fixed": fixed}})
        steps.append(summarise(run(program, topology, Prices(profile, job.cluster.node.gpu))).step_seconds)
    assert steps[1] - steps[0] == pytest.approx((16 if synchronous else 8) * 1e-3, rel=0.03)


def test_a_causal_mask_hides_half_of_attention(toy_job) -> None:
    """QKᵀ and AV of 6 sequences of 32 tokens, 4 layers of 64: 2 · 2·s²·hidden each, and twice that backward."""
    job = toy_job(2, accumulation=3)
    program = lower(job.model, job.resolve())
    assert program.masked_flops == program.model_flops - 3 * 6 * 4 * (2 * 2 * 32**2 * 64) / 2


@pytest.mark.parametrize(("schedule", "split"), [("zb-h1", True), ("1f1b", False)])
def test_gradients_of_outputs_are_kept_for_a_pass_of_weights(toy_job, schedule: str, split: bool) -> None:
    """2 layers of 64 features over 32 tokens in bf16: 192 and 64 outputs of attention, 256 and 64 of the MLP."""
    job = toy_job(2, 1, model={"tied": False}, pp=2, accumulation=4, schedule=schedule)
    first = lower(job.model, job.resolve()).cohorts[0]
    kept = {
        item.label: times * item.kept
        for op in first.ops
        if isinstance(op.work, Block) and op.work.name == "weight gradient"
        for times, item in op.work.items()
        if isinstance(item, Kernel) and item.kept
    }
    outputs = {"qkv": 192, "attention output": 64, "mlp up": 256, "mlp down": 64}
    expected = {f"{name} weight": 2 * 2 * 32 * count for name, count in outputs.items()}
    assert kept == (expected if split else {})
    whole = [item for op in first.ops if isinstance(op.work, Block) and op.work.name == "backward" for _, item in op.work.items()]
    assert not any(item.kept for item in whole if isinstance(item, Kernel))
