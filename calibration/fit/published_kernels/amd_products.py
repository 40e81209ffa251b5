"""Fits matrix products of AMD's accelerators to rates that AMD publishes: the generic curve with an efficiency of their own.

`python -m calibration.fit.published_kernels.amd_products` rewrites `gemm` of the profiles in `PROVENANCE`.

An MI325X of 1000 W runs ten products of DeepSeek-V3, 30 s each, at 616 TFLOP/s together in bf16 and 1143 in fp8 without scales
("typical attained FLOPs": github.com/ROCm/rocm-blogs, Completing the GPU Performance Picture, October 2026; operands normally
distributed, ROCm 7.2.1). The best product that AMD found reaches more, 831 and 1408: its tiles of 256 × 256 are no more than the
304 compute units, and k is 32896. Of an MI300X only the best was published, 708 and 1273 TFLOP/s of operands that take less power
(rocm.blogs.amd.com, Measuring Max-Achievable FLOPs, Part 2): the same set is taken to reach the same part of it.

Of CDNA 4 (gfx950, 256 compute units: an MI350X or MI355X) AITER has the quickest of all libraries' kernels for each shape
(github.com/ROCm/aiter aiter/configs/bf16_tuned_gemm.csv at 032c54e458e3), bf16 with results in fp32. Products of fewer than 4096
rows, which take up to 2.4 times as long as by this curve, are left out. In fp8 it is taken to reach the same part of its peak.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from calibration.fit.published_kernels.refit import described, file_of, rewrite, tidy
from sim.pricing.kernel_curves import GemmCurve
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from topologies.cluster_files import load_gpu

TYPES = ("bf16", "fp8")
ROWS = (32, 32768)  # of the ten products, m of each pair of n and k
COLUMNS = ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 256))
BEST = {"bf16": (831.40e12, 708e12), "fp8": (1408.06e12, 1273e12)}  # FLOP/s of an MI325X and of an MI300X
ATTAINED = {"bf16": 616.42e12, "fp8": 1143.18e12}  # of the ten on an MI325X
TYPICAL = {
    "mi325x": ATTAINED,
    "mi300x": {dtype: rate * BEST[dtype][1] / BEST[dtype][0] for dtype, rate in ATTAINED.items()},
}
SINGLE = {  # m, n, k: microseconds in bf16 on CDNA 4
    (4096, 2048, 6144): 99.2269,
    (4096, 3072, 6144): 138.0331,
    (4096, 50016, 6144): 1980.2913,
    (4096, 6144, 2048): 109.5022,
    (4096, 6144, 3072): 147.9731,
    (8192, 2048, 6144): 156.1796,
    (8192, 3072, 6144): 262.1828,
    (8192, 50016, 6144): 3931.0983,
    (8192, 6144, 2048): 184.6449,
    (8192, 6144, 3072): 245.0526,
    (16384, 2048, 6144): 311.994,
    (16384, 3072, 6144): 448.6444,
    (16384, 50016, 6144): 7715.4348,
    (16384, 6144, 2048): 341.6912,
    (16384, 6144, 3072): 467.8675,
}
KEPT_OUT = 8192  # m of the products that are not fitted to
STEPS = 40  # how often an interval of efficiencies is halved


def product(m: int, n: int, k: int, dtype: str, result: int = 2) -> Kernel:
    """A product of a forward pass. result: bytes of each of its numbers."""
    width = 1 if dtype == "fp8" else 2
    return Kernel(
        "gemm", "product", "forward", 2.0 * m * n * k, float(width * (m * k + k * n) + result * m * n), dtype, (1, m, n, k)
    )


def attained(prices: Prices, dtype: str) -> float:
    """FLOP/s of the ten one after the other."""
    kernels = [product(m, n, k, dtype) for m in ROWS for n, k in COLUMNS]
    return sum(kernel.flops for kernel in kernels) / sum(prices.seconds(kernel) for kernel in kernels)


def errors(prices: Prices, kept_out: bool) -> list[float]:
    """Measured over predicted seconds, minus 1, of products of `SINGLE`: those kept out of the fit, or the others."""
    chosen = {shape: seconds * 1e-6 for shape, seconds in SINGLE.items() if (shape[0] == KEPT_OUT) == kept_out}
    return [seconds / prices.seconds(product(*shape, "bf16", 4)) - 1 for shape, seconds in chosen.items()]


def with_efficiency(name: str, dtype: str, efficiency: float) -> tuple[GemmCurve, Prices]:
    """The curve of profile `name` with another efficiency, and its GPU's prices by it."""
    profile = load_profile(name)
    curve = profile.gemm.get(dtype, profile.gemm["bf16"]).model_copy(update={"efficiency": efficiency})
    return curve, Prices(profile.model_copy(update={"gemm": profile.gemm | {dtype: curve}}), load_gpu(name))


def lowest(name: str, dtype: str, enough: Callable[[Prices], bool]) -> GemmCurve:
    """The curve with the lowest efficiency that is `enough`."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(with_efficiency(name, dtype, middle)[1]) else (middle, high)
    return with_efficiency(name, dtype, high)[0]


def fit(name: str, dtype: str) -> GemmCurve:
    """The curve of profile `name` by what was published of its accelerator."""
    if name in TYPICAL:
        return lowest(name, dtype, lambda prices: attained(prices, dtype) >= TYPICAL[name][dtype])
    bf16 = lowest(name, "bf16", lambda prices: median(errors(prices, False)) >= 0)
    return with_efficiency(name, dtype, bf16.efficiency)[0]


def refit(name: str) -> None:
    """Rewrite `gemm` of the shipped profile `name`."""
    data = file_of(name)
    for dtype in TYPES:
        data["gemm"][dtype] = described(fit(name, dtype))
    data["provenance"]["gemm"] |= PROVENANCE[name]
    print(name, {dtype: tidy(data["gemm"][dtype]["efficiency"]) for dtype in TYPES})
    rewrite(name, data)
    if name not in TYPICAL:
        prices = with_efficiency(name, "bf16", data["gemm"]["bf16"]["efficiency"])[1]
        print({kept: tidy(float(np.median(np.abs(errors(prices, kept))))) for kept in (False, True)})


TEN: dict[str, Any] = {
    "measured": False,
    "machine": "one MI325X of 1000 W",
    "versions": "ROCm 7.2.1, mblas-bench",
    "date": "September 2026",
    "source": "github.com/ROCm/rocm-blogs: Completing the GPU Performance Picture (typical attained FLOPs)",
    "grid": "m 32 and 32768; n, k = 2112, 7168; 3072, 1536; 7168, 2048; 4608, 7168; 7168, 256; bf16 and fp8, 30 s each",
    "rule": "The generic curve, its efficiency in bf16 and in fp8 such that these ten products take as long together as measured "
    "(616 and 1143 TFLOP/s; operands normally distributed). The best single one reaches 831 and 1408. How shapes differ was "
    "not published: expect 25 % of error.",
}
SCALED = (
    " Of an MI300X, as much less as its best products are slower: 708 and 1273 TFLOP/s (rocm.blogs.amd.com, Measuring "
    "Max-Achievable FLOPs, Part 2; 750 W, operands that take less power)."
)
PROVENANCE: dict[str, dict[str, Any]] = {
    "mi325x": TEN,
    "mi300x": TEN | {"rule": TEN["rule"] + SCALED},
    "mi355x": {
        "measured": False,
        "machine": "one MI350X or MI355X (gfx950, 256 compute units)",
        "versions": "the quickest kernel of AITER's, hipBLASLt's and others'",
        "date": "not dated by the source",
        "source": "github.com/ROCm/aiter aiter/configs/bf16_tuned_gemm.csv at 032c54e458e3",
        "grid": "m 4096 to 16384; n, k = 2048, 6144; 3072, 6144; 50016, 6144; 6144, 2048; 6144, 3072; bf16, results in fp32",
        "rule": "The generic curve, its efficiency such that the middle one of ten products takes as long as measured (7 % off "
        "in the median); five of m = 8192 were kept out (4 %). Products of fewer rows take up to 2.4 times as long. fp8 is "
        "taken to reach the same part of its peak; the power limit's part is unknown.",
    },
}


if __name__ == "__main__":
    for profile_name in sys.argv[1:] or PROVENANCE:
        refit(profile_name)
