"""Speed: `make bench`. Compare within one run; the machine's noise is in both numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest
from simpy import Environment

from shardyard import read_job, simulate
from sim.summary import summarise

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).parents[2]

GPT3 = dict(model="gpt3-175b", cluster="dgx-a100", nodes=64, plan=dict(tp=8, pp=8, accumulation=64, recompute="full"))
LLAMA = dict(
    model="llama-3.1-405b", cluster="dgx-h100", nodes=2048,
    plan=dict(tp=8, pp=16, accumulation=16, sequence_parallel=True, sequence=8192, data_parallel="zero1"),
)  # fmt: skip


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


@pytest.mark.parametrize("job", [GPT3, LLAMA], ids=["gpt3-175b on 512", "llama-3.1-405b on 16384"])
def test_estimate(benchmark: Callable, job: dict) -> None:
    """Lower, run and summarise in a process that has seen the cluster before."""
    asked = read_job(**job)

    def estimate():
        return summarise(simulate(asked))

    summary = estimate()
    benchmark(estimate)
    per_event = benchmark.stats["median"] / summary.events
    alone = median(bare(100_000) for _ in range(5))
    benchmark.extra_info.update(events=summary.events, microseconds_per_event=per_event * 1e6, bare=alone * 1e6)
    print(f"\n{asked.model.name}: {benchmark.stats['median'] * 1e3:.1f} ms per estimate, {summary.events} events, "
          f"{per_event * 1e6:.1f} µs per event against {alone * 1e6:.2f} µs of a bare SimPy timeout")  # fmt: skip


@pytest.mark.parametrize("nodes", [64, 4096])
def test_estimate_does_not_depend_on_dp(benchmark: Callable, nodes: int) -> None:
    """GPT-3 with dp 8 and dp 512."""
    asked = read_job(**GPT3 | {"nodes": nodes})
    simulate(asked)
    benchmark(simulate, asked)


@pytest.mark.parametrize("arguments", [("--help",), ("simulate", "examples/llama-3.1-70b.yaml")], ids=" ".join)
def test_whole_process(benchmark: Callable, arguments: tuple[str, ...]) -> None:
    """From the shell."""
    benchmark(subprocess.run, [sys.executable, "shardyard.py", *arguments], cwd=ROOT, check=True, capture_output=True)
