"""A GPU's own calibration keeps the physics that bursts of single products do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from calibration.fit.machine import kernels
from calibration.fit.machine.profile import Fit
from calibration.samples import Merged
from shardyard import read_job
from sim.pricing.prices import Prices, Profile
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from strategies.predict import predict
from tests.calibration.conftest import case
from topologies.cluster_files import load_cluster

H100 = load_profile("h100")
CLUSTER = load_cluster("dgx-h100")
HEAD = {"device": "cuda", "machine": "NVIDIA H100 80GB HBM3", "versions": "torch", "ranks": 8}


@pytest.fixture(scope="module", autouse=True)
def _one_search() -> Iterator[None]:
    """The same products, whose curve is searched for once."""
    known: dict[tuple[float, ...], dict[str, float]] = {}
    search: Callable[..., dict[str, float]] = kernels.search

    def once(price: Any, bounds: Any, seconds: Any, out: Any) -> dict[str, float]:
        key = tuple(seconds)
        if key not in known:
            known[key] = search(price, bounds, seconds, out)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "search", once)
        yield


def product(m: int, n: int, k: int) -> Kernel:
    """A bf16 product whose operands are read once and whose result is written once."""
    return Kernel("gemm", "", "forward", 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), "bf16", (1, m, n, k))


def bursts() -> list[Merged]:
    """Products as short bursts show them: at the highest clock, which no power limit holds down."""
    cool = H100.model_copy(
        update={"gemm": {name: curve.model_copy(update={"sustained": 1.0}) for name, curve in H100.gemm.items()}}
    )
    prices = Prices(cool, CLUSTER.node.gpu)
    shapes = [(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 16384) for k in (1024, 8192)]
    return [
        case("gemm", prices.seconds(product(m, n, k)), batch=1, m=m, n=n, k=k, dtype="bf16", layout="forward")
        for m, n, k in shapes
    ]


def pressed(late: float, early: float, side: int = 8192) -> list[Merged]:
    """Products without a pause."""
    sizes = {"dtype": "bf16", "side": float(side)}
    return [case("sustained", value, kind=kind, **sizes) for kind, value in (("late", late), ("early", early), ("clock", 1400.0))]


def fitted(samples: Sequence[Merged], base: Profile = H100) -> Fit:
    """A fit to these."""
    fit = Fit(base, CLUSTER, HEAD, samples)
    fit.all("mine")
    return fit


def test_the_power_limit_and_what_was_not_measured_stay() -> None:
    old = H100.gemm["bf16"].model_copy(update={"early": {"bf16": 0.5}})
    mine = fitted(bursts(), H100.model_copy(update={"gemm": dict(H100.gemm) | {"bf16": old}})).result.profile
    new = mine.gemm["bf16"]
    assert (new.sustained, new.byte_energy, new.aligned, new.early) == (old.sustained, old.byte_energy, old.aligned, old.early)
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
    assert any("+30.0% once the device is warm (1400 MHz)" in note for note in fit.result.notes)


def test_a_board_that_does_not_slow_down_is_not_said_to_be_at_its_limit() -> None:
    cool = bursts()
    early = next(sample.value for sample in cool if sample.case["m"] == sample.case["k"] == 8192 and sample.case["n"] == 4096)
    mine = fitted([*cool, *pressed(2 * early, 1.999 * early)]).result.profile
    assert mine.gemm["bf16"].sustained >= H100.gemm["bf16"].sustained
