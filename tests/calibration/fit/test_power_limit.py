"""A GPU's own calibration keeps the physics that bursts of single products do not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from calibration.execute.limits import ready
from calibration.fit.machine.kernels import PHYSICS
from calibration.fit.machine.profile import Fit
from calibration.gpu_day.stages import SETS
from calibration.samples import Merged
from calibration.validation_set import read_set
from shardyard import read_job
from sim.pricing.kernel_curves import AttentionCurve, Ordered, attention_backward_seconds, attention_seconds
from sim.pricing.prices import Prices, Profile
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from strategies.predict import predict
from tests.calibration.conftest import case
from topologies.cluster import Cluster
from topologies.cluster_files import inline_cluster, load_cluster

pytestmark = pytest.mark.usefixtures("one_search")
H100, V100 = load_profile("h100"), load_profile("v100")
CLUSTER = load_cluster("dgx-h100")
HEAD = {"device": "cuda", "machine": "NVIDIA H100 80GB HBM3", "versions": "torch", "ranks": 8}


def product(m: int, n: int, k: int) -> Kernel:
    """A bf16 product whose operands are read once and whose result is written once."""
    return Kernel("gemm", "", "forward", 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), "bf16", (1, m, n, k))


def bursts(dtype: str = "bf16") -> list[Merged]:
    """Products as short bursts show them: at the highest clock, which no power limit holds down."""
    cool = H100.model_copy(
        update={"gemm": {name: curve.model_copy(update={"sustained": 1.0}) for name, curve in H100.gemm.items()}}
    )
    prices = Prices(cool, CLUSTER.node.gpu)
    shapes = [(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 16384) for k in (1024, 8192)]
    return [
        case("gemm", prices.seconds(product(m, n, k)), batch=1, m=m, n=n, k=k, dtype=dtype, layout="forward")
        for m, n, k in shapes
    ]


def pressed(late: float, early: float, side: int = 8192) -> list[Merged]:
    """Products without a pause."""
    sizes = {"dtype": "bf16", "side": float(side)}
    sensors = (("late", late), ("early", early), ("clock", 1400.0), ("power limit", 1.0))
    return [case("sustained", value, kind=kind, **sizes) for kind, value in sensors]


def fitted(samples: Sequence[Merged], base: Profile = H100, cluster: Cluster = CLUSTER) -> Fit:
    """A fit to these."""
    fit = Fit(base, cluster, HEAD, samples)
    fit.all("mine")
    return fit


def test_the_power_limit_and_what_was_not_measured_stay() -> None:
    old = H100.gemm["bf16"].model_copy(update={"early": {"bf16": 0.5}, "batched": 0.9})
    mine = fitted(bursts(), H100.model_copy(update={"gemm": dict(H100.gemm) | {"bf16": old}})).result.profile
    new = mine.gemm["bf16"]
    assert [getattr(new, name) for name in PHYSICS] == [getattr(old, name) for name in PHYSICS]
    assert mine.gemm["fp8"] == H100.gemm["fp8"]
    job = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=dict(data_parallel="zero3", global_batch=16, sequence=4096))
    shipped, own = predict(job, H100), predict(job, mine)
    assert own.step_seconds == pytest.approx(shipped.step_seconds, rel=0.03)
    hot = H100.model_copy(update={"gemm": {"bf16": H100.gemm["bf16"].model_copy(update={"sustained": 1.0, "byte_energy": 0.0})}})
    assert predict(job, hot).step_seconds < 0.95 * shipped.step_seconds  # what leaving it out would do


def test_a_limit_that_was_measured_replaces_the_one_of_others() -> None:
    """A board whose clock falls further: its product of 8,192 takes 1.3 times as long once it is warm, and is priced so."""
    cold = Prices(H100, CLUSTER.node.gpu).seconds(product(8192, 8192, 8192))
    late = 1.3 * cold
    fit = fitted([*bursts(), *pressed(late, cold)])
    mine = fit.result.profile
    assert mine.gemm["bf16"].sustained < H100.gemm["bf16"].sustained
    assert Prices(mine, CLUSTER.node.gpu).seconds(product(8192, 8192, 8192)) == pytest.approx(late, rel=0.01)
    assert any("+30.0% once the device is warm (1400 MHz, power limit)" in note for note in fit.result.notes)


def test_a_board_that_does_not_slow_down_is_not_said_to_be_at_its_limit() -> None:
    cool = bursts()
    early = next(sample.value for sample in cool if sample.case["m"] == sample.case["k"] == 8192 and sample.case["n"] == 4096)
    mine = fitted([*cool, *pressed(2 * early, 1.999 * early)]).result.profile
    assert mine.gemm["bf16"].sustained >= H100.gemm["bf16"].sustained


def test_a_type_that_others_did_not_measure_is_held_down_as_the_one_that_stands_in_for_it() -> None:
    """H100's profile has bf16 and fp8; fp16 draws what bf16 does."""
    mine = fitted(bursts("fp16")).result.profile
    assert "fp16" not in H100.gemm
    new, old = mine.gemm["fp16"], H100.gemm["bf16"]
    assert (new.sustained, new.byte_energy, new.aligned) == (old.sustained, old.byte_energy, old.aligned)


def attention(variant: str, dtype: str = "bf16", ordered: bool = False, backward: bool = False) -> Kernel:
    """Causal, 2 × 16 heads of 128, 4,096 tokens."""
    kind, shape = ("attention_backward" if backward else "attention_forward"), (2, 16, 16, 4096, 4096, 128, 1)
    flops = 4.0 * 2 * 16 * 4096 * 4096 * 128 / 2 * (2.5 if backward else 1.0)
    return Kernel(kind, "attention", "forward", flops, 1e8, dtype, shape, variant, ordered=ordered)


def test_what_is_not_measured_of_a_board_with_another_power_limit_is_priced_as_before() -> None:
    """A PCIe board with half the watts of the one whose prices are its own, too, until it is measured."""
    cluster = inline_cluster({"name": "board", "node": {"gpu": "h100-pcie", "gpus": 1, "wiring": "bare"}}, "board")
    before = Prices(H100, cluster.node.gpu)
    after = Prices(fitted([], cluster=cluster).result.profile, cluster.node.gpu)
    assert after.profile.gpu == "h100-pcie"
    large = product(8192, 8192, 8192)
    assert before.seconds(large) > 1.2 * Prices(H100.model_copy(update={"gpu": "h100-pcie"}), cluster.node.gpu).seconds(large)
    for kernel in (large, replace(large, dtype="fp8"), attention(""), attention("sdpa"), attention("flash2", backward=True)):
        assert after.seconds(kernel) == pytest.approx(before.seconds(kernel), rel=1e-9)


def passes(curve: AttentionCurve, dtype: str, peak: float, sms: int) -> list[Merged]:
    """scaled_dot_product_attention as it would be measured where this is its curve."""
    result = []
    for batch, heads, length, dim in (
        (4, 16, 1024, 128),
        (2, 32, 2048, 64),
        (1, 16, 4096, 128),
        (1, 32, 8192, 128),
        (8, 16, 512, 64),
    ):
        forward = attention_seconds(curve, peak, sms, (batch, heads, heads, length, length, dim, 1))
        sizes = {"batch": batch, "heads": heads, "sequence": length, "head_dim": dim, "dtype": dtype}
        both = (("forward", forward), ("backward", attention_backward_seconds(curve, forward)))
        result += [case("attention", float(value), way=way, **sizes) for way, value in both]
    return result


def test_pytorchs_attention_is_measured_and_the_fastest_kernel_keeps_its_price() -> None:
    """On an H100 FlashAttention-3 is twice as fast as what scaled_dot_product_attention calls, which `execute` runs."""
    gpu = CLUSTER.node.gpu
    true = H100.older["sdpa"].model_copy(update={"efficiency": 0.8 * H100.older["sdpa"].efficiency})
    fit = fitted(passes(true, "bf16", gpu.peak["bf16"], gpu.sms))
    mine = Prices(fit.result.profile, gpu)
    assert (fit.result.profile.attention, fit.result.profile.older["flash2"]) == (H100.attention, H100.older["flash2"])
    right = attention_seconds(true, gpu.peak["bf16"], gpu.sms, attention("sdpa").shape)
    assert mine.seconds(attention("sdpa")) == pytest.approx(float(right), rel=0.05)
    assert mine.seconds(attention("")) == Prices(H100, gpu).seconds(attention(""))
    assert mine.extrapolation(attention("sdpa")) is None
    assert fit.result.points["attention"]
    (job,) = read_set(str(SETS / "cuda-gpt2.yaml"), (), ["DDP"], cluster="dgx-h100")
    assert ready(job).plan.attention == "sdpa"


def test_where_nobody_measured_attention_pytorchs_is_the_price_of_all() -> None:
    """A V100's was assumed. The order of sums, which is not measured, stays."""
    gpu = load_cluster("dgx-1v").node.gpu
    base = V100.model_copy(update={"attention": V100.attention.model_copy(update={"ordered": Ordered(rate=0.8)})})
    true = V100.attention.model_copy(update={"efficiency": 0.3})
    mine = fitted(passes(true, "fp16", gpu.peak["fp16"], gpu.sms), base, load_cluster("dgx-1v")).result.profile
    assert mine.attention == mine.older["sdpa"]
    assert mine.attention.ordered == Ordered(rate=0.8)
    assert mine.attention.efficiency < 0.9 * V100.attention.efficiency
