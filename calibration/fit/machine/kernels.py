"""Fits the prices of computations to samples: products, attention, memory-bound operations, updates.

Half of the shapes is kept out by a hash of their sizes; the numbers come from the fit to the other half, so the errors are
theirs. A CPU core's products have no tiles to fill a GPU with: fewer numbers are free. Where the host waits for every operator
its launch is a price of its own, which the others are added to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.fit.machine.tables import Point, ascending, every_other
from calibration.fit.published_kernels.common import ATTENTION_BOUNDS, loss, minimise
from calibration.fit.published_kernels.products import GEMM_BOUNDS, gemm_curve, nearest
from calibration.samples import Merged
from sim.pricing.kernel_curves import (
    POWER,
    AttentionCurve,
    GemmCurve,
    Hardware,
    MemoryCurve,
    Product,
    Rates,
    Tile,
    attention_backward_seconds,
    attention_seconds,
    gemm_clocks,
)
from sim.pricing.transfers.measured_tables import OperatorTable, Timed

Array = NDArray[np.float64]
LEAST = 4  # shapes of a fit
# what is not fitted to bursts of single products
PHYSICS = ("sustained", "byte_energy", "aligned", "batched", "early", "split_accumulator")
WIDTH = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}  # bytes of an element
CORE_GEMM = {"efficiency": (0.05, 1.0), "depth": (1e-3, 300.0), "memory": (0.05, 1.0), "fixed": (1e-8, 1e-4), "blend": (1.0, 9.0)}
CORE_ATTENTION = {"efficiency": (0.02, 1.0), "head_half": (1e-2, 200.0), "keys_half": (1e-2, 1000.0), "fixed": (1e-8, 1e-4)}
CORE_KEYS = 512  # a core leaves out whole blocks of so many keys (PyTorch: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)
STREAMS = ("copy", "scale", "accumulate", "binary")  # each element by itself
REDUCTIONS = ("norm backward", "softmax", "softmax backward", "log-softmax", "log-softmax backward")  # whole rows or columns
OPERATORS = (  # that have a table of their own: what strategies.frameworks.passes names
    "binary",
    "norm",
    "norm backward",
    "gelu",
    "gelu backward",
    "silu",
    "silu backward",
    "softmax",
    "softmax backward",
    "dropout",
    "log-softmax",
    "log-softmax backward",
)


def columns(rows: Sequence[Merged], *names: str) -> list[Array]:
    """Numbers of the cases as arrays."""
    return [np.array([float(row.case[name]) for row in rows]) for name in names]


def kept(rows: Sequence[Merged]) -> NDArray[np.bool_]:
    """Marks half of the rows by a hash of their sizes: the same every time."""
    return np.array([zlib.crc32(repr(sorted(row.case.items())).encode()) % 2 == 0 for row in rows])


def seconds_of(rows: Sequence[Merged]) -> Array:
    """Measured seconds."""
    return np.array([row.value for row in rows])


Price = Callable[[Mapping[str, float]], Array]


def search(price: Price, bounds: Mapping[str, tuple[float, float]], seconds: Array, out: NDArray[np.bool_]) -> dict[str, float]:
    """The free numbers with the least robust loss on the rows that are not kept out."""
    weight = np.ones(int((~out).sum()))
    names = list(bounds)
    return minimise(lambda x: loss(price(dict(zip(names, x, strict=True)))[~out], seconds[~out], weight), bounds)


def points(name: str, sizes: Array, seconds: Array, prices: Array, out: NDArray[np.bool_]) -> list[Point]:
    """Rows as points of a plot."""
    table = zip(sizes.tolist(), seconds.tolist(), prices.tolist(), out.tolist(), strict=True)
    return [Point(name, size, measured, predicted, held) for size, measured, predicted, held in table]


def fit_gemm(
    rows: Sequence[Merged],
    gpu: Hardware,
    dtype: str,
    launch: float,
    base: GemmCurve | None = None,
    throttling: float = POWER,
    name: str = "",
) -> tuple[GemmCurve, list[Point]]:
    """The curve of products of one dtype, and its points by FLOPs.

    base: another calibration of this kind of GPU, whose power limit, alignment and stores the curve keeps: short bursts tell
    nothing of them. A burst is compared with the nearer of the times at the highest clock and at the limit.
    """
    kept_numbers = {name: getattr(base, name) for name in PHYSICS} if base is not None and gpu.sms else {}
    batch, m, n, k = columns(rows, "batch", "m", "n", "k")
    seconds, out = seconds_of(rows), kept(rows)
    width, stored = WIDTH[dtype], max(2, WIDTH[dtype])  # results are of 16 bits or more
    traffic = width * batch * (m * k + k * n), stored * batch * m * n
    rates, several = Rates(gpu.peak[dtype], gpu.memory_bandwidth, max(1, gpu.sms)), batch > 1
    gradients = np.array([row.case.get("layout") in ("input", "weight") for row in rows])

    def price(curve: GemmCurve) -> Array:
        reached: Any = np.where(several, curve.batched, 1.0) * np.where(gradients, curve.split_accumulator, 1.0)
        free, limited = gemm_clocks(curve, rates, Product((batch, m, n, k), traffic, reached), throttling)
        return np.asarray(launch + nearest(free, limited, seconds - launch) if gpu.sms else launch + limited)

    def curve_of(values: Mapping[str, float]) -> GemmCurve:
        if gpu.sms:
            return gemm_curve({**values, **kept_numbers})
        single = Tile.model_construct(m=1, n=1, efficiency=1.0)
        numbers: dict[str, Any] = dict(values)
        return GemmCurve.model_construct(tiles=(single,), wave=0.0, split=0.0, **numbers)

    bounds = dict(GEMM_BOUNDS) if gpu.sms else CORE_GEMM
    curve = curve_of(search(lambda values: price(curve_of(values)), bounds, seconds, out))
    return curve, points(f"products {dtype}{name}", 2 * batch * m * n * k, seconds, price(curve), out)


def fit_attention(
    rows: Sequence[Merged], gpu: Hardware, dtype: str, launch: float, base: AttentionCurve | None = None
) -> tuple[AttentionCurve, list[Point]]:
    """The curve of fused causal attention, forward and backward, and its points by FLOPs.

    base: another calibration of this kind of GPU, whose backward pass in a fixed order the curve keeps: it is not measured.
    """
    kept_numbers = {"ordered": base.ordered} if base is not None and gpu.sms else {}
    fused = [row for row in rows if row.case["way"] in ("forward", "backward")]
    batch, heads, length, dim = columns(fused, "batch", "heads", "sequence", "head_dim")
    backward = np.array([row.case["way"] == "backward" for row in fused])
    seconds, out = seconds_of(fused), kept(fused)
    shape = (batch, heads, heads, length, length, dim, np.ones(len(fused)))
    bounds = dict(ATTENTION_BOUNDS if gpu.sms else CORE_ATTENTION) | {"backward": (0.1, 3.0)}

    def curve_of(values: Mapping[str, float]) -> AttentionCurve:
        rest: dict[str, Any] = kept_numbers if gpu.sms else {"block": 1, "wave": 0.0, "keys_block": CORE_KEYS}
        return AttentionCurve.model_construct(**({"block": 128} | rest | dict(values)))

    def price(values: Mapping[str, float]) -> Array:
        forward = attention_seconds(curve_of(values), gpu.peak[dtype], max(1, gpu.sms), shape, np.minimum)
        return np.asarray(launch + np.where(backward, attention_backward_seconds(curve_of(values), forward), forward))

    best = search(price, bounds, seconds, out)
    flops = 2 * batch * heads * length**2 * dim * np.where(backward, 2.5, 1.0)
    return curve_of(best), points("attention", flops, seconds, price(best), out)


def fit_memory(rows: Sequence[Merged], gpu: Hardware, launch: float) -> tuple[MemoryCurve, list[Point]]:
    """One fixed time, a rate of operations that stream and one of those that reduce, for the kinds that a transformer has; and
    the points by bytes.
    """
    chosen = [row for row in rows if row.case["kind"] in STREAMS + REDUCTIONS]
    (size,), seconds, out = columns(chosen, "bytes"), seconds_of(chosen), kept(chosen)
    reduces = np.array([row.case["kind"] in REDUCTIONS for row in chosen])

    def price(values: Mapping[str, float]) -> Array:
        share = np.where(reduces, values["reduction"], values["efficiency"])
        return np.asarray(launch + values["fixed"] + size / (gpu.memory_bandwidth * share))

    best: dict[str, Any] = search(
        price, {"efficiency": (0.005, 1.0), "reduction": (0.005, 1.0), "fixed": (1e-8, 1e-4)}, seconds, out
    )
    predicted = price(best)
    parts = [("streams", ~reduces), ("reductions", reduces)]
    compared = [point for name, at in parts for point in points(name, size[at], seconds[at], predicted[at], out[at])]
    return MemoryCurve.model_construct(**best), compared


def class_tables(rows: Sequence[Merged], launch: float) -> tuple[dict[str, OperatorTable], list[Point]]:
    """Seconds by bytes of operators that have no table of their own: of those that stream ("memory") and of those that reduce
    ("reduction"), all kinds of a transformer together; and the points, of which every other size is priced by those beside it.

    A core's caches are up to three times as fast as its memory, which one rate for all sizes cannot tell.
    """
    measured: dict[str, OperatorTable] = {}
    compared: list[Point] = []
    for name, kinds, series in (("memory", STREAMS, "streams"), ("reduction", REDUCTIONS, "reductions")):
        pairs = sorted((float(row.case["bytes"]), row.value) for row in rows if row.case["kind"] in kinds)
        sizes = sorted({size for size, _ in pairs})
        if len(sizes) < LEAST:
            continue
        whole = measured[name] = _together(pairs, launch)
        left = every_other(sizes)
        rest = _together([pair for pair in pairs if pair[0] not in left], launch)
        for size, seconds in pairs:
            price = launch + (rest if size in left else whole).seconds(size)
            compared.append(Point(series, size, seconds, price, size in left))
    return measured, compared


def _together(pairs: Sequence[tuple[float, float]], launch: float) -> OperatorTable:
    """A table of several operators: the geometric mean of those of a size."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in pairs:
        by_size.setdefault(size, []).append(seconds)
    return _table([(size, float(np.exp(np.mean(np.log(every))))) for size, every in by_size.items()], launch)


def operator_tables(rows: Sequence[Merged], launch: float) -> tuple[dict[str, OperatorTable], list[Point]]:
    """Seconds by bytes of each operator, without what the host adds, never falling; and the points, of which every other size of
    an operator, but never its ends, is priced by the sizes beside it.
    """
    measured: dict[str, OperatorTable] = {}
    compared: list[Point] = []
    for kind in OPERATORS:
        pairs = sorted((float(row.case["bytes"]), row.value) for row in rows if row.case["kind"] == kind)
        if not pairs:
            continue
        sizes = [size for size, _ in pairs]
        whole = measured[kind] = _table(pairs, launch)
        left = every_other(sizes)
        rest = _table([pair for pair in pairs if pair[0] not in left], launch)
        for size, seconds in pairs:
            price = launch + (rest if size in left else whole).seconds(size)
            compared.append(Point("operators", size, seconds, price, size in left))
    return measured, compared


def _table(pairs: Sequence[tuple[float, float]], launch: float) -> OperatorTable:
    seconds = ascending([max(value - launch, 0.05 * value) for _, value in pairs])
    prices = (Timed.model_construct(bytes=round(size), seconds=price) for (size, _), price in zip(pairs, seconds, strict=True))
    return OperatorTable.model_construct(prices=tuple(prices))


def error(compared: Sequence[Point], heldout: bool) -> float | None:
    """Median absolute error of the points that were kept out, or of those that were not."""
    errors: list[Any] = [abs(point.error) for point in compared if point.heldout == heldout]
    return float(np.median(errors)) if errors else None
