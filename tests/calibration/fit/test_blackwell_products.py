"""Products of Blackwell's GPUs: in 4 bits, and at the power limit of each board."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from calibration.fit.published_kernels import blackwell_products as products
from calibration.fit.published_kernels.products import benchmarked
from sim.pricing.prices import Prices, _power_shares
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from strategies.layers.fp8 import _cast
from strategies.plan.options import WIDTHS, Fp8
from topologies.cluster_files import load_gpu
from topologies.hardware import Gpu

# A layer's four matrices for 15,872 tokens, and the shapes of both gradients, on a B300: TransformerEngine's
# docs/examples/gemm_profiling/gemm_profiling.rst at 8f2e6357; milliseconds of products alone, by sets of four
TOKENS, HIDDEN, FFN = 15872, 4096, 16384
LAYER = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))  # n, k
FORWARD = tuple((TOKENS, n, k) for n, k in LAYER)
INPUTS = tuple((TOKENS, k, n) for n, k in LAYER)
WEIGHTS = tuple((k, n, TOKENS) for n, k in LAYER)
SETS = (FORWARD, INPUTS, WEIGHTS)
ALONE = {"bf16": (4.250, 4.434, 4.418), "fp8": (2.158, 2.329, 2.325), "fp4": (1.254, 1.305, 1.205)}
# and of te.Linear with its casts
CAST = {"nvfp4": (1.932, 2.189, 2.331), "tensorwise": (2.879, 3.063, 3.205), "mxfp8": (2.847, 3.045, 3.092)}
BEFORE = {"nvfp4": ALONE["fp4"], "tensorwise": ALONE["fp8"], "mxfp8": (2.365, 2.397, 2.400)}


def prices(board: str) -> Prices:
    return Prices(load_profile("b200"), load_gpu(board))


def product(dtype: str, m: int, n: int, k: int) -> Kernel:
    width = WIDTHS.get(dtype, 2)
    return Kernel("gemm", "product", "forward", 2.0 * m * n * k, width * (m * k + k * n) + 2.0 * m * n, dtype, (1, m, n, k))


@pytest.mark.parametrize(("dtype", "least", "most"), [("bf16", 0.03, 0.13), ("fp8", -0.01, 0.19), ("fp4", 0.1, 0.27)])
def test_products_of_a_b300_beside_transformer_engines_own_times(dtype: str, least: float, most: float) -> None:
    """Each ran for 0.01 to 0.15 s, longest in bf16: the shorter, the less of the power limit was in them."""
    b300 = prices("b300-sxm")
    for shapes, taken in zip(SETS, ALONE[dtype], strict=True):
        predicted = sum(b300.seconds(product(dtype, *shape)) for shape in shapes)
        assert least < 1e3 * predicted / taken - 1 < most


@pytest.mark.parametrize(("scaling", "error"), [("nvfp4", -0.12), ("tensorwise", 0.02), ("mxfp8", 0.0)])
def test_casts_of_a_b300_beside_transformer_engines_own_times(scaling: str, error: float) -> None:
    """The input by rows and columns, the weight by rows, as nobody asks for the input's gradient there. mxfp8's are fitted."""
    b300, fp8 = prices("b300-sxm"), Fp8(scaling=scaling)
    copies = 1 if fp8.of_tensors else 2
    predicted = sum(
        b300.seconds(Kernel(each.kind, "cast", "forward", 0.0, each.moved * elements, variant=each.operator))
        for shapes in SETS
        for m, n, k in shapes
        for elements, kept in ((m * k, copies), (n * k, 1))
        for each in _cast(fp8, 2.0, kept)
    )
    taken = sum(CAST[scaling]) - sum(BEFORE[scaling])
    assert 1e3 * predicted / taken - 1 == pytest.approx(error, abs=0.02)


def test_a_cast_of_a_b200_beside_a_measured_one() -> None:
    """8192 × 8192 numbers of bf16 to mxfp8 by rows and columns, 52.34 us: a B200 as pull request 598 of
    github.com/ROCm/TransformerEngine compares itself with.
    """
    (cast,) = _cast(Fp8(scaling="mxfp8"), 2.0, 2)
    kernel = Kernel(cast.kind, "cast", "forward", 0.0, cast.moved * 8192**2, variant=cast.operator)
    assert prices("b200-sxm").seconds(kernel) == pytest.approx(52.34e-6, rel=0.07)


def test_4_bits_gain_less_on_boards_with_half_as_many_more_of_their_units() -> None:
    """GB300 over GB200, and B300 over B200: 1.5 times the peak, less than 1.3 times the rate."""
    shape = (8192, 28672, 8192)
    for newer, older in (("gb300", "gb200"), ("b300-sxm", "b200-sxm")):
        peaks = load_gpu(newer).peak["fp4"] / load_gpu(older).peak["fp4"]
        assert peaks == pytest.approx(1.5, rel=0.03)
        assert 1.05 < prices(older).seconds(product("fp4", *shape)) / prices(newer).seconds(product("fp4", *shape)) < 1.3


@pytest.mark.parametrize("board", ["gb200", "b300-sxm", "gb300"])
def test_a_boards_own_limit_goes_before_what_follows_from_watts(board: str) -> None:
    profile, gpu = load_profile("b200"), load_gpu(board)
    without = profile.model_copy(update={"sustained_of": {}})
    for dtype, limit in profile.sustained_of[board].items():
        assert Prices(profile, gpu).curve(dtype).sustained == pytest.approx(limit)
        share, watts = _power_shares(profile.gpu, gpu)
        followed = Prices(without, gpu).curve(dtype).sustained
        assert followed == pytest.approx(profile.gemm[dtype].sustained * share[dtype] * watts)
        assert limit != pytest.approx(followed, rel=0.02)
    capped = gpu.model_copy(update={"power": gpu.power / 2})
    assert Prices(profile, capped).curve("bf16").sustained == pytest.approx(profile.sustained_of[board]["bf16"] / 2)


def test_limits_are_those_of_long_runs_and_the_profiles_own_boards_the_mean_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that reaches 0.6 in short runs and 0.5 in long ones, fp8 0.9 of it; another one of the profile's kind has 0.4."""
    limits = {("trtllm", products.HOLDS): {"bf16": 0.6, "fp8": 0.54}, ("sglang", products.LONG): {"bf16": 0.5, "fp8": 0.1}}

    def measured(systems: Path, board: str, library: str, lasted: float) -> dict[str, tuple[float, np.ndarray]]:
        return {dtype: (limit, np.full(3, 0.02)) for dtype, limit in limits[library, lasted].items()}

    monkeypatch.setattr(products, "limits", measured)
    known = {"beside": {"normal sustained": 0.4}, "errors": {}}
    data = {"gpu": "b200-sxm", "gemm": {"bf16": {}, "fp8": {}}, "provenance": {"gemm": known}}
    products.set_limits(Path(), data)
    assert data["gemm"] == {"bf16": {"sustained": 0.45}, "fp8": {"sustained": 0.405}}
    assert set(data["sustained_of"]) == {"gb200", "b300-sxm", "gb300"}
    assert all(limit == {"bf16": 0.5, "fp8": 0.45} for limit in data["sustained_of"].values())
    assert known["errors"]["gb200 fp8 limit"] == 0.02


def test_a_limit_that_rows_were_made_with_is_found_again() -> None:
    """And of rows of one shape the quickest is taken."""
    profile, gpu = load_profile("b200"), load_gpu("gb300")
    assert isinstance(gpu, Gpu)
    curve, beside = profile.gemm["fp8"], {"cache": 1e7, "per_row": 5e-9, "per_byte": 0.5}
    sizes = np.array([(m, n, k) for m in (4096, 16384, 32768) for n in (8192, 65536) for k in (8192, 51200)], float)
    limit = curve.model_copy(update={"sustained": 0.37})
    seconds = benchmarked(limit, beside, gpu, "fp8", tuple(sizes.T), profile.throttling)[1]
    rows = pd.DataFrame(sizes, columns=["m", "n", "k"]).assign(seconds=seconds)
    found, off = products.at_the_limit(curve, beside, gpu, "fp8", rows, profile.throttling)
    assert found == pytest.approx(0.37, abs=1e-3)
    assert np.abs(off).max() < 1e-3
    twice = pd.concat([rows.assign(seconds=2 * seconds), rows], ignore_index=True)
    assert products.quickest(twice).seconds.sum() == pytest.approx(seconds.sum())
