"""Collectives behind kernels: tensor parallel ones behind products, those of one pass behind the kernels of another."""

from __future__ import annotations

import pytest

from sim.analysis.breakdown import breakdown
from sim.analysis.volume import volumes
from sim.engine.blocks.splitting import expand
from sim.engine.player import run
from sim.program import Collective, Join, Kernel, Start
from strategies.layers.model_costs import parts
from strategies.layers.tensor_overlap import Items, beside, gathered, interleaved, scattered, scattered_behind
from strategies.lowering.lower import lower
from topologies.reading import UserError

FORWARD, BACKWARD = (Collective("all_to_all", 1.0, "ep", name) for name in ("forward", "backward"))
A, B, C, X, Y, Z = (Kernel("memory", name, "forward", 0.0, 1.0) for name in "abcxyz")
MOE = {"layers": 8, "tied": False, "gated": True, "experts": {"experts": 8, "chosen": 2, "ffn": 96}}


def spelled(items: Items) -> str:
    words = {Start: lambda item: f"[{item.collective.label[0]}", Join: lambda item: f"{item.collective.label[0]}]"}
    return " ".join(words.get(type(item), lambda item: item.label)(item) for item in items)


def test_two_passes_take_turns_at_their_collectives() -> None:
    """DualPipe (arXiv:2412.19437, figure 4): while one exchanges tokens, the other computes."""
    assert spelled(interleaved((X, BACKWARD, Y, BACKWARD, Z), (A, FORWARD, B, FORWARD, C))) == (
        "x [b a [f b] y [b f] b [f b] z f] c"
    )
    assert spelled(interleaved((X, BACKWARD, Y), ())) == "x [b b] y"
    assert spelled(interleaved((X, BACKWARD, FORWARD, Y), (A, FORWARD, B))) == "x [b [f a [f b] f] y f] b"
    assert spelled(interleaved((X,), (A, FORWARD))) == "x a [f f]"


def test_pieces_go_round_a_ring() -> None:
    assert spelled(gathered(((A,), (B,), (C,)), FORWARD)) == "[f a f] [f b f] c"
    assert spelled(gathered(((A, X), (B, Y)), FORWARD)) == "[f a x f] b y"
    assert spelled(scattered((A, B, C), FORWARD)) == "a [f b f] [f c f]"
    assert spelled(scattered_behind((A, B, C), FORWARD)) == "a [f b [f c [f f] f] f]"
    assert spelled(beside((A,), (FORWARD, BACKWARD))) == "[f [b a f] b]"


def exposed(job, prices) -> tuple[float, float, float]:
    """(step, tp exposed, bytes sent along tp)."""
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), prices)
    return timeline.step, breakdown(timeline)["tp exposed"], volumes(timeline)[0]["tp"][0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_hide_what_is_shorter_than_their_products(toy_job, toy_prices, sequence_parallel: bool) -> None:
    """On a network so fast that products take longer, all of these collectives vanish and nothing else changes."""
    fast = {"nvlink": "100 TB/s"}
    common = {"tp": 8, "sequence_parallel": sequence_parallel, "microbatch": 64}
    jobs = {way: toy_job(8, node=fast, **common, overlap_tp=way) for way in ("none", "weight_gradient")}
    none, default = (exposed(jobs[way], toy_prices()) for way in jobs)
    priced = run(lower(jobs["none"].model, jobs["none"].resolve()), jobs["none"].cluster.topology(), toy_prices()).op_costs
    work = parts(jobs["none"].model, jobs["none"].resolve())
    hidden = 0.0  # per layer: the reductions of the two input gradients, and with sequence parallelism the gathers again
    for part, times in ((work.layer(0), 4), (work.head, 1)):
        gathers = [item for item in part.weight_gradient if isinstance(item, Collective)]
        sums = [item for item in part.input_gradient if isinstance(item, Collective) and "input gradient" in item.label]
        assert len(sums) == (2 if times == 4 else 1)
        assert len(gathers) == sequence_parallel * len(sums)
        hidden += times * sum(priced.collective(item, 0).alone for item in gathers + sums)
    assert default[0] == pytest.approx(none[0] - hidden, rel=1e-12)
    assert default[1] == pytest.approx(none[1] - hidden)
    assert default[2] == none[2]


def test_pieces_hide_more_and_send_as_much(toy_job, toy_prices) -> None:
    """Of every gather before a product and reduction after one, in forward too; on a fast network nearly nothing is left."""
    common = {"tp": 8, "sequence_parallel": True, "microbatch": 64, "algorithm": "ring", "node": {"nvlink": "10 TB/s"}}
    none, default, pieces = (
        exposed(toy_job(8, **common, overlap_tp=way), toy_prices()) for way in ("none", "weight_gradient", "pieces")
    )
    assert pieces[0] < default[0] < none[0]
    assert pieces[1] < 0.5 * default[1]
    assert pieces[2] == pytest.approx(none[2])


def test_only_megatron_hides_collectives_unasked(toy_job, toy_prices) -> None:
    """PyTorch's tensor parallelism, compiled or not, waits for a collective before the next product."""
    for kernels, like in (("megatron", "weight_gradient"), ("compiled", "none"), ("torch", "none")):
        mine, asked = (exposed(toy_job(8, tp=8, kernels=kernels, **more), toy_prices()) for more in ({}, {"overlap_tp": like}))
        assert mine == asked


@pytest.mark.parametrize("plan", [{"overlap_tp": "pieces", "sequence_parallel": True}, {"sequence_parallel": True}, {}])
def test_item_by_item_is_the_same(toy_job, toy_prices, plan) -> None:
    job = toy_job(8, tp=4, dp=1, pp=2, accumulation=4, **plan)
    program = lower(job.model, job.resolve())
    prices = toy_prices(slowdown=1.1)
    whole, cut = (
        run(each, job.cluster.topology(), prices) for each in (program, expand(lower(job.model, job.resolve()), {0, 1}))
    )
    assert cut.step == pytest.approx(whole.step, abs=1e-11)


def test_only_reductions_with_pieces_have_pieces(toy_job) -> None:
    with pytest.raises(UserError, match="overlap_tp=pieces needs sequence_parallel=true"):
        toy_job(8, tp=8, overlap_tp="pieces").resolve()


def step(toy_job, toy_prices, schedule: str, ep: int = 4, **more) -> tuple[float, float]:
    """(step, ep exposed) of a pipeline of mixtures whose exchanges and kernels take about as long."""
    node = {"nvlink": more.pop("nvlink", "3 TB/s")}
    job = toy_job(8, model=MOE, node=node, pp=2, ep=ep, schedule=schedule, accumulation=8, microbatch=8, **more)
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    return timeline.step, breakdown(timeline)["ep exposed"]


@pytest.mark.parametrize(("plain", "pairs"), [("1f1b", "1f1b-overlapped"), ("interleaved", "interleaved-overlapped")])
def test_pairs_hide_the_exchanges_of_experts(toy_job, toy_prices, plain: str, pairs: str) -> None:
    """All but those of the warm-up, the drain and the last microbatch, which reduces gradients in buckets."""
    before, after = step(toy_job, toy_prices, plain), step(toy_job, toy_prices, pairs)
    assert after[1] < 0.6 * before[1]
    assert after[0] < before[0]
    alone = [step(toy_job, toy_prices, name, ep=1) for name in (plain, pairs)]
    assert alone[0][0] == pytest.approx(alone[1][0], rel=0.02)


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
def test_dualpipe_hides_the_exchanges_of_experts(toy_job, toy_prices, schedule: str) -> None:
    slow, fast = (step(toy_job, toy_prices, schedule, nvlink=link) for link in ("3 TB/s", "3000 TB/s"))
    plain = [step(toy_job, toy_prices, "1f1b", nvlink=link) for link in ("3 TB/s", "3000 TB/s")]
    assert slow[0] - fast[0] < 0.7 * (plain[0][0] - plain[1][0])
    assert slow[1] < 0.7 * plain[0][1]


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera"])
@pytest.mark.parametrize("hook", ["ddp", "zero1", "zero2", "zero3"])
def test_two_copies_hold_twice_the_parameters_and_sum_gradients(toy_job, toy_prices, schedule: str, hook: str) -> None:
    """Each rank holds two stages, and sums Ψ / pp of gradients of each with another rank: an all-reduce of two sends S."""
    job = toy_job(8, model={"tied": False}, pp=4, schedule=schedule, accumulation=8, data_parallel=hook)
    copy = toy_job(8, model={"tied": False}, pp=4, accumulation=8, data_parallel=hook)
    double, single = lower(job.model, job.resolve()), lower(copy.model, copy.resolve())
    for kind in range(3):
        total = [sum(cohort.resident[kind][1] for cohort in program.cohorts) for program in (double, single)]
        assert total[0] == 2 * total[1]
    timeline = run(double, job.cluster.topology(), toy_prices())
    copies = [
        (op.work.label, op.work.bytes * op.work.repeat)
        for _, op in timeline.ops(0)
        if isinstance(op.work, Collective) and op.stream == "pp copies"
    ]
    sizes = [sum(part.parameters for part in stage) for stage in stages_of(job)]
    shards = 1 if hook == "ddp" else 2
    assert copies == [(f"copies of stage {s}", pytest.approx(2 * sizes[s] / shards)) for s in (0, 3)]


def stages_of(job) -> list[list]:
    work, plan = parts(job.model, job.resolve()), job.resolve()
    stages = [[work.layer(layer)] for layer in range(4)]
    assert plan.layers == (1, 1, 1, 1)
    return [[work.embedding, *stages[0]], stages[1], stages[2], [*stages[3], work.head]]


@pytest.mark.parametrize(
    ("kernels", "microbatch", "overlap", "copies"),
    [
        ("compiled", 2, "none", 8),
        ("torch", 2, "none", 8),
        ("compiled", 1, "none", 0),
        ("compiled", 2, "pieces", 1),
        ("megatron", 2, None, 0),
    ],
)
def test_pytorch_copies_what_it_gathers_and_scatters_along_tokens(toy_job, kernels, microbatch, overlap, copies) -> None:
    """Two gathers and two reduce-scatters each way, each a copy of all tokens' features, read and written. Of those that come in
    pieces there is none; the gradients of queries, keys and values are a sum, which PyTorch does not scatter in pieces.
    """
    job = toy_job(2, kernels=kernels, tp=2, sequence_parallel=True, microbatch=microbatch, overlap_tp=overlap)
    layer = parts(job.model, job.resolve()).layer(0)
    turned = [item for item in layer.forward + layer.backward if isinstance(item, Kernel) and item.label.endswith("turned")]
    assert [item.bytes for item in turned] == [2 * 2 * 2 * 32 * 64] * copies


def test_pytorch_waits_for_the_sums_of_several_products(toy_job) -> None:
    """Gradients of the inputs of q, k and v, and of gate and up, are summed before they are scattered
    (torch/_inductor/fx_passes/micro_pipeline_tp.py, fuse_matmul_reduce_scatter: "Not matmul"); of one product they are not.
    """

    def whole(**plan) -> int:
        job = toy_job(2, tp=2, sequence_parallel=True, kernels="compiled", overlap_tp="pieces", **plan)
        items = parts(job.model, job.resolve()).layer(0).backward
        return sum(isinstance(item, Collective) and item.operation == "reduce_scatter" for item in items)

    assert whole(model={"gated": True}) == 2
    assert whole(model={"gated": False}) == 1
    assert whole(model={"gated": True}, joined_products=True) == 0


def test_compiled_tensor_parallelism_hides_no_gradients(toy_job) -> None:
    with pytest.raises(UserError, match="overlap_tp=weight_gradient contradicts kernels=compiled"):
        toy_job(8, tp=8, kernels="compiled", overlap_tp="weight_gradient").resolve()


def test_transformer_engine_scatters_the_last_quarter_alone(toy_job, toy_prices) -> None:
    """split_overlap_rs: of four pieces the last one's sums are scattered when nothing is left to compute, beside products so long
    that they hide all others; twice a layer.
    """
    common = {"tp": 8, "sequence_parallel": True, "microbatch": 64, "algorithm": "ring", "node": {"nvlink": "100 TB/s"}}
    job = toy_job(8, **common, overlap_tp="pieces")
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    costs, layer = timeline.op_costs, parts(job.model, job.resolve()).layer(0)
    scattered = [item.collective for item in layer.forward if isinstance(item, Start) and "scatter" in item.collective.operation]
    assert len(scattered) == 2 * 4
    whole = next(
        item
        for item in parts(job.model, toy_job(8, **common).resolve()).layer(0).forward
        if isinstance(item, Collective) and item.operation == "reduce_scatter"
    )
    assert [work.bytes for work in scattered] == [whole.bytes / 4] * 8
    quarters = sum(costs.collective(work, 0).alone for work in dict.fromkeys(scattered))
    assert breakdown(timeline)["tp exposed"] > 4 * quarters  # of four layers, and what stands before the first
