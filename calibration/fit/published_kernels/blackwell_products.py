"""Fits what aiconfigurator measured of matrix products on each of Blackwell's GPUs: NVFP4, and the power limit of bf16 and fp8;
and on Hopper's the power limit of fp8.

`python -m calibration.fit.published_kernels.blackwell_products SYSTEMS` rewrites `gemm_of`, `sustained_of` and the fp4 curve of
`PROFILE`, and the fp8 limit of the profiles of `HOPPER`. SYSTEMS: the folder systems/data of the Python package
aiconfigurator-core 0.12.0 (github.com/ai-dynamo/aiconfigurator, Apache-2.0), whose tables need pyarrow to be read.

They time products of TensorRT-LLM 1.3.0rc20, vLLM 0.24.0 and SGLang 0.5.14, twelve times each and half of them before, over some
copies of the weights (`COPIES`). What took a tenth of a second and more drew the board's limit, as in
`calibration/fit/published_kernels/refit.py`, but not yet for good: SGLang runs the same kernels of cuBLAS on the same operands
six times as long as TensorRT-LLM where weights are large, and where this took 0.6 to 3 s in place of 0.1 to 0.5 they were 3 to 6
% slower on GB200, B300 and GB300 (0 to 2 % where it took 0.02 to 0.2 s in place of 0.003 to 0.03, before the limit).

* NVFP4: both operands are quantised from normally distributed numbers (collector/*/collect_gemm.py), as in training; the
  quantisation of the activation is timed, too. The kernels are of CUTLASS and FlashInfer. Transformer Engine's are of cuBLAS,
  which knows several for each shape: each has the time of the quickest library here. vLLM's rows of the GB200 are left out: the
  board that they were measured on took up to 1.6 times as long for bf16 as the others'. The limit is that of the products that
  drew it, in the median. A byte is taken to cost as much energy as beside bf16 products, a FLOP a quarter.
* bf16: only the limit, of SGLang's products that ran for half a second and more, cuBLAS's of normally distributed operands; the
  curves are the B200's. Of a B200 it is 1.42 times that of `refit.NORMAL`, another board, whose limit in watts is not named:
  which of both is like others is not known, and the mean is taken.
* fp8: only the limit, and on Blackwell bf16's times the ratio of both in TensorRT-LLM's products of cuBLAS, which ran as long
  (0.1 s and more; of half a second and more it has one to three, of the largest shapes): a FLOP takes 0.56 to 0.58 of the energy.
  Of Hopper fp8 as these products have it, and the mean of an H100 and an H200, whose multiprocessors and watts are the same; in
  bf16 these tables agree with the profiles by 2 to 4 %.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.fit.published_kernels.common import Array, spread, summary
from calibration.fit.published_kernels.products import BESIDE, LARGE, LIMIT_BOUNDS, benchmarked, fit_gemm
from calibration.fit.published_kernels.refit import described, file_of, rewrite, tidy
from sim.pricing.kernel_curves import GemmCurve
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from topologies.cluster_files import load_gpu
from topologies.hardware import Gpu

if TYPE_CHECKING:
    import pandas as pd

PROFILE = "b200"
BOARDS = {"b200-sxm": "b200_sxm", "gb200": "gb200", "b300-sxm": "b300_sxm", "gb300": "gb300"}  # catalogue name -> tables
COPIES = {"trtllm": (1, 5), "vllm": (1, 1), "sglang": (6, 6)}  # fewest and most; TensorRT-LLM's fill the L2 cache
SLOW = ("gb200", "vllm")
NAMES = {"bf16": ("bfloat16", 2.0), "fp8": ("fp8", 1.0), "fp4": ("nvfp4", 0.5)}  # of the tables; bytes of a weight
HOPPER = {"h100-sxm": "h100_sxm", "h200-sxm": "h200_sxm"}
CACHE = dict.fromkeys(BOARDS, 126e6) | dict.fromkeys(HOPPER, 50e6)  # bytes
RUNS = 12
HOLDS, LONG = 0.1, 0.5  # seconds of a run after which the limit holds, and is as low as in training
ROWS = 64  # least m, as in the other tables
WITHIN = {"efficiency": (0.2, 1.0)}  # a GB300 stays far from its peak
PARTS = 4  # FLOPs in fp4 that take as much energy as one in bf16


def products(systems: Path, board: str, library: str, dtype: str) -> pd.DataFrame:
    """Columns m, n, k, seconds, and lasted: the seconds of the run."""
    import pandas as pd

    (path,) = (systems / (BOARDS | HOPPER)[board] / "gemm" / library).glob("*/gemm_perf.parquet")
    (name, width), rows = NAMES[dtype], pd.read_parquet(path)
    rows = rows[(rows.gemm_dtype == name) & (rows.m >= ROWS)].groupby(["m", "n", "k"])[["latency"]].median().reset_index()
    seconds = rows.latency / 1e3
    copies = np.clip(np.ceil(CACHE[board] / (rows.n * rows.k * width)), *COPIES[library])
    return rows.assign(seconds=seconds, lasted=RUNS * copies * seconds)


def quickest(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each shape."""
    return rows.sort_values("seconds", kind="stable").groupby(["m", "n", "k"]).head(1).sort_index().reset_index(drop=True)


def at_the_limit(
    curve: GemmCurve, beside: Mapping[str, float], gpu: Gpu, dtype: str, rows: pd.DataFrame, throttling: float
) -> tuple[float, Array]:
    """`GemmCurve.sustained` with which large products take as long as `rows` in the median, and relative errors with it."""
    rows = rows[np.minimum(np.minimum(rows.m, rows.n), rows.k) >= LARGE]
    m, n, k, seconds = (rows[name].to_numpy(float) for name in ("m", "n", "k", "seconds"))

    def errors(limit: float) -> Array:
        at = curve.model_copy(update={"sustained": limit})
        return np.asarray(seconds / benchmarked(at, beside, gpu, dtype, (m, n, k), throttling)[1] - 1)

    low, high = LIMIT_BOUNDS["sustained"]
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if np.median(errors(middle)) > 0 else (middle, high)
    return (low + high) / 2, errors((low + high) / 2)


def fitted(
    systems: Path, board: str, byte_energy: float, throttling: float
) -> tuple[GemmCurve, dict[str, float], dict[str, Array]]:
    """Curve of NVFP4, numbers beside it and errors of a board."""
    import pandas as pd

    libraries = [library for library in COPIES if (board, library) != SLOW]
    rows, gpu = pd.concat([products(systems, board, library, "fp4") for library in libraries], ignore_index=True), load_gpu(board)
    curve, beside, errors = fit_gemm(quickest(rows), gpu, "fp4", {"byte_energy": byte_energy}, 0.0, throttling, WITHIN)
    limit, errors["sustained"] = at_the_limit(curve, beside, gpu, "fp4", quickest(rows[rows.lasted >= HOLDS]), throttling)
    return curve.model_copy(update={"sustained": limit}), beside, errors


def limits(systems: Path, board: str, library: str, lasted: float, name: str = PROFILE) -> dict[str, tuple[float, Array]]:
    """By dtype, the limit of a board's bf16 and fp8 products by a library, of runs of so many seconds and more, and their
    relative errors with it.
    """
    profile, result = load_profile(name), {}
    gpu, known = load_gpu(board), profile.provenance["gemm"].beside
    for dtype, prefix in (("bf16", ""), ("fp8", "fp8 ")):
        beside = {name: known[prefix + name] for name in BESIDE if prefix + name in known}
        rows = products(systems, board, library, dtype)
        curve = Prices(profile, gpu).curve(dtype)
        result[dtype] = at_the_limit(curve, beside, gpu, dtype, rows[rows.lasted >= lasted], profile.throttling)
    return result


def in_training(systems: Path, board: str) -> tuple[dict[str, float], dict[str, float]]:
    """By dtype, a Blackwell board's limit of bf16 and fp8 in long runs, and the median error of the products it comes from."""
    equally_long = limits(systems, board, "trtllm", HOLDS)
    limit, errors = limits(systems, board, "sglang", LONG)["bf16"]
    ratio = equally_long["fp8"][0] / equally_long["bf16"][0]
    off = {"bf16": errors, "fp8": equally_long["fp8"][1]}
    return {"bf16": limit, "fp8": ratio * limit}, {dtype: float(np.median(np.abs(error))) for dtype, error in off.items()}


def main(systems: Path) -> None:
    """Fit all boards and rewrite the profile."""
    data: dict[str, Any] = file_of(PROFILE)
    known = data["provenance"]["gemm"]
    byte_energy = PARTS * data["gemm"]["bf16"]["byte_energy"]
    data["gemm_of"] = {}
    for board in BOARDS:
        curve, beside, errors = fitted(systems, board, byte_energy, data["throttling"])
        own = board == data["gpu"]
        prefix = "fp4 " if own else f"{board} fp4 "
        known["beside"] |= {prefix + name: tidy(beside[name]) for name in BESIDE if name in beside}
        known["errors"] |= {prefix + name: tidy(value) for name, value in summary(errors).items()}
        known["spread"] |= {prefix + name: [tidy(value) for value in spread(errors[name])] for name in ("large", "small")}
        if own:
            data["gemm"]["fp4"] = described(curve)
        else:
            data["gemm_of"][board] = {"fp4": described(curve)}
        print(board, {name: tidy(value) for name, value in summary(errors).items()}, flush=True)
    set_limits(systems, data)
    rewrite(PROFILE, ordered(data))
    hopper(systems)


def set_limits(systems: Path, data: dict[str, Any]) -> None:
    """The limit of bf16 and fp8 on each board; of the profile's own the mean of it and of `refit.NORMAL`'s board."""
    known, data["sustained_of"] = data["provenance"]["gemm"], {}
    for board in BOARDS:
        found, errors = in_training(systems, board)
        if board == data["gpu"]:
            mean = float(np.mean([found["bf16"], known["beside"]["normal sustained"]]))
            for dtype in found:
                data["gemm"][dtype]["sustained"] = tidy(mean * found[dtype] / found["bf16"])
        else:
            data["sustained_of"][board] = {dtype: tidy(limit) for dtype, limit in found.items()}
        known["errors"] |= {f"{board} {dtype} limit": tidy(error) for dtype, error in errors.items()}
        print(board, found, errors, flush=True)


def hopper(systems: Path) -> None:
    """Rewrite the fp8 limit of Hopper's profiles: the mean of both boards'."""
    names = {board: board.removesuffix("-sxm") for board in HOPPER}
    found = {board: limits(systems, board, "trtllm", HOLDS, name)["fp8"] for board, name in names.items()}
    limit = tidy(float(np.mean([own for own, _ in found.values()])))
    for board, (own, off) in found.items():
        data: dict[str, Any] = file_of(names[board])
        curve, known = data["gemm"]["fp8"], data["provenance"]["gemm"]
        known["beside"].setdefault("fp8 sustained", curve["sustained"])  # that the curve was fitted with
        curve["sustained"] = limit
        known["errors"]["fp8 limit"] = tidy(float(np.median(np.abs(off))))
        print(board, limit, own, flush=True)
        rewrite(names[board], data)


def ordered(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with what is of other boards right behind the board's own curves."""
    names = [name for name in data if name not in ("gemm_of", "sustained_of")]
    names[names.index("gemm") + 1 : names.index("gemm") + 1] = ["gemm_of", "sustained_of"]
    return {name: data[name] for name in names}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
