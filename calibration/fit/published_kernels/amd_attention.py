"""Fits fused attention of AMD's accelerators to the rates that AITER publishes of its kernels.

`python -m calibration.fit.published_kernels.amd_attention` rewrites `attention` of the profiles in `MEASURED`. The rates
are those of github.com/ROCm/aiter op_tests/cpp/mha/README.md at 0403bcdfd0b5: bf16, causal, heads of 128, half of the products
counted. The backward pass is the one that adds up query gradients in fp32 (a32), as Transformer Engine's does unless it is told
otherwise (NVTE_CK_IS_V3_ATOMIC_FP32, transformer_engine/common/fused_attn_rocm/fused_attn_ck.cpp). Rows with 32 heads are kept
out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from calibration.fit.published_kernels.common import ATTENTION_BOUNDS, Array, attention_curve, loss, minimise, spread
from calibration.fit.published_kernels.refit import described, file_of, rewrite, tidy
from sim.pricing.kernel_curves import AttentionCurve, Hardware, attention_backward_seconds, attention_seconds
from sim.pricing.shipped import load_profile
from topologies.cluster_files import load_gpu

MEASURED = {"mi300x": "mi300x", "mi325x": "mi300x", "mi355x": "mi355x"}  # profile -> the accelerator that was measured
RATES = {  # batch, heads, sequence: TFLOP/s forward and backward of an MI300X, then of an MI355X; 8 key and value heads
    (1, 32, 1024): (130.62, 166.78, 233.12, 210.315),
    (1, 32, 2048): (255.105, 295.865, 577.28, 479.925),
    (1, 32, 4096): (467.805, 296.025, 949.325, 713.075),
    (1, 32, 8192): (522.68, 388.235, 1247.73, 765.75),
    (1, 32, 10240): (440.12, 244.705, 1200.645, 759.32),
    (4, 32, 1024): (334.005, 226.39, 720.995, 465.04),
    (4, 32, 2048): (419.435, 330.23, 809.835, 431.525),
    (4, 32, 4096): (486.73, 416.54, 1130.115, 723.945),
    (4, 32, 8192): (547.09, 422.835, 1318.92, 775.46),
    (4, 32, 10240): (527.705, 432.545, 1342.995, 767.995),
    (8, 32, 1024): (311.385, 258.26, 623.93, 457.025),
    (8, 32, 2048): (412.99, 326.355, 894.45, 620.48),
    (8, 32, 4096): (513.1, 409.05, 1166.875, 726.06),
    (8, 32, 8192): (537.36, 441.4, 1316.805, 772.67),
    (8, 32, 10240): (556.045, 443.78, 1334.865, 794.245),
    (1, 64, 1024): (228.54, 242.43, 432.565, 370.42),
    (1, 64, 2048): (392.425, 257.855, 936.435, 598.985),
    (1, 64, 4096): (474.385, 378.155, 1046.085, 694.125),
    (1, 64, 8192): (518.29, 433.285, 1300.105, 765.21),
    (1, 64, 10240): (510.895, 447.995, 1338.005, 788.92),
    (1, 64, 16384): (541.55, 412.04, 1392.485, 808.93),
    (4, 64, 1024): (326.51, 266.9, 638.705, 470.95),
    (4, 64, 2048): (425.735, 326.805, 899.845, 621.295),
    (4, 64, 4096): (513.79, 391.235, 1174.92, 722.205),
    (4, 64, 8192): (540.515, 434.645, 1319.225, 774.25),
    (4, 64, 10240): (557.475, 442.51, 1337.965, 792.12),
    (8, 64, 1024): (321.865, 265.08, 626.57, 484.34),
    (8, 64, 2048): (452.03, 347.89, 963.165, 630.43),
    (8, 64, 4096): (509.255, 402.18, 1190.295, 710.905),
    (8, 64, 8192): (550.67, 432.715, 1311.955, 772.605),
    (8, 64, 10240): (547.05, 439.785, 1313.695, 792.91),
}
GROUPS, WIDTH = 8, 128  # key and value heads; features of a head
BOUNDS = {name: pair for name, pair in ATTENTION_BOUNDS.items() if name != "head_half"}  # one width was measured


def measured(name: str) -> tuple[tuple[Any, ...], Array, Array]:
    """Shapes of the kernels (as in `attention_seconds`), and seconds forward and backward on the accelerator of that name."""
    batch, heads, length = np.array(list(RATES), float).T
    first = 2 * (name != "mi300x")
    forward, backward = np.array(list(RATES.values()))[:, first : first + 2].T * 1e12
    products = 2 * batch * heads * length**2 * WIDTH  # half of two, as of causal attention
    ones = np.ones(len(batch))
    shape = (batch, heads, GROUPS * ones, length, length, WIDTH * ones, ones)
    return shape, products / forward, 2.5 * products / backward


def fit(gpu: Hardware, name: str) -> tuple[AttentionCurve, dict[str, Array]]:
    """Curve and relative errors of both passes: of rows that were fitted to, and of the others."""
    shape, forward, backward = measured(name)
    own = shape[1] == max(shape[1])

    def predict(curve: AttentionCurve) -> Array:
        return np.asarray(attention_seconds(curve, gpu.peak["bf16"], gpu.sms, shape, np.minimum))

    def curve(x: Iterable[float], rate: float = 1.0) -> AttentionCurve:
        return attention_curve({"head_half": 0.0} | dict(zip(BOUNDS, x, strict=True)), rate)

    values = minimise(lambda x: loss(predict(curve(x))[own], forward[own], np.ones(int(own.sum()))), BOUNDS).values()
    plain = curve(values)
    rate = float(np.median((2.5 * (predict(plain) - plain.fixed) / (backward - plain.fixed))[own]))
    best = curve(values, rate)
    errors = forward / predict(best) - 1, backward / attention_backward_seconds(best, predict(best)) - 1
    both = {"forward": errors[0][~own], "backward": errors[1][~own]}
    return best, {"fit": np.concatenate([error[own] for error in errors]), **both}


def refit(name: str) -> None:
    """Rewrite `attention` of the shipped profile `name`."""
    curve, errors = fit(load_gpu(load_profile(name).gpu), MEASURED[name])
    out = np.concatenate([errors["forward"], errors["backward"]])
    median = {part: tidy(float(np.median(np.abs(error)))) for part, error in errors.items()}
    print(name, described(curve), median)
    data = file_of(name)
    data["attention"] = described(curve)
    data["provenance"]["attention"] = PROVENANCE | {
        "machine": f"one {MEASURED[name]}",
        "rule": PROVENANCE["rule"] + ("" if MEASURED[name] == name else f" Kernels of the {MEASURED[name]}, whose chip it has."),
        "fit_error": median["fit"],
        "heldout_error": tidy(float(np.median(np.abs(out)))),
        "errors": median,
        "measured_range": RANGES,
        "spread": {"large": [tidy(each) for each in spread(out)]},
    }
    rewrite(name, data)


RANGES = {"batch": [1.0, 8.0], "heads": [32.0, 64.0], "head_dim": [128.0, 128.0], "queries": [1024.0, 16384.0]}
PROVENANCE: dict[str, Any] = {
    "measured": True,
    "machine": "",
    "versions": "AITER's kernels in assembly; ROCm not named by the source",
    "date": "not dated by the source",
    "source": "github.com/ROCm/aiter op_tests/cpp/mha/README.md at 0403bcdfd0b5",
    "grid": "causal, batch 1 to 8, sequences of 1024 to 16384, 32 and 64 heads of 128 with 8 of keys and values, bf16",
    "rule": "Fitted to rows of 64 heads; those of 32 are kept out. Backward: query gradients added up in fp32 (a32), as by "
    "Transformer Engine's default. All head dimensions have the rate of 128.",
}


if __name__ == "__main__":
    for profile_name in sys.argv[1:] or MEASURED:
        refit(profile_name)
