"""Shipped prices, kernels of attention, and programs on the toy GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hypothesis import strategies as st

from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import Block, Cohort, Kernel, Program, Run
from topologies.cluster_files import load_gpu

MEASURED = ("a100", "h100", "h200", "b200", "l40s")


class Gpu(NamedTuple):
    """Hardware that no catalogue knows."""

    peak: Mapping[str, float]
    memory_bandwidth: float
    sms: int
    power: float = 0.0
    name: str = "unknown"


def prices(name: str) -> Prices:
    profile = load_profile(name)
    return Prices(profile, Gpu({"bf16": 1e15}, 3e12, 128) if name == "generic" else load_gpu(profile.gpu))


def attention(
    batch: int, heads: int, queries: int, keys: int, dim: int, causal: int = 1, kind: str = "attention_forward"
) -> Kernel:
    traffic = 4.0 * batch * heads * dim * (queries + keys)
    return Kernel(kind, "attention", "forward", 0.0, traffic, "bf16", (batch, heads, heads, queries, keys, dim, causal))


sizes = st.integers(1, 20000)


def kernel(seconds: float, phase: str = "forward") -> Kernel:
    """A kernel of `seconds` on the toy GPU (1 TB/s)."""
    return Kernel("memory", f"{seconds}", phase, 0.0, seconds * 1e12)


def block(*seconds: float, times: int = 1, phase: str = "forward") -> Block:
    return Block(phase, (Run(times, tuple(kernel(s, phase) for s in seconds)),))


def program(*cohorts: Cohort, **degrees: int) -> Program:
    return Program(Grid.of(**degrees), list(cohorts), 1.0, 1.0, "bf16", 1.0, 1)
