"""Whole layers beside the prices of their parts."""

import pytest

from calibration.measure.layer_check import CHECKED, COUNTS, FITTED, PASSES, checks, crowding
from calibration.measure.layer_check import _passes as predicted_passes
from calibration.measure.layer_check import model as small_model
from calibration.samples import Merged
from sim.pricing.prices import Crowding, Prices
from sim.pricing.shipped import load_profile
from sim.pricing.transfers.measured_tables import Wrapping
from sim.program import WRAPPER_COPY, Kernel
from topologies.cluster_files import load_cluster

CLUSTER = load_cluster("cpu-gloo")
PLAIN = load_profile("cpu-gloo").model_copy(update={"crowding": {}})


def measured_by(profile):
    """What would be measured where the profile's prices were true."""
    single = CLUSTER.model_copy(update={"nodes": 1, "node": CLUSTER.node.model_copy(update={"gpus": 1, "nics": 0, "nic": 0.0})})
    prices = Prices(profile, CLUSTER.node.gpu)
    rows = []
    for hidden, tokens in FITTED + CHECKED:
        for count in COUNTS:
            for name, value in zip(PASSES, predicted_passes(small_model(hidden, count), tokens, single, prices), strict=True):
                case = {"hidden": float(hidden), "tokens": float(tokens), "layers": float(count), "passes": name}
                rows.append(Merged("layer", case, "alone", value, value, 0.0, 1, 0))
    return rows


def test_crowding_is_found_that_layers_were_measured_with():
    true = {"forward": Crowding(factor=1.1, rate="9 GB/s"), "backward": Crowding(factor=0.9, rate="6 GB/s")}
    rows = measured_by(PLAIN.model_copy(update={"crowding": true}))
    found, layers = crowding(rows, PLAIN, CLUSTER)
    assert [(check.hidden, check.tokens) for check in layers] == list(FITTED)
    for name in PASSES:
        assert found[name].factor == pytest.approx(true[name].factor, rel=1e-3)
        assert found[name].rate == pytest.approx(true[name].rate, rel=2e-2)
    kept_out = checks(rows, PLAIN.model_copy(update={"crowding": found}), CLUSTER)
    assert [check.error for check in kept_out] == pytest.approx([0.0], abs=1e-3)
    assert checks(rows, PLAIN, CLUSTER)[0].error < -0.05


def test_layers_of_which_a_case_is_missing_are_left_out():
    rows = [row for row in measured_by(PLAIN) if row.case["hidden"] != 256.0 or row.case["passes"] == "forward"]
    assert [check.hidden for check in checks(rows, PLAIN, CLUSTER, FITTED)] == [512, 512]


def test_kernels_of_a_pass_are_crowded_and_updates_are_not():
    crowded = PLAIN.model_copy(update={"crowding": {"forward": Crowding(factor=2.0, rate="49.152 MB/s")}})
    alone, step = Prices(PLAIN, CLUSTER.node.gpu), Prices(crowded, CLUSTER.node.gpu)
    for phase, factor, more in (
        ("forward", 2.0, 1e-3),
        ("recompute", 2.0, 1e-3),
        ("backward", 1.0, 0.0),
        ("optimizer", 1.0, 0.0),
    ):
        # 3 matrices of 64 × 64 numbers: 49,152 bytes
        product = Kernel("gemm", "qkv", phase, 2.0 * 64**3, 3 * 4.0 * 64**2, "fp32", (1, 64, 64, 64))
        passed = Kernel("memory", "residual", phase, 0.0, 1e6, "fp32")
        assert step.seconds(product) == pytest.approx(factor * alone.seconds(product) + more)
        assert step.seconds(passed) == pytest.approx(factor * alone.seconds(passed))


def test_products_of_forward_passes_have_a_curve_of_their_own():
    slower = {"fp32": PLAIN.gemm["fp32"].model_copy(update={"efficiency": PLAIN.gemm["fp32"].efficiency / 2, "memory": 1.0})}
    prices = Prices(PLAIN.model_copy(update={"forward": slower}), CLUSTER.node.gpu)
    shape = (1, 512, 512, 512)
    forward, backward = (
        prices.seconds(Kernel("gemm", "up", phase, 2.0 * 512**3, 0.0, "fp32", shape)) for phase in ("recompute", "backward")
    )
    assert forward > 1.8 * backward


def test_a_pass_over_all_gradients_has_the_rate_that_was_measured_of_it():
    """Also in the middle of a backward pass whose layers are crowded: it was measured beyond caches."""
    fractions = PLAIN.memory.fractions | {"gradient norm": 0.5, "gradient cast": 0.25}
    prices = Prices(
        PLAIN.model_copy(update={"memory": PLAIN.memory.model_copy(update={"fractions": fractions})}), CLUSTER.node.gpu
    )
    seconds = prices.seconds(Kernel("optimizer", "gradient norm", "optimizer", 0.0, 1e8, "fp32"))
    assert seconds == pytest.approx(PLAIN.memory.fixed + 1e8 / (0.5 * CLUSTER.node.gpu.memory_bandwidth))
    crowded = prices.profile.model_copy(update={"crowding": {"backward": Crowding(factor=0.7)}})
    cast = Kernel("memory", "gradient cast", "backward", 0.0, 1e8, "fp32")
    for profile in (prices.profile, crowded):
        assert Prices(profile, CLUSTER.node.gpu).seconds(cast) == pytest.approx(2 * seconds, rel=1e-3)


def test_copies_of_a_wrapper_are_in_its_own_price_where_that_was_measured():
    """Else they are passes over memory as any other."""
    copy = Kernel("memory", "gathered", "forward", 0.0, 1e6, "fp32", variant=WRAPPER_COPY)
    passed = Kernel("memory", "gathered", "forward", 0.0, 1e6, "fp32")
    wrapped = {"dp/all_gather": Wrapping.model_construct(fixed=1e-4, rate=1e9)}
    for wrapping, expected in ((wrapped, 0.0), ({}, Prices(PLAIN, CLUSTER.node.gpu).seconds(passed))):
        profile = PLAIN.model_copy(update={"wrapping": wrapping})
        assert Prices(profile, CLUSTER.node.gpu).seconds(copy) == pytest.approx(expected)
