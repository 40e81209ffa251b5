"""Shipped prices, and kernels of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hypothesis import strategies as st

from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from topologies.cluster import load_gpu

MEASURED = ("a100", "h100", "h200", "b200", "l40s")


class Gpu(NamedTuple):
    """Hardware that no catalogue knows."""

    peak: Mapping[str, float]
    memory_bandwidth: float
    sms: int
    power: float = 0.0


def prices(name: str) -> Prices:
    profile = load_profile(name)
    return Prices(profile, Gpu({"bf16": 1e15}, 3e12, 128) if name == "generic" else load_gpu(profile.gpu))


def attention(
    batch: int, heads: int, queries: int, keys: int, dim: int, causal: int = 1, kind: str = "attention_forward"
) -> Kernel:
    traffic = 4.0 * batch * heads * dim * (queries + keys)
    return Kernel(kind, "attention", "forward", 0.0, traffic, "bf16", (batch, heads, heads, queries, keys, dim, causal))


sizes = st.integers(1, 20000)
