"""Fits the shipped profiles to published kernel measurements.

`refit(Path("tables"), "h100")` reads the raw tables of that folder, fits the prices of products and attention, and writes them
with their errors into the profile's file; collectives are fitted by `calibration/collective_refit.py`, and facts that a person
wrote there (launch, overheads) stay.
A quarter of the shapes is kept out of the fit by a hash of their sizes and gives the held-out error. No training step is read.

Measurements: github.com/ai-dynamo/aiconfigurator (Apache-2.0) systems/data at 095f58a51c4c, in seconds. Run as a script with the
tables' folder and profile names: `python -m calibration.kernel_fit TABLES h100 a100`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from calibration.profiles import FOLDER, load_profile
from sim.prices import AttentionCurve, GemmCurve, Hardware, Tile, attention_seconds, energy_seconds, unlimited_seconds
from topologies.cluster import load_gpu
from topologies.hardware import Gpu

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

# profile -> table of products
TABLES = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
NAMES = {"bf16": "bfloat16", "fp8": "fp8"}
SIZES = ((256, 128, 0), (128, 256, 0), (256, 64, 1), (64, 256, 1), (128, 128, 2), (128, 64, 3), (64, 128, 3), (64, 64, 4))
POWER = ("h200", "b200")  # profiles with a table of products at the power limit beside it
SUSTAINED = {"a100": 257e12}  # FLOP/s of m = n = k = 8192 over and over, operands normally distributed: see `nearest`
ONE_STATE = ("l40s",)  # profiles whose products cannot be told apart by state: all are taken as they are
SAME_BOARD = ("h100",)  # profiles of GPUs with the H200's multiprocessors, clocks and power limit
SHARED = ("a100",)  # profiles whose multiprocessors work on several small tiles at a time, as many as the largest holds elements
SAMPLE = 4000  # points per fit


def heldout(*columns: Iterable[Any]) -> NDArray[np.bool_]:
    """Marks a quarter of the rows by a hash of their shape, the same rows every time."""
    return np.array([zlib.crc32(",".join(str(int(x)) for x in row).encode()) % 4 == 0 for row in zip(*columns, strict=True)])


def minimise(objective: Callable[[Array], float], bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Where `objective` is lowest within `bounds`: differential evolution, then Nelder-Mead; the same answer every time.

    Quantities whose bounds span more than a factor of ten are searched by their logarithm.
    """
    from scipy.optimize import differential_evolution, minimize

    low, high = (np.array([pair[i] for pair in bounds.values()]) for i in (0, 1))
    logarithmic = (low > 0) & (high > 10 * low)
    scale = [np.log(v) if wide else v for pair, wide in zip(bounds.values(), logarithmic, strict=True) for v in pair]
    pairs = np.array(scale).reshape(-1, 2)

    def real(x: Array) -> Array:
        x = np.clip(x, pairs[:, 0], pairs[:, 1])
        return np.where(logarithmic, np.exp(np.where(logarithmic, x, 0)), x)

    search = differential_evolution(lambda x: objective(real(x)), pairs, maxiter=100, popsize=8, seed=0, polish=False, tol=1e-6)
    best = search.x
    for _ in range(3):
        best = minimize(lambda x: objective(real(x)), best, method="Nelder-Mead", options={"maxfev": 1500, "adaptive": True}).x
    return dict(zip(bounds, real(best).tolist(), strict=True))


GEMM_BOUNDS = {
    "efficiency": (0.5, 1.0), "depth": (1.0, 1000.0), "wave": (0.0, 1.0), "memory": (0.5, 0.95), "fixed": (1e-6, 1e-5),
    "split": (1e-7, 2e-5), "blend": (1.5, 9.0),
    "size1": (0.3, 1.0), "size2": (0.3, 1.0), "size3": (0.3, 1.0), "size4": (0.3, 1.0),
}  # fmt: skip
LIMIT_BOUNDS = {"sustained": (0.4, 1.0), "byte_energy": (1.0, 300.0)}
QUANTISE_BOUNDS = {"per_row": (1e-9, 1e-7), "per_byte": (0.02, 1.0)}
ATTENTION_BOUNDS = {
    "efficiency": (0.3, 1.0), "head_half": (1.0, 200.0), "keys_half": (10.0, 1000.0), "wave": (0.0, 1.0), "fixed": (1e-6, 4e-5)
}  # fmt: skip


def gemm_curve(found: Mapping[str, float], shared: bool = False) -> GemmCurve:
    """The curve that the fit's free numbers stand for; units are not parsed here, for speed. shared: see SHARED."""
    sizes = [1.0, *(found[f"size{i}"] for i in range(1, 5))]
    largest = max(m * n for m, n, _ in SIZES) if shared else 0
    tiles = tuple(Tile.model_construct(m=m, n=n, efficiency=sizes[i], resident=max(1, largest // (m * n))) for m, n, i in SIZES)
    own: dict[str, Any] = {name: value for name, value in found.items() if name in GemmCurve.model_fields}
    return GemmCurve.model_construct(tiles=tiles, **own)


def attention_curve(found: Mapping[str, float], backward: float) -> AttentionCurve:
    """The curve that the fit's free numbers stand for, blocks of 128 queries."""
    own: dict[str, Any] = dict(found)
    return AttentionCurve.model_construct(block=128, backward=backward, **own)


def summary(errors: Mapping[str, Array]) -> dict[str, float]:
    """Median of each set of relative errors, and the 90th percentile of "large"."""
    return {name: float(np.median(np.abs(e))) for name, e in errors.items()} | {
        "p90": float(np.quantile(np.abs(errors["large"]), 0.9))
    }


def spread(errors: Array) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile of measured over predicted seconds, minus 1."""
    low, middle, high = np.quantile(errors, (0.1, 0.5, 0.9))
    return float(low), float(middle), float(high)


def loss(found: Array, seconds: Array, weight: Array) -> float:
    """Mean absolute logarithm of predicted over measured seconds: robust, and the same for twice and half."""
    return float(np.average(np.abs(np.log(found / seconds)), weights=weight))


def nearest(free: Array, limited: Array, seconds: Array) -> Array:
    """Of the times at the highest clock and at the power limit the one that was measured.

    Rows of short bursts were run in either state, and some with operands of zeros or of whatever the memory held: a product takes
    energy by what its operands hold (thonking.ai, "Strangely, matrix multiplications on GPUs run faster when given predictable
    data": 295 TFLOP/s for zeros and 257 for normal numbers on an A100, m = n = k = 8192).
    """
    return np.where(np.abs(np.log(free / seconds)) < np.abs(np.log(limited / seconds)), free, limited)


def quantisation(found: Mapping[str, float], m: Array, k: Array, bandwidth: float) -> Array:
    """The fp8 rows include the pass that quantises the activations: per row and per byte; it is no part of the price."""
    return np.asarray(m * found["per_row"] + 3 * m * k / (bandwidth * found["per_byte"]))


def fit_gemm(
    table: pd.DataFrame, gpu: Hardware, dtype: str, limit: dict[str, float], shared: bool = False
) -> tuple[GemmCurve, dict[str, Array]]:
    """Curve and signed relative errors (fit, and of shapes held out) for columns m, n, k, seconds, sustained.

    Rows that are `sustained` were run over and over until the power limit held; the others are compared with the state that they
    are nearer to. limit: numbers of the power limit that are known already, and not free.
    """
    m, n, k, seconds = (table[c].to_numpy(float) for c in ("m", "n", "k", "seconds"))
    sustained = table.sustained.to_numpy(bool)
    size = 1 if dtype == "fp8" else 2
    traffic = size * (m * k + k * n) + 2 * m * n
    bounds = GEMM_BOUNDS | (QUANTISE_BOUNDS if dtype == "fp8" else {}) | ({} if limit else LIMIT_BOUNDS)

    def predict(x: Iterable[float], at: Any) -> Array:
        found = dict(zip(bounds, x, strict=True)) | limit
        curve, shape = gemm_curve(found, shared), (np.ones(len(m))[at], m[at], n[at], k[at])
        peak, bandwidth = gpu.peak[dtype], gpu.memory_bandwidth
        more = curve.fixed + (quantisation(found, m[at], k[at], bandwidth) if dtype == "fp8" else 0)
        free = more + unlimited_seconds(curve, peak, bandwidth, gpu.sms, shape, traffic[at], np.minimum)
        limited = np.maximum(free, more + energy_seconds(curve, peak, shape, traffic[at]))
        return np.where(sustained[at], limited, nearest(free, limited, seconds[at]))

    kept_out = heldout(m, n, k)
    free = np.flatnonzero(~kept_out)
    sample = np.random.default_rng(0).choice(free, min(SAMPLE, len(free)), replace=False)
    weight = np.where((m >= 512) & (n >= 256) & (k >= 256), 1.0, 0.25)[sample]
    found = minimise(lambda x: loss(predict(x, sample), seconds[sample], weight), bounds)
    error = seconds / predict(found.values(), slice(None)) - 1
    large = kept_out & (m >= 512)
    bulk = large & (n >= 512) & (k >= 512)
    errors = {"fit": error[free], "all": error[kept_out], "large": error[large], "bulk": error[bulk]}
    if sustained.any():
        errors["sustained"] = error[large & sustained]
    return gemm_curve(found | limit, shared), errors | {"small": error[kept_out & (m < 512)]}


def fit_attention(table: pd.DataFrame, gpu: Hardware, backward: float) -> tuple[AttentionCurve, dict[str, Array]]:
    """Curve and relative errors for causal forward passes.

    Columns batch_size, isl (sequence), num_heads, num_key_value_heads, head_dim, seconds.
    """
    columns = ("batch_size", "num_heads", "num_key_value_heads", "isl", "head_dim", "seconds")
    batch, heads, groups, length, dim, seconds = (table[c].to_numpy(float) for c in columns)

    def predict(x: Iterable[float], at: Any) -> Array:
        curve = attention_curve(dict(zip(ATTENTION_BOUNDS, x, strict=True)), backward)
        shape = (batch[at], heads[at], groups[at], length[at], length[at], dim[at], np.ones(len(batch[at])))
        return np.asarray(attention_seconds(curve, gpu.peak["bf16"], gpu.sms, shape, np.minimum))

    kept_out = heldout(batch, heads, groups, length, dim)
    free = np.flatnonzero(~kept_out)
    weight = np.where((length >= 1024) & (batch * heads >= 8), 1.0, 0.25)[free]
    found = minimise(lambda x: loss(predict(x, free), seconds[free], weight), ATTENTION_BOUNDS)
    error = seconds / predict(found.values(), slice(None)) - 1
    large = kept_out & (length >= 1024) & (batch * heads >= 8)
    errors = {"fit": error[free], "all": error[kept_out], "large": error[large], "small": error[kept_out & ~large]}
    return attention_curve(found, backward), errors


def fit_backward(table: pd.DataFrame, gpu: Hardware, curve: AttentionCurve) -> float:
    """`AttentionCurve.backward` from published rates of both passes together, after `curve`'s forward pass.

    Columns seqlen, batch, heads, head_dim, tflops of causal attention. What is left of both passes' time is the backward pass's;
    it has 2.5 times the FLOPs, and a start and end of its own. The median over sequences of 1,024 and more.
    """
    length, batch, heads, dim, both = (table[c].to_numpy(float) for c in ("seqlen", "batch", "heads", "head_dim", "tflops"))
    shape = (batch, heads, heads, length, length, dim, np.ones(len(length)))
    forward = attention_seconds(curve, gpu.peak["bf16"], gpu.sms, shape, np.minimum)
    backward = 3.5 * 2 * batch * heads * length**2 * dim / (both * 1e12) - forward
    ratio = 2.5 * (forward - curve.fixed) / (backward - curve.fixed)
    return float(np.median(ratio[length >= 1024]))


def tidy(value: float, unit: str = "") -> float | str:
    """Four digits for a file; seconds as "2.9 us"."""
    return f"{value * 1e6:.4g} us" if unit == "us" else float(f"{value:.4g}")


def described(curve: GemmCurve | AttentionCurve) -> dict[str, Any]:
    """A curve as a profile's file spells it."""
    data = curve.model_dump()
    if not data.get("aligned"):
        data.pop("aligned", None)
    for name, value in data.items():
        if name == "tiles":
            data[name] = [tile | {"efficiency": tidy(tile["efficiency"])} for tile in value]
        elif isinstance(value, float):
            data[name] = tidy(value, "us" if name in ("fixed", "split") else "")
    return data


def note(data: dict[str, Any], part: str, errors: Mapping[str, Array], ranges: Mapping[str, Array]) -> None:
    """Write a fit's errors, their spread and the measured range into the provenance of `part`."""
    extent = {name: [float(np.min(v)), float(np.max(v))] for name, v in ranges.items()}
    rounded = {name: tidy(value) for name, value in summary(errors).items()}
    figures = {"fit_error": rounded["fit"], "heldout_error": rounded["large"], "errors": rounded, "measured_range": extent}
    data["provenance"][part] |= figures
    note_spread(data, part, errors)


def note_spread(data: dict[str, Any], part: str, errors: Mapping[str, Array], prefix: str = "") -> None:
    """Write percentiles of the errors of the shapes held out."""
    told = {
        prefix + name: [tidy(value) for value in spread(error)] for name, error in errors.items() if name in ("large", "small")
    }
    data["provenance"][part].setdefault("spread", {}).update(told)


def products(tables: Path, name: str, dtype: str) -> pd.DataFrame:
    """Columns m, n, k, seconds, sustained of every measured product of a dtype."""
    import pandas as pd

    parts = []
    for file, sustained in (("gemm", False), ("gemm_power", True)):
        if sustained and name not in POWER:
            continue
        rows = pd.read_csv(tables / "kernels" / f"{file}_{TABLES[name]}.csv.gz")
        rows = rows[rows.gemm_dtype == NAMES[dtype]].groupby(["m", "n", "k"])[["seconds"]].median().reset_index()
        parts.append(rows.assign(sustained=sustained or name in ONE_STATE))
    return pd.concat(parts, ignore_index=True)


def known_limit(data: Mapping[str, Any], name: str, dtype: str, gpu: Gpu) -> dict[str, float]:
    """What is known of the power limit before the fit, where there is no table of products at the limit.

    Of the same board as the H200's: everything. Of another: that full memory bandwidth takes the same part of the limit
    (assumed), and one published rate. Of fp8: what bf16 has, with FLOPs of half the energy (assumed), so that a byte costs
    as much as twice as many.
    """
    if dtype == "fp8":
        return {"sustained": data["gemm"]["bf16"]["sustained"], "byte_energy": 2 * data["gemm"]["bf16"]["byte_energy"]}
    other, source = load_gpu("h200-sxm"), _file("h200")["gemm"]["bf16"]
    if name in SAME_BOARD:
        return {key: source[key] for key in LIMIT_BOUNDS}
    if name not in SUSTAINED:
        return {}
    ratio = (gpu.peak["bf16"] / gpu.memory_bandwidth) / (other.peak["bf16"] / other.memory_bandwidth)
    energy, size = source["byte_energy"] * ratio, 8192.0
    return {"byte_energy": energy, "sustained": SUSTAINED[name] / gpu.peak["bf16"] * (1 + energy * 6 * size**2 / (2 * size**3))}


def refit(tables: Path, name: str) -> None:
    """Fit the prices of products and attention of the shipped profile `name` to the raw tables in `tables`; rewrite its file."""
    data, profile = _file(name), load_profile(name)
    gpu = load_gpu(profile.gpu)
    for dtype in NAMES:
        if dtype not in profile.gemm:
            continue
        rows = products(tables, name, dtype)
        curve, errors = fit_gemm(rows, gpu, dtype, known_limit(data, name, dtype, gpu), name in SHARED)
        data["gemm"][dtype] = described(curve.model_copy(update={"aligned": profile.gemm[dtype].aligned}))
        if dtype == "bf16":
            note(data, "gemm", errors, {axis: rows[axis].to_numpy() for axis in ("m", "n", "k")} | {"batch": np.ones(1)})
        else:
            data["provenance"]["gemm"]["errors"] |= {f"{dtype} {key}": tidy(value) for key, value in summary(errors).items()}
            note_spread(data, "gemm", errors, f"{dtype} ")
        print(name, dtype, summary(errors), flush=True)
    _refit_attention(tables, name, data, gpu)
    path = FOLDER / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False, width=130, allow_unicode=True), encoding="utf-8")


def _file(name: str) -> dict[str, Any]:
    """The shipped profile as it stands in its file now."""
    data: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return data


def _refit_attention(tables: Path, name: str, data: dict[str, Any], gpu: Hardware) -> None:
    import pandas as pd

    rows = pd.read_csv(tables / "kernels" / "attention_forward.csv.gz")
    rows = rows[rows.device.str.contains(f"NVIDIA {name.upper()}") & ~rows.kernel_source.str.contains("decode")]
    rows = rows[rows.isl >= 256]  # below, launch and padding hide everything
    curve, errors = fit_attention(rows, gpu, data["attention"]["backward"])
    if name == "a100":  # the one GPU with published rates of both passes by the kernels that were fitted to
        other = pd.read_csv(tables / "kernels" / "attention_other.csv")
        other = other[(other.gpu == "A100-SXM4-80GB") & (other.impl == "FA2") & (other["pass"] == "fwd+bwd")]
        curve = curve.model_copy(update={"backward": fit_backward(other[other.causal.astype(str) == "True"], gpu, curve)})
    data["attention"] = described(curve)
    length = rows.isl.to_numpy()
    ranges = {"batch": rows.batch_size.to_numpy(), "heads": rows.num_heads.to_numpy(), "head_dim": rows.head_dim.to_numpy()}
    note(data, "attention", errors, ranges | {"queries": length, "keys": length})
    print(name, "attention", summary(errors), flush=True)


if __name__ == "__main__":
    for profile_name in sys.argv[2:] or TABLES:
        refit(Path(sys.argv[1]), profile_name)
