"""DeepSpeed's buckets and prefetch, and ZeRO++: what is gathered when, what crosses nodes, what is held."""

from __future__ import annotations

import pytest

from sim.analysis.link_load import link_loads
from sim.analysis.memory import ledger
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.program import MEMORY_KINDS, Block, Collective, Kernel, Send
from sim.timeline import Timeline
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.frameworks.deepspeed.prefetch import steps
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from topologies.reading import UserError

ALL = {"stage3_param_persistence_threshold": 0}  # every parameter comes and goes
TWICE = ALL | {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}  # and each pass gathers it
PLUS = ALL | {"zero_quantized_weights": True, "zero_hpz_partition_size": 4, "zero_quantized_gradients": True}


@pytest.fixture
def played(toy_job, toy_prices):
    def play(hook: str, options: dict | None, gpus=4, nodes=4, fold=True, node=None, prices=None, **plan) -> Timeline:
        plan = {"algorithm": "ring, all_to_all/direct"} | plan
        job = toy_job(gpus, nodes, {"tied": False}, node, data_parallel=hook, deepspeed=options, **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(**(prices or {})), fold=fold)

    return play


# -- when parts are gathered: four parts of ten elements ---------------------------------------------------------------------


def trace(**limits: int) -> list[tuple[int, bool, tuple[int, ...], bool]]:
    none = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return [tuple(step) for step in steps([10] * 4, DeepSpeed.model_validate(none | limits))]


def test_without_prefetch_each_part_is_gathered_when_it_is_needed() -> None:
    assert trace() == [(part, True, (), True) for part in (0, 1, 2, 3, 3, 2, 1, 0)]


@pytest.mark.parametrize(("bucket", "ahead"), [(1, 1), (10, 1), (11, 2), (1000, 3)])
def test_the_prefetch_bucket_counts_elements(bucket, ahead) -> None:
    """Parts are gathered ahead until they have as many elements as the bucket."""
    first = trace(stage3_prefetch_bucket_size=bucket)[0]
    assert first == (0, True, tuple(range(1, 1 + ahead)), bucket < 1000)


def test_live_parameters_stop_the_prefetch() -> None:
    assert [step[2] for step in trace(stage3_prefetch_bucket_size=1000, stage3_max_live_parameters=20)][:3] == [(1,), (2,), (3,)]
    assert {step[2] for step in trace(stage3_prefetch_bucket_size=1000, stage3_max_live_parameters=10)} == {()}


@pytest.mark.parametrize(("distance", "kept"), [(1, {3}), (20, {3}), (21, {3, 2}), (41, {3, 2, 1}), (1000, {3, 2, 1, 0})])
def test_parts_that_are_used_again_soon_are_kept(distance, kept) -> None:
    """Between the two uses of part i there are 2 · (3 − i) others; the last backward use of each is the end."""
    forward, backward = trace(stage3_max_reuse_distance=distance)[:4], trace(stage3_max_reuse_distance=distance)[4:]
    assert {part for part, _, _, release in forward if not release} == kept
    assert {part for part, needed, _, _ in backward if not needed} == kept
    assert all(release for *_, release in backward)


# -- what that does to a step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("distance", "expected"), [(0, 3), (10**9, 2)])
def test_volume_follows_reuse(played, distance, expected) -> None:
    """Everything is gathered twice, or once where nothing is released in between; gradients are reduced once."""
    timeline = played("zero3", TWICE | {"stage3_max_reuse_distance": distance})
    assert summarise(timeline).volume["dp"].elements == pytest.approx(expected * timeline.program.parameters * 15 / 16)


def test_small_parameters_stay(played) -> None:
    """Norms and biases, by the default threshold: gathered once after the update, whole on every rank."""
    released = played("zero3", TWICE)
    kept = played("zero3", TWICE | {"stage3_param_persistence_threshold": 1000})
    psi, small = kept.program.parameters, 4 * (2 * 2 * 64 + 192 + 64 + 256 + 64) + 2 * 64  # layers, final norm
    assert summarise(kept).volume["dp"].elements == pytest.approx((3 * (psi - small) + 2 * small) * 15 / 16)
    held = [
        sum(size for kind, size in timeline.program.cohorts[0].resident if kind == "parameter") for timeline in (released, kept)
    ]
    assert held[1] - held[0] == 2 * small


SMALL_ONES = 4 * (2 * 2 * 64 + 192 + 64 + 256 + 64) + 2 * 64  # norms and biases of four layers, final norm


@pytest.mark.parametrize(
    ("gpus", "offload", "expected"),
    [
        (1, None, {}),
        (1, {"optimizer": "cpu"}, {}),
        (1, {"optimizer": "cpu", "parameters": "cpu"}, {"parameter": 2 * SMALL_ONES}),
        (2, {"optimizer": "cpu", "parameters": "cpu"}, {"parameter": 2 * SMALL_ONES, "buffer": 2 * 5000}),
    ],
)
def test_what_a_rank_holds_besides_its_part(toy_job, gpus, offload, expected) -> None:
    """Small parameters where the others are elsewhere, and a buffer of gradients where these are reduced."""
    options = {"stage3_param_persistence_threshold": 256, "reduce_bucket_size": 5000}
    job = toy_job(gpus, 1, {"tied": False}, {"cpu": CPU}, data_parallel="zero3", deepspeed=options, offload=offload)
    resident = lower(job.model, job.resolve()).cohorts[0].resident
    assert {kind: size for kind, size in resident[3:] if size} == expected


def test_prefetch_hides_gathers_and_takes_memory(played) -> None:
    base = TWICE
    none, some, every = (
        played("zero3", base | {"stage3_prefetch_bucket_size": size}, microbatch=8, node={"nvlink": "1 TB/s", "nic": "1 TB/s"})
        for size in (0, 1, 10**9)
    )
    assert none.step > some.step
    peaks = [ledger(timeline, 0).peak for timeline in (none, some, every)]
    assert peaks[0] < peaks[1] < peaks[2]


def test_buckets_in_elements(played) -> None:
    """Gradients of 60,000 elements at a time, whatever their bytes; with overlap there are two buffers, of which BF16_Optimizer
    needs none.
    """
    for gradients, width in (("same", 2), ("fp32", 4)):
        timeline = played("zero1", {"reduce_bucket_size": 60_000, "allgather_bucket_size": 10**9}, gradients=gradients)
        sizes = {op.work.bytes for op in timeline.program.cohorts[0].ops if getattr(op.work, "operation", "") == "all_reduce"}
        assert max(sizes) <= 60_000 * width
        gathers = [op.work for op in timeline.program.cohorts[0].ops if getattr(op.work, "operation", "") == "all_gather"]
        assert [work.repeat for work in gathers] == [1]
        buffers = dict(timeline.program.cohorts[0].resident).get("buffer", 0)
        assert buffers == (2 * 60_000 * width if gradients == "same" else 0)


@pytest.mark.parametrize(
    ("hook", "options", "fields", "volume"),
    [
        ("zero1", {}, {}, 2 + 1),
        ("zero2", {}, {}, 2 + 1),
        ("zero1", {"use_multi_rank_bucket_allreduce": False}, {}, 1 + 1),
        ("zero2", {"use_multi_rank_bucket_allreduce": False}, {}, 1 + 1),
        ("zero1", {"use_multi_rank_bucket_allreduce": False}, {"gradients": "fp32"}, 2 + 1),  # BF16_Optimizer
        ("zero2", {"use_multi_rank_bucket_allreduce": False}, {"gradients": "fp32"}, 1 + 1),
    ],
)
def test_gradients_are_all_reduced_by_default(played, toy_job, hook, options, fields, volume) -> None:
    """DeepSpeed 0.19.8 on two ranks of gloo, ZeRO-1 and 2 of a model of 16,640 parameters: an all-reduce of all gradients and an
    all-gather, 1.5 Ψ sent by a rank (deepspeed/runtime/zero/stage_1_and_2.py, allreduce_and_scatter).
    """
    parameters = toy_job(2, 1, {"tied": False}).model.parameters
    sent = summarise(played(hook, options, 2, 1, **fields)).volume["dp"].elements
    assert sent == pytest.approx(volume / 2 * parameters, rel=1e-3)


def test_zero3_reduces_full_buckets(played) -> None:
    """A bucket that holds the whole model is reduced once, at the end of the backward pass; volumes are the same."""
    whole, each = (played("zero3", ALL | {"reduce_bucket_size": size}) for size in (10**9, 1))
    counts = [
        sum(getattr(op.work, "operation", "") == "reduce_scatter" for op in timeline.program.cohorts[0].ops)
        for timeline in (whole, each)
    ]
    assert counts == [1, 6]
    assert summarise(whole).volume["dp"].elements == pytest.approx(summarise(each).volume["dp"].elements)


def test_without_overlap_reductions_are_behind_what_was_launched(played) -> None:
    """Without overlap_comm DeepSpeed's reduction stream is the compute stream: nothing computes beside a reduction."""
    timeline = played("zero3", {"reduce_bucket_size": 50_000}, overlap=False)
    ops = list(enumerate(timeline.program.cohorts[0].ops))
    spans = {
        kind: [(timeline.start[number], timeline.end[number]) for number, op in ops if matches(op)]
        for kind, matches in (
            ("reduce", lambda op: getattr(op.work, "operation", "") == "reduce_scatter"),
            ("compute", lambda op: op.stream == "compute"),
        )
    }
    assert spans["reduce"]
    assert not [1 for a, b in spans["reduce"] for c, d in spans["compute"] if a < d and c < b]


# -- ZeRO++ -------------------------------------------------------------------------------------------------------------------


def across_nodes(timeline: Timeline) -> float:
    """Bytes that leave a node in the step."""
    return sum(load.count * load.bytes for load in link_loads(timeline) if load.kind == "nic") / 2 / 4  # as much comes in


def test_zero_plus_plus_sends_a_quarter_across_nodes(played) -> None:
    """arXiv:2306.10209: 3M between nodes become 0.75M, M = 2Ψ bytes: 0.5M of the forward gather and 0.25M of gradients."""
    base = TWICE
    plain, plus = played("zero3", base), played("zero3", base | PLUS)
    m = 2 * plain.program.parameters
    assert across_nodes(plain) == pytest.approx(3 * m * 15 / 16, rel=1e-6)
    assert across_nodes(plus) == pytest.approx(0.5 * m * 15 / 16 + 0.25 * m * 3 / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"zero_quantized_weights": True}, (0.5 + 0.5 + 1) * 15 / 16),
        ({"zero_hpz_partition_size": 4}, (1 + 1) * 15 / 16),
        ({"zero_quantized_gradients": True}, (1 + 1) * 15 / 16 + 0.25 * 3 / 4),
    ],
)
def test_each_of_the_three(played, options, expected) -> None:
    timeline = played("zero3", TWICE | options)
    assert across_nodes(timeline) / (2 * timeline.program.parameters) == pytest.approx(expected, rel=1e-6)


def test_second_copy_takes_memory(played) -> None:
    plain, hpz = (played("zero3", ALL | {"zero_hpz_partition_size": size}) for size in (1, 4))
    more = ledger(hpz, 0).held[-1].sum() - ledger(plain, 0).held[-1].sum()
    assert more == pytest.approx(2 * plain.program.parameters / 4)


def test_quantising_costs_compute(played) -> None:
    """Two passes over 3 bytes per parameter to turn integers back, as much over each rank's part, at 1 TB/s."""
    base = TWICE
    plain, plus = (summarise(played("zero3", options)) for options in (base, base | {"zero_quantized_weights": True}))
    psi = played("zero3", base).program.parameters
    more = sum(plus.breakdown[phase] - plain.breakdown[phase] for phase in ("forward", "backward"))
    assert more == pytest.approx(2 * 3 * psi * (1 + 1 / 16) / 1e12, rel=1e-4)


@pytest.mark.parametrize(("shape", "inner", "outer"), [((4, 4), 4, 4), ((2, 8), 2, 8), ((8, 1), 8, 1), ((1, 8), 8, 1)])
def test_passes_over_gradients_that_are_integers_on_their_way(played, shape, inner, outer) -> None:
    """Four bits a gradient. Of each 2 bytes are read and half a byte is written; every rank of a node adds up half a byte of all
    gradients and writes as much of its own part; of that it adds up what other nodes have, and writes 2 bytes of what is its own.
    """
    timeline = played("zero3", ALL | {"zero_quantized_gradients": True}, *shape)
    psi = timeline.program.parameters
    moved = {"quantise gradients": 0.0, "add up gradients": 0.0}
    for op in timeline.program.cohorts[0].ops:
        if isinstance(op.work, Block):
            for _, item in op.work.items():
                if isinstance(item, Kernel) and item.label in moved:
                    moved[item.label] += item.bytes
    across = psi / 2 / inner + psi / 2 / inner if outer > 1 else 0.0
    added = psi / 2 + across + 2 * psi / inner / outer
    assert moved["quantise gradients"] == pytest.approx(2.5 * psi)
    assert moved["add up gradients"] == pytest.approx(added, rel=1e-4)


@pytest.mark.parametrize("plan", [{}, {"overlap": False}, {"accumulation": 2}])
@pytest.mark.parametrize("shape", [(4, 4), (4, 1), (1, 4), (1, 1)])
def test_memory_comes_back_and_folding_changes_nothing(played, plan, shape) -> None:
    options = PLUS | {"zero_hpz_partition_size": 1}
    folded, unfolded = (played("zero3", options, *shape, fold=fold, **plan) for fold in (True, False))
    assert folded.step == pytest.approx(unfolded.step, rel=1e-3)
    held = ledger(folded, 0).held
    assert held.min() >= -1e-6
    assert held[-1].sum() == pytest.approx(sum(size for _, size in folded.program.cohorts[0].resident))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"data_parallel": "ddp", "deepspeed": {}}, "deepspeed contradicts data_parallel=ddp"),
        ({"data_parallel": "zero2", "deepspeed": {}, "bucket": "1 MB"}, "bucket contradicts deepspeed"),
        ({"data_parallel": "zero2", "deepspeed": PLUS}, "stage3_param_persistence_threshold contradicts data_parallel=zero2"),
        ({"data_parallel": "zero3", "deepspeed": {}, "pp": 2}, "contradicts pp=2: DeepSpeed's pipelines are incompatible"),
        ({"data_parallel": "zero3", "deepspeed": {}, "reshard": False}, "contradicts reshard=false"),
        ({"data_parallel": "zero3", "deepspeed": PLUS | {"zero_hpz_partition_size": 2}}, "needs zero_hpz_partition_size=1 or 4"),
        ({"data_parallel": "zero3", "deepspeed": {"zero_hpz_partition_size": 3}}, "does not divide dp=16"),
    ],
)
def test_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(4, 4, **plan).resolve()


def test_gradients_of_16_bits_stay_beside_those_of_32(played) -> None:
    """BF16_Optimizer: 2 + 4 bytes per parameter; where both have 16 bits, 2."""

    def held(**plan) -> float:
        timeline = played("zero1", {}, **plan)
        return (
            sum(size for kind, size in timeline.program.cohorts[0].resident if kind == "gradient") / timeline.program.parameters
        )

    assert (held(gradients="fp32"), held(gradients="same")) == (6, 2)


def test_each_gradient_is_turned_to_fp32_before_it_is_added(toy_job, toy_prices) -> None:
    """By BF16_Optimizer, when the backward pass is over: of many words the embedding's takes more than the loss. No block that
    the pass leaves is as large.
    """
    model, words = {"vocabulary": 20_000, "tied": False}, 20_000
    job = toy_job(2, 1, model, data_parallel="zero1", deepspeed={}, gradients="fp32")
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    book, resident = ledger(timeline, 0), sum(size for _, size in timeline.program.cohorts[0].resident)
    passes = resident + 32 * words * (4 + 2) + 4 * 32 * 64 * 2  # probabilities and logits, and what layers keep, at least
    assert book.peak == pytest.approx(resident + 4 * 64 * words)
    assert book.reserved >= passes + 4 * 64 * words


# -- between the stages of a pipeline -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "sent", "gathers"), [({}, 1 / 2, 1), (None, 1, 0)])
def test_tp_ranks_send_a_part_each_and_gather_the_whole(toy_job, options, sent, gathers) -> None:
    """DeepSpeed's pipeline engine: of every microbatch a rank sends 1/tp of the activations on, and gathers them where they come
    in; and backward 1/tp of the gradients, before which the other stage gathers its result and the gradients.
    """
    job = toy_job(4, 1, data_parallel="zero1", deepspeed=options, pp=2, tp=2, microbatch=2, accumulation=3)
    first, second = (cohort.ops for cohort in lower(job.model, job.resolve()).cohorts)
    whole = 2 * 2 * 32 * 64  # bytes, sequences, tokens, features
    for ops in (first, second):
        assert [op.work.bytes for op in ops if isinstance(op.work, Send)] == [whole * sent] * 3
    expected = {
        ("stage input", "forward"): second,
        ("stage output", "backward"): first,
        ("stage output gradient", "backward"): first,
    }
    for (label, direction), where in expected.items():
        for ops in (first, second):
            items = [
                item for op in ops if isinstance(op.work, Block) and op.work.name == direction for _, item in op.work.items()
            ]
            sizes = [item.bytes for item in items if isinstance(item, Collective) and item.label == label]
            assert sizes == [whole] * 3 * gathers * (ops is where)


@pytest.mark.parametrize(("options", "moved"), [({}, [6, 12]), (None, [10])])
def test_fp32_gradients_are_cast_and_then_added_to(toy_job, options, moved) -> None:
    """hp_grad.add_(grad.to(fp32)): 2 + 4 bytes for the cast, 4 + 4 + 4 for the sum; one kernel would move 2 + 4 + 4."""
    job = toy_job(2, 1, data_parallel="zero1", deepspeed=options, accumulation=3, gradients="fp32", kernels="apex")
    layer = parts(job.model, job.resolve()).layers[0]
    passes = [item for item in layer.backward if isinstance(item, Kernel) and item.label.startswith("mlp up weight ")]
    assert [item.bytes / (64 * 256) for item in passes] == moved


CPU = {"memory": "1 TB", "memory_bandwidth": "100 GB/s"}
CHECKPOINTED = {"layers": 6, "hidden": 64, "heads": 8, "context": 32}


def checkpointed(toy_job, **options):
    """A job of two tp and four dp ranks that recomputes its layers."""
    return toy_job(8, model=CHECKPOINTED, node={"cpu": CPU}, tp=2, data_parallel="zero3", recompute="full", deepspeed=options)


@pytest.mark.parametrize("version", ["0.5", "0.6"])
def test_checkpoints_leave_the_gpu(toy_job, toy_prices, version) -> None:
    """Inputs of 6 layers, 2 · 32 · 64 bytes each, go out and come back."""

    def played(**options):
        job = checkpointed(toy_job, version=version, **options)
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
        return timeline, summarise(timeline)

    (before, _), (timeline, moved) = played(), played(cpu_checkpointing=True)
    copies = [op.work for op in timeline.program.cohorts[0].ops if isinstance(op.work, Send) and op.work.label == "checkpoint"]
    assert [copy.route for copy in copies] == [("gpu", "cpu")] * 6 + [("cpu", "gpu")] * 6
    assert {copy.bytes for copy in copies} == {2 * 32 * 64}
    most = [ledger(each, 0).held[:, MEMORY_KINDS.index("activation")].max() for each in (before, timeline)]
    assert most[0] - most[1] == pytest.approx(6 * 2 * 32 * 64)  # when the loss runs, none is there
    assert moved.breakdown["host exposed"] > 0
    assert moved.offloaded is not None
    assert moved.offloaded.memory == 8 * 6 * 2 * 32 * 64  # of the ranks of a node


def test_tp_ranks_share_a_checkpoint(toy_job) -> None:
    """Each keeps half, and what was kept by all of them is gathered before a layer runs again."""
    whole, half = (
        parts(job.model, job.resolve()).layer(0)
        for job in (checkpointed(toy_job), checkpointed(toy_job, partition_activations=True))
    )
    assert (whole.saved, half.saved) == (2 * 32 * 64, 32 * 64)
    assert whole.saved + whole.restored == half.saved + half.restored
    gather = half.recompute[0]
    assert isinstance(gather, Collective)
    assert (gather.operation, gather.axis, gather.bytes) == ("all_gather", "tp", 2 * 32 * 64)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(recompute="none", deepspeed={"partition_activations": True}), "needs recompute=full of every layer by itself"),
        (dict(deepspeed={"partition_activations": True}), "needs tp > 1 ranks with the same input, and has tp=1"),
        (dict(data_parallel="zero1", deepspeed={"cpu_checkpointing": True}, node={"cpu": CPU}), "data_parallel=zero1 is not sim"),
        (dict(deepspeed={"cpu_checkpointing": True}), "deepspeed.cpu_checkpointing needs node.cpu"),
    ],
)
def test_checkpoints_need_a_place(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(8, **{"data_parallel": "zero3", "recompute": "full", **plan}).resolve()


@pytest.mark.parametrize(
    ("options", "inner"), [({}, 1), ({"zero_hpz_partition_size": 2}, 2), (ALL | {"zero_quantized_gradients": True}, 4)]
)
def test_ranks_of_a_second_copy_are_as_many_as_asked_or_those_of_a_node(toy_job, options, inner) -> None:
    assert toy_job(4, 4, {"tied": False}, data_parallel="zero3", deepspeed=options).resolve().inner == inner


@pytest.mark.parametrize(
    ("gradients", "hook", "casts"), [("same", "zero1", False), ("fp32", "zero1", True), ("fp32", "zero2", False)]
)
def test_gradients_are_cast_where_they_are_added_in_a_wider_type(toy_job, gradients: str, hook: str, casts: bool) -> None:
    """BF16_Optimizer, which is DeepSpeed's ZeRO-1 with fp32 gradients; without them there is nothing wider to add to."""
    plan = toy_job(8, data_parallel=hook, deepspeed={}, precision="bf16", gradients=gradients).plan
    assert plan.casts_gradients == casts
