"""Kernels of Megatron-LM before Transformer Engine."""

from __future__ import annotations

from math import log
from statistics import mean

import pytest

from sim.pricing.op_costs import CALLS, OpCosts
from sim.pricing.prices import Profile
from sim.program import COMPUTE, Block, Kernel, Run
from sim.timeline import Timeline
from strategies.layers.layer_cost import joined
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.predict import played, simulate
from strategies.read_job import read_job
from tests.strategies.layers.conftest import GPT, kernels, resolved
from topologies.reading import UserError


def test_every_step_of_the_loss_was_a_kernel() -> None:
    """megatron/mpu/cross_entropy.py: cast, maximum, difference, exponential, sum, quotient; back a product and a cast. Bytes per
    logit: 6 + 4 + 8 + 8 + 4 + 8, and 8 + 6.
    """
    model = Model(**GPT)
    head, logits = parts(model, resolved(model, kernels="apex")).head, 32 * 512
    assert [kernel.bytes / logits for kernel in kernels(head.forward, "loss")] == [6, 4, 8, 8, 4, 8]
    assert [kernel.bytes / logits for kernel in kernels(head.backward, "loss")] == [8, 6]


def test_a_loss_in_fp16_casts_nothing() -> None:
    """--fp16-lm-cross-entropy: maximum, difference, exponential, sum, quotient, each of fp16; back a product."""
    model, logits = Model(**GPT), 32 * 512
    plan = {"kernels": "apex", "precision": "fp16"}
    head = parts(model, resolved(model, **plan, framework={"fp16_lm_cross_entropy": True})).head
    assert [kernel.bytes / logits for kernel in kernels(head.forward, "loss")] == [2, 4, 4, 2, 4]
    assert [kernel.bytes / logits for kernel in kernels(head.backward, "loss")] == [4]
    usual = parts(model, resolved(model, **plan)).head
    assert usual.saved - head.saved == 2 * logits  # probabilities of 2 bytes for 4


@pytest.mark.parametrize(("field", "value"), [("precision", "bf16"), ("loss", "torch")])
def test_only_megatron_s_own_loss_is_in_fp16(field: str, value: str) -> None:
    plan = {"kernels": "apex", "precision": "fp16", "framework": {"fp16_lm_cross_entropy": True}, field: value}
    with pytest.raises(UserError, match=f"fp16_lm_cross_entropy=true contradicts {field}={value}"):
        resolved(Model(**GPT), **plan)


def test_parts_whose_times_are_taken_hide_nothing_behind_each_other(toy_job) -> None:
    """A step is then a straight line over microbatches and over layers, as where times of parts are added up: here the loss,
    which the GPU is slow at, is hidden behind launches of layers otherwise.
    """

    def step(layers: int, microbatches: int, timed: bool) -> float:
        model = {"layers": layers, "vocabulary": 500_000}
        plan = {"kernels": "apex", "microbatch": 8, "global_batch": 8 * microbatches, "framework": {"timed_parts": timed}}
        return played(toy_job(1, model=model, **plan)).ends.max()

    over = [[step(layers, 2, True) for layers in (2, 3, 4)], [step(2, count, True) for count in (2, 3, 4)]]
    bends = [before - 2 * here + after for before, here, after in over]
    assert bends == pytest.approx([0.0, 0.0], abs=1e-9)
    assert step(4, 2, timed=True) > step(4, 2, timed=False) + 1e-4


def test_collectives_are_parts_of_their_own_where_times_of_parts_are_taken() -> None:
    """They follow the kernels of their layer, and add to its time whatever they take: behind launches they would be hidden."""

    def hidden(timed: bool) -> list[float]:
        plan = {"auto": False, "tp": 8, "kernels": "apex", "microbatch": 8, "framework": {"timed_parts": timed}}
        timeline = played(read_job(model=GPT | {"hidden": 512, "context": 1024}, cluster="dgx-a100", plan=plan))
        blocks = {op.work: None for op in timeline.program.cohorts[0].ops if isinstance(op.work, Block)}
        return [_hidden(block, timeline.op_costs) for block in blocks]

    assert max(hidden(timed=True)) <= 0
    assert max(hidden(timed=False)) > 100e-6


def _hidden(block: Block, costs: OpCosts) -> float:
    """Seconds of a block's collectives that it does not take longer for, where it waits for launches."""
    kernels = (Run(times, [item for item in items if isinstance(item, Kernel)]) for times, items in block.runs)
    collectives = sum(times * costs.collective(work, 0).alone for times, work in block.collectives)
    return costs.block(Block("kernels", tuple(kernels)), 0).critical + collectives - costs.block(block, 0).critical


@pytest.mark.parametrize("timed", [True, False])
def test_parts_whose_times_are_taken_are_updated_one_by_one(toy_job, timed: bool) -> None:
    job = toy_job(1, model={"layers": 3, "tied": False}, kernels="apex", framework={"timed_parts": timed})
    blocks = [op.work for op in lower(job.model, job.resolve()).cohorts[0].ops if isinstance(op.work, Block)]
    kernels = [item for block in blocks for times, items in block.runs for item in items * times if isinstance(item, Kernel)]
    updates = [kernel for kernel in kernels if kernel.label == "adam"]
    assert len(updates) == (5 if timed else 1)
    assert sum(kernel.shape[0] for kernel in updates) == job.model.parameters
    assert {kernel.shape[1] for kernel in updates} == {320}


def test_only_whole_passes_have_parts_that_are_timed(toy_job) -> None:
    with pytest.raises(UserError, match="timed_parts=true contradicts schedule=zb-h1"):
        toy_job(2, pp=2, schedule="zb-h1", kernels="apex", framework={"timed_parts": True}).resolve()


@pytest.mark.parametrize(("tp", "batch", "passes"), [(1, 1, 1), (2, 1, 1), (4, 1, 4), (4, 2, 1), (8, 1, 4)])
def test_the_fused_softmax_takes_four_heads_at_a_time(tp: int, batch: int, passes: int) -> None:
    """8 heads: other numbers of rows are left to PyTorch's operators (megatron/model/fused_softmax.py, is_kernel_available)."""
    model = Model(**GPT)
    layer = parts(model, resolved(model, kernels="apex", attention="materialised", tp=tp, microbatch=batch)).layer(0)
    assert len(kernels(layer.forward, "softmax")) == passes


@pytest.mark.parametrize(("microbatches", "count"), [(1, 0), (2, 8)])
def test_gradients_of_vectors_are_added_one_by_one(microbatches: int, count: int) -> None:
    """Four biases, and weight and bias of two norms, once there is a gradient to add to."""
    model = Model(**GPT)
    layer = parts(model, resolved(model, kernels="apex", accumulation=microbatches)).layer(0)
    small = [item for item in layer.backward if isinstance(item, Kernel) and item.label.endswith(" sum") and item.bytes < 3000]
    assert len(small) == count


def test_megatron_of_2021_launched_small_kernels_for_batch_and_loss() -> None:
    """Twelve for a batch, which every stage gets for itself; the embedding's masks only with tp; later versions have none."""
    model = Model(**GPT)
    for tp, masks in ((1, 0), (2, 7)):
        work = parts(model, resolved(model, kernels="apex", tp=tp))
        assert len(work.batch) == 12
        assert len(kernels(work.embedding.forward, "token mask")) == masks
        assert [len(kernels(work.head.forward, label)) for label in ("loss targets", "mean loss")] == [12, 10]
    assert not parts(model, resolved(model)).batch
    program = lower(model, Resolved.of(Plan(kernels="apex", pp=2), model, 2))
    first = [next(op.work for op in cohort.ops if isinstance(op.work, Block)) for cohort in program.cohorts]
    assert [len(kernels(block.runs[0].items, "batch")) for block in first] == [12, 12]


def test_alibi_is_written_to_every_score_and_read_by_the_product(toy_job) -> None:
    """torch.baddbmm with an operand: two bytes a score to copy it there, and two to read it again; two heads of 32 × 32 scores.
    Recomputed, it is all done once more.
    """
    plan = dict(attention="materialised", recompute="full", tp=4)
    jobs = [toy_job(4, model={"positions": positions}, **plan) for positions in ("rotary", "alibi")]
    without, with_it = (parts(job.model, job.resolve()).layers[0] for job in jobs)
    for direction in ("forward", "recompute"):
        product = [[item.bytes for item in getattr(part, direction) if item.label == "scores"] for part in (without, with_it)]
        assert product[1][0] - product[0][0] == 2 * 2 * 32 * 32
        assert [item.bytes for item in getattr(with_it, direction) if item.label == "alibi"] == [2 * 2 * 32 * 32]
    assert jobs[0].model.parameters == jobs[1].model.parameters


@pytest.mark.parametrize(("recompute", "checkpoints", "forks"), [("none", 0, 1), ("full", 1, 2), ("selective", 1, 2)])
def test_the_host_forks_generators_for_dropout_and_restores_them_in_checkpoints(
    recompute: str, checkpoints: int, forks: int
) -> None:
    """megatron/mpu/random.py: a fork around attention's dropout, also when it is repeated, and a call of a checkpoint's function;
    frameworks whose host is not described so have none.
    """
    model = Model(**GPT | {"attention_dropout": True})
    fields = {"attention": "materialised", "recompute": recompute}
    layer = parts(model, resolved(model, kernels="apex", **fields)).layer(0)
    called = [item.calls for item in (*layer.forward, *layer.backward) if isinstance(item, Kernel) and item.calls]
    assert [called.count(name) for name in ("checkpoint", "generator fork")] == [checkpoints, forks]
    other = parts(model, resolved(model, **fields)).layer(0)
    assert not any(item.calls for item in (*other.forward, *other.backward) if isinstance(item, Kernel))


def test_layers_that_are_recomputed_together_are_one_checkpoint() -> None:
    """Of three layers that keep the first one's input, the function is called once; dropout forks six times."""
    model = Model(**GPT | {"attention_dropout": True})
    layer = parts(model, resolved(model, kernels="apex", attention="materialised", recompute="full")).layer(0)
    both = joined((layer, layer, layer))
    called = [item.calls for item in (*both.forward, *both.backward) if isinstance(item, Kernel) and item.calls]
    assert [called.count(name) for name in ("checkpoint", "generator fork")] == [1, 6]


def test_a_host_that_restores_generators_launches_later(toy_job) -> None:
    """Two layers, fully recomputed, each a checkpoint and two forks: the host of a block takes them beside its launches."""
    job = toy_job(gpus=1, model={"attention_dropout": True}, kernels="apex", attention="materialised", recompute="full")
    costs = played(job).op_costs
    blocks = [op.work for op in costs.program.cohorts[0].ops if isinstance(op.work, Block)]
    called = 0.0
    for block in blocks:
        each = [times * _launch(item, costs.prices.profile) for times, item in block.items() if isinstance(item, Kernel)]
        calls = sum(times * CALLS[item.calls] for times, item in block.items() if isinstance(item, Kernel) and item.calls)
        assert costs.block(block, 0).host == pytest.approx(sum(each) + calls, abs=1e-8)
        called += calls
    layers = job.model.layers
    assert called == pytest.approx(layers * (CALLS["checkpoint"] + 2 * CALLS["generator fork"]))


def _launch(kernel: Kernel, profile: Profile) -> float:
    """Host seconds: of a module's kernel 5/3 of what Python usually takes, of what it calls by itself 4/5 (hooks 1/3)."""
    own = 5 / 3 if kernel.phase in ("forward", "recompute") else 1.0
    part = {"accumulation": 0.0, "hook": 1 / 3, "operator": 0.8, "": own}[kernel.launcher]
    return profile.launch + part * (profile.eager - profile.launch)


def test_gradients_are_added_by_autograd_or_by_a_hook() -> None:
    """Of 16 bits where they are; to a buffer of fp32 by megatron/model/distributed.py."""
    model = Model(**GPT)
    for more, launcher in (({"gradients": "same"}, "accumulation"), ({"gradients": "fp32"}, "hook")):
        layer = parts(model, resolved(model, kernels="apex", accumulation=2, **more)).layer(0)
        sums = [item for item in layer.backward if isinstance(item, Kernel) and item.label.endswith(" sum")]
        assert {item.launcher for item in sums} == {launcher}


BERT = {
    "name": "bert",
    "family": "encoder",
    "hidden": 1024,
    "layers": 24,
    "heads": 16,
    "vocabulary": 28996,
    "vocabulary_multiple": 128,
    "context": 512,
    "token_types": 2,
    "head_bias": True,
    "head_transform": True,
    "pooler": True,
    "pooler_classes": 2,
    "dropout": True,
    "attention_dropout": True,
}
# milliseconds of all forward and of all backward passes of a step, on the last stage. A DGX A100: github.com/xduan7/
# scalable-transformer, docs/megatron_bert_345m.md. Four A100: github.com/NVIDIA/nccl issue 743, less 5.2 that its batch took
TIMED = (
    ({"microbatch": 4, "global_batch": 8, "recompute": "full"}, 1, 43.4, 90.7),
    ({"microbatch": 4, "global_batch": 32, "recompute": "full", "tp": 2, "pp": 2, "dp": 2}, 8, 53.9, 99.2),
    ({"microbatch": 1, "global_batch": 1}, 1, 26.3, 41.8),
)


def test_passes_that_wait_for_launches_take_as_long_as_was_timed() -> None:
    """Megatron-LM's own timers. Its hosts differ by a third; in the mean of all six passes nothing is left."""
    usual = {"auto": False, "kernels": "apex", "precision": "fp16", "attention": "materialised", "gradients": "same"}
    usual |= {"overlap": False, "overlap_tp": "none", "framework": {"timers": True}, "sequence": 512}
    errors = []
    for plan, gpus, *published in TIMED:
        cluster = {"based_on": "dgx-a100-40gb", "nodes": 1, "node": {"gpus": gpus}}
        timeline = simulate(read_job(model=BERT, cluster=cluster, plan=usual | plan))
        for direction, milliseconds in zip(("forward", "backward"), published, strict=True):
            errors.append(log(1e3 * _passes(timeline, direction) / milliseconds))
    assert max(map(abs, errors)) < log(1.45)
    assert abs(mean(errors)) < 0.05


def _passes(timeline: Timeline, direction: str) -> float:
    """Seconds from the first launch of each pass of the last stage to its end."""
    seconds, lane = 0.0, len(timeline.lanes) - 1
    for number, op in timeline.ops(lane):
        if op.stream == COMPUTE and isinstance(op.work, Block):
            phases = {item.phase for _, items in op.work.runs for item in items if isinstance(item, Kernel)}
            if direction in phases and phases <= {direction, "recompute"}:
                seconds += timeline.end[number] - timeline.launched[number]
    return seconds
