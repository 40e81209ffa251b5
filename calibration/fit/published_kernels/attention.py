"""Fits the older fused attention kernels of a profile, `Profile.older`, to published rates of both passes together.

`python -m calibration.fit.published_kernels.attention TABLES [PROFILES]` reads `kernels/attention_other.csv` of that folder and
rewrites that part of the profiles, by default those of `MEASURED`. The rates are labels of plots in FlashAttention-2's repository
(github.com/Dao-AILab/flash-attention), which compare it with FlashAttention-1: causal, 16,384 tokens in each batch, head
dimensions 64 and 128. The Triton kernel that FlashAttention-1 came with (flash_attn/flash_attn_triton.py, llm-foundry's
attn_impl: triton) is not in them: what they call Triton is another, of the Triton project
(benchmarks/benchmark_flash_attention.py). It is taken as FlashAttention-1, of which its authors say that it is slightly slower,
forward and backward together. On A100 the GPU's own fused kernel is FlashAttention-2: there `Profile.attention` is its price,
which forward passes by themselves were fitted to. Of Blackwell NVIDIA published rates of PyTorch's FlashAttention-2
(github.com/NVIDIA/cudnn-frontend, commit d48a60eb146e, benchmark/sdpa_benchmark_training/artifacts/
sdpa_bf16_benchmark_results_NVIDIA_GB200.csv): causal, 128 heads of 128; its backward rate is 0.80 to 0.82 of the forward rate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.fit.published_kernels.common import Array, minimise
from calibration.fit.published_kernels.refit import described, file_of, rewrite, tidy
from sim.pricing.kernel_curves import AttentionCurve, Hardware, attention_backward_seconds, attention_seconds
from sim.pricing.shipped import load_profile
from topologies.cluster_files import load_gpu

if TYPE_CHECKING:
    import pandas as pd

MEASURED = {
    "a100": "A100-SXM4-80GB",
    "h100": "H100-SXM",
    "h200": "H100-SXM",
    "b200": "NVIDIA GB200",
}  # profile -> gpu of the table
IMPLEMENTATIONS = {"flash2": "FA2", "flash1": "FA1", "triton": "FA1"}  # plan.attention -> name in the table
# PyTorch's build of FlashAttention-2 (scaled_dot_product_attention): seconds over those of the authors', 6.55098 ms and 6.14246
# forward of 16 heads of 128, 16,384 tokens, on one H100 (github.com/pytorch/benchmark pull 2443), taken for both passes. Its
# backward pass is as fast beside the forward pass: 1,400 us and 457 of 16 heads, 4,096 tokens, without a mask, on an H100
# (github.com/pytorch/pytorch pull 128888). With one it may be much slower: 963 us there, and 183 TFLOP/s in issue 135431.
PYTORCH = {"h100": 1.06, "h200": 1.06}
OWN = {"a100": "flash2"}  # profile -> the older kernel that is its GPU's own
GB200 = {1024: 0.551, 2048: 1.693, 4096: 5.836, 8192: 21.557, 16384: 82.842, 32768: 324.653}  # tokens -> ms of both passes
BACKWARD = 0.8  # rate of the backward pass over that of the forward pass: assumed, only both together were published
BOUNDS = {"efficiency": (0.05, 1.0), "head_half": (0.0, 100.0), "keys_half": (0.0, 2000.0)}


def fit_older(table: pd.DataFrame, gpu: Hardware) -> tuple[AttentionCurve, Array]:
    """Curve and relative errors. Columns seqlen, batch, heads, head_dim, tflops of both causal passes together.

    Where one head dimension alone was measured all have its rate.
    """
    bounds = BOUNDS if table.head_dim.nunique() > 1 else {name: pair for name, pair in BOUNDS.items() if name != "head_half"}

    def curve(x: Iterable[float]) -> AttentionCurve:
        own: dict[str, Any] = {"head_half": 0.0} | dict(zip(bounds, x, strict=True))
        return AttentionCurve.model_construct(block=128, wave=0.0, fixed=0.0, backward=BACKWARD, **own)

    values = minimise(lambda x: float(np.mean(np.log1p(off(curve(x), table, gpu)) ** 2)), bounds)
    return curve(values.values()), off(curve(values.values()), table, gpu)


def off(curve: AttentionCurve, table: pd.DataFrame, gpu: Hardware) -> Array:
    """Measured over predicted seconds of both passes, minus 1."""
    length, batch, heads, dim, rate = (table[c].to_numpy(float) for c in ("seqlen", "batch", "heads", "head_dim", "tflops"))
    shape = (batch, heads, heads, length, length, dim, np.ones(len(length)))
    forward = attention_seconds(curve, gpu.peak["bf16"], gpu.sms, shape, np.minimum)
    measured = 3.5 * 2 * batch * heads * length**2 * dim / (rate * 1e12)
    return np.asarray(measured / (forward + attention_backward_seconds(curve, forward)) - 1)


def measured(tables: Path, name: str) -> pd.DataFrame:
    """Columns impl, seqlen, batch, heads, head_dim, tflops of both causal passes together, on the GPU of `MEASURED`."""
    import pandas as pd

    if name == "b200":
        rows = pd.DataFrame({"seqlen": list(GB200), "impl": "FA2", "batch": 1, "heads": 128, "head_dim": 128})
        return rows.assign(tflops=3.5 * 2 * 128 * 128 * rows.seqlen**2 / np.array(list(GB200.values())) / 1e9)
    rows = pd.read_csv(tables / "kernels" / "attention_other.csv")
    return rows[(rows.gpu == MEASURED[name]) & (rows["pass"] == "fwd+bwd") & (rows.causal.astype(str) == "True")]


def refit(tables: Path, name: str) -> None:
    """Rewrite `older` of the shipped profile `name`."""
    data, profile = file_of(name), load_profile(name)
    rows, gpu = measured(tables, name), load_gpu("gb200" if name == "b200" else profile.gpu)
    provenance: dict[str, Any] = {}
    data["older"] = {}
    for attention, impl in IMPLEMENTATIONS.items():
        table, own = rows[rows.impl == impl], OWN.get(name) == attention
        if table.empty:
            continue
        curve, errors = (profile.attention, off(profile.attention, table, gpu)) if own else fit_older(table, gpu)
        data["older"][attention] = described(curve)
        provenance |= {
            attention: tidy(float(np.median(np.abs(errors)))),
            f"{attention} worst": tidy(float(np.max(np.abs(errors)))),
        }
        print(name, attention, impl, provenance, flush=True)
    if name in PYTORCH:
        authors = data["older"]["flash2"]
        data["older"]["sdpa"] = authors | {"efficiency": tidy(authors["efficiency"] / PYTORCH[name])}
    data["provenance"]["older"] = PROVENANCE | {
        "machine": MEASURED[name],
        "rule": PROVENANCE["rule"] + NOTES.get(name, ""),
        "errors": provenance,
        **BLACKWELL.get(name, {}),
    }
    rewrite(name, data)


PROVENANCE: dict[str, Any] = {
    "measured": True,
    "machine": "",
    "versions": "not named by the source",
    "date": "not dated by the source",
    "source": "github.com/Dao-AILab/flash-attention assets: flash2_a100_fwd_bwd_benchmark.png, flash2_h100_…",
    "grid": "causal, sequences of 512 to 16384, head dimensions 64 and 128, 16384 tokens",
    "rule": "Forward and backward passes were published together: the backward pass is assumed to run at 0.8 of the forward "
    "pass's rate. FlashAttention-1's Triton kernel is taken as its CUDA kernel.",
}
BUILD = (
    f" PyTorch's build of FlashAttention-2, sdpa, takes {PYTORCH['h100']} times as long (github.com/pytorch/benchmark pull 2443)."
)
NOTES = {
    "h100": BUILD,
    "h200": BUILD + " H200 as H100.",
    "a100": " FlashAttention-2 is the GPU's own kernel: priced as attention.",
}
BLACKWELL: dict[str, dict[str, Any]] = {
    "b200": {
        "source": "github.com/NVIDIA/cudnn-frontend at d48a60eb146e, benchmark/sdpa_benchmark_training: pyt_flash_attention",
        "grid": "causal, sequences of 1024 to 32768, 128 heads of 128",
        "rule": "Both passes together; their rates differ by 0.80 to 0.82, taken as 0.8. All head dimensions have the rate of "
        "128.",
    }
}


if __name__ == "__main__":
    for profile_name in sys.argv[2:] or MEASURED:
        refit(Path(sys.argv[1]), profile_name)
