"""Speed of replays: `make bench`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pandas as pd
import pytest

from shardyard import predict, read_job, simulate, summarise
from sim.replay.graph import Graph
from sim.replay.step import StepReplay

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).parents[2]


def test_a_graph_of_many_ranks() -> None:
    """512 ranks of 300 ops, all of which meet at every 30th."""
    ranks, length = 512, 300
    ops = np.arange(ranks * length).reshape(ranks, length)
    rendezvous = np.full((ranks, length), -1)
    rendezvous[:, 29::30] = np.arange(29, length, 30)
    start = process_time()
    graph = Graph(ops.size, ops[:, :-1].ravel(), ops[:, 1:].ravel(), rendezvous.ravel())
    built = process_time() - start
    durations = np.random.default_rng(0).random(ops.size)
    samples = 50
    start = process_time()
    for _ in range(samples):
        graph.times(durations)
    sample = (process_time() - start) / samples
    print(f"\n{ops.size:,} ops: graph {built:.3f} s, a sample {1e3 * sample:.2f} ms ({1e9 * sample / ops.size:.0f} ns per op)")


def test_straggler_of_a_hundred_thousand_ops(tmp_path: Path) -> None:
    """The example's job as one of 34 dp ranks: `shardyard straggler` as a process."""
    pytest.importorskip("pyarrow")
    example = pd.read_parquet(ROOT / "examples/traces/uneven-stages.parquet")
    copies = [
        example.astype({"dp_rank": int, "rank": int}).assign(
            dp_rank=lambda rows, copy=copy: rows.dp_rank + 2 * copy, rank=lambda rows, copy=copy: rows["rank"] + 8 * copy
        )
        for copy in range(17)
    ]
    trace = tmp_path / "trace.parquet"
    pd.concat(copies).to_parquet(trace)
    command = [sys.executable, "-m", "shardyard", "straggler", str(trace), "--json"]
    start, before = perf_counter(), os.times()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    wall, after = perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"\n{17 * len(example):,} ops of 34 dp ranks as a process: {cpu:.2f} s of CPU time, {wall:.2f} s")


JOBS = {
    "16,384 ranks, one sample": (
        dict(model="llama-3.1-405b", nodes=2048, plan=dict(tp=8, pp=16, accumulation=16, data_parallel="zero1", sequence=8192)),
        1,
    ),
    "512 ranks, 1,000 samples": (dict(model="gpt3-175b", nodes=64, plan=dict(tp=8, pp=8, accumulation=64, sequence=2048)), 1000),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_played_step_of_many_ranks(name: str) -> None:
    """All GPUs have their own speed: the graph, and times of all ranks and samples."""
    given, samples = JOBS[name]
    timeline = simulate(read_job(cluster="dgx-h100", **given))
    start = process_time()
    replay = StepReplay(timeline)
    built = process_time() - start
    kernels = np.exp(0.02 * np.random.default_rng(0).standard_normal((timeline.program.grid.world, samples)))
    start = process_time()
    replay.times(kernels)
    print(f"\n{name}: graph {built:.3f} s, times {process_time() - start:.3f} s")


def test_an_estimate_of_4000_microbatches() -> None:
    """By a steady state, and played to the end."""
    job = read_job(model="gpt3-175b", cluster="dgx-h100", nodes=8, plan=dict(tp=8, pp=8, accumulation=4000, sequence=2048))
    predict(job)
    start = process_time()
    predict(job)
    short = process_time() - start
    start = process_time()
    summarise(simulate(job))
    print(f"\n4,000 microbatches: {short:.3f} s, all of them played {process_time() - start:.3f} s")
