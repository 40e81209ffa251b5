"""Fits the shipped profiles to published kernel and collective measurements.

`refit(Path("tables"), "h100")` reads the raw tables of that folder, fits GEMM, attention and NVLink prices of the profile's GPU and writes
them back, with their errors, into the profile's file; facts that a person wrote there (launch, overheads, sources) stay as they are.
Every third to fourth shape is kept out of the fit by a hash of its name and gives the held-out error. No training step is read.

Measurements: github.com/ai-dynamo/aiconfigurator (Apache-2.0) systems/data at 095f58a51c4c, in seconds. Run as a script with the
tables' folder and profile names: `python -m calibration.kernel_fit ../shared/data h100 a100`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from calibration.profiles import FOLDER, load_profile
from sim.prices import AttentionCurve, GemmCurve, Hardware, Tile, attention_seconds, gemm_seconds
from topologies.cluster import load_gpu

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

TABLES = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}  # profile -> table of products
NAMES = {"bf16": "bfloat16", "fp8": "fp8"}
SIZES = ((256, 128, 0), (128, 256, 0), (256, 64, 1), (64, 256, 1), (128, 128, 2), (128, 64, 3), (64, 128, 3), (64, 64, 4))
NVLS = 8  # ranks from which all-reduce runs in the switch on Hopper and Blackwell, so it says nothing of a ring
SAMPLE = 5000  # points per fit


def heldout(*columns: Iterable[Any]) -> NDArray[np.bool_]:
    """Marks a quarter of the rows by a hash of their shape, the same rows every time."""
    return np.array([zlib.crc32(",".join(str(int(x)) for x in row).encode()) % 4 == 0 for row in zip(*columns, strict=True)])


def minimise(loss: Callable[[Array], float], start: Array, rounds: int = 6) -> Array:
    """Lowest point that Nelder-Mead finds from `start`, restarted with ever smaller steps to both sides."""
    from scipy.optimize import minimize

    best = start
    for number in range(rounds):
        step = (0.6 if number % 2 else -0.6) / (1 + number // 2)
        simplex = np.vstack([best, best + np.diag(np.full(len(best), step))])
        best = minimize(loss, best, method="Nelder-Mead", options={"maxfev": 1500, "initial_simplex": simplex}).x
    return np.asarray(best)


def sigmoid(x: float) -> float:
    """Any number to a fraction."""
    return float(1 / (1 + np.exp(-np.clip(x, -6, 30))))


def gemm_curve(x: Array) -> GemmCurve:
    """The curve that the fit's free numbers stand for; units are not parsed here, for speed."""
    sizes = [1.0, *(sigmoid(v) for v in x[8:12])]
    tiles = tuple(Tile.model_construct(m=m, n=n, efficiency=sizes[i]) for m, n, i in SIZES)
    depth, memory, fixed, split, cache, blend = (float(np.exp(v)) for v in (x[1], x[3], x[4], x[5], x[6], x[7]))
    return GemmCurve.model_construct(
        efficiency=sigmoid(x[0]), depth=depth, wave=sigmoid(x[2]), memory=min(memory, 0.95), fixed=fixed * 1e-6, tiles=tiles,
        split=split * 1e-6, cache=cache * 1e6, blend=min(1 + blend, 12.0),
    )  # fmt: skip


def gemm_start() -> Array:
    """Where the fit begins: a plausible GPU."""
    return np.array([2.0, np.log(200), 1.0, np.log(0.85), np.log(3), np.log(2), np.log(30), np.log(2), 2, 1.5, 1, 0.5, np.log(8), np.log(0.5)])


def quantisation(x: Array, m: Array, k: Array, bandwidth: float) -> Array:
    """The fp8 rows include the pass that quantises the activations: per row and per element; it is no part of the price."""
    return np.asarray(m * np.exp(x[12]) * 1e-9 + 3 * m * k / (bandwidth * np.exp(x[13])))


def fit_gemm(table: pd.DataFrame, gpu: Hardware, dtype: str) -> tuple[GemmCurve, dict[str, float]]:
    """Curve and relative errors (fit, held out, held out with m ≥ 512) for columns m, n, k, seconds."""
    m, n, k, seconds = (table[c].to_numpy(float) for c in ("m", "n", "k", "seconds"))
    size = 1 if dtype == "fp8" else 2
    traffic = size * (m * k + k * n) + 2 * m * n

    def predict(x: Array, at: Any) -> Array:
        shape = (np.ones(len(m[at])), m[at], n[at], k[at])
        price = gemm_seconds(gemm_curve(x), gpu.peak[dtype], gpu.memory_bandwidth, gpu.sms, shape, traffic[at], np.minimum)
        return np.asarray(price + quantisation(x, m[at], k[at], gpu.memory_bandwidth) if dtype == "fp8" else price)

    kept_out = heldout(m, n, k)
    free = np.flatnonzero(~kept_out)
    sample = np.random.default_rng(0).choice(free, min(SAMPLE, len(free)), replace=False)
    weight = np.where((m >= 512) & (n >= 256) & (k >= 256), 1.0, 0.25)[sample]
    found = minimise(lambda x: float(np.average(np.abs(np.log(predict(x, sample) / seconds[sample])), weights=weight)), gemm_start())
    error = np.abs(predict(found, slice(None)) / seconds - 1)
    large = kept_out & (m >= 512)
    bulk = large & (n >= 512) & (k >= 512)
    errors = {"fit": error[free], "all": error[kept_out], "large": error[large], "bulk": error[bulk]}
    return gemm_curve(found), {name: float(np.median(e)) for name, e in errors.items()} | {"p90": float(np.quantile(error[large], 0.9))}


def attention_curve(x: Array, backward: float) -> AttentionCurve:
    """The curve that the fit's free numbers stand for."""
    head, keys, fixed = (float(np.exp(v)) for v in x[1:4])
    return AttentionCurve.model_construct(
        efficiency=sigmoid(x[0]), head_half=head, keys_half=keys, block=128, wave=sigmoid(x[4]), fixed=fixed * 1e-6, backward=backward
    )


def fit_attention(table: pd.DataFrame, gpu: Hardware, backward: float) -> tuple[AttentionCurve, dict[str, float]]:
    """Curve and relative errors for causal forward passes: columns batch_size, isl, num_heads, num_key_value_heads, head_dim, seconds."""
    columns = ("batch_size", "num_heads", "num_key_value_heads", "isl", "head_dim", "seconds")
    batch, heads, groups, length, dim, seconds = (table[c].to_numpy(float) for c in columns)

    def predict(x: Array, at: Any) -> Array:
        shape = (batch[at], heads[at], groups[at], length[at], length[at], dim[at], np.ones(len(batch[at])))
        return np.asarray(attention_seconds(attention_curve(x, backward), gpu.peak["bf16"], gpu.sms, shape, np.minimum))

    kept_out = heldout(batch, heads, groups, length, dim)
    free = np.flatnonzero(~kept_out)
    weight = np.where((length >= 1024) & (batch * heads >= 8), 1.0, 0.25)[free]
    start = np.array([1.0, np.log(40), np.log(150), np.log(8), 1.0])
    found = minimise(lambda x: float(np.average(np.abs(np.log(predict(x, free) / seconds[free])), weights=weight)), start)
    error = np.abs(predict(found, slice(None)) / seconds - 1)
    large = kept_out & (length >= 1024) & (batch * heads >= 8)
    errors = {"fit": error[free], "all": error[kept_out], "large": error[large]}
    return attention_curve(found, backward), {name: float(np.median(e)) for name, e in errors.items()} | {"p90": float(np.quantile(error[large], 0.9))}


def fit_ring(table: pd.DataFrame, capacity: float, base: float) -> tuple[float, float, dict[str, float]]:
    """Efficiency, seconds per step and errors of rings over links of `capacity`: columns operation, ranks, bytes, seconds."""
    ranks, size, seconds = (table[c].to_numpy(float) for c in ("ranks", "bytes", "seconds"))
    steps = np.where(table.operation == "all_reduce", 2, 1) * (ranks - 1)

    def predict(x: Array) -> Array:
        return np.asarray(base + steps * np.exp(x[1]) * 1e-6 + steps / ranks * size / (capacity * sigmoid(x[0])))

    kept_out = heldout(ranks, size)
    weight = np.where(kept_out, 0.0, np.where(ranks > 2, 1.0, 0.5))
    found = minimise(lambda x: float(np.average(np.abs(np.log(predict(x) / seconds)), weights=weight)), np.array([1.0, 1.0]), 3)
    error = np.abs(predict(found) / seconds - 1)
    large = size >= 2**25
    errors = {"fit": error[~kept_out], "all": error[kept_out], "large": error[kept_out & large]}
    return sigmoid(found[0]), float(np.exp(found[1])) * 1e-6, {name: float(np.median(e)) for name, e in errors.items()}
