"""Speed on very many GPUs: `make bench`. Each first estimate is a process of its own; pairs run in turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).parents[2]

FIRST = """
import json, resource, sys, time
from shardyard import read_job, simulate
from sim.pricing.transfers import translation
if sys.argv[2] == "one by one":
    translation.is_periodic = lambda topology: False
plan = dict(tp=8, pp=16, accumulation=16, sequence_parallel=True, sequence=8192, data_parallel="zero1")
job = read_job(model="llama-3.1-405b", cluster="dgx-h100", nodes=int(sys.argv[1]), plan=plan)
start = time.process_time()
step = simulate(job).step
print(json.dumps([step, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]))
"""


def first_estimate(nodes: int, how: str) -> tuple[float, float, float]:
    """Step, seconds of CPU time and MB of a process that has not seen the cluster before."""
    run = subprocess.run([sys.executable, "-c", FIRST, str(nodes), how], cwd=ROOT, check=True, capture_output=True, text=True)
    step, seconds, memory = json.loads(run.stdout)
    return step, seconds, memory


@pytest.mark.parametrize("nodes", [2048, 12_800])
def test_first_estimate(nodes: int) -> None:
    """Copies of stages and groups laid over links once, and each of them."""
    pairs = [(first_estimate(nodes, "once"), first_estimate(nodes, "one by one")) for _ in range(3)]
    assert all(once[0] == each[0] for once, each in pairs)
    once, each = (tuple(median(pair[side][number] for pair in pairs) for number in (1, 2)) for side in (0, 1))
    print(
        f"\n{8 * nodes:,} GPUs: {once[0]:.2f} s, {once[1]:.0f} MB; laid one by one {each[0]:.2f} s, {each[1]:.0f} MB: "
        f"{each[0] / once[0]:.1f} times"
    )


def test_first_estimate_of_a_million() -> None:
    """1,048,576 GPUs."""
    _, seconds, memory = first_estimate(131_072, "once")
    print(f"\n1,048,576 GPUs: {seconds:.2f} s, {memory:.0f} MB")
    assert memory < 500


ALL_REDUCE = """
import json, resource, sys, time
from calibration.bench import bench
from sim.pricing.transfers import translation
if sys.argv[2] == "one by one":
    translation.is_periodic = lambda topology: False
start = time.process_time()
data, _ = bench("all_reduce", "dgx-h100", int(sys.argv[1]))
steps = [row["seconds"] for row in data.to_dict()["rows"]]
print(json.dumps([steps, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]))
"""


def all_reduce(nodes: int, how: str) -> tuple[list[float], float, float]:
    """Seconds of an all-reduce by size, seconds of CPU time and MB of a process."""
    run = subprocess.run(
        [sys.executable, "-c", ALL_REDUCE, str(nodes), how], cwd=ROOT, check=True, capture_output=True, text=True
    )
    sizes, seconds, memory = json.loads(run.stdout)
    return sizes, seconds, memory


def test_all_reduce_on_very_many() -> None:
    """`shardyard collective all_reduce`: one channel laid for all, and each of them."""
    pairs = [(all_reduce(4096, "once"), all_reduce(4096, "one by one")) for _ in range(3)]
    assert all(once[0] == each[0] for once, each in pairs)
    once, each = (tuple(median(pair[side][number] for pair in pairs) for number in (1, 2)) for side in (0, 1))
    print(
        f"\nall-reduce on 32,768 GPUs: {once[0]:.2f} s, {once[1]:.0f} MB; laid one by one {each[0]:.2f} s, {each[1]:.0f} MB: "
        f"{each[0] / once[0]:.1f} times"
    )
    _, seconds, memory = all_reduce(131_072, "once")
    print(f"all-reduce on 1,048,576 GPUs: {seconds:.1f} s, {memory:.0f} MB")


DEEP = """
import json, resource, time
from shardyard import predict, read_job
model = dict(name="deep", hidden=4096, layers=512, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, gated=True, context=2048)
job = read_job(model=model, cluster="dgx-h100", nodes=64, plan=dict(pp=512, accumulation=1024, sequence=2048))
took = []
for _ in range(2):
    start = time.process_time()
    events = predict(job).events
    took.append(time.process_time() - start)
print(json.dumps([*took, events, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]))
"""


def test_a_pipeline_of_512_stages() -> None:
    """1,024 microbatches: the first estimate on its cluster, and the next."""
    run = subprocess.run([sys.executable, "-c", DEEP], cwd=ROOT, check=True, capture_output=True, text=True)
    first, again, events, memory = json.loads(run.stdout)
    print(f"\n512 stages, 1,024 microbatches, {events:,} events: {first:.2f} s, again {again:.2f} s, {memory:.0f} MB")
    assert memory < 1000
