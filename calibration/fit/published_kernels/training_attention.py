"""Fits fused attention of Blackwell to what NVIDIA publishes of cuDNN's, which Transformer Engine runs, in both passes, in bf16.

`python -m calibration.fit.published_kernels.training_attention` rewrites `attention` and `attention_of` of the profile `PROFILE`.
The times are those of github.com/NVIDIA/cudnn-frontend (MIT) benchmark/sdpa_benchmark_training/results: normally distributed
operands, the L2 cache emptied before each of ten runs. `LLAMA` is llama3.1 at 60e572b7c8fe (cuDNN 9.22). Kept out are the same of
one sequence by cuDNN 9.18 (gb200_918_only_cudnn, gb300_918_only_cudnn) and heads of another width (dsv3 at 60e572b7c8fe). Of a
B200 there are only times of PyTorch's build of an older cuDNN (`B200`:
../artifacts/sdpa_bf16_benchmark_results_NVIDIA_B200.csv at bb37575d103b), which its price is compared with.

A score costs products and an exponential. `head_half` is what exponentials cost, in features of a head; products are taken to
reach the specified peak, with which a GB200's exponentials cost 1.7 times a GB300's, of twice the units
(developer.nvidia.com/blog/making-softmax-more-efficient-with-nvidia-blackwell-ultra). Ten runs of up to 32 ms are over before the
board draws its limit; what that leaves of the rate is told by kernels of 131,072 tokens (0.3 to 1.2 s each) beside those of
32,768 in one table (`LIMIT`: ../artifacts/sdpa_…_NVIDIA_GB200.csv at d48a60eb146e, …_GB300.csv at bb37575d103b).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from calibration.fit.published_kernels.common import ATTENTION_BOUNDS, Array, attention_curve, loss, minimise, spread
from calibration.fit.published_kernels.refit import described, file_of, rewrite, tidy
from sim.pricing.kernel_curves import AttentionCurve, Hardware, Ordered, attention_backward_seconds, attention_seconds
from topologies.cluster_files import load_gpu

LENGTHS = (2048, 4096, 8192, 16384)
Passes = tuple[tuple[float, ...], tuple[float, ...]]  # ms forward and backward by LENGTHS
Times = Mapping[str, tuple[Passes, Passes]]  # by GPU: causal, not causal
LLAMA: Times = {
    "gb200": (
        ((0.125, 0.391, 1.397, 5.150), (0.389, 1.198, 4.127, 16.554)),
        ((0.192, 0.687, 2.483, 10.369), (0.611, 2.037, 7.831, 32.014)),
    ),
    "gb300": (
        ((0.100, 0.323, 1.185, 4.593), (0.356, 1.101, 3.832, 14.593)),
        ((0.152, 0.579, 2.181, 8.734), (0.567, 1.924, 7.181, 28.638)),
    ),
}
EARLIER: Times = {
    "gb200": (
        ((0.067, 0.212, 0.704, 2.672), (0.209, 0.622, 2.150, 8.018)),
        ((0.112, 0.350, 1.313, 5.037), (0.321, 1.090, 3.980, 15.384)),
    ),
    "gb300": (
        ((0.054, 0.164, 0.571, 2.202), (0.191, 0.574, 1.976, 7.361)),
        ((0.088, 0.289, 1.118, 4.396), (0.299, 1.016, 3.670, 14.124)),
    ),
}
LATENT: Times = {  # keys of 192 features, values of 128: 160 in the mean
    "gb200": (
        ((0.321, 0.977, 3.470, 13.103), (1.056, 3.383, 11.984, 50.424)),
        ((0.461, 1.650, 6.249, 24.270), (1.706, 6.085, 25.403, 105.115)),
    ),
    "gb300": (
        ((0.268, 0.864, 3.013, 11.178), (0.977, 3.127, 11.074, 43.911)),
        ((0.388, 1.419, 5.439, 21.640), (1.600, 5.641, 21.973, 91.189)),
    ),
}
ORDERED = {  # ms backward in a fixed order, causal and not, of `LLAMA`
    "gb200": (0.431, 1.352, 4.754, 19.007, 0.686, 2.339, 9.306, 38.480),
    "gb300": (0.388, 1.220, 4.298, 16.462, 0.634, 2.195, 7.932, 32.449),
}
LIMIT = {  # ms of 32,768 and 131,072 tokens forward, the same backward; 16 times the products
    "gb200": ((20.937, 383.713), (65.277, 1184.584)),
    "gb300": ((19.592, 327.134), (66.679, 1099.493)),
}
B200 = {  # tokens -> ms forward and backward, causal, one sequence, 128 heads of 128 with 8 of keys and values
    8192: (1.877, 5.833),
    16384: (6.602, 20.460),
    32768: (24.795, 79.338),
    65536: (101.812, 327.889),
    131072: (415.333, 1343.117),
}


class Set(NamedTuple):
    """Times, and sequences, heads, heads of keys and values, features of a head."""

    times: Times
    sizes: tuple[int, int, int, int]


SETS = {
    "fit": Set(LLAMA, (2, 64, 8, 128)),
    "one sequence": Set(EARLIER, (1, 64, 8, 128)),
    "latent": Set(LATENT, (2, 128, 128, 160)),
}
PROFILE = "b200"
PRICED = {"gb200": (), "gb300": ("gb300", "b300-sxm")}  # entries of `attention_of`; none: `attention` itself
BOUNDS = {name: pair for name, pair in ATTENTION_BOUNDS.items() if name != "efficiency"}


def rows(what: str, gpu: str) -> tuple[tuple[Any, ...], Array, Array]:
    """Shapes (as in `attention_seconds`, causal ones first) and seconds forward and backward of one of `SETS`."""
    batch, heads, groups, width = (np.full(2 * len(LENGTHS), float(size)) for size in SETS[what].sizes)
    length, causal = np.array(LENGTHS * 2, float), np.repeat([1.0, 0.0], len(LENGTHS))
    masked, plain = SETS[what].times[gpu]
    forward, backward = (np.array([*masked[way], *plain[way]]) * 1e-3 for way in (0, 1))
    return (batch, heads, groups, length, length, width, causal), forward, backward


def fit(gpu: Hardware, name: str) -> AttentionCurve:
    """The curve of a GPU."""
    shape, forward, backward = rows("fit", name)

    def curve(x: Iterable[float], rate: float = 1.0) -> AttentionCurve:
        return attention_curve({"efficiency": 1.0} | dict(zip(BOUNDS, x, strict=True)), rate)

    def predict(curve: AttentionCurve) -> Array:
        return np.asarray(attention_seconds(curve, gpu.peak["bf16"], gpu.sms, shape, np.minimum))

    values = minimise(lambda x: loss(predict(curve(x)), forward, np.ones(len(forward))), BOUNDS).values()
    plain = curve(values)
    rate = float(np.median(2.5 * (predict(plain) - plain.fixed) / (backward - plain.fixed)))
    ordered = Ordered(rate=round(float(np.median(backward / (1e-3 * np.array(ORDERED[name])))), 3))
    sustained = min(1.0, float(np.mean([16 * short / long for short, long in LIMIT[name]])))
    return curve(values, rate).model_copy(update={"gpu": name, "sustained": sustained, "ordered": ordered})


def errors(curve: AttentionCurve, gpu: Hardware, what: str, name: str) -> Array:
    """Measured over predicted seconds of both passes at the highest clock, minus 1."""
    shape, forward, backward = rows(what, name)
    predicted = attention_seconds(curve, gpu.peak["bf16"], gpu.sms, shape, np.minimum)
    return np.concatenate([forward / predicted, backward / attention_backward_seconds(curve, predicted)]) - 1


def refit() -> None:
    """Rewrite attention of the shipped profile."""
    data = _with_room(file_of(PROFILE))
    note = data["provenance"]["attention"] = PROVENANCE | {"errors": {}, "measured_range": RANGE}
    for name, entries in PRICED.items():
        gpu = load_gpu(name)
        curve = fit(gpu, name)
        off = {what: errors(curve, gpu, what, name) for what in SETS}
        print(name, described(curve), {what: _median(error) for what, error in off.items()}, flush=True)
        note["errors"] |= {f"{name} {what}": _median(error) for what, error in off.items()}
        data["attention_of"] |= {entry: described(curve) for entry in entries}
        if not entries:
            data["attention"] = described(curve)
            kept_out = [error for what, error in off.items() if what != "fit"]
            short = np.tile(np.array(LENGTHS * 2) == min(LENGTHS), 2 * len(kept_out))
            every = np.concatenate(kept_out)
            parts = {"large": every[~short], "small": every[short]}
            note |= {"fit_error": _median(off["fit"]), "heldout_error": _median(every)}
            note["spread"] = {part: [tidy(each) for each in spread(error)] for part, error in parts.items()}
    rewrite(PROFILE, data)


def _median(error: Array) -> float | str:
    """Of its absolute value, for a file."""
    return tidy(float(np.median(np.abs(error))))


def _with_room(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with an empty `attention_of` right behind `attention`."""
    result: dict[str, Any] = {}
    for name, value in data.items():
        result |= {name: value} | ({"attention_of": {}} if name == "attention" else {})
    return result | {"attention_of": {}}


RANGE = {"head_dim": [128.0, 160.0], "queries": [2048.0, 131072.0], "keys": [2048.0, 131072.0]}
PROVENANCE: dict[str, Any] = {
    "measured": True,
    "machine": "NVIDIA GB200 and GB300",
    "versions": "cuDNN 9.22",
    "date": "2026-04-24",
    "source": "github.com/NVIDIA/cudnn-frontend at 60e572b7c8fe, benchmark/sdpa_benchmark_training/results/llama3.1",
    "grid": "causal and not, two sequences of 2048 to 16384 tokens, 64 heads of 128 with 8 of keys and values",
    "rule": "calibration/fit/published_kernels/training_attention.py. Products at the specified peak, exponentials beside them "
    "(`head_half`), of which a GB300 has twice as many units. `attention_of`: a GB300's; a B200 has the GB200's, by its "
    "multiprocessors, peak and power limit, a B300 the GB300's. Kept out: one sequence by cuDNN 9.18, and heads of 192 and 128 "
    "features (160 in the mean: latent). Limit: the rate at 131,072 tokens over that at 32,768, the mean of both.",
}


if __name__ == "__main__":
    refit()
