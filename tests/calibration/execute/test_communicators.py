"""How many process groups a rank of a large job is in: each is a communicator of NCCL, with memory and a start-up of its own."""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval

import pytest

WORLD, NODES = 1024, 128
GROUPS = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from calibration.execute.runner import Runner
from calibration.execute.setup import Setup, group_of, mesh_of
from calibration.launch.place import Place
from strategies.read_job import read_job

counts = {}
for name, (plan, model) in %r.items():
    dist.init_process_group("fake", rank=0, world_size=%d, store=FakeStore())
    plan = {"precision": "bf16", "microbatch": 2, "accumulation": 8, "kernels": "torch"} | plan
    model = {"name": "gpt", "hidden": 64, "layers": 8, "heads": 8, "vocabulary": 64, "context": 16} | model
    job = read_job(model=model, cluster="dgx-h100", nodes=%d, plan=plan)
    before = len(dist.distributed_c10d._world.pg_map)
    Runner(Setup.of(Place(0, %d, 0, "cpu", (), None), job))
    counts[name] = len(dist.distributed_c10d._world.pg_map) - before, job.resolve().grid.communicators
    dist.destroy_process_group()
    mesh_of.cache_clear()
    group_of.cache_clear()
print(counts)
"""
MOE = {"mlp_bias": False, "experts": {"experts": 8, "chosen": 2, "ffn": 64}}
PLANS = {
    "tp × pp × dp": ({"tp": 8, "pp": 8}, {}),
    "cp × pp × dp": ({"cp": 2, "pp": 4}, {}),
    "hsdp": ({"data_parallel": "zero3", "shard": 8}, {}),
    "ep × dp": ({"ep": 8}, MOE),
}


def test_a_rank_of_1024_is_in_a_group_of_each_axis_and_a_few_more() -> None:
    """More are those of a tied embedding's two stages, and of all ranks that hold the same parameters."""
    pytest.importorskip("torch")
    script = GROUPS % (PLANS, WORLD, NODES, WORLD)
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300, check=True)
    counts = literal_eval(said.stdout.splitlines()[-1])
    assert counts.keys() == PLANS.keys()
    for name, (groups, simulated) in counts.items():
        assert 0 < groups <= simulated + 1, name
