"""Writes what `calibration/fit/published_kernels/common.py` fits to published kernel measurements into the shipped profiles.

`refit(Path("tables"), "h100")` reads the raw tables of that folder, fits the prices of products and attention, and writes them
with their errors into the profile's file; collectives are fitted by `calibration/fit/published_collectives/refit.py`, and facts
that a person wrote there (launch, overheads) stay. No training step is read.

Measurements: github.com/ai-dynamo/aiconfigurator (Apache-2.0) systems/data at 095f58a51c4c, in seconds. Run as a script with the
tables' folder and profile names: `python -m calibration.fit.published_kernels.refit TABLES h100 a100`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from calibration.fit.published_kernels.common import Array, fit_attention, fit_backward, spread, summary
from calibration.fit.published_kernels.products import LIMIT_BOUNDS, fit_gemm, normally_limited
from sim.pricing.kernel_curves import AttentionCurve, GemmCurve, Hardware
from sim.pricing.profile_file import signed, verified
from sim.pricing.shipped import FOLDER, load_profile
from topologies.cluster_files import load_gpu
from topologies.documents.writing import write_whole
from topologies.hardware import Gpu
from topologies.reading import load_yaml

if TYPE_CHECKING:
    import pandas as pd

# profile -> table of products
TABLES = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
NAMES = {"bf16": "bfloat16", "fp8": "fp8"}
POWER = ("h200", "b200")  # profiles with a table of products at the power limit beside it
SUSTAINED = {"a100": 257e12}  # FLOP/s of m = n = k = 8192 over and over, operands normally distributed: see `gemm_fit.nearest`
NORMAL = {"b200": "B200"}  # profile -> GPU whose products had normally distributed operands: see `normal_products`
LONG = 1000.0  # microseconds of a product, a hundred of which take longer than a board's limit needs to hold
TRAINED = ("b200",)  # profiles whose attention is fitted to kernels of training: training_attention.py
SAME_BOARD = ("h100",)  # profiles of GPUs with the H200's multiprocessors, clocks and power limit
# Hopper's tensor cores add up fp8 in fewer than 32 bits. Forward products leave their sums there, as the kernels of the fp8 rows
# do (FP8FastAccum in vLLM's scaled_mm_sm90_fp8_dispatch.cuh); those of gradients move them out again and again, in Transformer
# Engine (use_split_accumulator in common/recipe; _2X_ACC_DGRAD and _2X_ACC_WGRAD in pytorch/module/base.py) and in torchao
# (Float8LinearConfig). A product is 1.1 to 1.2 times as fast if they stay (github.com/pytorch/ao issue 2377): the middle.
SPLIT_ACCUMULATOR = {"h100": 1 / 1.15, "h200": 1 / 1.15}  # profile -> `GemmCurve.split_accumulator` of fp8


def tidy(value: float, unit: str = "") -> float | str:
    """Four digits for a file; seconds as "2.9 us"."""
    return f"{value * 1e6:.4g} us" if unit == "us" else float(f"{value:.4g}")


def described(curve: GemmCurve | AttentionCurve) -> dict[str, Any]:
    """A curve as a profile's file spells it."""
    usual: dict[str, Any] = {"aligned": {}, "early": {}, "batched": 1, "split_accumulator": 1}
    if isinstance(curve, AttentionCurve):
        usual = {"gpu": "", "sustained": 1, "ordered": None}
    data = {name: value for name, value in curve.model_dump().items() if name not in usual or value != usual[name]}
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
    percentiles = {
        prefix + name: [tidy(value) for value in spread(error)] for name, error in errors.items() if name in ("large", "small")
    }
    data["provenance"][part].setdefault("spread", {}).update(percentiles)


def products(tables: Path, name: str, dtype: str) -> pd.DataFrame:
    """Columns m, n, k, seconds, sustained of every measured product of a dtype; in fp8, of m that frameworks allow."""
    import pandas as pd

    parts = []
    for file, sustained in (("gemm", False), ("gemm_power", True)):
        if sustained and name not in POWER:
            continue
        rows = pd.read_csv(tables / "kernels" / f"{file}_{TABLES[name]}.csv.gz")
        rows = rows[(rows.gemm_dtype == NAMES[dtype]) & ((dtype != "fp8") | (rows.m % 8 == 0))]
        rows = rows.groupby(["m", "n", "k"])[["seconds"]].median().reset_index()
        parts.append(rows.assign(sustained=sustained))
    return pd.concat(parts, ignore_index=True)


def normal_products(tables: Path, gpu: str) -> pd.DataFrame:
    """Columns m, n, k, seconds, summed of products in bf16 whose operands were all normally distributed, as in training.

    Those of `products` were not: the layers of vLLM that aiconfigurator times have weights that nobody filled (collector/vllm/
    collect_gemm.py), which take less energy. SimuMax fills both operands by torch.randn and runs Transformer Engine's product
    over and over (simu_tools/efficency_test/test_gemm_efficiency.py): 25 times before and 75 while it is timed. Shorter ones than
    `LONG` are over before the limit holds, or while the clock still looks for it: of 100 to 400 us some run at 1,430 TFLOP/s and
    others at 860.
    """
    import pandas as pd

    rows = pd.read_csv(tables / "kernels" / "gemm_other.csv")
    rows = rows[(rows.gpu == gpu) & (rows.dtype == "bf16") & rows.source.str.contains("SimuMax") & (rows.time_us >= LONG)]
    width = rows.kernel_or_stack.map({"out fp32": 4, "out bf16": 2})
    return rows.assign(seconds=rows.time_us * 1e-6, summed=width.where(rows.layout.str.endswith("acc"), 0))


def known_limit(data: Mapping[str, Any], name: str, dtype: str, gpu: Gpu) -> dict[str, float]:
    """What is known of the power limit before the fit.

    Of the same board as the H200's: everything. Of one with a published rate: that full memory bandwidth takes the same part of
    the limit (assumed). Of others nothing: the rows that are nearer to the limit tell. Of fp8: that a FLOP takes half the energy
    of bf16, so that a byte costs as much as twice as many (Hopper's prices have another limit: blackwell_products.hopper). No
    fp8 row of the tables was run at the limit: left free, its curve serves as a second price that any row may choose, with a
    byte's energy at the bound of the fit.
    """
    if dtype == "fp8":
        other = data["gemm"]["bf16"]
        split = GemmCurve.model_validate(other).split  # vLLM's fp8 kernels do not cut k, cuBLAS does: as there, assumed
        return {"sustained": other["sustained"], "byte_energy": 2 * other["byte_energy"], "split": split}
    source = file_of("h200")["gemm"]["bf16"]
    if name in SAME_BOARD:
        return {key: source[key] for key in LIMIT_BOUNDS}
    if name not in SUSTAINED:
        return {}
    board = load_gpu("h200-sxm")
    ratio = (gpu.peak["bf16"] / gpu.memory_bandwidth) / (board.peak["bf16"] / board.memory_bandwidth)
    return {"byte_energy": source["byte_energy"] * ratio}


def refit(tables: Path, name: str) -> None:
    """Fit the prices of products and attention of the shipped profile `name` to the raw tables in `tables`; rewrite its file."""
    data, profile = file_of(name), load_profile(name)
    gpu = load_gpu(profile.gpu)
    provenance = data["provenance"]["gemm"]
    provenance["beside"] = {}
    for dtype in NAMES:
        if dtype not in profile.gemm:
            continue
        rows, prefix = products(tables, name, dtype), "" if dtype == "bf16" else f"{dtype} "
        limit = known_limit(data, name, dtype, gpu)
        curve, beside, errors = fit_gemm(rows, gpu, dtype, limit, SUSTAINED.get(name, 0.0), profile.throttling)
        old = profile.gemm[dtype]
        kept = {"aligned": old.aligned, "early": old.early}
        if dtype == "fp8":
            kept["split_accumulator"] = SPLIT_ACCUMULATOR.get(name, 1.0)
        data["gemm"][dtype] = described(curve.model_copy(update=kept))
        provenance["beside"] |= {prefix + key: tidy(value) for key, value in beside.items()}
        if dtype == "bf16":
            note(data, "gemm", errors, {axis: rows[axis].to_numpy() for axis in ("m", "n", "k")} | {"batch": np.ones(1)})
        else:
            provenance["errors"] |= {prefix + key: tidy(value) for key, value in summary(errors).items()}
            note_spread(data, "gemm", errors, prefix)
        print(name, dtype, summary(errors), flush=True)
    if name in NORMAL:
        _set_limit(tables, name, data, gpu, profile.throttling)
    if name not in TRAINED:
        _refit_attention(tables, name, data, gpu)
    rewrite(name, data)


def _set_limit(tables: Path, name: str, data: dict[str, Any], gpu: Gpu, throttling: float) -> None:
    """The power limit of products whose operands are normally distributed, instead of that of the fitted rows."""
    curve, provenance = GemmCurve.model_validate(data["gemm"]["bf16"]), data["provenance"]["gemm"]
    limit, errors = normally_limited(curve, gpu, normal_products(tables, NORMAL[name]), throttling)
    for dtype in NAMES:
        data["gemm"][dtype]["sustained"] = tidy(limit)
    provenance["beside"]["sustained"] = curve.sustained  # of the rows that the curve is fitted to
    provenance["beside"]["normal sustained"] = tidy(limit)  # of these (blackwell_products takes the mean of two boards)
    provenance["errors"] |= {kind: tidy(float(np.median(np.abs(error)))) for kind, error in errors.items()}
    print(name, "limit", limit, {kind: float(np.median(error)) for kind, error in errors.items()}, flush=True)


def file_of(name: str) -> dict[str, Any]:
    """The shipped profile as it stands in its file now, without its digest."""
    path = FOLDER / f"{name}.yaml"
    return verified(load_yaml(path), path)


def rewrite(name: str, data: Mapping[str, Any]) -> None:
    """Write the shipped profile `name` with the digest of what it says now."""
    write_whole(FOLDER / f"{name}.yaml", yaml.safe_dump(signed(data), sort_keys=False, width=130, allow_unicode=True))


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
    data["attention"] = described(curve.model_copy(update={"ordered": load_profile(name).attention.ordered}))
    length = rows.isl.to_numpy()
    ranges = {"batch": rows.batch_size.to_numpy(), "heads": rows.num_heads.to_numpy(), "head_dim": rows.head_dim.to_numpy()}
    note(data, "attention", errors, ranges | {"queries": length, "keys": length})
    print(name, "attention", summary(errors), flush=True)


if __name__ == "__main__":
    for profile_name in sys.argv[2:] or TABLES:
        refit(Path(sys.argv[1]), profile_name)
