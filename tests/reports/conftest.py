"""A summary of round numbers for texts, and small played jobs for everything that follows from a timeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sim.analysis.breakdown import COMPONENTS
from sim.analysis.link_load import LinkLoad
from sim.analysis.stage_memory import StageMemory
from sim.analysis.summary import FLOPS_RULE, Interval, Summary, Volume
from sim.engine.player import run
from sim.pricing.prices import Prices
from sim.pricing.shipped import profile_for
from sim.timeline import Timeline
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.cluster_files import load_cluster

NO_BYTES = dict.fromkeys(("parameter", "gradient", "optimizer", "activation", "temporary", "buffer"), 0.0)
MODEL = Model(name="small", hidden=1024, layers=4, heads=16, vocabulary=32000, context=1024)


@pytest.fixture
def summary() -> Summary:
    """32 GPUs, 1.23 s, 61.2 of 85.5 GB on stage 0; the components are 0.1 s each, and the bubble the rest."""
    breakdown = dict.fromkeys(COMPONENTS, 0.1) | dict.fromkeys(
        (f"{axis} exposed" for axis in ("cp", "ep", "host", "nvme", "cpu")), 0.0
    )
    breakdown["bubble"] = 1.23 - sum(seconds for name, seconds in breakdown.items() if name != "bubble")
    stages = (
        StageMemory(
            0,
            0,
            NO_BYTES | {"parameter": 4e9, "activation": 41e9, "optimizer": 12e9},
            4.2e9,
            61.2e9,
            0.5,
            "forward",
            {"context": 1e9, "communicators": 0.2e9, "reserve": 3e9},
        ),
        StageMemory(1, 16, NO_BYTES | {"parameter": 4e9, "activation": 20e9, "optimizer": 12e9}, 4e9, 40e9, 0.6, "forward"),
    )
    return Summary(
        gpus=32,
        step_seconds=1.23,
        tokens_per_second=213e3,
        tokens_per_second_per_gpu=213e3 / 32,
        model_flops_per_gpu=4e14,
        mfu=0.412,
        hfu=0.5,
        flops_rule=FLOPS_RULE,
        peak_dtype="bf16",
        gpu_hours_per_step=32 * 1.23 / 3600,
        breakdown=breakdown,
        bubble=breakdown["bubble"] / 1.23,
        uneven=0.0,
        exposed=0.3 / 1.23,
        volume={"tp": Volume(13e9, 6.5e9, 0.8), "dp": Volume(1e9, 5e8, 0.06)},
        links=(LinkLoad("node 0 nic 0 out", "nic", 32, 5e10, 3e10, 0.49),),
        memory=stages,
        memory_capacity=85.5e9,
        fits=True,
        events=100,
        profile="h100",
        interval=Interval(1.1, 1.4, 0.8, {}),
    )


@pytest.fixture
def too_big(summary: Summary) -> Summary:
    """The same with 30.5 GB more of activations on stage 0: 91.7 of 85.5 GB."""
    first = summary.memory[0]
    first = replace(first, kinds=first.kinds | {"activation": 71.5e9}, peak=91.7e9)
    return replace(summary, memory=(first, *summary.memory[1:]), fits=False)


@pytest.fixture
def job() -> dict[str, Any]:
    """A job as the command line describes it."""
    plan = {
        "tp": 4,
        "pp": 2,
        "dp": 4,
        "microbatch": 2,
        "data_parallel": "ddp",
        "recompute": "none",
        "attention": "flash",
        "sequence_parallel": False,
    }
    return {
        "model": "Llama-3.1 8B",
        "cluster": "4 × DGX H100",
        "plan": plan,
        "command": "shardyard run",
        "version": "0.1.0",
        "hash": "ab12",
    }


def played(fold: bool = True, **plan: Any) -> Timeline:
    """One step of a small model on a node of eight GPUs."""
    cluster = load_cluster("dgx-h100", nodes=1)
    gpu = cluster.node.gpu
    program = lower(MODEL, Resolved.of(Plan(**plan), MODEL, cluster.gpus))
    return run(program, cluster.topology(), Prices(profile_for(gpu.name), gpu), fold=fold)


@pytest.fixture(scope="session")
def play() -> Callable[..., Timeline]:
    """`played`, for tests that need a job of their own."""
    return played


@pytest.fixture(scope="session")
def timeline() -> Timeline:
    """tp = pp = dp = 2, four microbatches, everything recomputed; compiled: such a small model would else wait for its host."""
    return played(tp=2, pp=2, dp=2, accumulation=4, recompute="full", kernels="compiled")
