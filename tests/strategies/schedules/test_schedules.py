"""Orders equal PyTorch's, hold what theory says, and give the published bubbles when they are played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.engine.player import run
from sim.program import Block, Collective, Kernel, Program, Run, Send
from strategies.lowering.lower import lower
from strategies.schedules import actions, schedules
from strategies.schedules.order import Action, Schedule
from topologies.reading import UserError

SIZES = [(1, 3), (2, 2), (4, 1), (4, 4), (4, 8), (8, 32)]


def chunks_of(name: str) -> int:
    return schedules[name].chunks or 2


@pytest.mark.parametrize("name", list(schedules))
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_pass_runs_once(name: str, ranks: int, microbatches: int) -> None:
    chunks, copies = chunks_of(name), schedules[name].copies
    if copies > 1 and (ranks % 2 or microbatches % 2):
        with pytest.raises(UserError, match="needs even pp and microbatches"):
            actions(name, 0, ranks, microbatches, chunks)
        return
    for rank in range(ranks):
        order = actions(name, rank, ranks, microbatches, chunks)
        everything = {(mb, chunk) for mb in range(microbatches) for chunk in range(chunks)}
        if copies > 1:  # half of the microbatches on each
            everything = {(mb, chunk) for mb, chunk in everything if (mb >= microbatches // 2) == chunk}
        assert sorted((a.microbatch, a.chunk) for a in order if a.kind == "F") == sorted(everything)
        assert sorted((a.microbatch, a.chunk) for a in order if a.kind in "BW") == sorted(everything)


@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_virtual_stages_are_placed_once(placement, ranks) -> None:
    schedule = Schedule(lambda *_: iter(()), 2, placement)
    assert sorted(schedule.stage(rank, ranks, chunk) for rank in range(ranks) for chunk in range(2)) == list(range(2 * ranks))
    if placement == "v":
        assert {schedule.stage(0, ranks, chunk) for chunk in range(2)} == {0, 2 * ranks - 1}


def in_flight(name: str, rank: int, ranks: int, microbatches: int) -> int:
    """Most passes whose activations are held at a time: from F until B or W."""
    held = most = 0
    for action in actions(name, rank, ranks, microbatches, chunks_of(name)):
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 4), (4, 16), (8, 64)])
def test_activations_in_flight(p: int, m: int) -> None:
    """Huang 2019: m; Narayanan 2021: min(p − s, m) and interleaved (p·(v − 1) + 2(p − 1 − s) + 1); Qi 2023: H1 as 1F1B on rank 0,
    H2 up to 2p − 1, ZB-V 2p chunks of half the size; DualPipe's table: p + 1, its V 2p + 1 of half the size; Chimera's: p."""
    for rank in range(p):
        assert in_flight("naive", rank, p, m) == 1
        assert in_flight("gpipe", rank, p, m) == m
        assert in_flight("1f1b", rank, p, m) == min(p - rank, m)
        assert in_flight("interleaved", rank, p, m) == min(p + 2 * (p - 1 - rank) + 1, 2 * m)
        assert in_flight("zb-h1", rank, p, m) <= min(p, m)
        assert in_flight("zb-h2", rank, p, m) <= min(2 * p - 1, m)
        assert in_flight("zb-v", rank, p, m) <= 2 * p
        assert in_flight("dualpipe-v", rank, p, m) <= 2 * p + 1
        assert in_flight("dualpipe", rank, p, m) <= p + 1
        assert in_flight("chimera", rank, p, m) <= p


PYTORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


@pytest.mark.parametrize("name", list(PYTORCH))
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (4, 16), (5, 15), (8, 16)])
def test_orders_are_those_of_pytorch(name: str, p: int, m: int) -> None:
    if name == "dualpipe-v" and m < 2 * p:
        pytest.skip("PyTorch refuses fewer microbatches than stages")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    chunks = chunks_of(name)
    theirs = visualizer.get_schedule_ops(PYTORCH[name], p, m, num_stages_per_rank=chunks if chunks > 1 else None)
    for rank in range(p - (name == "1f1b")):  # PyTorch's plain 1F1B visualizer is off by one on the last stage
        ours = [f"{schedules[name].stage(rank, p, a.chunk)}{a.kind}{a.microbatch}" for a in actions(name, rank, p, m, chunks)]
        if name == "dualpipe-v":
            pairs = [
                bool(op.sub_actions) and action is op.sub_actions[0]
                for op in theirs[rank]
                if op
                for action in op.sub_actions or (op,)
            ]
            assert [action.beside for action in actions(name, rank, p, m, chunks)] == pairs
        flat = [str(action) for op in theirs[rank] if op is not None for action in op.sub_actions or (op,)]
        assert ours == [op for op in flat if "REDUCE" not in op]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_dualpipe_is_two_dualpipe_v_back_to_back(p: int, m: int) -> None:
    """Both halves of its ranks run a V of p/2 ranks with half of the microbatches, the second half with the copies exchanged."""
    for rank in range(p):
        folded = actions("dualpipe-v", min(rank, p - 1 - rank), p // 2, m // 2, 2)
        copies = [1, 0] if rank >= p // 2 else [0, 1]
        expected = [(kind, mb + copies[c] * m // 2, copies[c], beside) for kind, mb, c, beside in folded]
        assert [tuple(action) for action in actions("dualpipe", rank, p, m, 2)] == expected


def equal_stages(program: Program, backward: float = 2.0) -> Program:
    """The lowered program with equal chunks: F takes 1 s, B 2 s, I and W 1 s each; free transfers."""
    seconds = {
        "forward": 1.0,
        "backward": backward,
        "forward + backward": 1.0 + backward,
        "input gradient": 1.0,
        "weight gradient": 1.0,
        "optimizer": 0.0,
    }
    blocks = {
        name: Block(name, (Run(1, (Kernel("memory", name, "forward", 0.0, time * 1e12),)),)) for name, time in seconds.items()
    }
    for cohort in program.cohorts:
        sends: dict[tuple[int, str], Send] = {}
        for op in cohort.ops:
            if isinstance(op.work, Collective):
                op.work = replace(op.work, bytes=0.0)
            if isinstance(op.work, Block):
                op.work = blocks[op.work.name]
            elif isinstance(op.work, Send):
                op.work = sends.setdefault((op.work.to, op.stream), replace(op.work, bytes=0.0))
    return program


def bubble(name: str, p: int, m: int, toy_job, toy_prices, backward: float = 2.0, **plan) -> float:
    """Fraction of the step that ranks are idle, with F = 1 s and B = 2 s per stage of a chunk."""
    chunks = (plan.get("chunks") or chunks_of(name)) // schedules[name].copies
    job = toy_job(p, model={"layers": p * chunks, "tied": False}, pp=p, accumulation=m, schedule=name, **plan)
    timeline = run(equal_stages(lower(job.model, job.resolve()), backward), job.cluster.topology(), toy_prices())
    return 1 - (1 + backward) * m * chunks / timeline.step


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16)])
def test_bubbles_are_the_published_ones(p: int, m: int, toy_job, toy_prices) -> None:
    """GPipe and 1F1B (p − 1)/(m + p − 1) of the step; interleaved (p − 1)/(v·m) over the ideal (Narayanan 2021, section 2.2);
    ZB-H1 (p − 1)(F + I − W) over the ideal, a third of 1F1B's when F = I = W (Qi 2023, table 1);
    DualPipe (p/2 − 1)(F&B + B − 3W) and DualPipeV (p − 1)(F&B + B − 3W) over the ideal (github.com/deepseek-ai/DualPipe), here
    with F&B = F + B; Chimera p − 2 passes when B = F, and 2(p − 2) forward passes for m = p when B = 2F (Li and Hoefler 2021,
    table 2: (p − 2)/(2m + p − 2) and (p − 2)/(3m/2 + p − 2)); PipeDream's steady state none; pairs have 1F1B's."""

    def of(name: str, **plan) -> float:
        return bubble(name, p, m, toy_job, toy_prices, **plan)

    assert of("gpipe") == pytest.approx((p - 1) / (m + p - 1))
    assert of("1f1b") == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        over = (p - 1) / (v * m)
        assert of("interleaved", chunks=v) == pytest.approx(over / (1 + over))
    if m >= p:
        over = (p - 1) * 1.0 / (3.0 * m)
        assert of("zb-h1") == pytest.approx(over / (1 + over))
    assert of("zb-v") <= of("zb-h1") + 1e-12
    if m >= p:  # asynchronous
        assert of("pipedream") == pytest.approx(0.0)
        assert of("pipedream-2bw") == pytest.approx(0.0)
    if m >= 2 * p:  # enough to fill the longer warm-up
        assert of("zb-h2") <= of("zb-h1") + 1e-12
        over = (p - 1) * (3.0 + 2.0 - 3.0) / (3.0 * 2 * m)
        assert of("dualpipe-v") == pytest.approx(over / (1 + over))
        over = (p / 2 - 1) * (3.0 + 2.0 - 3.0) / (3.0 * m)
        assert of("dualpipe") == pytest.approx(over / (1 + over))
    assert of("chimera", backward=1.0) == pytest.approx((p - 2) / (2 * m + p - 2))
    if m == p:
        assert of("chimera") == pytest.approx((p - 2) / (1.5 * m + p - 2))
    assert of("1f1b-overlapped") == pytest.approx(of("1f1b"))
    if m % p == 0:
        assert of("interleaved-overlapped") == pytest.approx(of("interleaved"))


BAD = {
    "repeated": lambda r, p, m, v: iter([Action("F", 0), Action("F", 0)]),
    "too early": lambda r, p, m, v: iter([Action("B", 0), Action("F", 0)]),
    "unknown": lambda r, p, m, v: iter([Action("f", 0)]),
    "left out": lambda r, p, m, v: iter([Action("F", 0)]),
    "beyond": lambda r, p, m, v: iter([Action("F", 7)]),
}


@pytest.mark.parametrize("name", list(BAD))
def test_orders_that_cannot_be_right_are_refused(name: str) -> None:
    schedules._things[f"bad {name}"] = Schedule(BAD[name])
    try:
        with pytest.raises(UserError, match=f"schedule 'bad {name}'"):
            actions(f"bad {name}", 0, 1, 1)
    finally:
        del schedules._things[f"bad {name}"]


def test_interleaved_needs_whole_rounds() -> None:
    with pytest.raises(UserError, match="a multiple of pp=4 microbatches, and has 9"):
        actions("interleaved", 0, 4, 9, 2)
