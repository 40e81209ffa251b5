"""Fits the prices of kernels to published kernel measurements: what all fits share, and fused attention.

Products are fitted by `calibration/fit/published_kernels/products.py`, older attention by
`calibration/fit/published_kernels/attention.py`; `calibration/fit/published_kernels/refit.py` writes what is found into the
shipped profiles. A quarter of the shapes is kept out of the fits by a hash of their sizes and gives the held-out error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.pricing.kernel_curves import AttentionCurve, Hardware, attention_seconds

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Bounds = Mapping[str, tuple[float, float]]
ATTENTION_BOUNDS = {
    "efficiency": (0.3, 1.0),
    "head_half": (1.0, 200.0),
    "keys_half": (10.0, 1000.0),
    "wave": (0.0, 1.0),
    "fixed": (1e-6, 4e-5),
}


def heldout(*columns: Iterable[Any]) -> NDArray[np.bool_]:
    """Marks a quarter of the rows by a hash of their shape, the same rows every time."""
    return np.array([zlib.crc32(",".join(str(int(x)) for x in row).encode()) % 4 == 0 for row in zip(*columns, strict=True)])


def scaled(bounds: Bounds) -> tuple[Array, Callable[[Array], Array]]:
    """Bounds for a search, and what turns its numbers into quantities: those whose bounds span more than a factor of ten are
    searched by their logarithm.
    """
    low, high = (np.array([pair[i] for pair in bounds.values()]) for i in (0, 1))
    logarithmic = (low > 0) & (high > 10 * low)
    scale = [np.log(v) if wide else v for pair, wide in zip(bounds.values(), logarithmic, strict=True) for v in pair]
    pairs = np.array(scale).reshape(-1, 2)

    def real(x: Array) -> Array:
        x = np.clip(x, pairs[:, 0], pairs[:, 1])
        return np.where(logarithmic, np.exp(np.where(logarithmic, x, 0)), x)

    return pairs, real


def minimise(objective: Callable[[Array], float], bounds: Bounds) -> dict[str, float]:
    """Where `objective` is lowest within `bounds`: differential evolution, then Nelder-Mead; the same answer every time."""
    from scipy.optimize import differential_evolution, minimize

    pairs, real = scaled(bounds)
    search = differential_evolution(lambda x: objective(real(x)), pairs, maxiter=100, popsize=8, seed=0, polish=False, tol=1e-6)
    best = search.x
    for _ in range(3):
        best = minimize(lambda x: objective(real(x)), best, method="Nelder-Mead", options={"maxfev": 1500, "adaptive": True}).x
    return dict(zip(bounds, real(best).tolist(), strict=True))


def descend(logarithms: Callable[[Array], Array], bounds: Bounds, starts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Where the mean absolute value of `logarithms` (of predicted over measured, weighted) is lowest: robust least squares from
    each of `starts`; for many rows and numbers, where `minimise` would take long.
    """
    from scipy.optimize import least_squares

    pairs, real = scaled(bounds)
    low, high = pairs.T
    wide = low != [pair[0] for pair in bounds.values()]
    best: tuple[float, Array] | None = None
    for start in starts:
        x = np.array([start[name] for name in bounds])
        x = np.where(wide, np.log(np.where(wide, x, 1.0)), x)
        for width in (0.1, 0.02):  # errors beyond these count by their absolute value
            x = np.clip(x, low + 1e-6, high - 1e-6)
            x = least_squares(
                lambda x: logarithms(real(x)),
                x,
                bounds=(low, high),
                loss="soft_l1",
                f_scale=width,
                x_scale=(high - low) / 10,
                diff_step=1e-4,
                max_nfev=40,
            ).x
        cost = float(np.mean(np.abs(logarithms(real(x)))))
        if best is None or cost < best[0]:
            best = cost, x
    assert best is not None
    return dict(zip(bounds, real(best[1]).tolist(), strict=True))


def attention_curve(values: Mapping[str, float], backward: float) -> AttentionCurve:
    """The curve that the fit's free numbers stand for, blocks of 128 queries."""
    own: dict[str, Any] = dict(values)
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


def loss(predicted: Array, seconds: Array, weight: Array) -> float:
    """Mean absolute logarithm of predicted over measured seconds: robust, and the same for twice and half."""
    return float(np.average(np.abs(np.log(predicted / seconds)), weights=weight))


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
    values = minimise(lambda x: loss(predict(x, free), seconds[free], weight), ATTENTION_BOUNDS)
    error = seconds / predict(values.values(), slice(None)) - 1
    large = kept_out & (length >= 1024) & (batch * heads >= 8)
    errors = {"fit": error[free], "all": error[kept_out], "large": error[large], "small": error[kept_out & ~large]}
    return attention_curve(values, backward), errors


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
