"""Fits the older fused attention kernels of a profile, `Profile.older`, to published rates of both passes together.

`python -m calibration.attention_fit TABLES` reads `kernels/attention_other.csv` of that folder and rewrites that part of the
profiles of `MEASURED`. The rates are labels of plots in FlashAttention-2's repository (github.com/Dao-AILab/flash-attention),
which compare it with FlashAttention-1: causal, 16,384 tokens in each batch, head dimensions 64 and 128. The Triton kernel that
FlashAttention-1 came with (flash_attn/flash_attn_triton.py, llm-foundry's attn_impl: triton) is not in them: what they call
Triton is another, of the Triton project (benchmarks/benchmark_flash_attention.py). It is taken as FlashAttention-1, of which its
authors say that it is slightly slower, forward and backward together. On A100 the GPU's own fused kernel is FlashAttention-2:
there `Profile.attention` is its price, which forward passes by themselves were fitted to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from calibration.kernel_fit import Array, minimise
from calibration.kernel_refit import described, tidy
from calibration.profiles import FOLDER, load_profile
from sim.curves import AttentionCurve, Hardware, attention_backward_seconds, attention_seconds
from topologies.cluster import load_gpu

if TYPE_CHECKING:
    import pandas as pd

MEASURED = {"a100": "A100-SXM4-80GB", "h100": "H100-SXM", "h200": "H100-SXM"}  # profile -> gpu of the table
IMPLEMENTATIONS = {"flash2": "FA2", "flash1": "FA1", "triton": "FA1"}  # plan.attention -> name in the table
# PyTorch's build of FlashAttention-2 (scaled_dot_product_attention): rate of its backward pass over that of its forward pass,
# which is the authors' (329 TFLOP/s of 24 heads of 128, 4,608 tokens, without a mask, on an H100, by the curve 372:
# github.com/meta-pytorch/tritonbench pull 97). Backward on an H100 183 TFLOP/s in Llama-3 8B (github.com/pytorch/pytorch issue
# 135431; that products behind the mask are not counted is assumed), where the forward curve says 370 of 8,192 tokens; on an A100
# medians over many shapes of 136.4 TFLOP/s forward and 78.6 of both (github.com/pytorch/pytorch pull 192799).
PYTORCH = {"a100": 0.49, "h100": 0.495, "h200": 0.495}
OWN = {"a100": "flash2"}  # profile -> the older kernel that is its GPU's own
BACKWARD = 0.8  # rate of the backward pass over that of the forward pass: assumed, only both together were published
BOUNDS = {"efficiency": (0.05, 1.0), "head_half": (0.0, 100.0), "keys_half": (0.0, 2000.0)}


def fit_older(table: pd.DataFrame, gpu: Hardware) -> tuple[AttentionCurve, Array]:
    """Curve and relative errors. Columns seqlen, batch, heads, head_dim, tflops of both causal passes together."""

    def curve(x: Iterable[float]) -> AttentionCurve:
        own: dict[str, Any] = dict(zip(BOUNDS, x, strict=True))
        return AttentionCurve.model_construct(block=128, wave=0.0, fixed=0.0, backward=BACKWARD, **own)

    found = minimise(lambda x: float(np.mean(np.log1p(off(curve(x), table, gpu)) ** 2)), BOUNDS)
    return curve(found.values()), off(curve(found.values()), table, gpu)


def off(curve: AttentionCurve, table: pd.DataFrame, gpu: Hardware) -> Array:
    """Measured over predicted seconds of both passes, minus 1."""
    length, batch, heads, dim, rate = (table[c].to_numpy(float) for c in ("seqlen", "batch", "heads", "head_dim", "tflops"))
    shape = (batch, heads, heads, length, length, dim, np.ones(len(length)))
    forward = attention_seconds(curve, gpu.peak["bf16"], gpu.sms, shape, np.minimum)
    measured = 3.5 * 2 * batch * heads * length**2 * dim / (rate * 1e12)
    return np.asarray(measured / (forward + attention_backward_seconds(curve, forward)) - 1)


def refit(tables: Path, name: str) -> None:
    """Rewrite `older` of the shipped profile `name`."""
    import pandas as pd

    path, profile = FOLDER / f"{name}.yaml", load_profile(name)
    rows = pd.read_csv(tables / "kernels" / "attention_other.csv")
    rows = rows[(rows.gpu == MEASURED[name]) & (rows["pass"] == "fwd+bwd") & (rows.causal.astype(str) == "True")]
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    told: dict[str, Any] = {}
    data["older"] = {}
    for attention, impl in IMPLEMENTATIONS.items():
        gpu, table = load_gpu(profile.gpu), rows[rows.impl == impl]
        own = OWN.get(name) == attention
        curve, errors = (profile.attention, off(profile.attention, table, gpu)) if own else fit_older(table, gpu)
        data["older"][attention] = described(curve)
        told |= {attention: tidy(float(np.median(np.abs(errors)))), f"{attention} worst": tidy(float(np.max(np.abs(errors))))}
        print(name, attention, impl, told, flush=True)
    data["older"]["sdpa"] = data["older"]["flash2"] | {"backward": PYTORCH[name]}
    data["provenance"]["older"] = {
        "measured": True, "machine": MEASURED[name], "versions": "not named by the source", "date": "not dated by the source",
        "source": "github.com/Dao-AILab/flash-attention assets: flash2_a100_fwd_bwd_benchmark.png, flash2_h100_…",
        "grid": "causal, sequences of 512 to 16384, head dimensions 64 and 128, 16384 tokens",
        "rule": "Forward and backward passes were published together: the backward pass is assumed to run at 0.8 of the forward "
        "pass's rate. FlashAttention-1's Triton kernel is taken as its CUDA kernel. PyTorch's build of FlashAttention-2, sdpa: "
        f"its backward pass at {PYTORCH[name]} of the forward pass's rate, as calibration/attention_fit.py derives."
        + {"h200": " H200 as H100.", "a100": " FlashAttention-2 is the GPU's own kernel: priced as attention."}.get(name, ""),
        "errors": told,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(data, sort_keys=False, width=130, allow_unicode=True), encoding="utf-8")


if __name__ == "__main__":
    for profile_name in MEASURED:
        refit(Path(sys.argv[1]), profile_name)
