"""Speed: `make bench`. Compare within one run; the machine's noise is in both numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import pytest
from simpy import Environment

from shardyard import read_job, simulate
from sim.analysis.summary import Summary, summarise
from strategies.job import Job
from strategies.predict import predict, prices_of, programs

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).parents[2]

GPT3 = dict(model="gpt3-175b", cluster="dgx-a100", nodes=64, plan=dict(tp=8, pp=8, accumulation=64, recompute="full"))
LLAMA = dict(
    model="llama-3.1-405b",
    cluster="dgx-h100",
    nodes=2048,
    plan=dict(tp=8, pp=16, accumulation=16, sequence_parallel=True, sequence=8192, data_parallel="zero1"),
)


def bare(events: int) -> float:
    """Seconds per timeout of a SimPy loop that does nothing else."""
    env = Environment()

    def loop():
        for _ in range(events):
            yield env.timeout(1)

    start = perf_counter()
    env.process(loop())
    env.run()
    return (perf_counter() - start) / events


NARROW = GPT3 | {"cluster": "dgx-h100", "plan": GPT3["plan"] | {"tp": 4}}  # groups that share their nodes
ESTIMATES = {"gpt3-175b on 512": GPT3, "gpt3-175b on 512, tp=4": NARROW, "llama-3.1-405b on 16384": LLAMA}


def every_microbatch(job: Job) -> Summary:
    """The step with all of its microbatches played."""
    return summarise(simulate(job))


@pytest.mark.parametrize("ask", [predict, every_microbatch], ids=["predict", "all microbatches played"])
@pytest.mark.parametrize("kept", [False, True], ids=["another plan", "the same plan"])
@pytest.mark.parametrize("job", ESTIMATES.values(), ids=ESTIMATES)
def test_estimate(benchmark: Callable, job: dict, kept: bool, ask: Callable[[Job], Summary]) -> None:
    """What users ask for in a process that has seen the cluster before. kept: and the plan, whose program is there."""
    asked = read_job(**job)

    def estimate():
        if not kept:
            programs.cache_clear()
        return ask(asked)

    summary = estimate()
    benchmark(estimate)
    per_event = benchmark.stats["median"] / summary.events
    alone = median(bare(100_000) for _ in range(5))
    benchmark.extra_info.update(events=summary.events, microseconds_per_event=per_event * 1e6, bare=alone * 1e6)
    print(
        f"\n{asked.model.name}: {benchmark.stats['median'] * 1e3:.1f} ms per estimate, {summary.events} events, "
        f"{per_event * 1e6:.1f} µs per event against {alone * 1e6:.2f} µs of a bare SimPy timeout"
    )


MANY = dict(model="llama-3.1-70b", cluster="dgx-h100", nodes=8)
LONG = {
    "GPT-3, 4,000 microbatches": dict(
        model="gpt3-175b", cluster="dgx-h100", nodes=8, plan=dict(tp=8, pp=8, accumulation=4000, sequence=2048)
    ),
    "405B, 8 chunks, 288 microbatches": dict(
        model="llama-3.1-405b",
        cluster="dgx-h100",
        nodes=64,
        plan=dict(tp=8, pp=8, schedule="interleaved", chunks=8, accumulation=288, sequence=2048),
    ),
    "70B, tp=4 pp=16, 256 microbatches": MANY
    | {"plan": dict(tp=4, pp=16, data_parallel="zero1", sequence_parallel=True, accumulation=256)},
    "70B, tp=2 pp=32, 256 microbatches": MANY
    | {"plan": dict(tp=2, pp=32, data_parallel="zero1", sequence_parallel=True, accumulation=256)},
    "the same with recomputation, whose microbatches repeat in pairs": MANY
    | {"plan": dict(tp=2, pp=32, data_parallel="zero1", sequence_parallel=True, accumulation=256, recompute="full")},
}


@pytest.mark.parametrize("given", LONG.values(), ids=LONG)
def test_steps_of_many_microbatches(given: dict) -> None:
    """Most share links from the beginning on: seconds of CPU time of another plan and of the same again, the least of three."""
    job, times = read_job(**given), []
    for _ in range(3):
        programs.cache_clear()
        for _ in range(2):
            start = process_time()
            summary = predict(job)
            times.append(process_time() - start)
    print(f"\n{min(times[::2]):.3f} / {min(times[1::2]):.3f} s of CPU time, {summary.events:,} events")


@pytest.mark.parametrize("nodes", [64, 4096])
def test_estimate_does_not_depend_on_dp(benchmark: Callable, nodes: int) -> None:
    """GPT-3 with dp 8 and dp 512."""
    asked = read_job(**GPT3 | {"nodes": nodes})
    simulate(asked)
    benchmark(simulate, asked)


@pytest.mark.parametrize("arguments", [("--help",), ("simulate", "examples/llama-3.1-70b.yaml")], ids=" ".join)
def test_whole_process(benchmark: Callable, arguments: tuple[str, ...], tmp_path: Path) -> None:
    """From the shell, with the bytecode that the first run leaves, as users have it, also where the environment keeps none."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "shardyard.py", *arguments]
    run = partial(subprocess.run, command, cwd=ROOT, env=environment, check=True, capture_output=True)
    run()
    benchmark(run)


SPACES = {
    "even": dict(
        model="llama-3.1-405b",
        cluster="dgx-h100",
        nodes=2048,
        plan=dict(auto=False, sequence=8192, global_batch=2048, gradients="fp32"),
    ),
    "a pod that is not full": dict(path=ROOT / "examples/hybrids/llama-3.1-405b.yaml"),
}


@pytest.mark.parametrize("given", SPACES.values(), ids=SPACES)
def test_the_best_plan_of_llama_405b_on_16384_gpus(given: dict[str, Any]) -> None:
    """The usual space, proven; bounds alone, in plans per second of CPU time."""
    from strategies.planner.bounds.every_plan import bounds
    from strategies.planner.bounds.layer_cost_table import kinds_of
    from strategies.planner.search.candidates import candidates
    from strategies.planner.search.objective import objective
    from strategies.planner.search.search import Search
    from strategies.planner.search.space import default_space
    from strategies.planner.search.workers.executors import engine

    job = read_job(**given)
    space = default_space(job)
    with engine(workers=2) as runs:
        answer = Search(lambda changes: read_job(overrides=changes, **given), space, objective("step"), runs).run()
    assert answer.proven
    assert answer.counts["allowed"] >= 50_000
    plans, prices = candidates(job, space), prices_of(job)
    kinds = kinds_of(plans, prices)
    bounds(plans, kinds, prices)
    start = process_time()
    bounds(plans, kinds, prices)
    busy = process_time() - start
    counts, whole = answer.counts, answer.seconds["all"]
    print(
        f"\n{counts['allowed']:,} plans decided in {whole:.1f} s ({counts['allowed'] / whole:,.0f} per second): "
        f"{counts['simulated']} simulated; {len(plans) / busy:,.0f} bounds per second of CPU time"
    )


def test_search_against_brute_force() -> None:
    """At least 2,000 plans, every one simulated: the same winner."""
    from strategies.planner.search.candidates import candidates
    from strategies.planner.search.evaluate import evaluate
    from strategies.planner.search.objective import objective
    from strategies.planner.search.search import Search
    from strategies.planner.search.space import default_space, parse_axis
    from strategies.planner.search.workers.executors import engine

    given = dict(model="gpt2-1.5b", cluster="dgx-a100", nodes=2, plan=dict(auto=False, global_batch=128))
    job = read_job(**given)
    fixed = (
        "plan.cp=1",
        "plan.tp=1,5",
        "plan.order=tp-cp-ep-dp-pp",
        "plan.microbatch=1,2,4,8,16,32,64",
        "plan.overlap=true",
        "plan.offload=[null]",
    )
    space = default_space(job).varied(map(parse_axis, fixed))
    plans = candidates(job, space)
    start = perf_counter()
    brute = [evaluate(plans.job_of(plan)) for plan in range(len(plans))]
    simulated = perf_counter() - start
    with engine(workers=2) as runs:
        answer = Search(lambda changes: read_job(overrides=changes, **given), space, objective("step"), runs).run()
    assert len(plans) >= 2000
    assert answer.rows[0]["step"] == min(row["step"] for row in brute if not row["error"] and row["fits"])
    print(f"\n{len(plans):,} plans: {answer.seconds['all']:.1f} s, every one simulated {simulated:.1f} s")


def test_page_of_a_thousand_plans(tmp_path: Path) -> None:
    """Heatmaps, Pareto front and table of 1,000 plans, with the figures of the step; two of its builds, the second is told."""
    import random

    from reports.page.page import Report, write_report
    from reports.page.simulated_plans import Plans, section
    from topologies.costs import Rates

    timeline, draw = simulate(read_job(**GPT3)), random.Random(0)
    choices = {
        "plan.tp": (1, 2, 4, 8),
        "plan.pp": (1, 2, 4, 8, 16),
        "plan.data_parallel": ("ddp", "zero1", "zero2", "zero3"),
        "plan.microbatch": (1, 2, 4),
        "plan.schedule": ("1f1b", "interleaved", "zb-h1"),
    }
    rows = []
    for number in range(1000):
        rate = draw.uniform(500, 1000)
        rows.append(
            {
                "hash": str(number),
                "step": 1e4 / rate,
                "gpus": 512,
                "tokens_per_second": 512 * rate,
                "tokens_per_second_per_gpu": rate,
                "mfu": rate / 2000,
                "memory": draw.uniform(3e10, 9e10),
                "bubble": 0.1,
                "fits": draw.random() < 0.8,
                "exposed": 0.1,
                "events": 1,
                "error": None,
                "changes": {name: draw.choice(values) for name, values in choices.items()},
            }
        )
    for _ in range(2):
        start, wall = process_time(), perf_counter()
        part = section(Plans(rows, {}, 1e9, Rates(2.0, "", 700.0, ""), 8e10), "Plans")
        written = write_report(tmp_path, Report(timeline, summarise(timeline), {"model": "m"}, sections=(part,)))[0]
        busy, waited = process_time() - start, perf_counter() - wall
    print(f"\n1,000 plans: {busy:.2f} s of CPU time, {waited:.2f} s; {written.stat().st_size / 1e6:.2f} MB")
