"""Fits the prices of matrix products of one dtype to published measurements of them.

The rows come from github.com/ai-dynamo/aiconfigurator (Apache-2.0) systems/data at 095f58a51c4c. As its collector/vllm/
collect_gemm.py runs them, six layers with weights of their own take one activation in turn, over and over, so that what fits
into the L2 cache stays there: fitted beside the prices, as `CACHE_BOUNDS`, and no part of them. In training other kernels run
between.

The fp8 rows are not cuBLAS's but vLLM's CUTLASS kernels, whose tile goes by m alone and whose clusters of multiprocessors count
whole (csrc/quantization/w8a8/cutlass/c3x/scaled_mm_sm90_fp8_dispatch.cuh and scaled_mm_sm100_fp8_dispatch.cuh): `dispatched`. A
price is that of the fastest of these tiles, as a library that chooses has it. Rows whose m is no multiple of 8 are left out:
Transformer Engine refuses such matrices (transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec), and vLLM's kernels take
up to three times as long with one row more (H200, m = 256 and 257).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.fit.published_kernels.common import Array, Bounds, descend, heldout
from sim.pricing.kernel_curves import POWER, GemmCurve, Hardware, Product, Rates, Tile, gemm_clocks, gemm_phases

if TYPE_CHECKING:
    import pandas as pd

Sizes = tuple[tuple[int, int, int], ...]  # m and n of a tile, and the number of its efficiency in the fit (0: the best)
SIZES: Sizes = ((256, 128, 0), (128, 256, 0), (256, 64, 1), (64, 256, 1), (128, 128, 2), (128, 64, 3), (64, 128, 3), (64, 64, 4))
FP8_SIZES: Sizes = ((128, 128, 0), (128, 64, 3), (64, 128, 3), (64, 64, 4))  # of the kernels that were measured
GEMM_BOUNDS = {
    "efficiency": (0.5, 1.0),
    "depth": (0.1, 1000.0),
    "wave": (0.0, 1.0),
    "memory": (0.5, 0.95),
    "fixed": (1e-6, 1e-5),
    "split": (1e-7, 2e-5),
    "blend": (1.5, 9.0),
    "exposed": (0.0, 1.0),
    "cached": (1.0, 6.0),
    "size1": (0.3, 1.0),
    "size2": (0.3, 1.0),
    "size3": (0.3, 1.0),
    "size4": (0.3, 1.0),
}
LIMIT_BOUNDS = {"sustained": (0.2, 1.0), "byte_energy": (1.0, 600.0)}
CACHE_BOUNDS = {"cache": (1e7, 2e8)}  # bytes that stay
# of vLLM's fp8 kernels: up to which m, tile of a multiprocessor, rows and columns of a cluster
Clusters = tuple[tuple[float, tuple[int, int], int, int], ...]
HOPPER: Clusters = ((64, (64, 64), 64, 64), (128, (64, 128), 128, 128), (math.inf, (128, 128), 256, 128))
BLACKWELL: Clusters = ((64, (64, 64), 64, 64), (256, (64, 128), 128, 128), (math.inf, (128, 128), 256, 256))
DISPATCH = {"h100-sxm": HOPPER, "h200-sxm": HOPPER, "b200-sxm": BLACKWELL}  # of the boards whose fp8 rows are vLLM's
FP8_BOUNDS = {name: pair for name, pair in GEMM_BOUNDS.items() if name not in ("size1", "size2", "split")}
QUANTISE_BOUNDS = {"per_row": (1e-9, 1e-7), "per_byte": (0.02, 1.0)}
QUANTISED = ("fp8", "fp4")  # types whose rows include the cast of the activation
WIDTH = {"fp8": 1.0, "fp4": 0.5 + 1 / 16}  # bytes of an operand's number; of fp4 with its part of a scale
BESIDE = (*CACHE_BOUNDS, *QUANTISE_BOUNDS)  # no part of the price
START = {
    "efficiency": 0.85,
    "depth": 100.0,
    "wave": 0.5,
    "memory": 0.8,
    "fixed": 2.5e-6,
    "split": 2e-6,
    "blend": 4.0,
    "exposed": 0.5,
    "size1": 0.8,
    "size2": 0.95,
    "size3": 0.85,
    "size4": 0.7,
    "sustained": 0.7,
    "byte_energy": 50.0,
    "cached": 1.5,
    "per_row": 5e-9,
    "per_byte": 0.3,
}
CACHES = (3e7, 1e8)  # bytes that searches start from
COPIES = 6  # of the weights, in turn
SHARPNESS = 8  # of the step from what stays in the cache to what does not: assumed
SAMPLE = 4000  # points per fit
LARGE = 2048  # of m, n and k, from which on the board's limit decides
SIDE = 8192.0  # m = n = k of a published rate at the power limit


def gemm_curve(values: Mapping[str, float], sizes: Sizes = SIZES) -> GemmCurve:
    """The curve that the fit's free numbers stand for; units are not parsed here, for speed. As many small tiles share a
    multiprocessor as the largest holds elements.
    """
    largest = max(m * n for m, n, _ in sizes)
    efficiency = [1.0, *(values.get(f"size{i}", 1.0) for i in range(1, 5))]
    tiles = tuple(Tile.model_construct(m=m, n=n, efficiency=efficiency[i], resident=largest // (m * n)) for m, n, i in sizes)
    own: dict[str, Any] = {name: value for name, value in values.items() if name in GemmCurve.model_fields}
    return GemmCurve.model_construct(tiles=tiles, **own)


def nearest(free: Array, limited: Array, seconds: Array) -> Array:
    """Of the times at the highest clock and at the power limit the one that was measured.

    Rows of short bursts were run in either state, and some with operands of zeros or of whatever the memory held: a product takes
    energy by what its operands hold (thonking.ai, "Strangely, matrix multiplications on GPUs run faster when given predictable
    data": 295 TFLOP/s for zeros and 257 for normal numbers on an A100, m = n = k = 8192).
    """
    return np.where(np.abs(np.log(free / seconds)) < np.abs(np.log(limited / seconds)), free, limited)


def benchmarked(
    curve: GemmCurve,
    beside: Mapping[str, float],
    gpu: Hardware,
    dtype: str,
    shape: tuple[Array, Array, Array],
    throttling: float = POWER,
    clusters: Clusters = (),
) -> tuple[Array, Array]:
    """Seconds of products (m, n, k) as they were measured, at the highest clock and at the power limit.

    An activation and a result stay in the cache when all of one product fits, weights when all copies do. The rows in fp8 and fp4
    include the pass that quantises the activations, per row and per byte. clusters: of kernels whose tile goes by m alone; none:
    the fastest tile.
    """
    m, n, k = shape
    width, bandwidth = WIDTH.get(dtype, 2), gpu.memory_bandwidth
    activation, weight, result = width * m * k, width * k * n, 2 * m * n

    def stays(footprint: Array) -> Array:
        return np.asarray(1 / (1 + (footprint / beside["cache"]) ** SHARPNESS))

    single_copy, all_copies = stays(activation + weight + result), stays(activation + result + COPIES * weight)
    held = activation * single_copy + weight * all_copies, result * single_copy
    moved = activation + weight - held[0], result - held[1]
    faster = 1 - 1 / curve.cached
    traffic = activation + weight - faster * held[0], result - faster * held[1]
    product = Product((np.ones(len(m)), m, n, k), traffic, moved=moved)
    rates = Rates(gpu.peak[dtype], bandwidth, gpu.sms)
    more = m * beside["per_row"] + (2 + width) * m * k / (bandwidth * beside["per_byte"]) if dtype in QUANTISED else 0.0
    single = dispatched(curve, rates, product, clusters, throttling) if clusters else None
    clocks = single or gemm_clocks(curve, rates, product, throttling)
    return clocks[0] + more, clocks[1] + more


def dispatched(curve: GemmCurve, rates: Rates, product: Product, clusters: Clusters, throttling: float) -> tuple[Array, Array]:
    """`gemm_clocks` of products with the tile that vLLM's kernels have for their m; rows and columns of a cluster count whole, k
    is not cut.
    """
    (batch, m, n, k), moved = product.shape, product.moved or product.traffic
    clocks = np.empty((2, len(m)))
    above = 0.0
    for below, tile, rows, columns in clusters:
        at = (m > above) & (m <= below)
        whole = -(-m[at] // rows) * rows, -(-n[at] // columns) * columns
        own = [part for part in curve.tiles if (part.m, part.n) == tile]
        single = curve.model_copy(update={"tiles": tuple(own), "split": math.inf})
        traffic, taken = ((pair[0][at], pair[1][at]) for pair in (product.traffic, moved))
        clocks[:, at] = gemm_clocks(single, rates, Product((batch[at], *whole, k[at]), traffic, moved=taken), throttling)
        above = below
    return clocks[0], clocks[1]


def sustained(curve: GemmCurve, gpu: Hardware, dtype: str, rate: float, throttling: float = POWER, side: float = SIDE) -> float:
    """`GemmCurve.sustained` such that the product of m = n = k = `side` runs at `rate`, in FLOP/s, at the power limit."""
    product = Product((1, side, side, side), (4 * side**2, 2 * side**2))
    highest, energy, alone = gemm_phases(curve, Rates(gpu.peak[dtype], gpu.memory_bandwidth, gpu.sms), product)
    drawn = max(1.0, (2 * side**3 / rate - alone) / highest) ** (1 / throttling)
    return float(min(1.0, energy / (gpu.peak[dtype] * highest * drawn)))


def normally_limited(curve: GemmCurve, gpu: Hardware, table: pd.DataFrame, throttling: float) -> tuple[float, dict[str, Array]]:
    """`GemmCurve.sustained` with which large products of normally distributed operands, run over and over, take as long as they
    were measured to in the median; and signed relative errors: of these, of those that add to a sum, and of smaller ones.

    table: columns m, n, k, seconds, summed (bytes per element of a sum in fp32 or bf16 that is read and written; 0: none).
    """
    m, n, k, seconds, summed = (table[name].to_numpy(float) for name in ("m", "n", "k", "seconds", "summed"))
    result = np.where(summed > 0, 2 * summed, 2.0) * m * n
    product = Product((np.ones(len(m)), m, n, k), (2 * (m * k + k * n), result), moved=(2 * (m * k + k * n), 2 * m * n))
    rates = Rates(gpu.peak["bf16"], gpu.memory_bandwidth, gpu.sms)
    large = np.minimum(np.minimum(m, n), k) >= LARGE
    alone = large & (summed == 0)

    def errors(limit: float) -> Array:
        at = curve.model_copy(update={"sustained": limit})
        return np.asarray(seconds / gemm_clocks(at, rates, product, throttling)[1] - 1)

    low, high = LIMIT_BOUNDS["sustained"]
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if np.median(errors(middle)[alone]) > 0 else (middle, high)
    limit = (low + high) / 2
    off = errors(limit)
    return limit, {"normal": off[alone], "normal summed": off[large & (summed > 0)], "normal small": off[~large]}


def fit_gemm(
    table: pd.DataFrame,
    gpu: Hardware,
    dtype: str,
    limit: Mapping[str, float],
    rate: float = 0.0,
    throttling: float = POWER,
    within: Bounds | None = None,
) -> tuple[GemmCurve, dict[str, float], dict[str, Array]]:
    """Curve, numbers beside it and signed relative errors (fit, and of shapes held out) for columns m, n, k, seconds, sustained.

    Rows that are `sustained` were run over and over until the power limit held; the others are compared with the state that they
    are nearer to. limit: numbers of the power limit that are known already, and not free; rate: a published one at the limit;
    within: bounds of numbers, instead of the usual ones.
    """
    m, n, k, seconds = (table[c].to_numpy(float) for c in ("m", "n", "k", "seconds"))
    held = table.sustained.to_numpy(bool)
    sizes, bounds = (FP8_SIZES, FP8_BOUNDS) if dtype == "fp8" else (SIZES, GEMM_BOUNDS)
    clusters = DISPATCH[gpu.name] if dtype == "fp8" else ()
    bounds = bounds | CACHE_BOUNDS | (QUANTISE_BOUNDS if dtype in QUANTISED else {}) | dict(within or {})
    bounds |= {name: pair for name, pair in LIMIT_BOUNDS.items() if name not in limit and not (rate and name == "sustained")}

    def numbers(x: Array) -> dict[str, float]:
        values = dict(zip(bounds, x, strict=True)) | dict(limit)
        return values | ({"sustained": sustained(gemm_curve(values, sizes), gpu, dtype, rate, throttling)} if rate else {})

    def predict(values: Mapping[str, float], at: Any) -> Array:
        free, limited = benchmarked(gemm_curve(values, sizes), values, gpu, dtype, (m[at], n[at], k[at]), throttling, clusters)
        return np.where(held[at], limited, nearest(free, limited, seconds[at]))

    kept_out = heldout(m, n, k)
    free = np.flatnonzero(~kept_out)
    sample = np.random.default_rng(0).choice(free, min(SAMPLE, len(free)), replace=False)
    weight = np.sqrt(np.where((m >= 512) & (n >= 256) & (k >= 256), 1.0, 0.25)[sample])
    starts = [START | {"cache": cache} for cache in CACHES]
    best = descend(lambda x: weight * np.log(predict(numbers(x), sample) / seconds[sample]), bounds, starts)
    constants = numbers(np.array([best[name] for name in bounds]))
    error = seconds / predict(constants, slice(None)) - 1
    large = kept_out & (m >= 512)
    errors = {"fit": error[free], "all": error[kept_out], "large": error[large], "bulk": error[large & (n >= 512) & (k >= 512)]}
    if held.any():
        errors["sustained"] = error[large & held]
    beside = {name: constants[name] for name in BESIDE if name in bounds}
    return gemm_curve(constants, sizes), beside, errors | {"small": error[kept_out & (m < 512)]}
