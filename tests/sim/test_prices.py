"""Prices against published kernel times and against what arithmetic forbids."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.profiles import load_profile, profile_for, profile_names
from sim.prices import Prices
from sim.program import Kernel
from topologies.cluster import load_gpu
from topologies.reading import UserError

# Measured seconds, bf16, on A100-SXM4-80GB, H100 80GB HBM3 and B200: systems/data at 095f58a51c4c of
# github.com/ai-dynamo/aiconfigurator (Apache-2.0). The same shapes on each GPU; some are among the rows fitted to.
PRODUCTS = (  # profile, m, n, k, seconds
    ("a100", 2048, 4096, 4096, 0.000305227),
    ("a100", 4096, 12288, 4096, 0.00151726),
    ("a100", 8192, 5120, 5120, 0.00167804),
    ("a100", 512, 4096, 16384, 0.000282708),
    ("h100", 2048, 4096, 4096, 8.66853e-05),
    ("h100", 4096, 12288, 4096, 0.000519815),
    ("h100", 8192, 5120, 5120, 0.000534732),
    ("h100", 512, 4096, 16384, 8.03947e-05),
    ("b200", 2048, 4096, 4096, 4.47209e-05),
    ("b200", 4096, 12288, 4096, 0.000262711),
    ("b200", 8192, 5120, 5120, 0.000256397),
    ("b200", 512, 4096, 16384, 5.06169e-05),
)
ATTENTION = (  # profile, batch, heads, kv_heads, sequence, head_dim, seconds of the causal forward pass
    ("a100", 4, 32, 8, 4096, 128, 0.00339585),
    ("a100", 1, 64, 8, 8192, 128, 0.00620356),
    ("h100", 4, 32, 8, 4096, 128, 0.00101102),
    ("h100", 1, 64, 8, 8192, 128, 0.0018347),
    ("b200", 4, 32, 8, 4096, 128, 0.000548832),
    ("b200", 1, 64, 8, 8192, 128, 0.000931611),
)
MEASURED = ("a100", "h100", "h200", "b200", "l40s")


class Gpu(NamedTuple):
    """Hardware that no catalogue knows."""

    peak: Mapping[str, float]
    memory_bandwidth: float
    sms: int


def prices(name: str) -> Prices:
    profile = load_profile(name)
    return Prices(profile, Gpu({"bf16": 1e15}, 3e12, 128) if name == "generic" else load_gpu(profile.gpu))


def gemm(m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16") -> Kernel:
    traffic = 2.0 * batch * (m * k + k * n + m * n)
    return Kernel("gemm", "product", "forward", 2.0 * batch * m * n * k, traffic, dtype, (batch, m, n, k))


def attention(
    batch: int, heads: int, queries: int, keys: int, dim: int, causal: int = 1, kind: str = "attention_forward"
) -> Kernel:
    traffic = 4.0 * batch * heads * dim * (queries + keys)
    return Kernel(kind, "attention", "forward", 0.0, traffic, "bf16", (batch, heads, heads, queries, keys, dim, causal))


@pytest.mark.parametrize(("name", "m", "n", "k", "seconds"), PRODUCTS)
def test_product_near_measurement(name: str, m: int, n: int, k: int, seconds: float) -> None:
    assert prices(name).seconds(gemm(m, n, k)) == pytest.approx(seconds, rel=0.25)


def test_products_are_right_within_5_percent_in_the_median() -> None:
    assert statistics.median(abs(prices(name).seconds(gemm(m, n, k)) / seconds - 1) for name, m, n, k, seconds in PRODUCTS) < 0.05


@pytest.mark.parametrize(("name", "batch", "heads", "kv_heads", "length", "dim", "seconds"), ATTENTION)
def test_attention_near_measurement(
    name: str, batch: int, heads: int, kv_heads: int, length: int, dim: int, seconds: float
) -> None:
    traffic = 4.0 * batch * length * dim * (heads + kv_heads)
    kernel = Kernel("attention_forward", "a", "forward", 0.0, traffic, "bf16", (batch, heads, kv_heads, length, length, dim, 1))
    assert prices(name).seconds(kernel) == pytest.approx(seconds, rel=0.2)


def test_flash_attention_2_forward_and_backward_on_a100() -> None:
    """173 TFLOP/s over both passes (causal, 4k, head dimension 128, 16 heads, batch 4), FlashAttention-2's own benchmark."""
    passes = [attention(4, 16, 4096, 4096, 128, kind=kind) for kind in ("attention_forward", "attention_backward")]
    both = sum(map(prices("a100").seconds, passes))
    assert 3.5 * 2 * 4 * 16 * 4096**2 * 128 / both == pytest.approx(173e12, rel=0.1)


def test_a_copy_runs_at_the_published_fraction_of_bandwidth() -> None:
    """A100-80GB, one read and one write: 1732 GB/s; two reads: 1759 (github.com/te42kyfo/gpu-benches gpu-stream)."""
    seconds = prices("a100").seconds(Kernel("memory", "copy", "forward", 0.0, 1e10))
    assert 1e10 / seconds == pytest.approx(1.745e12, rel=0.01)


sizes = st.integers(1, 20000)


@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64), name=st.sampled_from((*MEASURED, "generic")))
def test_no_product_is_faster_than_the_hardware(m: int, n: int, k: int, batch: int, name: str) -> None:
    price, kernel = prices(name), gemm(m, n, k, batch)
    seconds = price.seconds(kernel)
    assert max(kernel.flops / price.gpu.peak["bf16"], kernel.bytes / price.gpu.memory_bandwidth) < seconds < float("inf")


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 16), heads=st.integers(1, 96), queries=sizes, more=sizes, dim=st.sampled_from((64, 128, 256)),
    causal=st.integers(0, 1), name=st.sampled_from((*MEASURED, "generic")),
)  # fmt: skip
def test_no_attention_is_faster_than_the_hardware(
    batch: int, heads: int, queries: int, more: int, dim: int, causal: int, name: str
) -> None:
    price = prices(name)
    keys = queries + more
    pairs = queries * keys - causal * queries * (queries - 1) / 2
    for kind, factor in (("attention_forward", 4), ("attention_backward", 10)):
        seconds = price.seconds(attention(batch, heads, queries, keys, dim, causal, kind))
        assert factor * batch * heads * dim * pairs / price.gpu.peak["bf16"] * 0.999 < seconds < float("inf")


@pytest.mark.parametrize("name", [name for name in profile_names() if name not in ("v100", "cpu-gloo")])
def test_a_product_pays_for_whole_tiles(name: str) -> None:
    """The smallest tile is 64 × 64: 129 rows cost what 192 cost, besides the operands' bytes."""
    price = prices(name)
    ragged, full = gemm(129, 8192, 65536), gemm(192, 8192, 65536)
    same = Kernel(full.kind, full.label, full.phase, full.flops, ragged.bytes, full.dtype, full.shape)
    assert price.seconds(ragged) == pytest.approx(price.seconds(same), rel=0.02)


def test_faster_hardware_is_never_slower() -> None:
    slow, fast = Gpu({"bf16": 1e14}, 1e12, 100), Gpu({"bf16": 2e14}, 2e12, 100)
    update = Kernel("optimizer", "update", "optimizer", 0.0, 1e9)
    for kernel in (gemm(4096, 4096, 4096), gemm(64, 512, 65536), attention(2, 16, 2048, 2048, 128), update):
        assert Prices(load_profile("h100"), fast).seconds(kernel) < Prices(load_profile("h100"), slow).seconds(kernel)


def test_causal_attention_is_cheaper_and_backward_dearer() -> None:
    price = prices("h100")
    causal, full = (price.seconds(attention(1, 32, 8192, 8192, 128, causal=mask)) for mask in (1, 0))
    assert 0.5 < causal / full < 0.6
    backward = price.seconds(attention(1, 32, 8192, 8192, 128, kind="attention_backward"))
    assert backward / causal == pytest.approx(2.5 / 0.86, rel=0.01)


def test_cpu_core_reaches_its_measured_rate() -> None:
    """About 101 GFLOP/s for one pinned process, as another measurement of this sort of core found."""
    price = prices("cpu-gloo")
    assert price.profile.synchronous
    assert price.seconds(gemm(1024, 1024, 1024, dtype="fp32")) == pytest.approx(2 * 1024**3 / 101e9, rel=0.15)


def test_dtype_that_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="bf16"):
        prices("v100").seconds(gemm(64, 64, 64))


def test_extrapolation_is_named() -> None:
    h100 = prices("h100")
    assert h100.extrapolation(gemm(4096, 4096, 4096)) is None
    assert "m=100000" in (h100.extrapolation(gemm(100000, 4096, 4096)) or "")
    assert "batch=8" in (h100.extrapolation(gemm(64, 64, 64, batch=8)) or "")
    assert "fp32" in (h100.extrapolation(gemm(4096, 4096, 4096, dtype="fp32")) or "")
    assert "keys=65536" in (h100.extrapolation(attention(1, 8, 4096, 65536, 128)) or "")
    assert "not measured" in (Prices(profile_for("unheard-of"), h100.gpu).extrapolation(gemm(4096, 4096, 4096)) or "")


def test_same_kernel_is_priced_once() -> None:
    price = prices("h100")
    price.seconds(gemm(4096, 4096, 4096))
    price.seconds(gemm(4096, 4096, 4096))
    assert price.seconds.cache_info().hits == 1
