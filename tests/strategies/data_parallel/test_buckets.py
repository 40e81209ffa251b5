"""Gradients in buckets: what PyTorch's DDP, Megatron-LM and DeepSpeed put together, and when a bucket's reduction starts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sim.engine.player import run
from sim.program import Cohort, Collective, Kernel
from strategies.data_parallel.buckets import Alignment, Cut, Gradient, Limits, filled, limits
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from strategies.lowering.stage import Stage
from strategies.read_job import read_job
from tests.conftest import LLAMA_LAYER
from topologies.cluster_files import load_cluster
from topologies.reading import UserError

# no biases, so that every gradient but a norm's is made by a product; no two matrices of one size
LLAMA = {
    "name": "llama",
    "layers": 2,
    "kv_heads": 4,
    "ffn": 96,
    **LLAMA_LAYER,
}
MATRICES = {"head": 512 * 64, "mlp down": 96 * 64, "mlp up": 192 * 64, "attention output": 64 * 64, "qkv": 128 * 64}
LLAMA_1B = {
    "name": "llama-3.2-1b",
    "hidden": 2048,
    "layers": 16,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocabulary": 128256,
    "context": 8192,
    **LLAMA_LAYER,
    "tied": True,
}


def buckets(job, rank: int = 0, chunk: int = 0) -> list[int]:
    """Elements of the buckets of a stage with all layers."""
    plan = job.resolve()
    work = parts(job.model, plan)
    every = [work.embedding, *work.stage(0, job.model.layers), work.head]
    return [bucket.elements for bucket in Stage(0, rank, chunk, Cohort({}), every, plan, job.model).buckets()]


def test_a_reduction_starts_when_the_last_gradient_of_its_bucket_is_made(toy_job, toy_prices) -> None:
    """A bucket for each parameter and a network that is never busy: an all-reduce starts where its product ends."""
    job = toy_job(8, 1, LLAMA, {"nvlink": "1 PB/s"}, bucket="1 B", precision="fp32", algorithm="ring")
    plan, prices = job.resolve(), toy_prices()
    work = parts(job.model, plan)
    time, ends = 0.0, {}
    for part in (work.embedding, *work.stage(0, 2), work.head):
        time += sum(prices.seconds(item) for item in part.forward)
    for part in (work.head, *work.stage(0, 2)):
        for kernel in part.backward:
            assert isinstance(kernel, Kernel)
            time += prices.seconds(kernel)
            if kernel.label.endswith(" weight"):
                ends.setdefault(4 * MATRICES[kernel.label.removesuffix(" weight")], []).append(time)
    timeline = run(lower(job.model, plan), job.cluster.topology(), prices)
    starts: dict[float, list[float]] = {}
    for number, op in enumerate(timeline.program.cohorts[0].ops):
        if isinstance(op.work, Collective):
            starts.setdefault(op.work.bytes, []).append(timeline.start[number])
    assert len(ends) == len(MATRICES)
    assert sum(map(len, starts.values())) == 1 + 2 * 6 + 2  # the embedding; 4 matrices and 2 norms a layer; norm and head
    for size, times in ends.items():
        assert starts[size][: len(times)] == pytest.approx(times, rel=1e-6)  # the embedding is as large as the head


def test_buckets_larger_than_layers_cut_a_pass_only_where_they_are_full(toy_job) -> None:
    """As many pieces of the backward pass as there are buckets; layers between two cuts are one run."""
    layer = 2 * (4 * 64 + 12 * 64**2 + 5 * 64 + 4 * 64)  # bytes
    job = toy_job(8, 1, {"layers": 32, "tied": False}, bucket=f"{4 * layer} B")
    (cohort,) = lower(job.model, job.resolve()).cohorts
    back = [op for op in cohort.ops if op.stream == "compute" and op.work.name == "backward"]
    reduced = [op.work.bytes for op in cohort.ops if isinstance(op.work, Collective)]
    assert len(back) == len(reduced) == 9  # 32 / 4, and one for the embedding's half
    assert all(4 * layer <= size < 5 * layer for size in reduced[:-1])
    assert all(sum(run.times for run in op.work.runs) <= 7 for op in back)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket", [None, "1 kB", "100 kB"])
def test_buckets_are_those_of_ddp(toy_job, bucket, overlap) -> None:
    """torch.distributed._compute_bucket_assignment_by_size, as DDP calls it when it has seen the order of gradients."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    model = LLAMA | {"hidden": 512, "ffn": 1000, "vocabulary": 4096}
    fields = {"bucket": bucket} if bucket else {}
    job = toy_job(8, 1, model, kernels="torch", precision="fp32", overlap=overlap, **fields)
    work = parts(job.model, job.resolve())
    shapes = [gradient.shape for part in (work.head, *work.stage(0, 2), work.embedding) for gradient in part.gradients]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    first, other = (int(job.plan.bucket),) * 2 if bucket else (dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20)
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, other], [False] * len(shapes), list(range(len(shapes))))
    assert buckets(job) == [sum(math.prod(shapes[index]) for index in bucket) for bucket in theirs]
    assert sum(buckets(job)) == job.model.parameters


def test_buckets_are_those_of_a_megatron_log(toy_job) -> None:
    """Llama-3.2-1B, as "Number of buckets for gradient all-reduce / reduce-scatter: 17" lists them (bucket_size=40000000)."""
    job = toy_job(8, 1, LLAMA_1B, data_parallel="zero1", gradients="fp32", microbatch=1, sequence=128)
    assert buckets(job) == [50_333_696, *[60_821_504] * 15, 273_158_144]


def test_megatrons_buckets_by_default(toy_job) -> None:
    """max(40e6, 1e6·dp) parameters, and everything at once without overlap, behind the first pipeline rank or chunk."""
    model = LLAMA_1B | {"tied": False}

    def job(nodes: int = 1, **plan):
        return toy_job(8, nodes, model, data_parallel="zero1", microbatch=1, sequence=128, **plan)

    every = job().model.parameters
    assert min(buckets(job(nodes=8))[:-1]) >= 64e6
    assert buckets(job(nodes=8))[0] == 128256 * 2048 > 64e6
    assert buckets(job(overlap=False)) == [every]
    assert buckets(job(), rank=1) == buckets(job(), chunk=1) == [every]
    assert len(buckets(job(), rank=0)) == len(buckets(job(bucket="160 MB", gradients="fp32"), rank=1, chunk=1)) > 10


def test_deepspeed_reduces_before_a_gradient_that_does_not_fit() -> None:
    """Its bucket never holds more than reduce_bucket_size, unless one parameter does, and the last one waits for the end."""
    gradients = [Gradient((size,), Cut(1, 10 - number), False) for number, size in enumerate((4, 4, 4, 30, 4))]
    cut = [(bucket.elements, bucket.cut) for bucket in filled(gradients, Limits(10, 10, fits=True), Cut(0))]
    assert cut == [(8, Cut(1, 8)), (4, Cut(1, 7)), (30, Cut(1, 6)), (4, Cut(0))]
    just = [bucket.elements for bucket in filled(gradients, Limits(8, 4, fits=True), Cut(0))]
    assert just == [8, 4, 30, 4]  # what just fits does fit
    more = [bucket.elements for bucket in filled(gradients, Limits(8, 4), Cut(0))]
    assert more == [8, 4, 30, 4]  # and fills a bucket, as torch's
    full = [(bucket.elements, bucket.cut) for bucket in filled(gradients, Limits(10, 10), Cut(0))]
    assert full == [(12, Cut(1, 8)), (30, Cut(1, 7)), (4, Cut(1, 6))]


@pytest.mark.parametrize(
    ("flags", "elements"),
    [("", math.inf), (" --overlap-grad-reduce", 40e6), (" --overlap-grad-reduce --ddp-bucket-size 7000", 7000)],
)
def test_a_script_of_megatron_has_megatrons_buckets(tmp_path, flags, elements) -> None:
    """Without --overlap-grad-reduce all gradients at once; with it --ddp-bucket-size, or what Megatron-LM takes by default."""
    script = tmp_path / "pretrain.sh"
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 8 --seq-length 32"
    script.write_text(f"torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py {sizes} --bf16{flags}\n")
    job = read_job(from_megatron=str(script), cluster="dgx-h100")
    assert limits(job.resolve()).size == elements


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        (False, [[4], [8], [7, 1], [3]]),  # a bucket is closed by what fills it: the first with 4, others with 8
        (True, [[4], [8], [7, 1], [3]]),
    ],
)
def test_a_bucket_of_exactly_its_size_is_full(fits: bool, expected: list[list[int]]) -> None:
    gradients = [Gradient((size,), Cut(10 - number), False) for number, size in enumerate((4, 8, 7, 1, 3))]
    result = filled(gradients, Limits(4, 8, fits), Cut(0))
    assert [[size for (size,) in bucket.shapes] for bucket in result] == expected


def test_a_bucket_that_fits_begins_anew_with_what_has_no_room() -> None:
    """Of 5, 3, 1, 7 elements in buckets of 8: 5 + 3 fit, 1 + 7 fit too."""
    gradients = [Gradient((size,), Cut(10 - number), False) for number, size in enumerate((5, 3, 1, 7))]
    result = filled(gradients, Limits(8, 8, True), Cut(0))
    assert [[size for (size,) in bucket.shapes] for bucket in result] == [[5, 3], [1, 7]]


def test_gaps_between_parameters_and_behind_buckets() -> None:
    """Parameters start at multiples of 64 and buckets end at multiples of 384: 100 elements at 0, 10 at 128, 500 at 192 … 692,
    which fill a bucket of 300 that ends at 768; then 7 … 384.
    """
    gradients = [Gradient((size,), Cut(10 - number), False) for number, size in enumerate((100, 10, 500, 7))]
    result = filled(gradients, Limits(300, 300, aligned=(Alignment(64, 384), Alignment())), Cut(0))
    assert [(bucket.shapes, bucket.padding) for bucket in result] == [(((100,), (10,), (500,)), 768 - 610), (((7,),), 384 - 7)]
    closer = filled(gradients, Limits(129, 129, aligned=(Alignment(64, 1), Alignment())), Cut(0))
    assert [bucket.shapes for bucket in closer] == [((100,), (10,)), ((500,),), ((7,),)]  # the second one ends at 138


def test_what_is_gathered_in_fp8_has_buckets_of_its_own_and_the_last_one_takes_the_rest() -> None:
    """A head of 100, layers of 40 and 30 in fp8 with norms of 2, an embedding of 50: buckets of 60 of each kind. The second of
    fp8 comes with all that is not, when the embedding's gradient is made (Megatron-Core's partition_buckets).
    """
    sizes = [(100, False), (40, True), (2, False), (40, True), (30, True), (2, False), (30, True), (50, False)]
    gradients = [Gradient((size,), Cut(10 - at), False, fp8=fp8) for at, (size, fp8) in enumerate(sizes)]
    aligned = Limits(60, 60, aligned=(Alignment(1, 16), Alignment()))
    first, last = filled(gradients, aligned, Cut(0))
    assert (first.cut, first.elements, first.padding, first.fp8) == (Cut(10 - 3), 80, 0, 80)
    assert (last.cut, last.elements, last.fp8) == (Cut(10 - 7), 60 + 100 + 54, 64)
    assert last.padding == (64 - 60) + (112 - 100) + (64 - 54)
    assert last.shapes == ((30,), (30,), (100,), (2,), (2,), (50,))
    plain = [gradient._replace(fp8=False) for gradient in gradients]
    assert [bucket.elements for bucket in filled(plain, aligned, Cut(0))] == [100, 82, 62, 50]
    narrow = [gradient._replace(fp8=True) for gradient in gradients]
    assert [(bucket.elements, bucket.fp8) for bucket in filled(narrow, aligned, Cut(0))] == [
        (100, 112),
        (82, 96),
        (62, 64),
        (50, 64),
    ]


@pytest.mark.parametrize("width", [1, 2])
def test_embedding_and_head_are_gathered_before_the_first_layer_of_fp8(toy_job, width) -> None:
    """Two layers' matrices in fp8; embedding and head of 512 · 64 each, and five norms, in bf16."""
    fp8 = {"fp8": {"scaling": "tensorwise", "gather": True}} if width == 1 else {}
    more = {"bucket": "1 B", "overlap_param_gather": True, **fp8}
    job = replace(toy_job(8, 1, {**LLAMA, "tied": False}, data_parallel="zero1", **more), cluster=load_cluster("dgx-h100"))
    program = lower(job.model, job.resolve())
    gathers = [
        op.work.bytes for op in program.cohorts[0].ops if isinstance(op.work, Collective) and op.work.operation == "all_gather"
    ]
    matrices = 2 * (64 * 64 + 128 * 64 + 96 * 64 + 192 * 64)
    wide = 2 * 512 * 64 + 5 * 64
    if width == 1:
        first = 2 * wide + 128 * 64  # with the bucket of the first layer's queries, keys and values, which is made last
        assert gathers[0] == pytest.approx(first, abs=2 * 7 * 128)
    assert sum(gathers) == pytest.approx(width * matrices + 2 * wide, rel=0.03)


@pytest.mark.parametrize(("chunks", "apart"), [(1, True), (2, False)])
def test_megatrons_shared_embedding_is_a_bucket_of_its_own(toy_job, chunks, apart) -> None:
    """On both stages that have it, also where all other gradients are one bucket (_does_param_require_new_bucket); in a chunk
    after the first, as an interleaved schedule's last stage is, buckets are one group. Not without the distributed optimizer.
    """

    def reduced(hook: str) -> list[list[float]]:
        schedule = {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {}
        job = toy_job(
            8, 1, LLAMA | {"layers": 4, "tied": True}, data_parallel=hook, pp=2, microbatch=1, overlap=False, **schedule
        )
        works = [[op.work for op in cohort.ops] for cohort in lower(job.model, job.resolve()).cohorts]
        return [[work.bytes / work.width for work in own if getattr(work, "label", "") == "gradients"] for own in works]

    first, last = reduced("zero1")
    table = 512 * 64.0
    assert (first.count(table), first[-1]) == (1, table)  # the lookup's is the last that a backward pass makes
    assert (last.count(table), last[0] == table) == (apart, apart)  # and the head's the first
    assert table not in [size for sizes in reduced("ddp") for size in sizes]
    assert sum(first) == pytest.approx(sum(reduced("ddp")[0]), rel=0.01)  # with 64 and 128 to be padded to


def moved(job) -> dict[str, float]:
    """Elements of the gradients that are reduced, and of the parameters that are gathered, in a step."""
    (cohort,) = lower(job.model, job.resolve()).cohorts
    works = [op.work for op in cohort.ops if isinstance(op.work, Collective)]
    labels = "gradients", "parameters"
    return {label: sum(work.bytes * work.repeat / work.width for work in works if work.label == label) for label in labels}


NARROW = LLAMA_LAYER | {
    "name": "narrow",
    "layers": 1,
    "hidden": 4,
    "ffn": 6,
    "heads": 1,
    "kv_heads": 1,
    "vocabulary": 20,
    "context": 8,
}


def test_megatrons_distributed_optimizer_pads_its_buckets(toy_job) -> None:
    """A layer of 4 features and 12 ranks: lcm(12, 128) = 384, lcm(12, 65,536) = 196,608.

    Without biases, and with a norm of 4 before attention and MLP: head 20·4 = 80 and the last norm 4; down 6·4 = 24, up
    12·4 = 48, norm 4, output 16, qkv 48, norm 4; embedding 80. Each begins at a multiple of 64: the head takes two places, the
    next seven one each, the embedding goes from 576 to 656, and the bucket ends at 768. Otherwise 308 are side by side.
    """

    def job(**plan):
        return toy_job(12, 1, NARROW, gradients="fp32", microbatch=1, sequence=8, overlap=False, **plan)

    def held(job) -> dict[str, float]:
        (cohort,) = lower(job.model, job.resolve()).cohorts
        return {kind: sum(size for each, size in cohort.resident if each == kind) for kind in ("parameter", "gradient")}

    padded = {"pad_buckets_for_high_nccl_busbw": True}
    assert moved(job(data_parallel="ddp")) == {"gradients": 308, "parameters": 0}
    assert moved(job(data_parallel="zero1")) == {"gradients": 768, "parameters": 768}
    assert moved(job(data_parallel="zero1", framework=padded)) == {"gradients": 196_608, "parameters": 196_608}
    assert moved(job(data_parallel="zero1", kernels="torch")) == {"gradients": 308, "parameters": 308}
    assert held(job(data_parallel="zero1")) == {"parameter": 2 * 768, "gradient": 4 * 768}
    assert held(job(data_parallel="ddp")) == {"parameter": 2 * 308, "gradient": 4 * 308}
    with pytest.raises(UserError, match="pad_buckets_for_high_nccl_busbw=true contradicts data_parallel=ddp"):
        job(data_parallel="ddp", framework=padded).resolve()


def test_experts_have_buckets_that_fewer_ranks_share(toy_job) -> None:
    """12 ranks of which 4 share each expert: padded to multiples of lcm(4, 128) = 128, what all share to lcm(12, 128) = 384."""
    job = toy_job(
        12,
        1,
        NARROW | {"experts": {"experts": 3, "chosen": 1, "ffn": 6}},
        ep=3,
        data_parallel="zero1",
        gradients="fp32",
        microbatch=1,
        sequence=8,
        overlap=False,
    )
    plan = job.resolve()
    assert limits(plan).aligned == (Alignment(64, 384, True), Alignment(64, 128, True))
    work = parts(job.model, plan)
    spread, dense = Stage(0, 0, 0, Cohort({}), [work.embedding, *work.stage(0, 1), work.head], plan, job.model).buckets()
    assert (spread.spread, spread.elements, spread.padding) == (True, 24 + 48, 128 - 72)  # down at 0, gate and up at 64 … 112
    assert (dense.spread, dense.elements, dense.padding) == (False, 248, 768 - 248)  # a router's 12 in the place of the MLP's two
    assert moved(job) == {"gradients": 768 + 128, "parameters": 768 + 128}


@pytest.mark.parametrize("slow", [True, False])
def test_parameters_are_gathered_beside_the_first_forward_pass(toy_job, toy_prices, slow) -> None:
    """As Megatron-LM's --overlap-param-gather: a layer waits for its bucket, and the next one starts when both are there.

    With gathers of g and passes of a layer of f: the first bucket is waited for, then each of the others takes max(f, g), and
    the last layers take what they compute. As much moves as after the update.
    """
    layer = 2 * (4 * 64 + 12 * 64**2 + 5 * 64 + 4 * 64)  # bytes
    beside = {"framework": {"overlap_param_gather": True}}
    fields = {"data_parallel": "zero1", "bucket": f"{layer} B", "accumulation": 2, "microbatch": 1, "algorithm": "ring"}

    def played(**plan):
        job = toy_job(8, 1, {"layers": 6}, {"nvlink": "1 GB/s" if slow else "1 PB/s"}, **fields, **plan)
        return job, run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    (job, after), (_, timeline) = played(), played(**beside)
    ops, start, end = timeline.program.cohorts[0].ops, timeline.start, timeline.end
    gathers = [number for number, op in enumerate(ops) if isinstance(op.work, Collective) and op.work.label == "parameters"]
    passes = [number for number, op in enumerate(ops) if op.stream == "compute" and op.work.name == "forward"]
    count = len(Stage(0, 0, 0, Cohort({}), _every(job), job.resolve(), job.model).buckets())
    assert len(gathers) == count
    assert len(passes) == count + 1  # the second microbatch finds all parameters there
    assert start[gathers[0]] == 0
    for number, (gather, computed) in enumerate(zip(gathers, passes, strict=False)):
        before = end[passes[number - 1]] if number else 0.0
        assert start[computed] == pytest.approx(max(end[gather], before))
        if number + 1 < count:
            assert start[gathers[number + 1]] == pytest.approx(max(end[gather], before))
    moved_beside, moved_after = moved(_job(toy_job, fields | beside)), moved(_job(toy_job, fields))
    assert moved_beside == moved_after
    spared = after.step - timeline.step
    hidden = sum(min(end[a] - start[a], end[b] - start[b]) for a, b in zip(gathers[1:], passes, strict=False))
    assert spared == pytest.approx(hidden, rel=1e-2)


def test_a_pipeline_gathers_when_a_stage_has_its_input_or_chunks_ahead(toy_job, toy_prices) -> None:
    """1F1B: the second stage's only bucket is gathered when its input is there. Interleaved (schedules.py, param_sync_func): two
    chunks' from the beginning, the third's when the second's first pass begins; the fourth's when the third's does.
    """

    def played(**plan):
        fields = {"data_parallel": "zero1", "microbatch": 1, "algorithm": "ring", "pp": 2, "tp": 1, **plan}
        job = toy_job(8, 1, {"layers": 8, "tied": False}, framework={"overlap_param_gather": True}, **fields)
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
        lanes = []
        for lane in range(len(timeline.lanes)):
            ops = list(timeline.ops(lane))
            gathers = [number for number, op in ops if isinstance(op.work, Collective) and op.work.label == "parameters"]
            passes = [number for number, op in ops if op.stream == "compute" and op.work.name == "forward"]
            lanes.append((gathers, passes))
        return timeline.start, timeline.end, lanes

    start, end, (_, (gathers, passes)) = played(accumulation=4)
    assert start[gathers[0]] > 0
    assert start[passes[0]] == pytest.approx(end[gathers[0]])
    start, end, ((gathers, passes), (others, _)) = played(accumulation=4, schedule="interleaved", chunks=4)
    first = passes[::2][:4]  # two microbatches of a chunk follow each other
    assert start[gathers[0]] == start[others[0]] == 0
    assert start[first[0]] == pytest.approx(end[gathers[0]])
    assert start[gathers[1]] == pytest.approx(end[gathers[0]])
    for number in (2, 3):
        assert start[gathers[number]] == pytest.approx(max(end[gathers[number - 1]], end[passes[2 * (number - 1) - 1]]))
        assert start[first[number]] >= end[gathers[number]]


def test_only_a_distributed_optimizer_that_overlaps_gathers_beside_passes(toy_job) -> None:
    for contradicted in ({"data_parallel": "ddp"}, {"data_parallel": "zero1", "overlap": False}):
        with pytest.raises(UserError, match="overlap_param_gather=true contradicts data_parallel="):
            toy_job(8, 1, framework={"overlap_param_gather": True}, **contradicted).resolve()


def _job(toy_job, plan):
    return toy_job(8, 1, {"layers": 6}, **plan)


def _every(job):
    work = parts(job.model, job.resolve())
    return [work.embedding, *work.stage(0, job.model.layers), work.head]
