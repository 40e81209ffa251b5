"""Fits of samples whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from calibration.fit.machine.kernels import WIDTH, class_tables, fit_attention, fit_gemm, fit_memory, operator_tables
from calibration.fit.machine.links import _points, fit_links
from calibration.fit.machine.tables import errors, leave_out, narrow_sum, rows, tables
from calibration.fit.published_collectives.rows import Row
from sim.pricing.kernel_curves import AttentionCurve, GemmCurve, Product, Rates, Tile, attention_seconds, gemm_clocks
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from sim.program import Kernel
from tests.calibration.conftest import case, collective
from topologies.cluster_files import load_cluster, load_gpu
from topologies.reading import UserError

CORE = load_gpu("cpu-core")

LAUNCH = 3e-6


def test_products_of_a_known_core_are_found_again() -> None:
    tile = Tile.model_construct(m=8, n=8, efficiency=1.0)
    truth = GemmCurve.model_construct(
        efficiency=0.7, depth=40.0, wave=0.0, split=0.0, memory=0.5, blend=4.0, fixed=2e-6, tiles=(tile,)
    )
    samples, rates = [], Rates(CORE.peak["fp32"], CORE.memory_bandwidth, 1)
    for m in (60, 256, 1024):
        for n in (100, 512, 2048):
            for k in (64, 384, 1024):
                traffic = WIDTH["fp32"] * (m * k + k * n), WIDTH["fp32"] * m * n
                price = gemm_clocks(truth, rates, Product((1, m, n, k), traffic))[1]
                samples.append(case("gemm", LAUNCH + price, batch=1, m=m, n=n, k=k, dtype="fp32", layout="forward"))
    _, points = fit_gemm(samples, CORE, "fp32", LAUNCH)
    out = [abs(point.error) for point in points if point.heldout]
    assert 8 < len(out) < 20
    assert np.median(out) < 0.02


def test_attention_of_a_known_core_is_found_again() -> None:
    truth = AttentionCurve.model_construct(
        efficiency=0.4, head_half=20.0, keys_half=50.0, keys_block=512, block=1, wave=0.0, fixed=0.0, backward=0.7
    )
    samples = []
    for batch, heads, length, dim in ((1, 4, 128, 64), (2, 8, 256, 32), (1, 8, 512, 64), (1, 12, 1024, 128), (2, 4, 384, 96)):
        shape = (batch, heads, heads, length, length, dim, 1)
        forward = attention_seconds(truth, CORE.peak["fp32"], 1, shape)
        for way, price in (("forward", forward), ("backward", forward * 2.5 / 0.7)):
            sizes = {"batch": batch, "heads": heads, "sequence": length, "head_dim": dim}
            samples.append(case("attention", LAUNCH + price, way=way, dtype="fp32", **sizes))
    curve, points = fit_attention(samples, CORE, "fp32", LAUNCH)
    assert curve.backward == pytest.approx(0.7, rel=0.02)
    assert max(abs(point.error) for point in points) < 0.03


def test_memory_rates_and_fixed_time_are_found_again() -> None:
    sizes = [2.0**power for power in range(14, 27)]
    rates = {"scale": 20e9, "softmax": 8e9}
    samples = [
        case("memory", LAUNCH + 1e-6 + size / rate, kind=kind, bytes=size) for kind, rate in rates.items() for size in sizes
    ]
    curve, points = fit_memory(samples, CORE, LAUNCH)
    assert curve.efficiency * CORE.memory_bandwidth == pytest.approx(20e9, rel=0.01)
    assert curve.reduction * CORE.memory_bandwidth == pytest.approx(8e9, rel=0.01)
    assert curve.fixed == pytest.approx(1e-6, rel=0.1)
    assert {point.series for point in points} == {"streams", "reductions"}


def test_operators_are_priced_as_measured_between_sizes() -> None:
    """A kernel that names an operator takes its table, without the launch that a synchronous host adds to every kernel."""
    sizes = [2**power for power in range(14, 27)]
    kinds = ("gelu", "copy", "scale", "softmax")
    truth = {size: 1e-6 + size / 7e9 for size in sizes}
    samples = [case("memory", LAUNCH + truth[size], kind=kind, bytes=float(size)) for kind in kinds for size in sizes]
    tables, points = operator_tables(samples, LAUNCH)
    assert set(tables) == {"gelu", "softmax"}
    assert tables["gelu"].seconds(sizes[5]) == pytest.approx(1e-6 + sizes[5] / 7e9)
    assert tables["gelu"].seconds(2 * sizes[-1]) == pytest.approx(2 * (1e-6 + sizes[-1] / 7e9), rel=1e-3)
    assert max(abs(point.error) for point in points if point.heldout) < 0.05
    curve = fit_memory(samples, CORE, LAUNCH)[0].model_copy(update={"operators": tables})
    profile = load_profile("cpu-gloo").model_copy(update={"memory": curve, "launch": LAUNCH})
    prices = Prices(profile, CORE)
    named, plain = (Kernel("memory", "activation", "forward", 0.0, float(sizes[5]), "fp32", (), name) for name in ("gelu", ""))
    assert prices.seconds(named) == tables["gelu"].seconds(sizes[5])
    assert prices.seconds(plain) != prices.seconds(named)


def test_a_core_streams_faster_from_its_caches_than_from_memory() -> None:
    """Operators without a table of their own share one, whose rate changes with the size; what has a fraction keeps it."""
    cached, memory, edge = 60e9, 20e9, 2**21

    def truth(size: float) -> float:
        return min(size, edge) / cached + max(0.0, size - edge) / memory

    sizes = [2.0**power for power in range(14, 27)]
    samples = [case("memory", LAUNCH + truth(size), kind=kind, bytes=size) for kind in ("copy", "scale") for size in sizes]
    samples += [case("memory", LAUNCH + 2 * truth(size), kind="softmax", bytes=size) for size in sizes]
    tables, points = class_tables(samples, LAUNCH)
    assert np.median([abs(point.error) for point in points if point.heldout]) < 0.02  # more only at the knee
    curve = fit_memory(samples, CORE, LAUNCH)[0].model_copy(update={"operators": tables, "fractions": {"zeros": 0.5}})
    prices = Prices(load_profile("cpu-gloo").model_copy(update={"memory": curve, "crowding": {}}), CORE)

    def seconds(kind: str, label: str, size: float) -> float:
        return prices.seconds(Kernel(kind, label, "backward", 0.0, size, "fp32"))

    assert seconds("memory", "sum", 2.0**15) == pytest.approx(2**15 / cached)
    assert seconds("memory", "sum", 2.0**28) == pytest.approx(4 * truth(2.0**26))
    assert seconds("reduction", "rows", 2.0**24) == pytest.approx(2 * truth(2.0**24))
    assert seconds("memory", "zeros", 2.0**24) == pytest.approx(curve.fixed + 2**24 / (0.5 * CORE.memory_bandwidth))


def test_operators_of_a_size_are_one_by_their_geometric_mean() -> None:
    """Half and twice of 1 µs are 1 µs."""
    sizes = (2.0**16, 2.0**18, 2.0**20, 2.0**22)
    samples = [
        case("memory", LAUNCH + factor * size / 20e9, kind=kind, bytes=size)
        for kind, factor in (("copy", 0.5), ("binary", 2.0))
        for size in sizes
    ]
    tables, points = class_tables(samples, 0.0)
    assert tables["memory"].seconds(2.0**22) == pytest.approx(2**22 / 20e9, rel=0.02)
    assert {point.series for point in points} == {"streams"}


def test_table_carries_both_prices_and_follows_a_knee() -> None:
    def knee(size: float) -> float:
        return 1e-4 + size / 2e9 + max(0.0, size - 2**21) / 0.7e9

    (table,) = tables(collective(knee))
    assert (table.operation, table.algorithm, table.ranks) == ("all_reduce", "ring", 2)
    assert table.seconds(2**20) == pytest.approx(2 * knee(2**20))
    assert table.seconds(2**20, alone=True) == pytest.approx(knee(2**20))
    assert table.seconds(1.5 * 2**20) == pytest.approx(2 * knee(1.5 * 2**20), rel=0.1)
    assert table.seconds(16) == pytest.approx(2 * knee(2**10))
    assert table.seconds(2**28) == pytest.approx(4 * table.seconds(2**26))
    assert table.covers(2**26)
    assert not table.covers(2**27)


def test_numbers_of_16_bits_take_longer_to_add_up_than_their_bytes() -> None:
    """Two ranks add up half of the numbers each: 4 Mi numbers of 2 bytes are 2 Mi sums, of 2 ns beyond their bytes."""
    samples = collective(lambda size: size / 1e9)
    assert narrow_sum(samples) == 0.0
    sizes = {"operation": "all_reduce", "bytes": 2.0**23, "ranks": 2, "nodes": 1, "dtype": "fp16"}
    samples.append(case("collective", 2**23 / 1e9 + 2**21 * 2e-9, **sizes))
    assert narrow_sum(samples) == pytest.approx(2e-9)
    assert len(tables(samples)[0].prices) == 17, "a price of its own, not an entry of the table"


def test_error_on_left_out_sizes_is_that_of_interpolation() -> None:
    """A power of the size is a straight line in logarithms: nothing is lost. A line with a latency bends."""
    power, line = (collective(f) for f in (lambda size: 1e-9 * size**0.8, lambda size: 4e-4 + size / 2e9))
    assert errors(leave_out(power))["all"] == pytest.approx(0, abs=1e-9)
    assert 0.001 < errors(leave_out(line))["p90"] < 0.2
    assert not any(point.heldout for point in (leave_out(line)[0], leave_out(line)[-1]))


def test_prices_never_fall_as_sizes_grow() -> None:
    """A size that took less than a smaller one is noise: both get their mean (of the logarithms)."""
    noisy = {2.0**10: 1e-4, 2.0**11: 4e-4, 2.0**12: 1e-4}
    (table,) = tables(collective(lambda size: noisy.get(size, 1.0)))
    assert [entry.alone for entry in table.prices[:3]] == pytest.approx([1e-4, 2e-4, 2e-4])
    assert max(abs(point.error) for point in leave_out(collective(lambda size: noisy.get(size, 1.0)))[:3]) > 0.4


def test_formula_is_fitted_to_latency_and_bandwidth_of_gloo() -> None:
    """A ring of two sends S bytes: 1.8 GB/s alone is half as much in a step."""
    measured = rows(collective(lambda size: 0.4e-3 + size / 1.8e9))
    cluster = load_cluster("cpu-gloo")
    profile, points = fit_links(measured, load_profile("cpu-gloo"), cluster)
    assert profile.links["loopback"].efficiency * cluster.node.loopback == pytest.approx(0.9e9, rel=0.05)
    assert np.median([abs(point.error) for point in points if point.heldout]) < 0.02


def test_all_reduces_of_eight_gpus_alone_say_what_launches_take() -> None:
    """A machine that launches 20 µs later: large ones run in the switch, small ones by rings and trees, whose steps stay."""
    known, cluster = load_profile("h100"), load_cluster("dgx-h100")
    sizes = [float(2**power) for power in range(12, 32)]
    before = _points([Row("log", "all_reduce", 8, 1, size, 1.0) for size in sizes], [], known, cluster)
    measured = [Row("log", "all_reduce", 8, 1, point.bytes, point.predicted + 20e-6) for point in before]
    profile, points = fit_links(measured, known, cluster)
    assert max(abs(point.error) for point in points) < 0.02
    assert profile.collective_launch - known.collective_launch == pytest.approx(20e-6, rel=0.05)
    assert profile.protocols["ll"].base - known.protocols["ll"].base == pytest.approx(20e-6, rel=0.05)
    assert profile.protocols["ll"].links == known.protocols["ll"].links


def test_too_few_rows_make_no_fit() -> None:
    with pytest.raises(UserError, match="2 measured sizes"):
        fit_links(rows(collective(lambda size: 1e-3))[:2], load_profile("cpu-gloo"), load_cluster("cpu-gloo"))
