"""The shipped profiles: complete, honest about their source, and as accurate on the raw measurements as they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.fit.published_collectives.fit import ranges
from calibration.fit.published_collectives.refit import CLUSTERS
from calibration.fit.published_collectives.rows import Row
from calibration.fit.published_kernels import amd_attention, amd_products, refit, training_attention
from calibration.fit.published_kernels.common import fit_backward, heldout
from calibration.fit.published_kernels.products import DISPATCH, LARGE, benchmarked, nearest
from calibration.fit.published_kernels.refit import NORMAL, TABLES, normal_products, products
from sim.pricing.prices import Prices, Profile
from sim.pricing.shipped import FOLDER, load_profile, profile_for, profile_names
from sim.program import Kernel
from topologies.cluster_files import gpu_names, load_cluster, load_gpu
from topologies.hardware import Gpu
from topologies.reading import UserError

RAW = Path(__file__).parents[4] / "shared" / "data"
PARTS = {"gemm", "attention", "memory", "links", "launch", "overhead"}


def test_shipped_names() -> None:
    assert profile_names() == [
        *("a100", "b200", "cpu-gloo", "gaudi2", "gaudi3", "generic", "h100", "h200", "l40s", "mi300x", "mi325x", "mi355x", "v100")
    ]


def test_a_profile_that_is_fitted_anew_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v100.yaml"
    path.write_text((FOLDER / "v100.yaml").read_text())
    monkeypatch.setattr(refit, "FOLDER", tmp_path)
    for launch in ("6 us", "7 us"):  # the second time a file that is signed
        refit.rewrite("v100", refit.file_of("v100") | {"launch": launch})
    assert load_profile(path) == load_profile("v100").model_copy(update={"launch": 7e-6})
    path.write_text(path.read_text().replace("launch: 7 us", "launch: 8 us"))
    with pytest.raises(UserError, match="not as it was written"):
        load_profile(path)


def test_no_gpu_has_two_profiles() -> None:
    claims = [gpu for name in profile_names() for gpu in {load_profile(name).gpu, *load_profile(name).applies_to}]
    own = [gpu for gpu in claims if gpu != "any"]  # generic, and what is generic but for its products
    assert set(own) <= set(gpu_names())
    assert len(own) == len(set(own))


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("a100-sxm-40gb", "a100"),
        ("h100-pcie", "h100"),
        ("gb200", "b200"),
        ("gb300", "b200"),
        ("b300-sxm", "b200"),
        ("cpu-core", "cpu-gloo"),
        ("tpu-v9", "generic"),
    ],
)
def test_profile_for(gpu: str, name: str) -> None:
    assert profile_for(gpu).name == name


@pytest.mark.parametrize("name", profile_names())
def test_every_part_has_a_source_and_a_rule(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assumed = Profile.model_fields["throttling"].default
    more = {part for part in ("older", "variability", "fp8_attention") if getattr(profile, part)}
    assert set(profile.provenance) == PARTS | more | ({"throttling"} if profile.throttling != assumed else set())
    for provenance in profile.provenance.values():
        assert all((provenance.source, provenance.grid, provenance.rule))
        assert provenance.machine or not provenance.measured


def test_unmeasured_profile_says_so() -> None:
    assert not any(provenance.measured for provenance in load_profile("generic").provenance.values())


def test_profile_from_a_file(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "sim" / "pricing" / "profiles" / "h100.yaml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.replace("name: h100", "name: mine", 1), encoding="utf-8")
    assert load_profile(mine).name == load_profile(str(mine)).name == "mine"
    mine.write_text(text.replace("slowdown: 1.13", "slowdown: 0.5"), encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.yaml: slowdown=0.5"):
        load_profile(mine)


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'h200'"):
        load_profile("h20")


@pytest.mark.parametrize("field", ["links", "provenance"])
def test_missing_field_is_named(field: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(load_profile("h100").model_dump_json(exclude={field}), encoding="utf-8")
    with pytest.raises(UserError, match=r"p\.yaml"):
        load_profile(path)


def test_backward_rate_follows_from_both_passes() -> None:
    """Equal rates of both passes: forward, backward and their mean are one number."""
    pandas = pytest.importorskip("pandas")
    curve = load_profile("a100").attention.model_copy(update={"fixed": 0.0, "keys_half": 0.0, "head_half": 0.0, "wave": 0.0})
    row = {"seqlen": 4096, "batch": 8, "heads": 27, "head_dim": 128, "tflops": curve.efficiency * 312, "causal": True}
    assert fit_backward(pandas.DataFrame([row]), load_gpu("a100-sxm-80gb"), curve) == pytest.approx(1.0, rel=0.01)


def test_heldout_rows_are_the_same_every_time() -> None:
    marks = heldout(np.arange(4000), np.arange(4000))
    assert 0.2 < marks.mean() < 0.3
    assert (marks == heldout(np.arange(4000), np.arange(4000))).all()


@pytest.mark.skipif(not RAW.is_dir(), reason="the raw measurements are not shipped")
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "bf16") for name in TABLES] + [(name, "fp8") for name in ("h100", "h200", "b200")]
)
def test_stated_error_on_heldout_products(name: str, dtype: str) -> None:
    """The held-out error in the file is what its rounded constants give on the raw rows: near 5 %.

    The rows were run at the full clock or at the power limit: each is compared with the nearer of both prices. Some operands
    stayed in the cache, which `beside` has the numbers of, and, where prices have another, the limit
    that the fit took.
    """
    profile, gpu = load_profile(name), load_gpu(load_profile(name).gpu)
    table, stated, prefix = products(RAW, name, dtype), profile.provenance["gemm"], "" if dtype == "bf16" else f"{dtype} "
    table = table[heldout(table.m, table.n, table.k) & (table.m >= 512)]
    m, n, k, seconds = (table[column].to_numpy(float) for column in ("m", "n", "k", "seconds"))
    limit = stated.beside.get(f"{prefix}sustained", stated.beside.get("sustained", profile.gemm[dtype].sustained))
    curve = profile.gemm[dtype].model_copy(update={"sustained": limit})
    beside = {key.removeprefix(prefix): value for key, value in stated.beside.items() if key.startswith(prefix)}
    clusters = DISPATCH[gpu.name] if dtype == "fp8" else ()
    free, limited = benchmarked(curve, beside, gpu, dtype, (m, n, k), profile.throttling, clusters)
    predicted = np.where(table.sustained, limited, nearest(free, limited, seconds))
    error = float(np.median(np.abs(predicted / seconds - 1)))
    assert error == pytest.approx(stated.errors[f"{prefix}large"], abs=0.002)
    assert error < (0.055 if dtype == "bf16" else 0.065)


def _product_seconds(dtype: str, shape: tuple[int, int, int], gpu: Gpu) -> float:
    """Seconds of a product on a board of H100s at its power limit."""
    (m, n, k), width = shape, 1.0 if dtype == "fp8" else 2.0
    kernel = Kernel("gemm", "product", "forward", 2.0 * m * n * k, width * (m * k + k * n) + 2.0 * m * n, dtype, (1, m, n, k))
    return Prices(load_profile("h100"), gpu).seconds(kernel)


def test_hopper_products_of_normally_distributed_operands_take_as_long_as_published_at_a_limit_of_500_w() -> None:
    """TFLOP/s of products (m, n, k) of torch.randn that ran for 0.1 s on an H100 of 500 W: in bf16 by cuBLAS, in fp8 by a Triton
    kernel (github.com/pytorch/FBGEMM pull request 2546, its fp8_gemm_benchmark.py). Nothing is fitted to them.
    """
    published = {
        (8192, 8192, 8192): {"bf16": 585.23, "fp8": 1125.51},
        (65536, 8192, 7168): {"bf16": 575.12, "fp8": 1082.75},
        (65536, 3584, 8192): {"bf16": 546.31, "fp8": 1141.38},
    }
    gpu = load_gpu("h100-sxm").model_copy(update={"power": 500.0})
    for dtype, middle in (("bf16", 0.0), ("fp8", 0.054)):
        off = [
            _product_seconds(dtype, (m, n, k), gpu) * rates[dtype] * 1e12 / (2.0 * m * n * k) - 1
            for (m, n, k), rates in published.items()
        ]
        assert np.median(off) == pytest.approx(middle, abs=0.015)
        assert np.max(np.abs(off)) < 0.06


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_hopper_fp8_products_at_the_limit_take_as_long_as_by_cublas(name: str) -> None:
    """Seconds of products (m, n, k) with the cast of the activation, both operands from normally distributed numbers, on an H100
    and an H200: five of the 250 that the limit is of (TensorRT-LLM 1.3.0rc20, in aiconfigurator-core 0.12.0).
    """
    measured = {
        (8192, 65536, 51200): {"h100": 0.040188, "h200": 0.042341},
        (16384, 51200, 51200): {"h100": 0.065173, "h200": 0.066081},
        (16384, 65536, 10240): {"h100": 0.016787, "h200": 0.016885},
        (32768, 51200, 5120): {"h100": 0.013413, "h200": 0.013244},
        (32768, 51200, 16384): {"h100": 0.042118, "h200": 0.042599},
    }
    profile, gpu = load_profile(name), load_gpu(f"{name}-sxm")
    beside = {
        key.removeprefix("fp8 "): value for key, value in profile.provenance["gemm"].beside.items() if key.startswith("fp8 ")
    }
    m, n, k = np.array(list(measured), float).T
    predicted = benchmarked(profile.gemm["fp8"], beside, gpu, "fp8", (m, n, k), profile.throttling)[1]
    off = predicted / np.array([seconds[name] for seconds in measured.values()]) - 1
    assert np.median(off) == pytest.approx(0, abs=0.035)
    assert np.max(np.abs(off)) < 0.06


def test_hopper_fp8_products_take_as_long_as_published_of_cublas() -> None:
    """Median microseconds of products (m, n, k) in fp8 by cuBLAS on an H100, one after the other, of which the first took 14 to
    23 % less (github.com/pytorch/FBGEMM pull request 2764, which says neither operands nor limit). Nothing is fitted to them.
    """
    published = {
        (4176, 12288, 4096): 310.302,
        (4176, 4096, 12288): 330.399,
        (3456, 6144, 4096): 131.935,
        (3456, 4096, 6144): 138.687,
        (3456, 4096, 4096): 89.279,
    }
    gpu = load_gpu("h100-sxm")
    off = [_product_seconds("fp8", shape, gpu) / (microseconds * 1e-6) - 1 for shape, microseconds in published.items()]
    assert np.median(off) == pytest.approx(0.066, abs=0.02)
    assert np.max(np.abs(off)) < 0.1


def test_backward_products_in_fp8_take_longer_where_sums_leave_the_tensor_cores() -> None:
    """1.15 times at the highest clock; at the limit of its board an H100 has a higher clock meanwhile. A B200 adds up in fp32."""
    m, n, k = 8192, 8192, 8192
    kernel = Kernel("gemm", "product", "forward", 2.0 * m * n * k, 1.0 * (m * k + k * n) + 2.0 * m * n, "fp8", (1, m, n, k))
    stretches = {}
    for gpu in ("h100-sxm", "h200-sxm", "b200-sxm"):
        prices = Prices(profile_for(gpu), load_gpu(gpu))
        stretches[gpu] = prices.seconds(replace(kernel, phase="backward")) / prices.seconds(kernel)
        assert prices.seconds(replace(kernel, phase="recompute")) == prices.seconds(kernel)
    assert stretches == {"h100-sxm": pytest.approx(1.055, abs=0.01), "h200-sxm": pytest.approx(1.055, abs=0.01), "b200-sxm": 1}


def test_fp8_products_take_as_long_on_gpus_with_the_same_multiprocessors() -> None:
    """H100 and H200 differ by their memory alone; their prices are fitted to tables of two machines."""
    for m, n, k in ((8192, 8192, 8192), (8192, 28672, 8192), (8192, 8192, 28672), (4096, 4096, 4096)):
        kernel = Kernel("gemm", "product", "forward", 2.0 * m * n * k, 1.0 * (m * k + k * n) + 2.0 * m * n, "fp8", (1, m, n, k))
        h100, h200 = (Prices(load_profile(name), load_gpu(f"{name}-sxm")).seconds(kernel) for name in ("h100", "h200"))
        assert h100 == pytest.approx(h200, rel=0.03)


@pytest.mark.skipif(not RAW.is_dir(), reason="the raw measurements are not shipped")
@pytest.mark.parametrize("name", NORMAL)
def test_products_of_normally_distributed_operands_are_in_the_middle_of_what_was_measured(name: str) -> None:
    """Also those that add to a sum, which had no say; by the prices themselves, not by the fit, with the limit of their board."""
    profile = load_profile(name)
    own = profile.gemm["bf16"].model_copy(update={"sustained": profile.provenance["gemm"].beside["normal sustained"]})
    profile = profile.model_copy(update={"gemm": profile.gemm | {"bf16": own}})
    prices, table = Prices(profile, load_gpu(profile.gpu)), normal_products(RAW, NORMAL[name])
    for summed in (False, True):
        rows = table[(table[["m", "n", "k"]].min(axis=1) >= LARGE) & ((table.summed > 0) == summed)]
        off = []
        for m, n, k, seconds, width in zip(rows.m, rows.n, rows.k, rows.seconds, rows.summed, strict=True):
            moved = 2.0 * (m * k + k * n) + (2 * width if summed else 2) * m * n
            kernel = Kernel("gemm", "product", "backward", 2.0 * m * n * k, moved, "bf16", (1, int(m), int(n), int(k)))
            off.append(seconds / prices.seconds(kernel) - 1)
        assert len(off) > 90
        assert np.median(off) == pytest.approx(0, abs=0.02)
        assert np.median(np.abs(off)) < 0.03


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in amd_products.TYPICAL for dtype in amd_products.TYPES])
def test_products_of_amd_together_take_as_long_as_published(name: str, dtype: str) -> None:
    prices = Prices(load_profile(name), load_gpu(name))
    assert amd_products.attained(prices, dtype) == pytest.approx(amd_products.TYPICAL[name][dtype], rel=1e-3)


@pytest.mark.parametrize(("kept_out", "error"), [(False, 0.07), (True, 0.04)])
def test_single_products_of_cdna_4_are_as_far_off_as_stated(kept_out: bool, error: float) -> None:
    prices = Prices(load_profile("mi355x"), load_gpu("mi355x"))
    assert np.median(np.abs(amd_products.errors(prices, kept_out))) == pytest.approx(error, abs=0.005)


@pytest.mark.parametrize(("name", "measured"), amd_attention.MEASURED.items())
def test_attention_of_amd_is_as_far_off_the_published_rates_as_it_says(name: str, measured: str) -> None:
    """Rows of 32 heads, which nothing was fitted to; a training step's own, 8,192 tokens of 64 heads, in both passes."""
    profile = load_profile(name)
    prices, stated = Prices(profile, load_gpu(name)), profile.provenance["attention"].errors
    shape, *seconds = amd_attention.measured(measured)
    errors = []
    for phase, taken in zip(("forward", "backward"), seconds, strict=True):
        kernels = [_attention(phase, tuple(int(size[row]) for size in shape)) for row in range(len(taken))]
        errors.append(taken / np.array([prices.seconds(kernel) for kernel in kernels]) - 1)
        assert np.median(np.abs(errors[-1][shape[1] == 32])) == pytest.approx(stated[phase], rel=0.02)
    long = (shape[1] == 64) & (shape[3] == 8192)
    assert max(np.abs(error[long]).max() for error in errors) < 0.1


def _attention(phase: str, shape: tuple[int, ...]) -> Kernel:
    batch, heads, _, queries, keys, width, _ = shape
    flops = (2.0 if phase == "forward" else 5.0) * batch * heads * queries * keys * width
    return Kernel(f"attention_{phase}", "attention", phase, flops, 1.0, "bf16", shape)


@pytest.mark.parametrize("gpu", training_attention.PRICED)
def test_attention_of_training_is_as_far_off_the_published_times_as_it_says(gpu: str) -> None:
    """Both passes at the highest clock; a training step's own, causal, 8,192 tokens, within a tenth where it was fitted to."""
    profile = load_profile(training_attention.PROFILE)
    stated = profile.provenance["attention"].errors
    for curve in [profile.attention_of[entry] for entry in training_attention.PRICED[gpu]] or [profile.attention]:
        for what in training_attention.SETS:
            off = training_attention.errors(curve, load_gpu(gpu), what, gpu)
            assert np.median(np.abs(off)) == pytest.approx(stated[f"{gpu} {what}"], rel=0.03)
            assert what != "fit" or abs(off[2]) < 0.1


def test_exponentials_of_a_gb300_take_half_as_long() -> None:
    """NVIDIA: twice the units."""
    profile = load_profile("b200")
    assert profile.attention.head_half / profile.attention_of["gb300"].head_half == pytest.approx(2, rel=0.15)


def test_attention_of_a_b200_follows_from_a_gb200s() -> None:
    """Times of an older cuDNN, which nothing was fitted to, with PyTorch's call around: 8,192 to 131,072 tokens."""
    prices = Prices(load_profile("b200"), load_gpu("b200-sxm"))
    off = [
        1e-3 * taken / prices.seconds(_attention(phase, (1, 128, 8, length, length, 128, 1))) - 1
        for length, both in training_attention.B200.items()
        for phase, taken in zip(("forward", "backward"), both, strict=True)
    ]
    assert max(map(abs, off)) < 0.15


@pytest.mark.parametrize("name", CLUSTERS)
def test_links_are_those_of_the_machine_that_was_measured(name: str) -> None:
    measured = load_profile(name).provenance["links"].measured_range
    of_node = ranges([Row("", "all_reduce", 2, 1, 1.0, 1.0)], load_cluster(CLUSTERS[name]))
    assert {kind: measured[kind] for kind in ("nvlink", "pcie") if kind in measured} == {
        kind: of_node[kind] for kind in ("nvlink", "pcie") if kind in of_node
    }
