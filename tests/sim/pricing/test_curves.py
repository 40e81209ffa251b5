"""The formula of products: parts of k, results that are stored, power limits."""

from __future__ import annotations

from typing import Any

import pytest

from sim.pricing.kernel_curves import POWER, GemmCurve, Product, Rates, Tile, gemm_clocks
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from topologies.cluster_files import load_gpu

RATES = PEAK, BANDWIDTH, SMS = Rates(1e12, 1e9, 8)
TILE = Tile.model_construct(m=64, n=64, efficiency=1.0)


def curve(**numbers: Any) -> GemmCurve:
    own = {"efficiency": 1.0, "memory": 1.0, "split": 0.0, "exposed": 0.0, "tiles": (TILE,)} | numbers
    return GemmCurve.model_construct(**own)


def seconds(gemm_curve: GemmCurve, m: int, n: int, k: int, operands: float = 0.0, result: float = 0.0) -> float:
    return float(gemm_clocks(gemm_curve, RATES, Product((1, m, n, k), (operands, result)))[1])


def test_k_is_cut_until_every_multiprocessor_has_a_part() -> None:
    """One tile on 8 multiprocessors: 8 parts of k. Ten tiles would take two waves; 40 fifths take five of a fifth each."""
    full, free = 2 * 64 * 64 / (PEAK / SMS), curve(cached=1e12)
    assert seconds(free, 64, 64, 8000) == pytest.approx(1000 * full, rel=1e-3)
    assert seconds(free, 640, 64, 8000) == pytest.approx(5 / 4 * 8000 * full, rel=1e-3)
    assert seconds(curve(split=1.0), 640, 64, 8000) == pytest.approx(2 * 8000 * full)


def test_results_that_are_stored_while_nothing_is_multiplied_come_on_top() -> None:
    """Half of 0.1 s of traffic is hidden behind 1 s of arithmetic, half is not; and no lower clock makes it longer.

    Half the watts leave the clock 0.5 to POWER.
    """
    k = round(PEAK / (2 * 512 * 512))  # one second
    for limit, arithmetic in ((1.0, 1.0), (0.5, 2**POWER)):
        limited = curve(exposed=0.5, blend=9.0, sustained=limit)
        assert seconds(limited, 512, 512, k, result=0.1 * BANDWIDTH) == pytest.approx(arithmetic + 0.05, rel=1e-3)


def test_both_clocks_are_one_where_the_limit_is_not_reached() -> None:
    low, high = gemm_clocks(curve(), RATES, Product((1, 64, 64, 8), (0.0, 0.1 * BANDWIDTH)))
    assert low == pytest.approx(high)


def test_exposure_is_what_accumulation_showed() -> None:
    """Fitted to plain products; into fp32 sums, 0.6 of the further traffic was exposed on an A100 PCIe (median of 61 shapes,
    github.com/MooreThreads/SimuMax configs/system/a100_pcie.json).
    """
    assert load_profile("a100").gemm["bf16"].exposed == pytest.approx(0.6, abs=0.15)


H100_500 = load_gpu("h100-sxm").model_copy(update={"power": 500.0, "memory_bandwidth": 2400e9})


def product(m: int, n: int, k: int) -> Kernel:
    return Kernel("gemm", "product", "forward", 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), "bf16", (1, m, n, k))


def test_a_lower_power_limit_slows_products_that_reach_it() -> None:
    """14336 × 4096 × 4096 on an A100 PCIe, 300 W: 2088 us (github.com/MooreThreads/SimuMax configs/system/a100_pcie.json); and a
    small one is no slower.
    """
    sxm, pcie = load_gpu("a100-sxm-80gb"), load_gpu("a100-pcie-80gb")
    profile = load_profile("a100")
    assert Prices(profile, pcie).seconds(product(14336, 4096, 4096)) == pytest.approx(2088e-6, rel=0.03)
    capped, full = (Prices(profile, sxm.model_copy(update={"power": watts})) for watts in (300.0, 400.0))
    large, small = product(8192, 8192, 8192), product(128, 512, 512)
    assert capped.seconds(large) / full.seconds(large) == pytest.approx((4 / 3) ** POWER, rel=0.02)
    assert capped.seconds(small) == full.seconds(small)
    assert Prices(profile, sxm.model_copy(update={"power": 0.0})).seconds(large) == full.seconds(large)


@pytest.mark.parametrize(
    ("m", "n", "k", "rate"), [(8192, 8192, 8192, 585e12), (65536, 8192, 7168, 575e12), (65536, 3584, 8192, 546e12)]
)
def test_an_h100_of_500_watts(m: int, n: int, k: int, rate: float) -> None:
    """Products as measured with that limit (github.com/pytorch/FBGEMM pull 2546)."""
    assert product(m, n, k).flops / Prices(load_profile("h100"), H100_500).seconds(product(m, n, k)) == pytest.approx(
        rate, rel=0.05
    )


def test_attention_on_an_h100_of_500_watts() -> None:
    """FlashAttention-2 of PyTorch, 128 sequences of 4,096 tokens, 8 heads of 128, no mask: 298 TFLOP/s (github.com/pytorch/
    benchmark pull 2296, on Meta's H100); its authors publish 368 of an H100 of 700 W."""
    shape = (128, 8, 8, 4096, 4096, 128, 0)
    flops = 4.0 * 128 * 8 * 4096**2 * 128
    kernel = Kernel("attention_forward", "attention", "forward", flops, 1.0, "bf16", shape, "flash2")
    assert flops / Prices(load_profile("h100"), H100_500).seconds(kernel) == pytest.approx(298e12, rel=0.1)


@pytest.mark.parametrize(("n", "k", "rate"), [(4096, 8192, 247.7e12), (6144, 2560, 239.0e12), (12288, 2048, 240.8e12)])
def test_products_that_draw_less_fall_less_at_the_limit(n: int, k: int, rate: float) -> None:
    """Rows of an A100 at its power limit, m = 8192 (github.com/ai-dynamo/aiconfigurator systems/data at 095f58a51c4c). At the
    energy of 257 TFLOP/s for 8192³ each of them would be 2 to 4 % faster.
    """
    seconds = Prices(load_profile("a100"), load_gpu("a100-sxm-80gb")).seconds(product(8192, n, k))
    assert 2.0 * 8192 * n * k / seconds == pytest.approx(rate, rel=0.02)
